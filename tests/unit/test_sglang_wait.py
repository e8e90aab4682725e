"""The wait, from a scripted host: systemd's signals, a journal, a port and a real HTTP server, without systemd."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import threading
import time
from contextlib import redirect_stdout

import pytest
import sglang_wait as module
from ansible.module_utils.dflash_fleet import gate, phases, units, verdict, watch
from ansible.module_utils.testing import patch_module_args
from fake_server import FakeServer

UNIT = "sglang-main-ep8.service"
ONE, TWO = "1" * 32, "2" * 32


class Host:
    """What systemd, the journal and /proc of a host say, and when. Patched in below."""

    def __init__(self):
        self.begun = time.monotonic()
        self.state = units.normalise({})
        self.state.update(LoadState="loaded", ActiveState="inactive", SubState="dead", Result="success")
        self.signals = []
        self.entries = []
        self.owner = None  # of the port: 'unit', 'other', or nobody
        self.wake, self.bell = socket.socketpair()
        self.lines, self.printer = socket.socketpair()
        for one in (self.wake, self.lines):
            one.setblocking(False)
        self.main = subprocess.Popen(["sleep", "60"])
        self.workers = {}
        self.work = 0
        self.scripts = []

    # what happens

    def change(self, **values):
        self.state = {**self.state, **values}
        self.signals.append(units.Message(4, {3: "PropertiesChanged"}, ["x", values, []]))
        self.bell.send(b"x")

    def start(self, invocation=ONE, **more):
        self.change(
            ActiveState="active", SubState="running", InvocationID=invocation, MainPID=self.main.pid, ControlGroup="/x",
            ExecMainStartTimestampMonotonic=int(time.monotonic() * 1e6), **more,
        )  # fmt: skip

    def log(self, text, rank=""):
        stamp = {"__MONOTONIC_TIMESTAMP": str(int(time.monotonic() * 1e6)), "__CURSOR": str(len(self.entries))}
        self.entries.append({"MESSAGE": f"[2026-11-30 00:00:00{rank}] {text}", "_PID": "7", **stamp})
        self.printer.send(b"x")

    def die(self, state="failed", **more):
        self.main.kill()
        self.main.wait()
        values = {"ActiveState": state, "SubState": state, "Result": "signal", "MainPID": 0, "ControlGroup": ""}
        self.change(**{**values, "ExecMainExitTimestampMonotonic": int(time.monotonic() * 1e6), **more})

    def after(self, seconds, action, *args, **more):
        timer = threading.Timer(seconds, action, args, more)
        timer.daemon = True
        timer.start()
        self.scripts.append(timer)

    def close(self):
        for timer in self.scripts:
            timer.cancel()
        for child in (self.main, *self.workers.values()):
            child.kill()
            child.wait()
        for one in (self.wake, self.bell, self.lines, self.printer):
            one.close()


class FakeBus:
    def __init__(self, host):
        self.host = host

    def fileno(self):
        return self.host.wake.fileno()

    def subscribe(self, unit):
        assert unit == UNIT

    def properties(self, _unit):
        return dict(self.host.state)

    def signals(self):
        try:
            self.host.wake.recv(1000)
        except BlockingIOError:
            pass
        found, self.host.signals = self.host.signals, []
        return found

    def close(self):
        pass


class FakeFollower:
    def __init__(self, host, invocation, cursor):
        self.host = host
        self.invocation = invocation
        self.cursor = cursor
        self.open = False

    def _new(self):
        first = 0 if self.cursor is None else int(self.cursor) + 1
        for entry in self.host.entries[first:]:
            self.cursor = entry["__CURSOR"]
            yield entry

    def catch_up(self, _until):
        yield from self._new()

    def follow(self):
        self.open = True

    def fileno(self):
        return self.host.lines.fileno() if self.open else -1

    def read(self):
        try:
            self.host.lines.recv(1000)
        except BlockingIOError:
            pass
        return list(self._new())

    def close(self):
        self.open = False


@pytest.fixture
def host(monkeypatch):
    made = Host()
    monkeypatch.setattr(units, "SystemBus", lambda: FakeBus(made))
    monkeypatch.setattr(units, "cgroup_pids", lambda group: {made.main.pid, *made.workers} if group else set())
    monkeypatch.setattr(
        units, "engine_workers", lambda pids: {pid: "scheduler_TP1" for pid in pids if pid in made.workers}
    )
    monkeypatch.setattr(units, "activity", lambda _pids: made.work)
    monkeypatch.setattr(watch, "Follower", lambda invocation, cursor=None: FakeFollower(made, invocation, cursor))
    monkeypatch.setattr(watch, "journal_readable", lambda: True)
    monkeypatch.setattr(watch, "TICK", 0.03)
    monkeypatch.setattr(watch, "DYING_GRACE", 0.3)
    monkeypatch.setattr(watch, "FOREIGN_GRACE", 0.15)
    monkeypatch.setattr(watch, "PROBE_INTERVAL", 0.05)
    monkeypatch.setattr(watch, "GATE_PAUSE", 0.3)
    monkeypatch.setattr(gate, "listener_for", lambda _host, _port: {"inode": 1} if made.owner else None)
    monkeypatch.setattr(
        gate,
        "check_listener",
        lambda _host, _port, _group: {
            "listening": bool(made.owner),
            "owned": {"unit": True, "other": False}.get(made.owner),
            "holder": {"pid": 99, "command": "nginx", "uid": 0} if made.owner == "other" else None,
            "how": None,
            "lacks": "permission to look" if made.owner == "hidden" else None,
        },
    )
    yield made
    made.close()


ARGS = {
    "unit": "sglang-main-ep8", "host": "127.0.0.1", "port": 1, "served_model_name": "kimi", "api_key": None,
    "drafter": True,
    "block_size": 8, "cuda_graph": True, "ranks": 2, "engine": "sglang", "engine_version": "0.5.20", "in_effect": {},
    "invocation_id": None, "since_monotonic": 0, "timeout": 10, "stall": {}, "settle": 0.05, "requests": 2,
    "generation_timeout": 5, "min_accept_length": 1.1, "poll": "until", "slice": 0, "resume": None, "baseline": {},
}  # fmt: skip


class Diagnosis:
    def __init__(self, verdict="crashed", cause="unknown"):
        self.answer = {"verdict": verdict, "cause": cause, "summary": "it broke", "phase": "weights"}
        self.asked = []

    def __call__(self, invocation, ended):
        self.asked.append((invocation, ended))
        return dict(self.answer)


def wait(server=None, diagnose=None, check_mode=False, **args):
    params = {**ARGS, **args}
    if server is not None:
        params["port"] = server.port
    begun = time.monotonic()
    result = watch.Watch(params, diagnose or Diagnosis(), lambda cause: [{"id": f"cure {cause}"}], check_mode).run()
    result["took"] = time.monotonic() - begun
    json.dumps(result)
    return result


def serve(host):
    host.owner = "unit"
    host.log("The server is fired up and ready to roll!")


# --- ready


def test_ready(host):
    host.after(0.1, host.start)
    host.state["Job"], host.state["JobType"] = 5, "start"
    host.after(0.15, host.change, Job=0, JobType="")
    host.after(0.2, host.log, "Load weight begin. avail mem=1 GB", " TP0")
    host.after(0.3, serve, host)
    with FakeServer() as server:
        result = wait(server)
    assert (result["ready"], result["outcome"], result["finished"], result["crash"]) == (True, "ready", True, None)
    speed = result["smoke"].pop("tokens_per_second")
    assert speed > 0
    assert result["smoke"] == {"requests": 2, "ok": 2, "tokens": 128, "accept_length": 3.4}
    assert [row["name"] for row in result["phases"]] == ["launch", "weights", "serving"]
    assert result["invocation_id"] == ONE
    assert result["resume"] is None
    # the log had said that it is up: nobody asked /health
    assert set(server.paths()) == {"/v1/models", "/generate"}


def test_ready_by_http_where_the_log_says_nothing(host):
    host.start()
    host.owner = "unit"
    with FakeServer(up=False) as server:
        host.after(0.4, setattr, server, "up", True)
        result = wait(server)
    assert result["outcome"] == "ready"
    assert server.paths().count("/ready") >= 2
    assert result["seconds"] >= 0.4


def test_no_probe_before_the_port_listens_and_few_after(host, monkeypatch):
    monkeypatch.setattr(watch, "PROBE_INTERVAL", 0.2)
    host.start()
    with FakeServer(up=False) as server:
        host.after(0.4, setattr, host, "owner", "unit")
        wait(server, timeout=1.0)
        assert 2 <= len(server.seen) <= 5


def test_settling_counts_from_the_gate(host):
    host.start()
    serve(host)
    with FakeServer() as server:
        result = wait(server, settle=0.5)
    assert result["took"] >= 0.5
    assert result["seconds"] < 0.5


def test_graphs_that_are_not_used_are_told(host):
    host.start()
    host.log("Decode batch, #running-req: 1, cuda graph: False, gen throughput (token/s): 8.00")
    serve(host)
    with FakeServer() as server:
        assert wait(server)["cuda_graph"] == {"asked": True, "used": False}


def test_port_owner_out_of_sight_is_told_and_not_fatal(host):
    host.start()
    host.owner = "hidden"
    host.log("The server is fired up and ready to roll!")
    with FakeServer() as server:
        result = wait(server)
    assert result["outcome"] == "ready"
    assert result["lacks"] == ["permission to look"]


def test_openai_engine(host):
    host.start()
    host.owner = "unit"
    with FakeServer(accept=None) as server:
        result = wait(server, engine="openai")
    assert (result["outcome"], result["smoke"]["accept_length"]) == ("ready", None)
    assert set(server.paths()) == {"/health", "/v1/models", "/v1/completions"}


# --- crashed


def test_crash_during_the_load(host):
    host.start()
    host.log("Load weight begin.", " TP0")
    host.after(0.2, host.die)
    diagnose = Diagnosis(cause="gpu_oom")
    result = wait(diagnose=diagnose)
    assert (result["outcome"], result["crash"]["cause"], result["phase"]) == ("crashed", "gpu_oom", "weights")
    assert diagnose.asked == [(ONE, True)]
    assert result["timings"]["notice_ms"] < 100
    assert result["seconds"] == pytest.approx(0.2, abs=0.15)
    assert result["took"] < 0.6


def test_crash_at_the_first_request(host):
    host.start()
    serve(host)
    with FakeServer(delay=0.4) as server:
        host.after(0.2, host.die)
        result = wait(server)
    assert (result["outcome"], result["smoke"]) == ("crashed", None)


def test_crash_while_it_settles(host):
    host.start()
    serve(host)
    with FakeServer() as server:
        host.after(0.6, host.die)
        result = wait(server, settle=5)
    assert (result["outcome"], result["ready"], result["smoke"]["ok"]) == ("crashed", False, 2)
    assert result["took"] < 2


def test_crash_of_the_main_process_before_systemd_has_cleared_up(host):
    host.start()
    host.after(0.2, host.die, "deactivating", SubState="stop-sigterm")
    assert wait()["outcome"] == "crashed"


@pytest.mark.parametrize(
    ("now", "more"),
    [
        ({"ActiveState": "activating", "SubState": "auto-restart", "NRestarts": 0}, {}),
        # already the next start, and it looks healthy
        ({"ActiveState": "active", "SubState": "running", "InvocationID": TWO, "NRestarts": 1}, {}),
    ],
)
def test_crash_loop(host, now, more):
    host.start()
    diagnose = Diagnosis()
    host.after(0.2, host.die, now["ActiveState"], **{**now, "MainPID": os.getpid() if "InvocationID" in now else 0})
    result = wait(diagnose=diagnose, **more)
    assert result["outcome"] == "crashed"
    assert diagnose.asked == [(ONE, True)]


def test_already_failed_when_the_wait_begins(host):
    host.start()
    host.die()
    result = wait()
    assert result["outcome"] == "crashed"
    assert result["timings"]["notice_ms"] is None
    assert result["took"] < 0.3


def test_another_invocation_than_the_one_asked_for(host):
    host.start(TWO, NRestarts=1)
    diagnose = Diagnosis()
    assert wait(diagnose=diagnose, invocation_id=ONE)["outcome"] == "crashed"
    assert diagnose.asked == [(ONE, True)]


def test_exit_by_itself_with_status_zero(host):
    host.start()
    host.after(0.2, host.die, "inactive", Result="success")
    assert wait(diagnose=Diagnosis("crashed_exit_zero"))["outcome"] == "crashed"


def test_worker_dies_and_the_parent_lives(host):
    host.start()
    worker = subprocess.Popen(["sleep", "60"])
    host.workers[worker.pid] = worker
    host.after(0.3, worker.kill)
    result = wait(diagnose=Diagnosis("running", "none"))
    assert (result["outcome"], result["crash"]["verdict"], result["crash"]["cause"]) == (
        "crashed", "running_but_dead", "running_but_dead",
    )  # fmt: skip
    assert f"scheduler_TP1 (pid {worker.pid}) died" in result["reason"]
    assert result["took"] < 2


def test_worker_dies_and_the_parent_follows(host):
    host.start()
    worker = subprocess.Popen(["sleep", "60"])
    host.workers[worker.pid] = worker
    host.after(0.2, worker.kill)
    host.after(0.35, host.die)
    assert (
        wait(diagnose=Diagnosis("crashed", "cuda_graph_replay_failure"))["crash"]["cause"]
        == "cuda_graph_replay_failure"
    )


def test_engine_says_that_it_is_lost_and_lives_on(host):
    host.start()
    host.after(
        0.1, host.log, "Subprocess detokenizer (pid=5) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
    )
    result = wait(diagnose=Diagnosis("crashed", "native_abort"))
    assert (result["outcome"], result["crash"]["cause"]) == ("crashed", "native_abort")
    assert 0.3 <= result["took"] < 2


@pytest.mark.parametrize(("accept", "text"), [(1.02, "1.02 is below 1.1"), (None, "does not speculate")])
def test_useless_drafter(host, accept, text):
    host.start()
    serve(host)
    with FakeServer(accept=accept) as server:
        result = wait(server)
        asked = server.paths().count("/generate")
    assert (result["outcome"], result["ready"]) == ("crashed", False)
    assert (result["crash"]["cause"], result["crash"]["verdict"]) == ("drafter_mismatch", "running")
    assert result["crash"]["remedies"] == [{"id": "cure drafter_mismatch"}]
    assert text in result["crash"]["summary"]
    assert result["smoke"]["accept_length"] == accept
    assert asked == 2  # nothing is tried again


def test_errors_at_the_first_request_may_pass(host):
    host.start()
    serve(host)
    with FakeServer(status=503, body="busy") as server:
        host.after(0.5, server.__dict__.update, {"status": 200, "body": None})
        assert wait(server)["outcome"] == "ready"


@pytest.mark.parametrize(
    ("behaviour", "args", "text"),
    [
        ({"names": ["other"]}, {}, "serves other instead of kimi"),
        ({"key": "k"}, {}, "API key"),
        ({"key": "k"}, {"api_key": "canary-1\n"}, "cannot carry"),
    ],
)
def test_up_and_of_no_use(host, behaviour, args, text):
    host.start()
    serve(host)
    with FakeServer(**behaviour) as server:
        result = wait(server, **args)
    assert (result["outcome"], result["crash"]["verdict"]) == ("crashed", "running_but_dead")
    assert text in result["reason"]
    assert "canary" not in json.dumps(result)


# --- hung, stopped, port taken, out of time


def test_hang_in_a_phase(host):
    host.start()
    host.log("Load weight begin.", " TP0")
    host.log("Load weight end. elapsed=1 s", " TP0")
    result = wait(diagnose=Diagnosis("running", "none"), stall={"weights": 0.3})
    assert (result["outcome"], result["crash"]["verdict"], result["crash"]["cause"]) == (
        "hung",
        "hung",
        "scheduler_hang",
    )
    assert "in weights, 1 of 2 ranks done" in result["reason"]
    assert result["crash"]["phase"] == "weights"


def test_an_engine_that_has_served_for_long_gets_its_gate_first(host):
    host.start()
    serve(host)
    host.entries[-1]["__MONOTONIC_TIMESTAMP"] = str(int((time.monotonic() - 9000) * 1e6))
    host.state["ExecMainStartTimestampMonotonic"] = int((time.monotonic() - 9100) * 1e6)
    with FakeServer(delay=0.3) as server:
        result = wait(server, stall={"serving": 5})
    assert result["outcome"] == "ready", result["reason"]


def test_a_hang_is_counted_from_when_somebody_looks(host):
    """What happened before is not known: work leaves no lines."""
    host.start()
    host.log("Load weight begin.", " TP0")
    host.entries[-1]["__MONOTONIC_TIMESTAMP"] = str(int((time.monotonic() - 900) * 1e6))
    host.state["ExecMainStartTimestampMonotonic"] = int((time.monotonic() - 901) * 1e6)
    assert wait(poll="once", stall={"weights": 0.3})["finished"] is False
    result = wait(diagnose=Diagnosis("running", "none"), stall={"weights": 0.3})
    assert result["outcome"] == "hung"
    assert 0.3 <= result["took"] < 3


def test_work_without_lines_is_no_hang(host, monkeypatch):
    host.start()
    host.log("Load weight begin.", " TP0")
    monkeypatch.setattr(units, "activity", lambda _pids: int(time.monotonic() * 1e6))
    assert wait(stall={"weights": 1.2}, timeout=1.5)["outcome"] == "timeout"


def test_hang_at_the_first_request(host):
    host.start()
    serve(host)
    with FakeServer(delay=2) as server:
        result = wait(server, diagnose=Diagnosis("running", "none"), generation_timeout=0.3)
    assert (result["outcome"], result["smoke"]["ok"]) == ("hung", 0)
    assert "generates nothing" in result["reason"]


def test_hang_in_the_warm_up(host):
    host.start()
    host.owner = "unit"
    with FakeServer(up=False) as server:
        result = wait(server, diagnose=Diagnosis("running", "none"), stall={"warmup": 0.4})
    assert (result["outcome"], result["phase"]) == ("hung", "warmup")


def test_operator_stop_seen_in_a_signal_only(host):
    """A quick stop: by the time the state is read the unit is gone, by the engine's own SIGKILL."""
    host.start()

    def stop():
        main = {"Result": "success", "MainPID": host.main.pid}
        for values in (main, {"ActiveState": "deactivating", "SubState": "stop-sigterm"}):
            host.signals.append(units.Message(4, {3: "PropertiesChanged"}, ["x", values, []]))
        host.state.update(ActiveState="failed", SubState="failed", Result="signal", MainPID=0)
        host.bell.send(b"x")

    host.after(0.2, stop)
    diagnose = Diagnosis()
    result = wait(diagnose=diagnose)
    assert (result["outcome"], result["crash"], diagnose.asked) == ("stopped", None, [])


