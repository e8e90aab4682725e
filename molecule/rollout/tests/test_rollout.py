"""A fleet takes turns: batches, what ends them, who is left alone, and how a rollout that died is continued.

Tests stand in the order of a fleet's life; each leaves all five hosts serving.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time

import controller
import engine
import pytest
import starts

HOSTS = [f"rehearsal-{number:02d}" for number in range(1, 6)]
FIRST, SECOND, THIRD, FOURTH, FIFTH = HOSTS
UNIT = "sglang-main-ep8.service"
BATCHES = {"sglang_rollout_batches": [1, 2, "100%"], "sglang_rollout_soak": 0}
LOCK = f"{engine.ROOT}/state/rollout.json"


def host(name):
    return controller.scenario_host(__file__, name)


def wish(**variables):
    """Arguments for the fleet's wish, three batches."""
    return ["-e", json.dumps({"sglang_version": "0.5.20", **BATCHES, **variables})]


def invocations(*names):
    return {name: engine.show(host(name), UNIT, "InvocationID") for name in names or HOSTS}


def length(name):
    """The context length that a host's current release asks for, as a mark of which wish it has."""
    arguments = engine.release(host(name))["arguments"]
    return int(arguments[arguments.index("--context-length") + 1]) if "--context-length" in arguments else None


def recap(output, name):
    """The counts of a host in Ansible's recap."""
    line = re.search(rf"^{name}\s+: (.*)$", output, re.M)
    assert line, output
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line[1])}


def row(output, name):
    """The words of a host's line in the last table."""
    return output.rpartition("SGLANG ***")[2].partition(f"\n{name} ")[2].splitlines()[0]


def all_serve_and_nobody_holds_them():
    for name in HOSTS:
        on = host(name)
        ready = engine.state(on, "ready.json")
        assert engine.show(on, UNIT, "ActiveState") == "active"
        assert ready["invocation_id"] == engine.show(on, UNIT, "InvocationID")
        assert not on.file(LOCK).exists


def fail_where(name, **arguments):
    """From now on a start with these arguments dies on this host while it loads weights."""
    failures = [{"kind": "gpu_oom", "at": "weights", "when": arguments}] if arguments else []
    starts.set_pace(host(name), *failures, pace=0.02)


@pytest.fixture(scope="module", autouse=True)
def pace():
    for name in HOSTS:
        fail_where(name)


def test_hosts_take_turns_in_batches():
    output = controller.deploy(__file__, *wish())
    assert "5 hosts in 3 batches of 1, 2, 2; a batch with a failure is the last" in output
    all_serve_and_nobody_holds_them()
    begun = {name: float(engine.sudo(host(name), f"stat -c %.9Y {engine.ROOT}/main/current")) for name in HOSTS}
    ended = {name: engine.state(host(name), "ready.json")["ready_at"] for name in HOSTS}
    moments = {name: float(engine.sudo(host(name), f"date -d {ended[name]} +%s.%N")) for name in HOSTS}
    for before, after in (((FIRST,), (SECOND, THIRD)), ((SECOND, THIRD), (FOURTH, FIFTH))):
        assert max(moments[name] for name in before) < min(begun[name] for name in after), "a batch waits for the last"
    assert moments[SECOND] > begun[THIRD], "hosts of one batch load at once"


def test_a_second_run_looks_once_and_changes_nothing():
    before = invocations()
    output = controller.deploy(__file__, *wish())
    for name in HOSTS:
        assert recap(output, name)["changed"] == 0
        assert "serving" in row(output, name)
    assert "sglang_venv" not in output, "a role had work"
    assert invocations() == before


def test_the_whole_look_changes_nothing_either():
    before = invocations()
    output = controller.deploy(__file__, *wish(sglang_skip_unchanged=False))
    assert all(recap(output, name)["changed"] == 0 for name in HOSTS)
    assert "sglang_venv" in output
    assert invocations() == before


def test_only_the_host_that_moved_is_worked_on():
    before = invocations()
    engine.sudo(host(THIRD), f"rm /etc/systemd/system/multi-user.target.wants/{UNIT}")
    output = controller.deploy(__file__, *wish())
    assert {name for name in HOSTS if recap(output, name)["changed"]} == {THIRD}
    assert host(THIRD).service(UNIT).is_enabled
    assert invocations() == before, "a lost link is no reason to restart"


