"""Remedies are right for the release, set this project's variables, and are not offered twice."""

# ruff: noqa: E501  (patterns and table rows are read in one piece)
from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from dflash_fleet import causes, remedies

ROOT = Path(__file__).resolve().parents[2]


def ids(*arguments: object, **more: object) -> list[str]:
    return [remedy["id"] for remedy in remedies.remedies_for(*arguments, **more)]  # type: ignore[arg-type]


def test_every_cause_has_a_row_and_every_id_exists() -> None:
    assert set(remedies.FOR_CAUSE) == set(causes.CAUSES)
    for row in remedies.FOR_CAUSE.values():
        assert len(set(row)) == len(row)
        for identity in row:
            assert identity in remedies.REMEDIES
    used = {identity for row in remedies.FOR_CAUSE.values() for identity in row}
    assert {remedy.id for remedy in remedies.REMEDIES.values()} - used <= {"decode_graphs_only"}


def test_remedies_say_what_they_cost_and_whence() -> None:
    for remedy in remedies.REMEDIES.values():
        assert remedy.summary
        assert remedy.cost, remedy.id
        assert remedy.source, remedy.id
        if remedy.automatic:
            assert remedy.set, remedy.id


def test_remedies_set_variables_of_the_role() -> None:
    defaults = yaml.safe_load((ROOT / "roles" / "sglang" / "defaults" / "main.yml").read_text())
    for remedy in remedies.REMEDIES.values():
        assert set(remedy.set) <= set(defaults), remedy.id


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.5.11", ["upgrade_sglang", "use_tp8", "disable_cuda_graph"]),
        ("0.5.12.post1", ["upgrade_sglang", "use_tp8", "disable_cuda_graph"]),
        ("0.5.11+rehearsal", ["upgrade_sglang", "use_tp8", "disable_cuda_graph"]),
        ("0.5.20", ["use_tp8", "disable_cuda_graph"]),
        ("0.5.23", ["use_tp8", "disable_cuda_graph"]),
        (None, ["upgrade_sglang", "use_tp8", "disable_cuda_graph"]),
        ("nightly", ["upgrade_sglang", "use_tp8", "disable_cuda_graph"]),
    ],
)
def test_replay_failure_by_release(version: str | None, expected: list[str]) -> None:
    assert ids("cuda_graph_replay_failure", version) == expected


def test_upgrade_is_for_a_person() -> None:
    offered = {remedy["id"]: remedy for remedy in remedies.remedies_for("cuda_graph_replay_failure", "0.5.11")}
    assert offered["upgrade_sglang"]["automatic"] is False
    assert offered["disable_cuda_graph"]["automatic"] is True
    assert offered["disable_cuda_graph"]["set"] == {"sglang_cuda_graph": "disabled"}
    assert offered["use_tp8"]["set"] == {"sglang_profile": "tp8"}
    assert offered["upgrade_sglang"]["set"] == {"sglang_version": "0.5.20"}


def test_option_names_follow_the_release() -> None:
    old = next(remedy for remedy in remedies.remedies_for("cuda_graph_capture_oom", "0.5.12") if "smaller" in remedy["id"])
    new = next(remedy for remedy in remedies.remedies_for("cuda_graph_capture_oom", "0.5.20") if "smaller" in remedy["id"])
    assert old["set"] == {"sglang_extra_args": {"cuda-graph-max-bs": 16}}
    assert new["set"] == {"sglang_extra_args": {"cuda-graph-max-bs-decode": 16}}
    assert len([identity for identity in ids("cuda_graph_capture_oom", None) if "smaller" in identity]) == 1


@pytest.mark.parametrize(
    ("cause", "effect", "gone"),
    [
        ("cuda_graph_replay_failure", {"sglang_cuda_graph": "disabled"}, "disable_cuda_graph"),
        ("cuda_graph_replay_failure", {"sglang_cuda_graph": False}, "disable_cuda_graph"),
        ("cuda_graph_replay_failure", {"sglang_profile": "tp8"}, "use_tp8"),
        ("cuda_graph_capture_failed", {"sglang_cuda_graph": "prefill_disabled"}, "disable_prefill_cuda_graph"),
        ("cuda_graph_custom_allreduce", {"sglang_extra_args": {"disable-custom-all-reduce": True, "x": 1}}, "disable_custom_all_reduce"),
        ("gpu_oom", {"sglang_drafter": "none"}, "drop_drafter"),
        ("triton_ptxas_mismatch", {"sglang_environment": {"TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas"}}, "use_system_ptxas"),
        ("trust_remote_code_required", {"sglang_trust_remote_code": True}, "allow_remote_code"),
    ],
)
def test_what_is_in_effect_is_not_offered(cause: str, effect: dict[str, object], gone: str) -> None:
    assert gone in ids(cause, "0.5.12", {"sglang_extra_args": {"enable-torch-compile": True}})
    assert gone not in ids(cause, "0.5.12", effect)


def test_memory_fraction_moves_from_where_it_is() -> None:
    lower = remedies.remedies_for("gpu_oom", "0.5.20", {"sglang_mem_fraction_static": "0.9"})[0]
    higher = remedies.remedies_for("kv_pool_too_small", "0.5.20", {"sglang_mem_fraction_static": 0.84})[0]
    assert lower["set"] == {"sglang_mem_fraction_static": 0.86}
    assert higher["set"] == {"sglang_mem_fraction_static": 0.88}


def test_opposite_advice_is_not_given_in_turns() -> None:
    assert "raise_mem_fraction" not in ids("kv_pool_too_small", "0.5.20", {}, {"earlier_causes": ["gpu_oom"]})
    assert "lower_mem_fraction" not in ids("gpu_oom", "0.5.20", {}, {"earlier_causes": ["kv_pool_too_small"]})
    assert "shorter_context" in ids("gpu_oom", "0.5.20", {}, {"earlier_causes": ["kv_pool_too_small"]})


def test_user_remedies_and_ids() -> None:
    extra = {"audio": [{"id": "mute", "summary": "no audio", "set": {"sglang_extra_args": {"disable-audio": True}}}]}
    assert ids("audio", "0.5.20", {}, {"extra": extra}) == ["mute"]
    assert ids("audio", "0.5.20", {"sglang_extra_args": {"disable-audio": True}}, {"extra": extra}) == []
    assert remedies.check_ids(["disable_cuda_graph", "upgrade_sglang", "nonsense"]) == ["upgrade_sglang", "nonsense"]
    assert "disable_cuda_graph" in remedies.ids()
