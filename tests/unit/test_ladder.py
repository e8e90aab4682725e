"""The fallback ladder: which rung is next, what is remembered, what the tables say."""

from __future__ import annotations

import pytest
from dflash_fleet import ladder, profiles, remedies

GRAPHS_OFF = {
    "id": "disable_cuda_graph",
    "summary": "CUDA graphs off",
    "set": {"sglang_cuda_graph": "disabled"},
    "cost": "slower at low concurrency",
    "automatic": True,
}
UPGRADE = {
    "id": "upgrade_sglang",
    "summary": "newer",
    "set": {"sglang_version": "0.5.20"},
    "cost": "",
    "automatic": False,
}
# An own cause may call anything automatic.
OWN = {**UPGRADE, "id": "use_tp8", "automatic": True}
TP8 = {"id": "use_tp8", "summary": "tp8", "set": {"sglang_profile": "tp8"}, "cost": "lower peak", "automatic": True}


def resolved(**more):
    base = {
        "instance": "main",
        "unit": "sglang-main-ep8.service",
        "profile": "ep8",
        "engine": {"name": "sglang", "version": "0.5.11", "build": "rehearsal"},
        "drafter": {"name": "dflash", "algorithm": "DFLASH"},
        "overrides": {},
        "options": [],
        "cuda_graph": {"effective": "enabled"},
    }
    return {**base, **more}


def crashed(remedies=(GRAPHS_OFF,), taken=(), overrides=None):
    crash = {"cause": "cuda_graph_replay_failure", "remedies": list(remedies)}
    gate = {"ready": False, "outcome": "crashed", "seconds": 12.3, "phase": "warmup", "crash": crash}
    return ladder.attempt(gate, resolved(overrides=overrides or {}), taken)


def serving(taken=(), overrides=None):
    gate = {
        "ready": True,
        "outcome": "ready",
        "seconds": 210.4,
        "phase": "serving",
        "invocation_id": "b" * 32,
        "smoke": {"accept_length": 3.4, "tokens_per_second": 86.0},
    }
    return ladder.attempt(gate, resolved(overrides=overrides or {}), taken)


@pytest.mark.parametrize(
    ("attempts", "fallbacks", "limit", "expected"),
    [
        pytest.param(
            [crashed()], ["disable_cuda_graph"], 2, "disable_cuda_graph", id="the cause's remedy is on the ladder"
        ),
        pytest.param([crashed()], ["use_tp8"], 2, None, id="a rung that does not match the cause is not taken"),
        pytest.param([crashed([])], ["disable_cuda_graph"], 2, None, id="no remedy, no rung"),
        pytest.param([crashed([UPGRADE])], ["upgrade_sglang"], 2, None, id="what only a person may do is not taken"),
        pytest.param([crashed([OWN])], ["use_tp8"], 2, None, id="what needs an installation first is no rung"),
        pytest.param(
            [crashed([GRAPHS_OFF, TP8])],
            ["use_tp8", "disable_cuda_graph"],
            2,
            "use_tp8",
            id="the inventory's order decides",
        ),
        pytest.param(
            [crashed([GRAPHS_OFF, TP8], ["disable_cuda_graph"])],
            ["disable_cuda_graph", "use_tp8"],
            2,
            "use_tp8",
            id="the second rung",
        ),
        pytest.param(
            [crashed([TP8], ["disable_cuda_graph"])],
            ["disable_cuda_graph", "use_tp8"],
            1,
            None,
            id="no more rungs than allowed",
        ),
        pytest.param([crashed()], ["disable_cuda_graph"], 0, None, id="none allowed"),
        pytest.param([serving()], ["disable_cuda_graph"], 2, None, id="what serves needs none"),
    ],
)
def test_next_rung(attempts, fallbacks, limit, expected):
    rung = ladder.next_rung(attempts, fallbacks, limit)
    assert rung.get("id") == expected


def test_rungs_add_up():
    first = {"sglang_cuda_graph": "disabled"}
    rung = ladder.next_rung([crashed([TP8], ["disable_cuda_graph"], first)], ["disable_cuda_graph", "use_tp8"], 2)
    assert rung["set"] == {"sglang_cuda_graph": "disabled", "sglang_profile": "tp8"}
    assert rung["remedies"] == ["disable_cuda_graph", "use_tp8"]
    assert (rung["number"], rung["of"]) == (2, 2)


REQUEST = {
    "version": "0.5.11",
    "profile": "ep8",
    "drafter": "dflash",
    "cuda_graph": "enabled",
    "drafter_revision": "c" * 40,
    "model_revision": "d" * 40,
}


def test_a_rung_is_recorded_only_by_the_run_that_had_to_take_it():
    assert ladder.rung_record([serving()], REQUEST, None) is None
    assert ladder.rung_record([crashed(), crashed()], REQUEST, None) is None
    record = ladder.rung_record([crashed(), serving(["disable_cuda_graph"], GRAPHS_OFF["set"])], REQUEST, "580.105.08")
    assert record["remedy"] == "disable_cuda_graph"
    assert record["set"] == {"sglang_cuda_graph": "disabled"}
    assert record["cause"] == "cuda_graph_replay_failure"
    assert record["key"]["driver"] == "580.105.08"


@pytest.mark.parametrize(
    ("change", "driver", "fallbacks", "found"),
    [
        ({}, "580", ["disable_cuda_graph"], True),
        ({"version": "0.5.20"}, "580", ["disable_cuda_graph"], False),
        ({"drafter_revision": "e" * 40}, "580", ["disable_cuda_graph"], False),
        ({}, "590", ["disable_cuda_graph"], False),
        ({"profile": "tp8"}, "580", ["disable_cuda_graph"], False),
        ({}, "580", [], False),
    ],
)
def test_a_remembered_rung_holds_until_release_driver_or_drafter_change(change, driver, fallbacks, found):
    record = ladder.rung_record([crashed(), serving(["disable_cuda_graph"], GRAPHS_OFF["set"])], REQUEST, "580")
    before = {"rungs": [{**record, "recorded_at": "2026-11-30T00:00:00.000000Z"}]}
    rung = ladder.remembered_rung(before, {**REQUEST, **change}, fallbacks, driver)
    assert (rung.get("remedy") == "disable_cuda_graph") is found


