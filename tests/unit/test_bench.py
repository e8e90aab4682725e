"""Records of benchmarks: both generators in one shape, prompts, and what a file of results may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import configurations
import pytest
from dflash_fleet import bench, profiles

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "bench"
LOAD = {
    "schema": 1, "endpoint": "generate", "model": "m", "concurrency": 4, "max_tokens": 32, "duration": 2.0,
    "requests": 8, "ok": 6, "failed": 1, "cut": 1, "without_usage": 0, "output_tokens": 192, "input_tokens": 60,
    "request_throughput": 3.0, "output_throughput": 96.0,
    "ttft_ms": {"mean": 1.0, "p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0},
    "tpot_ms": None, "itl_ms": {"mean": 1.0, "p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0},
    "e2e_ms": {"mean": 9.0, "p50": 9.0, "p90": 9.0, "p99": 9.0, "max": 9.0},
    "request_tps": {"mean": 30.0, "min": 1.0, "p10": 2.0, "p50": 30.0, "p90": 31.0},
    "accept_length": 3.4, "accept_lengths": None, "reasons": {"HTTP 503": 1}, "cpu_seconds": 0.1,
}  # fmt: skip

SERVING: dict[str, Any] = {
    "max_concurrency": 4, "duration": 2.0, "completed": 7, "total_input_tokens": 60, "total_output_tokens": 192,
    "request_throughput": 3.5, "output_throughput": 96.0, "accept_length": 2.2,
    "server_info": {"api_key": "secret"},
    **{
        f"{statistic}_{name}_ms": 5.0
        for statistic in ("mean", "median", "p90", "p99")
        for name in ("ttft", "tpot", "itl", "e2e_latency")
    },
    "output_lens": [32, 32, 0], "ttfts": [0.5, 1.0, 0.0], "itls": [[0.5], [1.0, 2.0], []],
    "errors": ["", "", "Traceback\n  connection refused"],
}  # fmt: skip


def test_both_generators_give_the_same_keys() -> None:
    ours, theirs = bench.from_load(LOAD), bench.from_bench_serving(SERVING, requests=8, max_tokens=32)
    assert set(ours) == set(theirs)
    assert (ours["ok"], ours["errors"], ours["requests"]) == (6, 2, 8)
    assert (theirs["ok"], theirs["errors"], theirs["requests"]) == (7, 1, 8)
    assert set(ours["ttft_ms"]) == set(theirs["ttft_ms"]) == {"mean", "p50", "p90", "p99"}


def test_the_engines_own_tool_knows_requests_and_shows_no_key() -> None:
    found = bench.from_bench_serving(SERVING, requests=8, max_tokens=32)
    assert found["request_tps"]["p90"] == 32.0  # 32 tokens in 0.5 + 0.5 s
    assert found["request_tps"]["min"] == 8.0  # ... in 1 + 1 + 2 s
    assert found["reasons"] == {"Traceback connection refused": 1}
    assert found["accept_length"] is None, "a mean since the server's start is none of this run"
    assert "secret" not in str(found)
    plain = {name: value for name, value in SERVING.items() if name not in ("output_lens", "ttfts", "itls", "errors")}
    assert bench.from_bench_serving(plain, 8, 32)["request_tps"] is None


def test_a_line_that_the_real_tool_wrote() -> None:
    line = json.loads((FIXTURES / "bench_serving-0.5.23.jsonl").read_text())
    found = bench.from_bench_serving(line, requests=32, max_tokens=48)
    assert (found["requests"], found["ok"], found["errors"], found["output_tokens"]) == (32, 32, 0, 32 * 48)
    assert found["concurrency"] == 8
    assert None not in [*found["ttft_ms"].values(), *found["itl_ms"].values(), *found["e2e_ms"].values()]
    # 48 tokens in about a second, eight at a time.
    assert 30 < found["request_tps"]["p50"] < 70
    assert found["output_throughput"] == pytest.approx(32 * 48 / found["duration"], rel=1e-6)
    assert "not-to-be-kept" not in json.dumps(found)


def test_prompts_of_either_kind_of_file() -> None:
    text = '# comment\n\n{"prompt": "a b"}\n"quoted"\nplain words\n{broken\n{"other": 1}\n'
    assert bench.prompts_of(text) == ["a b", "quoted", "plain words", "{broken"]


def test_a_seed_is_an_order() -> None:
    prompts = [str(number) for number in range(20)]
    assert bench.in_order(prompts, 1) == bench.in_order(prompts, 1)
    assert bench.in_order(prompts, 1) != bench.in_order(prompts, 2)
    assert sorted(bench.in_order(prompts, 1)) == sorted(prompts)
    assert bench.prompts_mark(prompts)["sha256"] != bench.prompts_mark(prompts[:-1])["sha256"]


@pytest.mark.parametrize(("concurrency", "expected"), [(1, 8), (3, 9), (4, 12), (64, 192)])
def test_a_run_has_whole_rounds(concurrency: int, expected: int) -> None:
    assert bench.requests_at(concurrency, rounds=3, least=8) == expected


def resolved(**more: Any) -> dict[str, Any]:
    return profiles.resolve({**configurations.BASE, "version": "0.5.20", "profile": "ep8", "drafter": "dflash", **more})


def test_a_record_says_what_was_measured() -> None:
    facts = {"driver": "580.65.06", "gpus": {"list": [{"name": "RTX PRO 6000"}] * 8}}
    found = bench.context("gpu-01", "r1", resolved(), {"profile": "ep8"}, 2, facts)
    assert found["candidate"] == "ep8+dflash"
    assert (found["gpu"], found["gpus"], found["driver"]) == ("RTX PRO 6000", 8, "580.65.06")
    assert found["drafter_model"]["revision"] == "b" * 40
    assert found["rehearsal"] is False
    assert bench.context("h", "r", resolved(cuda_graph="disabled"), {}, 0)["candidate"] == "ep8+dflash, graphs disabled"
    assert bench.context("h", "r", resolved(drafter="none"), {"name": "mine"}, 0)["candidate"] == "mine"
    assert bench.context("h", "r", resolved(build="rehearsal"), {}, 0)["rehearsal"] is True


def measured(**more: Any) -> dict[str, Any]:
    return {**bench.context("gpu-01", "r1", resolved(), {}, 0), "kind": "measured", **bench.from_load(LOAD), **more}


def test_a_file_of_results_survives_an_interruption_and_no_other_damage() -> None:
    line = bench.line_of(measured())
    assert bench.read(line + line)[1]["output_throughput"] == 96.0
    assert len(bench.read(line + line[:50])) == 1
    with pytest.raises(bench.ResultError, match="results, line 1: not JSON"):
        bench.read(line[:50] + "\n" + line)
    with pytest.raises(bench.ResultError, match="schema 2"):
        bench.read(bench.line_of(measured(schema=2)))
    with pytest.raises(bench.ResultError, match="not a result"):
        bench.read('{"schema": 1}\n')


def test_only_the_newest_run_of_a_candidate_counts() -> None:
    old, new, other = measured(run="r1"), measured(run="r2"), measured(run="r1", candidate="tp8")
    assert bench.newest([old, new, other]) == [new, other]


def test_a_run_at_other_concurrencies_completes_what_is_known() -> None:
    one, four, again = measured(concurrency=1), measured(concurrency=4, run="r2"), measured(concurrency=1, run="r2")
    assert bench.newest([one, four]) == [one, four]
    assert bench.newest([one, four, again]) == [four, again]
    for name, value in (("arguments", ["other"]), ("max_tokens", 64), ("lengths", "natural")):
        assert bench.newest([one, {**four, name: value}]) == [{**four, name: value}]
    died = {**four, "kind": "failed"}
    assert bench.newest([one, died]) == [died]


def test_what_is_compared_is_of_one_release() -> None:
    engine = {"name": "sglang", "version": "0.5.23", "build": "cuda"}
    old = measured(at="1", run="r1", candidate="tp8")
    new = measured(at="3", run="r3", engine=engine)
    other = measured(at="2", run="r2", host="gpu-02")
    found, left_out = bench.groups([old, new, other])
    assert (found, left_out) == ([[new], [other]], 1)
    assert bench.groups([]) == ([], 0)
    # Other GPUs are another comparison.
    assert bench.groups([other, measured(at="3", gpu="another", gpus=4)])[0] == [
        [measured(at="3", gpu="another", gpus=4)], [other],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "same"),
    [
        ({}, True),
        ({"version": "0.5.23"}, False),
        ({"build": "rehearsal"}, False),
        ({"model_revision": "c" * 40}, False),
        ({"drafter_revision": "c" * 40}, False),
        ({"instance": "b"}, False),
    ],
)
def test_a_result_tells_of_the_same_wish_only(request_: dict[str, Any], same: bool) -> None:
    request = {**configurations.BASE, "version": "0.5.20", "build": "cuda", "instance": "main", **request_}
    assert bench.same_wish(measured(), request) is same


def test_without_a_drafter_its_revision_does_not_matter() -> None:
    request = {**configurations.BASE, "version": "0.5.20", "build": "cuda", "instance": "main"}
    plain = {**bench.context("gpu-01", "r1", resolved(drafter="none"), {}, 0)}
    assert bench.same_wish(plain, {**request, "drafter_revision": "c" * 40})
