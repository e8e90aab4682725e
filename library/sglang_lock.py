#!/usr/bin/python
# Copyright: dflash-fleet contributors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Take a host for a rollout, or give it back."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_lock
short_description: Take a host for a rollout, or give it back
version_added: "0.1.0"
description:
  - Keeps two rollouts away from one host, whichever controllers they run on. The lock is a file on the host itself that
    says which rollout holds it, whose it is and since when.
  - A rollout that was killed leaves its lock behind. A rerun on the same controller sees that its process is gone and
    takes the lock over; from elsewhere that takes O(takeover).
  - On the controller, the action plugin of this name fills in O(holder) and knows which processes live there.
options:
  root:
    description: Directory of environments, models and instances; the lock lies in it.
    type: path
    default: /var/lib/sglang
  state:
    description: Take the host, or give it back.
    type: str
    choices: [present, absent]
    default: present
  rollout:
    description: Name of the rollout, for wrappers that name their runs; by default made of time and process.
    type: str
    default: ""
  takeover:
    description: Name of a dead rollout whose lock may be taken.
    type: str
    default: ""
  deployed:
    description:
      - With I(state=absent), digest of the wish that the host has just been brought to as a whole. Kept with the marks
        of every file of ours, so that the next deployment of the same wish sees at one look whether it has work here.
    type: str
  holder:
    description: Who takes it (C(id), C(user), C(controller), C(pid), C(started)); set by the action plugin.
    type: dict
attributes:
  check_mode:
    support: full
    description: Says who holds the host and takes nothing.
  diff_mode:
    support: none
    description: The lock is gone when the rollout ends.
  platform:
    platforms: posix
    support: full
    description: Linux.
notes:
  - Never C(changed), since the end of a rollout removes what its beginning wrote.
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Keep other rollouts away
  sglang_lock:

- name: Continue the rollout of a controller that is gone
  sglang_lock:
    takeover: 20261130T051200Z-4711

- name: Let others in again
  sglang_lock:
    state: absent
"""

RETURN = r"""
id:
  description: Name of this rollout.
  type: str
  returned: always
  sample: 20261130T051200Z-4711
user:
  description: Who runs this rollout.
  type: str
  returned: through the action plugin
controller:
  description: Where.
  type: str
  returned: through the action plugin
taken:
  description: Whether this rollout holds the host now.
  type: bool
  returned: always
continues:
  description: Names of the dead rollouts from which this one took the host over, newest first.
  type: list
  elements: str
  returned: with state=present where the host was taken
held_by:
  description: The other rollout that holds the host - C(id), C(user), C(controller), C(pid), C(started), C(since).
  type: dict
  returned: when there is one
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import deployed, hostfacts, lock
from ansible.module_utils.dflash_fleet import state as states


def main() -> None:
    """Read the arguments, take or give back."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/sglang"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "rollout": {"type": "str", "default": ""},
            "takeover": {"type": "str", "default": ""},
            "deployed": {"type": "str"},
            "holder": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    mine = module.params["holder"]
    if not mine or not mine.get("id"):
        module.fail_json(msg="holder: who takes the host is filled in by the action plugin of the same name")
    layout = states.Layout(module.params["root"])
    try:
        if module.params["state"] == "absent":
            if not module.check_mode:
                if module.params["deployed"] and lock.holds(layout, mine):
                    deployed.record(layout, module.params["deployed"], hostfacts.read_instances(layout))
                lock.release(layout, mine)
            module.exit_json(changed=False, id=mine["id"], taken=False)
        if module.check_mode:
            found = lock.holder(layout)
            found = found if lock.blocks(found, mine, module.params["takeover"]) else None
        else:
            found = lock.take(layout, mine, module.params["takeover"])
    except states.StateError as problem:
        module.fail_json(msg=str(problem))
    if not found:
        dead = [] if module.check_mode else (lock.holder(layout) or {}).get("continues") or []
        module.exit_json(changed=False, id=mine["id"], taken=not module.check_mode, continues=dead)
    if module.check_mode:
        module.warn(lock.refusal(found))
        module.exit_json(changed=False, id=mine["id"], taken=False, held_by=found)
    module.fail_json(msg=lock.refusal(found), id=mine["id"], taken=False, held_by=found)


if __name__ == "__main__":
    main()
