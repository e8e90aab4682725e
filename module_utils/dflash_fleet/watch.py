"""Wait for one start of one unit until the first certain answer: ready, crashed, hung, stopped, port taken, too late.

One loop over everything that can bring the answer: systemd's signals on the system bus, handles of the main process and
of the engine's workers, the invocation's journal, the listening sockets, and HTTP requests in a thread of their own.
The journal is 250 ms late by design (journald gathers its change notices), so it tells phases and never a death.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import gate, own_log, phases, units, verdict

TICK = 0.25  # s between looks at the listening sockets and the workers; both are reads of /proc
PROBE_INTERVAL = 1.0  # s between HTTP probes, and only once the port listens
FOREIGN_GRACE = 2.0  # s another process may hold the port: the server before ours may be closing it
DYING_GRACE = (
    3.0  # s between the death of a worker, or the engine saying so, and the verdict while the unit stays active
)
START_GRACE = 15.0  # s for a start that was asked for to show up as a job or an invocation
FLUSH_AFTER = 2.0  # s of silence in a phase with a progress bar before its bar is fetched
GATE_ATTEMPTS = 3  # an answer of 5xx during the very first request may pass; a third one does not
GATE_PAUSE = 2.0  # s between two such attempts
_FIELDS = "MESSAGE,_PID,_CMDLINE,_SYSTEMD_UNIT,SYSLOG_IDENTIFIER"
_TOLD = frozenset(("ActiveState", "SubState", "Result", "MainPID"))  # properties whose signals carry the value
_TAIL = 300  # lines of a long-running unit looked at after its start has been read


def _public(smoke: dict[str, Any]) -> dict[str, Any]:
    """The part of a smoke result that belongs into the module's result."""
    return {name: smoke[name] for name in ("requests", "ok", "tokens", "accept_length", "tokens_per_second")}


def journal_readable() -> bool:
    """Whether this user sees the lines of system units (root, or a member of systemd-journal or adm)."""
    if os.geteuid() == 0:
        return True
    files = glob.glob("/run/log/journal/*/system.journal") + glob.glob("/var/log/journal/*/system.journal")
    return any(os.access(name, os.R_OK) for name in files)


