#!/usr/bin/python
# Copyright: dflash-fleet contributors
# SPDX-License-Identifier: Apache-2.0

"""Facts of a GPU host, and whether it meets given requirements."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_facts
short_description: GPUs, driver, PCIe, limits and disks of a host, checked against requirements
description:
  - Reads what decides whether an engine can run on a host - GPUs, driver and CUDA version, flavour of the kernel
    module, peer access, IOMMU and PCIe ACS, the kernel's command line, locked memory, C(/dev/shm), C library, Python
    versions, disks, and who listens on the ports that are wanted.
  - Sources are C(nvidia-smi) (CSV and XML), C(/proc), C(/sys), C(modinfo). A tool or file that is missing is a fact
    and not an error.
  - With O(requirements), also returns RV(checks), a table of what passes, warns and fails, each with its remedy.
    The module fails on them only with O(enforce).
options:
  root:
    description: Directory of environments, models and instances.
    type: path
    default: /var/lib/sglang
  paths:
    description: More paths whose file system's free space is wanted. O(root) and C(/dev/shm) are always looked at.
    type: list
    elements: path
    default: []
  enforce:
    description:
      - Fail when a check of O(requirements) fails, with all that do in one message. The result is then short
        (RV(failed_checks) and the message), since Ansible prints all of it.
    type: bool
    default: false
  requirements:
    description: What should run there. Without it, RV(checks) is empty.
    type: dict
    suboptions:
      instances:
        description:
          - The instances as filter C(sglang_resolve) returns them. Read are C(instance), C(unit), C(port), C(profile),
            C(gpus) (how many), C(gpu_ids), C(engine) (C(build), C(version)), C(model) (C(name), C(revision)) and
            C(drafter) (C(model), C(revision)).
        type: list
        elements: dict
        default: []
      build:
        description: Kind of build to check for where there are no instances.
        type: str
        choices: [cuda, cpu, rehearsal]
        default: cuda
      venvs:
        description: Lock hashes of the environments that will be needed.
        type: list
        elements: str
        default: []
      model_sizes_gb:
        description:
          - Known sizes by repository, in 10^9 bytes. Others count as nothing, and so do those of the builds cpu and
            rehearsal, whose models are tiny.
        type: dict
        default: {}
      venv_sizes_gb:
        description: Size of an environment by build, in 10^9 bytes.
        type: dict
        default: {}
      min_free_gb:
        description: Space to be left over, in 10^9 bytes.
        type: float
        default: 20
      min_driver:
        description: Oldest driver.
        type: str
        default: "580"
      min_cuda:
        description: Oldest CUDA version that the driver must offer.
        type: str
        default: "13.0"
      venv_python:
        description: >-
          Minor version of the host's own Python that environments are made from, whose headers must be there too. Empty
          where an interpreter is brought along, or is not one of the system's.
        type: str
        default: ""
      min_python:
        description: Oldest Python that must be on the host. Empty means what the engines' releases ask for.
        type: str
        default: ""
      foreign_memory_mib:
        description: GPU memory that processes of others may hold, in MiB.
        type: int
        default: 512
      driver_pending:
        description: The driver is about to be installed, so what that mends only warns, and is listed in RV(pending).
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
    description: Linux.
notes:
  - PCIe ACS and the owner of another user's socket can only be read by root.
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Look at the GPUs
  gpu_facts:
  become: true
  register: host

- name: Show them
  ansible.builtin.debug:
    msg: "{{ host.facts.gpus.list | map(attribute='name') }}"

- name: Stop here where the host cannot take the deployment
  gpu_facts:
    requirements:
      instances: "{{ sglang_resolved }}"
      min_free_gb: 20
    enforce: true
  become: true
"""

