#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Read what is on a host and compare it with what should be."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_state
short_description: What of dflash-fleet is on a host, and how it differs from what should be
description:
  - Reads a host once, quickly and without changing it - virtual environments, models, instances with their releases,
    units and state files, who listens on given ports, free space, and a few facts of the operating system.
  - Compares that with O(desired) and returns what differs, by role. Check mode, plan, status, drift and the quick
    second run all ask this module, so that they agree.
  - Runs as any user. What that user may not read makes the module fail with the path, except that a listener of
    another user then has no process id.
  - Asks systemd once, whatever the number of units. Reads no file's content but state files and manifests.
options:
  root:
    description: Directory that holds virtual environments, models and instances.
    type: path
    default: /var/lib/sglang
  instances:
    description:
      - Names of the instances to report. One that is not installed is reported as V(absent).
      - Without names, all that are found under O(root).
    type: list
    elements: str
    default: []
  desired:
    description: What should be there. Without it, RV(differences) is empty.
    type: dict
    suboptions:
      venvs:
        description: Lock hashes of the environments that should be complete.
        type: list
        elements: str
        default: []
      models:
        description: Models that should be complete.
        type: list
        elements: dict
        default: []
        suboptions:
          repo:
            description: Repository on the hub, V(org/name).
            type: str
            required: true
          revision:
            description: Commit, 40 hexadecimal digits.
            type: str
            required: true
      releases:
        description:
          - By instance, the C(unit) that should be active, serve and start at boot, and the C(release_id) that
            C(current) should point to. Other units of that instance should be inactive.
        type: dict
        default: {}
  deployed:
    description:
      - Digest of everything that is wished for this host. With it, RV(changes) says what differs from the end of the
        last whole deployment of that wish.
    type: str
  ports:
    description: Ports to look up who listens on them.
    type: list
    elements: int
    default: []
  paths:
    description: Paths whose file system's free space is wanted; they need not exist yet.
    type: list
    elements: path
    default: []
  progress:
    description:
      - For instances that are starting, also read the journal of that start and say how far it is
        (C(progress) of the instance in RV(state)). Takes longer, and needs the right to read the journal.
    type: bool
    default: false
  live:
    description:
      - For instances that serve, also ask their C(/metrics) what they do at this moment (C(live) of the instance in
        RV(state)).
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Changes nothing in any mode.
  diff_mode:
    support: none
    description: Changes nothing, so there is nothing to show.
  platform:
    platforms: posix
    support: full
    description: Linux with systemd.
notes:
  - A state file of another schema than this version knows ends the module with the file's name and that schema.
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Look at everything of ours on the host
  sglang_state:
  register: probe

- name: Compare with what the inventory asks for
  sglang_state:
    instances: [main]
    desired:
      venvs: ["{{ sglang_venv_lock_hash }}"]
      models:
        - repo: moonshotai/Kimi-K2.6
          revision: "{{ sglang_model_revision }}"
      releases:
        main:
          unit: sglang-main-ep8.service
          release_id: 20261130T000000Z-5d41402a
    ports: [30000]
    paths: [/var/lib/sglang]
  register: probe

- name: Say what would change
  ansible.builtin.debug:
    msg: "{{ probe.differences | map(attribute='what') | join(', ') }}"
