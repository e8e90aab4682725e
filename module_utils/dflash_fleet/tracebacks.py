"""Put the lines of one process back together and read the failures in them.

Works on what journald stored: one entry per line, empty lines gone, trailing blanks stripped, a line cut where another process
wrote in between. Lines are first grouped by their true writer (`_PID`), so that several ranks cannot be mixed up; then each
process is read on its own: Python tracebacks with their chains and groups, faulthandler dumps, C++ terminations.

Every function is linear in its input.
"""

# ruff: noqa: E501  (patterns are read in one piece)
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_MESSAGE_LINES = 400
MAX_MESSAGE_CHARS = 48 << 10
MAX_FRAMES = 400

# Other threads of the same process print these between the lines of a record.
_NOISE = re.compile(
    r"\S{1,80}:\d+:\d+ \[\d+\] |NCCL version |\[?(?:rank\d+\]:)?\[?[IWE]\d{3,4} \d\d:\d\d:\d\d|[IWE]\d{4,8} \d\d:\d\d:\d\d\.\d+ "
    r"|\S{1,200}\.py:\d+: \w*Warning: |nanobind: "
)
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


# --------------------------------------------------------------------------------------------- lines


@dataclass(frozen=True)
class Prefix:
    """What a logger put before a line. `signature` is equal for lines of one record where every line is prefixed."""

    rank: str = ""
    tag: str = ""  # vLLM's or Ray's process name, e.g. EngineCore_DP0
    tag_pid: int | None = None
    level: str = ""
    origin: str = ""  # file:line of the logging call, where the format has it
    stamped: bool = False  # a time stamp: this line begins a record
    every_line: bool = False  # a format that repeats itself on each line of a record

    @property
    def signature(self) -> tuple[str, int | None, str, str, str]:
        return (self.tag, self.tag_pid, self.level, self.origin, self.rank)


@dataclass
class Line:
    """One line of one process. `index` is the position of its journal entry."""

    index: int
    text: str
    prefix: Prefix | None = None
    stamp: int | None = None


NO_PREFIX = Prefix()

