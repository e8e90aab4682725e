"""Every way a start can go wrong, without Ansible: what systemd shows, how it ends, and what the report says."""

from __future__ import annotations

import json
import re
import subprocess

import controller
import engine
import pytest
import starts

UNIT = starts.UNIT
ACTIVE = {"ActiveState": "active"}
FAILED = {"ActiveState": "failed"}
WAITING = {"SubState": "auto-restart"}


def failed_once(host, failure, seconds=90):
    """A start that fails, and the one by which systemd mends it; (rows, report)."""
    known = starts.reports(host)
    starts.set_pace(host, failure)
    commands = (f"systemctl reset-failed {UNIT}", f"systemctl restart --no-block {UNIT}")
    # The rehearsal engine's own `once` is forgotten here: RemoveIPC= clears the user's /dev/shm after each run.
    mended = (starts.pace_command(),)
    rows = starts.watch(host, {**ACTIVE, "NRestarts": "1"}, FAILED, before=commands, after=mended, seconds=seconds)
    assert rows[-1]["ActiveState"] == "active", rows
    return rows, starts.newest_report(host, known)


@pytest.mark.parametrize("phase", ["dist_init", "weights", "kv_cache", "graph_capture", "warmup"])
@starts.together
def test_a_crash_in_a_phase_is_never_active_and_is_tried_again(host, phase):
    rows, report = failed_once(host, {"kind": "unknown_exception", "at": phase})
    first = [row for row in rows if row["NRestarts"] == "0"]
    assert "active" not in {row["ActiveState"] for row in first}
    assert report["crash"]["verdict"] == "crashed"
    assert report["crash"]["phase"] == phase
    # The engine wraps whatever happens there.
    wanted = "cuda_graph_capture_failed" if phase == "graph_capture" else "unknown"
    assert report["crash"]["cause"] == wanted
    assert "UnheardOfError" in report["crash"]["exception"]["type"]
    assert report["restarts_ended"] is False
    assert report["systemd"]["SERVICE_RESULT"] == "signal"


@starts.together
def test_a_crash_at_the_first_request(host):
    rows, report = failed_once(host, {"kind": "cuda_graph_replay"})
    assert "active" not in {row["ActiveState"] for row in rows if row["NRestarts"] == "0"}
    assert report["crash"]["cause"] == "cuda_graph_replay_failure"


@starts.together
def test_a_crash_after_ready(host):
    rows, report = failed_once(host, {"kind": "gpu_oom", "at": "serving", "after": 3})
    assert "active" in {row["ActiveState"] for row in rows if row["NRestarts"] == "0"}
    assert (report["crash"]["cause"], report["crash"]["phase"]) == ("gpu_oom", "serving")


@pytest.mark.parametrize("phase", ["weights", "graph_capture"])
@starts.together
def test_a_hang_in_the_load_ends_by_its_limit(host, phase):
    rows, report = failed_once(host, {"kind": "hang", "at": phase}, seconds=120)
    first = [row for row in rows if row["NRestarts"] == "0"]
    assert "active" not in {row["ActiveState"] for row in first}
    assert any(row["StatusText"].startswith("hung: ") for row in first), first
    assert report["systemd"]["SERVICE_RESULT"] == "watchdog"
    assert (report["crash"]["verdict"], report["crash"]["phase"]) == ("hung", phase)


@starts.together
def test_a_hang_while_serving_ends_by_the_watchdog_though_health_answers(host):
    rows, report = failed_once(host, {"kind": "hang", "at": "serving", "after": 2, "watchdog": False}, seconds=120)
    assert any("nothing generated for" in row["StatusText"] for row in rows), rows
    assert report["systemd"]["SERVICE_RESULT"] == "watchdog"
    assert report["crash"]["verdict"] == "hung"


@starts.together
def test_dead_ranks_under_a_living_parent(host):
    rows, report = failed_once(host, {"kind": "zombie", "at": "serving", "after": 2})
    assert any(row["StatusText"].startswith("crashed: ") for row in rows), rows
    assert report["systemd"]["SERVICE_RESULT"] == "watchdog"
    assert report["crash"]["verdict"] == "running_but_dead"


