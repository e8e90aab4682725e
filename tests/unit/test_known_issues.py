"""The table of known issues: who is met by which row, and what is then done."""

from __future__ import annotations

from typing import Any

import configurations
import pytest
from dflash_fleet import known_issues, profiles

MATRIX = [
    # release, profile, drafter, applies
    ("0.5.11", "ep8", "dflash", True),
    ("0.5.12", "ep8", "dflash", True),
    ("0.5.12.post1", "ep4", "dflash", True),
    ("0.5.13", "ep8", "dflash", False),
    ("0.5.20", "ep8", "dflash", False),
    ("0.5.11", "tp8", "dflash", False),
    ("0.5.11", "ep8", "none", False),
    ("0.5.11", "ep8", "eagle3", False),
]


def plan(**request: Any) -> dict[str, Any]:
    return profiles.resolve({**configurations.BASE, "drafter": "dflash", **request})


def ids(result: dict[str, Any]) -> dict[str, bool]:
    return {issue["id"]: issue["applied"] for issue in result["known_issues"]}


@pytest.mark.parametrize(("version", "profile", "drafter", "applies"), MATRIX)
def test_auto_avoids_the_replay_crash_where_it_happens_and_nowhere_else(
    version: str, profile: str, drafter: str, applies: bool
) -> None:
    result = plan(version=version, profile=profile, drafter=drafter)
    assert ids(result).get("dflash_ep_cuda_graph_replay", False) is applies
    assert result["cuda_graph"]["effective"] == ("disabled" if applies else "enabled")
    assert not result["alarms"]


@pytest.mark.parametrize(("version", "profile", "drafter", "applies"), MATRIX)
def test_explicit_enabled_is_obeyed_loudly(version: str, profile: str, drafter: str, applies: bool) -> None:
    result = plan(version=version, profile=profile, drafter=drafter, cuda_graph="enabled")
    assert result["cuda_graph"] == {"requested": "enabled", "effective": "enabled", "reason": "asked for"}
    assert bool(result["alarms"]) is applies
    assert ids(result).get("dflash_ep_cuda_graph_replay") is (False if applies else None)


def test_incident_has_three_better_choices_in_order_of_cost() -> None:
    result = profiles.resolve(configurations.INCIDENT)
    assert [choice["set"] for choice in result["choices"]] == [
        {"sglang_version": "0.5.20"},
        {"sglang_profile": "tp8"},
        {"sglang_cuda_graph": "disabled"},
    ]
    assert "sglang_cuda_graph is enabled" in result["alarms"][0]
    for choice in result["choices"]:
        better = {**configurations.INCIDENT, **{name[len("sglang_") :]: value for name, value in choice["set"].items()}}
        assert not profiles.resolve(better)["alarms"], choice


def test_what_is_in_effect_is_no_choice() -> None:
    result = plan(version="0.5.11", profile="ep8")
    assert [choice["set"] for choice in result["choices"]] == [{"sglang_version": "0.5.20"}, {"sglang_profile": "tp8"}]


@pytest.mark.parametrize(
    ("mode", "effective", "alarmed", "warned"),
    [("avoid", "disabled", False, False), ("warn", "enabled", True, True), ("ignore", "enabled", False, False)],
)
def test_modes(mode: str, effective: str, alarmed: bool, warned: bool) -> None:
    result = plan(version="0.5.11", profile="ep8", known_issues=mode)
    assert result["cuda_graph"]["effective"] == effective
    assert bool(result["alarms"]) is alarmed
    assert any("cannot replay" in text for text in result["warnings"]) is warned
    assert "dflash_ep_cuda_graph_replay" in ids(result)


@pytest.mark.parametrize(
    ("version", "effective"),
    [("0.5.11", "disabled"), ("0.5.13", "disabled"), ("0.5.19", "disabled"), ("0.5.20", "enabled")],
)
def test_all_to_all_backend_needs_0_5_20(version: str, effective: str) -> None:
    deep = {"deep": {"tp": 8, "ep": 8, "options": {"moe-a2a-backend": "deepep"}}}
    assert plan(version=version, profile="deep", profiles=deep)["cuda_graph"]["effective"] == effective