_SGLANG = re.compile(
    r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?(?P<ranks>(?: (?:DP|PP|CP|ATTN_CP|ATTN_TP|MOE_DP|TP|EP)\d+)*)\](?: |$)"
)
_TAG = re.compile(r"\((?P<tag>[A-Za-z][\w .:/-]{0,60}?(?: rank=\d+)?) ?pid=(?P<pid>\d+)(?:, ip=[\d.a-f:]+)?\)(?: |$)")
_VLLM = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[(?P<new>[^\]\s]{1,120}?:\d+)\]|(?P<old>[\w./-]{1,120}:\d+)\])(?: |$)"
)
_TORCH_RANK = re.compile(r"\[(?P<rank>rank\d+)\]:(?: |$)(?!\[)")
_COMPOSE = re.compile(r"[A-Za-z0-9][\w.]{0,40}(?:-[\w.]{1,40}){0,6}-\d{1,3} {1,30}\|(?: |$)")
_COLLECTOR = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)(?: |$)")
_STANDARD = re.compile(
    r"(?:\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)? ?(?:-|\|)? ?)"
    r"(?P<name>(?:[\w.]{1,80} (?:-|\|) )?)\[?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\]?[ ]{0,4}(?:-|\||:)?(?: |$)"
)
_UVICORN = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|TRACE):[ ]{2,6}")
_REPEATED = re.compile(r" ?\[repeated \d+x across cluster\](?: \(.{0,200}\))?$")
# A bar leaves its line open, so the next record of the same process stands behind it: `1.9s/it][2026-11-29 12:00:00 TP1]`.
BEHIND_BAR = re.compile(r"(?<=(?:it/s|s/it)\])(?=\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


def clean(text: str) -> list[str]:
    """ANSI colour off, progress bars to their last state, one item per line; empty lines left out as journald does."""
    if "\x1b" in text:
        text = ANSI.sub("", text)
    lines: list[str] = []
    for part in BEHIND_BAR.sub("\n", text).split("\n"):
        if "\r" in part:
            pieces = [piece.rstrip() for piece in part.split("\r")]
            pieces = [piece for piece in pieces if piece]
            # A bar redraws itself: its last state says all. Other text is kept, whatever stood before it on the terminal line.
            kept = [piece for piece in pieces[:-1] if not is_progress(piece)] + pieces[-1:]
            lines += kept
        else:
            lines.append(part.rstrip())
    return [_CONTROL.sub("", line) for line in lines if line]


_PROGRESS = re.compile(
    r"\d{1,3}%(?:\||\s+Completed)|\b\d+(?:\.\d+)?[kMG]?/\d+(?:\.\d+)?[kMG]? \[\d+:\d\d|\bit/s\]|\bs/it\]|\?it/s"
)


def is_progress(text: str) -> bool:
    return bool(_PROGRESS.search(text[:400]))


def split_prefix(text: str) -> tuple[Prefix | None, str]:
    """Take the logger's prefix off a line, nested ones too. The rest keeps its own leading blanks."""
    rank = tag = level = origin = ""
    tag_pid: int | None = None
    stamped = every_line = found = False
    rest = text
    for _round in range(8):
        head = rest[:400]
        match = _SGLANG.match(head)
        if match:
            stamped = found = True
            rank = match.group("ranks").strip() or rank
            rest = rest[match.end() :]
            continue
        match = _TAG.match(head)
        if match:
            found = every_line = True
            tag, tag_pid = match.group("tag").strip(), int(match.group("pid"))
            rest = _REPEATED.sub("", rest[match.end() :])
            continue
        match = _VLLM.match(head)
        if match:
            found = every_line = stamped = True
            level, origin = match.group("level"), match.group("new") or match.group("old")
            rest = rest[match.end() :]
            continue
        match = _TORCH_RANK.match(head)
        if match:
            found = every_line = True
            rank = rank or match.group("rank")
            rest = rest[match.end() :]
            continue
        match = _COLLECTOR.match(head) or _COMPOSE.match(head)
        if match:
            found = every_line = True
            rest = rest[match.end() :]
            continue
        match = _STANDARD.match(head)
        if match:
            found = stamped = True
            level = match.group("level")
            rest = rest[match.end() :]
            continue
        match = _UVICORN.match(head)
        if match:
            found = stamped = True
            level = match.group("level")
            rest = rest[match.end() :]
            continue
        break
    if not found:
        return None, text
    return Prefix(rank, tag, tag_pid, level, origin, stamped, every_line), rest


@dataclass
class Piece:
    """One journal entry's text before it is put together: writer, stream, and why journald ended the line there."""

    index: int
    key: Any
    text: str
    line_break: str = ""
    stamp: int | None = None


_BEGINS_ANEW = re.compile(
    r"^(?:Traceback \(most|  File \"|Fatal Python error|Current thread 0x|Thread 0x|terminate called|The above exception|During handling|Process \S+:$|\[20\d\d-)"
)
_WANTS_BLANK = re.compile(r"(?:[:,]|\bFile|\bline|\bin|\bThread|\bthread|\bmodules:|\berror:)$")


_WORD_END = re.compile(r"[A-Za-z]+$")
_WORD_BEGIN = re.compile(r"^[A-Za-z]+")


_DOTTED = re.compile(r"^(?:\w+\.)+\w*$")


def _seam(left: str, right: str, words: frozenset[str]) -> str:
    """What stood at a cut: a blank that journald stripped, or nothing because the cut went through a word."""
    if not left or not right or right[0] in " \t":
        return ""
    if "File" in left[:60] and left.count('"') % 2:
        return ""  # inside a path
    before, after = _WORD_END.search(left[-60:]), _WORD_BEGIN.match(right[:60])
    if before is not None and after is not None and (before.group() + after.group()).lower() in words:
        return ""  # in|stance, an|other: both halves may be words of their own
    if right[0] == ":" or left.endswith("::"):
        return ""  # inside a C++ name
    if _WANTS_BLANK.search(left[-40:]):
        return " "
    if before is None or after is None:
        return ""
    if (right[0].isupper() and ": " not in left) or _DOTTED.match(left):
        return ""  # CalledProcess|Error, torch.Out|OfMemoryError: inside a name
    first, second = before.group().lower(), after.group().lower()
    return " " if first in words and second in words else ""


def join_pieces(pieces: Iterable[Piece], words: frozenset[str] = frozenset()) -> dict[Any, list[Line]]:
    """Group by writer and join what was cut.

    A piece ended by `pid-change` goes on in the same writer's next entry, one ended by `line-max` too. journald stripped
    the blanks at the cut, so a blank is put back where Python's own writers end a piece with one.
    """
    streams: dict[Any, list[Line]] = {}
    open_piece: dict[Any, tuple[int, list[str], int | None, str]] = {}

    def emit(key: Any, index: int, text: str, stamp: int | None) -> None:
        out = streams.setdefault(key, [])
        for line in clean(text):
            prefix, body = split_prefix(line)
            out.append(Line(index, body, prefix, stamp))

    for piece in pieces:
        text = piece.text
        index, stamp = piece.index, piece.stamp
        if piece.key in open_piece and (_NOISE.match(text[:300]) or "\r" in text):
            emit(piece.key, index, text, stamp)  # another thread's line between the pieces
            continue
        held = open_piece.pop(piece.key, None)
        parts: list[str] | None = None
        if held is not None:
            index0, held_parts, stamp0, why = held
            anew = _BEGINS_ANEW.match(text) or (why == "pid-change" and _is_record(text))
            if anew and not (held_parts and _half_frame(held_parts)):
                emit(piece.key, index0, "".join(held_parts), stamp0)
            else:
                parts = held_parts
                if why == "pid-change":
                    parts.append(_seam(parts[-1], text, words))
                parts.append(text)
                index, stamp = index0, stamp0
        if piece.line_break in ("pid-change", "line-max", "nul"):
            open_piece[piece.key] = (index, parts if parts is not None else [text], stamp, piece.line_break)
        else:
            emit(piece.key, index, "".join(parts) if parts is not None else text, stamp)
    for key, (index, held_parts, stamp, _why) in open_piece.items():
        emit(key, index, "".join(held_parts), stamp)
    for lines in streams.values():
        lines.sort(key=lambda line: line.index)
    return streams


def _half_frame(parts: list[str]) -> bool:
    return parts[-1].rstrip().endswith(("File", "line", ","))


def _is_record(text: str) -> bool:
    prefix, _rest = split_prefix(text[:400])
    return prefix is not None and prefix.stamped


# --------------------------------------------------------------------------------------------- failures


@dataclass
class Frame:
    file: str
    line: int
    function: str
    source: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "function": self.function}


