"""What a host does when a start of its engine has ended: the reporter of ExecStopPost=, and the reports it leaves.

systemd runs it as root after every end of the unit and before any restart. On an end that somebody asked for it does
nothing. Else it diagnoses, with the code of `journal_crash`, and leaves

* a report in <root>/<instance>/state/reports/<time>/ (report.json, report.txt, journal.jsonl), bounded in number and
  size;
* one structured entry in the journal (MESSAGE_ID=5c1e2f0f6a0b4f1d9c7e8a52d3b4960e, DFLASH_FLEET_CAUSE=, ...);
* a counter for Prometheus' textfile collector;
* a POST to a webhook, where the instance has one.

A cause that cannot heal by itself ends the restarts: the reporter asks systemd to stop the unit, which then stays
`failed` with its true result. It has a time limit of its own and never fails: the restart goes on without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import own_log, remedies, state, textfile, verdict

LIMIT = 20  # s, for all of it
KEEP = 20  # reports of an instance
MAX_BYTES = 20 << 20  # of all reports of an instance
JOURNAL_BYTES = 1 << 20  # of one report's journal.jsonl, its end
END_PATIENCE = 1.0  # s for systemd's line about the main process to reach the journal
WEBHOOK_TIMEOUT = 5.0  # s
CRASHES = "crashes.json"
#: Verdicts that call for a report.
BAD = ("crashed", "crashed_exit_zero", "hung", "running_but_dead", "startup_timeout")
# What the log cannot tell, so the prober's word stands.
_VAGUE = (None, "", "none", "unknown", "scheduler_hang", "start_timeout")


# ---------------------------------------------------------------------------------------------------------------------
# Pure


def combined(crash: Mapping[str, Any], gate: Mapping[str, Any] | None) -> dict[str, Any]:
    """The diagnosis of the log, with the prober's word where it ended the unit itself and the log does not say why."""
    found = dict(crash)
    if gate and gate.get("outcome") == "port_taken":
        # Another server came during the load, and the log shows nothing but its end by our watchdog.
        why = str(gate.get("reason") or "")
        cures = remedies.remedies_for("port_in_use", (found.get("engine") or {}).get("version"))
        return {**found, "verdict": "crashed", "cause": "port_in_use", "summary": why, "remedies": cures}
    told = (gate or {}).get("crash") or {}
    if not gate or gate.get("outcome") in (None, "ready", "stopped") or not told:
        return found
    if found.get("cause") in _VAGUE or found.get("verdict") not in BAD or told.get("cause") == "drafter_mismatch":
        for name in ("verdict", "cause", "summary", "phase", "remedies"):
            if told.get(name) is not None:
                found[name] = told[name]
    if found.get("verdict") == "hung" and told.get("verdict") in BAD:
        found["verdict"] = told["verdict"]  # systemd's watchdog was only the prober's means
    if found.get("verdict") in ("running", "starting"):
        found["verdict"] = "crashed"  # it ran until the prober had it ended
    return found


def rank_of(crash: Mapping[str, Any]) -> str:
    """Who failed first, as the log writes it."""
    first = crash.get("first_failure") or {}
    return str(first.get("rank") or "")


def prunable(sizes: Iterable[tuple[str, int]], keep: int, limit: int) -> list[str]:
    """Names of the oldest reports beyond `keep`, or beyond `limit` bytes together; the newest one always stays."""
    gone = []
    total = 0
    for index, (name, size) in enumerate(sorted(sizes, reverse=True)):
        total += size
        if index and (index >= keep or total > limit):
            gone.append(name)
    return gone


def count(known: Mapping[str, Any] | None, labels: Mapping[str, str], at: float) -> dict[str, Any]:
    """crashes.json with one more crash of these labels."""
    rows = [dict(row) for row in (known or {}).get("crashes") or []]
    for row in rows:
        if row.get("labels") == dict(labels):
            row["count"] = int(row.get("count") or 0) + 1
            row["last"] = at
            break
    else:
        rows.append({"labels": dict(labels), "count": 1, "last": at})
    return {"schema": state.SCHEMA, "crashes": rows}


def metrics(document: Mapping[str, Any]) -> str:
    """Prometheus' text format, for the textfile collector of node_exporter."""
    rows = document.get("crashes") or []
    return textfile.render(
        [
            (
                "dflash_fleet_engine_crashes_total",
                "counter",
                "Ends of the engine that nobody asked for, by cause and rank.",
                [(row["labels"], int(row["count"])) for row in rows],
            ),
            (
                "dflash_fleet_engine_last_crash_timestamp_seconds",
                "gauge",
                "When that happened last.",
                [(row["labels"], float(row["last"])) for row in rows],
            ),
        ]
    )


def tail(lines: Iterable[str], limit: int) -> list[str]:
    """The last lines that fit into `limit` bytes."""
    kept: list[str] = []
    size = 0
    for line in reversed(list(lines)):
        size += len(line.encode("utf-8", "replace")) + 1
        if size > limit:
            break
        kept.append(line)
    return kept[::-1]


