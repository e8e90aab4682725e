"""The prober: what systemd is told, when, and what it is not told."""

from __future__ import annotations

import json
import os
import socket
import threading
import time

import pytest
from dflash_fleet import gate, own_log, phases, prober, verdict, watch

SHOT = {"phase": "weights", "ranks": 8, "ranks_done": 3, "percent": 31, "detail": "", "step": [20, 64]}
OPTIONS = {
    "--unit": "sglang-main-ep8.service", "--host": "127.0.0.1", "--port": "30000", "--model": "kimi", "--ranks": "8",
    "--drafter-block": "8", "--probe-seconds": "30", "--stall": "weights=3,launch=0", "--release": "0.5.20",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "left", "text"),
    [
        ({}, None, "weights: 3/8 ranks, 31 %"),
        ({}, 100.0, "weights: 3/8 ranks, 31 %, about 1:40 left"),
        ({"phase": "launch", "percent": None}, None, "launch"),
        ({"phase": "graph_capture", "detail": "verify", "step": [6, 17], "percent": 35}, None,
         "graph_capture: 3/8 ranks, verify, 6/17, 35 %"),
        ({"ranks": 1}, None, "weights: 31 %"),
        ({"phase": "serving", "percent": None}, None, "warmup: passing the gate"),
    ],
)  # fmt: skip
def test_status_text(change, left, text):
    assert prober.status_text({**SHOT, **change}, left) == text


@pytest.mark.parametrize(
    ("last", "limit", "now", "seconds"),
    [
        (100.0, 300.0, 100.0, 360.0),
        (100.0, 300.0, 250.0, 210.0),  # standstill: the end comes nearer
        (100.0, 300.0, 900.0, 1.0),
        (None, 300.0, 50.0, 360.0),
        (100.0, 0.0, 900.0, prober.NO_LIMIT),
    ],
)
def test_extension_is_a_limit_on_standstill(last, limit, now, seconds):
    assert prober.extension(last, limit, now) == seconds


def test_three_beats_fit_into_the_watchdog():
    assert prober.beat_interval(30, 510) == 30
    assert prober.beat_interval(30, 15) == 5


