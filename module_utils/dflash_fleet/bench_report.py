"""What a person reads of a benchmark: the table, and the conclusions in words. Pure text; the page has a plugin."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import choice, plan

REHEARSAL = "REHEARSAL: these figures were played by a stand-in for the engine. They say nothing about hardware."
# Columns of concurrencies that fit a terminal; the page has all.
WIDEST = 6


def shown_points(curves: Sequence[Mapping[str, Any]], limit: int = WIDEST) -> list[int]:
    """The concurrencies of the table: the first, the last, and some between."""
    points = sorted({point for curve in curves for point in curve["points"]})
    if len(points) <= limit:
        return points
    step = (len(points) - 1) / (limit - 1)
    return sorted({points[round(index * step)] for index in range(limit)})


def rows(curves: Sequence[Mapping[str, Any]], points: Sequence[int]) -> list[dict[str, Any]]:
    """One row a candidate: tokens per second by concurrency, the peak and where, what it was like there."""
    found = []
    for curve in curves:
        row: dict[str, Any] = {"name": curve["name"]}
        for point in points:
            row[f"c{point}"] = figure(curve, point) if point in curve["points"] else None
        at = choice.peak(curve)
        if at is None:
            row["note"] = curve["failed"] or "; ".join(curve["left_out"]) or "not measured"
            found.append(row)
            continue
        records = curve["points"][at]
        accepts = [record["accept_length"] for record in records if record["accept_length"]]
        firsts = [record["ttft_ms"]["p99"] for record in records if record["ttft_ms"]]
        row["peak"] = f"{choice.mean(curve, at):.0f} at {at}"
        row["accept"] = f"{statistics.fmean(accepts):.2f}" if accepts else None
        row["ttft"] = f"{max(firsts):.0f} ms" if firsts else None
        row["note"] = "; ".join(curve["left_out"]) or None
        found.append(row)
    return found


def figure(curve: Mapping[str, Any], point: int) -> str:
    """`97.9 ±0.4`: the mean, and half the range of the repeats."""
    values = choice.rates(curve, point)
    value = statistics.fmean(values)
    half = (max(values) - min(values)) / 2
    digits = 1 if value < 1000 else 0
    return f"{value:.{digits}f}" + (f" ±{half:.{digits}f}" if len(values) > 1 else "")


def table(curves: Sequence[Mapping[str, Any]]) -> str:
    """The comparison, tokens per second of the whole server."""
    points = shown_points(curves)
    columns: list[Any] = [["name", "configuration"], *([f"c{point}", f"C={point}"] for point in points)]
    columns += [["peak", "peak"], ["accept", "accept"], ["ttft", "TTFT p99 at peak"]]
    found = rows(curves, points)
    if any(row.get("note") for row in found):
        columns.append(["note", "note"])
    return plan.table(found, columns)


def conclusion(answer: Mapping[str, Any]) -> str:
    """`peak throughput: ep4, 1531 tok/s at 256, 38 tok/s (2.5 %) over ep8`."""
    if answer["best"] is None:
        return f"{answer['for']}: no answer, {answer['why']}"
    digits = 1 if answer["value"] < 1000 else 0
    text = f"{answer['for']}: {answer['best']}, {answer['value']:.{digits}f} tok/s at {answer['concurrency']}"
    unlike = f"; no figures for it: {', '.join(answer['unlike'])}" if answer["unlike"] else ""
    if answer["tie"]:
        return text + f"; a tie with {', '.join(answer['tie'])} (the difference is within the noise)" + unlike
    if answer["next"] is None:
        return text + ", the only one measured" + unlike
    margin = f"{answer['margin']:.{digits}f} tok/s ({answer['margin_percent']:.1f} %)"
    return f"{text}, {margin} over {answer['next']}{unlike}"


def about_speculation(found: Mapping[str, Any]) -> str:
    """`dflash hurts with ep8 from 16 streams on (-23.2 % at 256); it helps at 1`."""
    drafter, profile = found["drafter"], found["profile"]
    by_point = {row["concurrency"]: row for row in found["points"]}
    points = list(by_point)
    parts = []
    for word in ("hurts", "helps"):
        where = found[word]
        if not where:
            continue
        worst = where[-1] if word == "hurts" else where[0]
        parts.append(f"{word} {_where(where, points)} ({by_point[worst]['percent']:+.1f} % at {worst})")
    if not parts:
        return f"{drafter} makes no difference with {profile}"
    return f"{drafter} with {profile} {'; it '.join(parts)}"


def _where(where: Sequence[int], points: Sequence[int]) -> str:
    if list(where) == list(points):
        return "at every concurrency"
    if len(where) > 1 and list(where) == list(points[points.index(where[0]) :]):
        return f"from {where[0]} streams on"
    return "at " + ", ".join(map(str, where))


def conclusions(records: Sequence[Mapping[str, Any]], wanted: Any) -> list[str]:
    """The answer that was asked for, the two that everybody asks for, and the word on the drafter."""
    objectives = [wanted, *(name for name in choice.NAMED if name != wanted)]
    lines = [conclusion(choice.choose(records, one)) for one in objectives]
    return lines + [about_speculation(found) for found in choice.speculation(records)]


def text(records: Iterable[Mapping[str, Any]], wanted: Any) -> str:
    """The whole report for a terminal."""
    kept = list(records)
    curves = choice.curves(kept)
    lines = [REHEARSAL] if any(curve["rehearsal"] for curve in curves) else []
    lines += ["tokens per second by concurrency", table(curves), ""]
    return "\n".join([*lines, *(f"  {line}" for line in conclusions(kept, wanted))])
