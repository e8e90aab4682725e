"""What happened to a unit, from its journal entries: verdict, first failure, cause, remedies.

`diagnose` is pure: it takes parsed entries and returns the result of module journal_crash. The order of judgement:

1. Which run is meant, which entries belong to it, what PID 1 says about its end.
2. Each process read on its own (module tracebacks), its failures put in the order in which they happened.
3. The first failure that is no consequence of another one; noise of the surviving ranks comes later by nature.
4. The cause by evidence: kernel before text, the inner error before its wrapper (module causes).
"""

# ruff: noqa: E501  (patterns are read in one piece)
from __future__ import annotations

import bisect
import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import causes, journal, own_log, tracebacks
from .redact import redact, redact_all
from .remedies import remedies_for
from .tracebacks import Frame, Line, Link, Piece, Prefix, Report

PHASES = ("launch", "dist_init", "weights", "kv_cache", "graph_capture", "warmup", "serving", "stopping")
_ORDER = {name: index for index, name in enumerate(PHASES)}

VERDICTS = (
    "crashed", "crashed_exit_zero", "hung", "running_but_dead", "startup_timeout", "stopped_by_operator", "running", "starting", "no_evidence",
)  # fmt: skip

MAX_EVIDENCE = 12
MAX_EVIDENCE_CHARS = 1000
SECOND = 1_000_000


# --------------------------------------------------------------------------------------------- records


@dataclass
class Record:
    """One journal entry with the few fields that matter."""

    index: int
    entry: Mapping[str, Any]
    kind: str  # service, systemd, kernel, coredump, journald
    text: str
    lost: bool  # MESSAGE was null
    pid: int | None
    stamp: int | None
    invocation: str
    boot: str

    @property
    def cursor(self) -> str | None:
        return journal.first(self.entry, "__CURSOR") or None


def _record(index: int, entry: Mapping[str, Any]) -> Record:
    raw = entry.get("MESSAGE")
    text = journal.text_of(raw)
    pid = journal.number(entry, "_PID", "SYSLOG_PID")
    return Record(
        index=index,
        entry=entry,
        kind=_kind(entry),
        text=text or "",
        lost=text is None and "MESSAGE" in entry,
        pid=pid,
        stamp=journal.realtime(entry),
        invocation=journal.invocation_of(entry),
        boot=journal.first(entry, "_BOOT_ID"),
    )


def _kind(entry: Mapping[str, Any]) -> str:
    if journal.is_kernel(entry):
        return "kernel"
    message_id = journal.first(entry, "MESSAGE_ID")
    if message_id == journal.MSG_COREDUMP or entry.get("COREDUMP_PID"):
        return "coredump"
    if message_id == journal.MSG_DROPPED:
        return "journald"
    if journal.first(entry, "SYSLOG_IDENTIFIER") == "systemd-journald" and "Suppressed " in journal.first(entry, "MESSAGE"):
        return "journald"
    if entry.get("UNIT") or entry.get("USER_UNIT") or journal.first(entry, "_PID") == "1":
        return "systemd"
    if journal.first(entry, "SYSLOG_IDENTIFIER") == "systemd" and journal.first(entry, "_COMM") in ("systemd", ""):
        return "systemd"
    if journal.first(entry, "SYSLOG_IDENTIFIER") == "systemd-coredump":
        return "coredump"
    return "service"