"""

RETURN = r"""
state:
  description:
    - What is on the host. Sizes are bytes, times ISO 8601 UTC with microseconds.
  returned: always
  type: dict
  contains:
    schema:
      description: Number of this structure.
      type: int
      sample: 1
    version_installed:
      description: Versions of dflash-fleet's own programs on the host.
      type: list
      elements: str
      sample: ["0.1.0"]
    root:
      description: The directory that was looked at.
      type: str
    venvs:
      description: By lock hash, C(complete), C(engine), C(version), C(build), C(python), C(cuda_toolkit).
      type: dict
      sample: {"5d41402abc4b2a76": {"complete": true, "engine": "sglang", "version": "0.5.20"}}
    models:
      description:
        - By directory name and revision, C(complete), C(bytes), C(files), C(damaged) (files that are missing or have
          another size than the manifest says, ten at most).
        - C(cache), the shape of its KV cache (C(layers) with C(shared) values, or with C(heads) of C(values)), where
          its config.json says so.
      type: dict
      sample:
        moonshotai--Kimi-K2.6:
          0123456789abcdef0123456789abcdef01234567: {complete: true, bytes: 595000000000, files: 81, damaged: []}
    instances:
      description:
        - By name, C(current) (release id or null), C(release) (its release.json), C(releases) (ids kept),
          C(release_units) (the unit of each), C(units),
          C(by_hand) (a profile on standby that someone started instead of the current one, C(unit), C(release_id) and
          C(release), or null),
          C(unit) (the one that stands for the instance), C(since), C(ready) (state/ready.json), C(last_good),
          C(previous_good) (the release that rollback.yml returns to, C(release_id) and C(unit), or null),
          C(trial) (state/trial.json, while a release is tried that is not to stay, else null),
          C(rungs), C(last_starts) (three at most, newest last), C(last_report), C(report) (what the newest report of
          the host's own reporter says), C(gate) (the supervisor's verdict, gate.json), C(serving) (the unit is active
          and its invocation is the one that passed its gate, whoever gated it), C(degraded) (and a fallback is in
          effect), and C(condition)
          which is one of serving, degraded, starting, restarting, stopping, failed, stopped, absent.
        - With O(progress), one that is starting also has C(progress) (C(phase), C(percent), C(ranks_done), C(ranks),
          C(phases) with their seconds).
        - With O(live), one that serves also has C(live) - C(tokens_per_second), C(accept_length), C(running) and
          C(queued) requests, each null where its metrics do not say, or C(error).
        - Each unit has C(name), C(load_state), C(active_state), C(sub_state), C(result), C(main_pid), C(n_restarts),
          C(invocation_id), C(enabled), C(active_since), C(since), C(stop_asked) (the last run
          ended because someone asked for it), C(need_daemon_reload), C(exit), C(status_text).
      type: dict
    other_units:
      description: Units sglang-* that belong to none of the instances on the host.
      type: list
      elements: dict
    systemd_error:
      description: What systemctl said where it did not answer.
      type: str
    listeners:
      description:
        - By port, C(pid), C(command), C(unit), C(address), C(uid), and C(others) where more than one listens.
          A free port is absent.
      type: dict
      sample: {"30000": {"pid": 411, "command": "nginx", "unit": "nginx.service", "address": "0.0.0.0", "uid": 0}}
    filesystems:
      description: By path, C(free_bytes), C(free_inodes), C(total_bytes), C(device).
      type: dict
    memory:
      description: C(total_bytes), C(available_bytes), C(cached_bytes), C(swap_total_bytes).
      type: dict
    boot_id:
      description: Changes with every boot.
      type: str
    uptime:
      description: Seconds since boot.
      type: float
    glibc:
      description: Version of the C library.
      type: str
      sample: "2.36"
    kernel:
      description: Release of the kernel.
      type: str
    architecture:
      description: Machine type.
      type: str
      sample: x86_64
    os_release:
      description: C(id), C(version_id), C(version_codename), C(id_like), C(pretty_name).
      type: dict
    python:
      description: The interpreter that ran this module.
      type: dict
    python_versions:
      description: Interpreters on the host, C(version) and C(path), newest first.
      type: list
      elements: dict
changes:
  description:
    - What differs from the end of the last whole deployment with the digest O(deployed) - paths, instances, or the wish
      itself; empty where a deployment would find nothing to do.
  returned: with O(deployed)
  type: list
  elements: str
  sample: [/etc/systemd/system/sglang-main-ep8.service]
differences:
  description: What differs from O(desired), in the order of a deployment; empty where nothing does.
  returned: always
  type: list
  elements: dict
  contains:
    role:
      description: The role that would mend it.
      type: str
      sample: sglang_service
    what:
      description: The thing that differs.
      type: str
      sample: "main: unit sglang-main-ep8.service"
    actual:
      description: How it is.
      type: str
      sample: failed (exit-code)
    desired:
      description: How it should be.
      type: str
      sample: active
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import deployed, hostfacts, state


def argument_spec() -> dict[str, Any]:
    """The module's arguments."""
    return {
        "root": {"type": "path", "default": "/var/lib/sglang"},
        "instances": {"type": "list", "elements": "str", "default": []},
        "desired": {
            "type": "dict",
            "options": {
                "venvs": {"type": "list", "elements": "str", "default": []},
                "models": {
                    "type": "list",
                    "elements": "dict",
                    "default": [],
                    "options": {
                        "repo": {"type": "str", "required": True},
                        "revision": {"type": "str", "required": True},
                    },
                },
                "releases": {"type": "dict", "default": {}},
            },
        },
        "deployed": {"type": "str"},
        "ports": {"type": "list", "elements": "int", "default": []},
        "paths": {"type": "list", "elements": "path", "default": []},
        "progress": {"type": "bool", "default": False},
        "live": {"type": "bool", "default": False},
    }


def main() -> None:
    """Probe and compare."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    wanted = module.params["desired"] or {}
    layout = state.Layout(module.params["root"])
    releases = wanted.get("releases") or {}
    for name, release in releases.items():
        if not isinstance(release, dict):
            module.fail_json(msg=f"desired.releases.{name}: must be a mapping with unit and release_id")
    try:
        instances = [state.check_instance(name) for name in module.params["instances"] or state.list_instances(layout)]
        instances += [state.check_instance(name) for name in sorted(releases) if name not in instances]
        found = hostfacts.probe(
            layout,
            instances=instances,
            extra_units=[release["unit"] for release in releases.values() if release.get("unit")],
            ports=module.params["ports"],
            paths=module.params["paths"],
            progress=module.params["progress"],
            live=module.params["live"],
        )
    except state.StateError as problem:
        module.fail_json(msg=str(problem))
    except PermissionError as problem:
        module.fail_json(msg=f"{problem.filename}: may not be read by this user (run this with become)")
    if releases and found["systemd_error"]:
        module.fail_json(msg=f"systemd does not answer: {found['systemd_error']}")
    result = {"state": found, "differences": state.differences(found, wanted)}
    if module.params["deployed"] is not None:
        result["changes"] = deployed.differences(layout, module.params["deployed"], found["instances"])
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
