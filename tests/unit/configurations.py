"""Every configuration the tests render: profile x drafter x CUDA graphs, and overlays one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from dflash_fleet import profiles

#: The releases at which options moved, and the newest.
RELEASES = ("0.5.11", "0.5.13", "0.5.14", "0.5.19", "0.5.20", "0.5.23")
PROFILES = ("tp8", "pp8", "ep8", "ep4", "single")
DRAFTERS = ("none", "dflash", "eagle3")
GRAPHS = ("auto", "enabled", "disabled", "decode_only", "prefill_disabled")

BASE: dict[str, Any] = {
    "model": "moonshotai/Kimi-K2.6",
    "model_revision": "a" * 40,
    "model_path": "/models/kimi-k2.6",
    "drafter_model": "SubSir/Kimi-K2.6-DFlash-tmp-long",
    "drafter_revision": "b" * 40,
    "drafter_path": "/models/drafter",
    "served_model_name": "kimi-k2.6",
}

#: The incident: EP8 with the drafter and CUDA graphs on, on a release that cannot replay them.
INCIDENT: dict[str, Any] = {**BASE, "version": "0.5.11", "profile": "ep8", "drafter": "dflash", "cuda_graph": "enabled"}

#: Overlays by name, each laid over tp8 with the drafter.
OVERLAYS: dict[str, dict[str, Any]] = {
    "kimi": {"trust_remote_code": True, "reasoning_parser": "kimi_k2", "tool_call_parser": "kimi_k2"},
    "limits": {"mem_fraction_static": 0.9, "context_length": 131072, "max_running_requests": 48},
    "no metrics": {"enable_metrics": False},
    "attention backend": {"attention_backend": "triton"},
    "extra arguments": {"extra_args": {"kv-cache-dtype": "auto", "enable-mixed-chunk": True, "watchdog-timeout": 900}},
    "graph sizes, old spelling": {"extra_args": {"cuda-graph-max-bs": 32, "cuda-graph-bs": [1, 2, 4]}},
    "graph sizes, new spelling": {"extra_args": {"cuda-graph-max-bs-decode": 32}},
    "draft window": {"extra_args": {"speculative-draft-window-size": 512}},
    "option of 0.5.18": {"extra_args": {"speculative-draft-kv-cache-dtype": "auto"}},
    "own address and key": {"host": "192.0.2.11", "api_key_set": True},
    "sm_120": {"gpu_architecture": "sm_120"},
    "half the GPUs": {"profile": "tp4", "profiles": {"tp4": {"tp": 4}}, "gpus": [4, 5, 6, 7]},
    "second of two hosts": {
        "profile": "tp16",
        "profiles": {"tp16": {"tp": 16}},
        "nnodes": 2,
        "node_rank": 1,
        "dist_init_addr": "192.0.2.11:20000",
    },
    "all-to-all backend": {
        "profile": "deep",
        "profiles": {"deep": {"tp": 8, "ep": 8, "options": {"moe-a2a-backend": "deepep"}}},
    },
    "replicas": {"profile": "dp2", "profiles": {"dp2": {"tp": 4, "dp": 2}}},
    "recorded fallback": {"profile": "ep8", "cuda_graph": "enabled", "overrides": {"sglang_cuda_graph": "disabled"}},
    "cpu build": {"build": "cpu", "profile": "single"},
}


def matrix(version: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(title, request) of every combination for a release."""
    for profile in PROFILES:
        for drafter in DRAFTERS:
            for graphs in GRAPHS:
                title = f"{profile}, drafter {drafter}, graphs {graphs}"
                yield title, {**BASE, "version": version, "profile": profile, "drafter": drafter, "cuda_graph": graphs}


def overlays(version: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(title, request) of every overlay for a release."""
    for title, overlay in OVERLAYS.items():
        yield title, {**BASE, "version": version, "profile": "tp8", "drafter": "dflash", **overlay}


def crossed(version: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(title, request) of every overlay on every profile, for tables that nobody has to read."""
    for profile in PROFILES:
        for title, overlay in OVERLAYS.items():
            drafter = "none" if profile == "pp8" else "dflash"
            yield f"{profile}, {title}", {**BASE, "version": version, "drafter": drafter, **overlay, "profile": profile}


def everything(version: str) -> list[tuple[str, dict[str, Any]]]:
    """(title, request) of every configuration that the tests know for a release."""
    return [*matrix(version), *overlays(version), *crossed(version)]


def command_lines(version: str) -> list[tuple[str, list[str]]]:
    """(title, options) of every configuration that the resolver does not refuse."""
    found = []
    for title, request in everything(version):
        with contextlib.suppress(profiles.ConfigError):
            found.append((title, profiles.resolve(request)["argv"][2:]))
    assert len(found) > 120
    return found