def test_summary_says_what_happened():
    line = ladder.summary([crashed(), serving(["disable_cuda_graph"], GRAPHS_OFF["set"])])
    assert line == {
        "engine": "sglang 0.5.11 rehearsal",
        "profile": "ep8+dflash",
        "state": "degraded",
        "seconds": 210.4,
        "accept_length": 3.4,
        "note": "cuda_graph_replay_failure in warmup, now sglang_cuda_graph: disabled",
    }
    assert ladder.summary([crashed()])["state"] == "failed"
    assert ladder.summary([crashed()], [serving()])["state"] == "rolled back"
    assert ladder.summary([crashed()])["note"] == "crashed in warmup: cuda_graph_replay_failure"


def test_summary_says_that_the_last_good_release_did_not_come_back():
    gate = {"ready": False, "outcome": "stalled", "phase": "weights", "crash": None}
    line = ladder.summary([crashed()], [ladder.attempt(gate, resolved(), [])])
    assert line["state"] == "failed"
    assert line["note"] == (
        "crashed in warmup: cuda_graph_replay_failure; its last good release did not come back: stalled in weights"
    )


def test_degraded_text_is_loud_and_says_the_cost():
    attempts = [crashed([GRAPHS_OFF, UPGRADE]), serving(["disable_cuda_graph"], GRAPHS_OFF["set"])]
    text = "\n".join(ladder.degraded_text(attempts, "gpu-02", {}))
    assert "DEGRADED" in text
    assert "slower at low concurrency" in text
    assert "sglang_version: 0.5.20" in text


def test_a_remembered_rung_says_why_and_what_it_costs():
    rung = {"remedy": "disable_cuda_graph", "cause": "cuda_graph_replay_failure", "recorded_at": "2026-11-30T00:00:00Z"}
    text = "\n".join(ladder.degraded_text([serving(["disable_cuda_graph"], GRAPHS_OFF["set"])], "gpu-02", rung))
    assert "The host remembers why: cuda_graph_replay_failure" in text
    assert "86 tok/s" in text
    assert "sglang_version: 0.5.20" in text


@pytest.mark.parametrize(
    ("before", "failed", "allowed", "expected"),
    [
        ({}, "b", True, False),
        ({"last_good": {"release_id": "a"}, "releases": ["a", "b"]}, "b", True, True),
        ({"last_good": {"release_id": "a"}, "releases": ["a", "b"]}, "b", False, False),
        ({"last_good": {"release_id": "a"}, "releases": ["a", "b"]}, "a", True, False),
        ({"last_good": {"release_id": "a"}, "releases": ["b"]}, "b", True, False),
        ({"last_good": None, "releases": ["b"]}, "b", True, False),
    ],
)
def test_can_roll_back(before, failed, allowed, expected):
    assert ladder.can_roll_back(before, failed, allowed) is expected


@pytest.mark.parametrize(
    ("plain", "quoted"),
    [
        ("A=b", "A=b"),
        ("A=b c", '"A=b c"'),
        ("A=50%", "A=50%%"),
        ("A=$HOME", "A=$HOME"),
        ('A="b"', '"A=\\"b\\""'),
        ("A=C:\\x", '"A=C:\\\\x"'),
    ],
)
def test_unit_quote(plain, quoted):
    assert ladder.unit_quote(plain) == quoted


def test_a_unit_that_waits_for_the_next_start_is_said():
    facts = {"serving": True, "current": "new", "ready": {"release_id": "old"}}
    assert ladder.pending(facts)
    assert not ladder.pending({**facts, "current": "old"})
    assert not ladder.pending({**facts, "serving": False}), "the next start has come"


def test_a_step_of_the_memory_fraction_starts_from_what_was_in_effect():
    request = {"model": "a/b", "model_revision": "a" * 40, "version": "0.5.20", "profile": "tp8"}
    effect = ladder.in_effect(profiles.resolve({**request, "mem_fraction_static": 0.94, "max_running_requests": 16}))
    assert effect["sglang_mem_fraction_static"] == "0.94"
    offered = {item["id"]: item["set"] for item in remedies.remedies_for("gpu_oom", "0.5.20", effect)}
    assert offered["lower_mem_fraction"] == {"sglang_mem_fraction_static": 0.9}
    assert "fewer_running_requests" not in offered
    assert "sglang_mem_fraction_static" not in ladder.in_effect(profiles.resolve(request))


def test_a_release_record_says_what_was_in_effect_as_the_configuration_does():
    """The reporter on the host has only the record."""
    request = {
        "model": "org/model", "model_revision": "a" * 40, "profile": "tp8", "mem_fraction_static": 0.9,
        "context_length": 4096, "max_running_requests": 24, "attention_backend": "triton", "trust_remote_code": True,
    }  # fmt: skip
    result = profiles.resolve(request)
    assert len(ladder.in_effect(result)) == 8
    assert ladder.in_effect(ladder.release_record(result, "/venv", "")) == ladder.in_effect(result)


def test_no_remedy_that_a_machine_may_take_needs_an_installation():
    automatic = [remedy for remedy in remedies.REMEDIES.values() if remedy.automatic]
    assert len(automatic) > 15
    assert not [remedy.id for remedy in automatic if remedies.INSTALLED & remedy.set.keys()]
