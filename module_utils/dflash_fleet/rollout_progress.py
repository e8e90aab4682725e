"""Where a rollout stands while a batch loads, in one line. Pure.

A shot is what is known of one host that loads: {state, phase, percent, seconds, remaining}; `state` is loading, ready,
or how its wait ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Hosts of a batch that have lines of their own; more would bury the one line that counts.
NAMED = 8


def percent(shot: Mapping[str, Any]) -> int | None:
    """How much of its load a host has behind it: by the times of its last good start, or within its present phase."""
    seconds, remaining = shot.get("seconds"), shot.get("remaining")
    if isinstance(seconds, (int, float)) and isinstance(remaining, (int, float)) and seconds + remaining > 0:
        return int(100 * seconds / (seconds + remaining))
    return None


def span(shots: Sequence[Mapping[str, Any]]) -> str:
    """`31 %`, `31 to 62 %`, or the phases of hosts that have no last start to compare with: `weights 31 to 62 %`."""
    overall = [value for value in map(percent, shots) if value is not None]
    if len(overall) == len(shots) and overall:
        return _range(overall)
    words = []
    for phase in dict.fromkeys(str(shot.get("phase")) for shot in shots):
        known = [int(shot["percent"]) for shot in shots
                 if str(shot.get("phase")) == phase and shot.get("percent") is not None]  # fmt: skip
        words.append(f"{phase} {_range(known)}" if known else phase)
    return ", ".join(words)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low} %" if low == high else f"{low} to {high} %"


def line(hosts: Sequence[str], batch: Sequence[str], shots: Mapping[str, Mapping[str, Any]]) -> str:
    """`rollout  4 of 12 had their turn; now 1 ready, 2 loading (31 to 62 %), 0 failed; 5 waiting`."""
    before = hosts.index(batch[0]) if batch and batch[0] in hosts else 0
    here = [shots.get(host) or {"state": "loading"} for host in batch]
    loading = [shot for shot in here if shot["state"] == "loading"]
    ready = sum(1 for shot in here if shot["state"] == "ready")
    text = span([shot for shot in loading if shot.get("phase")])
    return (
        f"rollout  {before} of {len(hosts)} had their turn; now {ready} ready, {len(loading)} loading"
        + (f" ({text})" if text else "")
        + f", {len(here) - ready - len(loading)} failed; {len(hosts) - before - len(batch)} waiting"
    )