def _ordered(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Entries oldest first. A list that runs backwards (journalctl -r, some collectors) is turned round."""
    out = list(entries)
    times = [journal.realtime(entry) for entry in out]
    known = [moment for moment in times if moment is not None]
    if len(known) < len(out) or len(out) < 2:
        return out
    rising = sum(1 for one, other in zip(known, known[1:]) if one < other)
    falling = sum(1 for one, other in zip(known, known[1:]) if one > other)
    if not falling:
        return out
    if falling > rising:
        out.reverse()
        known.reverse()
    # Clocks step; within one boot the monotonic clock does not.
    mono = [journal.number(entry, "__MONOTONIC_TIMESTAMP") for entry in out]
    one_boot = len({journal.first(entry, "_BOOT_ID") for entry in out}) == 1
    keys = [value or 0 for value in mono] if one_boot and None not in mono else known
    return [out[position] for position in sorted(range(len(out)), key=lambda position: keys[position])]


# --------------------------------------------------------------------------------------------- the analysis


@dataclass(eq=False)
class Failure:
    """Something that ended, or may have ended, a process."""

    index: float
    pid: int | None
    kind: str  # exception, native, killed, exit, watchdog, line
    strength: int  # 3 certainly fatal, 2 probably, 1 perhaps
    collateral: bool = False
    report: Report | None = None
    signal: str = ""
    exit_code: int | None = None
    detail: str = ""
    stamp: int | None = None
    oom: bool = False
    owner: Process | None = None


@dataclass(eq=False)
class Process:
    pid: int
    lines: list[Line] = field(default_factory=list)
    rank: str = ""
    role: str = ""
    title: str = ""
    comm: str = ""
    reports: list[Report] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    first_index: int = 0
    last_index: int = 0


_TITLE = re.compile(r"sglang::(?P<role>[a-z_]+?)(?P<ranks>(?:_(?:DP|PP|CP|ATTN_CP|ATTN_TP|MOE_DP|TP|EP)\d+)*)(?:\s|$)")
_RANK_PART = re.compile(r"(?:ATTN_CP|ATTN_TP|MOE_DP|DP|PP|CP|TP|EP)\d+")
_TAG_RANK = re.compile(r"(?:Worker|VllmWorker)[_ ]?(?P<rank>(?:[A-Z]{2}\d+(?:[_ ]|$))+|(?:rank=)?\d+)")

_EXIT_LINE = re.compile(
    r"(?P<what>Main|Control) process exited, code=(?P<code>\w+), status=(?P<status>\d+)(?:/(?P<name>\S+))?"
)
_RESULT_LINE = re.compile(r"Failed with result '(?P<result>[^']+)'")
_CHILD_CRASHED = re.compile(r"Subprocess (?P<name>\S+) \(pid=(?P<pid>\d+)\) crashed with exit code (?P<code>-?\d+)")
_RANK_DIED = re.compile(r"Rank (?P<rank>\d+) scheduler died during initialization \(exit code: (?P<code>-?\d+)\)")
_RANK_DEAD = re.compile(r"Rank (?P<rank>\d+) scheduler is dead")
_EXIT_CODE_LINE = re.compile(r"^Exit code: (?P<code>-?\d+)$")
_VLLM_DIED = re.compile(r"(?:Engine core proc|EngineCore|Worker proc) (?P<name>\S+) died unexpectedly")
_WATCHDOG = re.compile(r"[Ww]atchdog timeout \(self\.watchdog_timeout=[\d.]+(?P<rest>[^)]*)\)")
_SIGQUIT = re.compile(r"Received sigquit from a child process|SIGQUIT received\.")
_SELF_KILL = re.compile(
    r"kill_process_tree called: parent_pid=(?P<parent>\d+), include_parent=(?P<include>\w+), pid=(?P<pid>\d+)"
)
_SIGTERM = re.compile(r"SIGTERM received\.|Gracefully exiting\.\.\.|Signal SIGTERM received|SIGINT received\.")
_HEALTH_FAILED = re.compile(r"Health check failed\. Server couldn't get a response")
_READY = re.compile(r"The server is fired up and ready to roll|Application startup complete")
_BATCH = re.compile(r"^(?:Prefill|Decode) batch\b|^Engine \d+: Avg prompt throughput|generation throughput: [1-9]")
_HEALTH_OK = re.compile(r'"GET /(?:health|health_generate)\S* HTTP/[\d.]+" 200')
_HTTP = re.compile(r'"(?:GET|POST|HEAD|PUT|DELETE) /\S* HTTP/[\d.]+"? \d{3}')
_NCCL_EVENT = re.compile(
    r"ProcessGroupNCCL.{0,80}\].*?(?:collective operation timeout|failure detected by watchdog|terminated with exception|got stuck for)|HeartbeatMonitor.{0,200}(?:timed out|kill)"
)
_WARMUP_ERROR = re.compile(r"Initialization failed\. warmup error|warmup error:")

_FATAL_HEADER = re.compile(
    r"hit an exception|^Process \S+:|EngineCore (?:failed|encountered)|failed to start|Initialization failed|warmup error|init state|fatal error|Unhandled|[Ww]orker \S* ?failed|Engine background task failed"
)
_HARMLESS_HEADER = re.compile(
    r"Exception ignored|ASGI|never retrieved|[Ww]arning|[Ii]gnor|[Ff]all(?:ing)? ?back|[Rr]etry|[Ss]kip|[Ff]ailed to import|not available|[Cc]ould not import|Pyspy|py-spy|Error in sys\.excepthook|while cleaning|in __del__|Failed to (?:dump|run)"
)
_COLLATERAL = re.compile(
    r"[Cc]onnection (?:closed|reset|was (?:closed|forcibly))|BrokenPipe|[Bb]roken pipe|ConnectionReset|TCPStore|recvValue failed|sendBytes failed|recvBytes|[Rr]emote process exited|ncclRemoteError"
    r"|DistNetworkError(?!(?s:.{0,400})(?:EADDRINUSE|failed to listen))|^EOFError(?!: EOF when reading)|Rank \d+ scheduler (?:died|is dead)|scheduler died|Please see the error messages above|Initialization failed\. Please|Engine core initialization failed"
    r"|EngineDead|EngineGenerateError|Engine core proc|WorkerProc initialization failed|died unexpectedly|^KeyboardInterrupt|^SystemExit|CancelledError|Parent process exited|communicator was aborted|Failed core proc"
    r"|MQEngineDead|[Ss]ocket Timeout|NCCL communicator .{0,80}abort|Detected at least one rank|^asyncio\.exceptions|zmq\.error\.(?:ContextTerminated|Again)|BrokenExecutor|BrokenProcessPool|Background loop (?:has errored|is not running)"
)
_WRAPPER_TEXT = re.compile(
    r"See root cause above|Please see the error messages above|Engine core initialization failed|WorkerProc initialization failed"
)

_KERNEL_OOM = re.compile(
    r"(?P<memcg>Memory cgroup out of memory|Out of memory)(?: \([^)]*\))?: Kill(?:ed)? process (?P<pid>\d+) \((?P<comm>[^)]*)\)"
)
_KERNEL_OOM_DETAIL = re.compile(
    r"oom-kill:constraint=(?P<constraint>\w+),.*?(?:oom_memcg=(?P<oom>[^,]*),)?task_memcg=(?P<task>[^,]*),task=(?P<comm>[^,]*),pid=(?P<pid>\d+)"
)
_XID = re.compile(
    r"NVRM: Xid \((?P<gpu>[^)]*)\): (?P<code>\d+)(?:, pid='?(?P<pid>\d+|<unknown>|[^,']*)'?)?(?:, name=(?P<name>[^,]*))?(?P<rest>.*)"
)
_SEGFAULT = re.compile(
    r"(?:traps: )?(?P<comm>[^\[]{1,32})\[(?P<pid>\d+)\]:? (?P<what>segfault at \S+|general protection(?: fault)?|trap invalid opcode|trap divide error|trap int3)[^\n]*?(?: in (?P<module>[^\s\[]+)(?:\[[^\]]*\])?|$)"
)
_FABRIC_OOM = re.compile(r"NVRM.*(?:NV_ERR_NO_MEMORY|Out of memory)")

_PHASE_MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("serving", re.compile(r"The server is fired up and ready to roll")),
    ("warmup", re.compile(r"Started server process|Waiting for application startup|Application startup complete|Uvicorn running on|Engine startup timings")),
    ("graph_capture", re.compile(r"^Capture (?:(?:target|draft) (?:verify|decode|prefill) |piecewise )?(?:cuda|CUDA|cpu) graph.{0,40} begin|Capturing (?:batches|num tokens|CUDA graph|cudagraph)|^Capture cuda graph (?:bs|begin)")),
    ("kv_cache", re.compile(r"^Load weight end\.|KV Cache is allocated|Memory pool end|Loading (?:weights|model weights) took|Model loading took|Available KV cache memory|GPU KV cache size|max_total_num_tokens=|larger than the profiled value")),
    ("weights", re.compile(r"^Load weight begin|Loading safetensors|Multi-thread loading shards|Starting to load model|Loading model from|Loading pt checkpoint")),
    ("dist_init", re.compile(r"Init (?:torch distributed|parallel) (?:begin|ends)|rank \d+ in world size|init_distributed_environment|Init NCCL|sglang is using nccl|Using (?:model )?parallel|world_size=\d+ rank=\d+")),
)  # fmt: skip
_VLLM_SERVING = re.compile(r"Application startup complete")

_PHASE_FRAMES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("running", re.compile(r":(?:event_loop\w*|run_batch|run_busy_loop|process_batch_result\w*|execute_model|get_next_batch_to_run|forward_thread_func\w*|_process_engine_step|step_with_batch_queue)$", re.M)),
    ("graph_capture", re.compile(causes._CAPTURE_FRAMES, re.M)),
    ("kv_cache", re.compile(r":(?:init_memory_pool|_?init_kv_cache\w*|init_kv_buffer|profile_max_num_token|_create_buffers|determine_available_memory|_initialize_kv_caches|alloc_memory_pool|configure_kv\w*|unify_kv_cache\w*|get_kv_cache_config\w*|check_enough_kv_cache_memory)$|memory_pool\w*\.py:__init__|pool_configurator\.py|kv_cache_configurator\.py", re.M)),
    ("weights", re.compile(causes._WEIGHT_FRAMES, re.M)),
    ("dist_init", re.compile(r":(?:init_torch_distributed|init_distributed_environment|initialize_model_parallel|init_parallel\w*|init_process_group|init_device|ncclCommInitRank)$", re.M)),
)  # fmt: skip


class Analysis:
    """Everything known about one run; built step by step, read by the judgement."""

    def __init__(self, unit: str, version: str | None, effect: Mapping[str, Any]) -> None:
        self.unit = unit
        self.version = version
        self.effect = dict(effect)
        self.engine_name = "sglang"
        self.invocation = ""
        self.records: list[Record] = []
        self.service: list[Record] = []
        self.systemd: list[Record] = []
        self.coredumps: list[Record] = []
        self.journald: list[Record] = []
        self.kernel: list[Record] = []
        self.later: list[Record] = []  # PID 1's lines about other runs of the unit, and those that name none
        self.gaps: list[str] = []
        self.processes: dict[Any, Process] = {}
        self.main: int | None = None
        self.failures: list[Failure] = []
        self.args: dict[str, str] = {}
        self.by_index: dict[int, Record] = {}
        self.cut_off = False
        self.start_seen = False
        # end
        self.exit_code = ""
        self.exit_status: int | None = None
        self.exit_index: int | None = None
        self.end_index: int | None = None
        self.result = ""
        self.stop_index: int | None = None
        self.sigterm_index: int | None = None
        self.ended = False
        self.start_timeout = False
        self.start_timeout_index: int | None = None
        self.stopped_by_job = False
        self.systemd_watchdog = False
        self.unit_oom = False
        self.oomd = False
        self.start_limit = False
        self.spawn_error = ""
        self.spawn_status: int | None = None
        self.control_exit = False
        self.sigquits: list[int] = []
        self.self_kill = False
        self.ready_index: int | None = None
        self.last_batch: int | None = None
        self.health_failed: list[int] = []
        # kernel
        self.xids: list[dict[str, Any]] = []
        self.segfaults: list[dict[str, Any]] = []
        self.oom_pids: dict[int, bool] = {}  # pid -> by the cgroup's limit
        self.oom_of_unit: list[bool] = []
        self.fabric_oom = 0
        self.earlier_causes: list[str] = []

    # ------------------------------------------------------------------ facts

    @property
    def head_visible(self) -> bool:
        return self.start_seen or self.args.get("server_args") == "seen"

    def fact(self, name: str) -> str | None:
        return self.args.get(name)

    def drafter(self) -> bool | None:
        chosen = self.effect.get("sglang_drafter")
        if chosen not in (None, ""):
            return str(chosen).lower() not in ("none", "false")
        algorithm = self.args.get("speculative_algorithm")
        return None if algorithm is None else algorithm.lower() not in ("none", "null", "")

    def graphs(self) -> bool | None:
        chosen = self.effect.get("sglang_cuda_graph")
        if chosen not in (None, "", "auto"):
            return str(chosen).lower() not in ("disabled", "false", "off")
        if self.graph_arguments() in ("disabled", "no_decode"):
            return False
        if self.args.get("disable_cuda_graph") or self.args.get("enforce_eager"):
            return True
        for process in self.processes.values():
            for line in process.lines:
                if "Captur" in line.text[:40] and _PHASE_MARKS[2][1].search(line.text[:300]):
                    return True
        return None

    def graph_arguments(self) -> str:
        """disabled, no_decode, no_prefill, or empty: what the engine's own arguments say about CUDA graphs."""
        args = self.args

        def on(name: str) -> bool:
            return args.get(name, "").lower() == "true"

        if on("disable_cuda_graph") or on("enforce_eager"):
            return "disabled"
        decode = on("disable_decode_cuda_graph") or args.get("cuda_graph_backend_decode") == "disabled"
        prefill = on("disable_prefill_cuda_graph") or on("disable_piecewise_cuda_graph") or args.get("cuda_graph_backend_prefill") == "disabled"
        if decode:
            return "disabled" if prefill else "no_decode"
        return "no_prefill" if prefill else ""

    def ep(self) -> int | None:
        try:
            return int(self.args["ep_size"])
        except (KeyError, ValueError):
            pass
        for process in self.processes.values():
            if re.search(r"\bEP[1-9]", process.rank):
                return 2
        return None


# --------------------------------------------------------------------------------------------- step 1: the run


def _choose_run(records: list[Record], wanted: str) -> tuple[str, bool]:
    """The invocation to diagnose and whether its end is missing although a later run or boot exists."""
    order: list[str] = []
    ended: set[str] = set()
    last: dict[str, str] = {}
    boots: list[str] = []
    for record in records:
        if record.boot and (not boots or boots[-1] != record.boot):
            boots.append(record.boot)
        if not record.invocation or record.kind in ("kernel", "journald"):
            continue
        if record.invocation not in last:
            order.append(record.invocation)
        last[record.invocation] = record.boot or last.get(record.invocation, "")
        if record.kind == "systemd" and journal.is_end(record.entry):
            ended.add(record.invocation)
    if not order:
        return "", False

    def cut_off(invocation: str) -> bool:
        newer_run = order.index(invocation) < len(order) - 1
        newer_boot = bool(boots) and bool(last[invocation]) and last[invocation] != boots[-1]
        return invocation not in ended and (newer_run or newer_boot)

    if wanted:
        return wanted, wanted in last and cut_off(wanted)
    for invocation in reversed(order):
        if invocation in ended or cut_off(invocation):
            return invocation, cut_off(invocation)
    return order[-1], False


def _segment(records: list[Record], unit: str) -> list[Record]:
    """Without invocation ids (pasted text) a start line begins a run; take the last one that ended, else the last."""
    starts = [
        position
        for position, record in enumerate(records)
        if record.kind == "systemd"
        and re.match(r"(?:Starting|Started) ", record.text)
        and (unit.rsplit(".", 1)[0] in record.text or not unit)
    ]
    bounds: list[tuple[int, int]] = []
    edges = [0, *starts, len(records)]
    for begin, end in zip(edges, edges[1:]):
        if end > begin:
            if (
                bounds
                and begin in starts
                and records[begin].text.startswith("Started ")
                and bounds[-1][1] == begin
                and _only_start(records, bounds[-1])
            ):
                bounds[-1] = (bounds[-1][0], end)
            else:
                bounds.append((begin, end))
    for begin, end in reversed(bounds):
        part = records[begin:end]
        if any(
            record.kind == "systemd"
            and (_RESULT_LINE.search(record.text) or record.text.endswith("Deactivated successfully."))
            for record in part
        ):
            return part
    for begin, end in reversed(bounds):
        if any(record.kind == "service" for record in records[begin:end]):
            return records[begin:end]
    return records


def _only_start(records: list[Record], bound: tuple[int, int]) -> bool:
    return not any(record.kind == "service" for record in records[bound[0] : bound[1]])


def _sort_out(analysis: Analysis, records: list[Record], wanted: str, given_kernel: list[Record]) -> None:
    about = [record for record in records if record.kind != "kernel" and _about(record, analysis.unit)]
    run, analysis.cut_off = _choose_run(about + [record for record in records if record.kind == "kernel"], wanted)
    analysis.invocation = run
    if run:
        mine = [record for record in about if record.invocation == run]
        untagged = [record for record in about if not record.invocation]
        span = [record.index for record in mine]
        low, high = (min(span), max(span)) if span else (0, -1)
        # Lines that name no invocation: core dumps, journald's notes, and the last lines of a process that was gone when
        # journald read them. What stands inside the run, or after it and before the next, is the run's.
        following = min((record.index for record in about if record.invocation and record.invocation != run and record.index > high), default=None)
        after = following if following is not None else high + 400
        mine += [record for record in untagged if record.kind in ("coredump", "journald") and low <= record.index <= max(after, high + 200)]
        mine += [record for record in untagged if record.kind == "service" and low <= record.index < max(after, high + 1) and journal.about_unit(record.entry, analysis.unit)]
        if not any(record.kind == "systemd" for record in mine):
            # A PID 1 that does not name invocations: its lines inside the run, or right after it, are about the run.
            mine += [record for record in untagged if record.kind == "systemd" and low <= record.index < max(after, high + 1)]
        taken = {record.index for record in mine}
        analysis.later = [record for record in about if record.kind == "systemd" and record.index not in taken]
    else:
        mine = _segment(about, analysis.unit)
        analysis.later = []
    mine.sort(key=lambda record: record.index)
    for record in mine:
        {
            "service": analysis.service,
            "systemd": analysis.systemd,
            "coredump": analysis.coredumps,
            "journald": analysis.journald,
        }[record.kind].append(record)
    analysis.records = mine
    analysis.by_index = {record.index: record for record in mine}
    boots = {record.boot for record in mine if record.boot}
    stamps = [record.stamp for record in mine if record.stamp is not None]
    kernel = [record for record in records if record.kind == "kernel"] + given_kernel
    seen: set[Any] = set()
    for record in kernel:
        identity = record.cursor or (record.stamp, record.text)
        if identity in seen or (boots and record.boot and record.boot not in boots):
            continue
        seen.add(identity)
        if (
            stamps
            and record.stamp is not None
            and not (min(stamps) - 5 * SECOND <= record.stamp <= max(stamps) + 30 * SECOND)
        ):
            continue
        analysis.kernel.append(record)


def _about(record: Record, unit: str) -> bool:
    entry = record.entry
    if journal.about_unit(entry, unit):
        return True
    named = journal.unit_of(entry)
    if record.kind == "journald":
        return unit in record.text
    if record.kind == "systemd" and not journal.first(entry, "UNIT", "USER_UNIT"):
        return unit in record.text or unit.rsplit(".", 1)[0] in record.text
    # Pasted text and containers' logs carry no unit at all: then everything is taken to be about it.
    return not named and record.kind == "service"


# --------------------------------------------------------------------------------------------- step 2: the end, by PID 1


def _read_systemd(analysis: Analysis) -> None:
    restarting = False
    for record in analysis.systemd:
        entry = record.entry
        message_id = journal.first(entry, "MESSAGE_ID")
        text = record.text
        match = _EXIT_LINE.search(text)
        if match and match.group("what") == "Control":
            analysis.control_exit = True
            if not analysis.exit_code:
                analysis.exit_code, analysis.exit_status, analysis.exit_index = (
                    match.group("code"),
                    int(match.group("status")),
                    record.index,
                )
        elif message_id == journal.MSG_PROCESS_EXIT or match:
            analysis.exit_code = journal.first(entry, "EXIT_CODE") or (match.group("code") if match else "")
            status = journal.number(entry, "EXIT_STATUS")
            if status is None and match:
                status = int(match.group("status"))
            analysis.exit_status = status
            analysis.exit_index = record.index
            analysis.ended = True
        if message_id == journal.MSG_UNIT_FAILED or _RESULT_LINE.search(text):
            found = _RESULT_LINE.search(text)
            analysis.result = journal.first(entry, "UNIT_RESULT") or (found.group("result") if found else "")
            analysis.end_index, analysis.ended = record.index, True
        elif message_id == journal.MSG_UNIT_SUCCESS or text.endswith((": Deactivated successfully.", ": Succeeded.")):
            analysis.result = analysis.result or "success"
            analysis.end_index, analysis.ended = record.index, True
        elif message_id == journal.MSG_UNIT_STOPPING or re.match(r"Stopping ", text):
            if analysis.stop_index is None:
                analysis.stop_index = record.index
        elif message_id == journal.MSG_UNIT_STOPPED or text.startswith("Stopped "):
            # Told of a run that was over at the end of somebody's stop. What systemd stops to start it again has type restart,
            # and a run that ended long before was not ended by that.
            job = journal.first(entry, "JOB_TYPE")
            soon = analysis.end_index is not None and _seconds(analysis, analysis.end_index, record.index) < 1
            analysis.stopped_by_job = (job == "stop" if job else not restarting) and soon
        elif message_id == journal.MSG_UNIT_RESTART:
            restarting = True
        elif message_id in (journal.MSG_UNIT_STARTED, journal.MSG_UNIT_STARTING) or re.match(
            r"(?:Started|Starting) ", text
        ):
            analysis.start_seen = True
        elif message_id == journal.MSG_UNIT_OOM or "killed by the OOM killer" in text:
            analysis.unit_oom = True
        elif message_id == journal.MSG_UNIT_OOMD or "systemd-oomd killed" in text:
            analysis.oomd = True
        elif "start operation timed out" in text or "Start operation timed out" in text:
            analysis.start_timeout = True
            if analysis.start_timeout_index is None:
                analysis.start_timeout_index = record.index
        elif re.search(r"Watchdog (?:timeout \(limit|request \(last status)", text):
            analysis.systemd_watchdog = True
        elif (
            message_id == journal.MSG_SPAWN_FAILED
            or "Failed at step " in text
            or re.search(
                r"Failed to (?:locate executable|execute|set up|load credential|determine (?:user|group))", text
            )
        ):
            analysis.spawn_error = analysis.spawn_error or text
    if analysis.exit_code == "exited" and (analysis.exit_status or 0) >= 200:
        analysis.spawn_status = analysis.exit_status
    for record in analysis.later:
        if "Start request repeated too quickly" in record.text:
            analysis.start_limit = True


# --------------------------------------------------------------------------------------------- step 3: the processes


def _read_processes(analysis: Analysis) -> None:
    pieces: list[Piece] = []
    titles: dict[Any, tuple[str, str]] = {}
    for record in analysis.service:
        entry = record.entry
        if record.lost:
            continue
        key = record.pid if record.pid is not None else -1
        title = journal.first(entry, "_CMDLINE")
        if title and (key not in titles or title.startswith("sglang::")):
            titles[key] = (title, journal.first(entry, "_COMM"))
        pieces.append(Piece(record.index, key, record.text, journal.first(entry, "_LINE_BREAK"), record.stamp))
    cut = any(piece.line_break == "pid-change" for piece in pieces)
    streams = tracebacks.join_pieces(pieces, _words(pieces) if cut else frozenset())
    for key, lines in streams.items():
        for part_key, part in _split_tagged(key, lines).items():
            if not part:
                continue
            pid = part_key if isinstance(part_key, int) else part_key[1]
            process = Process(pid=pid, lines=part, first_index=part[0].index, last_index=part[-1].index)
            process.title, process.comm = titles.get(key, ("", ""))
            analysis.processes[part_key] = process
    for process in analysis.processes.values():
        _name(process)
        process.reports = tracebacks.parse(process.lines)


def _words(pieces: Sequence[Piece]) -> frozenset[str]:
    """Words that whole lines of this log and the cause table hold: they tell a cut between words from one inside a word."""
    found = set(causes.words()) | tracebacks.SENTENCE_WORDS
    halves: set[Any] = set()
    for piece in pieces[:20_000]:
        rest = piece.key in halves
        (halves.add if piece.line_break else halves.discard)(piece.key)
        if not rest and not piece.line_break and len(piece.text) < 2000:
            found.update(re.findall(r"(?<![A-Za-z])[a-z]{1,20}(?![A-Za-z])", piece.text.lower()))
    return frozenset(found)


def _split_tagged(key: Any, lines: list[Line]) -> dict[Any, list[Line]]:
    """Behind a pipe (tee, a container runtime) one process writes for all: then the prefixes say who spoke."""
    tags = {line.prefix.tag_pid for line in lines if line.prefix is not None and line.prefix.tag_pid is not None}
    if len(tags) > 1 or (
        len(tags) == 1 and key not in tags and any(line.prefix is None or line.prefix.tag_pid is None for line in lines)
    ):
        out: dict[Any, list[Line]] = {}
        for line in lines:
            tagged = line.prefix.tag_pid if line.prefix is not None else None
            out.setdefault((key, tagged) if tagged is not None else key, []).append(line)
        return out
    ranks = {line.prefix.rank for line in lines if line.prefix is not None and line.prefix.rank}
    if len(ranks) > 1 and not any(rank.startswith("rank") for rank in ranks):
        # Records of several ranks through one writer: unprefixed lines go on with the record before them.
        out = {}
        current = ""
        for line in lines:
            if line.prefix is not None and line.prefix.stamped:
                current = line.prefix.rank
            out.setdefault((key, key, current) if current else key, []).append(line)
        return out
    return {key: lines}


def _name(process: Process) -> None:
    """Rank and role, from the process title, the prefixes, or vLLM's tags."""
    match = _TITLE.search(process.title)
    if match:
        process.role = {"data_parallel_controller": "dp_controller"}.get(match.group("role"), match.group("role"))
        process.rank = " ".join(_RANK_PART.findall(match.group("ranks")))
    elif process.comm.startswith("sglang::"):
        process.role = (
            "scheduler"
            if process.comm.startswith("sglang::sched")
            else "detokenizer"
            if process.comm.startswith("sglang::detok")
            else ""
        )
    counts: dict[str, int] = {}
    for line in process.lines:
        prefix = line.prefix
        if prefix is None:
            continue
        if prefix.rank:
            counts[prefix.rank] = counts.get(prefix.rank, 0) + 1
        if prefix.tag and not process.role:
            process.role = _tag_role(prefix.tag)
        if prefix.tag and not process.rank:
            found = _TAG_RANK.search(prefix.tag)
            if found:
                process.rank = found.group("rank").replace("_", " ").replace("rank=", "").strip()
    named = {rank: count for rank, count in counts.items() if not rank.startswith("rank")}
    if named and not process.rank:
        process.rank = max(named, key=lambda rank: named[rank])
    elif counts and not process.rank:
        process.rank = max(counts, key=lambda rank: counts[rank])
    if process.rank and not process.role:
        process.role = "scheduler"


def _tag_role(tag: str) -> str:
    low = tag.lower()
    if "worker" in low:
        return "worker"
    if "enginecore" in low:
        return "engine_core"
    return "api_server" if "apiserver" in low else low.split("_")[0]


def _find_main(analysis: Analysis) -> None:
    """The unit's main process: the one that speaks for the whole, else the first to speak."""
    best: Process | None = None
    for process in analysis.processes.values():
        if process.role in ("scheduler", "detokenizer", "dp_controller", "worker", "engine_core"):
            continue
        for line in process.lines:
            if (
                _SIGQUIT.search(line.text[:200])
                or "server_args=" in line.text[:200]
                or _CHILD_CRASHED.search(line.text[:300])
                or _READY.search(line.text[:200])
                or _SELF_KILL.search(line.text[:300])
            ):
                best = process
                break
        if best is not None:
            break
    if best is None:
        for process in sorted(analysis.processes.values(), key=lambda process: process.first_index):
            if process.role in ("", "main", "api_server"):
                best = process
                break
    if best is not None:
        analysis.main = best.pid
        best.role = best.role or "main"
    for process in analysis.processes.values():
        if not process.role:
            process.role = _role_by_reports(process) or ("main" if process.pid == analysis.main else "child")


def _role_by_reports(process: Process) -> str:
    for report in process.reports:
        if "Scheduler hit" in report.header or re.search(
            r":run_scheduler_process$", tracebacks.frames_text(report.links[0].frames if report.links else []), re.M
        ):
            return "scheduler"
        if "DetokenizerManager" in report.header:
            return "detokenizer"
    return ""


_ARGUMENT = re.compile(
    r"['\"]?\b(tp_size|ep_size|pp_size|dp_size|speculative_algorithm|speculative_draft_model_path|disable_cuda_graph|mem_fraction_static|attention_backend|enable_torch_compile|max_running_requests|context_length|port"
    r"|moe_a2a_backend|cuda_graph_max_bs|disable_custom_all_reduce|disable_overlap_schedule|disable_radix_cache|enable_hierarchical_cache|hicache_size|enforce_eager|disable_prefill_cuda_graph|disable_piecewise_cuda_graph|disable_decode_cuda_graph|cuda_graph_backend_decode|cuda_graph_backend_prefill"
    r"|trust_remote_code|watchdog_timeout|speculative_num_draft_tokens|disaggregation_mode|page_size|hicache_ratio|version)['\"]?\s*[=:]\s*(?:'([^']*)'|\"([^\"]*)\"|([^,)}\s]+))"
)
_VERSION_TEXT = re.compile(
    r"\bsglang(?:[ =]v?| version[ :=]+v?|-)(\d+\.\d+\.\d+(?:\.?(?:post|rc)\d+)?)(?:\+[\w.]+)?", re.I
)
_VLLM_VERSION = re.compile(
    r"vLLM (?:API server version|V1 LLM engine \(v?|version)[ (v]*(\d+\.\d+[\w.+-]*)|LLM engine \(v(\d+\.\d+[\w.+-]*)\)"
)


_OPTION = re.compile(r"\s--([a-z][a-z-]{1,60})(?:[= ](?!--)(\S+))?")
#: Options whose presence alone switches something.
_SWITCHES = frozenset(
    {"disable-cuda-graph", "disable-decode-cuda-graph", "disable-prefill-cuda-graph", "disable-piecewise-cuda-graph", "enforce-eager", "enable-torch-compile",
     "disable-custom-all-reduce", "disable-overlap-schedule", "disable-radix-cache", "trust-remote-code"}
)  # fmt: skip
_VALUES = frozenset(
    {"tp-size", "ep-size", "pp-size", "speculative-algorithm", "mem-fraction-static", "attention-backend", "cuda-graph-backend-decode", "cuda-graph-backend-prefill", "port",
     "max-running-requests", "context-length", "moe-a2a-backend", "page-size"}
)  # fmt: skip


def _read_command_line(analysis: Analysis, title: str) -> None:
    """The main process' own command line, which journald keeps with each of its lines: it outlives the line `server_args=`."""
    if "launch_server" not in title and " serve" not in title:
        return
    analysis.args.setdefault("server_args", "command line")
    for name, value in _OPTION.findall(title[:20_000]):
        key = name.replace("-", "_")
        if name in _SWITCHES:
            analysis.args.setdefault(key, "True")
        elif name in _VALUES and value:
            analysis.args.setdefault(key, value)


def _read_arguments(analysis: Analysis) -> None:
    vllm = 0
    for process in analysis.processes.values():
        _read_command_line(analysis, process.title)
    for process in analysis.processes.values():
        if process.role in ("engine_core", "api_server") or re.search(r"\bvllm\b", process.title):
            vllm += 1
        for line in process.lines:
            text = line.text
            if "server_args=" in text[:200] or "non-default args" in text[:200] or "launch_command" in text[:400]:
                analysis.args["server_args"] = "seen"
                for match in _ARGUMENT.finditer(text[:60_000]):
                    value = next((group for group in match.groups()[1:] if group is not None), "")
                    analysis.args[match.group(1)] = value
            if not analysis.version and len(text) < 4000:
                found = _VERSION_TEXT.search(text)
                if found:
                    analysis.version = found.group(1)
            if "vLLM" in text[:300]:
                found = _VLLM_VERSION.search(text[:2000])
                if found:
                    vllm += 5
                    analysis.args.setdefault("vllm_version", (found.group(1) or found.group(2) or "").rstrip(")."))
    frames = 0
    for process in analysis.processes.values():
        for report in process.reports:
            for link in report.links:
                frames += sum(1 for frame in link.frames if "/vllm/" in frame.file) - sum(
                    1 for frame in link.frames if "/sglang/" in frame.file
                )
    if (
        vllm + max(frames, 0) > 0
        and not any(process.title.startswith("sglang::") for process in analysis.processes.values())
        and frames >= 0
        and "sglang" not in analysis.unit
    ):
        analysis.engine_name = "vllm"
        if analysis.args.get("vllm_version"):
            analysis.version = analysis.version or analysis.args["vllm_version"]


# --------------------------------------------------------------------------------------------- step 4: the failures


def _strength(report: Report, process: Process, analysis: Analysis) -> int:
    if report.kind in ("faulthandler", "terminate", "abort", "signal"):
        return 3
    header = report.header
    if report.kind == "bare":
        return 1
    if _FATAL_HEADER.search(header):
        return 3
    if _HARMLESS_HEADER.search(header) or report.prefix.level in ("DEBUG", "INFO", "WARNING"):
        return 0
    if report.prefix.level in ("ERROR", "CRITICAL") and report.prefix.tag:
        return 3 if process.role in ("worker", "engine_core") else 2
    return 2


_NORMAL_AFTER = re.compile(
    r"^(?:Prefill|Decode) batch|^Load weight|KV Cache is allocated|Memory pool end|^Capture |Uvicorn running|fired up and ready|^INFO:|\"(?:GET|POST) /|Init (?:torch|parallel)|Engine \d+: Avg"
)


def _normal_work(process: Process) -> list[int]:
    """Where the process logged that it went on with its work."""
    return [
        line.index
        for line in process.lines
        if _NORMAL_AFTER.search(line.text[:200])
        or (line.prefix is not None and line.prefix.level == "INFO" and line.prefix.origin)
    ]


def _survived(report: Report, process: Process, work: Sequence[int]) -> bool:
    """The same process went on with its work: what it logged was not its death."""
    later = len(work) - bisect.bisect_right(work, report.last)
    return later >= 2 or (later >= 1 and process.role == "scheduler")


def _read_failures(analysis: Analysis) -> None:
    by_pid: dict[int, Process] = {}
    for process in analysis.processes.values():
        by_pid.setdefault(process.pid, process)
    for process in list(analysis.processes.values()):  # a dead child that said nothing is added on the way
        work = _normal_work(process) if process.reports else []
        for report in process.reports:
            strength = _strength(report, process, analysis)
            if strength in (1, 2) and _survived(report, process, work):
                strength = 0
            if not strength:
                continue
            native = report.kind in ("faulthandler", "abort", "signal", "terminate")
            text = " | ".join(link.text for link in report.links) if report.links else report.description
            collateral = bool(report.links) and all(
                _COLLATERAL.search(link.text[:2000]) for link in report.links if link.type
            )
            if collateral and not any(link.type for link in report.links):
                collateral = False
            process.failures.append(
                Failure(
                    report.first,
                    process.pid,
                    "native" if native else "exception",
                    strength,
                    collateral,
                    report,
                    report.signal,
                    None,
                    text[:2000],
                    report.stamp,
                )
            )
        for line in process.lines:
            _line_failure(analysis, process, line, by_pid)
    _kernel_failures(analysis, by_pid)
    for record in analysis.coredumps:
        entry = record.entry
        pid = journal.number(entry, "COREDUMP_PID")
        signal = journal.first(entry, "COREDUMP_SIGNAL_NAME") or tracebacks.SIGNAL_NAMES.get(
            journal.number(entry, "COREDUMP_SIGNAL") or 0, ""
        )
        match = re.search(r"Process (\d+) \(([^)]*)\) of user \d+ dumped core", record.text)
        if pid is None and match:
            pid = int(match.group(1))
        if pid is None:
            continue
        if not signal:
            found = re.search(r"terminated abnormally with signal (\d+)/", record.text)
            signal = (
                tracebacks.SIGNAL_NAMES.get(int(found.group(1)), "")
                if found
                else "SIGABRT"
                if "abort" in record.text
                else "SIGSEGV"
            )
        owner = by_pid.get(pid)
        comm = journal.first(entry, "COREDUMP_COMM") or (match.group(2) if match else "")
        if owner is None:
            owner = _unknown_process(analysis, pid, comm, record.index)
            by_pid[pid] = owner
        # systemd-coredump writes after the dump is on disk: the death came before.
        index = float(owner.last_index) + 0.4 if owner.lines else record.index - 0.4
        owner.failures.append(
            Failure(
                min(index, record.index), pid, "native", 3, False, None, signal, None, record.text[:4000], record.stamp
            )
        )
    _main_death(analysis, by_pid)
    for process in analysis.processes.values():
        for failure in process.failures:
            failure.owner = process
        analysis.failures += process.failures
    analysis.failures.sort(key=lambda failure: failure.index)


def _main_death(analysis: Analysis, by_pid: dict[int, Process]) -> None:
    """The main process itself died of a signal that nobody in the unit sent: what PID 1 says is all there is."""
    if analysis.exit_code not in ("killed", "dumped") or analysis.exit_status is None or analysis.exit_index is None:
        return
    signal = tracebacks.SIGNAL_NAMES.get(analysis.exit_status, "")
    by_systemd = analysis.start_timeout or analysis.systemd_watchdog
    by_itself = bool(analysis.sigquits) or analysis.self_kill or analysis.sigterm_index is not None
    if not signal or by_systemd or (signal == "SIGKILL" and by_itself) or signal in ("SIGTERM", "SIGINT", "SIGHUP"):
        return
    if analysis.stop_index is not None and analysis.stop_index < analysis.exit_index:
        return  # killed after its time to stop had run out
    owner = by_pid.get(analysis.main) if analysis.main is not None else None
    if owner is None:
        return
    if any(failure.kind in ("exception", "native") or failure.oom for failure in owner.failures):
        return
    record = analysis.by_index.get(analysis.exit_index)
    kind = "native" if signal in tracebacks.NATIVE_SIGNALS else "killed"
    owner.failures.append(
        Failure(
            analysis.exit_index - 0.2,
            owner.pid,
            kind,
            3 if kind == "native" else 2,
            False,
            None,
            signal,
            None,
            record.text if record is not None else "",
            record.stamp if record is not None else None,
        )
    )


def _unknown_process(analysis: Analysis, pid: int, comm: str, index: int) -> Process:
    process = Process(pid=pid, first_index=index, last_index=index, comm=comm)
    process.role = (
        "scheduler"
        if comm.startswith("sglang::sched")
        else "detokenizer"
        if comm.startswith("sglang::detok")
        else "child"
    )
    analysis.processes[("dead", pid)] = process
    return process


#: One look for all that `_line_failure` knows.
_TELLING = re.compile(
    r"crashed with exit code|scheduler (?:died|is dead)|atchdog timeout|ProcessGroupNCCL|HeartbeatMonitor|[Ss]igquit|SIGQUIT|SIG(?:TERM|INT)|Gracefully"
    r"|Health check failed|fired up and ready|batch|throughput|kill_process_tree"
)


def _line_failure(analysis: Analysis, process: Process, line: Line, by_pid: dict[int, Process]) -> None:
    text = line.text[:600]
    if not _TELLING.search(text):
        return
    match = _CHILD_CRASHED.search(text)
    if match:
        pid, code = int(match.group("pid")), int(match.group("code"))
        victim = by_pid.get(pid)
        if victim is None:
            victim = by_pid[pid] = _unknown_process(analysis, pid, "", line.index)
            victim.role = match.group("name").split("_")[0]
        _child_death(victim, code, line)
        return
    match = _RANK_DIED.search(text) or _RANK_DEAD.search(text)
    if match:
        code_text = match.groupdict().get("code")
        told = int(code_text) if code_text is not None else _following_exit_code(process, line)
        victim = _rank_process(analysis, int(match.group("rank")))
        if victim is not None:
            _child_death(victim, told, line)
        elif told is not None and told < 0:
            process.failures.append(
                Failure(
                    line.index,
                    None,
                    "killed",
                    2,
                    False,
                    None,
                    tracebacks.SIGNAL_NAMES.get(-told, ""),
                    told,
                    text,
                    line.stamp,
                )
            )
        return
    match = _WATCHDOG.search(text)
    if match and "soft=True" not in match.group("rest"):
        process.failures.append(
            Failure(line.index, process.pid, "watchdog", 3, False, None, "", None, text, line.stamp)
        )
    elif _NCCL_EVENT.search(text):
        process.failures.append(Failure(line.index, process.pid, "line", 2, False, None, "", None, text, line.stamp))
        found = re.search(r"\[(rank\d+)\]", text)
        if found and not process.rank:
            process.rank = found.group(1)
    elif _SIGQUIT.search(text):
        analysis.sigquits.append(line.index)
    elif _SIGTERM.search(text):
        if analysis.sigterm_index is None:
            analysis.sigterm_index = line.index
    elif _HEALTH_FAILED.search(text):
        analysis.health_failed.append(line.index)
    elif "fired up and ready" in text:
        analysis.ready_index = line.index if analysis.ready_index is None else analysis.ready_index
    elif _BATCH.search(text):
        analysis.last_batch = max(analysis.last_batch or 0, line.index)
    match = _SELF_KILL.search(text)
    if match and match.group("include") == "True" and match.group("parent") == match.group("pid"):
        analysis.self_kill = True


def _following_exit_code(process: Process, line: Line) -> int | None:
    """Before 0.5.10 the exit code stood in a line of its own."""
    at = bisect.bisect_left([other.index for other in process.lines[-4000:]], line.index)
    for other in process.lines[-4000:][at : at + 20]:
        match = _EXIT_CODE_LINE.match(other.text)
        if match:
            return int(match.group("code"))
    return None


def _rank_process(analysis: Analysis, number: int) -> Process | None:
    schedulers = [process for process in analysis.processes.values() if process.role == "scheduler"]
    for process in schedulers:
        ranks = dict(re.findall(r"(TP|PP)(\d+)", process.rank))
        if ranks.get("TP") == str(number) and "PP" not in ranks:
            return process
        if "TP" not in ranks and ranks.get("PP") == str(number):
            return process
    return schedulers[0] if len(schedulers) == 1 and number == 0 and not schedulers[0].rank else None


def _child_death(victim: Process, code: int | None, line: Line) -> None:
    """What the parent says about a dead child; the child's own words are better where there are any."""
    signal = tracebacks.SIGNAL_NAMES.get(-code, "") if code is not None and code < 0 else ""
    kind = "native" if signal in tracebacks.NATIVE_SIGNALS else "killed" if signal else "exit"
    if any(failure.kind in ("exception", "native") for failure in victim.failures) and kind != "native":
        return
    victim.failures.append(
        Failure(line.index - 0.3, victim.pid, kind, 2, False, None, signal, code, line.text[:400], line.stamp)
    )


def _kernel_failures(analysis: Analysis, by_pid: dict[int, Process]) -> None:
    name = analysis.unit
    limited: dict[int, bool] = {}
    ours: set[int] = set()
    for record in analysis.kernel:
        match = _KERNEL_OOM_DETAIL.search(record.text[:2000])
        if match:
            pid = int(match.group("pid"))
            in_unit = bool(name) and f"/{name}" in (match.group("task") or "")
            limited[pid] = "MEMCG" in match.group("constraint")
            if in_unit or pid in by_pid:
                ours.add(pid)
            elif name and match.group("task"):
                ours.discard(pid)
    for record in analysis.kernel:
        text = record.text[:2000]
        index = _place(analysis, record)
        match = _KERNEL_OOM.search(text)
        if match:
            pid = int(match.group("pid"))
            by_limit = limited.get(pid, match.group("memcg").startswith("Memory cgroup"))
            if pid in ours or pid in by_pid:
                analysis.oom_pids[pid] = by_limit
                owner = by_pid.get(pid)
                if owner is None:
                    owner = by_pid[pid] = _unknown_process(analysis, pid, match.group("comm"), int(index))
                owner.failures.append(
                    Failure(index, pid, "killed", 3, False, None, "SIGKILL", -9, text[:500], record.stamp, oom=True)
                )
            continue
        match = _XID.search(text)
        if match:
            pid_text = match.group("pid") or ""
            xid: dict[str, Any] = {"code": int(match.group("code")), "pid": int(pid_text) if pid_text.isdigit() else None, "gpu": match.group("gpu").replace("PCI:", ""),
                                   "text": text[:300], "stamp": record.stamp, "index": index}  # fmt: skip
            if xid["pid"] is None or xid["pid"] in by_pid or _ours_by_name(match.group("name") or "", by_pid):
                analysis.xids.append(xid)
            continue
        if _FABRIC_OOM.search(text):
            analysis.fabric_oom += 1
            continue
        match = _SEGFAULT.search(text)
        if match:
            pid = int(match.group("pid"))
            comm = match.group("comm").strip().split("] ")[-1]
            owner = by_pid.get(pid)
            fault = {
                "pid": pid,
                "comm": comm,
                "module": match.group("module"),
                "what": match.group("what"),
                "text": text[:300],
            }
            if owner is None and not _dies_then(analysis, index, comm):
                continue
            analysis.segfaults.append(fault)
            if owner is not None:
                signal = (
                    "SIGILL"
                    if "opcode" in match.group("what")
                    else "SIGFPE"
                    if "divide" in match.group("what")
                    else "SIGTRAP"
                    if "int3" in match.group("what")
                    else "SIGSEGV"
                )
                owner.failures.append(
                    Failure(index, pid, "native", 3, False, None, signal, None, text[:500], record.stamp)
                )


def _ours_by_name(name: str, by_pid: dict[int, Process]) -> bool:
    # Process ids in a container differ from the kernel's; the title is unmistakable.
    return (
        name.startswith("sglang::")
        and any(
            process.comm.startswith("sglang::") or process.title.startswith("sglang::") for process in by_pid.values()
        )
        and not any(process.pid > 400 for process in by_pid.values())
    )


def _dies_then(analysis: Analysis, index: float, comm: str) -> bool:
    """The kernel names threads by their own id: accept one when a process of ours died natively at the same time."""
    if not comm.startswith(("sglang", "python", "pt_", "nccl", "cuda", "vllm")):
        return False
    for process in analysis.processes.values():
        for failure in process.failures:
            if failure.kind == "native" and abs(failure.index - index) < 200:
                return True
    return False


def _place(analysis: Analysis, record: Record) -> float:
    """Where a kernel line stands among the unit's entries: by time."""
    if record.stamp is None:
        return float(record.index)
    low, high = 0, len(analysis.records)
    stamps = analysis.records
    while low < high:
        middle = (low + high) // 2
        moment = stamps[middle].stamp
        if moment is not None and moment > record.stamp:
            high = middle
        else:
            low = middle + 1
    return stamps[low - 1].index + 0.5 if low else (stamps[0].index - 0.5 if stamps else float(record.index))


# --------------------------------------------------------------------------------------------- step 5: who was first


def _fatal(analysis: Analysis, stop: float | None) -> list[Failure]:
    """Failures that count, oldest first: those before an orderly stop, strong ones before weak ones."""
    before = [failure for failure in analysis.failures if stop is None or failure.index < stop]
    strong = [failure for failure in before if failure.strength >= 2]
    return strong or [failure for failure in before if failure.strength == 1]


def _first(failures: Sequence[Failure]) -> Failure | None:
    """The earliest failure that is no consequence of another; the parent's words count only where the child is silent."""
    own = [failure for failure in failures if not failure.collateral]
    if own:
        return min(own, key=lambda failure: failure.index)
    return failures[0] if failures else None


def _best_report(process: Process | None, failure: Failure) -> Report | None:
    """The report that carries the exception of the first failing process."""
    if (
        failure.report is not None
        and failure.report.links
        and any(link.type or link.frames for link in failure.report.links)
    ):
        return failure.report
    if process is None or failure.kind == "watchdog":
        return failure.report
    for other in process.failures:
        if (
            other.report is not None
            and other.report.links
            and abs(other.index - failure.index) < 5000
            and other.strength >= 2
        ):
            if failure.kind == "native" and other.kind == "exception" and other.collateral:
                continue
            return other.report
    return failure.report


def _repair(analysis: Analysis, report: Report) -> None:
    """Blanks lost at a cut are put back from another rank's copy of the same message; a lost type or frames too."""
    others = [
        other
        for process in analysis.processes.values()
        for other in process.reports
        if other is not report and other.kind == report.kind
    ]
    for position, link in enumerate(report.links):
        key = re.sub(r"\s+", "", link.message)
        for other in others:
            if position < len(other.links):
                twin = other.links[position]
                if (
                    twin.type == link.type
                    and len(twin.message) > len(link.message)
                    and re.sub(r"\s+", "", twin.message) == key
                ):
                    link.message = twin.message
                for mine, its in zip(link.frames, twin.frames):
                    if (
                        mine.line == its.line
                        and mine.function != its.function
                        and mine.function.replace(" ", "") == its.function.replace(" ", "")
                    ):
                        mine.function = its.function


# --------------------------------------------------------------------------------------------- phase


def _phase(analysis: Analysis, failure: Failure | None, process: Process | None, report: Report | None) -> str:
    limit = failure.index if failure is not None else float("inf")
    if failure is None and analysis.health_failed and _stuck_before(analysis, None):
        limit = analysis.health_failed[0]  # it hung there; what came after is somebody's answer to that
    if analysis.start_timeout_index is not None:
        limit = min(limit, analysis.start_timeout_index)  # what it did when its time was up, not how it was ended
    best = {"own": 0, "all": 0, "main": 0}
    batch_seen = False
    for candidate in analysis.processes.values():
        for line in candidate.lines:
            if line.index > limit:
                break
            text = line.text[:400]
            phase = _line_phase(text, analysis)
            if phase:
                order = _ORDER[phase]
                best["all"] = max(best["all"], order)
                if candidate is process:
                    best["own"] = max(best["own"], order)
                if candidate.pid == analysis.main:
                    best["main"] = max(best["main"], order)
            elif _BATCH.search(text):
                batch_seen = True
    reached = max(best["own"], best["main"] if best["main"] >= _ORDER["warmup"] else 0)
    if reached == 0 or process is None or process.role not in ("scheduler", "worker", "engine_core"):
        reached = max(reached, best["all"])
    if analysis.stop_index is not None and limit > analysis.stop_index:
        return "stopping"
    if analysis.sigterm_index is not None and limit > analysis.sigterm_index:
        return "stopping"
    if batch_seen and reached < _ORDER["warmup"]:
        reached = _ORDER["warmup"] if analysis.head_visible else _ORDER["serving"]
    if report is not None and report.links:
        frames = tracebacks.frames_text([frame for link in report.links for frame in link.frames])
        for name, pattern in _PHASE_FRAMES:
            if pattern.search(frames):
                if name == "running":
                    if reached < _ORDER["warmup"]:
                        reached = _ORDER["warmup"] if analysis.head_visible or reached > 0 else _ORDER["serving"]
                    return PHASES[reached]
                return name
    return PHASES[reached]


_ANY_PHASE = re.compile("|".join(f"(?:{pattern.pattern})" for _phase_name, pattern in _PHASE_MARKS))


# One of these words is in every line that `_PHASE_MARKS` knows: a plain look is much faster than the patterns.
_PHASE_WORDS = ("fired up", "tart", "Uvicorn", "aptur", "oad", "Cache", "KV", "Memory pool", "max_total_num", "larger than", "Init", "world", "init_dist", "nccl", "parallel")


def _line_phase(text: str, analysis: Analysis) -> str:
    if not any(word in text for word in _PHASE_WORDS) or not _ANY_PHASE.search(text):
        return ""
    for phase, pattern in _PHASE_MARKS:
        if pattern.search(text):
            if phase == "warmup" and analysis.engine_name == "vllm" and _VLLM_SERVING.search(text):
                return "serving"
            return phase
    return ""


# --------------------------------------------------------------------------------------------- step 6: the cause


@dataclass
class Case:
    """What the rows of the cause table look at."""

    links: list[Link]
    phase: str
    facts: dict[str, Any]
    native: str = ""
    lines: list[str] = field(default_factory=list)


def _match(row: causes.Row, case: Case) -> bool:
    if row.phases and case.phase not in row.phases:
        return False
    for name, wanted in row.when.items():
        have = case.facts.get(name)
        if name == "nearest_engine_frame":
            if not have or not causes.search(wanted, str(have)):
                return False
        elif name.endswith("_above"):
            if have is None or have <= wanted:
                return False
        elif have != wanted:
            return False
    if row.scope == "native":
        return causes.search(row.pattern, case.native) and not (row.unless and causes.search(row.unless, case.native))
    if row.scope == "line":
        return any(
            causes.search(row.pattern, line) and not (row.unless and causes.search(row.unless, line))
            for line in case.lines
        )
    every_frame = tracebacks.frames_text([frame for link in case.links for frame in link.frames])
    if row.frames and not causes.search(row.frames, every_frame):
        return False
    if row.unless_frames and causes.search(row.unless_frames, every_frame):
        return False
    for link in case.links[:8] + case.links[8:][-4:]:
        text = _head_and_tail(link.text)
        if row.type and not causes.search(row.type, link.type):
            continue
        if row.pattern and not causes.search(row.pattern, text):
            continue
        if row.unless and causes.search(row.unless, text):
            continue
        if row.raised_in and not causes.search(row.raised_in, tracebacks.frames_text(link.frames[-1:])):
            continue
        return True
    return False


def _head_and_tail(text: str) -> str:
    """A message may be a compiler's whole output: what it begins and what it ends with tells the cause."""
    return text if len(text) <= 12_000 else text[:8000] + "\n" + text[-4000:]


def _engine_frame(frames: Sequence[Frame]) -> str:
    """The innermost frame that is the engine's own code, as file:function."""
    for frame in reversed(frames):
        if re.search(r"/(?:sglang|vllm|sgl_kernel|specforge|SpecForge)/", frame.file) or not re.search(
            r"site-packages|dist-packages|/lib/python|/torch/|^<", frame.file
        ):
            return f"{frame.file}:{frame.function}"
    return ""


_OTHER_PROCESS = re.compile(r"Process (\d+) has ([\d.]+) ([GM])iB memory in use")
_THIS_PROCESS = re.compile(r"this process has ([\d.]+) ([GM])iB memory in use")
_CAPACITY = re.compile(r"total capac(?:ity|ty) of ([\d.]+) ([GM])iB")


def _others_hold_most(text: str, pids: set[int]) -> bool:
    """torch's out-of-memory message lists the processes on the GPU; a neighbour that holds half of it is the reason."""

    def size(value: str, unit: str) -> float:
        return float(value) * (1024 if unit == "G" else 1)

    others = sum(size(value, unit) for pid, value, unit in _OTHER_PROCESS.findall(text) if int(pid) not in pids)
    total = _CAPACITY.search(text)
    if not others or not total:
        return False
    return others > size(*total.groups()) / 2


#: Lines that name an error which was dealt with.
_UNIMPORTANT = re.compile(r"Warning: |^\s|NCCL INFO|[Ii]gnor(?:e|ing|ed)\b|[Ff]all(?:s|ing)? ?back|[Rr]etry|[Ss]kipp?(?:ed|ing)?\b")


def _window(
    analysis: Analysis, failure: Failure | None, process: Process | None, user: Sequence[causes.Row]
) -> list[str]:
    """Lines for the rows of scope `line`: the failing process and its parent, around the failure."""
    centre = (
        failure.index
        if failure is not None
        else (analysis.exit_index or (analysis.records[-1].index if analysis.records else 0))
    )
    out = []
    for candidate in analysis.processes.values():
        near = (
            candidate is process or candidate.pid == analysis.main or candidate.role in ("main", "child", "api_server")
        )
        before, behind = (1000, 400) if near else (300, 200)
        for line in candidate.lines:
            if (
                -before <= line.index - centre <= behind
                and causes.line_matters(line.text[:2000], user)
                and not tracebacks.is_progress(line.text)
                and not _UNIMPORTANT.search(line.text[:200])
            ):
                out.append(line.text[:2000])
    return out


def _cause(
    analysis: Analysis,
    verdict: str,
    failure: Failure | None,
    process: Process | None,
    report: Report | None,
    phase: str,
    rows: Sequence[causes.Row],
) -> str:
    links = [link for link in (report.links if report is not None else []) if link.type or link.frames]
    everything = "\n".join(link.text for link in links)
    pids = {item.pid for item in analysis.processes.values()}
    innermost = links[0].frames if links else (report.frames[::-1] if report is not None else [])
    last_line = process.lines[-1] if process is not None and process.lines else None
    faulting = {
        item.pid
        for item in analysis.failures
        if item.report is not None and "Memory access fault" in item.report.description
    }
    facts: dict[str, Any] = {
        "drafter": analysis.drafter(),
        "graphs": analysis.graphs(),
        "graphs_off": analysis.graphs() is False,
        "ep_above": analysis.ep(),
        "has_exception": bool(links),
        "others_hold_most": _others_hold_most(everything, pids),
        "warmup_error": any(
            _WARMUP_ERROR.search(item.report.header) for item in analysis.failures if item.report is not None
        ),
        "nearest_engine_frame": _engine_frame(innermost),
        "faulting_processes_above": max(len(faulting), _fault_lines(analysis)),
        "served_nothing_yet": phase in ("warmup", "graph_capture") or not _served(analysis, failure),
        "last_of_process": bool(last_line and re.search(r"host memory for hierarchical", last_line.text)),
    }
    native = _native_text(analysis, failure, process)
    case = Case([link for link in links if link.type], phase, facts, native)

    hardware = _hardware(analysis, failure)
    if hardware:
        return hardware
    killed = _memory_kill(analysis, failure, case)
    if killed:
        return killed
    if analysis.spawn_error or analysis.spawn_status in (200, 203, 217, 226, 243):
        return _spawn_cause(analysis)
    own = [row for row in rows if row.scope == "exception"]
    if failure is None or failure.kind not in ("watchdog",):
        for row in [*own, *causes.ROWS]:
            if case.links and _match(row, case):
                if row.cause == "unsupported_flag_combination" and failure is not None and failure.kind == "native":
                    continue
                return row.cause
    application = [
        xid for xid in analysis.xids if causes.xid_kind(xid["code"]) == "application" and xid["pid"] is not None
    ]
    if native and failure is not None and (failure.kind == "native" or failure.signal in tracebacks.NATIVE_SIGNALS):
        for row in [*(row for row in rows if row.scope == "native"), *causes.NATIVE_ROWS]:
            if _match(row, case):
                if row.cause in ("native_segfault", "native_abort"):
                    case.lines = _window(analysis, failure, process, rows)
                    special = _line_cause(case, rows)
                    if special:
                        return special
                    if application:
                        return "gpu_xid_application_fault"
                return row.cause
    if application and failure is not None:
        return "gpu_xid_application_fault"
    if failure is not None and failure.kind == "watchdog":
        return "scheduler_watchdog_timeout"
    if verdict == "startup_timeout":
        return "start_timeout"
    # Who was killed from outside was not killed by what others printed.
    killed_by_others = failure is not None and failure.kind == "killed"
    case.lines = [] if killed_by_others and not case.facts["last_of_process"] else _window(analysis, failure, process, rows)
    found = _line_cause(case, rows)
    if found:
        return found
    if analysis.engine_name == "vllm" and failure is not None and (failure.collateral or failure.report is None):
        return "engine_core_failed"
    if verdict == "hung":
        return "scheduler_hang"
    if verdict == "running_but_dead" and not case.links:
        return "running_but_dead"
    if (
        len(analysis.health_failed) >= 3
        and failure is not None
        and all(index < failure.index for index in analysis.health_failed[:3])
    ):
        return "health_probe_overload"
    return "unknown"


def _line_cause(case: Case, rows: Sequence[causes.Row]) -> str:
    for row in [*(row for row in rows if row.scope == "line"), *causes.LINE_ROWS]:
        if _match(row, case):
            return row.cause
    return ""


def _fault_lines(analysis: Analysis) -> int:
    nodes = set()
    for process in analysis.processes.values():
        for line in process.lines:
            match = re.match(r"Memory access fault by GPU node-(\d+)", line.text)
            if match:
                nodes.add(match.group(1))
    return len(nodes)


def _served(analysis: Analysis, failure: Failure | None) -> bool:
    limit = failure.index if failure is not None else float("inf")
    return analysis.last_batch is not None and analysis.last_batch < limit


def _native_text(analysis: Analysis, failure: Failure | None, process: Process | None) -> str:
    """What is known about a native death, as one text: signal, frames, modules, the core's stack."""
    if failure is None:
        return ""
    parts = []
    related = [
        item for item in (process.failures if process is not None else [failure]) if item.kind in ("native", "line")
    ]
    signals = [item.signal for item in ([failure, *related]) if item.signal]
    if not signals:
        return ""
    parts.append(signals[0])
    for item in related:
        parts.append(item.detail)
        if item.report is not None:
            parts.append(item.report.description)
            parts.append(tracebacks.frames_text(item.report.frames[:8]))
            parts += [link.text for link in item.report.links]
    parts += [
        f"{fault['comm']} {fault['module'] or ''}"
        for fault in analysis.segfaults
        if process is None or fault["pid"] == process.pid or len(analysis.segfaults) == 1
    ]
    if process is not None:
        parts += [
            line.text
            for line in process.lines[-60:]
            if not re.search(r"NCCL INFO|Extension modules|^\s+File|Warning: ", line.text[:200])
        ]
    return "\n".join(parts)[:40_000]


def _hardware(analysis: Analysis, failure: Failure | None) -> str:
    """A hardware Xid in the run beats whatever the programs printed after it."""
    limit = failure.index + 400 if failure is not None else float("inf")
    kinds = {causes.xid_kind(xid["code"]) for xid in analysis.xids if xid["index"] <= limit}
    if "fallen_off" in kinds:
        return "gpu_fallen_off_bus"
    return "gpu_xid_hardware" if "hardware" in kinds else ""


def _memory_kill(analysis: Analysis, failure: Failure | None, case: Case) -> str:
    if analysis.fabric_oom >= 3 and (analysis.cut_off or not analysis.ended) and not analysis.oom_pids:
        return "unified_memory_exhausted"
    first_by_exception = (
        failure is not None and failure.kind == "exception" and not failure.collateral and failure.strength >= 2
    )
    if first_by_exception and not (failure is not None and failure.pid in analysis.oom_pids):
        return ""
    if analysis.oom_pids or analysis.unit_oom or analysis.oomd or analysis.result == "oom-kill":
        if case.facts["last_of_process"]:
            return "hicache_host_memory"
        by_limit = list(analysis.oom_pids.values())
        if by_limit:
            return "host_memory_limit" if all(by_limit) else "host_oom_killer"
        limit = str(analysis.effect.get("__memory_max") or "")
        return (
            "host_memory_limit" if limit and limit not in ("infinity", "0") and not analysis.oomd else "host_oom_killer"
        )
    return ""


def _spawn_cause(analysis: Analysis) -> str:
    text = analysis.spawn_error
    if re.search(r"Permission denied|Operation not permitted|Read-only file system", text):
        return "permission_denied"
    if analysis.spawn_status == 203 or "step EXEC" in text or "locate executable" in text:
        return (
            "executable_missing"
            if not text or re.search(r"No such file|not found|Not a directory|locate executable", text)
            else "unknown"
        )
    return "unknown"


# --------------------------------------------------------------------------------------------- step 7: the verdict


def _verdict(analysis: Analysis, fatal: Sequence[Failure], first: Failure | None) -> str:
    if not analysis.records:
        return "no_evidence"
    stop = analysis.stop_index if analysis.stop_index is not None else analysis.sigterm_index
    certain = [failure for failure in fatal if failure.strength >= 2]
    if analysis.start_timeout:
        return "startup_timeout"
    if analysis.systemd_watchdog:
        return "hung"
    if first is not None and first.kind == "watchdog":
        return "hung"
    if stop is not None:
        if certain and first is not None and first.index < stop:
            return "running_but_dead" if _lived_on(analysis, first, stop) else "crashed"
        if _stuck_before(analysis, stop):
            return "hung"
        return "stopped_by_operator"
    if analysis.ended:
        clean = analysis.result == "success" or (analysis.exit_code == "exited" and analysis.exit_status == 0)
        if clean:
            # A load that is stopped before the engine handles signals says nothing at all.
            return "stopped_by_operator" if analysis.stopped_by_job and not certain else "crashed_exit_zero"
        return "crashed"
    if analysis.cut_off:
        return "crashed"
    if certain and first is not None:
        if analysis.sigquits or analysis.self_kill:
            # It is about to end itself; where it tries for long it does not succeed (a container's PID 1).
            tries = [index for index in analysis.sigquits if index > first.index]
            return "running_but_dead" if len(tries) >= 4 and _seconds(analysis, tries[0], tries[-1]) >= 2 else "crashed"
        return "running_but_dead"
    if _stuck_before(analysis, None):
        return "hung"
    if _silent_death(analysis):
        return "running_but_dead"
    if fatal and analysis.ready_index is None and not analysis.service:
        return "crashed"
    if (
        analysis.ready_index is not None
        or analysis.last_batch is not None
        or any(_READY.search(record.text[:300]) for record in analysis.service)
    ):
        return "running"
    if not analysis.service and not analysis.systemd:
        return "no_evidence"
    return "starting"


def _seconds(analysis: Analysis, begin: float, end: float) -> float:
    first, last = analysis.by_index.get(int(begin)), analysis.by_index.get(int(end))
    if first is None or last is None or first.stamp is None or last.stamp is None:
        return 0.0
    return (last.stamp - first.stamp) / SECOND


def _lived_on(analysis: Analysis, first: Failure, stop: int) -> bool:
    """The parent went on answering after the failure and had to be stopped."""
    if any(first.index < index < stop for index in analysis.sigquits):
        return False
    return _seconds(analysis, first.index, stop) >= 10 or any(
        first.index < record.index < stop and _HTTP.search(record.text) for record in analysis.service
    )


def _stuck_before(analysis: Analysis, stop: int | None) -> bool:
    """The engine's own health check failed and no batch was worked on after it."""
    failed = [index for index in analysis.health_failed if stop is None or index < stop]
    if not failed:
        return False
    return analysis.last_batch is None or analysis.last_batch < failed[-1]


def _silent_death(analysis: Analysis) -> bool:
    """Health answers 200 on and on, but the schedulers, who used to print a line for each probe, have fallen silent."""
    if analysis.last_batch is None:
        return False
    probes = [
        record
        for record in analysis.service
        if record.index > (analysis.last_batch or 0) and _HEALTH_OK.search(record.text)
    ]
    if len(probes) < 10 or probes[0].stamp is None or probes[-1].stamp is None:
        return False
    earlier = sum(
        1 for record in analysis.service if record.index < (analysis.last_batch or 0) and _HEALTH_OK.search(record.text)
    )
    return earlier >= 1 and probes[-1].stamp - probes[0].stamp >= 60 * SECOND


# --------------------------------------------------------------------------------------------- the result


def iso(stamp: int | None) -> str | None:
    """Microseconds since the epoch as ISO 8601 UTC with microseconds."""
    if stamp is None:
        return None
    try:
        moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc) + datetime.timedelta(microseconds=stamp)
    except OverflowError:
        return None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def empty_result(unit: str, invocation: str | None = None, version: str | None = None) -> dict[str, Any]:
    """Every key of the schema, for a unit about which nothing is known."""
    return {
        "verdict": "no_evidence",
        "cause": "none",
        "summary": "the journal holds nothing about this unit",
        "phase": "launch",
        "exception": None,
        "native_fault": None,
        "root_frame": None,
        "first_failure": None,
        "ranks_failed": [],
        "exit": None,
        "kernel": {"oom_killed": False, "xid": [], "segfault": []},
        "complete": False,
        "gaps": [],
        "remedies": [],
        "evidence": [],
        "unit": unit,
        "invocation_id": invocation,
        "engine": {"name": "sglang", "version": version},
    }


