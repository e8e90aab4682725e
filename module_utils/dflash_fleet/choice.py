"""Which configuration to run: pure functions over the records of dflash_fleet.bench.

Objectives: `latency` (tokens per second of a single stream), `throughput` (the most tokens per second at any
concurrency), `{concurrency: N}` (tokens per second at N streams), `{ttft_p99_ms: X}` (the most tokens per second while
the 99th percentile of the time to first token stays within X). Two configurations tie where their difference is within
the noise of their repeats; among equals the one that stands first in the list of candidates is taken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import bench

NAMED = ("latency", "throughput")
LIMITS = ("concurrency", "ttft_p99_ms")

# Two-sided 95 % quantiles of Student's t by degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
LEAST = 0.01  # share of the larger value: below it nobody could tell the difference on another day
SINGLE = 0.05  # ... where a run was not repeated, so that nothing is known of its noise
TOO_MANY_ERRORS = 0.01  # share of requests; a point beyond it is left out


class ObjectiveError(ValueError):
    """`sglang_objective` cannot be read, or the results cannot answer it; the message says what to write or run."""


def objective(wanted: Any) -> tuple[str, float | None]:
    """(kind, number) of what a person wrote."""
    if isinstance(wanted, str) and wanted in NAMED:
        return wanted, None
    if isinstance(wanted, Mapping) and len(wanted) == 1:
        ((name, value),) = wanted.items()
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = 0.0
        if name in LIMITS and number > 0 and not isinstance(value, bool):
            return str(name), number
    raise ObjectiveError(
        f"sglang_objective: {wanted!r} is none; write latency, throughput, {{concurrency: 32}} or {{ttft_p99_ms: 500}}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# From records to curves


def curves(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a candidate: what it is, its points by concurrency with every repeat, and why it failed if it did."""
    found: dict[str, dict[str, Any]] = {}
    kept = sorted(records, key=lambda record: (record["order"], record["run"]))
    for record in kept:
        name = record["candidate"]
        entry = found.setdefault(
            name,
            {
                "name": name,
                "profile": record["profile"],
                "drafter": record["drafter"],
                "cuda_graph": record["cuda_graph"],
                "overlay": record["overlay"],
                "order": record["order"],
                "rehearsal": False,
                "hosts": [],
                "points": {},
                "tried": [],
                "left_out": [],
                "failed": None,
            },
        )
        entry["rehearsal"] = entry["rehearsal"] or record["rehearsal"]
        if record["host"] not in entry["hosts"]:
            entry["hosts"].append(record["host"])
        if record["kind"] == "failed":
            entry["failed"] = record.get("cause") or record.get("summary") or "did not serve"
            continue
        if int(record["concurrency"]) not in entry["tried"]:
            entry["tried"].append(int(record["concurrency"]))
        if record["errors"] > TOO_MANY_ERRORS * record["requests"]:
            entry["left_out"].append(
                f"{record['errors']} of {record['requests']} requests failed at {record['concurrency']}"
            )
            continue
        entry["points"].setdefault(int(record["concurrency"]), []).append(dict(record))
    for entry in found.values():
        entry["points"] = dict(sorted(entry["points"].items()))
    return list(found.values())


def rates(curve: Mapping[str, Any], concurrency: int) -> list[float]:
    """Tokens per second of each repeat."""
    return [float(record["output_throughput"]) for record in curve["points"][concurrency]]


def mean(curve: Mapping[str, Any], concurrency: int) -> float:
    """Of the repeats."""
    return statistics.fmean(rates(curve, concurrency))


def peak(curve: Mapping[str, Any]) -> int | None:
    """The concurrency with the most tokens per second."""
    return max(curve["points"], key=lambda concurrency: mean(curve, concurrency), default=None)


def noise(one: Sequence[float], other: Sequence[float]) -> float:
    """The difference of the means of two series below which they cannot be told apart (Welch's t, 95 %)."""
    largest = max(abs(statistics.fmean(one)), abs(statistics.fmean(other)))
    if len(one) < 2 or len(other) < 2:
        return SINGLE * largest
    shares = [statistics.variance(series) / len(series) for series in (one, other)]
    total = sum(shares)
    if total == 0:
        return LEAST * largest
    freedom = total**2 / sum(share**2 / (len(series) - 1) for share, series in zip(shares, (one, other)))
    return max(LEAST * largest, student(freedom) * math.sqrt(total))