@dataclass
class Link:
    """One exception of a chain, as printed."""

    type: str
    message: str
    frames: list[Frame] = field(default_factory=list)
    complete: bool = True  # False: its exception line never came

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass
class Report:
    """One failure that a process printed. `links` are in printed order: the root first."""

    kind: str  # python, faulthandler, terminate, abort
    first: int  # index of the first journal entry
    last: int
    header: str = ""
    links: list[Link] = field(default_factory=list)
    prefix: Prefix = NO_PREFIX
    signal: str = ""
    description: str = ""
    frames: list[Frame] = field(default_factory=list)  # faulthandler: the faulting thread, innermost first
    stamp: int | None = None
    beginning_lost: bool = False
    end_lost: bool = False
    source_text: str = ""  # the last source line shown: a bare AssertionError says nothing else

    @property
    def root(self) -> Link | None:
        return self.links[0] if self.links else None


SIGNALS = {
    "SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGILL": 4, "SIGTRAP": 5, "SIGABRT": 6, "SIGBUS": 7, "SIGFPE": 8, "SIGKILL": 9,
    "SIGSEGV": 11, "SIGPIPE": 13, "SIGTERM": 15, "SIGSYS": 31,
}  # fmt: skip
SIGNAL_NAMES = {value: name for name, value in SIGNALS.items()}
NATIVE_SIGNALS = {"SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGSEGV", "SIGSYS"}
_FATAL_WORDS = (
    ("Segmentation fault", "SIGSEGV"), ("Aborted", "SIGABRT"), ("Bus error", "SIGBUS"), ("Floating point exception", "SIGFPE"),
    ("Floating-point exception", "SIGFPE"), ("Illegal instruction", "SIGILL"),
)  # fmt: skip