def diagnose(
    entries: Iterable[Mapping[str, Any]],
    unit: str,
    invocation_id: str | None = None,
    engine_version: str | None = None,
    in_effect: Mapping[str, Any] | None = None,
    kernel_entries: Iterable[Mapping[str, Any]] | None = None,
    *,
    gaps: Iterable[str] = (),
    extra_causes: Iterable[Mapping[str, Any]] = (),
    secrets: Iterable[str] = (),
    _nested: bool = False,
) -> dict[str, Any]:
    """The result of module journal_crash for one run of a unit.

    `in_effect` are the project's variables of that run (sglang_cuda_graph, ...): remedies among them are not offered again.
    `gaps` are known holes in the evidence, `extra_causes` the user's own rows, `secrets` values to redact besides the usual shapes.
    """
    unit = journal.unit_name(unit)
    user = causes.user_rows(extra_causes)
    effect = dict(in_effect or {})
    version = str(engine_version or effect.get("sglang_version") or "") or None
    if version:
        version = version.split("+")[0]
    evidence = (entry for entry in entries if entry.get("SYSLOG_IDENTIFIER") != own_log.IDENTIFIER)
    records = [_record(index, entry) for index, entry in enumerate(_ordered(evidence))]
    given = [_record(index, entry) for index, entry in enumerate(_ordered(kernel_entries or ()))]
    analysis = Analysis(unit, version, effect)
    analysis.gaps += [str(gap) for gap in gaps]
    _sort_out(
        analysis,
        records,
        (invocation_id or "").replace("-", ""),
        [record for record in given if record.kind == "kernel" or not record.pid],
    )
    if not unit:
        analysis.unit = unit = next(
            (journal.unit_of(record.entry) for record in analysis.records if journal.unit_of(record.entry)),
            "",
        )
    _read_systemd(analysis)
    _read_processes(analysis)
    _find_main(analysis)
    _read_arguments(analysis)
    _read_failures(analysis)
    if not analysis.records:
        result = empty_result(unit, analysis.invocation or invocation_id, analysis.version)
        result["gaps"] = [*analysis.gaps, "no entry of this unit was found"]
        return dict(redact_all(result, tuple(secrets)))

    stop: float | None = min(
        (index for index in (analysis.stop_index, analysis.sigterm_index) if index is not None), default=None
    )
    fatal = _fatal(analysis, stop)
    first = _first(fatal)
    verdict = _verdict(analysis, fatal, first)
    if verdict in ("running", "starting", "stopped_by_operator"):
        first = None
    elif first is not None and first.kind in ("watchdog", "line"):
        first = _behind_the_hang(analysis, first)
    process = first.owner if first is not None else None
    report = _best_report(process, first) if first is not None else None
    if report is not None:
        _repair(analysis, report)
    phase = _phase(analysis, first, process, report)
    if verdict == "stopped_by_operator":
        phase = "stopping"
    if verdict in ("running", "starting", "stopped_by_operator"):
        cause = _harmless_cause(analysis, verdict)
    else:
        cause = _cause(analysis, verdict, first, process, report, phase, user)
    if cause in OPPOSED and not _nested:
        analysis.earlier_causes = _earlier_causes(records, analysis, user)
    _find_gaps(analysis, report, first, verdict)
    result = _assemble(analysis, verdict, cause, phase, first, process, report, fatal)
    return dict(redact_all(result, tuple(secrets)))


