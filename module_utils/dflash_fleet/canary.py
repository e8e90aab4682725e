"""Whether the first hosts of a rollout do as well as hosts that were not touched yet. Pure.

A look is what metrics.live says of an instance at one moment. Figures of several looks:

    requests           answered between the first look and the last
    error_rate         share of them that was aborted
    accept_length      mean, where a drafter drafts
    tokens_per_second  mean for one request, since hosts have different numbers of them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

# How much worse the first hosts may do: a share of their requests, and shares of what the others reach. What is None or
# left out by the inventory is not compared. Below `requests` neither side has enough to compare.
LIMITS: dict[str, float | None] = {
    "requests": 20,
    "error_rate": 0.02,
    "accept_length": 0.15,
    "tokens_per_second": 0.3,
}
NAMES = {"accept_length": "accept length", "tokens_per_second": "tokens per second of a request"}

Look = Mapping[str, Any]


class LimitError(ValueError):
    """`sglang_rollout_soak_limits` cannot be read; the message says how it is written."""


def limits_of(wanted: Mapping[str, Any] | None) -> dict[str, float | None]:
    """The limits of an inventory over the defaults."""
    found = {**LIMITS, **(wanted or {})}
    for name, value in found.items():
        if name not in LIMITS:
            raise LimitError(f"sglang_rollout_soak_limits: {name!r} is none of {', '.join(LIMITS)}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
            raise LimitError(f"sglang_rollout_soak_limits: {name}: {value!r} is no number of at least 0, or null")
    return found


def figures(looks: Sequence[Look]) -> dict[str, float | None]:
    """What an instance did between its first look and its last."""

    def grown(name: str) -> float:
        # An engine shows a counter from its first event on.
        counts = [float(look.get(name) or 0) for look in looks if "error" not in look]
        # A counter that fell belongs to another start.
        return counts[-1] - counts[0] if len(counts) > 1 and counts[-1] >= counts[0] else 0.0

    def mean(values: Iterable[float]) -> float | None:
        found = list(values)
        return sum(found) / len(found) if found else None

    busy = [look for look in looks if (look.get("running") or 0) > 0]
    answered, aborted = grown("requests"), grown("aborted")
    return {
        "requests": answered,
        "error_rate": aborted / (answered + aborted) if answered + aborted else None,
        "accept_length": mean(float(look["accept_length"]) for look in busy if look.get("accept_length") is not None),
        "tokens_per_second": mean(
            float(look["tokens_per_second"]) / float(look["running"])
            for look in busy
            if (look.get("tokens_per_second") or 0) > 0
        ),
    }


def compare(
    first: Mapping[str, Sequence[Look]], others: Sequence[Sequence[Look]], wanted: Mapping[str, Any] | None = None
) -> dict[str, list[str]]:
    """Why instances of `first` do worse than `others`, by instance; nothing for those that do not."""
    limits = limits_of(wanted)
    least = limits["requests"] or 0
    enough = [found for found in map(figures, others) if (found["requests"] or 0) >= least]
    found: dict[str, list[str]] = {}
    for name, looks in first.items():
        own = figures(looks)
        reasons = worse(own, enough, limits) if enough and (own["requests"] or 0) >= least else []
        if reasons:
            found[name] = reasons
    return found


def worse(
    own: Mapping[str, float | None], others: Sequence[Mapping[str, float | None]], limits: Mapping[str, float | None]
) -> list[str]:
    """Each figure that lies further from the others' median than its limit allows."""
    reasons = []
    usual = {name: [value for other in others if (value := other[name]) is not None] for name in LIMITS}
    allowed, errors = limits["error_rate"], own["error_rate"]
    if allowed is not None and errors is not None:
        normal = median(usual["error_rate"]) if usual["error_rate"] else 0.0
        if errors > normal + allowed:
            reasons.append(f"{errors:.1%} of its requests are aborted, of other hosts' {normal:.1%}")
    for name, words in NAMES.items():
        allowed, value = limits[name], own[name]
        if allowed is None or value is None or not usual[name]:
            continue
        normal = median(usual[name])
        if value < normal * (1 - allowed):
            reasons.append(f"{words} {value:.2f}, of other hosts {normal:.2f}")
    return reasons


def text(first: Mapping[str, Sequence[Look]], others: Mapping[str, Sequence[Look]]) -> list[str]:
    """The figures of both sides, a line for each instance."""

    def line(name: str, looks: Sequence[Look]) -> str:
        found = figures(looks)

        def shown(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        return (
            f"{name}: {found['requests'] or 0:.0f} requests, errors {shown(found['error_rate'], '.1%')}, accept length "
            f"{shown(found['accept_length'], '.2f')}, {shown(found['tokens_per_second'], '.1f')} tokens/s for each"
        )

    return [
        *(line(f"first batch  {name}", looks) for name, looks in first.items()),
        *(line(f"not touched  {name}", looks) for name, looks in others.items()),
    ]


def looks(soak: float) -> int:
    """How often hosts are looked at in a soak of so many seconds, first and last look included."""
    return 1 + max(1, min(6, int(soak) // 5))


def live_of(result: Mapping[str, Any], host: str = "") -> dict[str, Look]:
    """What sglang_state with `live` has said of each instance that serves, under `[host ]instance`."""
    instances = (result.get("state") or {}).get("instances") or {}
    return {
        f"{host} {name}".strip(): facts["live"] for name, facts in instances.items() if facts.get("live") is not None
    }


def lives_of(results: Iterable[Mapping[str, Any]]) -> dict[str, Look]:
    """The same of several hosts, as a loop over them registers it. Hosts that did not answer say nothing."""
    found: dict[str, Look] = {}
    for result in results:
        found.update(live_of(result, str(result.get("item"))))
    return found


def seen(rounds: Iterable[Mapping[str, Look]]) -> dict[str, list[Look]]:
    """Looks by instance, from looks by round."""
    found: dict[str, list[Look]] = {}
    for one in rounds:
        for name, look in one.items():
            found.setdefault(name, []).append(look)
    return found
