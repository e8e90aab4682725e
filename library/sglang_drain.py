#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Take engines out of a router's rotation, wait until they are idle, put them in again."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_drain
short_description: Take engines out of rotation, wait for their requests to end, and put them in again
description:
  - Speaks the control plane of SGLang's router (sglang-router 0.3.2, C(/workers)), and reads an engine's own counts of
    running and queued requests. One call waits by itself.
options:
  state:
    description:
      - V(out) removes O(urls) from O(router), V(in) adds them and waits until the router calls them healthy, V(idle)
        waits until the engines at O(urls) have no request left.
    type: str
    choices: [out, in, idle]
    required: true
  urls:
    description: Addresses of the engines, as the router knows them for V(out) and V(in).
    type: list
    elements: str
    required: true
  router:
    description: Address of the router's control plane, required for V(out) and V(in).
    type: str
    default: ""
  key:
    description: The router's key for V(out) and V(in), the engines' for V(idle).
    type: str
    default: ""
  worker_key:
    description: The engines' key, which the router needs for workers that are added.
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
    description: Runs where the router or the engine is reached.
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Take the host out of rotation
  sglang_drain:
    state: out
    router: http://127.0.0.1:30000
    urls: [http://10.0.0.11:30000]
  delegate_to: router-01

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

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import drain


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["out", "in", "idle"], "required": True},
            "urls": {"type": "list", "elements": "str", "required": True},
            "router": {"type": "str", "default": ""},
            "key": {"type": "str", "default": "", "no_log": True},
            "worker_key": {"type": "str", "default": "", "no_log": True},
            "timeout": {"type": "float", "default": 60},
            "fail": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    wish = module.params
    ask = drain.asker(wish["key"])
    try:
        if wish["state"] == "idle":
            if module.check_mode:
                module.exit_json(changed=False)
            found = drain.wait_idle(wish["urls"], ask, wish["timeout"])
            if not found["idle"] and wish["fail"]:
                left = found["problem"] or f"{found['running']} requests run and {found['queued']} wait"
                module.fail_json(msg=f"not idle after {found['seconds']:g} s: {left}", **found)
            module.exit_json(changed=False, **found)
        if not wish["router"]:
            module.fail_json(msg=f"router: state {wish['state']} needs the router's address")
        joined = wish["state"] == "in"
        router = wish["router"].rstrip("/")
        urls = drain.differing(drain.workers_of(router, ask), wish["urls"], joined)
        if not module.check_mode:
            drain.set_rotation(router, wish["urls"], joined, ask, wish["worker_key"], wish["timeout"])
    except drain.DrainError as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(changed=bool(urls), urls=urls)


if __name__ == "__main__":
    main()
