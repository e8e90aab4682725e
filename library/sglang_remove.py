#!/usr/bin/python
# Copyright: dflash-fleet contributors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Take instances away from a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_remove
short_description: Take SGLang instances away from a host
version_added: "0.1.0"
description:
  - Stops and disables every unit of the named instances, removes the units, C(/etc/sglang/<instance>), the instance's
    directory (releases, state, credentials) and its caches.
  - Environments and weights stay unless O(data) is set, and then only those go that no remaining instance names.
options:
  root:
    description: Directory of environments, models and instances.
    type: path
    default: /var/lib/sglang
  instances:
    description: Instances to remove. One that is not on the host counts for nothing.
    type: list
    elements: str
    default: []
  except_instances:
    description: Remove every instance on the host but these. An empty list removes all.
    type: list
    elements: str
  state:
    description:
      - With V(stopped), their units are only stopped, and stay where they are, the boot included.
    type: str
    choices: [absent, stopped]
    default: absent
  data:
    description: Also remove environments and weights that nothing uses any more.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Lists what would go.
  diff_mode:
    support: full
  platform:
    platforms: Linux with systemd
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Remove one instance, keep what others could use
  sglang_remove:
    instances: [experiment]

- name: Remove everything of ours, weights included
  sglang_remove:
    except_instances: []
    data: true
"""

RETURN = r"""
instances:
  description: Instances that went or were stopped (or would be).
  type: list
  elements: str
  returned: always
units:
  description: Units that were stopped, and unless that was all, disabled and removed.
  type: list
  elements: str
  returned: always
paths:
  description: Directories and links that were removed.
  type: list
  elements: str
  returned: always
"""

import os
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import removal
from ansible.module_utils.dflash_fleet import state as states


def running(module: AnsibleModule) -> list[str]:
    """Engines' units that are up, or on their way up or down."""
    alive = "--state=active,activating,reloading,deactivating"
    _, out, _ = module.run_command(["systemctl", "list-units", "--plain", "--no-legend", alive, "sglang-*.service"])
    return [line.split()[0] for line in out.splitlines() if line.strip()]


def stop(module: AnsibleModule, units: list[str]) -> None:
    """Waits until each engine has left the GPUs."""
    for unit in units:
        code, out, err = module.run_command(["systemctl", "stop", unit])
        if code != 0:
            module.fail_json(msg=f"systemctl stop {unit}: {(err or out).strip()}")


def remove(module: AnsibleModule, layout: states.Layout, found: dict[str, list[str]], up: list[str]) -> None:
    """Units first, so that nothing runs without its files. Of some nothing is left to stop but a link for boot."""
    stop(module, [unit for unit in found["units"] if unit in up])
    for unit in found["units"]:
        module.run_command(["systemctl", "disable", unit])  # one whose file is gone has nothing to disable
        layout.unit_file(unit).unlink(missing_ok=True)
    if found["units"]:
        module.run_command(["systemctl", "daemon-reload"], check_rc=True)
        module.run_command(["systemctl", "reset-failed", *found["units"]])
    for name in found["paths"]:
        path = Path(name)
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    for parent in (layout.etc, removal.CACHE):
        try:
            os.rmdir(parent)  # goes only when the last instance has gone
        except OSError:
            continue


def main() -> None:
    """List, then remove."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/sglang"},
            "instances": {"type": "list", "elements": "str", "default": []},
            "except_instances": {"type": "list", "elements": "str"},
            "state": {"type": "str", "choices": ["absent", "stopped"], "default": "absent"},
            "data": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    layout = states.Layout(module.params["root"])
    try:
        names = [states.check_instance(name) for name in module.params["instances"]]
        if module.params["except_instances"] is not None:
            kept = module.params["except_instances"]
            names += [name for name in removal.present(layout) if name not in kept]
        up = running(module)
        found = removal.plan(layout, names, module.params["data"], removal.CACHE, up)
    except states.StateError as problem:
        module.fail_json(msg=str(problem))
    if module.params["state"] == "stopped":
        found = {**found, "units": [unit for unit in found["units"] if unit in up], "paths": []}
    changed = bool(found["units"] or found["paths"])
    lines = [*found["units"], *found["paths"]]
    result = {
        "changed": changed,
        **found,
        "diff": {"before": "".join(f"{line}\n" for line in lines), "after": "", "before_header": "goes"},
    }
    if changed and not module.check_mode:
        if module.params["state"] == "stopped":
            stop(module, found["units"])
        else:
            remove(module, layout, found, up)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
