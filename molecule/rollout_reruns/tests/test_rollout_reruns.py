"""A fleet that was deployed to is looked at again, changed a little, and brought back.

Tests stand in the order of a fleet's life; each leaves all five hosts serving.
"""

from __future__ import annotations

import json
import re

import engine
import pytest
from rollouts import BATCHES, UNIT, Fleet, recap, row, wish

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


def test_the_whole_look_changes_nothing_either():
    before = FLEET.invocations()
    output = FLEET.deploy(*wish(sglang_rollout_batches=["100%"], sglang_skip_unchanged=False))
    assert all(recap(output, name)["changed"] == 0 for name in HOSTS)
    assert "sglang_venv" in output
    assert FLEET.invocations() == before


def test_status_says_what_engines_do_and_what_drifted():
    engine.generate(FLEET.host(SECOND), "a story", 400)
    lines = FLEET.status(*wish(sglang_rollout_batches=["100%"]))
    assert list(lines) == HOSTS
    assert {line["state"] for line in lines.values()} == {"serving"}
    assert {name: line["drift"] for name, line in lines.items()} == {name: [] for name in HOSTS}
    assert 1.5 < lines[SECOND]["accept_length"] < 8
    assert all(line["tokens_per_second"] is not None and line["restarts"] == 0 for line in lines.values())
    link = f"/etc/systemd/system/multi-user.target.wants/{UNIT}"
    engine.sudo(FLEET.host(THIRD), f"rm {link}")
    moved = FLEET.status(*wish(sglang_rollout_batches=["100%"]))
    assert link in moved[THIRD]["drift"]
    assert moved[FIRST]["drift"] == []
    assert FLEET.status()[FIRST]["drift"] == ["the wish"], "what the command line said belongs to it"
    text = FLEET.play("playbooks/status.yml", *wish(sglang_rollout_batches=["100%"]))
    assert re.search(rf"^{THIRD} .* main and \d+ more|^{THIRD} .* {link}", text, re.M), text


def test_only_the_host_that_moved_is_worked_on():
    before = FLEET.invocations()
    output = FLEET.deploy(*wish(sglang_rollout_batches=["100%"]))
    assert {name for name in HOSTS if recap(output, name)["changed"]} == {THIRD}
    assert FLEET.host(THIRD).service(UNIT).is_enabled
    assert FLEET.invocations() == before, "a lost link is no reason to restart"


def test_a_unit_that_changes_alone_waits_for_the_next_start():
    before = FLEET.invocations()
    output = FLEET.deploy(*wish(sglang_service_stop_seconds=170))
    assert all(recap(output, name)["changed"] for name in HOSTS)
    assert "next start" in row(output, FIRST)
    assert FLEET.invocations() == before
    assert "taken at the next start" in FLEET.play("playbooks/status.yml")
    assert engine.show(FLEET.host(FIRST), UNIT, "NeedDaemonReload") == "no"
    again = FLEET.deploy(*wish(sglang_service_stop_seconds=170))
    assert not any(recap(again, name)["changed"] for name in HOSTS)


def test_the_fleet_goes_back_in_batches():
    FLEET.deploy(*wish(sglang_context_length=4096))
    assert set(FLEET.lengths().values()) == {4096}
    output = FLEET.play("playbooks/rollback.yml", "-e", json.dumps(BATCHES))
    assert "5 hosts in 3 batches of 1, 2, 2" in output
    assert set(FLEET.lengths().values()) == {None}
    FLEET.all_serve_and_nobody_holds_them()


def test_a_host_goes_back_to_a_release_that_it_keeps_or_says_what_it_keeps():
    output = FLEET.play("playbooks/rollback.yml", "-l", FIRST, "-e", "release=0123456789ab", rc=2)
    kept = re.search(r"kept: ([0-9a-f, ]+)", output)
    assert kept, output
    assert "release 0123456789ab is not kept" in output
    before = FLEET.invocations()
    FLEET.play("playbooks/rollback.yml", "-l", FIRST)
    assert FLEET.length(FIRST) == 4096
    assert {name for name, value in FLEET.invocations().items() if value != before[name]} == {FIRST}
    FLEET.all_serve_and_nobody_holds_them()
