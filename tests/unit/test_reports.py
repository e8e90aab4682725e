"""The reporter's pure half, and one whole report into a folder."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from dflash_fleet import causes, ladder, own_log, reports, state

DRAFTER = {"verdict": "running", "cause": "drafter_mismatch", "summary": "1.02", "phase": "warmup", "remedies": []}
HUNG = {"verdict": "hung", "cause": "scheduler_hang", "summary": "no progress", "phase": "weights", "remedies": []}


@pytest.mark.parametrize(
    ("crash", "gate", "verdict", "cause"),
    [
        ({"verdict": "crashed", "cause": "gpu_oom"}, None, "crashed", "gpu_oom"),
        ({"verdict": "crashed", "cause": "gpu_oom"}, {"outcome": "ready"}, "crashed", "gpu_oom"),
        ({"verdict": "hung", "cause": "unknown"}, {"outcome": "hung", "crash": HUNG}, "hung", "scheduler_hang"),
        ({"verdict": "hung", "cause": "none"}, {"outcome": "crashed", "crash": DRAFTER}, "crashed", "drafter_mismatch"),
        # The log knows better why it hung.
        ({"verdict": "hung", "cause": "nccl_error"}, {"outcome": "hung", "crash": HUNG}, "hung", "nccl_error"),
        ({"verdict": "hung", "cause": "native_segfault"},
         {"outcome": "crashed", "crash": {**HUNG, "verdict": "running_but_dead"}},
         "running_but_dead", "native_segfault"),
    ],
)  # fmt: skip
def test_the_probers_word_and_the_log(crash, gate, verdict, cause):
    found = reports.combined(crash, gate)
    assert (found["verdict"], found["cause"]) == (verdict, cause)


def test_a_port_taken_during_the_load_is_no_hang():
    gate = {"outcome": "port_taken", "reason": "port 30000 belongs to nginx", "crash": None}
    found = reports.combined({"verdict": "hung", "cause": "unknown", "engine": {"version": "0.5.20"}}, gate)
    assert (found["verdict"], found["cause"]) == ("crashed", "port_in_use")
    assert found["summary"] == "port 30000 belongs to nginx"
    assert [remedy["id"] for remedy in found["remedies"]] == ["other_port"]


def test_reports_are_bounded_in_number_and_size():
    sizes = [(f"2026-11-{day:02d}", 10) for day in range(1, 8)]
    assert reports.prunable(sizes, 5, 1000) == ["2026-11-02", "2026-11-01"]
    assert reports.prunable(sizes, 20, 25) == ["2026-11-05", "2026-11-04", "2026-11-03", "2026-11-02", "2026-11-01"]
    assert reports.prunable([("a", 10**9)], 5, 100) == []
    assert reports.tail(["one", "two", "three"], 10) == ["two", "three"]


def test_metrics():
    labels = {"cause": "gpu_oom", "rank": "TP3 EP3", "unit": 'a"b'}
    document = reports.count(reports.count(None, labels, 1.0), labels, 2.5)
    document = reports.count(document, {**labels, "rank": ""}, 3.0)
    text = reports.metrics(document)
    assert 'dflash_fleet_engine_crashes_total{cause="gpu_oom",rank="TP3 EP3",unit="a\\"b"} 2' in text
    assert 'dflash_fleet_engine_last_crash_timestamp_seconds{cause="gpu_oom",rank="",unit="a\\"b"} 3.000' in text
    assert text.endswith("\n")


@pytest.mark.parametrize(
    ("cause", "heals"),
    [("unknown_argument", False), ("missing_model_file", False), ("drafter_mismatch", False), ("gpu_oom", True),
     ("nccl_error", True), ("unknown", True), ("port_in_use", True)],
)  # fmt: skip
def test_which_causes_heal(cause, heals):
    assert causes.CAUSES[cause].heals is heals
    assert set(causes._STAYS) <= set(causes.CAUSES)


@pytest.fixture
def reporter(tmp_path, monkeypatch):
    monkeypatch.setattr(own_log, "JOURNAL_SOCKET", str(tmp_path / "none"))
    root, textfile = tmp_path / "sglang", tmp_path / "textfile"
    (root / "main/credentials").mkdir(parents=True)
    (root / "main/credentials/api_key").write_text("canary-key-1\n")
    textfile.mkdir()
    options = {"--unit": "sglang-main-ep8.service", "--instance": "main", "--root": str(root)}
    options["--textfile"] = str(textfile)
    made = reports.Reporter(options, {"SERVICE_RESULT": "signal", "INVOCATION_ID": "ab" * 16})
    monkeypatch.setattr(os, "chown", lambda *_: None)
    made.asked = []
    crash = {"verdict": "crashed", "cause": "missing_model_file", "summary": "no weights", "phase": "weights",
             "first_failure": {"rank": "TP3 EP3"}, "remedies": []}  # fmt: skip

    def diagnose():
        made.entries = [{"MESSAGE": "the key is canary-key-1", "__CURSOR": "c"}]
        made.secrets = ["canary-key-1"]
        return crash

    made.diagnose = diagnose
    made.end_restarts = lambda cause: made.asked.append(cause) or True
    monkeypatch.setattr("dflash_fleet.diagnosis.report_text", lambda *_: "what happened\n")
    return made


def test_a_whole_report(reporter, tmp_path):
    report = reporter.run()
    assert reporter.asked == ["missing_model_file"]
    folder = tmp_path / "sglang/main/state/reports"
    (name,) = state.list_dirs(folder)
    written = json.loads((folder / name / "report.json").read_text())
    assert (written["schema"], written["unit"], written["restarts_ended"]) == (1, "sglang-main-ep8.service", True)
    assert "canary" not in (folder / name / "journal.jsonl").read_text()
    assert report["path"] == str(folder / name)
    assert reports.read_last(folder)["cause"] == "missing_model_file"
    assert 'rank="TP3 EP3"' in (tmp_path / "textfile/dflash-fleet-main.prom").read_text()


def test_a_wanted_stop_is_none_of_its_business(reporter, tmp_path):
    reporter.result = "success"
    reporter.stop_asked = lambda: True
    assert reporter.run() is None
    assert not (tmp_path / "sglang/main/state").exists()


def test_a_step_that_fails_does_not_keep_the_others(reporter, tmp_path):
    reporter.store = lambda _report: 1 / 0
    reporter.store.__name__ = "store"
    (tmp_path / "sglang/main/state").mkdir()
    assert reporter.run()
    assert (tmp_path / "textfile/dflash-fleet-main.prom").exists()


class Webhook(BaseHTTPRequestHandler):
    """Takes a POST and answers as its path says."""

    taken: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.taken.append((self.path, self.headers["Content-Type"], body))
        if "drip" in self.path:
            for _ in range(100):  # each byte comes within any time-out of a read
                self.wfile.write(b"H")
                time.sleep(0.05)
        self.send_response(500 if "broken" in self.path else 204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def webhook(monkeypatch):
    monkeypatch.setattr(Webhook, "taken", [])
    monkeypatch.setattr(reports, "WEBHOOK_TIMEOUT", 0.6)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    server.daemon_threads = True
    server.handle_error = lambda *_: None
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def told_webhook(reporter, tmp_path, url):
    (tmp_path / "sglang/main/credentials/webhook").write_text(url + "\n")
    return reporter.run()


def test_the_webhook_gets_the_essentials(reporter, tmp_path, webhook):
    report = told_webhook(reporter, tmp_path, f"{webhook}/hooks/s3cret")
    ((path, kind, body),) = Webhook.taken
    assert (path, kind) == ("/hooks/s3cret", "application/json")
    assert body["host"] == socket.gethostname()
    assert (body["cause"], body["rank"], body["restarts_ended"]) == ("missing_model_file", "TP3 EP3", True)
    assert body["invocation_id"] == report["invocation_id"]
    assert body["text"].endswith("missing_model_file: no weights")
    assert "canary" not in json.dumps(body)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("{}/broken/s3cret", "HTTP 500"),
        ("{}/drip/s3cret", "TimeoutError"),
        ("http://127.0.0.1:1/s3cret", "URLError"),
        ("file:///etc/s3cret", "none of http or https"),
    ],
)
def test_a_webhook_that_fails_is_told_without_its_address_and_keeps_nobody(
    reporter, tmp_path, webhook, monkeypatch, address, why
):
    told = []
    monkeypatch.setattr(own_log, "log", lambda text, *_, **more: told.append(text))
    begun = time.monotonic()
    assert told_webhook(reporter, tmp_path, address.format(webhook))
    assert time.monotonic() - begun < 2
    assert any("call: RuntimeError" in text and why in text for text in told), told
    assert "s3cret" not in "".join(told)
    # All else has been done before it.
    assert (tmp_path / "textfile/dflash-fleet-main.prom").exists()


@pytest.mark.parametrize(
    ("options", "wanted", "seconds"),
    [
        ([], "auto", 510),
        ([["--watchdog-timeout", "6"]], "auto", 14),
        ([["--watchdog-timeout", "600"]], "auto", 1020),
        ([], "off", 0),
        ([], "700", 700),
    ],
)
def test_watchdog_leaves_the_engines_own_the_first_word(options, wanted, seconds):
    assert ladder.watchdog_seconds({"options": options}, wanted) == seconds


@pytest.mark.parametrize("wanted", ["450", "soon"])
def test_a_watchdog_that_would_come_first_is_refused(wanted):
    with pytest.raises(ValueError, match="sglang_service_watchdog_seconds"):
        ladder.watchdog_seconds({"options": []}, wanted)
