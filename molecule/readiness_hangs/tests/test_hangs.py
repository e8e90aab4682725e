"""Starts that do not die by themselves, and others' hands in them: what systemd shows and what the report says."""

from __future__ import annotations

import json
import re
import subprocess

import controller
import engine
import pytest
import starts

UNIT = starts.UNIT
OTHER_SERVER = "systemd-run --unit=other-server --collect python3 -m http.server 30000 --bind 127.0.0.1"
AFTER_GATE = 5  # s after the server is up: the gate has passed, also on a busy machine
LISTENS = "timeout 20 sh -c 'until ss -Hltn sport = :30000 | grep -q .; do sleep 0.2; done'"


@pytest.mark.parametrize("phase", ["weights", "graph_capture"])
@starts.together
def test_a_hang_in_the_load_ends_by_its_limit(host, phase):
    rows, report = starts.failed_once(host, {"kind": "hang", "at": phase}, seconds=120)
    first = starts.first_start(rows)
    assert "active" not in starts.states(first)
    assert any(row["StatusText"].startswith("hung: ") for row in first), first
    assert report["systemd"]["SERVICE_RESULT"] == "watchdog"
    assert (report["crash"]["verdict"], report["crash"]["phase"]) == ("hung", phase)


@starts.together
def test_a_hang_while_serving_ends_by_the_watchdog_though_health_answers(host):
    failure = {"kind": "hang", "at": "serving", "after": AFTER_GATE, "watchdog": False}
    rows, report = starts.failed_once(host, failure, seconds=120)
    assert any("nothing generated for" in row["StatusText"] for row in rows), rows
    assert report["systemd"]["SERVICE_RESULT"] == "watchdog"
    assert report["crash"]["verdict"] == "hung"


@starts.together
def test_dead_ranks_under_a_living_parent(host):
    rows, report = starts.failed_once(host, {"kind": "zombie", "at": "serving", "after": AFTER_GATE})
    assert any(row["StatusText"].startswith("crashed: ") for row in rows), rows
    assert report["systemd"]["SERVICE_RESULT"] == "watchdog"
    assert report["crash"]["verdict"] == "running_but_dead"


@starts.together
def test_a_port_of_another_server_that_answers_200(host):
    known = starts.reports(host)
    starts.set_pace(host)
    engine.sudo(host, f"systemctl stop {UNIT}")
    engine.sudo(host, OTHER_SERVER)
    try:
        engine.sudo(host, LISTENS)
        rows = starts.restart(host, starts.FAILED)
    finally:
        engine.sudo(host, "systemctl stop other-server")
    assert "active" not in starts.states(rows)
    assert rows[-1]["NRestarts"] == "0"
    assert starts.newest_report(host, known)["crash"]["cause"] == "port_in_use"


@starts.together
def test_a_port_that_another_server_takes_during_the_load(host):
    """The load is ended at once, and the next start is refused before it loads."""
    known = starts.reports(host)
    starts.set_pace(host, pace=0.1)
    engine.sudo(host, f"systemctl stop {UNIT}; systemctl reset-failed {UNIT} || true")
    commands = (f"systemctl start --no-block {UNIT}", "sleep 3", OTHER_SERVER)
    try:
        rows = starts.watch(host, starts.FAILED, before=commands)
    finally:
        engine.sudo(host, "systemctl stop other-server")
    assert "active" not in starts.states(rows)
    assert any(row["StatusText"].startswith("port_taken: ") for row in rows), rows
    assert rows[-1]["NRestarts"] == "1"
    folders = sorted(set(starts.reports(host)) - set(known))
    found = [engine.read_json(host, f"{starts.REPORTS}/{folder}/report.json") for folder in folders]
    assert [report["crash"]["cause"] for report in found] == ["port_in_use", "port_in_use"]
    assert found[0]["systemd"]["SERVICE_RESULT"] == "watchdog"
    assert "belongs to a process of user 0" in found[0]["crash"]["summary"]


@starts.together
def test_a_stop_while_it_is_awaited(host):
    """By `sglang_wait`, and by `systemctl start --wait`, which ends when the unit does."""
    known = starts.reports(host)
    starts.set_pace(host, pace=0.1)
    engine.sudo(host, f"systemctl stop {UNIT}; systemctl reset-failed {UNIT} || true")
    engine.sudo(host, f"systemd-run --unit=waiter --collect -p RemainAfterExit=no systemctl start --wait {UNIT}")
    name = starts.name_of(host)
    inventory = controller.ROOT / "molecule/readiness_hangs/inventory"
    waiting = subprocess.Popen(
        [str(controller.BIN / "ansible"), name, "-i", str(inventory), "-m", "sglang_wait",
         "-a", f"unit={UNIT} port=30000 ranks=8 fail=false"],
        cwd=controller.ROOT, env={**controller.environment(), "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    loading = f"until systemctl show -p StatusText {UNIT} | grep -q weights; do sleep 0.2; done"
    engine.sudo(host, f"timeout 30 sh -c '{loading}'; sleep 2")
    assert host.service("waiter").is_running
    engine.sudo(host, f"systemctl stop {UNIT}")
    output, _ = waiting.communicate(timeout=60)
    found = json.loads(re.search(r"\{.*\}", output, re.S)[0])
    assert found["outcome"] == "stopped", output
    assert engine.as_root(host, f"systemctl is-active {UNIT}").stdout.strip() == "inactive"
    assert engine.show(host, UNIT, "Result") == "success"
    engine.sudo(host, "timeout 10 sh -c 'while systemctl is-active -q waiter; do sleep 0.2; done'")
    assert starts.reports(host) == known


@starts.together
def test_a_reporter_that_hangs_does_not_keep_the_unit_down(host):
    """Not even one that has lost its own limit."""
    starts.set_pace(host, {"kind": "unknown_exception", "at": "dist_init"})
    drop = "/run/systemd/system/" + UNIT + ".d"
    text = "[Service]\\nExecStopPost=\\nExecStopPost=-+/bin/sleep 600\\nTimeoutStopSec=3\\n"
    engine.sudo(host, f"mkdir -p {drop}; printf '{text}' > {drop}/slow.conf; systemctl daemon-reload")
    try:
        commands = (f"systemctl reset-failed {UNIT} || true", f"systemctl restart --no-block {UNIT}")
        rows = starts.watch(
            host, {**starts.ACTIVE, "NRestarts": "1"}, before=commands, after=(starts.pace_command(),)
        )
    finally:
        engine.sudo(host, f"rm -r {drop}; systemctl daemon-reload")
    assert rows[-1]["NRestarts"] == "1"