RETURN = r"""
facts:
  description: What the host is. Sizes are bytes.
  returned: success
  type: dict
  contains:
    driver:
      description: Version of the GPU driver, null without one.
      type: str
      sample: 580.105.08
    gpu_architecture:
      description: Architecture of the first GPU as compilers name it, empty without one.
      type: str
      sample: sm_120
    gpus:
      description:
        - C(available) (nvidia-smi answered), C(error) (what it said otherwise), C(driver_version), C(cuda_version),
          C(module) (C(loaded), C(installed), C(flavour), C(nouveau)), C(devices) (NVIDIA display controllers on the
          PCI bus), C(peer_access), and C(list) of GPUs with C(index), C(name), C(uuid), C(bus_id),
          C(compute_capability), C(memory_total_bytes), C(memory_used_bytes), C(memory_free_bytes), C(persistence),
          C(mig), C(pcie_gen_max), C(pcie_width) and C(processes) (C(pid), C(name), C(type), C(memory_bytes), C(unit)).
      type: dict
    iommu:
      description: C(enabled), C(mode) (translated, passthrough, off), C(groups), C(options) of the command line.
      type: dict
    acs:
      description: C(readable), C(bridges), C(redirecting) (bus ids of bridges that send peer traffic to the root).
      type: dict
    kernel_command_line:
      description: The kernel's command line.
      type: str
    limits:
      description: C(memlock_bytes) and C(nofile) of this process, null for none.
      type: dict
    systemd:
      description: C(running) and C(version).
      type: dict
    filesystems:
      description: By path, C(free_bytes), C(free_inodes), C(total_bytes), C(device).
      type: dict
    memory:
      description: C(total_bytes), C(available_bytes), C(cached_bytes), C(swap_total_bytes).
      type: dict
    instances:
      description: Names of the instances on the host.
      type: list
      elements: str
    listeners:
      description: Who listens on the instances' ports, as in module M(sglang_state).
      type: dict
    open_engines:
      description:
        - Engines of any kind (SGLang, vLLM) that listen on more than loopback and gave a list of models without a key -
          C(port), C(address), C(pid), C(command), C(unit).
      type: list
      elements: dict
    build_tools:
      description: Paths of C(cc), C(cxx) and C(ninja), null where missing, and C(python_headers), minor versions.
      type: dict
    cuda_toolkits:
      description:
        - CUDA toolkits of the host in the order in which an engine would take them - C(home), C(source), C(version),
          C(missing) (what of a toolkit is not there). Those of environments are in RV(facts.venvs).
        - The source is CUDA_HOME (of an instance's environment), /usr/local/cuda, PATH, or /usr/local/cuda-*, where no
          engine looks by itself.
      type: list
      elements: dict
    models:
      description: Models on the host, as in module M(sglang_state).
      type: dict
    venvs:
      description: Environments on the host, as in module M(sglang_state).
      type: dict
    glibc:
      description: Version of the C library.
      type: str
    kernel:
      description: Release of the kernel.
      type: str
    architecture:
      description: Machine type.
      type: str
    os_release:
      description: The distribution.
      type: dict
    python:
      description: The interpreter that ran this module.
      type: dict
    python_versions:
      description: Interpreters on the host, newest first.
      type: list
      elements: dict
    boot_id:
      description: Changes with every boot.
      type: str
    uptime:
      description: Seconds since boot.
      type: float
checks:
  description: Result of each check against O(requirements).
  returned: success
  type: list
  elements: dict
  contains:
    check:
      description: What was checked.
      type: str
      sample: driver
    status:
      description: One of pass, warn, fail.
      type: str
      sample: fail
    found:
      description: How it is.
      type: str
      sample: 570.133.20
    wanted:
      description: How it should be.
      type: str
      sample: ">= 580"
    remedy:
      description: Variable or action that mends it; empty where the check passes.
      type: str
table:
  description: RV(checks) as lines of text, worst first.
  returned: success
  type: list
  elements: str
pending:
  description: Checks that would fail and that installing the driver mends, with O(requirements.driver_pending).
  returned: success
  type: list
  elements: str
failed_checks:
  description: How many checks fail.
  returned: always
  type: int
  sample: 0
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import hostfacts, preflight, state


def argument_spec() -> dict[str, Any]:
    """The module's arguments."""
    return {
        "root": {"type": "path", "default": "/var/lib/sglang"},
        "paths": {"type": "list", "elements": "path", "default": []},
        "enforce": {"type": "bool", "default": False},
        "requirements": {
            "type": "dict",
            "options": {
                "instances": {"type": "list", "elements": "dict", "default": []},
                "build": {"type": "str", "choices": ["cuda", "cpu", "rehearsal"], "default": "cuda"},
                "venvs": {"type": "list", "elements": "str", "default": []},
                "model_sizes_gb": {"type": "dict", "default": {}},
                "venv_sizes_gb": {"type": "dict", "default": {}},
                "min_free_gb": {"type": "float", "default": 20},
                "min_driver": {"type": "str", "default": "580"},
                "min_cuda": {"type": "str", "default": "13.0"},
                "venv_python": {"type": "str", "default": ""},
                "min_python": {"type": "str", "default": ""},
                "foreign_memory_mib": {"type": "int", "default": 512},
                "driver_pending": {"type": "bool", "default": False},
            },
        },
    }


def main() -> None:
    """Read the facts, check them."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    root = module.params["root"]
    requirements = module.params["requirements"]
    instances = (requirements or {}).get("instances", [])
    try:
        ports = [int(instance["port"]) for instance in instances]
        paths = [root, "/dev/shm", *module.params["paths"]]
        homes = preflight.cuda_homes(instances).values()
        facts = hostfacts.gpu_host_facts(state.Layout(root), ports=ports, paths=paths, cuda_homes=list(homes))
        checks = preflight.check_host(facts, {"root": root, **requirements}) if requirements else []
    except (KeyError, ValueError) as problem:
        module.fail_json(msg=f"requirements: each instance needs instance, unit, port and profile ({problem!r})")
    result = {
        "changed": False,
        "facts": facts,
        "checks": checks,
        "table": preflight.table(checks),
        "pending": preflight.pending(checks),
        "failed_checks": len(preflight.failing(checks)),
    }
    if module.params["enforce"]:
        # A deployment shows no table where nothing fails; that anyone may use an engine is not left to be looked up.
        for entry in preflight.open_engines(checks):
            module.warn(f"{entry['check']}: {entry['found']}: {entry['remedy']}")
    if module.params["enforce"] and result["failed_checks"]:
        module.fail_json(msg=preflight.failure_message(checks), failed_checks=result["failed_checks"])
    module.exit_json(**result)


if __name__ == "__main__":
    main()
