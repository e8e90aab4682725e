"""The order of a rollout."""

from __future__ import annotations

import pytest
import yaml
from dflash_fleet import rollout
from plugins import ROOT


@pytest.mark.parametrize(
    ("hosts", "wanted", "sizes"),
    [
        (1, rollout.BATCHES, [1]),
        (3, rollout.BATCHES, [1, 1, 1]),
        (100, rollout.BATCHES, [1, 10, 25, 64]),
        (12, rollout.BATCHES, [1, 1, 3, 7]),
        (7, [2], [2, 2, 2, 1]),
        (5, ["50%"], [2, 2, 1]),
        (0, rollout.BATCHES, []),
    ],
)
def test_sizes(hosts, wanted, sizes):
    assert rollout.sizes(hosts, wanted) == sizes


@pytest.mark.parametrize("wanted", [[0], ["0%"], [-1], ["110%"], ["all"], [True], [], [1, "x"], [1.5], {}, None])
def test_what_is_no_batch_is_refused_with_the_variable(wanted):
    with pytest.raises(rollout.BatchError, match="sglang_rollout_batches"):
        rollout.check(wanted)


def test_the_first_host_says_the_batches():
    facts = {"a": {"sglang_rollout_batches": [2, "50%"]}, "b": {}}
    assert rollout.batches(["a", "b"], facts) == [2, "50%"]
    assert rollout.batches(["b", "a"], facts) == list(rollout.BATCHES)
    assert rollout.batches([], facts) == list(rollout.BATCHES)


def test_the_default_is_the_roles():
    defaults = yaml.safe_load((ROOT / "roles/sglang/defaults/main.yml").read_text())
    assert tuple(defaults["sglang_rollout_batches"]) == rollout.BATCHES


def test_failures():
    facts = {"a": {"sglang_failure": {"message": "x"}}, "b": {}}
    assert rollout.failures(["a", "b"], facts) == ["a"]


def test_the_text_says_who_comes_when():
    hosts = [f"gpu-{number}" for number in range(12)]
    facts = {key: {} for key in hosts}
    assert rollout.plan_text(hosts, facts) == "12 hosts in 4 batches of 1, 1, 3, 7; a batch with a failure is the last"
    assert rollout.plan_text(hosts[:1], facts) == "1 host at once"


STATE = {
    "instances": {
        "a": {
            "releases": ["new", "old"], "previous_good": {"release_id": "old", "unit": "sglang-a-tp8.service"},
            "release_units": {"new": "sglang-a-ep8.service", "old": "sglang-a-tp8.service"},
        },
        "b": {"releases": ["new"], "previous_good": None, "release_units": {"new": "sglang-b-ep8.service"}},
    }
}  # fmt: skip
BACK = {"instance": "a", "release_id": "old", "unit": "sglang-a-tp8.service"}


def test_an_instance_goes_back_to_what_served_before():
    assert rollout.rollback_problem(STATE, ["a"]) == ""
    assert rollout.rollback_plan(STATE, ["a"]) == [BACK]
    assert rollout.rollback_plan(STATE, ["a"], "new") == [{**BACK, "release_id": "new", "unit": "sglang-a-ep8.service"}]


def test_what_a_benchmark_has_left_goes_back_by_itself():
    tried = {"instances": {**STATE["instances"], "a": {**STATE["instances"]["a"], "trial": {"release_id": "old"}}}}
    assert rollout.rollback_problem(tried) == "", "b would have nothing to go back to, and is not meant"
    assert rollout.rollback_plan(tried) == [BACK]
    assert "b stays as it is" in rollout.rollback_problem(tried, ["a", "b"])


@pytest.mark.parametrize(
    ("instances", "release", "words"),
    [
        ([], "", ["b stays as it is", "kept: new"]),
        (["c"], "", ["has no instance c", "a, b"]),
        ([], "old", ["say which instance", "-e instance="]),
        (["a"], "lost", ["release lost is not kept", "kept: new, old"]),
    ],
)
def test_why_a_host_cannot_go_back(instances, release, words):
    text = rollout.rollback_problem(STATE, instances, release)
    assert all(word in text for word in words), text


def test_a_host_without_instances_has_nothing_to_return():
    assert "no instance" in rollout.rollback_problem({"instances": {}})


def test_the_end_repeats_one_line():
    assert rollout.failure_text({"task": "x", "message": "one line"}) == "one line"
    assert rollout.failure_text({"task": "x", "message": ["first", "second"]}) == "first (in full above)"
    assert rollout.failure_text({"task": "x", "message": ""}) == "x failed"


