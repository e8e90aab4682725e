"""Filters of playbooks that look at the whole fleet: names for pure functions, nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ansible.module_utils

# A controller-side plugin does not get the project's module_utils the way modules do.
_MODULE_UTILS = str(Path(__file__).resolve().parents[1] / "module_utils")
if _MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_MODULE_UTILS)

from ansible.module_utils.dflash_fleet import canary, front_door, ladder, preflight, rollout, status, words

# Where the inventory can say `auto`.
PROFILES = ("sglang_profile", "sglang_instances", "sglang_standby_profiles")


def of_hosts(hosts: Iterable[str], hostvars: Mapping[str, Any], variable: str) -> dict[str, Any]:
    """{host: its value of a variable, or {}}, in the order of `hosts`."""
    return {str(host): hostvars[host].get(variable, {}) for host in hosts}


def wish_digest(variables: Mapping[str, Any]) -> str:
    """The digest of a host's wish; see rollout.wish_digest. None where a benchmark on file decides what it is."""
    try:
        profiles = json.dumps([variables.get(name) for name in PROFILES], default=str)
    except Exception:  # templating fails in as many ways as there are filters
        return ""
    if '"auto"' in profiles:
        return ""
    return rollout.wish_digest(variables, Path(_MODULE_UTILS).parent)


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {
            "sglang_engine_hosts": front_door.engine_hosts,
            "sglang_router_problems": front_door.problems,
            "sglang_of_hosts": of_hosts,
            "sglang_batches": rollout.batches,
            "sglang_batch_sizes": rollout.sizes_of,
            "sglang_batches_text": rollout.plan_text,
            "sglang_digest": wish_digest,
            "sglang_lost": rollout.lost,
            "sglang_soaks": rollout.soaks,
            "sglang_soak_looks": canary.looks,
            "sglang_live": canary.live_of,
            "sglang_lives": canary.lives_of,
            "sglang_seen": canary.seen,
            "sglang_worse": canary.compare,
            "sglang_worse_text": canary.text,
            "sglang_failures": rollout.failures,
            "sglang_failure_text": rollout.failure_text,
            "sglang_summary_as_is": ladder.summary_as_is,
            "sglang_summary_waiting": ladder.summary_waiting,
            "sglang_why": words.why,
            "sglang_status": status.document,
            "sglang_status_text": status.text,
            "sglang_preflight": preflight.fleet_report,
            "sglang_preflight_markdown": preflight.fleet_markdown,
            "sglang_preflight_text": preflight.fleet_text,
        }