def post(url: str, body: bytes, problems: list[str]) -> None:
    """POST JSON; `problems` is emptied where that went well, else what happened is added."""
    import urllib.error  # slow to import, and few have a webhook
    import urllib.request

    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT) as answer:
            answer.read(1024)
        problems.clear()
    except urllib.error.HTTPError as error:
        problems.append(f"HTTP {error.code}")
    except Exception as error:
        problems.append(type(error).__name__)


def read_last(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What status shows of the newest report: {path, at, unit, invocation_id, verdict, cause, summary, stopped}."""
    names = state.list_dirs(Path(folder))
    for name in reversed(names):
        document = state.read_json(Path(folder, name, "report.json"))
        if document is None:
            continue
        crash = document.get("crash") or {}
        return {
            "path": str(Path(folder, name)),
            "at": document.get("at"),
            "unit": document.get("unit"),
            "invocation_id": document.get("invocation_id"),
            "restarts_ended": document.get("restarts_ended"),
            **{key: crash.get(key) for key in ("verdict", "cause", "summary", "phase")},
        }
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The host's side


class Reporter:
    """One end of one unit."""

    def __init__(self, options: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self.unit = options["--unit"]
        self.instance = options["--instance"]
        self.layout = state.Layout(options.get("--root", "/var/lib/sglang"))
        self.textfile = options.get("--textfile", "")
        self.keep = int(options.get("--keep", str(KEEP)))
        self.result = environment.get("SERVICE_RESULT", "")
        self.invocation = environment.get("INVOCATION_ID", "")
        self.ending = {name: environment.get(name, "") for name in ("SERVICE_RESULT", "EXIT_CODE", "EXIT_STATUS")}
        self.secrets: list[str] = []
        self.entries: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any] | None:
        """The report, or None where there is nothing to report."""
        if self.result == "success" and self.stop_asked():
            return None
        gate = verdict.read(verdict.path_of(self.instance), self.invocation)
        crash = combined(self.diagnose(), gate)
        if crash.get("verdict") not in BAD:
            return None
        ended = self.end_restarts(str(crash.get("cause") or ""))
        report = {
            "schema": state.SCHEMA,
            "at": state.now_utc(),
            "unit": self.unit,
            "instance": self.instance,
            "invocation_id": self.invocation,
            "systemd": self.ending,
            "restarts_ended": ended,
            "gate": {key: value for key, value in (gate or {}).items() if key not in ("crash", "schema")} or None,
            "crash": crash,
        }
        for step in (self.store, self.say, self.measure, self.call):
            # Each for itself: a full disk must not keep the journal entry from being written.
            try:
                step(report)
            except Exception as error:
                own_log.log(f"{self.unit}: reporter: {step.__name__}: {type(error).__name__}: {error}", 4)
        return report

    def stop_asked(self) -> bool:
        """A stop or restart of the unit is under way: someone wants it."""
        done = subprocess.run(
            ["systemctl", "list-jobs", "--no-legend", "--no-pager", "--", self.unit],
            capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
        return any(word in ("stop", "restart", "try-restart") for word in done.stdout.split())

    def diagnose(self) -> dict[str, Any]:
        """The diagnosis of this invocation, as soon as systemd's line about its main process is in the journal."""
        from . import diagnosis, journal, ladder, runfacts

        deadline = time.monotonic() + END_PATIENCE
        while True:
            collected = journal.read_invocation(self.unit, self.invocation)
            if any(journal.is_exit(entry) for entry in collected.entries[-200:]) or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        self.entries = collected.entries
        with contextlib.suppress(OSError):
            self.secrets = [self.layout.api_key(self.instance).read_text(encoding="utf-8").strip()]
        effect: dict[str, Any] = {}
        release = state.release_of_unit(self.layout, self.instance, self.unit)
        version = None
        if release:
            version = str(release[1]["engine"]["version"])
            effect = ladder.in_effect(release[1])
        effect.update(runfacts.unit_limits(self.unit))
        return diagnosis.diagnose_collected(
            collected,
            invocation_id=self.invocation,
            engine_version=version or runfacts.installed_version(collected.entries),
            in_effect=effect,
            secrets=self.secrets,
        )

    def end_restarts(self, cause: str) -> bool:
        """Stop the unit where its cause stays; whether that was asked for."""
        from . import causes

        known = causes.CAUSES.get(cause)
        if known is None or known.heals:
            return False
        # Never against someone's wish: a stop or restart that is queued (another release is about to start) stands. The
        # start job of the load that has just failed is none: it is still listed.
        if self.stop_asked():
            return False
        done = subprocess.run(
            ["systemctl", "--no-block", "stop", self.unit],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
        return done.returncode == 0

    # -- what it leaves

    def store(self, report: dict[str, Any]) -> None:
        """The report's directory, complete or not at all, and no more of them than wanted."""
        from . import diagnosis
        from .redact import redact

        folder = self.layout.reports(self.instance)
        owner = self.layout.instance(self.instance).stat()
        for path in (folder.parent, folder):
            path.mkdir(mode=0o750, exist_ok=True)
            os.chown(path, 0, owner.st_gid)
        text = diagnosis.report_text(report["crash"], socket.gethostname())
        lines = [
            json.dumps({name: value for name, value in entry.items() if isinstance(value, (str, list))})
            for entry in self.entries
        ]
        files = {
            "report.json": json.dumps(report, indent=2, sort_keys=True) + "\n",
            "report.txt": text,
            "journal.jsonl": redact("\n".join(tail(lines, JOURNAL_BYTES)), tuple(self.secrets)) + "\n",
        }
        name = f"{report['at'][:19]}Z-{self.invocation[:8]}"
        with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as temporary:
            built = Path(temporary, name)
            built.mkdir(mode=0o750)
            os.chown(built, 0, owner.st_gid)
            for file, content in files.items():
                path = built / file
                path.write_text(content, encoding="utf-8", errors="replace")
                os.chmod(path, 0o640)
                os.chown(path, 0, owner.st_gid)
            os.rename(built, folder / name)
        report["path"] = str(folder / name)
        sizes = [
            (entry, sum(part.stat().st_size for part in (folder / entry).iterdir()))
            for entry in state.list_dirs(folder)
            if not entry.startswith(".")
        ]
        for old in prunable(sizes, self.keep, MAX_BYTES):
            shutil.rmtree(folder / old, ignore_errors=True)

    def say(self, report: dict[str, Any]) -> None:
        """The structured entry."""
        crash = report["crash"]
        verdict_, cause = crash.get("verdict"), crash.get("cause")
        text = f"{self.unit}: {verdict_} in {crash.get('phase')}: {cause}: {crash.get('summary')}"
        if report["restarts_ended"]:
            text += " It is not started again: this cause does not heal by itself."
        own_log.log(
            text, 3, own_log.MSG_REPORT,
            UNIT=self.unit, INSTANCE=self.instance, INVOCATION=self.invocation, CAUSE=str(crash.get("cause") or ""),
            VERDICT=str(crash.get("verdict") or ""), PHASE=str(crash.get("phase") or ""), RANK=rank_of(crash),
            REPORT=str(report.get("path") or ""),
        )  # fmt: skip

    def measure(self, report: dict[str, Any]) -> None:
        """crashes.json, and from it the file that node_exporter reads, where there is a folder for it."""
        crash = report["crash"]
        path = self.layout.state(self.instance) / CRASHES
        known = None
        with contextlib.suppress(state.StateError):
            known = state.read_state(path)
        labels = {
            "instance_name": self.instance,
            "unit": self.unit,
            "verdict": str(crash.get("verdict") or ""),
            "cause": str(crash.get("cause") or "unknown"),
            "rank": rank_of(crash),
        }
        document = count(known, labels, time.time())
        state.write_state(path, document)
        if not self.textfile or not os.path.isdir(self.textfile):
            return
        textfile.write(self.textfile, f"dflash-fleet-{self.instance}.prom", metrics(document))

    def call(self, report: dict[str, Any]) -> None:
        """POST the essentials to the instance's webhook. Its address is a secret: it may hold a token."""
        try:
            url = (self.layout.credentials(self.instance) / "webhook").read_text(encoding="utf-8").strip()
        except OSError:
            return
        if not url.startswith(("http://", "https://")):
            raise RuntimeError("the webhook's address is none of http or https")
        crash = report["crash"]
        body = {
            "host": socket.gethostname(),
            **{name: report[name] for name in ("at", "unit", "instance", "invocation_id", "restarts_ended")},
            **{name: crash.get(name) for name in ("verdict", "cause", "summary", "phase", "remedies")},
            "rank": rank_of(crash),
            "text": f"{socket.gethostname()}: {self.unit}: {crash.get('cause')}: {crash.get('summary')}",
        }
        problems: list[str] = ["TimeoutError"]
        # The time-out of a request holds for each of its steps and for no name server: a thread has one for all of it.
        poster = threading.Thread(target=post, args=(url, json.dumps(body).encode(), problems), daemon=True)
        poster.start()
        poster.join(WEBHOOK_TIMEOUT)
        if problems:
            # Without the address: it may be the secret.
            raise RuntimeError(f"the webhook did not take the report ({problems[-1]})")


def main(arguments: list[str]) -> int:
    """Report, within the limit. Always 0: a reporter that fails must not change how the unit ended."""
    options = dict(zip(arguments[::2], arguments[1::2]))
    signal.alarm(int(options.get("--limit", str(LIMIT))))  # the default action ends this process
    try:
        Reporter(options, os.environ).run()
    except Exception as error:
        own_log.log(f"{options.get('--unit')}: the reporter failed: {type(error).__name__}: {error}"[:500], 3)
    return 0