def test_crash_with_processes_left_looks_like_a_stop_and_is_none(host):
    host.start()

    def crash():
        main = {"Result": "signal", "MainPID": 0}
        for values in (main, {"ActiveState": "deactivating", "SubState": "stop-sigterm"}):
            host.signals.append(units.Message(4, {3: "PropertiesChanged"}, ["x", values, []]))
        host.state.update(ActiveState="failed", SubState="failed", Result="signal", MainPID=0)
        host.bell.send(b"x")

    host.after(0.2, crash)
    assert wait()["outcome"] == "crashed"


def test_operator_stop_by_its_job(host):
    host.start()
    host.after(0.1, host.change, Job=9, JobType="stop", ActiveState="deactivating", SubState="stop-sigterm")
    host.after(0.3, host.die, "inactive", Result="success", Job=0, JobType="")
    assert wait()["outcome"] == "stopped"


def test_operator_stop_read_from_the_journal_afterwards(host):
    host.start()
    host.die()
    assert wait(diagnose=Diagnosis("stopped_by_operator"))["outcome"] == "stopped"


def test_watchdog_of_systemd_is_no_operator(host):
    host.start()
    host.after(0.1, host.change, ActiveState="deactivating", SubState="stop-watchdog", Result="watchdog")
    host.after(0.2, host.die, Result="watchdog")
    assert wait()["outcome"] == "crashed"


