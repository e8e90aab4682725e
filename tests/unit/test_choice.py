"""Which configuration is best, told from records; the incident's figures draw the incident's conclusions."""

from __future__ import annotations

from typing import Any

import pytest
from dflash_fleet import bench_report, choice

# Tokens per second. Measured in the incident: 97.9, 1493, 1531, 86 and 1146; the points between are of the shape that
# a growing batch has.
INCIDENT = {
    "tp8": {1: 97.9, 16: 640.0, 64: 1105.0, 256: 1290.0},
    "ep8": {1: 90.0, 16: 700.0, 64: 1200.0, 256: 1493.0},
    "ep4": {1: 93.0, 16: 720.0, 64: 1230.0, 256: 1531.0},
    "ep8+dflash, graphs disabled": {1: 86.0, 16: 610.0, 64: 980.0, 256: 1146.0},
}


def record(name: str, concurrency: int, rate: float, order: int = 0, **more: Any) -> dict[str, Any]:
    profile, _, rest = name.partition("+")
    drafter = rest.partition(",")[0] or "none"
    base = {
        "schema": 1, "kind": "measured", "run": "r1", "host": "gpu-01", "instance": "main", "candidate": name,
        "order": order, "profile": profile, "drafter": drafter,
        "cuda_graph": "disabled" if "disabled" in name else "enabled",
        "overlay": {"profile": profile, "drafter": drafter}, "rehearsal": False, "requests": 100, "errors": 0,
        "concurrency": concurrency, "output_throughput": rate, "accept_length": 3.4 if drafter != "none" else None,
        "ttft_ms": {"mean": 100.0, "p50": 90.0, "p90": 150.0, "p99": 200.0},
    }  # fmt: skip
    return {**base, **more}


def records(
    curves: dict[str, dict[int, float]], spread: tuple[float, ...] = (0.998, 1.0, 1.002), **more: Any
) -> list[dict[str, Any]]:
    return [
        record(name, concurrency, rate * factor, order, **more)
        for order, (name, points) in enumerate(curves.items())
        for concurrency, rate in points.items()
        for factor in spread
    ]


@pytest.mark.parametrize(
    ("wanted", "best", "following", "percent"),
    [
        ("throughput", "ep4", "ep8", 2.5),
        ("latency", "tp8", "ep4", 5.3),
        ({"concurrency": 16}, "ep4", "ep8", 2.9),
        ({"concurrency": 256}, "ep4", "ep8", 2.5),
        ({"ttft_p99_ms": 250}, "ep4", "ep8", 2.5),
    ],
)
def test_the_incidents_figures_draw_its_conclusions(wanted: Any, best: str, following: str, percent: float) -> None:
    answer = choice.choose(records(INCIDENT), wanted)
    assert (answer["best"], answer["next"], answer["tie"]) == (best, following, [])
    assert answer["margin_percent"] == pytest.approx(percent, abs=0.06)


def test_the_incidents_drafter_hurts_where_it_is_busy() -> None:
    (found,) = choice.speculation(records(INCIDENT))
    assert found["profile"] == "ep8"
    assert found["hurts"] == [1, 16, 64, 256]
    assert found["points"][-1]["percent"] == pytest.approx(-23.2, abs=0.1)
    assert bench_report.about_speculation(found) == "dflash with ep8 hurts at every concurrency (-23.2 % at 256)"


def test_a_drafter_that_helps_one_stream_and_hurts_many() -> None:
    curves = {"tp8": {1: 100.0, 8: 400.0, 64: 1000.0}, "tp8+dflash": {1: 180.0, 8: 401.0, 64: 900.0}}
    (found,) = choice.speculation(records(curves))
    assert (found["helps"], found["hurts"]) == ([1], [64])
    text = bench_report.about_speculation(found)
    assert text == "dflash with tp8 hurts at 64 (-10.0 % at 64); it helps at 1 (+80.0 % at 1)"


def test_other_paces_flip_it() -> None:
    other = {**INCIDENT, "tp8": {1: 80.0, 256: 1700.0}, "ep8+dflash, graphs disabled": {1: 150.0, 256: 1600.0}}
    assert choice.choose(records(other), "throughput")["best"] == "tp8"
    assert choice.choose(records(other), "latency")["best"] == "ep8+dflash, graphs disabled"
    (found,) = choice.speculation(records(other))
    assert found["helps"] == [1, 256]


def test_a_difference_within_the_noise_is_a_tie_and_the_first_candidate_is_taken() -> None:
    curves = {"ep8": {1: 90.0, 256: 1493.0}, "ep4": {1: 90.2, 256: 1531.0}}
    noisy = choice.choose(records(curves, (0.96, 1.0, 1.04)), "throughput")
    assert (noisy["best"], noisy["tie"]) == ("ep8", ["ep4"])
    assert "a tie with ep4" in bench_report.conclusion(noisy)
    quiet = choice.choose(records(curves), "throughput")
    assert (quiet["best"], quiet["tie"]) == ("ep4", [])
    # However quiet: less than one per cent is nothing.
    assert choice.choose(records(curves, (1.0, 1.0)), "latency")["tie"] == ["ep4"]