def test_a_canary_that_crashes_is_the_last():
    before = invocations(*HOSTS[1:])
    fail_where(FIRST, context_length=8192)
    output = controller.deploy(__file__, *wish(sglang_context_length=8192), rc=2)
    assert "rolled back" in row(output, FIRST)
    assert "gpu_oom_weights" in row(output, FIRST)
    for name in HOSTS[1:]:
        assert "waiting" in row(output, name)
        assert recap(output, name)["changed"] == 0
    assert invocations(*HOSTS[1:]) == before
    assert {length(name) for name in HOSTS} == {None}
    all_serve_and_nobody_holds_them()
    assert re.search(rf"-l {','.join(HOSTS)}", output), "the command that finishes the rest names those that wait"


def test_a_canary_that_does_not_last_is_the_last():
    before = invocations(*HOSTS[1:])
    dies = {"kind": "gpu_oom", "at": "serving", "after": 12, "when": {"context_length": 8192}}
    starts.set_pace(host(FIRST), dies, pace=0.02)
    output = controller.deploy(__file__, *wish(sglang_context_length=8192, sglang_rollout_soak=15), rc=2)
    assert re.search(rf"{FIRST}: main .*after its gate.*: gpu_oom", output), output
    assert invocations(*HOSTS[1:]) == before
    assert {length(name) for name in HOSTS} == {None}
    all_serve_and_nobody_holds_them()


def test_a_crash_in_the_second_batch_returns_that_host_only():
    fail_where(FIRST)
    fail_where(SECOND, context_length=8192)
    before = invocations(FOURTH, FIFTH)
    output = controller.deploy(__file__, *wish(sglang_context_length=8192), rc=2)
    assert {name: length(name) for name in HOSTS} == {
        FIRST: 8192, SECOND: None, THIRD: 8192, FOURTH: None, FIFTH: None,
    }  # fmt: skip
    assert "rolled back" in row(output, SECOND)
    assert "serving" in row(output, THIRD), "the rest of the batch finished what it began"
    assert invocations(FOURTH, FIFTH) == before
    all_serve_and_nobody_holds_them()


def test_a_plain_rerun_finishes_and_leaves_the_done_alone():
    fail_where(SECOND)
    before = invocations(FIRST, THIRD)
    controller.deploy(__file__, *wish(sglang_context_length=8192))
    assert {length(name) for name in HOSTS} == {8192}
    assert invocations(FIRST, THIRD) == before
    all_serve_and_nobody_holds_them()


def test_a_unit_that_changes_alone_waits_for_the_next_start():
    before = invocations()
    output = controller.deploy(__file__, *wish(sglang_context_length=8192, sglang_service_stop_seconds=170))
    assert all(recap(output, name)["changed"] for name in HOSTS)
    assert "next start" in row(output, FIRST)
    assert invocations() == before
    assert "taken at the next start" in controller.play(__file__, "playbooks/status.yml")
    assert engine.show(host(FIRST), UNIT, "NeedDaemonReload") == "no"
    again = controller.deploy(__file__, *wish(sglang_context_length=8192, sglang_service_stop_seconds=170))
    assert not any(recap(again, name)["changed"] for name in HOSTS)


def test_the_fleet_goes_back_in_batches():
    controller.deploy(__file__, *wish(sglang_context_length=4096))
    assert {length(name) for name in HOSTS} == {4096}
    output = controller.play(__file__, "playbooks/rollback.yml", "-e", json.dumps(BATCHES))
    assert "5 hosts in 3 batches of 1, 2, 2" in output
    assert {length(name) for name in HOSTS} == {8192}
    all_serve_and_nobody_holds_them()


def test_a_host_goes_back_to_a_release_that_it_keeps_or_says_what_it_keeps():
    output = controller.play(__file__, "playbooks/rollback.yml", "-l", FIRST, "-e", "release=0123456789ab", rc=2)
    kept = re.search(r"kept: ([0-9a-f, ]+)", output)
    assert kept, output
    assert "release 0123456789ab is not kept" in output
    before = invocations()
    controller.play(__file__, "playbooks/rollback.yml", "-l", FIRST)
    assert length(FIRST) == 4096
    assert {name for name, value in invocations().items() if value != before[name]} == {FIRST}
    all_serve_and_nobody_holds_them()