@starts.together
def test_a_drafter_that_brings_nothing_never_becomes_ready(host):
    known = starts.reports(host)
    starts.set_pace(host, {"kind": "useless_drafter"})
    rows = starts.restart(host, FAILED)
    assert "active" not in {row["ActiveState"] for row in rows}
    assert rows[-1]["NRestarts"] == "0"
    report = starts.newest_report(host, known)
    assert (report["crash"]["cause"], report["restarts_ended"]) == ("drafter_mismatch", True)


@starts.together
def test_a_port_of_another_server_that_answers_200(host):
    known = starts.reports(host)
    starts.set_pace(host)
    engine.sudo(host, f"systemctl stop {UNIT}")
    server = "python3 -m http.server 30000 --bind 127.0.0.1"
    engine.sudo(host, f"systemd-run --unit=other-server --collect {server}")
    try:
        engine.sudo(host, "timeout 20 sh -c 'until ss -Hltn sport = :30000 | grep -q .; do sleep 0.2; done'")
        rows = starts.restart(host, FAILED)
    finally:
        engine.sudo(host, "systemctl stop other-server")
    assert "active" not in {row["ActiveState"] for row in rows}
    assert rows[-1]["NRestarts"] == "0"
    assert starts.newest_report(host, known)["crash"]["cause"] == "port_in_use"


@starts.together
def test_a_crash_loop_is_never_active_and_ends_at_the_limit(host):
    known = starts.reports(host)
    starts.set_pace(host, {"kind": "unknown_exception", "at": "dist_init"}, pace=0.01)
    rows = starts.restart(host, FAILED, seconds=120)
    assert "active" not in {row["ActiveState"] for row in rows}
    assert int(rows[-1]["NRestarts"]) >= 2
    assert len(starts.reports(host)) == len(known) + 3
    assert engine.as_root(host, f"systemctl is-active {UNIT}").stdout.strip() == "failed"


@starts.together
def test_a_stop_while_it_is_awaited(host):
    known = starts.reports(host)
    starts.set_pace(host, pace=0.1)
    engine.sudo(host, f"systemctl stop {UNIT}; systemctl reset-failed {UNIT} || true")
    engine.sudo(host, f"systemctl start --no-block {UNIT}")
    name = starts.name_of(host)
    inventory = controller.ROOT / "molecule/readiness_faults/inventory"
    waiting = subprocess.Popen(
        [str(controller.BIN / "ansible"), name, "-i", str(inventory), "-m", "sglang_wait",
         "-a", f"unit={UNIT} port=30000 ranks=8 fail=false"],
        cwd=controller.ROOT, env={**controller.environment(), "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    loading = f"until systemctl show -p StatusText {UNIT} | grep -q weights; do sleep 0.2; done"
    engine.sudo(host, f"timeout 30 sh -c '{loading}'; sleep 2")
    engine.sudo(host, f"systemctl stop {UNIT}")
    output, _ = waiting.communicate(timeout=60)
    found = json.loads(re.search(r"\{.*\}", output, re.S)[0])
    assert found["outcome"] == "stopped", output
    assert engine.as_root(host, f"systemctl is-active {UNIT}").stdout.strip() == "inactive"
    assert engine.show(host, UNIT, "Result") == "success"
    assert starts.reports(host) == known


@starts.together
def test_a_reporter_that_hangs_does_not_keep_the_unit_down(host):
    """Not even one that has lost its own limit."""
    starts.set_pace(host, {"kind": "unknown_exception", "at": "dist_init"})
    drop = "/run/systemd/system/" + UNIT + ".d"
    text = "[Service]\\nExecStopPost=\\nExecStopPost=-+/bin/sleep 600\\nTimeoutStopSec=3\\n"
    engine.sudo(host, f"mkdir -p {drop}; printf '{text}' > {drop}/slow.conf; systemctl daemon-reload")
    try:
        commands = (f"systemctl reset-failed {UNIT}", f"systemctl restart --no-block {UNIT}")
        rows = starts.watch(host, {**ACTIVE, "NRestarts": "1"}, before=commands, after=(starts.pace_command(),))
    finally:
        engine.sudo(host, f"rm -r {drop}; systemctl daemon-reload")
    assert rows[-1]["NRestarts"] == "1"
