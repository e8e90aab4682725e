"""What cuts a rollout short, and that one plain rerun brings the same end.

Each test leaves all five hosts serving.
"""

from __future__ import annotations

import json
import re
import time

import controller
import engine
import pytest
import starts
from rollouts import LOCK, Fleet, kill_when, recap, wish

FLEET = Fleet(__file__)
HOSTS = FLEET.names
FIRST, SECOND, THIRD, FOURTH, FIFTH = HOSTS


@pytest.fixture(scope="module", autouse=True)
def pace():
    for name in HOSTS:
        FLEET.fail_where(name)


def test_the_fleet_is_deployed():
    FLEET.deploy(*wish(sglang_rollout_batches=["100%"]))
    FLEET.all_serve_and_nobody_holds_them()


def test_of_two_rollouts_the_second_is_told_who_holds_the_hosts():
    for name in HOSTS:
        starts.set_pace(FLEET.host(name), pace=0.1)
    run = FLEET.begin(*wish(sglang_context_length=2048))
    try:
        deadline = time.monotonic() + 60
        while not FLEET.host(FIFTH).file(LOCK).exists and time.monotonic() < deadline:
            time.sleep(0.2)
        held = engine.read_json(FLEET.host(FIFTH), LOCK)
        before = FLEET.invocations(FOURTH, FIFTH)
        output = FLEET.deploy("-l", f"{FOURTH},{FIFTH}", *wish(sglang_context_length=1024), rc=2)
        assert FLEET.invocations(FOURTH, FIFTH) == before
    finally:
        first, _ = run.communicate(timeout=300)
    assert run.returncode == 0, first
    for word in (held["id"], held["user"], held["controller"], "rollout_takeover", "Nothing was touched"):
        assert word in output
    assert set(FLEET.lengths().values()) == {2048}
    FLEET.all_serve_and_nobody_holds_them()


def test_a_lock_of_another_controller_needs_a_word():
    engine.sudo(FLEET.host(FIRST), f"mkdir -p {engine.ROOT}/state")
    lock = {
        "schema": 1, "id": "20260101T000000Z-1", "user": "anna", "controller": "elsewhere", "pid": 1, "started": "x",
        "since": "2026-01-01T00:00:00.000000Z",
    }  # fmt: skip
    engine.sudo(FLEET.host(FIRST), f"printf %s '{json.dumps(lock)}' > {LOCK}")
    output = FLEET.deploy(*wish(sglang_context_length=1024), rc=2)
    assert "anna on elsewhere since 2026-01-01T00:00:00" in output
    assert set(FLEET.lengths().values()) == {2048}
    assert not FLEET.host(SECOND).file(LOCK).exists, "what was taken in vain is given back"
    takeover = ["-e", f"rollout_takeover={lock['id']}", "-l", FIRST]
    FLEET.deploy(*wish(sglang_context_length=1024), *takeover)
    assert FLEET.length(FIRST) == 1024
    FLEET.all_serve_and_nobody_holds_them()


BOUNDARIES = ["TASK [gpu_host", "TASK [sglang_venv", "TASK [model_weights", "attempt | Switch", "attempt | Wait until"]


@pytest.mark.parametrize("marker", BOUNDARIES)
def test_a_rollout_that_was_killed_is_continued_by_a_plain_rerun(marker):
    for name in (FIRST, SECOND):
        FLEET.fail_where(name)
    value = 3000 + BOUNDARIES.index(marker)
    arguments = [*wish(sglang_context_length=value, sglang_rollout_batches=["100%"]), "-l", f"{FIRST},{SECOND}"]
    run = FLEET.begin(*arguments)
    kill_when(run, marker)
    assert FLEET.host(FIRST).file(LOCK).exists, "the killed rollout still holds the host"
    output = FLEET.deploy(*arguments)
    assert "which has ended without giving the host back" in output
    assert {FLEET.length(FIRST), FLEET.length(SECOND)} == {value}
    FLEET.all_serve_and_nobody_holds_them()
    again = FLEET.deploy(*arguments)
    assert not any(recap(again, name)["changed"] for name in (FIRST, SECOND))


def test_hosts_that_are_away_do_not_stall_the_rest():
    controller.fleet(__file__, "exec", FIRST, "--", "ip", "link", "set", "eth0", "down")
    try:
        output = FLEET.deploy(*wish(), rc=4)
    finally:
        controller.fleet(__file__, "exec", FIRST, "--", "ip", "link", "set", "eth0", "up")
    assert "4 hosts in 3 batches of 1, 2, 1" in output
    assert {name: FLEET.length(name) for name in HOSTS[1:]} == dict.fromkeys(HOSTS[1:])
    assert re.search(rf"ansible-playbook deploy-dflash.yml .*-l {FIRST}", output)
    FLEET.deploy(*wish(), "-l", FIRST)
    FLEET.all_serve_and_nobody_holds_them()
