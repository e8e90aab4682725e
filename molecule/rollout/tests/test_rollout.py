"""A fleet takes turns: batches, what ends them, and who is left alone.

Tests stand in the order of a fleet's life; each leaves all five hosts serving.
"""

from __future__ import annotations

import re

import engine
import pytest
import starts
from rollouts import Fleet, recap, row, wish

FLEET = Fleet(__file__)
HOSTS = FLEET.names
FIRST, SECOND, THIRD, FOURTH, FIFTH = HOSTS


@pytest.fixture(scope="module", autouse=True)
def pace():
    for name in HOSTS:
        FLEET.fail_where(name)


def test_hosts_take_turns_in_batches():
    output = FLEET.deploy(*wish())
    assert "5 hosts in 3 batches of 1, 2, 2; a batch with a failure is the last" in output
    FLEET.all_serve_and_nobody_holds_them()
    begun = {name: float(engine.sudo(FLEET.host(name), f"stat -c %.9Y {engine.ROOT}/main/current")) for name in HOSTS}
    ended = {name: engine.state(FLEET.host(name), "ready.json")["ready_at"] for name in HOSTS}
    moments = {name: float(engine.sudo(FLEET.host(name), f"date -d {ended[name]} +%s.%N")) for name in HOSTS}
    for before, after in (((FIRST,), (SECOND, THIRD)), ((SECOND, THIRD), (FOURTH, FIFTH))):
        assert max(moments[name] for name in before) < min(begun[name] for name in after), "a batch waits for the last"
    assert moments[SECOND] > begun[THIRD], "hosts of one batch load at once"


def test_a_second_run_looks_once_and_changes_nothing():
    before = FLEET.invocations()
    output = FLEET.deploy(*wish())
    for name in HOSTS:
        assert recap(output, name)["changed"] == 0
        assert "serving" in row(output, name)
    assert "sglang_venv" not in output, "a role had work"
    assert FLEET.invocations() == before


def test_a_canary_that_crashes_is_the_last():
    before = FLEET.invocations(*HOSTS[1:])
    FLEET.fail_where(FIRST, context_length=8192)
    output = FLEET.deploy(*wish(sglang_context_length=8192), rc=2)
    assert "rolled back" in row(output, FIRST)
    assert "gpu_oom_weights" in row(output, FIRST)
    for name in HOSTS[1:]:
        assert "waiting" in row(output, name)
        assert recap(output, name)["changed"] == 0
    assert FLEET.invocations(*HOSTS[1:]) == before
    assert set(FLEET.lengths().values()) == {None}
    FLEET.all_serve_and_nobody_holds_them()
    assert re.search(rf"-l {','.join(HOSTS)}", output), "the command that finishes the rest names those that wait"


def test_a_canary_that_does_not_last_is_the_last():
    before = FLEET.invocations(*HOSTS[1:])
    dies = {"kind": "gpu_oom", "at": "serving", "after": 12, "when": {"context_length": 8192}}
    starts.set_pace(FLEET.host(FIRST), dies, pace=0.02)
    output = FLEET.deploy(*wish(sglang_context_length=8192, sglang_rollout_soak=15), rc=2)
    assert re.search(rf"{FIRST}: main .*after its gate.*: gpu_oom", output), output
    assert FLEET.invocations(*HOSTS[1:]) == before
    assert set(FLEET.lengths().values()) == {None}
    FLEET.all_serve_and_nobody_holds_them()


def test_a_crash_in_the_second_batch_returns_that_host_only():
    FLEET.fail_where(FIRST)
    FLEET.fail_where(SECOND, context_length=8192)
    before = FLEET.invocations(FOURTH, FIFTH)
    output = FLEET.deploy(*wish(sglang_context_length=8192), rc=2)
    assert FLEET.lengths() == {
        FIRST: 8192, SECOND: None, THIRD: 8192, FOURTH: None, FIFTH: None,
    }  # fmt: skip
    assert "rolled back" in row(output, SECOND)
    assert "serving" in row(output, THIRD), "the rest of the batch finished what it began"
    assert FLEET.invocations(FOURTH, FIFTH) == before
    FLEET.all_serve_and_nobody_holds_them()


def test_a_plain_rerun_finishes_and_leaves_the_done_alone():
    FLEET.fail_where(SECOND)
    before = FLEET.invocations(FIRST, THIRD)
    FLEET.deploy(*wish(sglang_context_length=8192))
    assert set(FLEET.lengths().values()) == {8192}
    assert FLEET.invocations(FIRST, THIRD) == before
    FLEET.all_serve_and_nobody_holds_them()
