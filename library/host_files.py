#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Small configuration files of a host, and the commands that make them count."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_files
short_description: Several small files of a host in one step, each with the command that makes it count
description:
  - Writes or removes files that belong to root, and then runs the commands of those that changed, each command once.
  - One call for all files, since each task costs a connection per host.
  - Where a command fails, the files are put back as they were, and the next run tries again.
options:
  files:
    description: The files.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path. Missing directories are made.
        type: path
        required: true
      content:
        description: The whole content. Without it, the file must be absent.
        type: str
      mode:
        description: The file's mode.
        type: str
        default: "0644"
      then:
        description: Command to run when the file changed; left out where the host has no such program.
        type: list
        elements: str
        default: []
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  platform:
    platforms: posix
    support: full
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Keep nouveau away
  host_files:
    files:
      - path: /etc/modprobe.d/nouveau.conf
        content: "blacklist nouveau\n"
        then: [update-initramfs, -u]
  become: true
"""

RETURN = r"""
changed_files:
  description: Paths of the files that changed, or would.
  returned: success
  type: list
  elements: str
commands:
  description: Commands that ran, or would.
  returned: success
  type: list
  elements: list
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import small_files


def argument_spec() -> dict[str, Any]:
    """The module's arguments."""
    return {
        "files": {
            "type": "list",
            "elements": "dict",
            "required": True,
            "options": {
                "path": {"type": "path", "required": True},
                "content": {"type": "str"},
                "mode": {"type": "str", "default": "0644"},
                "then": {"type": "list", "elements": "str", "default": []},
            },
        },
    }


def main() -> None:
    """Compare, write, run."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    try:
        changed = small_files.differences(module.params["files"])
        commands: list[list[str]] = []
        for entry in changed:
            if entry["then"] and entry["then"] not in commands:
                commands.append(entry["then"])
        if not module.check_mode:
            commands = small_files.apply(changed)
    except (small_files.FileError, OSError) as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(
        changed=bool(changed),
        changed_files=[entry["path"] for entry in changed],
        commands=commands,
        diff=[
            {
                "before_header": entry["path"],
                "after_header": entry["path"],
                "before": entry["before"] or "",
                "after": entry["content"] or "",
            }
            for entry in changed
        ],
    )


if __name__ == "__main__":
    main()
