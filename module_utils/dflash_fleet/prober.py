"""The prober: runs beside an engine in its unit and tells systemd how it is.

The supervisor starts it as a detached child and then becomes the engine, so systemd's main process is the engine and
this one only talks (NotifyAccess=all, sd_notify(3)):

* while it loads: STATUS= with phase and percent, and EXTEND_TIMEOUT_USEC= as long as something gets further, so that
  the start has a limit on standstill instead of one on its whole length;
* READY=1 once it has passed the gate, and the verdict in a file for those who ask (see `verdict`);
* while it serves: WATCHDOG=1, but only for generations seen: those of users in its log, or one of its own where nobody
  asks for any. One that answers /health and generates nothing is killed and started again;
* WATCHDOG=trigger at once where waiting is useless: no progress, a drafter that brings nothing, ranks dead under a
  parent that lives on. The status line says which, and systemd logs it.

It is the wait of `sglang_wait` with another ending. It runs as the engine's user inside the unit's sandbox; the group
systemd-journal lets it read the phases. It ends with the unit.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

from . import gate, own_log, phases, state, units, verdict, watch, words

TELL_EVERY = 1.0  # s between two status lines
GRACE = 60.0  # s beyond the limit of a phase until systemd ends the start by itself: it acts only where we cannot
NO_LIMIT = 3600.0  # s, again and again, for a phase without a limit
TOLD_BEFORE_KILL = 1.0  # s a verdict stands before the unit is ended, for those who read it from the runtime directory
PROBE_BLOCKS = 2  # drafter blocks of a probe: one would never be verified
ADDRESS = ""
# Work done for users: a decode step, or an answer that was completed.
_LIFE = re.compile(r'^Decode batch\b|"POST /\S* HTTP/[\d.]+" 200')


def notify(*assignments: str) -> bool:
    """Tell systemd (sd_notify(3)): one datagram to NOTIFY_SOCKET, as `main` found it."""
    if not ADDRESS:
        return False
    address = "\0" + ADDRESS[1:] if ADDRESS.startswith("@") else ADDRESS
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(5)
            sock.sendto("\n".join(assignments).encode(), address)
        return True
    except OSError:
        return False


def status_text(snapshot: dict[str, Any], left: float | None = None) -> str:
    """One line for `systemctl status` while it loads: `weights: 3/8 ranks, 31 %, about 1:40 left`."""
    parts = []
    if snapshot["phase"] == "serving":
        return "warmup: passing the gate"
    if snapshot["ranks"] > 1 and snapshot["phase"] in ("dist_init", "weights", "kv_cache", "graph_capture"):
        parts.append(f"{snapshot['ranks_done']}/{snapshot['ranks']} ranks")
    if snapshot.get("detail"):
        parts.append(str(snapshot["detail"]))
    if snapshot.get("step") and snapshot["phase"] == "graph_capture":
        parts.append(f"{snapshot['step'][0]}/{snapshot['step'][1]}")
    if snapshot.get("percent") is not None:
        parts.append(f"{snapshot['percent']} %")
    if left is not None and left >= 1:
        parts.append(f"about {words.clock(left)} left")
    return f"{snapshot['phase']}: {', '.join(parts)}" if parts else str(snapshot["phase"])


def extension(last_progress: float | None, limit: float, now: float) -> float:
    """Seconds from now that the start may still take: the phase's limit counted from the last progress, and a grace."""
    if limit <= 0:
        return NO_LIMIT
    return max(1.0, (last_progress if last_progress is not None else now) + limit + GRACE - now)


def beat_interval(wanted: float, watchdog: float) -> float:
    """Seconds between two signs of life: three of them fit into systemd's limit."""
    return min(wanted, watchdog / 3.0)


