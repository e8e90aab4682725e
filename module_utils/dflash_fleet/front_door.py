"""The front door of a fleet: which hosts run engines, and whether a router can stand before them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from . import gate, words
from .profile_checks import reach_of

# Inventory groups of hosts that serve the fleet and run no engine, unless another group names them too.
SERVANTS = ("sglang_router", "sglang_monitoring")


def engine_hosts(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Hosts that run engines: all but those that the inventory knows as routers or monitors and as nothing else."""
    named = {host for name, hosts in groups.items() if name not in ("all", "ungrouped", *SERVANTS) for host in hosts}
    servants = {host for name in SERVANTS for host in groups.get(name, [])} - named
    return [str(host) for host in groups["all"] if host not in servants]


def problems(wish: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why a router cannot stand before these engines as asked.

    `wish`: {host, port, own, key, certificate, certificate_key}; `own` are the router's own names in the inventory.
    `workers`: [{host, instance, url, key, model}].
    """
    found = []
    reach = reach_of(str(wish["host"]))
    if not reach:
        found.append(f"sglang_router_host: {wish['host']!r} is no IP address")
    elif reach in ("every interface", "a public address") and not wish["key"]:
        found.append(
            f"sglang_router_host: {wish['host']} is {reach} and no sglang_api_key is set; set a key (from a vault), or "
            "write a private address or 127.0.0.1"
        )
    if int(wish["port"]) < 1024:
        found.append(
            f"sglang_router_port: {wish['port']} is below 1024, which only root may listen on; write a higher one"
        )
    if bool(wish["certificate"]) != bool(wish["certificate_key"]):
        found.append("sglang_router_tls_certificate and sglang_router_tls_key belong together: set both, or neither")
    if not workers:
        found.append("sglang_router_workers: the inventory has no engine that a router could stand before")
    models = sorted({str(worker["model"]) for worker in workers if worker.get("model")})
    if len(models) > 1:
        found.append(
            f"sglang_router_workers: the engines serve different models ({', '.join(models)}), and a router sends a "
            "request to any of its engines, whatever model it names; give each model a router, with its own workers"
        )
    for worker in workers:
        who = f"{worker['host']} (instance {worker['instance']})"
        if reach_of(urlsplit(str(worker["url"])).hostname or "") == "loopback" and worker["host"] not in wish["own"]:
            found.append(f"sglang_host: {who} listens on loopback, where no router of another host reaches it")
        if bool(worker["key"]) != bool(wish["key"]):
            has, lacks = ("the engine", "the router") if worker["key"] else ("the router", "the engine")
            found.append(f"sglang_api_key: {who}: {has} has a key and {lacks} has none; both groups need the same")
    return found


def own_address(release: Mapping[str, Any]) -> str:
    """Where an engine's own host reaches it; `release` is its release.json."""
    return f"http://{words.endpoint(gate.connect_host(str(release['host'])), release['port'])}"