def diagnose_collected(collected: journal.Collected, invocation_id: str | None = None, **options: Any) -> dict[str, Any]:
    """`diagnose` on what module journal has read, with its gaps and, where the cause asks for it, the run before.

    The one way from a journal to a finding: module journal_crash, sglang_wait and the reporter on a host all take it.
    """

    def look() -> dict[str, Any]:
        return diagnose(
            collected.entries,
            collected.unit,
            invocation_id=invocation_id or collected.invocation_id,
            kernel_entries=collected.kernel,
            gaps=collected.gaps,
            **options,
        )

    result = look()
    if result["cause"] in OPPOSED and journal.add_previous_run(collected):
        result = look()
    return result


def _behind_the_hang(analysis: Analysis, first: Failure) -> Failure:
    """Ranks that wait complain first; where the kernel names the process whose GPU failed before, that one was first."""
    for xid in analysis.xids:
        if xid["pid"] is None or xid["index"] > first.index or causes.xid_kind(xid["code"]) == "cleanup":
            continue
        owner = next((process for process in analysis.processes.values() if process.pid == xid["pid"]), None)
        if owner is not None:
            return Failure(xid["index"], owner.pid, first.kind, 3, False, None, "", None, xid["text"], xid["stamp"], owner=owner)
    return first


#: Causes whose remedies pull in opposite directions: what the run before died of decides which are left.
OPPOSED = frozenset({"kv_pool_too_small", "gpu_oom", "cuda_graph_capture_oom"})


