#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Remove revisions of models that nothing on the host names any more."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_prune
short_description: Remove revisions of models that nothing on the host names any more
description:
  - Looks at V(<root>/<org>--<name>/<revision>). A revision stays where O(wanted), a unit, a release kept for going back
    (the current and the last good one among them), an instance's state, or a running process names it.
  - Of the others, the newest O(keep) of each repository stay too.
  - Removes what an interrupted removal left (C(.doomed)), and unfinished fetches (C(.partial)) of revisions that nobody
    wants when nothing in them has changed for seven days.
  - Folders without the manifest of M(hf_snapshot) are not touched, since somebody may be filling them by hand.
options:
  root:
    description: Folder that holds all models, in the product's own directory.
    type: path
    default: /var/lib/sglang/models
  wanted:
    description: Folders of the revisions that are asked for now.
    type: list
    elements: path
    required: true
  keep:
    description: How many revisions of each repository stay though nothing names them.
    type: int
    default: 1
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author: dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Remove revisions that nothing names, but for the newest one of each repository
  model_prune:
    wanted: [/var/lib/sglang/models/moonshotai--Kimi-K2.6/0123456789abcdef0123456789abcdef01234567]
    keep: 1
"""

RETURN = r"""
removed:
  description: What was removed, or would be, each with C(path), C(bytes) and C(reason).
  returned: always
  type: list
  elements: dict
freed_bytes:
  description: Size of all that.
  returned: always
  type: int
spare:
  description: What stays because of O(keep), in the same form.
  returned: always
  type: list
  elements: dict
waiting:
  description: Unfinished fetches of revisions that nobody wants, too young to be given up, in the same form.
  returned: always
  type: list
  elements: dict
busy:
  description: What could not be removed because its repository is being fetched from the hub at this moment.
  returned: always
  type: list
  elements: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import model_prune, words


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/sglang/models"},
            "wanted": {"type": "list", "elements": "path", "required": True},
            "keep": {"type": "int", "default": 1},
        },
        supports_check_mode=True,
    )
    options = module.params
    if options["keep"] < 0:
        module.fail_json(msg=f"keep is {options['keep']}: 0 or more")
    found = model_prune.plan(Path(options["root"]), options["wanted"], options["keep"])
    busy = [] if module.check_mode else model_prune.remove(found["remove"])
    removed = [entry for entry in found["remove"] if entry not in busy]
    module.exit_json(
        changed=bool(removed),
        removed=removed,
        freed_bytes=sum(entry["bytes"] for entry in removed),
        spare=found["spare"],
        waiting=found["waiting"],
        busy=busy,
        diff={
            "before": "".join(f"{e['path']}  {words.size(e['bytes'])}  ({e['reason']})\n" for e in removed),
            "after": "",
        },
    )


if __name__ == "__main__":
    main()
