"""The controller half of the wait: slices, lines for a person, hosts that go away."""

from __future__ import annotations

import os

import action_run
import plugins
import pytest
from ansible.errors import AnsibleConnectionFailure
from dflash_fleet import rollout_progress

plugin = plugins.load("action_plugins/sglang_wait.py")


def unfinished(phase, seconds, remaining=None, **progress):
    shot = {
        "percent": None,
        "step": None,
        "detail": "",
        "ranks_done": 0,
        "ranks": 8,
        **progress,
        "remaining": remaining,
    }
    return {
        "finished": False,
        "phase": phase,
        "seconds": seconds,
        "progress": shot,
        "resume": {"phase": phase, "n": seconds},
    }


READY = {
    "finished": True,
    "ready": True,
    "outcome": "ready",
    "phase": "serving",
    "seconds": 131.0,
    "smoke": {"accept_length": 3.4},
    "resume": None,
}


class Run(action_run.Run):
    """One wait."""

    def __init__(self, monkeypatch, answers, args=None, **more):
        super().__init__(plugin, monkeypatch, answers, args or {"unit": "x", "port": 1}, stays=True, **more)


def test_slices_and_lines(monkeypatch):
    run = Run(
        monkeypatch,
        [
            (unfinished("weights", 14.2, 100, ranks_done=8, percent=31), 1),
            (unfinished("weights", 24.2, 90, ranks_done=8, percent=41), 10),
            (unfinished("graph_capture", 118, None, step=[6, 17], detail="verify"), 3),
            (READY, 5),
        ],
    )
    result = run.go()
    assert result == READY
    assert run.lines == [
        "gpu-1    0:14  weights        8/8 ranks  31 %   about 1:40 left",
        "gpu-1    0:24  weights        8/8 ranks  41 %   about 1:30 left",
        "gpu-1    1:58  graph_capture  0/8 ranks  verify 6/17",
        "gpu-1    2:11  ready, accept length 3.40",
    ]
    assert [call["resume"] for call in run.calls] == [
        {"phase": "launch"},
        {"phase": "weights", "n": 14.2},
        {"phase": "weights", "n": 24.2},
        {"phase": "graph_capture", "n": 118},
    ]
    assert {call["slice"] for call in run.calls} == {plugin.slices.SLICE}
    assert {call["label"] for call in run.calls} == {"gpu-1"}


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        ("crashed", "crashed in warmup"),
        ("hung", "hung in warmup"),
        ("port_taken", "port taken"),
        ("stopped", "stopped"),
    ],
)
def test_last_line(monkeypatch, outcome, line):
    failed = {"finished": True, "failed": True, "msg": "m", "outcome": outcome, "phase": "warmup", "seconds": 123.4}
    run = Run(monkeypatch, [failed])
    assert run.go()["failed"] is True
    assert run.lines == [f"gpu-1    2:03  {line}"]


@pytest.mark.parametrize(
    ("terminal", "mode", "shown"),
    [(True, "auto", True), (False, "auto", False), (False, "always", True), (True, "never", False)],
)
def test_quiet_where_nobody_looks(monkeypatch, terminal, mode, shown):
    run = Run(monkeypatch, [unfinished("weights", 1), READY], terminal=terminal, sglang_wait_progress=mode)
    run.go()
    assert bool(run.lines) is shown
    assert run.calls[0]["slice"] == (plugin.slices.SLICE if shown else plugin.slices.QUIET_SLICE)


@pytest.mark.parametrize(
    "more",
    [
        {"check_mode": True},
        {"async_val": 300},
        {"args": {"unit": "x", "port": 1, "poll": "once"}},
        {"args": {"unit": "x", "port": 1, "slice": 5}},
    ],
)
def test_one_plain_run_where_there_is_nothing_to_slice(monkeypatch, more):
    run = Run(monkeypatch, [unfinished("weights", 1)], **more)
    result = run.go()
    assert result["phase"] == "weights"
    assert len(run.calls) == 1
    assert "resume" not in run.calls[0]
    assert run.calls[0]["_async"] is bool(more.get("async_val"))
    assert run.lines == []