def parse_stall(text: str) -> dict[str, float]:
    """`weights=300,graph_capture=600` as the limits it names."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        found[name] = float(value)
    return found


class Pulse(threading.Thread):
    """One generation of our own, in the background. There is never a second one beside it."""

    def __init__(self, client: gate.Client, tokens: int, engine: str, model: str, timeout: float) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.tokens = tokens
        self.engine = engine
        self.model = model
        self.timeout = timeout
        self.error = ""
        self.done = threading.Event()
        self.begun = time.monotonic()

    def run(self) -> None:
        try:
            nonce = f"[{os.urandom(4).hex()}] {gate.PROMPTS[0]}"
            gate.generate(self.client, nonce, self.tokens, self.engine, self.model, self.timeout)
        except gate.GateError as error:
            self.error = str(error)
        except Exception as error:
            self.error = f"unreadable answer ({type(error).__name__})"
        self.done.set()


class Sentinel(watch.Watch):
    """The wait, and after it the guard."""

    supervised = False  # it is the supervisor's own: it takes nobody's verdict

    def __init__(self, params: dict[str, Any], diagnose: Any, remedies: Any, path: Path | None) -> None:
        super().__init__(params, diagnose, remedies)
        self.path = path
        self.prober_pid = os.getpid()
        self.serving = False
        self.unit_ended = False
        self.watchdog = float(params.get("watchdog") or 0.0)
        self.interval = beat_interval(params["probe_seconds"], self.watchdog) if self.watchdog else 0.0
        self.last_tell = 0.0
        self.last_text = ""
        self.last_extension = 0.0
        self.last_phase = ""
        self.last_life = 0.0  # when a generation was last seen
        self.last_beat = 0.0
        self.deaf_until = 0.0
        self.pulse: Pulse | None = None
        self.pulse_problem = ""
        self.ready_text = ""

    # life

    def run(self) -> dict[str, Any]:
        try:
            self._open()
            self._write(None)
            while True:
                while self.result is None:
                    self._turn()
                    self._tell(time.monotonic())
                if not self._answered(self.result):
                    return self.result
        finally:
            self._close()

    def _answered(self, result: dict[str, Any]) -> bool:
        """Act on an answer; True to stay on guard."""
        if result["outcome"] == "ready" and not self.serving:
            self.serving = True
            self.last_life = self.last_beat = time.monotonic()
            self.ready_text = f"serving: ready in {words.clock(result['seconds'] or 0)}"
            length = (result["smoke"] or {}).get("accept_length")
            if length is not None:
                self.ready_text += f", accept length {length:.2f}"
            self._write(result)
            notify("READY=1", f"STATUS={self.ready_text}", "WATCHDOG=1")
            self.result = None
            return True
        if self.unit_ended or self.saw_stop or result["outcome"] in ("stopped", None):
            return False
        self._write(result)
        cause = (result["crash"] or {}).get("cause") or result["outcome"]
        text = f"{result['outcome']}: {cause}: {result['reason']}".replace("\n", " ")[:400]
        notify(f"STATUS={text}")
        own_log.log(f"{self.unit}: {text}", 3, CAUSE=str(cause))
        time.sleep(TOLD_BEFORE_KILL)
        notify(f"STATUS={text}", "WATCHDOG=trigger")
        return False

    def _write(self, result: dict[str, Any] | None) -> None:
        """The verdict's file; without a runtime directory, or on a full disk, the notices alone remain."""
        if self.path is None:
            return
        found = result or {}
        document = {
            "unit": self.unit,
            "invocation_id": self.invocation or "",
            "pid": os.getpid(),
            "at": state.now_utc(),
            "phase": found.get("phase") or self.tracker.phase,
            "ready_monotonic": self.ready_at,
            **{
                name: found.get(name)
                for name in ("outcome", "reason", "seconds", "smoke", "phases", "cuda_graph", "crash", "holder")
            },
        }
        with contextlib.suppress(OSError):
            verdict.write(self.path, document)

    # what differs from a wait

    def _supervisor_lives(self) -> bool:
        return False  # the gate is ours to pass

    def _ended(self, now: float, restarted: bool = False) -> None:
        # The reporter, which runs after us, says why. Whatever we would find now it finds too.
        self.unit_ended = True
        self._finish("stopped", now)

    def _flush_bar(self) -> bool:
        # Our error stream is the engine's own, so journald closes its begun line for a newline of ours.
        with contextlib.suppress(OSError):
            os.write(2, b"\n")
            return True
        return False

    def _entry(self, entry: dict[str, Any]) -> None:
        super()._entry(entry)
        if self.serving and time.monotonic() >= self.deaf_until:
            for line in phases.message_lines(entry.get("MESSAGE")):
                if _LIFE.search(phases.rank_of(line, entry)[1]):
                    self.last_life = time.monotonic()
                    return

    def _judge_time(self, now: float) -> None:
        if not self.serving:
            super()._judge_time(now)
        elif self.interval and not self.saw_stop and self.tracker.phase != "stopping":
            self._keep_alive(now)

    def _keep_alive(self, now: float) -> None:
        """WATCHDOG=1 for generations only; a probe of our own only where none was seen for a whole interval."""
        pulse = self.pulse
        if pulse is not None and pulse.done.is_set():
            self.pulse = None
            self.pulse_problem = pulse.error
            if not pulse.error:
                self.last_life = now
            # Its own lines reach the journal a little later; they would pass for a user's.
            self.deaf_until = now + 1.0
        if self.last_life > self.last_beat and now - self.last_beat >= min(1.0, self.interval / 2):
            self.last_beat = now
            self.pulse_problem = ""
            notify("WATCHDOG=1")
        if self.pulse is None and now - max(self.last_life, self.deaf_until - 1.0) >= self.interval:
            params = self.params
            tokens = PROBE_BLOCKS * params["block_size"] if params["drafter"] else PROBE_BLOCKS
            client = gate.Client(params["host"], params["port"], params.get("api_key"))
            name = params["served_model_name"]
            self.pulse = Pulse(client, tokens, params["engine"], name, max(self.watchdog, gate.HEALTH_TIMEOUT))
            self.pulse.start()

    # what systemd is told

    def _tell(self, now: float) -> None:
        if self.result is not None or now - self.last_tell < TELL_EVERY:
            return
        self.last_tell = now
        if self.serving:
            text = self.ready_text
            if self.interval and now - self.last_life > self.interval + 5:
                text = f"serving, but nothing generated for {now - self.last_life:.0f} s"
                if self.pulse_problem:
                    text += f" ({self.pulse_problem})"
            if self.tracker.phase == "stopping" or self.saw_stop:
                text = "stopping: requests in flight are finished"
            if text != self.last_text:
                self.last_text = text
                notify(f"STATUS={text}")
            return
        left = self.tracker.remaining(self.params.get("baseline"), now)
        text = status_text(self.tracker.snapshot(now), left)
        limit = {**phases.STALL, **(self.params.get("stall") or {})}[self.tracker.phase]
        seconds = extension(self.tracker.last_progress, limit, now)
        told = [f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"]
        if text != self.last_text:
            self.last_text = text
            told.append(f"STATUS={text}")
        notify(*told)
        if self.tracker.phase != self.last_phase:
            self.last_phase = self.tracker.phase
            self._write(None)


def parameters(options: dict[str, str], environment: dict[str, str]) -> dict[str, Any]:
    """The parameters of the wait from the supervisor's options and what systemd put into the environment."""
    block = int(options.get("--drafter-block", "0"))
    key = None
    credentials = environment.get("CREDENTIALS_DIRECTORY")
    if credentials:
        with contextlib.suppress(OSError):
            key = Path(credentials, "api_key").read_text(encoding="utf-8").strip()
    return {
        "unit": options["--unit"],
        "host": options.get("--host", "127.0.0.1"),
        "port": int(options["--port"]),
        "served_model_name": options.get("--model", ""),
        "api_key": key,
        "drafter": block > 0,
        "block_size": block or 8,
        "cuda_graph": None,
        "ranks": int(options.get("--ranks", "1")),
        "engine": "sglang",
        "engine_version": options.get("--release"),
        "in_effect": {},
        "invocation_id": environment.get("INVOCATION_ID") or None,
        "since_monotonic": 0.0,
        "timeout": float("inf"),
        "stall": parse_stall(options.get("--stall", "")),
        "settle": 0.0,
        "requests": int(options.get("--requests", "4")),
        "generation_timeout": float(options.get("--generation-timeout", "120")),
        "min_accept_length": float(options.get("--min-accept-length", "1.1")),
        "poll": "until",
        "slice": 0,
        "resume": None,
        "baseline": baseline(options.get("--instance", ""), options.get("--root", "")),
        "probe_seconds": float(options.get("--probe-seconds", "30")),
        "watchdog": int(environment.get("WATCHDOG_USEC") or 0) / 1e6,
    }


def baseline(instance: str, root: str) -> dict[str, float]:
    """Seconds per phase of the last good start, where this user may read them."""
    if not instance:
        return {}
    try:
        layout = state.Layout(root or "/var/lib/sglang")
        good = state.read_state(layout.last_good(instance)) or {}
        rows = good.get("phases") or []
        return {str(row["name"]): float(row["seconds"]) for row in rows if row.get("seconds") is not None}
    except (OSError, state.StateError, KeyError, TypeError, ValueError):
        return {}


def main(arguments: list[str]) -> int:
    """Watch the engine of this unit until it ends."""
    global ADDRESS
    # Out of the environment: journalctl and systemctl, our children, would speak there too (ERRNO=).
    ADDRESS = os.environ.pop("NOTIFY_SOCKET", "")
    params = parameters(dict(zip(arguments[::2], arguments[1::2])), dict(os.environ))
    unit = units.full_name(params["unit"])

    def diagnose(invocation: str, ended: bool) -> dict[str, Any]:
        # Imported when it is needed: these tables are larger than all the rest.
        from . import diagnosis, journal

        collected = journal.read_invocation(unit, invocation)
        return diagnosis.diagnose(
            collected.entries,
            unit,
            invocation_id=invocation,
            engine_version=params["engine_version"],
            kernel_entries=collected.kernel,
            gaps=collected.gaps,
            secrets=[params["api_key"]] if params["api_key"] else [],
        )

    def remedies_for(cause: str) -> list[dict[str, Any]]:
        from . import remedies

        return list(remedies.remedies_for(cause, params["engine_version"], {}))

    runtime = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    try:
        Sentinel(params, diagnose, remedies_for, Path(runtime, verdict.NAME) if runtime else None).run()
    except Exception as error:
        # Said in one line: a traceback of ours in the engine's journal would be taken for the engine's.
        text = f"the prober failed ({type(error).__name__}: {error})".replace("\n", " ")[:300]
        notify(f"STATUS={text}")
        own_log.log(f"{unit}: {text}", 3)
        return 1
    return 0
