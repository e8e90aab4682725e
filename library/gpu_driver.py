#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""NVIDIA's driver: packages of one branch, held, and whether the running module is the installed one."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_driver
short_description: Install NVIDIA's driver from packages, hold it, and say whether a reboot is due
description:
  - Installs the packages of O(packages) in the branch of O(branch), or exactly O(version), and marks every driver
    package as held, so that no upgrade of the system takes it. What is installed and fits is left alone, also when the
    repository has a newer one.
  - Where no module is loaded, loads it. Where another one is loaded, only a reboot helps - RV(reboot_reason) says so.
  - A driver that is loaded is not replaced unless O(reboot_allowed), since programs cannot use the GPUs between the
    change of the libraries and the reboot.
  - With O(verify), changes nothing and fails unless the running module is the installed one.
options:
  branch:
    description: Branch, the first number of the driver's release.
    type: str
    required: true
  version:
    description: Exact release, such as 580.105.08. Empty takes the branch's newest when it is first installed.
    type: str
    default: ""
  packages:
    description: Packages that make up the driver. C({kernel}) stands for the release of the running kernel.
    type: list
    elements: str
    required: true
  belonging:
    description:
      - Patterns of names of driver packages; those with a driver's version are held, and must be of the branch.
    type: list
    elements: str
    required: true
  key:
    description: The repository's signing key as text or base64, where the controller has it.
    type: str
  key_url:
    description: Where the host fetches the key otherwise. Empty for repositories whose key the host has already.
    type: str
    default: ""
  key_path:
    description: Where the key is kept on the host.
    type: path
    default: /usr/share/keyrings/dflash-fleet-nvidia.gpg
  fingerprints:
    description: The key must have one of these fingerprints.
    type: list
    elements: str
    default: []
  reboot_allowed:
    description: Whether the caller may reboot the host.
    type: bool
    default: false
  verify:
    description: Only look whether the installed module runs.
    type: bool
    default: false
  environment:
    description: Environment variables for apt and for fetching the key, such as C(http_proxy).
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Names the packages; which release the repository would give is not asked.
  diff_mode:
    support: none
    description: The result lists the packages.
  platform:
    platforms: Debian, Ubuntu
    support: full
notes:
  - The repository and its pin are files, see M(host_files).
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Install the 580 branch
  gpu_driver:
    branch: "580"
    packages: [nvidia-open, "linux-headers-{kernel}"]
    belonging: ["*nvidia*", "libcuda*", "cuda-drivers*"]
  become: true
  register: driver

- name: See that it runs
  gpu_driver:
    branch: "580"
    packages: [nvidia-open]
    belonging: ["*nvidia*", "libcuda*", "cuda-drivers*"]
    verify: true
  become: true
"""

RETURN = r"""
releases:
  description: Releases of the installed driver's packages.
  returned: success
  type: list
  elements: str
  sample: [580.105.08]
installed:
  description: Packages that were installed or changed, or would be.
  returned: success
  type: list
  elements: str
held:
  description: Packages that were marked as held, or would be.
  returned: success
  type: list
  elements: str
module:
  description: The kernel module, as in M(gpu_facts).
  returned: success
  type: dict
reboot_reason:
  description: Why a reboot is due; empty where none is.
  returned: success
  type: str
  sample: 580.65.06 is loaded, 580.105.08 is installed
"""

import base64
import os
import platform
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import driver, hostfacts, packages


def argument_spec() -> dict[str, Any]:
    """The module's arguments."""
    return {
        "branch": {"type": "str", "required": True},
        "version": {"type": "str", "default": ""},
        "packages": {"type": "list", "elements": "str", "required": True},
        "belonging": {"type": "list", "elements": "str", "required": True},
        "key": {"type": "str", "no_log": False},
        "key_url": {"type": "str", "default": "", "no_log": False},
        "key_path": {"type": "path", "default": "/usr/share/keyrings/dflash-fleet-nvidia.gpg", "no_log": False},
        "fingerprints": {"type": "list", "elements": "str", "default": []},
        "reboot_allowed": {"type": "bool", "default": False},
        "verify": {"type": "bool", "default": False},
        "environment": {"type": "dict", "default": {}},
    }


def bring_key(options: dict[str, Any], environment: dict[str, str]) -> None:
    """Put the repository's key in place, checked against the fingerprints."""
    if options["key"]:
        text = options["key"]
        data = text.encode() if "-----BEGIN" in text else base64.b64decode(text)
    else:
        data = driver.fetch(options["key_url"], environment)
    key = driver.check_key(data, options["fingerprints"])
    path = Path(options["key_path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.new")
    partial.write_bytes(key)
    partial.chmod(0o644)
    os.replace(partial, path)


def install(options: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """The whole way from what is there to what is wanted."""
    wanted = driver.Wanted(
        options["branch"],
        options["version"],
        tuple(name.replace("{kernel}", platform.release()) for name in options["packages"]),
        tuple(options["belonging"]),
    )
    environment = {str(name): str(value) for name, value in options["environment"].items()}
    apt = packages.Apt(environment)
    todo = driver.plan(apt.packages(), wanted)
    before = hostfacts.kernel_module()
    if options["verify"]:
        problem = driver.not_running(before, wanted)
        if problem:
            raise driver.DriverError(problem)
        return {"changed": False, "installed": [], "held": [], **look(apt, wanted)}
    if todo.install and before["loaded"] and not options["reboot_allowed"]:
        raise driver.DriverError(
            f"driver {before['loaded']} is running, and {wanted.text()} needs a reboot of this host to take its place "
            f"({', '.join([*todo.missing, *todo.other])}): set gpu_host_driver_reboot to true, or leave "
            "gpu_host_driver_install at false. Nothing was changed."
        )
    changed = todo.install or bool(todo.unheld)
    installed = [*todo.missing, *todo.other]
    if check_mode:
        return {"changed": changed, "installed": installed, "held": todo.unheld, **look(apt, wanted)}
    if todo.install:
        if (options["key"] or options["key_url"]) and not key_stands(options):
            bring_key(options, environment)
        driver.change(apt, todo, wanted)
        todo.unheld = driver.plan(apt.packages(), wanted).unheld
    if todo.unheld:
        apt.hold(todo.unheld)
    found = hostfacts.kernel_module()
    if not found["loaded"] and not found["nouveau"]:
        driver.load_module()
    return {"changed": changed, "installed": installed, "held": todo.unheld, **look(apt, wanted)}


def key_stands(options: dict[str, Any]) -> bool:
    """Whether the key on the host is already one that is expected."""
    try:
        driver.check_key(Path(options["key_path"]).read_bytes(), options["fingerprints"])
    except (OSError, driver.DriverError):
        return False
    return True


def look(apt: packages.Apt, wanted: driver.Wanted) -> dict[str, Any]:
    """What stands on the host now."""
    found = hostfacts.kernel_module()
    return {
        "releases": driver.releases(apt.packages().values(), wanted),
        "module": found,
        "reboot_reason": driver.reboot_reason(found),
    }


def main() -> None:
    """Install or verify."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    try:
        result = install(module.params, module.check_mode)
    except (driver.DriverError, packages.PackageError, OSError, ValueError) as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