TRACEBACK = "Traceback (most recent call last)"
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\s*$")
_GROUP_HEAD = re.compile(r"^\s*\+ Exception Group Traceback \(most recent call last\):")
# Blanks may be missing where a line was cut and put together again.
_FRAME = re.compile(
    r'^\s*File ?"(?P<file>[^"]{1,1000})", ?line ?(?P<line>\d{1,9})(?:, ?in ?(?P<function>.{0,400}))?\s*$'
)
_FAULT_FRAME = re.compile(
    r'^\s*File ?"(?P<file>[^"]{0,1000})", ?line ?(?P<line>\d{1,9}|\?\?\?) ?in ?(?P<function>.{0,400})$'
)
_REPEAT = re.compile(r"^\s*\[Previous line repeated \d+ more times?\]")
_CARETS = re.compile(r"^\s*[\^~]+[\s\^~]*$")
_CAUSE = re.compile(r"^\s*The above exception was the direct cause of the following exception:")
_CONTEXT = re.compile(r"^\s*During handling of the above exception, another exception occurred:")
_IDENT = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_<][A-Za-z0-9_<>]*)*"
_EXC = re.compile(r"^(?P<type>" + _IDENT + r")(?::(?: ?(?P<message>.*))?)?$", re.DOTALL)
# A name that can stand alone as an exception line outside a traceback.
_EXC_NAME = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Timeout|Fault|Failure|Died|Incomplete|Invalid\w*|Warning|Group)$"
)
_BARE = re.compile(r"^(?:[a-z_][\w]*\.){0,8}[A-Z]\w*(?:Error|Exception): \S")
_PROCESS = re.compile(r"^Process \S+:\s*$")
_FATAL = re.compile(r"Fatal Python error: ?(?P<what>.*)$")
_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) ?0x[0-9a-fA-F]+(?: \[[^\]]*\])? ?(?:\(most recent call first\))?:?"
)
_EXTENSIONS = re.compile(r"^Extension modules: ?")
_TERMINATE = re.compile(r"terminate called after throwing an instance of ?'(?P<type>[^']{1,300})'?")
_TERMINATE_BARE = re.compile(r"terminate called (?:without an active exception|recursively)")
_LIBCXX = re.compile(
    r"libc\+\+abi: terminating (?:due to|with) uncaught exception of type (?P<type>[^:]+(?:::[^:]+)*): ?(?P<message>.*)"
)
_GLIBC = re.compile(
    r"^(?:(?:free|malloc|realloc|calloc|munmap_chunk|malloc_consolidate)\(\): \S.*|double free or corruption.*|corrupted (?:size vs\. prev_size|double-linked list).*"
    r"|\*\*\* stack smashing detected \*\*\*.*|\*\*\* buffer overflow detected \*\*\*.*|pure virtual method called.*|munmap_chunk\(\).*)$"
)
_GLIBC_ASSERT = re.compile(r"^[\w./:+-]{1,120}: [\w./+-]{1,200}:\d+: .{1,300}: Assertion [`'].{1,300}' failed\.?$")
_SIGNAL_LINE = re.compile(
    r"^\*\*\* (?P<abseil>SIG[A-Z]+) received at time|^\[[^\]]{1,80}\] Caught signal (?P<ucx>\d+) \(|^\*{3} Process received signal \*{3}|Signal: \w[\w ]* \((?P<ompi>\d+)\)$"
    r"|^!!!!!!! Segfault encountered !!!!!!!"
)
_UCX_BACKTRACE = re.compile(r"^={2,} ?backtrace \(tid: *\d+\) ?={2,}")
_ROCM_FAULT = re.compile(r"^Memory access fault by GPU node-\d+")
_CHECK_FAILED = re.compile(r"^F\d{4,8} .{0,200}\] ?(?P<text>Check failed.*|.*)$")
_REMOTE = re.compile(r"(?:^|\.)_?RemoteTraceback$")
_SPECIAL = re.compile(
    r"^(?:Received sigquit|SIGQUIT received|SIGTERM received|kill_process_tree called|Gracefully exiting|Extension modules:|Pyspy |Scheduler debug info|Exception ignored in"
    r"|Subprocess \S+ \(pid=|Rank \d+ scheduler|\S+: UserWarning|.{1,200}: (?:User|Future|Runtime|Deprecation)Warning: |INFO:|Capturing batches|Loading safetensors"
    r"|Killed$|nanobind: |\[W\d{3,4} |usage: |crash dump already performed|Waiting for |Finished server process|Multi-thread loading|To exit: )"
)


#: What Python, its libraries and the engines print around a failure, whatever it is. A cut inside one of these words is no
#: blank, even where both halves are words too (an|other).
SENTENCES = (
    "Traceback (most recent call last):", "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:", "Exception Group Traceback", "Previous line repeated more times",
    "Fatal Python error: Segmentation fault Aborted Bus error Illegal instruction Floating point exception", "Current thread most recent call first",
    "terminate called after throwing an instance of without an active exception recursively what", "Extension modules total",
    "Scheduler hit an exception", "Detokenizer hit an exception", "Received sigquit from a child process. It usually means the child failed.",
    "SIGQUIT received. signum frame It usually means one child failed.", "Subprocess crashed with exit code. Triggering SIGQUIT for cleanup",
    "scheduler died during initialization exit code", "Capture cuda graph failed", "Possible solutions", "Watchdog timeout", "Memory access fault by",
    "Exception ignored in", "sub-exceptions", "Initialization failed", "Engine core initialization failed. See root cause above",
)  # fmt: skip
SENTENCE_WORDS = frozenset(re.findall(r"[a-z]{2,20}", " ".join(SENTENCES).lower()))


