#!/usr/bin/python
"""Wait until a unit's engine really serves, or say at once why it does not."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_wait
short_description: Wait until an engine serves, and end at the first certain answer
description:
  - Follows one start of one systemd unit until it is ready, has crashed, hangs, was stopped, finds its port taken, or
    is out of time.
  - Ready means that this invocation of this unit, whose processes own the port, has answered several concurrent
    requests with at least eight drafter blocks each. Log lines, C(/v1/models) and C(/health) are not believed.
  - Watches systemd by bus signal, the invocation's journal, the listening sockets and HTTP at the same time. Nothing is
    changed.
  - Where the unit has a supervisor that gates its own start, that verdict is taken and nothing is gated twice;
    O(requests), O(min_accept_length) and O(generation_timeout) then are the unit's, not these.
options:
  unit:
    description: The systemd unit; C(.service) may be left out.
    type: str
    required: true
  host:
    description: Address on which the engine listens.
    type: str
    default: 127.0.0.1
  port:
    description: Port on which the engine listens.
    type: int
    required: true
  served_model_name:
    description: Name under which the model must answer. Any name passes where it is left out.
    type: str
    default: ""
  api_key:
    description: Key of the engine, sent as a Bearer header and shown nowhere.
    type: str
  drafter:
    description: Whether a drafter is configured. Its accept length is then judged.
    type: bool
    default: false
  block_size:
    description: Tokens per drafter block.
    type: int
    default: 8
  cuda_graph:
    description: Whether CUDA graphs were asked for. Reported beside what the decode lines say.
    type: bool
  ranks:
    description: Number of ranks whose lines complete a phase.
    type: int
    default: 1
  engine:
    description: V(sglang), or V(openai) for any other server of the OpenAI API, with the SGLang parts left out.
    type: str
    choices: [sglang, openai]
    default: sglang
  engine_version:
    description: Release of the engine; chooses probes and remedies.
    type: str
  in_effect:
    description: The variables in effect, for the diagnosis and its remedies.
    type: dict
    default: {}
  invocation_id:
    description: Invocation to wait for. The current one where it is left out.
    type: str
  since_monotonic:
    description:
      - Ignore starts from before this moment (seconds of the host's monotonic clock), as after
        C(systemctl --no-block restart).
    type: float
    default: 0
  timeout:
    description: Seconds after which waiting ends in any case.
    type: float
    default: 1800
  stall:
    description:
      - Seconds without progress after which a phase counts as hung, by phase; 0 switches the limit of a phase off.
    type: dict
    default: {}
  settle:
    description: Seconds after readiness in which a crash still counts.
    type: float
    default: 5
  requests:
    description: Concurrent requests that must generate.
    type: int
    default: 4
  generation_timeout:
    description: Seconds one such request may take.
    type: float
    default: 120
  min_accept_length:
    description: Smallest mean accept length of a drafter that is of use. A useless one shows 1.02.
    type: float
    default: 1.1
  poll:
    description: V(until) waits; V(once) returns the present phase at once while the engine loads.
    type: str
    choices: [until, once]
    default: until
  slice:
    description:
      - Return unfinished after so many seconds or at a change of phase; O(resume) continues. Used to show progress.
    type: float
    default: 0
  resume:
    description: The RV(resume) of an unfinished call.
    type: dict
  baseline:
    description: Seconds by phase of the last good start, for the time left.
    type: dict
    default: {}
  fail:
    description: Fail the task when the outcome is not ready.
    type: bool
    default: true
  label:
    description: Name of the host in messages. Its inventory name when run through Ansible's action plugin.
    type: str
    default: ""
notes:
  - In check mode the present state is reported, nothing is generated, and the task does not fail.
  - Without root the port's owner, the journal, or both may be out of sight; RV(lacks) then says so.
author: [dflash-fleet]
"""

EXAMPLES = r"""
- name: Wait until the engine serves
  sglang_wait:
    unit: sglang-main-ep8.service
    port: 30000
    served_model_name: kimi-k2.6
    drafter: true
    ranks: 8
    engine_version: 0.5.20

- name: See where it stands without waiting
  sglang_wait:
    unit: sglang-main-ep8.service
    port: 30000
    poll: once
    fail: false
"""