def _earlier_causes(records: Sequence[Record], analysis: Analysis, user: Sequence[causes.Row]) -> list[str]:
    """What the runs just before died of, as far as their lines are here."""
    order: list[str] = []
    for record in records:
        mine = record.kind == "service" and _about(record, analysis.unit)
        if mine and record.invocation and record.invocation not in order:
            order.append(record.invocation)
    if analysis.invocation not in order:
        return []
    before = order[: order.index(analysis.invocation)][-2:]
    return [
        diagnose([record.entry for record in records if record.invocation == run], analysis.unit, run, _nested=True)[
            "cause"
        ]
        for run in before
    ]


def _harmless_cause(analysis: Analysis, verdict: str) -> str:
    if analysis.health_failed and analysis.last_batch is not None and analysis.last_batch > analysis.health_failed[0]:
        return "health_check_false_negative"
    return "none"


def _find_gaps(analysis: Analysis, report: Report | None, first: Failure | None, verdict: str) -> None:
    gaps = analysis.gaps
    dropped = 0
    for record in analysis.journald:
        count = journal.number(record.entry, "N_DROPPED")
        if count is None:
            match = re.search(r"Suppressed (\d+) messages", record.text)
            count = int(match.group(1)) if match else 0
        dropped += count
    if dropped:
        gaps.append(
            f"journald dropped {dropped} messages of this unit (rate limit); lines may be missing anywhere around them"
        )
    lost = sum(1 for record in analysis.service if record.lost)
    if lost:
        gaps.append(f"{lost} entries came without their text (fields of 4096 bytes and more are null without --all)")
    cut = [record for record in analysis.service if journal.first(record.entry, "_LINE_BREAK") == "line-max"]
    if cut:
        gaps.append(f"{len(cut)} lines were longer than journald keeps in one piece (48 KiB)")
    if report is not None and report.links:
        if any(not link.type for link in report.links):
            gaps.append("the exception line of the traceback is missing: its type and message are not known")
        if report.beginning_lost:
            gaps.append("the beginning of the traceback is missing")
        if report.kind == "bare" and not report.beginning_lost and verdict not in ("running", "starting"):
            gaps.append("the exception was found without its traceback")
    if analysis.cut_off:
        gaps.append("the journal holds no end of this run: the host was reset, froze or lost power")
    if (
        analysis.ended
        and not analysis.service
        and not analysis.spawn_error
        and analysis.spawn_status is None
        and not analysis.control_exit
    ):
        gaps.append("the journal holds no line of the unit's processes: rotated away, or logged elsewhere")
    elif (
        analysis.service
        and not analysis.start_seen
        and not analysis.head_visible
        and verdict in ("crashed", "crashed_exit_zero", "hung")
        and first is None
    ):
        gaps.append("the beginning of this run is not in the journal")