class _Cursor:
    """A position in the lines of one process."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self.at = 0

    @property
    def more(self) -> bool:
        return self.at < len(self.lines)

    @property
    def line(self) -> Line:
        return self.lines[self.at]


def parse(lines: list[Line]) -> list[Report]:
    """Every failure in the lines of one process, in order."""
    reports: list[Report] = []
    cursor = _Cursor(lines)
    while cursor.more:
        report = _parse_one(cursor)
        if report is not None:
            reports.append(report)
    return reports


def _parse_one(cursor: _Cursor) -> Report | None:
    """Read at the cursor; always moves on by at least one line."""
    line = cursor.line
    text = line.text
    quick = text[:300] if len(text) < 4000 else text
    if "Traceback (most recent" in quick and (_TRACEBACK.search(text[-200:]) or _GROUP_HEAD.match(quick)):
        return _python(cursor)
    if (
        "File" in quick[:40]
        and _FRAME.match(quick)
        and (line.prefix is None or not line.prefix.stamped or line.prefix.every_line)
    ):
        # Frames without their first line: it was dropped or rotated away.
        report = _python(cursor, beginning_lost=True)
        return report if report and report.links else None
    if "Fatal Python error" in quick:
        return _faulthandler(cursor)
    match = _TERMINATE.search(quick)
    if match:
        return _terminate(cursor, match.group("type"))
    match = _LIBCXX.search(quick)
    if match:
        cursor.at += 1
        link = Link(match.group("type").strip(), match.group("message").strip())
        return Report(
            "terminate",
            line.index,
            line.index,
            links=[link],
            prefix=line.prefix or NO_PREFIX,
            signal="SIGABRT",
            description=text,
            stamp=line.stamp,
        )
    if _TERMINATE_BARE.search(quick) or _GLIBC.match(quick) or _GLIBC_ASSERT.match(quick):
        cursor.at += 1
        return Report(
            "abort",
            line.index,
            line.index,
            prefix=line.prefix or NO_PREFIX,
            signal="SIGABRT",
            description=text[:2000],
            stamp=line.stamp,
        )
    if _ROCM_FAULT.match(quick):
        cursor.at += 1
        return Report(
            "abort",
            line.index,
            line.index,
            prefix=line.prefix or NO_PREFIX,
            signal="SIGABRT",
            description=text[:2000],
            stamp=line.stamp,
        )
    match = _SIGNAL_LINE.search(quick)
    if match:
        cursor.at += 1
        return _signal_line(line, match)
    if _UCX_BACKTRACE.match(quick):
        return _ucx(cursor)
    match = _CHECK_FAILED.match(quick)
    if match and "Check failed" in quick:
        cursor.at += 1
        return Report(
            "abort",
            line.index,
            line.index,
            prefix=line.prefix or NO_PREFIX,
            signal="SIGABRT",
            description=text[:2000],
            stamp=line.stamp,
        )
    if _BARE.match(quick) and not _SPECIAL.match(quick):
        return _bare(cursor)
    cursor.at += 1
    return None


def _belongs(prefix: Prefix | None, start: Prefix | None) -> bool:
    """Can a line with this prefix be part of a record that began with `start`?"""
    if prefix is None:
        return True
    if start is None or not (prefix.every_line and start.every_line):
        return False
    if start.origin or prefix.stamped:
        return prefix.signature == start.signature
    return (prefix.tag, prefix.tag_pid) == (start.tag, start.tag_pid)  # Ray: the tag alone goes on


def _noise(line: Line, start: Prefix | None) -> bool:
    """A progress bar or a warning between the lines of a record: stepped over, does not end it."""
    if is_progress(line.text) or _NOISE.match(line.text[:300]):
        return True
    return bool(start is not None and start.every_line and line.prefix is None)


def _python(cursor: _Cursor, beginning_lost: bool = False) -> Report:
    first = cursor.line
    start = first.prefix
    report = Report(
        "python", first.index, first.index, prefix=start or NO_PREFIX, stamp=first.stamp, beginning_lost=beginning_lost
    )
    if beginning_lost:
        report.header = ""
        before = cursor.at
    else:
        at = first.text.rfind("Traceback (most recent")
        report.header = first.text[: max(at, 0)].strip(" +|").removesuffix("Exception Group").strip() if at > 0 else ""
        if not report.header and cursor.at > 0:
            earlier = cursor.lines[cursor.at - 1]
            if _PROCESS.match(earlier.text) or earlier.text.startswith(
                ("Exception in thread", "Exception ignored", "Exception in ASGI", "Task exception")
            ):
                report.header = earlier.text.strip()
        before = cursor.at
        if _GROUP_HEAD.match(first.text):
            _group(cursor, report)
            _chain_on(cursor, report, start)
            return report
        cursor.at += 1
    link = _link(cursor, report, start)
    report.links.append(link)
    _chain_on(cursor, report, start)
    if cursor.at == before:
        cursor.at += 1
    report.end_lost = any(not item.complete for item in report.links)
    return report


def _name(text: str | None) -> str:
    """A function's name holds no blank; one that a seam put in is taken out."""
    return (text or "").replace(" ", "")


