"""A fleet takes turns while its users go on asking: batches, what ends them, who is left alone, and nothing is lost.

Tests stand in the order of a fleet's life; each leaves all five hosts serving, and in rotation.
"""

from __future__ import annotations

import re

import engine
import pytest
import starts
from rollouts import Fleet, read_until, recap, row, wish
from traffic import ROUTER, ROUTER_UNIT, Traffic

FLEET = Fleet(__file__)
HOSTS = FLEET.names
FIRST, SECOND, THIRD, FOURTH, FIFTH = HOSTS
NEW = "0.5.23"


def new(**variables):
    """The wish from the first rollout on: another release."""
    return wish(sglang_version=NEW, **variables)


@pytest.fixture(scope="module", autouse=True)
def pace():
    for name in HOSTS:
        FLEET.fail_where(name)
    FLEET.deploy(*wish(sglang_rollout_batches=["100%"]))
    assert FLEET.rotation() == HOSTS


@pytest.fixture
def users():
    """Users at work, all the while; their loss is what a test is about."""
    with Traffic(__file__) as traffic:
        yield traffic
    assert traffic.lost() == {}
    FLEET.all_serve_and_nobody_holds_them()
    assert FLEET.rotation() == HOSTS


def test_hosts_take_turns_in_batches_and_no_request_is_lost():
    with Traffic(__file__, streams=32, tokens=24) as traffic:
        output = FLEET.deploy(*new())
    assert traffic.lost() == {}
    assert traffic.result["ok"] > 2000
    assert traffic.result["without_usage"] == 0
    assert "5 hosts in 3 batches of 1, 2, 2; a batch with a failure is the last" in output
    assert {engine.release(FLEET.host(name))["engine"]["version"] for name in HOSTS} == {NEW}
    FLEET.all_serve_and_nobody_holds_them()
    assert FLEET.rotation() == HOSTS
    begun, gated = (
        {name: float(engine.sudo(FLEET.host(name), f"stat -c %.9Y {engine.ROOT}/main/{path}")) for name in HOSTS}
        for path in ("current", "state/last_good.json")
    )
    ended = {name: engine.state(FLEET.host(name), "ready.json")["ready_at"] for name in HOSTS}
    moments = {name: float(engine.sudo(FLEET.host(name), f"date -d {ended[name]} +%s.%N")) for name in HOSTS}
    for before, after in (((FIRST,), (SECOND, THIRD)), ((SECOND, THIRD), (FOURTH, FIFTH))):
        assert max(moments[name] for name in before) < min(begun[name] for name in after), "a batch waits for the last"
    for one, other in ((SECOND, THIRD), (THIRD, SECOND), (FOURTH, FIFTH), (FIFTH, FOURTH)):
        assert gated[one] > begun[other], "hosts of one batch load at once: none waits for another's gate"


def test_a_second_run_looks_once_and_changes_nothing(users):
    before = FLEET.invocations()
    output = FLEET.deploy(*new())
    for name in HOSTS:
        assert recap(output, name)["changed"] == 0
        assert "serving" in row(output, name)
    assert recap(output, ROUTER)["changed"] == 0
    assert "sglang_service :" not in output, "a role had work"
    assert FLEET.invocations() == before


def test_a_canary_that_crashes_is_the_last(users):
    before = FLEET.invocations(*HOSTS[1:])
    FLEET.fail_where(FIRST, context_length=8192)
    output = FLEET.deploy(*new(sglang_context_length=8192), rc=2)
    assert "rolled back" in row(output, FIRST)
    assert "gpu_oom_weights" in row(output, FIRST)
    for name in HOSTS[1:]:
        assert "waiting" in row(output, name)
        assert recap(output, name)["changed"] == 0
    assert FLEET.invocations(*HOSTS[1:]) == before
    assert set(FLEET.lengths().values()) == {None}
    assert re.search(rf"-l {','.join(HOSTS)}", output), "the command that finishes the rest names those that wait"