def test_parameters_come_from_options_and_systemd(tmp_path):
    (tmp_path / "api_key").write_text("k3y\n")
    found = prober.parameters(
        OPTIONS, {"CREDENTIALS_DIRECTORY": str(tmp_path), "INVOCATION_ID": "ab", "WATCHDOG_USEC": "510000000"}
    )
    assert found["api_key"] == "k3y"
    assert found["stall"] == {"weights": 3.0, "launch": 0.0}
    assert (found["drafter"], found["block_size"], found["ranks"]) == (True, 8, 8)
    assert (found["invocation_id"], found["watchdog"], found["engine_version"]) == ("ab", 510.0, "0.5.20")
    assert prober.parameters({**OPTIONS, "--drafter-block": "0"}, {})["drafter"] is False


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """NOTIFY_SOCKET; returns what has arrived there so far, one assignment each."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    sock.setblocking(False)
    monkeypatch.setattr(prober, "ADDRESS", str(tmp_path / "notify"))

    def arrived():
        found = []
        while True:
            try:
                found += sock.recv(65536).decode().split("\n")
            except BlockingIOError:
                return found

    yield arrived
    sock.close()


@pytest.fixture
def sentinel(tmp_path, monkeypatch):
    monkeypatch.setattr(own_log, "JOURNAL_SOCKET", str(tmp_path / "none"))
    monkeypatch.setattr(prober, "TOLD_BEFORE_KILL", 0.0)
    params = prober.parameters(OPTIONS, {"INVOCATION_ID": "ab" * 16, "WATCHDOG_USEC": "90000000"})
    made = prober.Sentinel(params, lambda *_: {"verdict": "starting", "cause": "none"}, lambda cause: [{"id": cause}],
                           tmp_path / "gate.json")
    made.state = {"MainPID": 1, "ActiveState": "activating"}
    return made


READY = {
    "outcome": "ready", "seconds": 61.0, "smoke": {"accept_length": 3.4}, "crash": None, "reason": "",
    "phase": "serving",
}  # fmt: skip


def test_ready_is_said_once_the_gate_has_passed(sentinel, systemd, tmp_path):
    sentinel.result = READY
    sentinel.ready_at = 12.5
    assert sentinel._answered(READY)
    assert systemd() == ["READY=1", "STATUS=serving: ready in 1:01, accept length 3.40", "WATCHDOG=1"]
    found = verdict.read(tmp_path / "gate.json", "ab" * 16)
    assert (found["outcome"], found["ready_monotonic"], found["pid"]) == ("ready", 12.5, os.getpid())
    assert verdict.ready_record(found, "ab" * 16)["accept_length"] == 3.4
    assert verdict.ready_record(found, "cd" * 16) is None


def test_a_certain_no_ends_the_unit_and_says_why(sentinel, systemd, tmp_path):
    crash = {"cause": "drafter_mismatch", "verdict": "running"}
    result = {**READY, "outcome": "crashed", "crash": crash, "reason": "accept length 1.02"}
    assert not sentinel._answered(result)
    assert systemd()[-2:] == ["STATUS=crashed: drafter_mismatch: accept length 1.02", "WATCHDOG=trigger"]
    assert verdict.read(tmp_path / "gate.json")["crash"] == crash


@pytest.mark.parametrize("attribute", ["unit_ended", "saw_stop"])
def test_an_end_that_comes_anyway_is_left_to_systemd(sentinel, systemd, attribute):
    setattr(sentinel, attribute, True)
    assert not sentinel._answered({**READY, "outcome": "crashed"})
    assert systemd() == []


def test_progress_extends_the_start(sentinel, systemd):
    sentinel.tracker = phases.PhaseTracker(8, True, started=1000.0)
    sentinel.tracker.enter("weights", 1010.0)
    sentinel._tell(1011.0)
    sentinel._tell(1011.5)  # not more than once a second
    assert systemd() == [f"EXTEND_TIMEOUT_USEC={int((3 + prober.GRACE - 1) * 1e6)}", "STATUS=weights: 0/8 ranks"]
    sentinel._tell(1014.0)
    assert systemd() == [f"EXTEND_TIMEOUT_USEC={int((3 + prober.GRACE - 4) * 1e6)}"]


class Server:
    """Answers of gate.generate, on cue."""

    def __init__(self, monkeypatch):
        self.calls = 0
        self.block = threading.Event()
        self.error = None
        monkeypatch.setattr(gate, "generate", self.generate)

    def generate(self, *_):
        self.calls += 1
        self.block.wait(5)
        if self.error:
            raise gate.GateError("http", self.error)
        return {"tokens": 16}


@pytest.fixture
def server(monkeypatch):
    made = Server(monkeypatch)
    yield made
    made.block.set()


def settle(sentinel):
    if sentinel.pulse:
        assert sentinel.pulse.done.wait(5)


def test_requests_that_complete_make_probes_needless(sentinel, systemd, server):
    now = time.monotonic()
    sentinel.serving, sentinel.last_life, sentinel.last_beat = True, now, now
    for step in range(1, 5):
        sentinel.last_life = now + 25 * step
        sentinel._keep_alive(now + 25 * step + 1)
    assert server.calls == 0
    assert systemd() == ["WATCHDOG=1"] * 4


def test_a_silent_engine_is_probed_once_at_a_time_and_never_called_alive(sentinel, systemd, server):
    now = time.monotonic()
    sentinel.serving, sentinel.last_life, sentinel.last_beat = True, now, now
    for step in range(1, 200, 10):
        sentinel._keep_alive(now + step)
    server.block.set()
    settle(sentinel)
    assert server.calls == 1
    assert systemd() == []


def test_a_probe_that_generates_is_a_sign_of_life(sentinel, systemd, server):
    server.block.set()
    now = time.monotonic()
    sentinel.serving, sentinel.last_life, sentinel.last_beat = True, now, now
    sentinel._keep_alive(now + 31)
    settle(sentinel)
    sentinel._keep_alive(now + 32)
    assert systemd() == ["WATCHDOG=1"]
    sentinel._keep_alive(now + 40)
    assert server.calls == 1


def test_a_refused_probe_is_none(sentinel, systemd, server):
    server.block.set()
    server.error = "/generate answers 503"
    now = time.monotonic()
    sentinel.serving, sentinel.last_life, sentinel.last_beat = True, now, now
    sentinel._keep_alive(now + 31)
    settle(sentinel)
    sentinel._keep_alive(now + 32)
    assert systemd() == []
    sentinel._tell(now + 40)
    assert systemd() == ["STATUS=serving, but nothing generated for 40 s (/generate answers 503)"]


@pytest.mark.parametrize(
    ("line", "life"),
    [
        ("[2026-11-29 12:00:00 TP0 EP0] Decode batch, #running-req: 4, gen throughput (token/s): 86.00", True),
        ('[2026-11-29 12:00:00] INFO:     127.0.0.1:48334 - "POST /v1/chat/completions HTTP/1.1" 200 OK', True),
        ('[2026-11-29 12:00:00] INFO:     127.0.0.1:48334 - "GET /health HTTP/1.1" 200 OK', False),
        ('[2026-11-29 12:00:00] INFO:     127.0.0.1:48334 - "POST /generate HTTP/1.1" 503 Service Unavailable', False),
        ("[2026-11-29 12:00:00 TP0 EP0] Prefill batch, #new-seq: 1", False),
    ],
)
def test_what_counts_as_a_generation(sentinel, line, life):
    sentinel.serving = True
    sentinel.last_life = 0.0
    sentinel._entry({"MESSAGE": line, "_PID": "7"})
    assert (sentinel.last_life > 0) is life


def test_verdicts_are_of_one_invocation_and_survive_damage(tmp_path):
    path = tmp_path / "gate.json"
    assert verdict.read(path) is None
    verdict.write(path, {"invocation_id": "aa", "outcome": None})
    assert verdict.read(path, "aa")["outcome"] is None
    assert verdict.read(path, "bb") is None
    path.write_text("{")
    assert verdict.read(path) is None
    path.write_text(json.dumps({"schema": 99}))
    assert verdict.read(path) is None
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert verdict.read(path) is None


def test_own_entries_are_no_progress_and_no_evidence():
    tracker = phases.PhaseTracker(1, False)
    tracker.feed({"MESSAGE": "Load weight begin", "SYSLOG_IDENTIFIER": own_log.IDENTIFIER})
    assert tracker.phase == "launch"
    encoded = own_log.encode({"MESSAGE": "two\nlines", "PRIORITY": "3"})
    assert encoded == b"MESSAGE\n\x09\0\0\0\0\0\0\0two\nlines\nPRIORITY=3\n"


def test_the_wait_is_the_same_code():
    assert issubclass(prober.Sentinel, watch.Watch)