def _chain_on(cursor: _Cursor, report: Report, start: Prefix | None) -> None:
    """Follow "direct cause" and "during handling" to the wrappers."""
    remote = bool(report.links and _REMOTE.search(report.links[-1].type))
    while cursor.more and len(report.links) < 50:
        line = cursor.line
        if not _belongs(line.prefix, start):
            return
        if _noise(line, start) or line.text.strip() in ("", '"""', "'''"):
            cursor.at += 1
            continue
        chained = _CAUSE.match(line.text) or _CONTEXT.match(line.text)
        if chained:
            cursor.at += 1
            while (
                cursor.more
                and _belongs(cursor.line.prefix, start)
                and (not cursor.line.text.strip() or _noise(cursor.line, start))
            ):
                cursor.at += 1
            if not cursor.more:
                return
            following = cursor.line
            if _belongs(following.prefix, start) and _GROUP_HEAD.match(following.text):
                _group(cursor, report)
            elif _belongs(following.prefix, start) and _TRACEBACK.search(following.text[-200:]):
                cursor.at += 1
                report.links.append(_link(cursor, report, start))
            elif (
                _belongs(following.prefix, start) and _EXC.match(following.text) and not following.text.startswith(" ")
            ):
                report.links.append(_link(cursor, report, start))  # an exception without a traceback of its own
            else:
                return
            remote = False
            continue
        if remote and _TRACEBACK.search(line.text[-200:]):
            # The text of a traceback from another process: what it says is the root, its carrier is none.
            cursor.at += 1
            report.links.pop()
            report.links.append(_link(cursor, report, start))
            remote = False
            continue
        return


def _link(cursor: _Cursor, report: Report, start: Prefix | None) -> Link:
    """Frames, then the exception line with all of its message."""
    frames: list[Frame] = []
    indent: int | None = None
    while cursor.more:
        line = cursor.line
        if not _belongs(line.prefix, start):
            break
        text = line.text
        match = _FRAME.match(text) if "File" in text[:60] else None
        if match:
            indent = len(text) - len(text.lstrip()) if indent is None else indent
            if len(frames) < MAX_FRAMES:
                frames.append(
                    Frame(match.group("file"), int(match.group("line")), _name(match.group("function")))
                )
            else:
                frames[-1] = Frame(
                    match.group("file"), int(match.group("line")), _name(match.group("function"))
                )
            report.last = line.index
            cursor.at += 1
            continue
        base = (indent or 2) - 2 if indent is not None and indent >= 2 else 0
        stripped = text[base:] if text[:base].isspace() or not base else text
        if stripped.startswith((" ", "\t")):
            # The source line, its marks, a repetition: all are deeper than the exception line.
            if frames and not _CARETS.match(stripped) and not _REPEAT.match(stripped):
                frames[-1].source = stripped.strip()[:300]
            report.last = line.index
            cursor.at += 1
            continue
        if _noise(line, start) or not stripped:
            cursor.at += 1
            continue
        match = _EXC.match(stripped)
        if match and not _SPECIAL.match(stripped) and _plausible(match):
            cursor.at += 1
            report.last = line.index
            kind = match.group("type")
            message = _message(cursor, report, start, [match.group("message") or ""], frames)
            if frames:
                report.source_text = frames[-1].source
            return Link(kind, message, frames)
        break
    if frames:
        report.source_text = frames[-1].source
    return Link("", "", frames, complete=False)


def _plausible(match: re.Match[str]) -> bool:
    """After frames any dotted name followed by a colon or the end of the line is an exception; a plain word is not."""
    name = match.group("type").rsplit(".", 1)[-1]
    if match.group("message") is not None or match.group(0).endswith(":"):
        return name[:1].isupper() or "." in match.group("type") or name[:1] == "_" or bool(_EXC_NAME.search(name))
    return name[:1].isupper() or "." in match.group("type")