def test_nothing_runs_and_nothing_starts(host):
    result = wait()
    assert (result["outcome"], result["seconds"]) == ("stopped", None)


def test_port_taken(host):
    host.start()
    host.owner = "other"
    with FakeServer() as server:
        result = wait(server)
        assert server.seen == []
    assert (result["outcome"], result["holder"]["pid"]) == ("port_taken", 99)
    assert "belongs to process 99 (nginx), not to sglang-main-ep8.service" in result["reason"]


def test_port_given_up_in_time(host):
    host.start()
    host.owner = "other"
    host.after(0.07, setattr, host, "owner", None)
    host.after(0.5, serve, host)
    with FakeServer() as server:
        assert wait(server)["outcome"] == "ready"


def test_out_of_time(host):
    host.start()
    host.log("Capturing batches (bs=1): 35%|#| 6/17 [0<1]")
    result = wait(timeout=0.3)
    assert (result["outcome"], result["crash"]) == ("timeout", None)
    assert "in graph_capture" in result["reason"]
    assert "6 of 17" in result["reason"]


# --- which start


def test_since_ignores_the_start_before(host):
    host.start()
    since = time.monotonic()
    host.after(0.2, host.start, TWO)
    host.after(0.25, serve, host)
    with FakeServer() as server:
        result = wait(server, since_monotonic=since)
    assert (result["outcome"], result["invocation_id"]) == ("ready", TWO)