class Follower:
    """The journal of one invocation: first what is there, then what comes."""

    def __init__(self, invocation: str, cursor: str | None = None) -> None:
        self.invocation = invocation
        self.cursor = cursor
        self._child: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._stamp = 0  # of the last entry, in microseconds of the clock that nobody sets

    def _command(self, *more: str, whole: bool = False) -> list[str]:
        where = [f"--after-cursor={self.cursor}"] if self.cursor and not whole else []
        shape = ["--all", "--output=json", f"--output-fields={_FIELDS}"]
        # systemd's own lines about the unit carry the second field instead of the first.
        which = [f"_SYSTEMD_INVOCATION_ID={self.invocation}", "+", f"INVOCATION_ID={self.invocation}"]
        return ["journalctl", "--quiet", "--no-pager", *shape, *where, *more, *which]

    @staticmethod
    def _start(command: list[str]) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)

    def catch_up(self, until: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
        """Entries so far. Once `until` holds, the rest of a long life is skipped except its last lines."""
        with contextlib.suppress(OSError):
            with self._start(self._command()) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    entry = self._parse(line)
                    if entry is None:
                        continue
                    yield entry
                    if until(entry):
                        child.kill()
                        break
                else:
                    return
            seen = self._stamp
            with self._start(self._command("--reverse", f"--lines={_TAIL}", whole=True)) as child:
                assert child.stdout is not None
                lines = child.stdout.readlines()
            for line in reversed(lines):
                entry = self._parse(line)
                if entry is not None and self._stamp > seen:
                    yield entry

    def follow(self) -> None:
        try:
            # --follow alone means this boot, by /proc's boot id: in a container's unit with ProtectProc= that is the
            # machine's, and journald's is the container's. --merge takes every boot.
            self._child = self._start(self._command("--follow", "--merge", "--lines=all"))
        except OSError:
            self._child = None
            return
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)

    def fileno(self) -> int:
        return self._child.stdout.fileno() if self._child is not None and self._child.stdout is not None else -1

    def read(self) -> list[dict[str, Any]]:
        if self._child is None or self._child.stdout is None:
            return []
        found = []
        while True:
            try:
                chunk = os.read(self.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                self.close()
                break
            self._rest += chunk
            *whole, self._rest = self._rest.split(b"\n")
            for line in whole:
                entry = self._parse(line)
                if entry is not None:
                    found.append(entry)
        return found

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            entry = json.loads(line)
        except ValueError:
            return None
        self.cursor = entry.get("__CURSOR", self.cursor)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            self._stamp = int(entry["__MONOTONIC_TIMESTAMP"])
        return entry

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(OSError):
                child.kill()
            if child.stdout is not None:
                child.stdout.close()
            child.wait()


class Prober(threading.Thread):
    """HTTP in the background: is it up, does it serve the model, do the smoke requests generate. Answers are queued."""

    def __init__(self, params: dict[str, Any], generate: bool) -> None:
        super().__init__(daemon=True)
        self.params = params
        self.generate = generate
        self.answers: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.says_up = threading.Event()  # the log has said so: no need to ask
        self.busy = False  # smoke requests are under way
        self._stop_now = threading.Event()
        self._read_end, self._write_end = os.pipe()

    def fileno(self) -> int:
        return self._read_end

    def _tell(self, kind: str, value: Any) -> None:
        self.answers.put((kind, value))
        with contextlib.suppress(OSError):
            os.write(self._write_end, b"x")

    def take(self) -> list[tuple[str, Any]]:
        with contextlib.suppress(OSError):
            if select.select([self._read_end], [], [], 0)[0]:
                os.read(self._read_end, 4096)
        found = []
        while True:
            try:
                found.append(self.answers.get_nowait())
            except queue.Empty:
                return found

    def stop(self) -> None:
        self._stop_now.set()

    def run(self) -> None:
        try:
            self._run()
        except gate.GateError as error:
            self._tell("refused", str(error))
        except Exception as error:
            # Without an answer the loop would wait for nothing. The text is left out: it may quote a request's headers.
            self._tell("refused", f"the readiness probe failed ({type(error).__name__})")

    def _run(self) -> None:
        params = self.params
        client = gate.Client(params["host"], params["port"], params.get("api_key"))
        engine = params["engine"]
        while not self._stop_now.is_set():
            begin = time.monotonic()
            if self.says_up.is_set():
                break
            try:
                up, said = gate.probe_up(client, engine, params.get("engine_version"))
            except gate.GateError as error:
                up, said = False, str(error)
            if up:
                break
            self._tell("not_up", said)
            self._stop_now.wait(max(0.05, PROBE_INTERVAL - (time.monotonic() - begin)))
        failures = 0
        while not self._stop_now.is_set():
            self._tell("up", None)
            problem = self._attempt(client, engine)
            if problem is None:
                return
            kind, why, fatal = problem
            failures += 1
            if fatal or failures >= GATE_ATTEMPTS:
                self._tell(kind, why)
                return
            self._tell("retry", why)
            self._stop_now.wait(GATE_PAUSE)

    def _attempt(self, client: gate.Client, engine: str) -> tuple[str, Any, bool] | None:
        """None when all is well, else (kind, why, whether trying again is useless)."""
        params = self.params
        wanted = params.get("served_model_name") or ""
        try:
            names = gate.served_names(client, engine)
        except gate.GateError as error:
            return "refused", str(error), error.status in (401, 403)
        if wanted and wanted not in names:
            return "refused", f"serves {', '.join(names) or 'no model'} instead of {wanted}", True
        if not self.generate:
            self._tell("answers", names)
            return None
        self.busy = True
        try:
            result = gate.smoke(
                client,
                params["requests"],
                params["drafter"],
                params["block_size"],
                engine,
                wanted or (names[0] if names else ""),
                params.get("generation_timeout") or gate.GENERATION_TIMEOUT,
            )
        finally:
            self.busy = False
        verdict, why = gate.judge(result, params["drafter"], params["min_accept_length"], engine)
        if verdict == "ok":
            self._tell("smoke", result)
            return None
        if verdict == "drafter":
            return "drafter", (why, result), True
        kinds = {item["kind"] for item in result["errors"]}
        statuses = {item["status"] for item in result["errors"]}
        if kinds == {"timeout"}:
            return "silent", (why, result), True
        return "refused", why, bool(statuses & {401, 403})


class Watch:
    """The wait itself.

    `diagnose(invocation, ended)` returns a journal_crash result (`ended`: systemd has said, or is about to say, that
    the invocation is over) and hands the entries it reads to `late`; `remedies(cause)` returns a list of remedies.

    Where the unit has a supervisor, its verdict is taken and nothing is gated twice; one without is gated here.
    """

    supervised = True  # look for a supervisor's verdict

    def __init__(
        self,
        params: dict[str, Any],
        diagnose: Callable[[str, bool], dict[str, Any]],
        remedies: Callable[[str], list[dict[str, Any]]] | None = None,
        check_mode: bool = False,
    ) -> None:
        self.params = params
        self.unit = units.full_name(params["unit"])
        self.diagnose = diagnose
        self.remedies = remedies or (lambda cause: [])
        self.check_mode = check_mode
        self.once = params.get("poll") == "once" or check_mode
        self.bus: units.SystemBus | None = None
        self.state: dict[str, Any] = {}
        self.follower: Follower | None = None
        self.prober: Prober | None = None
        self.main_fd: tuple[int, int] | None = None  # (pid, pidfd)
        self.workers: dict[int, tuple[str, int]] = {}  # pid: (title, pidfd)
        self.lacks: list[str] = []
        self.result: dict[str, Any] | None = None

        resume = params.get("resume") or {}
        if resume.get("boot_id") not in (None, units.boot_id()):
            resume = {"began": None}  # the host has rebooted meanwhile: what starts now is awaited afresh
        now = time.monotonic()
        self.slice_began = now
        self.began: float = resume.get("began") or now
        self.invocation: str | None = resume.get("invocation_id") or params.get("invocation_id") or None
        self.restarts: int | None = resume.get("restarts")
        self.ready_at: float | None = resume.get("ready_at")
        self.smoke: dict[str, Any] | None = resume.get("smoke")
        self.saw_stop: bool = bool(resume.get("saw_stop"))
        self.tracker = phases.PhaseTracker(params["ranks"], params["drafter"])
        if resume.get("tracker"):
            self.tracker = phases.PhaseTracker.from_state(resume["tracker"])
        self.cursor: str | None = resume.get("cursor")
        self.slice_phase = resume.get("phase")
        self.missing_pids: dict[str, str] = {}
        self.dying_since: float | None = None
        self.dying_why = ""
        self.foreign_since: float | None = None
        self.holder: dict[str, Any] | None = None
        self.listening = False
        self.not_up = ""
        self.retry_why = ""
        self.answers = False
        self.main_gone_at: float | None = None
        self.next_look = 0.0
        self.next_activity = 0.0
        self.can_flush = True
        self.last_entry = now
        self.since = float(params.get("since_monotonic") or 0.0)
        self.verdict_path: str | None = None
        self.prober_pid = 0  # of the supervisor's prober

    # life

    def run(self) -> dict[str, Any]:
        try:
            self._open()
            while self.result is None:
                self._turn()
            return self.result
        finally:
            self._close()

    def _open(self) -> None:
        try:
            self.bus = units.SystemBus()
            self.bus.subscribe(self.unit)
        except units.BusError as error:
            self.bus = None
            self._lack(f"the system bus ({error}): states are asked for once a second instead")
        self._refresh()
        if self.state["LoadState"] == "not-found" and not self.check_mode:
            raise units.BusError(f"unit {self.unit} does not exist on this host")
        if self.supervised and self.state["Type"] == "notify":
            folder = units.runtime_directory(self.unit)
            self.verdict_path = f"{folder}/{verdict.NAME}" if folder else None

    def _close(self) -> None:
        if self.prober is not None:
            self.prober.stop()
        if self.follower is not None:
            self.follower.close()
        if self.bus is not None:
            self.bus.close()
        fds = [fd for _title, fd in self.workers.values()] + ([self.main_fd[1]] if self.main_fd else [])
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _lack(self, text: str) -> None:
        if text not in self.lacks:
            self.lacks.append(text)

    def _refresh(self) -> None:
        """Read the unit's state; the bus where it is there."""
        if self.bus is not None:
            try:
                self.state = self.bus.properties(self.unit)
                return
            except units.BusError as error:
                self.bus.close()
                self.bus = None
                self._lack(f"the system bus ({error}): states are asked for once a second instead")
        self.state = units.show(self.unit)

    # one turn of the loop

    def _turn(self) -> None:
        now = time.monotonic()
        self._judge_state(now)
        if self.result is not None:
            return
        if now >= self.next_look:
            self.next_look = now + TICK
            if self.bus is None:
                self._refresh()
                self.next_look = now + 1.0
                self._judge_state(now)
            if self.result is None and self.invocation:
                self._take_verdict(now)
            if self.result is None and self.invocation:
                self._look(now)
        if self.result is None:
            self._judge_time(now)
        if self.result is not None:
            return
        fds: list[Any] = []
        if self.bus is not None:
            fds.append(self.bus)
        if self.follower is not None and self.follower.fileno() >= 0:
            fds.append(self.follower)
        if self.prober is not None:
            fds.append(self.prober)
        by_fd: dict[int, int] = {fd: pid for pid, (_title, fd) in self.workers.items()}
        fds += list(by_fd)
        if self.main_fd is not None:
            fds.append(self.main_fd[1])
        try:
            ready = select.select(fds, [], [], self._patience(time.monotonic()))[0]
        except (OSError, ValueError):
            ready = []  # a descriptor closed meanwhile; the next turn sees why
            time.sleep(0.01)
        changed = False
        for source in ready:
            if source is self.bus:
                changed = True
            elif source is self.follower:
                for entry in self.follower.read() if self.follower else []:
                    self._entry(entry)
            elif source is self.prober:
                self._http(time.monotonic())
            elif self.main_fd is not None and source == self.main_fd[1]:
                os.close(self.main_fd[1])
                self.main_fd = None
                self.main_gone_at = time.monotonic()
                # Systemd's word follows within milliseconds, and a question now would only keep it from speaking.
                changed = changed or self.bus is None
            elif source in by_fd:
                self._worker_died(by_fd[source], time.monotonic())
        if changed:
            self._signals()

    def _signals(self) -> None:
        """Take the signals (a quick stop may show only there), then read the state once."""
        if self.bus is not None:
            try:
                for message in self.bus.signals():
                    if message.member == "PropertiesChanged" and len(message.body) > 1:
                        # Service properties come in one message, the unit's own in the next: only together they tell.
                        self.state.update({name: value for name, value in message.body[1].items() if name in _TOLD})
                        self._note_stop()
            except units.BusError as error:
                self.bus.close()
                self.bus = None
                self._lack(f"the system bus ({error}): states are asked for once a second instead")
        self._refresh()

    def _note_stop(self) -> None:
        """Someone stops the unit: it is being ended while its main process lives and nothing has failed."""
        state = self.state
        ending = state["ActiveState"] == "deactivating" and state["SubState"] in ("stop", "stop-sigterm")
        if self.invocation is not None and ending and state["Result"] in ("success", "") and state["MainPID"]:
            self.saw_stop = True

    def _patience(self, now: float) -> float:
        wait = max(0.0, self.next_look - now)
        for at in (
            None if self.ready_at is None else self.ready_at + self.params["settle"],
            None if self.dying_since is None else self.dying_since + DYING_GRACE,
            None if self.main_gone_at is None else self.main_gone_at + 1.0,
        ):
            if at is not None and at > now:
                wait = min(wait, at - now)
        return min(wait, 1.0)

    # what systemd says

    def _judge_state(self, now: float) -> None:
        state = self.state
        if self.invocation is None and not self._adopt(now):
            return
        active, sub = state["ActiveState"], state["SubState"]
        if self.restarts is None:
            self.restarts = state["NRestarts"]
        if state["JobType"] in ("stop", "restart", "try-restart") and state["MainPID"] and self.main_gone_at is None:
            self.saw_stop = True
        self._note_stop()
        if state["InvocationID"] and state["InvocationID"] != self.invocation:
            # systemd has begun another start: the awaited one has ended, however healthy the new one looks.
            self._ended(now, restarted=state["NRestarts"] > (self.restarts or 0))
        elif active in ("failed", "inactive") or (active == "activating" and sub.startswith("auto-restart")):
            self._ended(now)
        elif active == "deactivating" and not state["MainPID"]:
            self._ended(now)  # the main process has died; systemd clears away what is left of the rest
        elif self.main_gone_at is not None and now - self.main_gone_at >= 1.0 and not units.alive(state["MainPID"]):
            self._refresh()
            self._ended(now)  # its handle says that it is dead; systemd is slow to say so
        elif state["MainPID"] and (self.main_fd is None or self.main_fd[0] != state["MainPID"]):
            self._watch_main(state["MainPID"])
        if self.tracker.started is None and state["ExecMainStartTimestampMonotonic"]:
            self.tracker.started = state["ExecMainStartTimestampMonotonic"] / 1e6
            self.tracker.entered.setdefault("launch", self.tracker.started)
        if self.result is None and self.follower is None:
            self._read_journal()

    def _adopt(self, now: float) -> bool:
        """Find the invocation to wait for."""
        state = self.state
        started = state["ExecMainStartTimestampMonotonic"] / 1e6
        pending = state["JobType"] in ("start", "restart", "try-restart", "reload-or-start")
        again = state["SubState"].startswith("auto-restart")
        running = state["ActiveState"] in ("active", "activating", "reloading") and not again
        old = bool(self.since) and started < self.since
        leaving = state["JobType"] in ("restart", "try-restart")
        if state["InvocationID"] and not old and not leaving and (running or not pending):
            # Also one that has ended: it is what there is to report about.
            self.invocation = state["InvocationID"]
            self.tracker.started = started or None
            if started:
                self.tracker.entered["launch"] = started
                self.tracker.last_progress = max(started, self.tracker.last_progress or 0.0)
            return True
        if pending or (old and now - self.began < START_GRACE):
            if self.once:
                self._finish(None, now, finished=self.check_mode)
            return False
        if now - self.began < (START_GRACE if self.since else 0.5) and not self.once:
            return False
        self._finish("stopped", now, why=f"{self.unit} is not running and nothing starts it")
        return False

    def _watch_main(self, pid: int) -> None:
        if self.main_fd is not None:
            os.close(self.main_fd[1])
            self.main_fd = None
        with contextlib.suppress(OSError, AttributeError):
            self.main_fd = (pid, os.pidfd_open(pid))

    def _take_verdict(self, now: float) -> None:
        """The supervisor's answer about this invocation, where there is one."""
        if self.verdict_path is None or self.ready_at is not None:
            return
        found = verdict.read(self.verdict_path, self.invocation)
        if found is None:
            return
        self.prober_pid = int(found.get("pid") or 0)
        if found.get("outcome") == "ready":
            self.ready_at = min(now, float(found.get("ready_monotonic") or now))
            self.smoke = found.get("smoke")
            self.tracker.enter("serving", self.ready_at)
        elif found.get("outcome") and not self.saw_stop:
            self.holder = found.get("holder")
            self._drain_journal()
            self._finish(found["outcome"], now, why=str(found.get("reason") or ""), crash=found.get("crash"))

    def _supervisor_lives(self) -> bool:
        return self.prober_pid > 0 and units.alive(self.prober_pid)

    def _ended(self, now: float, restarted: bool = False) -> None:
        noticed = time.monotonic()
        if not self.saw_stop:
            self._take_verdict(now)  # it has ended the unit for a reason that no log shows
            if self.result is not None:
                return
        exited = self.state["ExecMainExitTimestampMonotonic"] / 1e6
        same = self.state["InvocationID"] in ("", self.invocation)
        if not same or not exited or exited > noticed:
            exited = 0.0
        state = self.state
        asked = state["JobType"] in ("stop", "restart", "try-restart")
        terminated = (state["ExecMainCode"], state["ExecMainStatus"]) == (os.CLD_KILLED, signal.SIGTERM)
        if state["Result"] in ("success", "") and (asked or terminated) and state["InvocationID"] == self.invocation:
            # Nothing has failed. A load dies of its SIGTERM so fast that no state in between need be seen.
            self.saw_stop = True
        if self.saw_stop and not restarted:
            self._finish("stopped", now, why=f"{self.unit} was stopped while it was awaited")
            return
        self._drain_journal()
        crash = self.diagnose(self.invocation or "", True)
        timings = {
            "notice_ms": round((noticed - exited) * 1000, 1) if exited > self.slice_began else None,
            "diagnosis_ms": round((time.monotonic() - noticed) * 1000, 1),
        }
        if crash.get("verdict") == "stopped_by_operator":
            self._finish("stopped", now, why=str(crash.get("summary") or f"{self.unit} was stopped"))
            return
        self._finish("crashed", now, crash=crash, at=exited or None, timings=timings)

    # what the journal says

    def _read_journal(self) -> None:
        assert self.invocation is not None
        self.follower = Follower(self.invocation, self.cursor)
        if not journal_readable():
            self._lack("the journal (for root and members of systemd-journal): phases and hangs are not seen")
            return
        for entry in self.follower.catch_up(lambda _entry: self.tracker.phase == "serving"):
            self._entry(entry)
        if not self.once:
            self.follower.follow()

    def _drain_journal(self) -> None:
        """What the follower has brought and nobody has looked at yet."""
        if self.follower is not None:
            for entry in self.follower.read():
                self._entry(entry)

    def late(self, entries: list[dict[str, Any]]) -> None:
        """Entries that a diagnosis has read: those that the follower, a quarter of a second late, has not brought."""
        seen = self.tracker.last_seen or 0.0
        for entry in entries:
            if (phases.entry_time(entry) or 0.0) > seen:
                self.tracker.feed(entry)

    def _entry(self, entry: dict[str, Any]) -> None:
        if entry.get("SYSLOG_IDENTIFIER") == own_log.IDENTIFIER:
            return
        self.tracker.feed(entry)
        self.last_entry = time.monotonic()
        if self.prober is not None and self.tracker.phase == "serving":
            self.prober.says_up.set()

    # what /proc says

    def _look(self, now: float) -> None:
        group = self.state["ControlGroup"]
        if not group or self.state["ActiveState"] == "deactivating":
            return
        pids = units.cgroup_pids(group)
        if now >= self.next_activity:
            self.next_activity = now + 1.0
            # The prober works too, and its work is no progress of the engine.
            self.tracker.alive(units.activity(pids - units.session(pids, self.prober_pid)), now)
            self._fetch_bar(now)
        for pid, title in units.engine_workers(pids - set(self.workers)).items():
            if pid == self.state["MainPID"] or not units.alive(pid):
                continue
            with contextlib.suppress(OSError, AttributeError):
                self.workers[pid] = (title, os.pidfd_open(pid))
        stopping = self.saw_stop or self.tracker.phase == "stopping"
        if self.tracker.fatal is not None and self.dying_since is None and not stopping:
            self.dying_since, self.dying_why = now, self.tracker.fatal
        if self.dying_since is not None and now - self.dying_since >= DYING_GRACE and not self.saw_stop:
            self._half_dead(now)
            return
        self._look_at_port(now, group)

    def _fetch_bar(self, now: float) -> None:
        """Bars end in no newline until they are full, and journald keeps them back until then."""
        barred = self.tracker.phase in ("weights", "graph_capture") and now - self.last_entry >= FLUSH_AFTER
        if self.can_flush and barred and self.main_fd is not None and not self.check_mode:
            self.can_flush = self._flush_bar()
            self.last_entry = now

    def _flush_bar(self) -> bool:
        return self.main_fd is not None and units.flush_log_stream(self.main_fd[1])

    def _worker_died(self, pid: int, now: float) -> None:
        title, fd = self.workers.pop(pid)
        with contextlib.suppress(OSError):
            os.close(fd)
        if self.saw_stop or self.tracker.phase == "stopping":
            return
        self.missing_pids[str(pid)] = title
        if self.dying_since is None:
            self.dying_since, self.dying_why = now, f"{title} (pid {pid}) died"

    def _half_dead(self, now: float) -> None:
        """A part of the engine is dead and the unit still counts as active."""
        noticed = time.monotonic()
        self._drain_journal()
        crash = self.diagnose(self.invocation or "", False)
        if crash.get("verdict") == "stopped_by_operator":
            self.saw_stop = True
            return
        if crash.get("verdict") in ("running", "starting", "no_evidence", None) or crash.get("cause") in ("none", None):
            why = f"the engine runs on without a part of itself: {self.dying_why}"
            crash = self._own("running_but_dead", "running_but_dead", why)
        timings = {"notice_ms": None, "diagnosis_ms": round((time.monotonic() - noticed) * 1000, 1)}
        self._finish("crashed", now, crash=crash, timings=timings)

    def _look_at_port(self, now: float, group: str) -> None:
        if self.listening:
            self._begin_gate()
            return
        if gate.listener_for(self.params["host"], self.params["port"]) is None:
            self.foreign_since = None
            return
        found = gate.check_listener(self.params["host"], self.params["port"], group)
        if not found["listening"]:
            return
        if found["owned"] is False:
            self.holder = found["holder"]
            if self.foreign_since is None:
                self.foreign_since = now
            if now - self.foreign_since >= (FOREIGN_GRACE if not self.check_mode else 0.0):
                where = f"port {self.params['port']} of {self.params['host']}"
                why = f"{where} belongs to {gate.holder_text(self.holder)}, not to {self.unit}"
                self._finish("port_taken", now, why=why)
            return
        if found["owned"] is None:
            self._lack(found["lacks"])
        self.foreign_since, self.holder = None, None
        self.listening = True
        self.tracker.enter("warmup", now)
        self._begin_gate()

    def _begin_gate(self) -> None:
        """Gate here, unless it has been done, or the unit's own prober is about to do it."""
        if self.ready_at is not None or self.prober is not None or self._supervisor_lives():
            return
        self.prober = Prober(self.params, generate=not self.check_mode)
        if self.tracker.phase == "serving":
            self.prober.says_up.set()
        self.prober.start()

    # what HTTP says

    def _http(self, now: float) -> None:
        assert self.prober is not None
        for kind, value in self.prober.take():
            if kind == "not_up":
                self.not_up = value
            elif kind == "up":
                self.not_up = ""
            elif kind == "answers":
                self.answers = True
            elif kind == "retry":
                self.retry_why = value
            elif kind == "smoke":
                self.smoke = _public(value)
                self.ready_at = now
                self.tracker.enter("serving", now)
            else:
                self._refused(kind, value, now)

    def _refused(self, kind: str, value: Any, now: float) -> None:
        """A certain no. An engine that is just dying gets the time to say so itself, which explains more."""
        why, smoke = value if isinstance(value, tuple) else (value, None)
        if smoke is not None:
            self.smoke = _public(smoke)
        if kind == "drafter":
            crash = self._own("running", "drafter_mismatch", why)
            self._finish("crashed", now, crash=crash)
        elif kind == "silent":
            self._hung(now, f"the server is up and generates nothing: {why}")
        elif self._dies_within(DYING_GRACE):
            return
        else:
            crash = self._own("running_but_dead", "running_but_dead", f"it is up but does not serve: {why}")
            self._finish("crashed", now, crash=crash)

    def _dies_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._signals()
            self._judge_state(time.monotonic())
            if self.result is not None:
                return True
            select.select([self.bus] if self.bus is not None else [], [], [], 0.2)
        return False

    def _own(self, verdict: str, cause: str, summary: str) -> dict[str, Any]:
        return gate.verdict(
            verdict,
            cause,
            summary,
            phase=self.tracker.phase,
            unit=self.unit,
            invocation_id=self.invocation or "",
            version=self.params.get("engine_version"),
            remedies=self.remedies(cause),
            engine=self.params["engine"],
        )

    def _hung(self, now: float, why: str) -> None:
        self._drain_journal()
        crash = self.diagnose(self.invocation or "", False)
        if crash.get("verdict") in ("crashed", "crashed_exit_zero"):
            self._finish("crashed", now, crash=crash)
            return
        if crash.get("cause") in ("none", "unknown", None):
            crash = {**crash, "cause": "scheduler_hang", "summary": why, "remedies": self.remedies("scheduler_hang")}
        self._finish("hung", now, crash={**crash, "verdict": "hung", "phase": self.tracker.phase}, why=why)

    # what the clock says

    def _judge_time(self, now: float) -> None:
        params = self.params
        if self.invocation is None:
            if now - self.began >= params["timeout"]:
                self._finish("timeout", now, why=f"{self.unit} did not start within {params['timeout']:.0f} s")
            elif params.get("slice") and now - self.slice_began >= params["slice"]:
                self._finish(None, now, finished=False)
            return
        if self.ready_at is not None:
            if now >= self.ready_at + params["settle"] and self.dying_since is None:
                self._finish("ready", now, at=self._serving_since(self.ready_at))
                return
        elif self.check_mode:
            self._present(now)
        elif self.once and (self.prober is None or (self.not_up and not self.prober.busy)):
            self._finish(None, now, finished=False)
        if self.result is not None:
            return
        if now - self.began >= params["timeout"] and self.ready_at is None:
            self._finish("timeout", now, why=self._where(f"not ready within {params['timeout']:.0f} s"))
            return
        if self.ready_at is None and journal_readable() and not self.saw_stop:
            # Counted from when we look: what was done before, work and answers, is not in the journal.
            quiet = self.tracker.stalled(now, params.get("stall"), self.began)
            if quiet is not None:
                self._hung(now, self._where(f"no progress for {quiet:.0f} s"))
                return
        busy = self.prober is not None and self.prober.busy
        if params.get("slice") and not self.once and not busy and self.dying_since is None:
            over = now - self.slice_began >= params["slice"]
            if over or (self.slice_phase is not None and self.tracker.phase != self.slice_phase):
                self._finish(None, now, finished=False)

    def _serving_since(self, seen: float) -> float:
        """When it became ready: as its log says where that was before anyone waited, else when the gate passed."""
        said = self.tracker.entered.get("serving")
        return said if said is not None and said < self.began else seen

    def _present(self, now: float) -> None:
        """Check mode: what can be said without generating anything."""
        if self.prober is not None and not self.answers and not self.prober.is_alive():
            self._http(now)  # its last word may have come after we listened
        if self.result is not None:
            return
        if self.answers:
            self._finish("ready", now, at=self._serving_since(now))
            return
        silent = now - self.slice_began > gate.HEALTH_TIMEOUT
        if self.prober is None or self.not_up or not self.prober.is_alive() or silent:
            self._finish(None, now)

    def _where(self, text: str) -> str:
        shot = self.tracker.snapshot()
        parts = [f"{text} in {shot['phase']}"]
        if shot["ranks"] > 1 and shot["phase"] in ("dist_init", "weights", "kv_cache", "graph_capture"):
            parts.append(f"{shot['ranks_done']} of {shot['ranks']} ranks done")
        if shot["step"]:
            parts.append(f"at {shot['step'][0]} of {shot['step'][1]}")
        if self.retry_why or self.not_up:
            parts.append(self.retry_why or self.not_up)
        return ", ".join(parts)

    # the answer

    def _finish(
        self,
        outcome: str | None,
        now: float,
        why: str = "",
        crash: dict[str, Any] | None = None,
        at: float | None = None,
        finished: bool = True,
        timings: dict[str, Any] | None = None,
    ) -> None:
        if self.result is not None:
            return
        end = at if at is not None else now
        started = self.tracker.started
        seconds = max(0.0, round(end - started, 1)) if started is not None else None
        shot = self.tracker.snapshot(end)
        if crash and crash.get("phase") in phases.PHASES:
            shot["phase"] = crash["phase"]
        left = self.tracker.remaining(self.params.get("baseline"), now) if outcome is None else None
        progress = {name: shot[name] for name in ("percent", "step", "detail", "ranks_done", "ranks")}
        progress["remaining"] = left
        asked = self.params.get("cuda_graph")
        self.result = {
            "ready": outcome == "ready",
            "outcome": outcome,
            "finished": finished,
            "unit": self.unit,
            "invocation_id": self.invocation or "",
            "seconds": seconds,
            "phase": shot["phase"],
            "phases": shot["phases"],
            "progress": progress,
            "smoke": self.smoke,
            "crash": crash,
            "reason": why or (str(crash.get("summary") or "") if crash else ""),
            "cuda_graph": {"asked": asked, "used": self.tracker.graphs},
            "holder": self.holder if outcome == "port_taken" else None,
            "lacks": self.lacks,
            "timings": timings or {"notice_ms": None, "diagnosis_ms": None},
            "resume": None if finished else self._resume(),
        }

    def _resume(self) -> dict[str, Any]:
        return {
            "boot_id": units.boot_id(),
            "began": self.began,
            "invocation_id": self.invocation,
            "restarts": self.restarts,
            "ready_at": self.ready_at,
            "smoke": self.smoke,
            "saw_stop": self.saw_stop,
            "tracker": self.tracker.state(),
            "cursor": self.follower.cursor if self.follower is not None else self.cursor,
            "phase": self.tracker.phase,
        }