def test_the_first_batch_of_several_is_watched():
    hosts = ["a", "b", "c"]
    assert rollout.soaks(hosts, ["a"])
    assert not rollout.soaks(hosts, ["b"])
    assert not rollout.soaks(hosts, hosts), "nobody follows"


def soaked(serving=True, restarts=0, **more):
    unit = {"name": "sglang-a-ep8.service", "active_state": "active", "n_restarts": restarts}
    word = "serving" if serving else "failed"
    facts = {"serving": serving, "condition": word, "units": [unit], "previous_good": None}
    return {"instances": {"a": {**facts, **more}}}


def test_what_did_not_last():
    assert rollout.lost(soaked()) == []
    before = {"release_id": "x", "unit": "u"}
    gone = rollout.lost(soaked(serving=False, report={"cause": "gpu_oom"}, previous_good=before))
    assert gone == [
        {
            "instance": "a", "why": "a is failed after its gate: gpu_oom",
            "previous": {"instance": "a", "release_id": "x", "unit": "u"},
        }
    ]  # fmt: skip
    assert "started again" in rollout.lost(soaked(restarts=1))[0]["why"], "it serves, by another start"
    assert rollout.lost(soaked(restarts=1))[0]["previous"] is None


# --- instances that make room for others ----------------------------------------------------------------------------


def ran(unit, current="r1", last_good="r1", enabled=True, active="active", gpus=(), port=30000, build="cuda"):
    """An instance as sglang_state shows it."""
    return {
        "current": current, "last_good": {"release_id": last_good, "unit": unit} if last_good else None,
        "release": {"gpu_ids": list(gpus), "port": port, "engine": {"build": build}},
        "units": [{"name": unit, "active_state": active, "enabled": "enabled" if enabled else "disabled"}],
    }  # fmt: skip


def both(before, now, gone):
    before, now = {"instances": before}, {"instances": now}
    names = [item["instance"] for item in rollout.restored(before, now, gone)]
    return names, rollout.in_the_way(before, now, gone)


OLD = ran("sglang-main-tp8.service")
STOPPED = ran("sglang-main-tp8.service", active="inactive")
A = {"gpus": (0, 1, 2, 3), "port": 30000}
B = {"gpus": (4, 5, 6, 7), "port": 30001}
REPLACED = [
    pytest.param(
        {"main": OLD}, {"main": STOPPED, "renamed": ran("r", last_good=None, enabled=False, active="failed")}, ["main"],
        (["main"], []), id="a renamed one fails at its first start",
    ),
    pytest.param(
        {"main": OLD}, {"main": STOPPED, "a": ran("a", **A), "b": ran("b", last_good=None, active="failed", **B)},
        ["main"], (["main"], ["a", "b"]), id="one of two fails, the other one leaves again",
    ),
    pytest.param(
        {"main": STOPPED, "a": ran("a", **A)}, {"main": STOPPED, "a": ran("a", **A), "b": ran("b", enabled=False, **B)},
        ["main"], (["main"], ["a", "b"]), id="a run before was killed in the middle",
    ),
    pytest.param(
        {"a": ran("a", **A), "b": ran("b", **B)}, {"a": ran("a", **A), "b": ran("b", active="inactive", **B)}, ["b"],
        (["b"], []), id="a neighbour that nothing has changed stays",
    ),
    pytest.param(
        {"a": ran("a", **A), "b": ran("b", **B)},
        {"a": ran("a", current="r2", gpus=range(8), port=30000), "b": ran("b", active="inactive", **B)}, ["b"],
        (["a", "b"], ["a"]), id="one that took the GPUs returns to what it was",
    ),
    pytest.param(
        {"main": ran("m", enabled=False)}, {"main": ran("m", enabled=False, active="inactive")}, ["main"],
        ([], []), id="what was not to start at boot stays stopped",
    ),
    pytest.param(
        {"main": ran("m", last_good=None)}, {"main": ran("m", last_good=None)}, ["main"],
        ([], []), id="what never served is nothing to return to",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("before", "now", "gone", "expected"), REPLACED)
def test_a_host_whose_replacement_failed_returns_to_what_it_served(before, now, gone, expected):
    assert both(before, now, gone) == expected


def test_engines_on_the_cpu_share_no_gpus():
    before = {"a": ran("a", build="cpu", port=30001), "b": ran("b", build="cpu")}
    now = {**before, "b": ran("b", build="cpu", active="inactive")}
    assert both(before, now, ["b"]) == (["b"], [])