def test_restart_under_way_is_waited_for(host):
    host.start(Job=3, JobType="restart")
    host.after(0.1, host.die, "inactive", Job=4, JobType="start")
    host.after(0.3, host.start, TWO, Job=0, JobType="")
    host.main_before = host.main
    host.after(0.2, setattr, host, "main", subprocess.Popen(["sleep", "60"]))
    host.after(0.4, serve, host)
    with FakeServer() as server:
        result = wait(server)
    assert (result["outcome"], result["invocation_id"]) == ("ready", TWO)


# --- once, check mode, slices


def test_once_while_it_loads(host):
    host.start()
    host.log("Load weight begin.", " TP0")
    result = wait(poll="once", baseline={"weights": 100, "warmup": 20})
    assert (result["outcome"], result["finished"], result["phase"]) == (None, False, "weights")
    assert result["progress"]["remaining"] == pytest.approx(120, abs=2)
    assert result["took"] < 0.3


def test_once_in_the_warm_up_and_when_it_serves(host):
    host.start()
    host.owner = "unit"
    with FakeServer(up=False) as server:
        assert wait(server, poll="once")["phase"] == "warmup"
        server.up = True
        assert wait(server, poll="once")["outcome"] == "ready"


def test_check_mode_generates_nothing(host):
    host.start()
    serve(host)
    with FakeServer() as server:
        result = wait(server, check_mode=True)
        assert set(server.paths()) == {"/v1/models"}
    assert (result["outcome"], result["smoke"], result["finished"]) == ("ready", None, True)


