#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Take engines out of a router's rotation, wait until they are idle, put them in again."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_drain
short_description: Take engines out of a router's rotation, wait for their requests to end, and put them in again
description:
  - Speaks the control plane of the router that role C(sglang_router) has installed on this host, and reads an engine's
    own counts of running and queued requests. One call waits by itself.
  - What is out stays out when the router restarts.
options:
  state:
    description:
      - V(out) takes O(urls) out of rotation, V(in) puts them in and waits until the router calls them healthy,
        V(members) makes O(urls) the router's whole list (a new one that does not answer waits outside for its first
        V(in)).
      - V(idle) waits until the engines at O(urls) have no request left. It needs no router.
    type: str
    choices: [out, in, idle, members]
    required: true
  urls:
    description: Addresses of the engines, as the router knows them for all but V(idle).
    type: list
    elements: str
    required: true
  by:
    description:
      - Who asks. What a V(person) has taken out, only a V(person) puts in again.
    type: str
    choices: [person, deployment]
    default: person
  directory:
    description: What role C(sglang_router) keeps on this host.
    type: path
    default: /var/lib/dflash-fleet-router
  key:
    description: The engines' key, for V(idle).
    type: str
    default: ""
  timeout:
    description: Seconds to wait.
    type: float
    default: 60
  fail:
    description: Whether engines that are not idle in time fail the task.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    description: Says what would leave or join; waits for nothing.
  diff_mode:
    support: none
    description: The result names the addresses.
  platform:
    platforms: posix
    support: full
    description: Runs on the router's host, for V(idle) wherever the engine is reached.
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Take an engine out of rotation
  sglang_drain:
    state: out
    urls: [http://10.0.0.11:30000]
  delegate_to: router-01
  become: true

- name: Let its requests end
  sglang_drain:
    state: idle
    urls: [http://127.0.0.1:30000]
    timeout: 600
"""

RETURN = r"""
urls:
  description: Addresses that left or joined, or would.
  type: list
  elements: str
  returned: state is out or in
held:
  description: Addresses that a person keeps out, and that stay so.
  type: list
  elements: str
  returned: state is in
unknown:
  description: Addresses that are none of this router's workers; nothing was done about them.
  type: list
  elements: str
  returned: state is out or in
waiting:
  description: New addresses that do not answer yet.
  type: list
  elements: str
  returned: state is members, not in check mode
idle:
  description: Whether no request was left.
  type: bool
  returned: state is idle, not in check mode
running:
  description: Requests that ran at the last look.
  type: int
  returned: state is idle, not in check mode
queued:
  description: Requests that waited at the last look.
  type: int
  returned: state is idle, not in check mode
seconds:
  description: How long it took.
  type: float
  returned: state is idle, not in check mode
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import drain, state


def wait(module: AnsibleModule) -> dict[str, Any]:
    """state=idle"""
    wish = module.params
    if module.check_mode:
        return {"changed": False}
    found = drain.wait_idle(wish["urls"], drain.asker(wish["key"]), wish["timeout"])
    if not found["idle"] and wish["fail"]:
        left = found["problem"] or f"{found['running']} requests run and {found['queued']} wait"
        module.fail_json(msg=f"not idle after {found['seconds']:g} s: {left}", **found)
    return {"changed": False, **found}


def rotate(module: AnsibleModule) -> dict[str, Any]:
    """The other states."""
    wish = module.params
    urls, by = [url.rstrip("/") for url in wish["urls"]], wish["by"]
    try:
        door = drain.Door(wish["directory"])
    except drain.NoRouter:
        if wish["state"] == "members":
            raise
        # A host of the group that role sglang_router has not come to yet; it asks every engine when it does.
        return {"changed": False, "urls": [], "held": [], "unknown": []}
    drained = door.drained()
    if wish["state"] == "members":
        if module.check_mode:
            return {"changed": door.workers() != urls}
        ask = drain.asker(door.worker_key)
        found = door.members(urls, lambda url: drain.answers(url, ask), wish["timeout"])
        return {"changed": any(found.values()), **found}
    unknown = [url for url in urls if url not in door.workers()]
    urls = [url for url in urls if url not in unknown]
    if wish["state"] == "out":
        forecast = [url for url in urls if url not in drained or drained[url]["by"] not in (drain.PERSON, by)]
        left = forecast if module.check_mode else door.out(urls, by, wish["timeout"])
        return {"changed": bool(left), "urls": left, "unknown": unknown}
    held = door.held(urls, by)
    forecast = [url for url in urls if url in drained and url not in held]
    joined = forecast if module.check_mode else door.join(urls, by, wish["timeout"])
    return {"changed": bool(joined), "urls": joined, "held": held, "unknown": unknown}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["out", "in", "idle", "members"], "required": True},
            "urls": {"type": "list", "elements": "str", "required": True},
            "by": {"type": "str", "choices": [drain.PERSON, drain.DEPLOYMENT], "default": drain.PERSON},
            "directory": {"type": "path", "default": drain.DIRECTORY},
            "key": {"type": "str", "default": "", "no_log": True},
            "timeout": {"type": "float", "default": 60},
            "fail": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    try:
        result = wait(module) if module.params["state"] == "idle" else rotate(module)
    except (drain.DrainError, state.StateError, OSError) as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