def test_a_canary_that_does_not_last_is_the_last():
    before = FLEET.invocations(*HOSTS[1:])
    dies = {"kind": "gpu_oom", "at": "serving", "after": 12, "when": {"context_length": 8192}}
    starts.set_pace(FLEET.host(FIRST), dies, pace=0.02)
    with Traffic(__file__) as traffic:
        output = FLEET.deploy(*new(sglang_context_length=8192, sglang_rollout_soak=15), rc=2)
    assert re.search(rf"{FIRST}: main .*after its gate.*: gpu_oom", output), output
    # What a host that dies has begun to answer is lost with it, and nothing else.
    assert traffic.result["failed"] == 0
    assert traffic.result["cut"] <= traffic.streams
    assert FLEET.invocations(*HOSTS[1:]) == before
    assert set(FLEET.lengths().values()) == {None}
    FLEET.all_serve_and_nobody_holds_them()
    assert FLEET.rotation() == HOSTS


def test_a_canary_that_is_slower_than_the_others_is_the_last(users):
    before = FLEET.invocations(*HOSTS[1:])
    slow = {"kind": "slow", "at": "serving", "factor": 6, "when": {"context_length": 8192}}
    starts.set_pace(FLEET.host(FIRST), slow, pace=0.02)
    judged = {"sglang_rollout_soak": 20, "sglang_rollout_soak_limits": {"requests": 5}}
    output = FLEET.deploy(*new(sglang_context_length=8192, **judged), rc=2)
    assert re.search(rf"{FIRST}: main does worse than hosts that were not touched: tokens per second", output), output
    assert FLEET.invocations(*HOSTS[1:]) == before
    assert set(FLEET.lengths().values()) == {None}


def test_a_crash_in_the_second_batch_returns_that_host_only(users):
    FLEET.fail_where(FIRST)
    FLEET.fail_where(SECOND, context_length=8192)
    before = FLEET.invocations(FOURTH, FIFTH)
    output = FLEET.deploy(*new(sglang_context_length=8192), rc=2)
    assert FLEET.lengths() == {
        FIRST: 8192, SECOND: None, THIRD: 8192, FOURTH: None, FIFTH: None,
    }  # fmt: skip
    assert "rolled back" in row(output, SECOND)
    assert "serving" in row(output, THIRD), "the rest of the batch finished what it began"
    assert FLEET.invocations(FOURTH, FIFTH) == before


def test_a_host_that_cannot_serve_stays_out_and_a_plain_rerun_brings_it_back(users):
    FLEET.fail_where(FOURTH, context_length=8192)
    before = FLEET.invocations(FIRST, THIRD)
    FLEET.fail_where(SECOND)
    output = FLEET.deploy(*new(sglang_context_length=8192, sglang_service_rollback=False), rc=2)
    assert "failed" in row(output, FOURTH)
    assert FLEET.rotation() == [name for name in HOSTS if name != FOURTH]
    FLEET.fail_where(FOURTH)
    FLEET.deploy(*new(sglang_context_length=8192))
    assert set(FLEET.lengths().values()) == {8192}
    assert FLEET.invocations(FIRST, THIRD) == before


def test_the_fleet_goes_back_without_a_lost_request(users):
    FLEET.play("playbooks/rollback.yml", "-e", '{"sglang_rollout_batches": [1, 2, "100%"]}')
    assert set(FLEET.lengths().values()) == {None}


# Where the router dies: the task that is about to run on every host of the batch.
MOMENTS = {
    "leaves it": "leave | Take it out of every router",
    "loads": "start | Wait until",
    "comes back to it": "join | Put it into every router",
}


@pytest.mark.parametrize(("when", "length"), zip(MOMENTS, (2048, 4096, 1024)))
def test_router_killed(when, length):
    """Router killed and restarted while the fleet {when}."""
    wanted = new(sglang_context_length=length, sglang_rollout_batches=["100%"])
    before = engine.show(FLEET.host(ROUTER), ROUTER_UNIT, "InvocationID")
    with Traffic(__file__) as traffic:
        run = FLEET.begin(*wanted)
        output = read_until(run, MOMENTS[when])
        engine.sudo(FLEET.host(ROUTER), f"systemctl kill --signal=KILL {ROUTER_UNIT}")
        output += run.communicate(timeout=600)[0]
    assert run.returncode == 0, output[-6000:]
    assert engine.show(FLEET.host(ROUTER), ROUTER_UNIT, "InvocationID") != before, "it was killed and came back"
    assert set(FLEET.lengths().values()) == {length}
    assert FLEET.rotation() == HOSTS
    assert traffic.result["ok"] > 0
    again = FLEET.deploy(*wanted)
    assert {recap(again, name)["changed"] for name in (ROUTER, *HOSTS)} == {0}
    assert FLEET.rotation() == HOSTS
    FLEET.all_serve_and_nobody_holds_them()