def _exit(analysis: Analysis) -> dict[str, Any] | None:
    if not analysis.ended and not analysis.exit_code:
        return None
    code, status = analysis.exit_code, analysis.exit_status
    if not code and analysis.result == "success":
        code, status = "exited", 0
    sigkill = code == "killed" and status == 9
    asked = bool(analysis.sigquits) or analysis.self_kill or analysis.sigterm_index is not None
    main_by_oom = analysis.main in analysis.oom_pids
    # systemd clears up after the main process too: only what it sent before, and to that process, counts.
    before = [record.text for record in analysis.systemd if analysis.exit_index is None or record.index < analysis.exit_index]
    by_systemd = any("timed out. Killing" in text or f"Killing process {analysis.main} " in text for text in before)
    return {
        "code": code or None,
        "status": status,
        "result": analysis.result or None,
        "self_inflicted": bool(sigkill and asked and not main_by_oom and not by_systemd),
    }


def _frame_dict(frame: Frame | None) -> dict[str, Any] | None:
    return frame.as_dict() if frame is not None else None


def _assemble(
    analysis: Analysis,
    verdict: str,
    cause: str,
    phase: str,
    first: Failure | None,
    process: Process | None,
    report: Report | None,
    fatal: Sequence[Failure],
) -> dict[str, Any]:
    result = empty_result(analysis.unit, analysis.invocation or None, analysis.version)
    result.update(verdict=verdict, cause=cause, phase=phase)
    root: Frame | None = None
    if report is not None and report.links:
        link = report.links[0]
        if link.type or link.frames:
            result["exception"] = {
                "type": link.type or None,
                "message": link.message if link.type else None,
                "chain": [
                    {"type": item.type or None, "message": item.message if item.type else None} for item in report.links
                ],
                "frames": [frame.as_dict() for frame in link.frames],
            }
            root = link.frames[-1] if link.frames else None
    native = _native_fault(analysis, first, process)
    result["native_fault"] = native
    if root is None and native is not None and process is not None:
        for item in process.failures:
            if item.report is not None and item.report.frames:
                root = item.report.frames[0]
                break
    result["root_frame"] = _frame_dict(root)
    if first is not None and verdict not in ("running", "starting", "stopped_by_operator", "no_evidence"):
        known = process is not None and process.pid >= 0 and first.pid is not None
        if known and process is not None and not (first.collateral and _ambiguous(analysis, fatal, process)):
            result["first_failure"] = {
                "rank": process.rank or None,
                "pid": process.pid,
                "process": process.role or "main",
                "at": iso(first.stamp if first.stamp is not None else _stamp_at(analysis, first.index)),
            }
        result["ranks_failed"] = _ranks(analysis, fatal)
    result["exit"] = _exit(analysis)
    result["kernel"] = {
        "oom_killed": bool(analysis.oom_pids or analysis.unit_oom or analysis.oomd),
        "xid": [{"code": xid["code"], "pid": xid["pid"], "gpu": xid["gpu"]} for xid in analysis.xids],
        "segfault": [
            {"pid": fault["pid"], "comm": fault["comm"], "module": fault["module"], "what": fault["what"]}
            for fault in analysis.segfaults
        ],
    }
    result["gaps"] = list(dict.fromkeys(analysis.gaps))
    result["complete"] = not result["gaps"]
    result["engine"] = {"name": analysis.engine_name, "version": analysis.version}
    result["remedies"] = remedies_for(
        cause,
        analysis.version if analysis.engine_name == "sglang" else None,
        _effect(analysis),
        _remedy_facts(analysis, phase),
    )
    result["evidence"] = _evidence(analysis, first, report, fatal)
    result["summary"] = _summary(analysis, result, first)
    return result


