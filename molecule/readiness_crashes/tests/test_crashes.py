"""Every way a start can die, without Ansible: what systemd shows, how it ends, and what the report says."""

from __future__ import annotations

import engine
import pytest
import starts

UNIT = starts.UNIT
KEPT = 5  # sglang_service_keep_reports of this scenario


@pytest.mark.parametrize("phase", ["dist_init", "weights", "kv_cache", "graph_capture", "warmup"])
@starts.together
def test_a_crash_in_a_phase_is_never_active_and_is_tried_again(host, phase):
    rows, report = starts.failed_once(host, {"kind": "unknown_exception", "at": phase})
    assert "active" not in starts.states(starts.first_start(rows))
    assert report["crash"]["verdict"] == "crashed"
    assert report["crash"]["phase"] == phase
    # The engine wraps whatever happens there.
    wanted = "cuda_graph_capture_failed" if phase == "graph_capture" else "unknown"
    assert report["crash"]["cause"] == wanted
    assert "UnheardOfError" in report["crash"]["exception"]["type"]
    assert report["restarts_ended"] is False
    assert report["systemd"]["SERVICE_RESULT"] == "signal"


@starts.together
def test_a_crash_in_the_launch(host):
    """Before there is anything to say which phase it is in: the main process misses its ranks and ends by itself."""
    # All of them: one that lives would go on into the next phase and say so.
    killed = [{"kind": "kill_rank", "at": "launch", "rank": rank} for rank in range(8)]
    rows, report = starts.failed_once(host, *killed)
    assert "active" not in starts.states(starts.first_start(rows))
    assert (report["crash"]["verdict"], report["crash"]["phase"]) == ("crashed", "launch")
    assert "scheduler died during initialization" in report["crash"]["exception"]["message"]
    assert report["restarts_ended"] is False
    assert (report["systemd"]["SERVICE_RESULT"], report["systemd"]["EXIT_STATUS"]) == ("exit-code", "1")


@starts.together
def test_a_crash_at_the_first_request(host):
    rows, report = starts.failed_once(host, {"kind": "cuda_graph_replay"})
    assert "active" not in starts.states(starts.first_start(rows))
    assert report["crash"]["cause"] == "cuda_graph_replay_failure"


@starts.together
def test_a_crash_after_ready(host):
    rows, report = starts.failed_once(host, {"kind": "gpu_oom", "at": "serving", "after": 5})
    assert "active" in starts.states(starts.first_start(rows))
    assert (report["crash"]["cause"], report["crash"]["phase"]) == ("gpu_oom", "serving")


@starts.together
def test_a_drafter_that_brings_nothing_never_becomes_ready(host):
    known = starts.reports(host)
    starts.set_pace(host, {"kind": "useless_drafter"})
    rows = starts.restart(host, starts.FAILED)
    assert "active" not in starts.states(rows)
    assert rows[-1]["NRestarts"] == "0"
    report = starts.newest_report(host, known)
    assert (report["crash"]["cause"], report["restarts_ended"]) == ("drafter_mismatch", True)


@starts.together
def test_an_argument_that_the_engine_does_not_know_is_not_tried_again(host):
    """An ExecStart= that somebody edited by hand: the cause stays, so do not load in vain."""
    known = starts.reports(host)
    starts.set_pace(host)
    drop = f"/run/systemd/system/{UNIT}.d"
    unit_file = f"/etc/systemd/system/{UNIT}"
    edit = f"(echo [Service]; echo ExecStart=; sed -n '/^ExecStart=/,/[^\\\\]$/p' {unit_file}"
    edit += " | sed '$s/$/ --no-such-option/')"
    engine.sudo(host, f"mkdir -p {drop}; {edit} > {drop}/typo.conf; systemctl daemon-reload")
    try:
        rows = starts.restart(host, starts.FAILED)
    finally:
        engine.sudo(host, f"rm -r {drop}; systemctl daemon-reload")
    assert "active" not in starts.states(rows)
    assert rows[-1]["NRestarts"] == "0"
    report = starts.newest_report(host, known)
    assert (report["crash"]["cause"], report["restarts_ended"]) == ("unknown_argument", True)
    assert report["crash"]["phase"] == "launch"


@starts.together
def test_a_crash_loop_is_never_active_backs_off_and_ends_at_the_limit(host):
    known = starts.reports(host)
    starts.set_pace(host, {"kind": "unknown_exception", "at": "dist_init"}, pace=0.01)
    rows = starts.restart(host, starts.FAILED, seconds=120)
    assert "active" not in starts.states(rows)
    # Three starts, as the unit allows; the fourth is counted and refused.
    assert rows[-1]["NRestarts"] == "3"
    assert len(set(starts.reports(host)) - set(known)) == 3
    assert engine.as_root(host, f"systemctl is-active {UNIT}").stdout.strip() == "failed"
    assert engine.show(host, UNIT, "Result") in ("signal", "start-limit-hit")
    pauses = []
    for count in ("0", "1"):
        begun = next(row["at"] for row in rows if row["NRestarts"] == count and row["SubState"] == "auto-restart")
        ended = next(row["at"] for row in rows if row["NRestarts"] == str(int(count) + 1))
        pauses.append(ended - begun)
    version = int(engine.sudo(host, "systemctl --version").split()[1])
    # 1 s, then 4 s; older ones cannot.
    assert pauses[0] < 2.5, pauses
    assert (pauses[1] > 3.3) is (version >= 254), (version, pauses)


def test_reports_are_bounded(host):
    """Each test above has left some."""
    assert len(starts.reports(host)) == KEPT