@pytest.mark.parametrize("load_state", ["loaded", "not-found"])
def test_check_mode_before_the_first_deployment(host, load_state):
    host.state["LoadState"] = load_state
    assert wait(check_mode=True)["outcome"] == "stopped"


def test_slices_end_at_changes_of_phase_and_add_up(host):
    host.start()
    host.after(0.3, host.log, "Load weight begin.", " TP0")
    host.after(0.5, host.log, "Load weight end. elapsed=1 s", " TP0")
    host.after(0.7, host.log, "Load weight end. elapsed=1 s", " TP1")
    host.after(1.2, serve, host)
    seen, resume = [], {"phase": "launch"}
    with FakeServer() as server:
        for _ in range(20):
            result = wait(server, slice=0.5, resume=resume)
            resume = json.loads(json.dumps(result["resume"]))
            seen.append(result["phase"])
            if result["finished"]:
                break
            assert len(json.dumps(resume)) < 3000
        asked = server.paths().count("/generate")
    assert result["outcome"] == "ready"
    assert seen[0] == "weights"
    assert seen[-1] == "serving"
    assert asked == 2  # the gate is passed once, whichever slice it falls into
    weights = next(row for row in result["phases"] if row["name"] == "weights")
    assert weights["ranks_done"] == 2
    assert weights["seconds"] == pytest.approx(0.9, abs=0.2)


