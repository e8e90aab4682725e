"""Builds journals in the field layout that systemd writes, for fixtures, property tests and benchmarks.

The layout follows systemd 252: lines of a service carry their true writer in `_PID` and the run in `_SYSTEMD_INVOCATION_ID`; PID 1
speaks about a unit in `UNIT` and `INVOCATION_ID`; kernel lines name neither. Empty lines make no entry, trailing blanks are
stripped, and text with control characters is an array of bytes in JSON.
"""

# ruff: noqa: E501  (log lines are as long as programs print them)
from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SITE = "/opt/venv/lib/python3.11/site-packages"
JOURNAL_REMOTE = "/lib/systemd/systemd-journal-remote"
START = 1_764_460_800_000_000  # 2025-11-30T00:00:00Z

MESSAGE_IDS = {
    "starting": "7d4958e842da4a758f6c1cdc7b36dcc5",
    "started": "39f53479d3a045ac8e11786248231fbf",
    "start_failed": "be02cf6855d2428ba40df7e9d022f03d",
    "stopping": "de5b426a63be47a7b6ac3eaac82e2f6f",
    "stopped": "9d1aaa27d60140bd96365438aad20286",
    "exit": "98e322203f7a4ed290d09fe03c09fe15",
    "failed": "d9b373ed55a64feb8242e02dbe79a49c",
    "success": "7ad2d189f7e94e70a38c781354912448",
    "oom": "fe6faa94e7774663a0da52717891d8ef",
    "oomd": "d989611b15e44c9dbf31e3c81256e4ed",
    "restart": "5eb03494b6584870a536b337290809b3",
    "spawn": "641257651c1b4ec9a8624d7a40a9e1e7",
    "coredump": "fc2e22bc6ee647b6b90729ab34a250b1",
    "dropped": "a596d6fe7bfa4994828e72309e95d61e",
}
SIGNALS = {6: "ABRT", 9: "KILL", 11: "SEGV", 15: "TERM"}


class Journal:
    """Entries of one machine, in the order in which journald took them."""

    def __init__(self, unit: str = "sglang-main-ep8.service", boot: int = 1) -> None:
        self.unit = unit
        self.entries: list[dict[str, Any]] = []
        self.now = START
        self.boot = f"{boot:032x}"
        self.boot_began = START - 3600 * 1_000_000
        self.runs = 0

    def tick(self, seconds: float) -> Journal:
        self.now += int(seconds * 1_000_000)
        return self

    def reboot(self, seconds: float = 120) -> None:
        self.tick(seconds)
        self.boot = f"{int(self.boot, 16) + 1:032x}"
        self.boot_began = self.now

    def add(self, message: Any, **fields: Any) -> dict[str, Any]:
        self.now += 137
        entry = {
            "__CURSOR": f"s=c0ffee;i={len(self.entries) + 1:x};b={self.boot};m={self.now - self.boot_began:x};t={self.now:x}",
            "__REALTIME_TIMESTAMP": str(self.now),
            "__MONOTONIC_TIMESTAMP": str(self.now - self.boot_began),
            "_BOOT_ID": self.boot,
            "_HOSTNAME": "gpu-01",
            "_MACHINE_ID": "f" * 32,
            "PRIORITY": "6",
        }
        entry.update({name: value for name, value in fields.items() if value is not None})
        entry["MESSAGE"] = message
        self.entries.append(entry)
        return entry

    def kernel(self, text: str) -> None:
        self.add(text, _TRANSPORT="kernel", SYSLOG_IDENTIFIER="kernel", SYSLOG_FACILITY="0", PRIORITY="4")

    def other(self, text: str, unit: str = "nginx.service", pid: int = 900) -> None:
        """A line of another unit."""
        self.add(text, _TRANSPORT="stdout", _PID=str(pid), _COMM="nginx", SYSLOG_IDENTIFIER="nginx", _SYSTEMD_UNIT=unit, _SYSTEMD_INVOCATION_ID="9" * 32)

    def run(self, main: int | None = None) -> Run:
        self.runs += 1
        return Run(self, f"{0xA0000000 + self.runs:032x}", main or 20000 + 1000 * self.runs)

    def dropped(self, count: int) -> None:
        self.add(f"Suppressed {count} messages from {self.unit}", MESSAGE_ID=MESSAGE_IDS["dropped"], N_DROPPED=str(count), _TRANSPORT="driver", _PID="310",
                 _COMM="systemd-journal", _SYSTEMD_UNIT="systemd-journald.service", SYSLOG_IDENTIFIER="systemd-journald", OBJECT_SYSTEMD_UNIT=self.unit)  # fmt: skip


