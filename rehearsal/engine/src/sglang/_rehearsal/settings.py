"""Pace and failures of a rehearsal: a JSON file on the host.

    {"pace": 0.05,                        # 1.0 is the incident's own speed; every duration of a load is multiplied
     "phases": {"weights": 94},           # seconds at pace 1.0, see PHASE_SECONDS
     "throughput": {"single": 97.9, "peak": 1493, "ttft": 0.2},   # tokens per second at one stream and at many; or a
                                   # list of such, each with "when", of which the first that matches is taken
     "accept_length": 3.4,
     "gpu_gb": 95.0,
     "failures": [{"at": "warmup", "kind": "gpu_oom", "rank": 3, "after": 1.0, "once": true}]}

The file is DFLASH_REHEARSAL_CONFIG or /etc/dflash-fleet/rehearsal.json; without it: pace 1.0 and no failures.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

DEFAULT_PATH = "/etc/dflash-fleet/rehearsal.json"

# Seconds at pace 1.0. The incident: weights 73-115 s a rank, ready after 210 s without graphs.
PHASE_SECONDS: dict[str, float] = {
    "launch": 22.0,  # imports and configuration, before the ranks say anything
    "dist_init": 18.0,
    "weights": 115.0,  # the slowest rank; the fastest takes 73/115 of it
    "draft_weights": 11.0,
    "kv_cache": 6.0,
    "graph_capture": 34.0,  # target and drafter together; skipped with graphs off
    "warmup": 12.0,  # the first forward pass compiles kernels
    "warmup_eager": 36.0,  # ... more of them where no graph was captured
    "drain_poll": 5.0,
    "watchdog_poll": 1.0,
    "ready_poll": 5.0,
    "crash_diagnostics": 5.0,
}
# A pace must not make a poll so short that it only burns CPU.
SHORTEST: dict[str, float] = {"drain_poll": 0.2, "watchdog_poll": 0.2, "ready_poll": 0.2, "crash_diagnostics": 0.2}

PHASES = ("launch", "dist_init", "weights", "kv_cache", "graph_capture", "warmup", "serving")


class SettingsError(Exception):
    """The pace file cannot be used; the text says why."""


@dataclass
class Failure:
    """One failure asked for."""

    kind: str
    at: str
    rank: int = 0
    after: float = 0.0  # seconds into the phase, scaled by the pace
    once: bool = False
    collateral: bool = False  # the other ranks add their NCCL and TCPStore noise
    when: dict[str, Any] = field(default_factory=dict)  # only if these server arguments have these values
    options: dict[str, Any] = field(default_factory=dict)
    mark: str = ""  # file that remembers a failure wanted once


@dataclass
class Throughput:
    """How fast a server with certain arguments is."""

    figures: dict[str, float]
    when: dict[str, Any]  # only if these server arguments have these values


@dataclass
class Settings:
    """The whole file, with defaults."""

    pace: float = 1.0
    phases: dict[str, float] = field(default_factory=dict)
    throughputs: list[Throughput] = field(default_factory=list)
    throughput: dict[str, float] = field(default_factory=dict)  # the one of this start
    accept_length: float = 3.4
    gpu_gb: float = 94.97
    failures: list[Failure] = field(default_factory=list)

    def seconds(self, phase: str) -> float:
        """How long this phase takes in this rehearsal."""
        base = float(self.phases.get(phase, PHASE_SECONDS[phase]))
        return max(base * self.pace, SHORTEST.get(phase, 0.0))


def load(path: str | None = None) -> Settings:
    """Reads the pace file; a missing one means the defaults."""
    name = path or os.environ.get("DFLASH_REHEARSAL_CONFIG") or DEFAULT_PATH
    try:
        with open(name, encoding="utf-8") as stream:
            text = stream.read()
    except FileNotFoundError:
        if path or os.environ.get("DFLASH_REHEARSAL_CONFIG"):
            raise SettingsError(f"rehearsal settings: {name} does not exist")
        return Settings()
    except OSError as error:
        raise SettingsError(f"rehearsal settings: {name}: {error.strerror}")
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"rehearsal settings: {name} is not JSON: {error}")
    return parse(raw, name, text)


def parse(raw: Any, name: str, text: str = "") -> Settings:
    """Checks the file's content; an unknown key is a typing error and refused."""
    from . import failures  # late: failures needs nothing of this module

    if not isinstance(raw, dict):
        raise SettingsError(f"rehearsal settings: {name}: expected a JSON object")
    known = {"pace", "phases", "throughput", "accept_length", "gpu_gb", "failures", "schema"}
    for key in raw:
        if key not in known:
            raise SettingsError(f"rehearsal settings: {name}: unknown key {key!r}; known: {', '.join(sorted(known))}")
    settings = Settings(
        pace=_number(raw, "pace", 1.0, name),
        accept_length=_number(raw, "accept_length", 3.4, name),
        gpu_gb=_number(raw, "gpu_gb", 94.97, name),
        phases={str(k): float(v) for k, v in (raw.get("phases") or {}).items()},
    )
    listed = raw.get("throughput") or []
    for item in listed if isinstance(listed, list) else [listed]:
        figures = {str(k): v for k, v in item.items() if k != "when"} if isinstance(item, dict) else {"": None}
        if not set(figures) <= {"single", "peak", "ttft"}:
            raise SettingsError(f"rehearsal settings: {name}: throughput has single, peak, ttft and when, not {item!r}")
        numbers = {key: _number(figures, key, 0.0, name) for key in figures}
        settings.throughputs.append(Throughput(numbers, dict(item.get("when") or {})))
    for phase in settings.phases:
        if phase not in PHASE_SECONDS:
            raise SettingsError(f"rehearsal settings: {name}: unknown phase {phase!r} in phases")
    for index, item in enumerate(raw.get("failures") or []):
        where = f"rehearsal settings: {name}: failures[{index}]"
        kinds = sorted(name for name, kind in failures.KINDS.items() if not kind.rule_only)
        if not isinstance(item, dict) or item.get("kind") not in kinds:
            raise SettingsError(f"{where}: kind must be one of {', '.join(kinds)}")
        kind = str(item["kind"])
        at = str(item.get("at") or failures.KINDS[kind].at)
        if at not in PHASES:
            raise SettingsError(f"{where}: at must be one of {', '.join(PHASES)}")
        fields = {"kind", "at", "rank", "after", "once", "collateral", "when"}
        settings.failures.append(
            Failure(
                kind=kind,
                at=at,
                rank=int(item.get("rank", 0)),
                after=float(item.get("after", 0.0)),
                once=bool(item.get("once", False)),
                collateral=bool(item.get("collateral", False)),
                when=dict(item.get("when") or {}),
                options={k: v for k, v in item.items() if k not in fields},
                mark=_mark(text, index),
            )
        )
    return settings


def _number(raw: dict[str, Any], key: str, default: float, name: str) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise SettingsError(f"rehearsal settings: {name}: {key} must be a number >= 0")
    return float(value)


def _mark(text: str, index: int) -> str:
    """Where "it happened already" is remembered: survives a restart of the unit, not a changed file or a reboot."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return os.path.join(folder, f"dflash-rehearsal-{os.getuid()}-{digest}-{index}")


def matches(when: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether a condition holds for this start."""
    return all(arguments.get(key) == value for key, value in when.items())


def due(failure: Failure, arguments: dict[str, Any]) -> bool:
    """Whether this failure applies to this start."""
    return not (failure.once and os.path.exists(failure.mark)) and matches(failure.when, arguments)


def throughput(settings: Settings, arguments: dict[str, Any]) -> dict[str, float]:
    """How fast this start is, as far as the file says."""
    return next((item.figures for item in settings.throughputs if matches(item.when, arguments)), {})


def spend(failure: Failure) -> None:
    """Remembers that a failure wanted once has happened."""
    if failure.once:
        with open(failure.mark, "w", encoding="utf-8"):
            pass
