"""The lock that keeps rollouts apart."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess

import plugins
import pytest
from dflash_fleet import lock, state

STARTED = "Mon Nov 30 05:12:00 2026"
ANNA = {"id": "20261130T051200Z-11", "user": "anna", "controller": "ctl-1", "pid": 11, "started": STARTED}
BERT = {**ANNA, "id": "20261130T051300Z-12", "user": "bert", "controller": "ctl-2", "pid": 12}


@pytest.fixture
def layout(tmp_path):
    return state.Layout(tmp_path / "root")


def test_one_rollout_at_a_time(layout):
    assert lock.take(layout, ANNA) is None
    held = lock.take(layout, BERT)
    assert held["user"] == "anna"
    assert held["controller"] == "ctl-1"
    assert held["since"].endswith("Z")
    assert not lock.release(layout, BERT), "only the holder gives a host back"
    assert lock.release(layout, ANNA)
    assert not layout.rollout_lock().exists()
    assert lock.take(layout, BERT) is None


def test_the_same_rollout_may_come_again_and_keeps_its_time(layout):
    lock.take(layout, ANNA)
    since = lock.holder(layout)["since"]
    assert lock.take(layout, {**ANNA, "pid": 99}) is None
    assert lock.holder(layout)["since"] == since


def test_takeover_needs_the_name_of_the_holder(layout):
    lock.take(layout, ANNA)
    assert lock.take(layout, BERT, takeover="20261130T000000Z-1")["id"] == ANNA["id"]
    assert lock.take(layout, BERT, takeover=ANNA["id"]) is None
    assert lock.holder(layout)["user"] == "bert"
    assert not lock.release(layout, ANNA), "what was taken over is no longer ours"


def test_nothing_to_give_back(layout):
    assert not lock.release(layout, ANNA)
    assert not layout.root.exists(), "giving back makes no directory"


def test_the_refusal_names_who_and_what_to_do(layout):
    lock.take(layout, ANNA)
    text = lock.refusal(lock.holder(layout))
    for word in ("anna", "ctl-1", ANNA["id"], "rollout_takeover"):
        assert word in text


def test_a_lock_of_another_schema_is_not_ignored(layout):
    layout.host_state().mkdir(parents=True)
    layout.rollout_lock().write_text(json.dumps({"schema": 7, "id": "x"}))
    with pytest.raises(state.StateError, match="schema 7"):
        lock.take(layout, ANNA)


def _race(root, number, queue):
    mine = {**ANNA, "id": f"rollout-{number}"}
    queue.put((number, lock.take(state.Layout(root), mine) is None))


def test_of_many_at_once_one_wins(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    runs = [context.Process(target=_race, args=(tmp_path / "root", number, queue)) for number in range(8)]
    for run in runs:
        run.start()
    answers = dict(queue.get(timeout=30) for _ in runs)
    for run in runs:
        run.join()
    winners = [number for number, won in answers.items() if won]
    assert len(winners) == 1
    assert lock.holder(state.Layout(tmp_path / "root"))["id"] == f"rollout-{winners[0]}"


def test_the_controller_knows_its_dead():
    action = plugins.load("action_plugins/sglang_lock.py")
    mine = action.holder_of_this_run()
    child = subprocess.Popen(["sleep", "60"])
    try:
        found = {**mine, "pid": child.pid, "started": action._started(child.pid)}
        assert found["started"]
        assert not action.is_dead(found, mine)
        assert action.is_dead({**found, "started": "Mon Nov 30 05:12:00 2020"}, mine), "the number was given away again"
        assert not action.is_dead({**found, "controller": "elsewhere", "started": ""}, mine)
    finally:
        child.kill()
        child.wait()
    assert action.is_dead(found, mine)


def test_a_rollout_has_one_name_in_every_fork():
    action = plugins.load("action_plugins/sglang_lock.py")
    here = action.holder_of_this_run()
    assert here["pid"] == os.getpid(), "the process that loaded it, whatever fork asks"
    assert here["id"].endswith(f"-{here['pid']}")
    assert action.holder_of_this_run("nightly-7")["id"] == "nightly-7"
