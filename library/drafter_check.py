#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Check that a DFlash drafter fits its target, before either is loaded."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: drafter_check
short_description: Check that a DFlash drafter fits its target, before either is loaded
description:
  - Reads config.json of target and drafter and the headers of the drafter's safetensors files, and compares them with
    each other, with the block size and with what the engine's release asks for. Reads no weights, changes nothing.
  - SGLang itself finds some of these mismatches only after the target's load, some in its first batch, and three
    never - a drafter made for a target with another number of layers, another block size, one without C(fc.weight).
options:
  target:
    description: Folder of the target model.
    type: path
    required: true
  drafter:
    description: Folder of the drafter.
    type: path
    required: true
  block_size:
    description: Block size that the engine is started with.
    type: int
    required: true
  version:
    description: SGLang release.
    type: str
    required: true
  instance:
    description: Instance that messages speak of.
    type: str
    default: ""
  mode:
    description: V(fail) fails the task where something does not fit, V(warn) only warns.
    type: str
    choices: [fail, warn]
    default: fail
attributes:
  check_mode:
    support: full
    details: Where the folders are not there yet, nothing is checked and RV(checked) is false.
  diff_mode:
    support: none
author: dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Check that the drafter fits the target
  drafter_check:
    target: /var/lib/sglang/models/moonshotai--Kimi-K2.6/0123456789abcdef0123456789abcdef01234567
    drafter: /var/lib/sglang/models/SubSir--Kimi-K2.6-DFlash-tmp-long/89abcdef0123456789abcdef0123456789abcdef
    block_size: 8
    version: 0.5.20
"""

RETURN = r"""
problems:
  description: What does not fit, each with C(id), C(message) and C(severity).
  returned: always
  type: list
  elements: dict
checked:
  description: Whether the folders were there to be checked.
  returned: always
  type: bool
stand_in:
  description: Whether the drafter is a rehearsal stand-in, whose file declares shapes that it does not have.
  returned: always
  type: bool
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import drafter


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "target": {"type": "path", "required": True},
            "drafter": {"type": "path", "required": True},
            "block_size": {"type": "int", "required": True},
            "version": {"type": "str", "required": True},
            "instance": {"type": "str", "default": ""},
            "mode": {"type": "str", "choices": ["fail", "warn"], "default": "fail"},
        },
        supports_check_mode=True,
    )
    options = module.params
    if module.check_mode and not all(os.path.isdir(options[what]) for what in ("target", "drafter")):
        module.exit_json(changed=False, problems=[], checked=False, stand_in=False)
    problems, stand_in = drafter.check_folders(
        options["target"], options["drafter"], options["block_size"], options["version"]
    )
    result = {"changed": False, "problems": problems, "checked": True, "stand_in": stand_in}
    of_instance = f" of instance {options['instance']}" if options["instance"] else ""
    for problem in problems:
        if problem["severity"] != "error" or options["mode"] == "warn":
            module.warn(f"drafter{of_instance}: {problem['message']}")
    errors = [p["message"] for p in problems if p["severity"] == "error"]
    if errors and options["mode"] == "fail":
        lines = "\n".join(f"  - {message}" for message in errors)
        module.fail_json(
            msg=f"The drafter {options['drafter']}{of_instance} does not fit {options['target']}:\n{lines}\n"
            "Set sglang_drafter_model and sglang_drafter_revision to one that fits, or sglang_drafter: none"
            " (model_weights_drafter_check: warn lets it pass).",
            **result,
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