def _message(cursor: _Cursor, report: Report, start: Prefix | None, parts: list[str], frames: list[Frame]) -> str:
    """The rest of a message: everything up to the next record, traceback, chain sentence or dump."""
    size = sum(len(part) for part in parts)
    nested = False
    while cursor.more and len(parts) < MAX_MESSAGE_LINES and size < MAX_MESSAGE_CHARS:
        line = cursor.line
        if not _belongs(line.prefix, start):
            break
        text = line.text
        if _CAUSE.match(text) or _CONTEXT.match(text):
            break
        if _noise(line, start):
            cursor.at += 1
            continue
        if "Traceback (most recent" in text and _TRACEBACK.search(text[-200:]):
            # Either the next failure, or a traceback quoted in this message (indented, or announced by its last words).
            quoted = text.startswith((" ", "\t", "|")) or (
                parts and parts[-1].rstrip().endswith((":", '"""', "error", "traceback"))
            )
            if not quoted:
                break
            nested = True
        elif _ends_message(text, nested):
            break
        parts.append(text)
        size += len(text) + 1
        report.last = line.index
        cursor.at += 1
        if _REMOTE.search(report.links[-1].type if report.links else "") and text.strip() == '"""':
            break
    if size > MAX_MESSAGE_CHARS:
        parts[-1] = parts[-1][: MAX_MESSAGE_CHARS // 2]
    return "\n".join(parts).strip("\n")


def _ends_message(text: str, nested: bool) -> bool:
    if _SPECIAL.match(text) or _PROCESS.match(text) or _FATAL.match(text) or _TERMINATE.match(text):
        return True
    if (
        _THREAD.match(text)
        or _UCX_BACKTRACE.match(text)
        or _GROUP_HEAD.match(text)
    ):
        return True
    if _SIGNAL_LINE.match(text[:200]) or _GLIBC.match(text[:300]):
        return True
    return bool(not nested and _FRAME.match(text[:1200]) and not text.startswith("    "))


def _group(cursor: _Cursor, report: Report) -> None:
    """An exception group: its leaves in order, then the group itself as their wrapper."""
    start = cursor.line.prefix
    gutter = re.compile(r"^(?P<indent>\s*)(?P<mark>[|+])(?P<rest>.*)$")
    leaves: list[Link] = []
    wrappers: list[Link] = []
    block: list[Line] = []
    kinds: list[bool] = []  # is the current block a group's own part?

    def close() -> None:
        if not block:
            return
        inner = _Cursor(block[:])
        block.clear()
        scratch = Report("python", inner.lines[0].index, inner.lines[0].index)
        if _TRACEBACK.search(inner.line.text[-200:]):
            inner.at += 1
        link = _link(inner, scratch, None)
        report.last = max(report.last, scratch.last)
        if link.type or link.frames:
            (wrappers if kinds and kinds[-1] else leaves).append(link)
        while inner.more:
            at = inner.at
            if (
                _CAUSE.match(inner.line.text)
                or _CONTEXT.match(inner.line.text)
                or _TRACEBACK.search(inner.line.text[-200:])
            ):
                inner.at += 1
                continue
            link = _link(inner, scratch, None)
            if link.type:
                leaves.append(link)
            if inner.at == at:
                inner.at += 1

    kinds.append(True)
    cursor.at += 1
    while cursor.more:
        line = cursor.line
        if not _belongs(line.prefix, start):
            break
        match = gutter.match(line.text[:4000])
        if not match:
            if _noise(line, start):
                cursor.at += 1
                continue
            break
        report.last = line.index
        rest = match.group("rest")
        if match.group("mark") == "+":
            close()
            if "Exception Group Traceback" in rest:
                kinds.append(True)
            elif re.match(r"[-+ ]*-{3,} (?:\d+|\.\.\.) -{3,}", rest):
                kinds.append(False)
        else:
            body = line.text[match.start("rest") :]
            body = body[1:] if body.startswith(" ") else body
            if "Exception Group Traceback" in body:
                close()
                kinds.append(True)
            elif body.strip() or block:
                block.append(Line(line.index, body, None, line.stamp))
        cursor.at += 1
    close()
    report.links += leaves + list(reversed(wrappers))


def _faulthandler(cursor: _Cursor) -> Report:
    line = cursor.line
    match = _FATAL.search(line.text)
    what = (match.group("what") if match else "").strip()
    report = Report(
        "faulthandler", line.index, line.index, prefix=line.prefix or NO_PREFIX, stamp=line.stamp, description=what
    )
    report.signal = next((name for words, name in _FATAL_WORDS if what.startswith(words)), "SIGABRT")
    cursor.at += 1
    current = False
    while cursor.more:
        line = cursor.line
        text = line.text
        if line.prefix is not None and line.prefix.stamped:
            break
        thread = _THREAD.match(text)
        if thread:
            current = thread.group("current") == "Current thread"
        elif "File" in text[:40]:
            frame = _FAULT_FRAME.match(text)
            if not frame:
                break
            if current and len(report.frames) < MAX_FRAMES:
                number = frame.group("line")
                report.frames.append(
                    Frame(frame.group("file"), int(number) if number.isdigit() else 0, _name(frame.group("function")))
                )
        elif _EXTENSIONS.match(text):
            report.last = line.index
            cursor.at += 1
            break
        elif "Fatal Python error" in text or _TRACEBACK.search(text[-200:]) or _TERMINATE.search(text[:300]):
            break
        elif (
            not text.strip()
            or text.strip() in ("...", "<no Python frame>", "<cannot get")
            or text.startswith(("Python runtime state", "  "))
        ) or _noise(line, report.prefix if line.prefix is not None else None) or text.startswith(("<", "Stack (most recent", "  Garbage")):
            pass
        else:
            break
        report.last = line.index
        cursor.at += 1
    return report


def _terminate(cursor: _Cursor, kind: str) -> Report:
    line = cursor.line
    start = line.prefix
    report = Report(
        "terminate",
        line.index,
        line.index,
        prefix=start or NO_PREFIX,
        stamp=line.stamp,
        signal="SIGABRT",
        description="terminate called",
    )
    cursor.at += 1
    message = ""
    while cursor.more:
        text = cursor.line.text
        if _belongs(cursor.line.prefix, start) and text.lstrip().startswith("what():"):
            report.last = cursor.line.index
            begun = text.lstrip()[len("what():") :].strip()
            cursor.at += 1
            message = _message(cursor, report, start, [begun], [])
            break
        if _belongs(cursor.line.prefix, start) and _noise(cursor.line, start):
            cursor.at += 1
            continue
        break
    report.links = [Link(kind, message)]
    return report


def _bare(cursor: _Cursor) -> Report:
    """An exception line without a traceback: its beginning was lost, or the program printed only that."""
    line = cursor.line
    match = _EXC.match(line.text)
    report = Report("bare", line.index, line.index, prefix=line.prefix or NO_PREFIX, stamp=line.stamp)
    cursor.at += 1
    if match:
        message = _message(cursor, report, line.prefix, [match.group("message") or ""], [])
        report.links = [Link(match.group("type"), message)]
        _chain_on(cursor, report, line.prefix)
    return report


def _signal_line(line: Line, match: re.Match[str]) -> Report | None:
    groups = match.groupdict()
    if groups.get("abseil"):
        name = groups["abseil"]
    elif groups.get("ucx") or groups.get("ompi"):
        name = SIGNAL_NAMES.get(int(groups.get("ucx") or groups.get("ompi") or 0), "")
    elif "Segfault" in line.text:
        name = "SIGSEGV"
    else:
        return None
    if name not in NATIVE_SIGNALS:
        return None
    return Report(
        "signal",
        line.index,
        line.index,
        prefix=line.prefix or NO_PREFIX,
        stamp=line.stamp,
        signal=name,
        description=line.text[:500],
    )


def _ucx(cursor: _Cursor) -> Report:
    line = cursor.line
    report = Report(
        "signal", line.index, line.index, prefix=line.prefix or NO_PREFIX, stamp=line.stamp, signal="SIGSEGV"
    )
    rows: list[str] = []
    cursor.at += 1
    while cursor.more and len(rows) < 200:
        text = cursor.line.text
        if cursor.line.prefix is not None or not re.match(r"^\s*(?:\d+\s|=+$|\[|/|0x|#)", text):
            break
        rows.append(text.strip())
        report.last = cursor.line.index
        cursor.at += 1
        if re.match(r"^=+$", text):
            break
    report.description = "\n".join(rows)[:4000]
    return report


def frames_text(frames: Iterable[Frame]) -> str:
    """`file:function` rows, for rules that look at where something was raised."""
    return "\n".join(f"{frame.file}:{frame.function}" for frame in frames)


def restore_blanks(messages: list[str]) -> list[str]:
    """Several ranks print one text; where a cut took a blank out of one, the others still have it."""
    best: dict[str, str] = {}
    keys = [re.sub(r"\s+", "", message) for message in messages]
    for key, message in zip(keys, messages):
        if len(message) > len(best.get(key, "")):
            best[key] = message
    return [best[key] for key in keys]
