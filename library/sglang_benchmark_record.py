#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Documentation of the action of the same name; nothing runs on the host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_benchmark_record
short_description: Keep that a candidate of a benchmark did not serve
description:
  - Appends a line of JSON to a file of results on the controller, so that the report says why a configuration has no
    figures.
options:
  results:
    description: File on the controller.
    type: path
    required: true
  context:
    description: What was tried, as the filter C(sglang_bench_candidates) gives it.
    type: dict
    required: true
  cause:
    description: Diagnosed cause, where there is one.
    type: str
    default: ""
  summary:
    description: One sentence.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Writes nothing.
  diff_mode:
    support: none
    description: Changes nothing on hosts.
  platform:
    platforms: posix
    support: full
    description: Any controller.
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Keep why it did not serve
  sglang_benchmark_record:
    results: reports/benchmark/gpu-01.jsonl
    context: "{{ candidate.context }}"
    cause: gpu_oom
"""

RETURN = r""" # """