class Run:
    """One invocation of the unit."""

    def __init__(self, journal: Journal, invocation: str, main: int) -> None:
        self.journal, self.invocation, self.main = journal, invocation, main
        self.unit = journal.unit
        self.ranks: list[str] = []
        self.stamp_style = "sglang"

    # ---- writers

    def line(self, pid: int, text: Any, title: str = "", comm: str = "python3", **fields: Any) -> None:
        """One line on the unit's stream, as journald stores it."""
        if isinstance(text, str):
            text = text.rstrip()
            if not text:
                return
            if any(ord(character) < 32 and character not in "\t\n" for character in text):
                text = list(text.encode())
        elif isinstance(text, bytes):
            text = list(text)
        self.journal.add(text, _TRANSPORT="stdout", _PID=str(pid), _COMM=comm, _CMDLINE=title or None, SYSLOG_IDENTIFIER="python3", _STREAM_ID="5" * 32,
                         _SYSTEMD_UNIT=self.unit, _SYSTEMD_INVOCATION_ID=self.invocation, _SYSTEMD_CGROUP=f"/system.slice/{self.unit}", **fields)  # fmt: skip

    def lines(self, pid: int, text: str, title: str = "", comm: str = "python3") -> None:
        for line in text.split("\n"):
            self.line(pid, line, title, comm)

    @property
    def clock(self) -> str:
        import datetime

        return datetime.datetime.fromtimestamp(self.journal.now / 1e6, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")

    def log(self, text: str) -> None:
        """The main process logs."""
        self.lines(self.main, f"[{self.clock}] {text}", "/opt/venv/bin/python -m sglang.launch_server --model-path /models/k")

    def raw(self, text: str) -> None:
        """The main process prints without a prefix."""
        self.lines(self.main, text, "/opt/venv/bin/python -m sglang.launch_server --model-path /models/k")

    def pid_of(self, rank: int) -> int:
        return self.main + 100 + rank

    def title_of(self, rank: int) -> str:
        name = self.ranks[rank] if self.ranks else ""
        return "sglang::scheduler" + ("_" + name.replace(" ", "_") if name else "")

    def rank(self, rank: int, text: str) -> None:
        """A scheduler logs: the prefix stands on the first line only."""
        name = self.ranks[rank] if self.ranks else ""
        self.lines(self.pid_of(rank), f"[{self.clock}{' ' + name if name else ''}] {text}", self.title_of(rank), self.title_of(rank)[:15])

    def rank_raw(self, rank: int, text: Any, **fields: Any) -> None:
        """A scheduler's process prints without a prefix."""
        if isinstance(text, str) and not fields:
            self.lines(self.pid_of(rank), text, self.title_of(rank), self.title_of(rank)[:15])
        else:
            self.line(self.pid_of(rank), text, self.title_of(rank), self.title_of(rank)[:15], **fields)

    def each_rank(self, text: str) -> None:
        for rank in range(max(1, len(self.ranks))):
            self.rank(rank, text)

    # ---- PID 1

    def systemd(self, text: str, message_id: str = "", **fields: Any) -> None:
        self.journal.add(text, _TRANSPORT="journal", _PID="1", _COMM="systemd", SYSLOG_IDENTIFIER="systemd", _SYSTEMD_UNIT="init.scope", UNIT=self.unit,
                         INVOCATION_ID=self.invocation, MESSAGE_ID=MESSAGE_IDS.get(message_id), **fields)  # fmt: skip

    def start(self) -> None:
        self.systemd(f"Starting {self.unit} - SGLang main...", "starting", JOB_TYPE="start")
        self.journal.tick(0.05)
        self.systemd(f"Started {self.unit} - SGLang main.", "started", JOB_TYPE="start", JOB_RESULT="done")

    def exit(self, status: int | None = None, signal: int | None = None, result: str = "", dumped: bool = False) -> None:
        if signal is not None:
            code = "dumped" if dumped else "killed"
            self.systemd(f"{self.unit}: Main process exited, code={code}, status={signal}/{SIGNALS.get(signal, signal)}", "exit", EXIT_CODE=code, EXIT_STATUS=str(signal), COMMAND="ExecStart",
                         CODE_FUNC="unit_log_process_exit")  # fmt: skip
            self.failed(result or ("core-dump" if dumped else "signal"))
        elif status:
            self.systemd(f"{self.unit}: Main process exited, code=exited, status={status}/{ {1: 'FAILURE', 2: 'INVALIDARGUMENT', 203: 'EXEC'}.get(status, 'n/a')}", "exit", EXIT_CODE="exited",
                         EXIT_STATUS=str(status), COMMAND="ExecStart", CODE_FUNC="unit_log_process_exit")  # fmt: skip
            self.failed(result or "exit-code")
        else:
            self.systemd(f"{self.unit}: Deactivated successfully.", "success")

    def failed(self, result: str) -> None:
        self.systemd(f"{self.unit}: Failed with result '{result}'.", "failed", UNIT_RESULT=result)

    def stopping(self) -> None:
        self.systemd(f"Stopping {self.unit} - SGLang main...", "stopping", JOB_TYPE="stop")

    def stopped(self) -> None:
        self.systemd(f"Stopped {self.unit} - SGLang main.", "stopped", JOB_TYPE="stop", JOB_RESULT="done")

    def coredump(self, pid: int, comm: str, signal: int, stack: str = "") -> None:
        names = {6: "SIGABRT", 7: "SIGBUS", 11: "SIGSEGV"}
        self.journal.add(f"Process {pid} ({comm}) of user 990 dumped core.\n\n{stack}", MESSAGE_ID=MESSAGE_IDS["coredump"], _TRANSPORT="journal", _PID=str(pid + 900), _COMM="systemd-coredum",
                         SYSLOG_IDENTIFIER="systemd-coredump", _SYSTEMD_UNIT=f"systemd-coredump@1-{pid}.service", COREDUMP_UNIT=self.unit, COREDUMP_PID=str(pid), COREDUMP_COMM=comm,
                         COREDUMP_SIGNAL=str(signal), COREDUMP_SIGNAL_NAME=names[signal])  # fmt: skip

    # ---- SGLang's life

    def arguments(self, **more: Any) -> None:
        shown = {"model_path": "/models/k", "tp_size": max(1, len(self.ranks)), "ep_size": 1, "api_key": None, "mem_fraction_static": 0.88, "disable_cuda_graph": False,
                 "speculative_algorithm": None, "attention_backend": "triton", "port": 30000, **more}  # fmt: skip
        self.log("server_args=ServerArgs(" + ", ".join(f"{name}={value!r}" for name, value in shown.items()) + ")")

    def begin(self, ranks: int = 8, ep: bool = False, **arguments: Any) -> Run:
        """Up to the arguments."""
        if ranks > 1:
            self.ranks = [f"TP{rank} EP{rank}" if ep else f"TP{rank}" for rank in range(ranks)]
        self.start()
        self.journal.tick(6)
        self.arguments(**{"ep_size": ranks if ep else 1, **arguments})
        return self

    def to_weights(self) -> Run:
        self.journal.tick(8)
        self.each_rank("Init torch distributed begin.")
        self.journal.tick(3)
        self.each_rank("Init torch distributed ends. elapsed=3.02 s, mem usage=1.20 GB")
        self.each_rank("Load weight begin. avail mem=93.11 GB")
        self.journal.tick(2)
        bar = "\rMulti-thread loading shards:   0% Completed | 0/64 [00:00<?, ?it/s]\rMulti-thread loading shards:  30% Completed | 19/64 [00:20<00:48,  1.07s/it]"
        self.rank_raw(0, bar)
        self.journal.tick(20)
        return self

    def to_kv(self) -> Run:
        self.to_weights()
        self.journal.tick(60)
        self.each_rank("Load weight end. elapsed=82.31 s, type=KimiK25ForConditionalGeneration, quant=compressed-tensors, avail mem=19.55 GB, mem usage=73.56 GB.")
        self.journal.tick(1)
        return self

    def to_graphs(self) -> Run:
        self.to_kv()
        self.each_rank("KV Cache is allocated. #tokens: 131072, KV size: 8.59 GB")
        self.each_rank("Memory pool end. avail mem=10.20 GB")
        self.journal.tick(1)
        self.each_rank("Capture cuda graph begin. This can take up to several minutes. avail mem=10.20 GB")
        self.rank(0, "Capture cuda graph bs [1, 2, 4, 8, 16, 32, 48]")
        self.rank_raw(0, "\r  0%|          | 0/7 [00:00<?, ?it/s]\rCapturing batches (bs=48 avail_mem=9.98 GB):   0%|          | 0/7 [00:01<?, ?it/s]")
        self.journal.tick(5)
        return self

    def to_warmup(self, graphs: bool = True) -> Run:
        if graphs:
            self.to_graphs()
            self.each_rank("Capture cuda graph end. Time elapsed: 9.10 s. mem usage=0.91 GB. avail mem=9.29 GB.")
        else:
            self.to_kv()
            self.each_rank("KV Cache is allocated. #tokens: 131072, KV size: 8.59 GB")
            self.each_rank("Memory pool end. avail mem=10.20 GB")
        self.rank(0, "max_total_num_tokens=131072, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=48, context_len=262144, available_gpu_mem=9.29 GB")
        self.log(f"INFO:     Started server process [{self.main}]")
        self.log("INFO:     Waiting for application startup.")
        self.log("INFO:     Application startup complete.")
        self.log("INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)")
        self.journal.tick(1)
        self.log('INFO:     127.0.0.1:41000 - "GET /model_info HTTP/1.1" 200 OK')
        self.rank(0, "Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0,")
        self.journal.tick(1)
        return self

    def to_serving(self, graphs: bool = True, requests: int = 4) -> Run:
        self.to_warmup(graphs)
        self.log('INFO:     127.0.0.1:41001 - "POST /generate HTTP/1.1" 200 OK')
        self.log("The server is fired up and ready to roll!")
        for _request in range(requests):
            self.journal.tick(2)
            self.rank(0, "Prefill batch, #new-seq: 1, #new-token: 812, #cached-token: 0, token usage: 0.01, #running-req: 1, #queue-req: 0,")
            self.rank(0, "Decode batch, #running-req: 2, #token: 1801, token usage: 0.01, accept len: 3.21, cuda graph: True, gen throughput (token/s): 171.20, #queue-req: 0,")
            self.log('INFO:     10.0.0.9:52000 - "POST /v1/chat/completions HTTP/1.1" 200 OK')
        return self

    # ---- SGLang's ways to die

    def raise_in(self, rank: int, traceback: str) -> None:
        self.rank(rank, "Scheduler hit an exception: " + traceback)

    def self_kill(self, serving: bool = False, systemd: bool = True) -> None:
        """The parent learns of a child's failure, kills its children and itself."""
        self.journal.tick(0.05)
        if serving:
            self.log("SIGQUIT received. signum=3, frame=None. It usually means one child failed.")
        else:
            self.log("Received sigquit from a child process. It usually means the child failed.")
        self.log(f"kill_process_tree called: parent_pid={self.main}, include_parent=True, pid={self.main}")
        self.journal.tick(0.2)
        if systemd:
            self.exit(signal=9)


# --------------------------------------------------------------------------------------------- tracebacks


def frames(*rows: tuple[str, int, str] | tuple[str, int, str, str], carets: bool = False) -> str:
    """Frames as Python prints them; file names without a leading slash are of the engine's package."""
    out = []
    for row in rows:
        file, number, function = row[:3]
        source = row[3] if len(row) > 3 else f"{function.split('.')[-1]}(...)"
        path = file if file.startswith(("/", "<")) else f"{SITE}/{file}"
        out.append(f'  File "{path}", line {number}, in {function}')
        if source:
            out.append(f"    {source}")
            if carets:
                out.append("    " + "^" * min(len(source), 40))
    return "\n".join(out)


def traceback(rows: Iterable[Any], exception: str, carets: bool = False) -> str:
    return "Traceback (most recent call last):\n" + frames(*rows, carets=carets) + "\n" + exception


def chain(*parts: str, cause: bool = False) -> str:
    link = "The above exception was the direct cause of the following exception:" if cause else "During handling of the above exception, another exception occurred:"
    return f"\n\n{link}\n\n".join(parts)


S = "sglang/srt"
RUN = (f"{S}/managers/scheduler.py", 3480, "run_scheduler_process")
LOOP = (f"{S}/managers/scheduler.py", 1391, "event_loop_normal")
BATCH = (f"{S}/managers/scheduler.py", 2981, "run_batch")
INIT = (f"{S}/managers/scheduler.py", 412, "__init__")
WORKER_INIT = (f"{S}/managers/tp_worker.py", 248, "__init__")
RUNNER_INIT = (f"{S}/model_executor/model_runner.py", 391, "initialize")


# --------------------------------------------------------------------------------------------- writing


def to_json(entries: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def to_export(entries: Iterable[dict[str, Any]]) -> bytes:
    """journalctl -o export; fields with a newline or control characters in the binary form."""
    return b"".join(export_parts(entries))


def export_parts(entries: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for entry in entries:
        rows = []
        for name, value in entry.items():
            raw = bytes(value) if isinstance(value, list) else str(value).encode() if value is not None else None
            if raw is None:
                continue
            if any(byte < 32 and byte != 9 for byte in raw):
                rows.append(name.encode() + b"\n" + struct.pack("<Q", len(raw)) + raw)
            else:
                rows.append(name.encode() + b"=" + raw)
        yield b"\n".join(rows) + b"\n\n"


def write_journal(entries: Iterable[dict[str, Any]], path: Path) -> None:
    """A real .journal file, by systemd's own writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    process = subprocess.Popen([JOURNAL_REMOTE, "-o", str(path), "--split-mode=none", "--seal=no", "--compress=yes", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    for part in export_parts(entries):
        process.stdin.write(part)
    process.stdin.close()
    if process.wait() != 0:
        raise RuntimeError(f"systemd-journal-remote failed for {path}")