RETURN = r"""
ready:
  description: Whether the engine serves.
  type: bool
  returned: always
outcome:
  description: One of ready, crashed, hung, timeout, stopped, port_taken; null while unfinished.
  type: str
  returned: always
finished:
  description: False where O(slice) or O(poll=once) ended the call before an answer.
  type: bool
  returned: always
unit:
  description: Full name of the unit.
  type: str
  returned: always
invocation_id:
  description: The invocation that was followed.
  type: str
  returned: always
seconds:
  description: Seconds from the start of the main process to the answer.
  type: float
  returned: always
phase:
  description: Phase reached (launch, dist_init, weights, kv_cache, graph_capture, warmup, serving, stopping).
  type: str
  returned: always
phases:
  description: Seconds, and ranks done where ranks report, of each phase entered.
  type: list
  elements: dict
  returned: always
progress:
  description: Percent, step, detail, ranks done and estimated seconds remaining in the present phase.
  type: dict
  returned: always
smoke:
  description: Requests, how many went well, tokens, mean accept length (null without a drafter) and tokens per second.
  type: dict
  returned: always
crash:
  description: The journal_crash result where the outcome is crashed or hung.
  type: dict
  returned: always
reason:
  description: One sentence where the outcome is not ready.
  type: str
  returned: always
cuda_graph:
  description: Whether graphs were asked for, and whether the decode lines show them in use (null where none was seen).
  type: dict
  returned: always
holder:
  description: Process that holds the port where the outcome is port_taken.
  type: dict
  returned: always
lacks:
  description: What this user may not see on this host.
  type: list
  elements: str
  returned: always
timings:
  description: Milliseconds from the death of the main process to its notice, and those of the diagnosis.
  type: dict
  returned: always
resume:
  description: To be handed back as O(resume) where unfinished.
  type: dict
  returned: always
"""

import socket
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import diagnosis, journal, remedies, runfacts, units, watch


def _read_all(unit, invocation, ended):
    """The invocation's journal; of an ended one with systemd's line about it, where that comes within half a second."""
    deadline = time.monotonic() + (0.5 if ended else 0)
    while True:
        collected = journal.read_invocation(unit, invocation)
        closed = any(journal.is_exit(entry) for entry in collected.entries[-100:])
        if closed or time.monotonic() >= deadline:
            return collected
        time.sleep(0.02)


def main():
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "served_model_name": {"type": "str", "default": ""},
            "api_key": {"type": "str", "no_log": True},
            "drafter": {"type": "bool", "default": False},
            "block_size": {"type": "int", "default": 8},
            "cuda_graph": {"type": "bool"},
            "ranks": {"type": "int", "default": 1},
            "engine": {"type": "str", "choices": ["sglang", "openai"], "default": "sglang"},
            "engine_version": {"type": "str"},
            "in_effect": {"type": "dict", "default": {}},
            "invocation_id": {"type": "str"},
            "since_monotonic": {"type": "float", "default": 0},
            "timeout": {"type": "float", "default": 1800},
            "stall": {"type": "dict", "default": {}},
            "settle": {"type": "float", "default": 5},
            "requests": {"type": "int", "default": 4},
            "generation_timeout": {"type": "float", "default": 120},
            "min_accept_length": {"type": "float", "default": 1.1},
            "poll": {"type": "str", "choices": ["until", "once"], "default": "until"},
            "slice": {"type": "float", "default": 0},
            "resume": {"type": "dict"},
            "baseline": {"type": "dict", "default": {}},
            "fail": {"type": "bool", "default": True},
            "label": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    params = module.params
    if not 1 <= params["port"] <= 65535:
        module.fail_json(msg=f"port must be from 1 to 65535, not {params['port']}")
    try:
        params["stall"] = {name: float(value) for name, value in params["stall"].items()}
    except (TypeError, ValueError):
        module.fail_json(msg="stall must map names of phases to seconds")
    unknown = sorted(set(params["stall"]) - set(watch.phases.PHASES))
    if unknown:
        module.fail_json(
            msg=f"stall names no phase of a start: {', '.join(unknown)} (known: {', '.join(watch.phases.PHASES)})"
        )
    unit = units.full_name(params["unit"])
    version = params["engine_version"]
    # Read now: at the moment of a crash every millisecond counts.
    in_effect = {**(params["in_effect"] or {}), **runfacts.unit_limits(unit)}

    def diagnose(invocation, ended):
        collected = _read_all(unit, invocation, ended)
        wait.late(collected.entries)
        return diagnosis.diagnose_collected(
            collected,
            invocation_id=invocation,
            engine_version=version or runfacts.installed_version(collected.entries),
            in_effect=in_effect,
            secrets=[params["api_key"]] if params["api_key"] else [],
        )

    def remedy(cause):
        return remedies.remedies_for(cause, version, in_effect)

    wait = watch.Watch(params, diagnose, remedy, module.check_mode)
    try:
        result = wait.run()
    except units.BusError as error:
        module.fail_json(msg=str(error))
    result["changed"] = False
    graphs = result["cuda_graph"]
    if graphs["asked"] and graphs["used"] is False:
        module.warn(f"{unit}: CUDA graphs were asked for, but its decode lines say 'cuda graph: False'")
    if result["finished"] and not result["ready"] and params["fail"] and not module.check_mode:
        module.fail_json(msg=diagnosis.answer_text(result, params["label"] or socket.gethostname()), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