def _effect(analysis: Analysis) -> dict[str, Any]:
    """What was in effect in the failed run: what the caller knows, else what the engine's own arguments say."""
    args = analysis.args
    effect: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    if "server_args" in args:
        graphs = {"disabled": "disabled", "no_prefill": "prefill_disabled"}.get(analysis.graph_arguments())
        if graphs:
            effect["sglang_cuda_graph"] = graphs
        if args.get("speculative_algorithm", "").lower() in ("none", "null"):
            effect["sglang_drafter"] = "none"
        for name, variable in (("mem_fraction_static", "sglang_mem_fraction_static"), ("attention_backend", "sglang_attention_backend"), ("port", "sglang_port"),
                               ("ep_size", "sglang_ep_size"), ("context_length", "sglang_context_length"), ("max_running_requests", "sglang_max_running_requests")):  # fmt: skip
            value = args.get(name)
            if value and value.lower() not in ("none", "null"):
                effect[variable] = value
        for name in (
            "disable_custom_all_reduce",
            "disable_overlap_schedule",
            "disable_radix_cache",
            "enable_torch_compile",
        ):
            if args.get(name, "").lower() == "true":
                extra[name.replace("_", "-")] = True
        if args.get("trust_remote_code", "").lower() == "true":
            effect["sglang_trust_remote_code"] = True
    for name, value in analysis.effect.items():
        if name == "sglang_extra_args" and isinstance(value, Mapping):
            extra.update(value)
        elif value is not None and not name.startswith("__"):
            effect[name] = value
    if extra:
        effect["sglang_extra_args"] = extra
    if "sglang_version" not in effect and analysis.version and analysis.engine_name == "sglang":
        effect["sglang_version"] = analysis.version
    return effect


def _remedy_facts(analysis: Analysis, phase: str) -> dict[str, Any]:
    return {
        "drafter": analysis.drafter(),
        "ep": analysis.ep(),
        "phase": phase,
        "earlier_causes": analysis.earlier_causes,
    }


def _ambiguous(analysis: Analysis, fatal: Sequence[Failure], process: Process) -> bool:
    """Only consequences were printed: another process may have died in silence before."""
    schedulers = [item for item in analysis.processes.values() if item.role in ("scheduler", "worker")]
    return len(schedulers) != 1 or process.role not in ("scheduler", "worker")


def _ranks(analysis: Analysis, fatal: Sequence[Failure]) -> list[str]:
    seen: list[str] = []
    for failure in sorted(fatal, key=lambda failure: failure.index):
        owner = failure.owner
        if (
            owner is not None
            and owner.rank
            and owner.role in ("scheduler", "worker", "child")
            and owner.rank not in seen
        ):
            seen.append(owner.rank)
    return seen


def _native_fault(analysis: Analysis, first: Failure | None, process: Process | None) -> dict[str, Any] | None:
    if first is None:
        return None
    candidates = [
        item
        for item in (process.failures if process is not None else [first])
        if item.signal in tracebacks.NATIVE_SIGNALS
    ]
    if not candidates:
        return None
    own = [
        item
        for item in (process.failures if process is not None else [])
        if item.kind == "exception" and not item.collateral and item.strength >= 2
    ]
    if own and min(item.index for item in own) < min(item.index for item in candidates):
        return None  # it raised first and broke down while ending
    best = min(candidates, key=lambda item: item.index)
    description = (
        next(
            (item.report.description for item in candidates if item.report is not None and item.report.description), ""
        )
        or best.detail.split("\n")[0]
    )
    modules = [fault["module"] for fault in analysis.segfaults if fault["module"]]
    if modules and modules[0] not in description:
        description = f"{description} (in {modules[0]})"
    return {"signal": best.signal, "number": tracebacks.SIGNALS.get(best.signal, 0), "description": description[:500]}


def _stamp_at(analysis: Analysis, index: float) -> int | None:
    record = analysis.by_index.get(int(index))
    return record.stamp if record is not None else None