def student(freedom: float) -> float:
    """The quantile for so many degrees of freedom; Welch's formula gives fractions: linear in their inverse."""
    if freedom >= len(STUDENT):
        return 1.96 + 2.6 / freedom  # within 0.01 of the tables
    below = max(1, int(freedom))
    low, high = STUDENT[below - 1], STUDENT[below]
    part = (1 / below - 1 / max(freedom, 1.0)) / (1 / below - 1 / (below + 1))
    return low + (high - low) * part


# ---------------------------------------------------------------------------------------------------------------------
# The choice


def _point(curve: Mapping[str, Any], kind: str, number: float | None) -> int | None:
    """The concurrency at which a candidate is judged; None where it has nothing to say."""
    points = curve["points"]
    if kind == "latency":
        return 1 if 1 in points else None
    if kind == "throughput":
        return peak(curve)
    if kind == "concurrency":
        return int(number or 0) if int(number or 0) in points else None
    within = {
        concurrency: mean(curve, concurrency)
        for concurrency, records in points.items()
        # The worst repeat has to hold it: a promise kept every other time is none.
        if all(record["ttft_ms"] and record["ttft_ms"]["p99"] <= (number or 0) for record in records)
    }
    return max(within, key=lambda concurrency: within[concurrency], default=None)


def words(kind: str, number: float | None) -> str:
    """The objective as a person says it."""
    return {
        "latency": "a single stream",
        "throughput": "peak throughput",
        "concurrency": f"{number or 0:g} streams at once",
        "ttft_p99_ms": f"throughput with 99 % of first tokens within {number or 0:g} ms",
    }[kind]


def choose(records: Iterable[Mapping[str, Any]], wanted: Any) -> dict[str, Any]:
    """The best candidate for an objective, its margin over the next, and what ties with it.

    `best` is null where no candidate can be judged; `why` then says what is missing.
    """
    kind, number = objective(wanted)
    all_curves = curves(records)
    judged: list[dict[str, Any]] = []
    unlike: list[str] = []
    furthest = max((point for curve in all_curves for point in curve["tried"]), default=0)
    for curve in all_curves:
        at = _point(curve, kind, number)
        # A peak below the concurrency at which others have theirs says nothing.
        if curve["points"] and (at is None or (kind == "throughput" and furthest not in curve["tried"])):
            unlike.append(curve["name"])
        elif at is not None:
            judged.append({"curve": curve, "at": at, "value": mean(curve, at), "rates": rates(curve, at)})
    judged.sort(key=lambda item: -item["value"])
    result: dict[str, Any] = {
        "objective": wanted,
        "for": words(kind, number),
        "best": None,
        "profile": None,
        "overlay": {},
        "tie": [],
        "next": None,
        "margin": None,
        "margin_percent": None,
        "noise": None,
        "why": "",
        "unlike": unlike,
        "rehearsal": any(curve["rehearsal"] for curve in all_curves),
        "ranking": [
            {"name": item["curve"]["name"], "value": round(item["value"], 2), "concurrency": item["at"]}
            for item in judged
        ],
    }
    if not judged:
        result["why"] = _missing(all_curves, kind, number)
        return result
    first = judged[0]
    equals = [item for item in judged[1:] if first["value"] - item["value"] <= noise(first["rates"], item["rates"])]
    best = min([first, *equals], key=lambda item: (item["curve"]["order"], item["curve"]["name"]))
    result["best"], result["profile"] = best["curve"]["name"], best["curve"]["profile"]
    result["overlay"] = dict(best["curve"]["overlay"])
    result["value"], result["concurrency"] = round(best["value"], 2), best["at"]
    result["tie"] = [item["curve"]["name"] for item in [first, *equals] if item is not best]
    others = [item for item in judged if item is not best]
    if others:
        following = others[0]
        margin = best["value"] - following["value"]
        result["next"] = following["curve"]["name"]
        result["margin"] = round(margin, 2)
        result["margin_percent"] = round(100 * margin / following["value"], 1) if following["value"] else None
        result["noise"] = round(noise(best["rates"], following["rates"]), 2)
    return result