def test_crash_between_two_slices(host):
    host.start()
    first = wait(slice=0.1)
    assert first["finished"] is False
    host.die("activating", SubState="auto-restart")
    assert wait(resume=first["resume"])["outcome"] == "crashed"


def test_reboot_between_two_slices_is_no_crash(host, monkeypatch):
    host.start()
    first = wait(slice=0.1)
    monkeypatch.setattr(units, "boot_id", lambda: "another")
    host.start(TWO)
    serve(host)
    with FakeServer() as server:
        result = wait(server, resume=first["resume"])
    assert (result["outcome"], result["invocation_id"]) == ("ready", TWO)


def test_bus_that_breaks_is_replaced_by_asking(host, monkeypatch):
    host.start()

    def broken(_unit):
        raise units.BusLost("connection closed by the bus")

    monkeypatch.setattr(units, "show", lambda _unit: dict(host.state))
    bus = FakeBus(host)
    monkeypatch.setattr(units, "SystemBus", lambda: bus)
    bus.properties = broken
    host.after(0.3, host.die)
    result = wait()
    assert result["outcome"] == "crashed"
    assert "system bus" in result["lacks"][0]


# --- the module


def run_module(**args):
    out = io.StringIO()
    with patch_module_args(args), redirect_stdout(out), pytest.raises(SystemExit):
        module.main()
    return json.loads(out.getvalue())


