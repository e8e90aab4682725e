"""`sglang_profile: auto` takes the recorded answer whole, or says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import configurations
import pytest
from dflash_fleet import bench, profiles
from plugins import load
from test_choice import INCIDENT, records

filters = load("filter_plugins/sglang.py")
fleet = load("filter_plugins/sglang_fleet.py")


def wish(folder: Path, **more: Any) -> dict[str, Any]:
    given = {f"sglang_{name}": value for name, value in configurations.BASE.items() if not name.endswith("_path")}
    given["sglang_served_model_name"] = ""
    return {
        **given, "sglang_version": "0.5.20", "sglang_build": "cuda", "sglang_profile": "auto",
        "sglang_drafter": "dflash",
        "sglang_benchmark_dir": str(folder), "sglang_objective": "throughput", **more,
    }  # fmt: skip


def keep(folder: Path, host: str = "gpu-01", **more: Any) -> None:
    """Results as a benchmark leaves them."""
    found = []
    for record in records(INCIDENT, host=host):
        resolved = profiles.resolve({**configurations.BASE, "version": "0.5.20", **record["overlay"]})
        context = bench.context(host, "r1", resolved, record["overlay"], record["order"])
        found.append({**context, "at": "2026-11-30T10:00:00Z", **record, **more})
    bench.append(str(folder / f"{host}.jsonl"), found)


@pytest.mark.parametrize(
    ("objective", "profile", "drafter"),
    [("throughput", "ep4", "none"), ("latency", "tp8", "none"), ({"concurrency": 16}, "ep4", "none")],
)
def test_the_answer_is_taken_whole(tmp_path: Path, objective: Any, profile: str, drafter: str) -> None:
    keep(tmp_path)
    (request,) = filters.sglang_requests(wish(tmp_path, sglang_objective=objective), host="gpu-01")
    assert (request["profile"], request["drafter"]) == (profile, drafter)
    assert filters.sglang_validate([request]) == []
    warnings = filters.sglang_resolve(request)["warnings"]
    assert any(f"auto is {profile}, measured on gpu-01" in text for text in warnings), warnings


def test_another_host_of_the_same_kind_may_use_it(tmp_path: Path) -> None:
    keep(tmp_path)
    (request,) = filters.sglang_requests(wish(tmp_path), host="gpu-07")
    assert request["profile"] == "ep4"
    keep(tmp_path, "gpu-02", gpu="another", gpus=8)
    (request,) = filters.sglang_requests(wish(tmp_path), host="gpu-07")
    (problem,) = filters.sglang_validate([request])
    assert "hosts with different GPUs were measured (gpu-01, gpu-02)" in problem
    (own,) = filters.sglang_requests(wish(tmp_path), host="gpu-02")
    assert own["profile"] == "ep4"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"sglang_benchmark_dir": "/nowhere"}, "no benchmark of SGLang 0.5.20 (cuda)"),
        ({"sglang_version": "0.5.23"}, "no benchmark of SGLang 0.5.23 (cuda)"),
        ({"sglang_model_revision": "f" * 40}, "run playbooks/benchmark.yml, or name a profile"),
        ({"sglang_objective": {"concurrency": 7}}, "only at 1, 16, 64, 256"),
        ({"sglang_objective": "fast"}, "write latency, throughput"),
    ],
)
def test_without_an_answer_it_says_what_is_missing(tmp_path: Path, more: dict[str, Any], expected: str) -> None:
    keep(tmp_path)
    requests = filters.sglang_requests(wish(tmp_path, **more), host="gpu-01")
    assert any(expected in problem for problem in filters.sglang_validate(requests)), filters.sglang_validate(requests)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gpu-01.jsonl").write_text("{}\n")
    (problem,) = filters.sglang_validate(filters.sglang_requests(wish(tmp_path), host="gpu-01"))
    assert "gpu-01.jsonl, line 1: not a result of a benchmark" in problem


def test_a_candidate_may_be_laid_over_a_wish_without_an_answer(tmp_path: Path) -> None:
    (request,) = filters.sglang_requests(wish(tmp_path), host="gpu-01")
    assert profiles.validate(bench.overlaid(request, {"profile": "tp8"})) == []
    with pytest.raises(ValueError, match="the key 'profil'"):
        bench.overlaid(request, {"profil": "tp8"})
    laid = bench.overlaid({**request, "extra_args": {"a": 1}}, {"extra_args": {"b": 2}, "drafter_block_size": 4})
    assert (laid["extra_args"], laid["block_size"]) == ({"a": 1, "b": 2}, 4)


def test_a_host_with_auto_is_always_looked_at() -> None:
    assert fleet.wish_digest({"sglang_profile": "auto"}) == ""
    assert fleet.wish_digest({"sglang_instances": [{"name": "a", "profile": "auto"}]}) == ""
    assert fleet.wish_digest({"sglang_profile": "tp8"}) != ""


def test_results_cut_off_go_before_others_are_added(tmp_path: Path) -> None:
    keep(tmp_path)
    path = tmp_path / "gpu-01.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    bench.append(str(path), [json.loads(whole.splitlines()[0])])
    assert len(bench.read(path.read_text())) == len(whole.splitlines())