def _missing(all_curves: Sequence[Mapping[str, Any]], kind: str, number: float | None) -> str:
    points = sorted({concurrency for curve in all_curves for concurrency in curve["points"]})
    if not all_curves:
        return "nothing was measured"
    if not points:
        return "no candidate served: " + "; ".join(f"{curve['name']}: {curve['failed']}" for curve in all_curves)
    if kind in ("concurrency", "latency"):
        return f"nothing was measured at {number or 1:g} streams, only at {', '.join(map(str, points))}"
    lowest = [
        (max(record["ttft_ms"]["p99"] for record in records), curve["name"])
        for curve in all_curves
        for records in curve["points"].values()
        if all(record["ttft_ms"] for record in records)
    ]
    if not lowest:
        return "no time to first token was measured"
    value, name = min(lowest)
    return f"no candidate keeps it; the nearest is {name} with {value:.0f} ms"


def recorded(
    records: Iterable[Mapping[str, Any]], request: Mapping[str, Any], host: str, wanted: Any
) -> dict[str, Any]:
    """The answer that `sglang_profile: auto` takes on a host, as `choose` gives it, with `hosts` it was measured on.

    Only results of the same release, model and drafter count: the host's own, or else those of the other hosts, which
    must be of one kind. `best` is null where there is none, and `why` says what to do.
    """
    same = [record for record in bench.newest(records) if bench.same_wish(record, request)]
    own = [record for record in same if record["host"] == host]
    used = own or same
    hosts = sorted({str(record["host"]) for record in used})
    release = f"SGLang {request['version']} ({request['build']}) with this model and drafter"
    if not used:
        why = f"no benchmark of {release} is recorded; run playbooks/benchmark.yml, or name a profile"
        return {"best": None, "overlay": {}, "why": why, "hosts": []}
    if len({(record["gpu"], record["gpus"]) for record in used}) > 1:
        why = f"hosts with different GPUs were measured ({', '.join(hosts)}); measure this one, or name a profile"
        return {"best": None, "overlay": {}, "why": why, "hosts": hosts}
    answer = choose(used, wanted)
    if answer["best"] is None:
        answer["why"] = f"the benchmark has no answer for {answer['for']}: {answer['why']}"
    return {**answer, "hosts": hosts}


# ---------------------------------------------------------------------------------------------------------------------
# Speculation


def speculation(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each profile that was measured with a drafter and without: where the drafter hurts, where it helps.

    Graphs may differ between the two, since a drafter may cost them; each side shows its better one at each point.
    """
    sides: dict[str, dict[bool, list[dict[str, Any]]]] = {}
    for curve in curves(records):
        if curve["points"]:
            sides.setdefault(curve["profile"], {}).setdefault(curve["drafter"] != "none", []).append(curve)
    found = []
    for profile, pair in sides.items():
        if len(pair) < 2:
            continue
        common = sorted(
            {point for curve in pair[True] for point in curve["points"]}
            & {point for curve in pair[False] for point in curve["points"]}
        )
        rows = [_compare(pair, point) for point in common]
        if not rows:
            continue
        with_drafter = min(pair[True], key=lambda curve: curve["order"])
        found.append(
            {
                "profile": profile,
                "drafter": with_drafter["drafter"],
                "with": with_drafter["name"],
                "hurts": [row["concurrency"] for row in rows if row["word"] == "hurts"],
                "helps": [row["concurrency"] for row in rows if row["word"] == "helps"],
                "points": rows,
            }
        )
    return found


def _compare(pair: Mapping[bool, Sequence[Mapping[str, Any]]], concurrency: int) -> dict[str, Any]:
    best = {
        side: max(
            (curve for curve in pair[side] if concurrency in curve["points"]),
            key=lambda curve: mean(curve, concurrency),
        )
        for side in (True, False)
    }
    values = {side: rates(best[side], concurrency) for side in best}
    difference = statistics.fmean(values[True]) - statistics.fmean(values[False])
    told = abs(difference) > noise(values[True], values[False])
    return {
        "concurrency": concurrency,
        "word": ("helps" if difference > 0 else "hurts") if told else "ties",
        "percent": round(100 * difference / statistics.fmean(values[False]), 1),
        "with": best[True]["name"],
        "without": best[False]["name"],
    }