def test_runs_that_were_not_repeated_need_five_per_cent() -> None:
    once = records({"a": {1: 100.0}, "b": {1: 104.0}, "c": {1: 90.0}}, (1.0,))
    answer = choice.choose(once, "latency")
    assert (answer["best"], answer["tie"]) == ("a", ["b"])


def test_noise_is_welchs_t() -> None:
    one, other = [10.0, 12.0, 14.0], [20.0, 21.0, 22.0]
    # s² = 4 and 1, sqrt(5/3) = 1.291; (5/3)² / ((4/3)²/2 + (1/3)²/2) = 2.94 degrees: t between 4.303 and 3.182.
    assert choice.noise(one, other) == pytest.approx(3.228 * 1.29099, rel=1e-3)
    tables = {1: 12.706, 2: 4.303, 9: 2.262, 10: 2.228, 20: 2.086, 60: 2.0, 10000: 1.96}
    assert {degrees: choice.student(degrees) for degrees in tables} == pytest.approx(tables, abs=0.01)
    assert 4.303 < choice.student(1.9) < 5.2
    assert choice.noise([100.0] * 3, [90.0] * 3) == pytest.approx(1.0)


def test_the_worst_repeat_has_to_keep_the_promise() -> None:
    kept = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 300.0}
    broken = {**kept, "p99": 700.0}
    found = [
        record("tp8", 8, 500.0, 0, ttft_ms=kept),
        record("tp8", 64, 900.0, 0, ttft_ms=kept),
        record("tp8", 64, 901.0, 0, ttft_ms=broken),
        record("ep4", 8, 450.0, 1, ttft_ms=kept),
    ]
    answer = choice.choose(found, {"ttft_p99_ms": 500})
    assert (answer["best"], answer["concurrency"], answer["next"]) == ("tp8", 8, "ep4")
    nothing = choice.choose(found, {"ttft_p99_ms": 100})
    assert nothing["best"] is None
    assert "nearest is" in nothing["why"]
    assert "300 ms" in nothing["why"]


def test_what_failed_is_no_answer_and_is_told() -> None:
    dead = record("ep8+dflash", 1, 0.0, 1, kind="failed", cause="cuda_graph_replay_failure")
    lame = record("ep4", 1, 999.0, 2, errors=2)
    answer = choice.choose([record("tp8", 1, 97.9), dead, lame], "latency")
    assert [item["name"] for item in answer["ranking"]] == ["tp8"]
    table = bench_report.table(choice.curves([record("tp8", 1, 97.9), dead, lame]))
    assert "cuda_graph_replay_failure" in table
    assert "2 of 100 requests failed at 1" in table
    assert choice.choose([dead], "latency")["why"] == "no candidate served: ep8+dflash: cuda_graph_replay_failure"
    assert choice.choose([], "latency")["why"] == "nothing was measured"
    assert "only at 1" in choice.choose([record("tp8", 1, 97.9)], {"concurrency": 7})["why"]


@pytest.mark.parametrize("wanted", ["fast", {"concurrency": 0}, {"concurrency": True}, {"a": 1}, {}, None, 5])
def test_objectives_that_are_none(wanted: Any) -> None:
    with pytest.raises(choice.ObjectiveError, match="write latency, throughput"):
        choice.objective(wanted)


def test_the_report_says_when_it_is_a_rehearsal() -> None:
    real = bench_report.text(records(INCIDENT), "throughput")
    played = bench_report.text(records(INCIDENT, rehearsal=True), "throughput")
    assert "REHEARSAL" not in real
    assert played.startswith("REHEARSAL: ")
    assert "peak throughput: ep4, 1531 tok/s at 256, 38 tok/s (2.5 %) over ep8" in real
    assert "a single stream: tp8, 97.9 tok/s at 1, 4.9 tok/s (5.3 %) over ep4" in real
    assert "97.9 ±0.2" in real


def test_a_terminal_is_not_wide() -> None:
    curve = {"points": {2**power: [] for power in range(9)}}
    assert bench_report.shown_points([curve]) == [1, 4, 8, 32, 64, 256]


def test_what_was_not_measured_alike_is_not_compared() -> None:
    found = [*records({"ep8": {1: 90.0, 64: 1100.0}}), *records({"tp8": {4: 250.0}})]
    single = choice.choose(found, "latency")
    assert (single["best"], single["unlike"]) == ("ep8", ["tp8"])
    peak = choice.choose(found, "throughput")
    assert (peak["best"], peak["next"], peak["unlike"]) == ("ep8", None, ["tp8"])
    assert bench_report.conclusion(peak).endswith("the only one measured; no figures for it: tp8")
    assert "only at 4" in choice.choose(records({"tp8": {4: 250.0}}), "latency")["why"]
    # One that lost its requests at the most streams has been there: its peak is what it is.
    lost = [*records({"ep8": {1: 90.0, 64: 1100.0}, "ep4": {16: 1300.0}}), record("ep4", 64, 0.0, 1, errors=90)]
    assert choice.choose(lost, "throughput")["best"] == "ep4"
