#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Documentation of the action of the same name; nothing runs on the host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_show
short_description: Print a text as it stands
description:
  - Prints tables and JSON on the terminal without Ansible's indentation and quotes, so that people can read and
    programs can parse them.
  - Runs on the controller and needs no connection to the host.
options:
  text:
    description: What to print.
    type: str
    required: true
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: none
    description: Changes nothing, so there is nothing to show.
  platform:
    platforms: posix
    support: full
    description: Any controller.
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Show the fleet
  sglang_show:
    text: "{{ answers | sglang_status_text }}"
  run_once: true
"""

RETURN = r""" # """