def kill_when(run, marker, seconds=120):
    """Read a play's output until a line holds the marker, then kill it and its workers; returns what was read."""
    text, end = "", time.monotonic() + seconds
    assert run.stdout is not None
    for line in run.stdout:
        text += line
        if marker in line:
            break
        assert time.monotonic() < end, text
    assert marker in text, text
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    return text


def test_of_two_rollouts_the_second_is_told_who_holds_the_hosts():
    for name in HOSTS:
        starts.set_pace(host(name), pace=0.1)
    run = controller.start(__file__, "deploy-dflash.yml", *wish(sglang_context_length=2048))
    try:
        deadline = time.monotonic() + 60
        while not host(FIFTH).file(LOCK).exists and time.monotonic() < deadline:
            time.sleep(0.2)
        held = engine.read_json(host(FIFTH), LOCK)
        before = invocations(FOURTH, FIFTH)
        output = controller.deploy(__file__, "-l", f"{FOURTH},{FIFTH}", *wish(sglang_context_length=1024), rc=2)
        assert invocations(FOURTH, FIFTH) == before
    finally:
        first, _ = run.communicate(timeout=300)
    assert run.returncode == 0, first
    for word in (held["id"], held["user"], held["controller"], "rollout_takeover", "Nothing was touched"):
        assert word in output
    assert {length(name) for name in HOSTS} == {2048}
    all_serve_and_nobody_holds_them()


def test_a_lock_of_another_controller_needs_a_word():
    engine.sudo(host(FIRST), f"mkdir -p {engine.ROOT}/state")
    lock = {
        "schema": 1, "id": "20260101T000000Z-1", "user": "anna", "controller": "elsewhere", "pid": 1, "started": "x",
        "since": "2026-01-01T00:00:00.000000Z",
    }  # fmt: skip
    engine.sudo(host(FIRST), f"printf %s '{json.dumps(lock)}' > {LOCK}")
    output = controller.deploy(__file__, *wish(sglang_context_length=1024), rc=2)
    assert "anna on elsewhere since 2026-01-01T00:00:00" in output
    assert {length(name) for name in HOSTS} == {2048}
    assert not host(SECOND).file(LOCK).exists, "what was taken in vain is given back"
    takeover = ["-e", f"rollout_takeover={lock['id']}", "-l", FIRST]
    controller.deploy(__file__, *wish(sglang_context_length=1024), *takeover)
    assert length(FIRST) == 1024
    all_serve_and_nobody_holds_them()


BOUNDARIES = ["TASK [gpu_host", "TASK [sglang_venv", "TASK [model_weights", "start | Switch", "start | Wait until"]


@pytest.mark.parametrize("marker", BOUNDARIES)
def test_a_rollout_that_was_killed_is_continued_by_a_plain_rerun(marker):
    for name in (FIRST, SECOND):
        fail_where(name)
    value = 3000 + BOUNDARIES.index(marker)
    arguments = [*wish(sglang_context_length=value, sglang_rollout_batches=["100%"]), "-l", f"{FIRST},{SECOND}"]
    run = controller.start(__file__, "deploy-dflash.yml", *arguments, own_group=True)
    kill_when(run, marker)
    assert host(FIRST).file(LOCK).exists, "the killed rollout still holds the host"
    output = controller.deploy(__file__, *arguments)
    assert "which has ended without giving the host back" in output
    assert {length(FIRST), length(SECOND)} == {value}
    all_serve_and_nobody_holds_them()
    again = controller.deploy(__file__, *arguments)
    assert not any(recap(again, name)["changed"] for name in (FIRST, SECOND))


def test_hosts_that_are_away_do_not_stall_the_rest():
    controller.fleet(__file__, "exec", FIRST, "--", "ip", "link", "set", "eth0", "down")
    try:
        output = controller.deploy(__file__, *wish(), rc=4)
    finally:
        controller.fleet(__file__, "exec", FIRST, "--", "ip", "link", "set", "eth0", "up")
    assert "4 hosts in 3 batches of 1, 2, 1" in output
    assert {name: length(name) for name in HOSTS[1:]} == dict.fromkeys(HOSTS[1:])
    assert re.search(rf"ansible-playbook deploy-dflash.yml .*-l {FIRST}", output)
    controller.deploy(__file__, *wish(), "-l", FIRST)
    all_serve_and_nobody_holds_them()