def test_host_that_comes_back(monkeypatch):
    away = AnsibleConnectionFailure("no route")
    run = Run(monkeypatch, [unfinished("weights", 10), away, {"unreachable": True, "msg": "x"}, READY])
    assert run.go() == READY
    assert run.resets == 2
    assert run.calls[-1]["resume"] == {"phase": "weights", "n": 10}
    assert sum("out of reach" in line for line in run.lines) == 1


def test_host_that_stays_away(monkeypatch):
    run = Run(monkeypatch, [unfinished("weights", 10), AnsibleConnectionFailure("no route to 192.0.2.1")])
    with pytest.raises(AnsibleConnectionFailure, match=r"192\.0\.2\.1"):
        run.go()
    assert run.clock >= plugin.slices.AWAY
    run = Run(monkeypatch, [unfinished("weights", 10), AnsibleConnectionFailure("no route")], sglang_wait_away="20")
    with pytest.raises(AnsibleConnectionFailure):
        run.go()
    assert 20 <= run.clock < 30
    run = Run(monkeypatch, [{"unreachable": True, "msg": "gone"}])
    assert run.go() == {"unreachable": True, "msg": "gone"}


def batch_of(monkeypatch, tmp_path, hosts, batch, host, answers):
    """One wait of a batch."""
    monkeypatch.setattr(plugin.constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    return Run(monkeypatch, answers, groups={"__sglang_rollout": hosts}, ansible_play_batch=batch,
               inventory_hostname=host, ansible_play_hosts_all=hosts)  # fmt: skip


def test_a_batch_has_one_line_for_all(monkeypatch, tmp_path):
    hosts = [f"gpu-{number}" for number in range(1, 6)]
    first = batch_of(monkeypatch, tmp_path, hosts, hosts[1:3], "gpu-2", [unfinished("weights", 30, 70), READY])
    first.go()
    assert "rollout  1 of 5 had their turn; now 0 ready, 2 loading (30 %), 0 failed; 2 waiting" in first.lines
    # The line is due again; meanwhile the other host has come to its end.
    os.utime(tmp_path / "sglang-progress/line", (0, 0))
    second = batch_of(monkeypatch, tmp_path, hosts, hosts[1:3], "gpu-3", [unfinished("weights", 50, 50), READY])
    second.go()
    assert "rollout  1 of 5 had their turn; now 1 ready, 1 loading (50 %), 0 failed; 2 waiting" in second.lines


def test_lines_of_a_batch_do_not_follow_one_another_too_closely(monkeypatch, tmp_path):
    hosts = ["gpu-1", "gpu-2"]
    run = batch_of(monkeypatch, tmp_path, hosts, hosts, "gpu-1", [unfinished("weights", 1, 9)] * 3 + [READY])
    run.go()
    assert sum(line.startswith("rollout") for line in run.lines) == 1


def test_a_large_batch_has_no_lines_of_hosts_but_of_failures(monkeypatch, tmp_path):
    hosts = [f"gpu-{number}" for number in range(20)]
    failed = {"finished": True, "outcome": "crashed", "phase": "warmup", "seconds": 9.0}
    run = batch_of(monkeypatch, tmp_path, hosts, hosts, "gpu-7", [unfinished("weights", 1, 9), failed])
    run.go()
    assert [line.split()[0] for line in run.lines] == ["rollout", "gpu-7"]
    os.utime(tmp_path / "sglang-progress/line", (0, 0))
    other = batch_of(monkeypatch, tmp_path, hosts, hosts, "gpu-8", [unfinished("launch", 1), READY])
    other.go()
    assert other.lines == ["rollout  0 of 20 had their turn; now 0 ready, 19 loading (launch), 1 failed; 0 waiting"]


def test_without_a_last_start_the_line_says_the_phase():
    shots = {"a": {"state": "loading", "phase": "weights", "percent": 31},
             "b": {"state": "loading", "phase": "weights", "percent": 62}, "c": {"state": "loading", "phase": "launch"},
             }  # fmt: skip
    assert "(weights 31 to 62 %, launch)" in rollout_progress.line(["a", "b", "c"], ["a", "b", "c"], shots)


def test_module_that_fails_outright(monkeypatch):
    run = Run(monkeypatch, [{"failed": True, "msg": "unit x.service does not exist on this host"}])
    assert run.go()["msg"].startswith("unit x.service")
    assert run.lines == []
