#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Distribution packages that must be on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_packages
short_description: Install distribution packages that are missing
description:
  - Installs what is missing with C(apt-get), and leaves what is there as it is. Unlike M(ansible.builtin.apt), it needs
    no C(python3-apt) on the host, also not to predict under check mode.
  - C(needrestart) is kept from restarting services in the course of it.
options:
  names:
    description: Packages. C(a|b) is met by either, and installs the first where both are missing.
    type: list
    elements: str
    required: true
  environment:
    description: Environment variables for apt, such as C(http_proxy).
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    description: The result lists the packages.
  platform:
    platforms: Debian, Ubuntu
    support: full
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: See that a compiler is there
  host_packages:
    names: [g++, ninja-build]
  become: true
"""

RETURN = r"""
missing:
  description: Packages that were missing.
  returned: success
  type: list
  elements: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import packages


def argument_spec() -> dict[str, Any]:
    """The module's arguments."""
    return {
        "names": {"type": "list", "elements": "str", "required": True},
        "environment": {"type": "dict", "default": {}},
    }


def main() -> None:
    """Look, install, look again."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    names = module.params["names"]
    apt = packages.Apt({str(name): str(value) for name, value in module.params["environment"].items()})
    try:
        missing = packages.lacking(names, apt.packages())
        if missing and not module.check_mode:
            apt.update()
            apt.install(missing)
    except packages.PackageError as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(changed=bool(missing), missing=missing)


if __name__ == "__main__":
    main()