@pytest.fixture
def told(monkeypatch):
    answer = Diagnosis(cause="cuda_graph_replay_failure").answer

    class Read:
        entries = [{"MESSAGE_ID": "d9b373ed55a64feb8242e02dbe79a49c"}]
        kernel = []
        gaps = []
        unit = "sglang-main-ep8.service"
        source = invocation_id = None

    monkeypatch.setattr(module.journal, "read_invocation", lambda _unit, _invocation: Read)
    monkeypatch.setattr(module.diagnosis, "diagnose", lambda *_args, **_more: dict(answer))
    monkeypatch.setattr(module.runfacts, "unit_limits", lambda _unit: {})
    monkeypatch.setattr(module.runfacts, "installed_version", lambda _entries: None)
    monkeypatch.setattr(module.diagnosis, "headline", lambda crash, host, _seconds: f"{host}: {crash['summary']}")
    return answer


def test_module_fails_with_the_headline_and_everything(host, told):
    host.start()
    host.die()
    result = run_module(unit=UNIT, port=30000)
    assert result["failed"] is True
    assert result["msg"].endswith(": it broke")
    assert result["crash"] == told
    assert result["changed"] is False
    assert "rc" not in result


def test_module_leaves_the_decision_to_the_caller(host, told):
    host.start()
    host.die()
    result = run_module(unit=UNIT, port=30000, fail=False)
    assert "failed" not in result
    assert (result["outcome"], result["crash"]) == ("crashed", told)


def test_module_says_what_no_journal_shows(host):
    host.start()
    serve(host)
    with FakeServer(accept=1.02) as server:
        result = run_module(unit=UNIT, port=server.port, drafter=True, label="gpu-02", engine_version="0.5.20")
    first, second, *rest = result["msg"].splitlines()
    assert first.startswith("gpu-02: sglang-main-ep8.service: accept length 1.02 is below 1.1")
    assert second.split() == ["cause", "drafter_mismatch"]
    assert rest[0].startswith("  remedies  ")
    assert result["crash"]["remedies"]
    assert len(rest) >= 1


def test_module_never_fails_in_check_mode(host, told):
    host.start()
    host.die()
    result = run_module(unit=UNIT, port=30000, _ansible_check_mode=True)
    assert "failed" not in result


def test_module_warns_about_graphs(host, monkeypatch):
    warned = []
    monkeypatch.setattr(module.AnsibleModule, "warn", lambda _self, text: warned.append(text))
    host.start()
    host.log("Decode batch, #running-req: 1, cuda graph: False, gen throughput (token/s): 8.00")
    serve(host)
    with FakeServer() as server:
        result = run_module(unit=UNIT, port=server.port, cuda_graph=True, settle=0, api_key="canary-2")
    assert result["ready"] is True
    assert "cuda graph: False" in str(warned)
    assert "canary-2" not in json.dumps({name: value for name, value in result.items() if name != "invocation"})


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"port": 0}, "port must be from 1"),
        ({"port": 70000}, "port must be from 1"),
        ({"stall": {"wieghts": 5}}, "wieghts"),
        ({"stall": {"weights": "long"}}, "seconds"),
    ],
)
def test_module_refuses_bad_arguments(host, args, text):
    result = run_module(**{"unit": UNIT, "port": 30000, **args})
    assert result["failed"] is True
    assert text in result["msg"]


