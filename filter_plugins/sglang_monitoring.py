"""Filters of the role `sglang_monitoring`: names for pure functions, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ansible.module_utils

# A controller-side plugin does not get the project's module_utils the way modules do.
_MODULE_UTILS = str(Path(__file__).resolve().parents[1] / "module_utils")
if _MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_MODULE_UTILS)

from ansible.module_utils.dflash_fleet import monitoring


def monitored(planned: Mapping[str, Any], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """{host: {address, resolved}} of the hosts with engines; `planned` is of sglang_plan_hosts."""
    return {
        host: {"address": str(hostvars[host].get("ansible_host") or host), "resolved": plan["resolved"]}
        for host, plan in planned.items()
        if plan["resolved"]
    }


def engine_targets(hosts: Mapping[str, Any], watcher: str) -> dict[str, Any]:
    """{targets, left_out}; see monitoring.engine_targets."""
    targets, left_out = monitoring.engine_targets(hosts, watcher)
    return {"targets": targets, "left_out": left_out}


def router_targets(
    names: Sequence[str], hostvars: Mapping[str, Any], defaults: Mapping[str, Any], more: Sequence[str], watcher: str
) -> dict[str, Any]:
    """{targets, left_out}; see monitoring.router_targets. `defaults` are of role sglang_router."""
    routers = {}
    for name in names:
        facts = hostvars[name]
        routers[str(name)] = {
            "address": str(facts.get("ansible_host") or name),
            "host": str(facts.get("sglang_router_metrics_host", defaults["sglang_router_metrics_host"])),
            "port": facts.get("sglang_router_metrics_port", defaults["sglang_router_metrics_port"]),
        }
    targets, left_out = monitoring.router_targets(routers, more, watcher)
    return {"targets": targets, "left_out": left_out}


def unknown_alerts(thresholds: Mapping[str, Any], without: Sequence[str]) -> list[str]:
    """What the inventory says about alerts that there are none of."""
    return monitoring.unknown(thresholds, without)


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Any]:
        return {
            "sglang_monitored": monitored,
            "sglang_engine_targets": engine_targets,
            "sglang_host_targets": monitoring.host_targets,
            "sglang_router_targets": router_targets,
            "sglang_scrape_configs": monitoring.scrape_configs,
            "sglang_alert_rules": monitoring.rules,
            "sglang_unknown_alerts": unknown_alerts,
            "sglang_dashboard": lambda _: monitoring.dashboard(),
        }