def _evidence(
    analysis: Analysis, first: Failure | None, report: Report | None, fatal: Sequence[Failure]
) -> list[dict[str, Any]]:
    """The few lines that carry the verdict."""
    wanted: list[int] = []
    if report is not None:
        wanted.append(report.first)
        span = [record.index for record in analysis.service if report.first <= record.index <= report.last]
        owner = analysis.by_index.get(report.first)
        mine = [index for index in span if owner is not None and analysis.by_index[index].pid == owner.pid]
        wanted += mine[-3:]
    elif first is not None:
        wanted.append(int(first.index))
    wanted += analysis.sigquits[:1] + analysis.health_failed[:1]
    for index in (analysis.stop_index, analysis.sigterm_index, analysis.exit_index, analysis.end_index):
        if index is not None:
            wanted.append(index)
    wanted += [
        record.index
        for record in analysis.systemd
        if "OOM killer" in record.text
        or "oomd" in record.text
        or "timed out" in record.text
        or record.text == analysis.spawn_error
    ][:3]
    wanted += [record.index for record in analysis.journald][:1]
    wanted += [int(failure.index) for failure in fatal if failure.report is None and failure.strength >= 2][:3]
    out: list[dict[str, Any]] = []
    for index in sorted(set(wanted)):
        record = analysis.by_index.get(index)
        if record is not None:
            out.append(_evidence_row(record))
    for record in analysis.kernel:
        if (
            _KERNEL_OOM.search(record.text)
            or _XID.search(record.text)
            or _SEGFAULT.search(record.text)
            or _FABRIC_OOM.search(record.text)
        ):
            if len(out) >= MAX_EVIDENCE + 4:
                break
            out.append(_evidence_row(record))
    out.sort(key=lambda row: row["at"] or "")
    return out[: MAX_EVIDENCE + 4]


def _evidence_row(record: Record) -> dict[str, Any]:
    lines = tracebacks.clean(record.text) or [""]
    return {
        "cursor": record.cursor,
        "at": iso(record.stamp),
        "pid": record.pid,
        "source": record.kind,
        "message": "\n".join(lines)[:MAX_EVIDENCE_CHARS],
    }


def _summary(analysis: Analysis, result: Mapping[str, Any], first: Failure | None) -> str:
    cause, verdict, phase = result["cause"], result["verdict"], result["phase"]
    engine = "SGLang" if analysis.engine_name == "sglang" else "vLLM"
    release = f"{engine} {analysis.version}" if analysis.version else engine
    if verdict == "no_evidence":
        return "the journal holds nothing about this unit"
    if verdict == "running":
        text = "the unit runs; nothing in its journal says that anything failed"
        return (
            text
            if cause == "none"
            else "the unit runs; its own health check failed while it was working on a batch (a long prefill delays the probe)"
        )
    if verdict == "starting":
        return f"the unit is still starting (phase {phase})"
    if verdict == "stopped_by_operator":
        extra = (
            " (this release ends even an orderly stop by SIGKILL on itself)"
            if (result["exit"] or {}).get("self_inflicted")
            else ""
        )
        return (
            f"the unit was stopped on request{extra}"
            if cause == "none"
            else f"the unit was stopped after its health check failed while it was working{extra}"
        )
    start = {
        "crashed": f"{release} failed in phase {phase}",
        "crashed_exit_zero": f"{release} ended by itself in phase {phase} with status 0",
        "hung": f"{release} hung in phase {phase}",
        "running_but_dead": f"{release} still answers but is dead since phase {phase}",
        "startup_timeout": f"systemd's start time-out ended {release} in phase {phase}",
    }[verdict]
    if cause == "cuda_graph_replay_failure" and analysis.drafter() and (analysis.ep() or 1) > 1:
        return f"{release} cannot replay CUDA graphs for DFLASH with expert parallelism (died in phase {phase})" + _advice(result)
    if cause == "unknown":
        exception = result["exception"]
        if exception and exception["type"]:
            first_line = (exception["message"] or "").split("\n")[0][:200]
            return f"{start}: {exception['type']}{': ' + first_line if first_line else ''} (no known cause fits)"
        if first is not None and first.kind == "killed":
            who = result["first_failure"]
            name = f"process {who['process']}{' ' + who['rank'] if who and who['rank'] else ''}" if who else "a process"
            return f"{start}: {name} was ended by {first.signal or 'a signal'} from outside; nothing in the journal says by whom (no out-of-memory kill is recorded)"
        if analysis.spawn_error:
            return f"{start}: {analysis.spawn_error.split(': ', 1)[-1][:200]}"
        if analysis.cut_off:
            return f"{release} was cut off in phase {phase}: the host was reset, froze or lost power"
        return f"{start}; the journal does not say why"
    detail = causes.CAUSES[cause].summary if cause in causes.CAUSES else cause
    return f"{start}: {detail}" + _advice(result)


_ADVICE = "; remedy: "


def _advice(result: Mapping[str, Any]) -> str:
    """The best remedy, so that the one sentence can be acted on."""
    for remedy in result["remedies"][:1]:
        setting = ", ".join(f"{name}: {_plain(value)}" for name, value in remedy["set"].items())
        return f"{_ADVICE}{setting or remedy['summary']}"
    return ""


# --------------------------------------------------------------------------------------------- for a person


def headline(result: Mapping[str, Any], host: str = "", seconds: float | None = None) -> str:
    """The text a person reads first: what died, the exception with the frames that matter, the cause, what to set."""
    unit = result.get("unit") or "the unit"
    prefix = f"{host}: " if host else ""
    verdict = result.get("verdict")
    when = f", {seconds:.0f} s after start" if seconds is not None else ""
    ended = {
        "crashed": f"died {_when(result)}",
        "crashed_exit_zero": f"ended by itself with status 0 {_when(result)}",
        "hung": f"hangs {_when(result)}",
        "running_but_dead": f"still answers but is dead {_when(result)}",
        "startup_timeout": f"was ended by the start time-out {_when(result)}",
    }
    if verdict not in ended:
        return f"{prefix}{unit}: {result.get('summary')}"
    lines = [f"{prefix}{unit} {ended[str(verdict)]}{when}{_who(result)}"]
    exception = result.get("exception")
    native = result.get("native_fault")
    if exception:
        kind, message = exception.get("type"), (exception.get("message") or "").split("\n")
        head = (
            f"{kind}: {message[0]}"
            if message[0]
            else str(kind or "an exception whose last line is missing from the journal")
        )
        lines.append(f"  {head[:400]}")
        lines += [f"    {row[:200]}" for row in message[1:4] if row.strip()]
        lines += _frame_rows(exception.get("frames") or [])
        for wrapper in (exception.get("chain") or [])[1:3]:
            first_line = (wrapper.get("message") or "").split("\n")[0][:160]
            lines.append(f"  then {wrapper.get('type')}{': ' + first_line if first_line else ''}")
    if native:
        lines.append(
            f"  {native.get('signal')}: {str(native.get('description') or '').splitlines()[0][:200] if native.get('description') else ''}".rstrip(
                ": "
            )
        )
        if not exception and result.get("root_frame"):
            lines += _frame_rows([result["root_frame"]])
    lines.append(f"  cause     {result.get('cause')}: {_cause_text(result)}")
    exit_status = result.get("exit") or {}
    if exit_status.get("self_inflicted"):
        name = "SGLang" if (result.get("engine") or {}).get("name") == "sglang" else "the engine"
        lines.append(f"            (status 9/KILL is {name} ending itself, not the OOM killer)")
    lines += _remedy_rows(result.get("remedies") or [])
    for gap in (result.get("gaps") or [])[:3]:
        lines.append(f"  missing   {gap}")
    return redact("\n".join(lines))


def answer_text(answer: Mapping[str, Any], host: str) -> str:
    """The same for what a wait has answered: its `unit`, `outcome`, `reason`, `seconds`, and `crash` where it has one."""
    crash = answer["crash"]
    why = answer["reason"] or answer["outcome"]
    if not crash:
        return redact(f"{host}: {answer['unit']} is not ready: {why}")
    text = headline(crash, host, answer["seconds"])
    if crash.get("verdict") in ("crashed", "crashed_exit_zero", "startup_timeout"):
        return text
    # The journal does not show these; what was seen stands first, what the journal adds follows.
    rows = [f"{host}: {answer['unit']}: {why}", *text.splitlines()[1:]]
    if len(rows) == 1:
        rows += [f"  cause     {crash.get('cause')}", *_remedy_rows(crash.get("remedies") or [])]
    return redact("\n".join(rows))


def _when(result: Mapping[str, Any]) -> str:
    phase = result.get("phase")
    return {
        "launch": "while launching", "dist_init": "while the ranks were connecting", "weights": "while loading weights", "kv_cache": "while allocating the KV pool",
        "graph_capture": "while capturing CUDA graphs", "warmup": "on its first batch", "serving": "while serving", "stopping": "while stopping",
    }.get(str(phase), "")  # fmt: skip


def _who(result: Mapping[str, Any]) -> str:
    first, ranks = result.get("first_failure") or {}, result.get("ranks_failed") or []
    rank = first.get("rank")
    if rank and len(ranks) > 1:
        return f"; {rank} first, then {'all' if len(ranks) >= 8 else 'in all'} {len(ranks)} ranks"
    if rank:
        return f"; {rank} first"
    process = first.get("process")
    return f" (process {process}, pid {first.get('pid')})" if process and process not in ("main",) else ""


def _cause_text(result: Mapping[str, Any]) -> str:
    summary = str(result.get("summary") or "").partition(_ADVICE)[0]  # the remedies follow below
    return summary[:1].upper() + summary[1:] if summary else ""


def _frame_rows(frames: Sequence[Mapping[str, Any]]) -> list[str]:
    """The innermost frame and the engine's own below it: what a person needs of a long traceback."""
    if not frames:
        return []
    chosen = [frames[-1]]
    names = {str(frames[-1].get("file"))}
    for frame in reversed(frames[:-1]):
        file = str(frame.get("file"))
        own = re.search(r"/(?:sglang|vllm)/", file) or not re.search(r"site-packages|dist-packages|/lib/python", file)
        # One line per file: the way through the engine, not every step of it.
        if own and file not in names and not re.search(r"scheduler\.py|engine/core\.py", file):
            chosen.append(frame)
            names.add(file)
        if len(chosen) >= 3:
            break
    labels = [f"{str(frame.get('file')).rsplit('/', 1)[-1]}:{frame.get('line')}" for frame in chosen]
    width = max(len(label) for label in labels)
    return [f"    {label:<{width}}  {frame.get('function')}" for label, frame in zip(labels, chosen)]


def _remedy_rows(remedies: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for remedy in list(remedies)[:4]:
        setting = ", ".join(f"{name}: {_plain(value)}" for name, value in (remedy.get("set") or {}).items())
        rows.append((setting or str(remedy.get("summary")), str(remedy.get("cost") or "") if setting else ""))
    if not rows:
        return []
    width = min(56, max(len(left) for left, _right in rows))
    lines = []
    for number, (left, right) in enumerate(rows):
        label = "  remedies  " if number == 0 else "            "
        lines.append(f"{label}{left:<{width}}  {right}".rstrip())
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_plain(item)}" for name, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def report_text(result: Mapping[str, Any], host: str = "", seconds: float | None = None) -> str:
    """The whole finding as readable text: headline, every link of the chain, every frame, evidence, remedies, gaps."""
    lines = [headline(result, host, seconds), ""]
    exception = result.get("exception")
    if exception:
        lines.append("Exception, root first")
        for link in exception.get("chain") or []:
            lines.append(f"  {link.get('type') or '(type unknown)'}: {link.get('message') or ''}".rstrip(": "))
        lines.append("Frames of the root, outermost first")
        lines += [
            f"  {frame['file']}:{frame['line']} in {frame['function']}" for frame in exception.get("frames") or []
        ]
        lines.append("")
    lines.append("Remedies, best first")
    for remedy in result.get("remedies") or []:
        lines.append(f"  {remedy['id']}: {remedy['summary']}")
        if remedy.get("set"):
            lines += [f"      {name}: {_plain(value)}" for name, value in remedy["set"].items()]
        if remedy.get("cost"):
            lines.append(f"      cost: {remedy['cost']}")
        if remedy.get("source"):
            lines.append(f"      source: {remedy['source']}")
    lines.append("")
    lines.append("Evidence")
    for row in result.get("evidence") or []:
        first_line, *more = str(row.get("message") or "").split("\n")
        lines.append(f"  {row.get('at') or '-'} {row.get('source')}[{row.get('pid')}] {first_line}")
        lines += [f"      {text}" for text in more[:20]]
    lines.append("")
    lines.append(
        f"verdict {result.get('verdict')}, cause {result.get('cause')}, phase {result.get('phase')}, complete {str(result.get('complete')).lower()}"
    )
    lines.append(
        f"unit {result.get('unit')}, invocation {result.get('invocation_id')}, engine {_plain(result.get('engine') or {})}"
    )
    exit_status = result.get("exit")
    if exit_status:
        lines.append(f"exit {_plain(exit_status)}")
    kernel = result.get("kernel") or {}
    if kernel.get("oom_killed") or kernel.get("xid") or kernel.get("segfault"):
        lines.append(f"kernel {_plain(kernel)}")
    for gap in result.get("gaps") or []:
        lines.append(f"missing: {gap}")
    return redact("\n".join(lines)) + "\n"


__all__ = ["Prefix", "diagnose", "diagnose_collected", "empty_result", "headline", "iso", "report_text"]