def test_module_on_a_unit_that_is_not_there(host):
    host.state["LoadState"] = "not-found"
    assert "does not exist" in run_module(unit=UNIT, port=30000)["msg"]


def test_stall_limits_cover_every_phase():
    assert set(phases.STALL) == set(phases.PHASES)


# --- the supervisor's verdict


@pytest.fixture
def supervised(host, tmp_path, monkeypatch):
    """A unit with a supervisor; returns what writes its verdict."""
    monkeypatch.setattr(units, "runtime_directory", lambda _unit: str(tmp_path))
    host.state["Type"] = "notify"

    def say(outcome, pid=None, invocation=ONE, **more):
        document = {"invocation_id": invocation, "pid": pid or os.getpid(), "outcome": outcome, **more}
        verdict.write(tmp_path / verdict.NAME, document)

    return say


SMOKE = {"requests": 4, "ok": 4, "tokens": 256, "accept_length": 3.1, "tokens_per_second": 80.0}


def test_a_verdict_is_taken_and_nothing_is_gated_twice(host, supervised):
    host.start()
    supervised(None)
    serve(host)
    with FakeServer() as server:
        host.after(0.4, lambda: supervised("ready", ready_monotonic=time.monotonic(), smoke=SMOKE))
        result = wait(server)
        assert server.paths() == []
    assert (result["outcome"], result["smoke"]) == ("ready", SMOKE)
    assert result["took"] >= 0.4


def test_a_verdict_of_another_invocation_is_none(host, supervised):
    host.start(TWO)
    supervised("ready", pid=2**22 + 1, smoke=SMOKE)
    serve(host)
    with FakeServer() as server:
        result = wait(server)
        assert "/generate" in server.paths()
    assert result["smoke"]["requests"] == 2


def test_what_the_supervisor_ended_is_told_in_its_words(host, supervised):
    crash = {"verdict": "running", "cause": "drafter_mismatch", "summary": "accept length 1.02", "phase": "warmup"}
    host.start()
    host.change(ActiveState="activating", SubState="start")
    supervised(None)
    serve(host)
    host.after(0.3, supervised, "crashed", crash=crash, reason="accept length 1.02")
    diagnose = Diagnosis()
    result = wait(None, diagnose)
    assert (result["outcome"], result["crash"]["cause"], result["reason"]) == (
        "crashed", "drafter_mismatch", "accept length 1.02",
    )  # fmt: skip
    assert diagnose.asked == []


def test_a_verdict_that_comes_with_the_end_still_counts(host, supervised):
    host.start()
    host.change(ActiveState="activating", SubState="start")

    def end():
        supervised("hung", crash={"verdict": "hung", "cause": "scheduler_hang", "summary": "s"}, reason="no progress")
        host.die(state="deactivating", SubState="stop-post", Result="watchdog")

    host.after(0.2, end)
    assert wait(None)["outcome"] == "hung"


def test_where_the_prober_is_dead_the_wait_gates_itself(host, supervised):
    host.start()
    supervised(None, pid=2**22 + 1)
    serve(host)
    with FakeServer() as server:
        assert wait(server)["outcome"] == "ready"
        assert "/generate" in server.paths()


@pytest.mark.parametrize("seen", [{"Job": 7, "JobType": "stop"}, {"ExecMainCode": 2, "ExecMainStatus": 15}])
def test_a_load_that_dies_of_its_stop_at_once_was_stopped(host, supervised, seen):
    host.start()
    host.change(ActiveState="activating", SubState="start")
    supervised(None)
    stop = {"Result": "success", "SubState": "stop-post", **seen}
    host.after(0.2, host.die, state="deactivating", **stop)
    diagnose = Diagnosis("starting", "none")
    assert wait(None, diagnose)["outcome"] == "stopped"
    assert diagnose.asked == []
