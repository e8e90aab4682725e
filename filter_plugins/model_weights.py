"""Filters of role model_weights: names for pure functions, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ansible.module_utils

# A controller-side plugin does not get the project's module_utils the way modules do.
_MODULE_UTILS = str(Path(__file__).resolve().parents[1] / "module_utils")
if _MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_MODULE_UTILS)

from ansible.module_utils.dflash_fleet import peers


def plan(
    batch: Iterable[str], others: Iterable[str], hostvars: Mapping[str, Any], seeds: int = 1, fanout: int = 0
) -> dict[str, Any]:
    """peers.plan from what each host has noted down."""
    batch, others = list(batch), list(others)
    stocks = {host: hostvars[host].get("__model_weights_stock") for host in dict.fromkeys([*batch, *others])}
    return peers.plan(batch, others, stocks, int(seeds), int(fanout))


def sources(
    whole: Mapping[str, Any], host: str, item: Mapping[str, Any], allow: Iterable[str], ignore: Iterable[str]
) -> list[str]:
    """peers.sources for a model or drafter of `sglang_resolved`."""
    repo = str(item.get("model") or item["name"])
    return peers.sources(whole, host, peers.key(repo, str(item["revision"]), allow, ignore)) if whole else []


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {
            "model_weights_stock": peers.stock,
            "model_weights_filled": peers.filled,
            "model_weights_plan": plan,
            "model_weights_sources": sources,
        }
