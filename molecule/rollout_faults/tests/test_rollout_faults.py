"""What can happen to the controller of a rollout. One plain rerun then ends where an undisturbed run ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import controller
import engine
import pytest
import starts
from rollouts import LOCK, Faults, kill_when, read_until

FLEET = Faults(__file__, sglang_rollout_batches=["100%"])
HOSTS = FLEET.names
FIRST, SECOND, THIRD = HOSTS
REPORTS = controller.ROOT / "reports/rollouts"


@pytest.fixture(scope="module", autouse=True)
def known():
    for name in HOSTS:
        FLEET.fail_where(name)
    FLEET.learn()


def report(output):
    """The report that a run names, as data."""
    found = re.search(r"^report  (\S+)/rollout.html", output, re.M)
    assert found, output
    return json.loads((controller.ROOT / found[1] / "rollout.json").read_text())


# From its name to its last word: where, and what the run prints there.
BOUNDARIES = {
    "the beginning": "begin | Name the rollout",
    "gpu_host": "TASK [gpu_host",
    "sglang_venv": "TASK [sglang_venv",
    "model_weights": "TASK [model_weights",
    "sglang_service": "TASK [sglang_service",
    "the switch": "start | Switch",
    "the wait": "start | Wait until",
    "the record": "serving | Record it",
    "the end": "end | Let other rollouts in again",
}


@pytest.mark.parametrize("where", BOUNDARIES)
def test_killed(where):
    """kill -9 of ansible-playbook at {where}."""
    FLEET.turn()
    run = FLEET.begin(*FLEET.arguments())
    kill_when(run, BOUNDARIES[where])
    assert FLEET.host(FIRST).file(LOCK).exists, "the killed rollout still holds the host"
    killed = engine.read_json(FLEET.host(FIRST), LOCK)["id"]
    output = FLEET.rerun()
    assert "which has ended without giving the host back" in output
    found = report(output)
    assert found["outcome"] == "done"
    assert {host["outcome"] for host in found["hosts"]} == {"done"}
    if where != "the beginning":  # before its name is known it has no report that could be continued
        assert found["runs"][0]["rollout"] == killed
        assert "interrupted" in (REPORTS / killed / "rollout.html").read_text()


def test_killed_twice():
    """kill -9, and again in the rerun."""
    FLEET.turn()
    for marker in ("start | Switch", "start | Wait until"):
        kill_when(FLEET.begin(*FLEET.arguments()), marker)
    found = report(FLEET.rerun())
    assert [one["outcome"] for one in found["runs"]] == ["interrupted", "interrupted", "ended"]


def test_two_rollouts_at_once():
    """Two rollouts at once: the second is told who holds the hosts, and touches nothing."""
    FLEET.turn()
    for name in HOSTS:
        starts.set_pace(FLEET.host(name), pace=0.1)
    run = FLEET.begin(*FLEET.arguments())
    try:
        read_until(run, "TASK [gpu_host")
        held = engine.read_json(FLEET.host(THIRD), LOCK)
        before = FLEET.invocations(THIRD)
        output = FLEET.deploy("-l", THIRD, *FLEET.arguments(sglang_context_length=1024), rc=2)
        assert FLEET.invocations(THIRD) == before
    finally:
        first, _ = run.communicate(timeout=300)
    assert run.returncode == 0, first
    for word in (held["id"], held["user"], held["controller"], "rollout_takeover", "Nothing was touched"):
        assert word in output
    FLEET.ends_as_if_nothing_had_happened()
    for name in HOSTS:
        FLEET.fail_where(name)


def test_another_controller_died():
    """A controller that died elsewhere: its lock needs a word, and gives way to it."""
    FLEET.turn()
    engine.sudo(FLEET.host(FIRST), f"mkdir -p {engine.ROOT}/state")
    lock = {
        "schema": 1, "id": "20260101T000000Z-1", "user": "anna", "controller": "elsewhere", "pid": 1, "started": "x",
        "since": "2026-01-01T00:00:00.000000Z",
    }  # fmt: skip
    engine.sudo(FLEET.host(FIRST), f"printf %s '{json.dumps(lock)}' > {LOCK}")
    before = FLEET.invocations()
    output = FLEET.deploy(*FLEET.arguments(), rc=2)
    assert "anna on elsewhere since 2026-01-01T00:00:00" in output
    assert FLEET.invocations() == before
    assert not FLEET.host(SECOND).file(LOCK).exists, "what was taken in vain is given back"
    FLEET.rerun("-e", f"rollout_takeover={lock['id']}")


def test_the_report_cannot_be_written(tmp_path):
    """The controller's own disk refuses the report."""
    FLEET.turn()
    blocked = Path(tmp_path, "reports")
    blocked.write_text("a file where a folder belongs")
    output = FLEET.deploy(*FLEET.arguments(sglang_reports_dir=str(blocked)))
    assert "The report of this rollout cannot be written" in output
    assert output.count("cannot be written") == 1
    FLEET.ends_as_if_nothing_had_happened()