@pytest.mark.parametrize(
    ("request_", "variable", "words"),
    [
        ({"profile": "pp8"}, "sglang_profile", "sglang_drafter: none"),
        ({"profile": "pp8", "drafter": "eagle3"}, "sglang_profile", "pipeline"),
        ({"profile": "ep4", "extra_args": {"moe-a2a-backend": "deepep"}}, "sglang_profile", "silently sets"),
        (
            {"profile": "ep4", "extra_args": {"moe-runner-backend": "flashinfer_cutlass"}},
            "sglang_extra_args",
            "ep 1 or ep = tp",
        ),
        ({"extra_args": {"enable-dp-attention": True}, "version": "0.5.20"}, "sglang_extra_args", "0.5.23"),
        ({"extra_args": {"attn-dp-size": 8}, "version": "0.5.23"}, "sglang_extra_args", "enable-dp-lm-head"),
    ],
)
@pytest.mark.parametrize("mode", ["avoid", "ignore"])
def test_what_the_engine_would_refuse_is_refused(
    request_: dict[str, Any], variable: str, words: str, mode: str
) -> None:
    request = {**configurations.BASE, "drafter": "dflash", "known_issues": mode, **request_}
    problems = profiles.validate(request)
    assert [name for name, _ in problems] == [variable]
    assert words in problems[0][1]
    with pytest.raises(profiles.ConfigError, match=variable):
        profiles.resolve(request)


def test_dp_attention_of_the_newest_release_with_its_option() -> None:
    result = plan(version="0.5.23", extra_args={"attn-dp-size": 8, "enable-dp-lm-head": True})
    assert result["parallel"]["ranks"] == 8


@pytest.mark.parametrize("architecture", ["sm_120", "12.0", "120", "sm_120a"])
def test_sm120(architecture: str) -> None:
    result = plan(version="0.5.20", profile="tp8", gpu_architecture=architecture)
    found = ids(result)
    assert found["deepgemm_sm120"] is True
    assert found["dflash_prefill_graph_sm120"] is True
    assert "custom_all_reduce_pcie" in found
    assert result["environment"]["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0"
    assert result["cuda_graph"]["effective"] == "prefill_disabled"


@pytest.mark.parametrize("architecture", ["", "sm_90", "10.0"])
def test_other_architectures_are_left_alone(architecture: str) -> None:
    result = plan(version="0.5.20", gpu_architecture=architecture)
    assert not [name for name in ids(result) if "sm120" in name or "pcie" in name]


def test_own_environment_wins_over_avoidance() -> None:
    result = plan(version="0.5.20", gpu_architecture="sm_120", environment={"SGLANG_ENABLE_JIT_DEEPGEMM": "1"})
    assert result["environment"]["SGLANG_ENABLE_JIT_DEEPGEMM"] == "1"


def test_pcie_all_reduce_is_offered_until_it_is_on() -> None:
    off = plan(version="0.5.23", gpu_architecture="sm_120")
    on = plan(version="0.5.23", gpu_architecture="sm_120", environment={"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": 1})
    assert "pcie_ipc_all_reduce_off" in ids(off)
    assert "pcie_ipc_all_reduce_off" not in ids(on)


@pytest.mark.parametrize(
    ("request_", "issue"),
    [
        ({}, "speculative_default_48_requests"),
        ({}, "dflash_block_size_guessed"),
        ({"version": "0.5.17"}, "dflash_logprobs_refused"),
        ({"version": "0.5.18"}, "clean_stop_is_sigkill"),
        ({"gpu_architecture": "sm_120", "extra_args": {"kv-cache-dtype": "fp8_e4m3"}}, "fp8_kv_sm120"),
        ({"gpu_architecture": "sm_120", "attention_backend": "trtllm_mla"}, "mla_backend_sm120"),
        ({"extra_args": {"enable-mixed-chunk": True}}, "mixed_chunk_with_drafter"),
    ],
)
def test_notes(request_: dict[str, Any], issue: str) -> None:
    assert issue in ids(plan(**request_))


def test_the_cpu_build_has_none_of_the_gpus_problems() -> None:
    result = plan(version="0.5.23", build="cpu", profile="single", gpu_architecture="sm_120", cuda_graph="enabled")
    assert ids(result) == {"dflash_block_size_guessed": True}
    assert result["cuda_graph"]["effective"] == "disabled"


def test_rows_are_complete() -> None:
    rows = known_issues.ISSUES
    assert len({row.id for row in rows}) == len(rows)
    for row in rows:
        assert row.action in ("avoid", "warn", "refuse")
        assert row.source
        assert row.releases
        assert row.effect
        assert bool(row.done) == (row.action == "avoid"), row.id
        for choice in row.choices:
            assert choice.summary
            assert choice.cost
            assert all(name.startswith("sglang_") for name in choice.set)
