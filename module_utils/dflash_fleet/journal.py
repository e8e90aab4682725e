"""Read journal entries of one unit: from the host's journal, a `.journal` file, or exported text.

An entry is a dict with journald's own field names. Nothing here judges; it only finds the right invocation and keeps
what a diagnosis needs, in bounded memory and time whatever the unit printed.

Facts relied on (systemd 252 and later):
* a service's lines carry `_SYSTEMD_INVOCATION_ID`, PID 1's lines about it `INVOCATION_ID` and `UNIT`, core dumps
  `COREDUMP_UNIT`, journald's own notes `OBJECT_SYSTEMD_UNIT`, kernel lines none of these;
* `-o json` gives null for fields of 4096 bytes and more unless `--all`, and an array of bytes for text with control characters;
* matching on an invocation id uses the journal's hash index, so its cost does not depend on the size of the journal; `--grep` and `-u` do not.
"""

# ruff: noqa: E501  (patterns are read in one piece)
from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import itertools
import json
import os
import re
import select
import struct
import subprocess
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

Entry = dict[str, Any]

# systemd's catalogue (systemd/sd-messages.h)
MSG_UNIT_STARTING = "7d4958e842da4a758f6c1cdc7b36dcc5"
MSG_UNIT_STARTED = "39f53479d3a045ac8e11786248231fbf"
MSG_UNIT_START_FAILED = "be02cf6855d2428ba40df7e9d022f03d"
MSG_UNIT_STOPPING = "de5b426a63be47a7b6ac3eaac82e2f6f"
MSG_UNIT_STOPPED = "9d1aaa27d60140bd96365438aad20286"
MSG_UNIT_RESTART = "5eb03494b6584870a536b337290809b3"
MSG_PROCESS_EXIT = "98e322203f7a4ed290d09fe03c09fe15"
MSG_UNIT_FAILED = "d9b373ed55a64feb8242e02dbe79a49c"
MSG_UNIT_SUCCESS = "7ad2d189f7e94e70a38c781354912448"
MSG_UNIT_OOM = "fe6faa94e7774663a0da52717891d8ef"
MSG_UNIT_OOMD = "d989611b15e44c9dbf31e3c81256e4ed"
MSG_SPAWN_FAILED = "641257651c1b4ec9a8624d7a40a9e1e7"
MSG_COREDUMP = "fc2e22bc6ee647b6b90729ab34a250b1"
MSG_DROPPED = "a596d6fe7bfa4994828e72309e95d61e"

ENDED_IDS = (MSG_UNIT_FAILED, MSG_UNIT_SUCCESS)

# What a diagnosis reads. Asking for these alone makes journalctl emit twice as fast (measured) and keeps COREDUMP= out.
FIELDS = (
    "MESSAGE", "MESSAGE_ID", "SYSLOG_IDENTIFIER", "_PID", "_COMM", "_CMDLINE", "_TRANSPORT", "_LINE_BREAK",
    "_SYSTEMD_UNIT", "_SYSTEMD_USER_UNIT", "_SYSTEMD_INVOCATION_ID", "UNIT", "USER_UNIT", "INVOCATION_ID", "USER_INVOCATION_ID",
    "EXIT_CODE", "EXIT_STATUS", "UNIT_RESULT", "JOB_TYPE", "N_DROPPED",
    "COREDUMP_UNIT", "COREDUMP_USER_UNIT", "COREDUMP_PID", "COREDUMP_COMM", "COREDUMP_SIGNAL", "COREDUMP_SIGNAL_NAME",
    "OBJECT_SYSTEMD_UNIT", "OBJECT_SYSTEMD_INVOCATION_ID",
)  # fmt: skip
_KEPT = frozenset(FIELDS) | {
    "__CURSOR",
    "__REALTIME_TIMESTAMP",
    "__MONOTONIC_TIMESTAMP",
    "_BOOT_ID",
    "__SEQNUM",
    "_SOURCE_REALTIME_TIMESTAMP",
}

# Lines that a diagnosis may hang on: only these and their surroundings are kept from a log too long to keep whole. Plain
# words first: looking for each of them is ten times faster than one pattern of all of them, and every line is looked at.
_MARKS = (
    "Traceback", "hit an exception", "Fatal Python", "terminate called", "sigquit", "SIGQUIT", "SIGTERM", "crashed with exit", "died", "atchdog",
    "Segmentation", "Assertion", "CUDA", "NCCL error", "NCCL WARN", "ProcessGroupNCCL", "ut of memory", "ot enough memory", "No space left", "kill_process_tree", "Killed", "killed",
    "Initialization failed", "Health check failed", "error:", "Xid", "Memory access fault", "backtrace", "Caught signal", "SIGSEGV", "SIGABRT", "length of new_indices",
    "server_args=", "fired up and ready", "Load weight", "KV Cache", "Capture", "Init torch", "Init parallel", "Uvicorn running", "host memory for hierarchical", "stack smashing",
    "free():", "malloc",
)  # fmt: skip
_MARK_PATTERN = re.compile(r"^usage:|(?:Error|Exception)\b(?!: 0)|F\d{4} ")


def marked(text: str) -> bool:
    """Does a diagnosis perhaps hang on this line?"""
    return any(word in text for word in _MARKS) or bool(_MARK_PATTERN.search(text))


HEAD_ENTRIES = 400  # the start of an invocation: arguments, phases
HEAD_ENTRIES_INDEXED = 120  # where the journal's index gives the end at once, the start is read for arguments and phases alone
TAIL_ENTRIES = 6000
TAIL_BYTES = 12 << 20
CHUNK_BYTES = 1 << 20
QUIET_ENTRIES = 150  # so many entries without a marker before the oldest one: walking further back finds nothing new
MAX_SCAN_ENTRIES = 400_000
MAX_SCAN_SECONDS = 20.0
F_SETPIPE_SZ = 1031  # <fcntl.h>; Python names it from 3.10 on
PIPE_BYTES = 512 << 10
MAX_LINE_BYTES = 8 << 20
MAX_MESSAGE_CHARS = 64 << 10
KERNEL_ENTRIES = 2000
PREVIOUS_ENTRIES = 400
TOLD_ENTRIES = 20  # what PID 1 last said of the unit: enough for the runs that matter
AFTER_END_US = 5 * 1_000_000
PEEKED_ENTRIES = 24  # PID 1's last words about a run stand among so many
BESIDE_US = 5 * 1_000_000
KERNEL_BEFORE_US = 300 * 1_000_000
KERNEL_AFTER_US = 30 * 1_000_000


class JournalError(Exception):
    """The journal or file cannot be read; the message says why, for a person."""


@dataclass
class Collected:
    """What was read for one diagnosis."""

    entries: list[Entry] = field(default_factory=list)
    kernel: list[Entry] = field(default_factory=list)
    unit: str = ""
    invocation_id: str | None = None
    gaps: list[str] = field(default_factory=list)
    scanned: int = 0
    source: Journalctl | None = None  # where more can be read from


# --------------------------------------------------------------------------------------------- decoding


def text_of(value: Any) -> str | None:
    """MESSAGE as text: str as is, bytes or a list of byte numbers as UTF-8 with replacement, null as None."""
    if value is None:
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, list):
        if all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= 255 for item in value):
            return bytes(value).decode("utf-8", "replace")
        # A field given more than once is an array of its values.
        parts = [text_of(item) for item in value]
        return "\n".join(part for part in parts if part is not None)
    return str(value)


def first(entry: Mapping[str, Any], *names: str) -> str:
    """The first of these fields that is set, as text; empty when none is."""
    for name in names:
        value = entry.get(name)
        if value is None:
            continue
        text = value if type(value) is str else text_of(value)
        if text:
            return text
    return ""


def number(entry: Mapping[str, Any], *names: str) -> int | None:
    """A field as an integer, None where it is missing or not one."""
    for name in names:
        value = entry.get(name)
        if value is None:
            continue
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError):
            pass
        text = (text_of(value) or "").strip()
        if text:
            try:
                return int(text)
            except ValueError:
                return None
    return None


def realtime(entry: Mapping[str, Any]) -> int | None:
    """Microseconds since the epoch, as journald took them in."""
    return number(entry, "__REALTIME_TIMESTAMP", "_SOURCE_REALTIME_TIMESTAMP")


def is_kernel(entry: Mapping[str, Any]) -> bool:
    return first(entry, "_TRANSPORT") == "kernel" or (
        not entry.get("_PID") and first(entry, "SYSLOG_IDENTIFIER") == "kernel"
    )


def invocation_of(entry: Mapping[str, Any]) -> str:
    return first(
        entry, "_SYSTEMD_INVOCATION_ID", "INVOCATION_ID", "USER_INVOCATION_ID", "OBJECT_SYSTEMD_INVOCATION_ID"
    ).replace("-", "")


def unit_of(entry: Mapping[str, Any]) -> str:
    """The unit an entry is about: PID 1, coredump and journald speak about others than themselves."""
    return first(entry, "UNIT", "USER_UNIT", "COREDUMP_UNIT", "COREDUMP_USER_UNIT", "OBJECT_SYSTEMD_UNIT") or first(
        entry, "_SYSTEMD_USER_UNIT", "_SYSTEMD_UNIT"
    )


def about_unit(entry: Mapping[str, Any], unit: str) -> bool:
    if not unit:
        return True
    for name in (
        "UNIT",
        "_SYSTEMD_UNIT",
        "COREDUMP_UNIT",
        "OBJECT_SYSTEMD_UNIT",
        "USER_UNIT",
        "_SYSTEMD_USER_UNIT",
        "COREDUMP_USER_UNIT",
    ):
        if entry.get(name) == unit:
            return True
    return first(entry, "MESSAGE_ID") == MSG_DROPPED and unit in first(entry, "MESSAGE")


def is_end(entry: Mapping[str, Any]) -> bool:
    """PID 1 says that a run of the unit is over."""
    message_id = first(entry, "MESSAGE_ID")
    if message_id:
        return message_id in ENDED_IDS
    text = first(entry, "MESSAGE")
    return first(entry, "_PID") == "1" and (
        "Failed with result '" in text or text.endswith((": Deactivated successfully.", ": Succeeded."))
    )


def is_exit(entry: Mapping[str, Any]) -> bool:
    """PID 1 says how the main process of the unit ended; its word about the whole unit may come much later."""
    message_id = first(entry, "MESSAGE_ID")
    if message_id:
        return message_id in (MSG_PROCESS_EXIT, *ENDED_IDS)
    return is_end(entry) or (
        first(entry, "_PID") == "1" and ": Main process exited, code=" in first(entry, "MESSAGE")
    )


def unit_name(name: str) -> str:
    """`sglang-main-ep8` -> `sglang-main-ep8.service`."""
    return (
        name
        if not name or re.search(r"\.(service|scope|socket|timer|slice|target|mount)$", name)
        else name + ".service"
    )


def project(entry: Entry) -> Entry:
    """Keep the fields that a diagnosis reads, and no text without end."""
    kept = {key: value for key, value in entry.items() if key in _KEPT}
    message = kept.get("MESSAGE")
    if (isinstance(message, list) and len(message) > MAX_MESSAGE_CHARS) or (isinstance(message, (str, bytes)) and len(message) > MAX_MESSAGE_CHARS):
        kept["MESSAGE"] = message[:MAX_MESSAGE_CHARS]
    if isinstance(message, list):
        kept["MESSAGE"] = text_of(kept["MESSAGE"])  # an array of numbers takes eight times its text
    return kept


def _weight(entry: Entry) -> int:
    message = entry.get("MESSAGE")
    size = len(message) if isinstance(message, (str, bytes, list)) else 0
    return 1500 + (size * 8 if isinstance(message, list) else size)


# --------------------------------------------------------------------------------------------- text formats


def parse_json(stream: Iterable[bytes]) -> Iterator[Entry]:
    """`journalctl -o json`, also -sse, -seq and -pretty, and a JSON array; lines that are none of these are skipped."""
    pending: list[str] = []
    depth_guard = 0
    for raw in stream:
        line = raw.strip().lstrip(b"\x1e")
        if line.startswith(b"data:"):
            line = line[5:].strip()
        if not line or line in (b"[", b"]", b","):
            continue
        if not pending:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line.rstrip(b",") if line.endswith(b",") else line)
                yield from _dicts(value)
                continue
            if not line.startswith((b"{", b"[")):
                continue
        pending.append(line.decode("utf-8", "replace"))
        depth_guard += 1
        if line in (b"}", b"},"):
            with contextlib.suppress(ValueError, RecursionError):
                yield from _dicts(json.loads("\n".join(pending).rstrip(",").lstrip("[")))
            pending, depth_guard = [], 0
        elif depth_guard > 2000:  # not JSON after all: do not collect for ever
            pending, depth_guard = [], 0


def _dicts(value: Any) -> Iterator[Entry]:
    if isinstance(value, dict):
        yield value
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield item


def parse_export(stream: IO[bytes]) -> Iterator[Entry]:
    """`journalctl -o export`: NAME=value lines, or NAME, newline, 64-bit little-endian length, bytes; an empty line ends an entry."""
    entry: Entry = {}
    while True:
        line = stream.readline(MAX_LINE_BYTES)
        if not line:
            break
        line = line.rstrip(b"\n")
        if not line:
            if entry:
                yield entry
            entry = {}
            continue
        name, sep, value = line.partition(b"=")
        if sep:
            _add(entry, name.decode("ascii", "replace"), value)
            continue
        head = stream.read(8)
        if len(head) < 8:
            break
        (size,) = struct.unpack("<Q", head)
        if size > MAX_LINE_BYTES:
            # A damaged length or a huge field: step over it in pieces, keep its beginning.
            kept = stream.read(MAX_MESSAGE_CHARS)
            left = size - len(kept)
            while left > 0:
                chunk = stream.read(min(left, 1 << 20))
                if not chunk:
                    break
                left -= len(chunk)
            _add(entry, name.decode("ascii", "replace"), kept)
        else:
            _add(entry, name.decode("ascii", "replace"), stream.read(size))
        stream.readline(2)
    if entry:
        yield entry


def _add(entry: Entry, name: str, raw: bytes) -> None:
    value: Any
    try:
        value = raw.decode("utf-8")
    except UnicodeDecodeError:
        value = raw
    if name in entry and name == "MESSAGE":
        entry[name] = f"{text_of(entry[name])}\n{text_of(value)}"
    else:
        entry[name] = value


_SHORT = re.compile(
    r"^(?P<when>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:[+-]\d\d:?\d\d|Z)?)"
    r" \S+ (?P<ident>[^\s\[\]:]+)(?:\[(?P<pid>\d+)\])?: ?(?P<text>.*)$"
)


def parse_short(stream: Iterable[bytes]) -> Iterator[Entry]:
    """The default output of journalctl, as people paste it: time, host, identifier[pid]: text. Little is known of such a line."""
    for raw in stream:
        line = raw.decode("utf-8", "replace").rstrip("\n")
        match = _SHORT.match(line)
        if not match:
            continue
        entry: Entry = {"MESSAGE": match.group("text"), "SYSLOG_IDENTIFIER": match.group("ident")}
        stamp = _short_time(match.group("when"))
        if stamp is not None:
            entry["__REALTIME_TIMESTAMP"] = str(stamp)
        if match.group("pid"):
            entry["_PID"] = match.group("pid")
        if match.group("ident") == "kernel":
            entry["_TRANSPORT"] = "kernel"
        unit = re.match(r"(\S+\.service): ", match.group("text")) if match.group("ident") == "systemd" else None
        if unit:
            entry["UNIT"] = unit.group(1)
        yield entry


def _short_time(text: str) -> int | None:
    import datetime

    try:
        if text[:4].isdigit():
            cleaned = re.sub(r"Z$", "+00:00", text.replace(",", "."))
            cleaned = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", cleaned)
            fraction = re.search(r"\.(\d+)", cleaned)
            if fraction:
                cleaned = cleaned.replace(fraction.group(0), "." + fraction.group(1)[:6].ljust(6, "0"))
            moment = datetime.datetime.fromisoformat(cleaned)
        else:
            # No year in the short form: this one, or the last where that would lie in the future.
            now = datetime.datetime.now(datetime.timezone.utc)
            moment = datetime.datetime.strptime(f"{now.year} {text[:15]}", "%Y %b %d %H:%M:%S").replace(
                tzinfo=datetime.timezone.utc
            )
            if moment > now + datetime.timedelta(days=2):
                moment = moment.replace(year=now.year - 1)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.timezone.utc)
        return int(moment.timestamp() * 1_000_000)
    except (ValueError, OverflowError):
        return None


def file_kind(path: str) -> str:
    """journal, json, export or short, by the first bytes."""
    with _open(path) as stream:
        head = stream.read(8192)
    if head.startswith(b"LPKSHHRH"):
        return "journal"
    body = head.lstrip(b"\xef\xbb\xbf \t\r\n\x1e")
    if body.startswith((b"{", b"[{", b"[\n", b"data:")):
        return "json"
    if re.match(rb"[_A-Z][A-Z0-9_]*(=|\n)", body):
        return "export"
    return "short"


def _open(path: str) -> IO[bytes]:
    stream: IO[bytes] = open(path, "rb")  # noqa: SIM115  (the caller closes it)
    magic = stream.read(2)
    stream.seek(0)
    if magic == b"\x1f\x8b":
        return io.BufferedReader(gzip.GzipFile(fileobj=stream))
    return stream


def read_text_file(path: str, notes: list[str] | None = None) -> Iterator[Entry]:
    """Entries of an exported file, one after another; of a damaged archive those before the damage, with a note."""
    kind = file_kind(path)
    try:
        with _open(path) as stream:
            if kind == "json":
                yield from parse_json(_lines(stream))
            elif kind == "export":
                yield from parse_export(stream)
            else:
                yield from parse_short(_lines(stream))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if notes is not None and not notes:
            notes.append(f"the file is damaged, its end could not be read: {error}")


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    while True:
        line = stream.readline(MAX_LINE_BYTES)
        if not line:
            return
        yield line


# --------------------------------------------------------------------------------------------- choosing and keeping


@dataclass
class _Run:
    """One invocation as the first pass over a file sees it."""

    invocation: str
    first_seen: int
    boot: str = ""
    last_seen: int = 0
    ended: bool = False


class Keeper:
    """Keeps the first entries, the last ones, and what stands around markers; counts the rest."""

    def __init__(self, head: int = HEAD_ENTRIES, tail: int = TAIL_ENTRIES, tail_bytes: int = TAIL_BYTES) -> None:
        self.head_limit, self.tail_limit, self.byte_limit = head, tail, tail_bytes
        self.head: list[tuple[int, Entry]] = []
        self.head_bytes = 0
        self.tail: deque[tuple[int, Entry]] = deque()
        self.tail_size = 0
        self.marked: list[tuple[int, Entry]] = []
        self.marked_bytes = 0
        self.follow: dict[str, int] = {}
        self.shapes: dict[tuple[str, str], int] = {}
        self.count = 0
        self.left_out = 0
        self.marked_left_out = 0

    def add(self, entry: Entry) -> None:
        entry = project(entry)
        position = self.count
        self.count += 1
        if len(self.head) < self.head_limit and self.head_bytes < self.byte_limit // 4:
            self.head.append((position, entry))
            self.head_bytes += _weight(entry)
            return
        self.tail.append((position, entry))
        self.tail_size += _weight(entry)
        while len(self.tail) > self.tail_limit or self.tail_size > self.byte_limit:
            old_position, old = self.tail.popleft()
            self.tail_size -= _weight(old)
            self._retire(old_position, old)

    def _retire(self, position: int, entry: Entry) -> None:
        """An entry leaves the tail: keep it when it, or one just before it by the same process, says something."""
        pid = first(entry, "_PID", "SYSLOG_PID")
        text = text_of(entry.get("MESSAGE")) or ""
        systemd = bool(entry.get("MESSAGE_ID")) or is_kernel(entry)
        if systemd or marked(text):
            self.follow[pid] = 80
        left = self.follow.get(pid, 0)
        if not left:
            self.left_out += 1
            return
        self.follow[pid] = left - 1
        # A flood is one fact: the first few of a shape are kept, the rest counted.
        shape = (pid, re.sub(r"\d+", "0", text[:160]))
        seen = self.shapes.get(shape, 0) + 1
        if len(self.shapes) < 50_000 or shape in self.shapes:
            self.shapes[shape] = seen
        if seen > 60 or self.marked_bytes > self.byte_limit:
            self.left_out += 1
            self.marked_left_out += seen <= 60
            return
        self.marked.append((position, entry))
        self.marked_bytes += _weight(entry)

    def entries(self) -> list[Entry]:
        kept = self.head + self.marked + list(self.tail)
        kept.sort(key=lambda item: item[0])
        return [entry for _position, entry in kept]


def collect_from_text(path: str, unit: str = "", invocation_id: str | None = None) -> Collected:
    """Two passes over an exported file: which runs are there, then the entries of the one asked for."""
    unit = unit_name(unit)
    kind = file_kind(path)

    notes: list[str] = []

    def entries() -> Iterator[Entry]:
        return read_text_file(path, notes)

    collected = collect_from_entries(entries, unit, invocation_id, untagged=kind == "short")
    collected.gaps += notes
    return collected


def collect_from_entries(
    source: Callable[[], Iterable[Entry]], unit: str = "", invocation_id: str | None = None, untagged: bool = False
) -> Collected:
    """Choose the invocation in one pass and keep what concerns it in a second; `source` is called twice."""
    wanted = (invocation_id or "").replace("-", "")
    if not unit:
        unit = _unit_in(source())
    runs: dict[str, _Run] = {}
    span: list[int] = []
    boots: list[str] = []
    tagged = False
    for position, entry in enumerate(source()):
        boot = first(entry, "_BOOT_ID")
        if boot and (not boots or boots[-1] != boot):
            boots.append(boot)
        if is_kernel(entry) or not about_unit(entry, unit):
            continue
        invocation = invocation_of(entry)
        if not invocation:
            continue
        tagged = True
        run = runs.get(invocation)
        if run is None:
            run = runs[invocation] = _Run(invocation, position, boot)
            if len(runs) > 1000:  # a crash loop of weeks: the old ones are of no interest
                del runs[next(iter(runs))]
        run.last_seen = position
        run.ended = run.ended or is_end(entry)
    chosen = wanted or choose(list(runs.values()), boots)
    collected = Collected(unit=unit, invocation_id=chosen or None)
    keeper, kernel = Keeper(), Keeper(head=0, tail=20 * KERNEL_ENTRIES)
    others = Keeper(head=50, tail=400)
    before = previous_run(list(runs.values()), chosen)
    earlier = Keeper(head=20, tail=PREVIOUS_ENTRIES)  # what the run before died of can turn a remedy round
    for entry in source():
        if is_kernel(entry):
            if kernel_interest(text_of(entry.get("MESSAGE")) or ""):
                kernel.add(entry)
            continue
        about = about_unit(entry, unit)
        if not about and not (untagged and not tagged):
            continue
        invocation = invocation_of(entry)
        if not tagged or invocation == chosen:
            keeper.add(entry)
            times = realtime(entry)
            if times is not None:
                span = [min(span[0], times), max(span[1], times)] if span else [times, times]
        elif about and before and invocation == before:
            earlier.add(entry)
        elif about and (not invocation or entry.get("UNIT") == unit):
            others.add(entry)  # what PID 1 says of other runs, and lines without an id: context only
    collected.entries = _in_order(_forward(earlier.entries()) + _forward(keeper.entries()) + _forward(others.entries()))
    collected.scanned = keeper.count
    collected.kernel = [entry for entry in kernel.entries() if _near(entry, span)]
    if keeper.marked_left_out:
        collected.gaps.append(
            f"{keeper.marked_left_out} further lines that look like errors were not kept: the log is too long"
        )
    return collected


def _near(entry: Entry, span: list[int]) -> bool:
    moment = realtime(entry)
    return moment is None or not span or span[0] - KERNEL_BEFORE_US <= moment <= span[1] + KERNEL_AFTER_US


def _forward(entries: list[Entry]) -> list[Entry]:
    """Oldest first, for a list that came in one piece: journalctl -r and some collectors run backwards."""
    times = [moment for moment in map(realtime, entries) if moment is not None]
    rising = sum(1 for one, other in zip(times, times[1:]) if one < other)
    falling = sum(1 for one, other in zip(times, times[1:]) if one > other)
    return entries[::-1] if falling > rising else entries


def _in_order(entries: list[Entry]) -> list[Entry]:
    """Merge by time what was read apart; entries of one moment keep their order, a list without times stays as it is."""
    if any(realtime(entry) is None for entry in entries):
        return entries
    return sorted(entries, key=lambda entry: realtime(entry) or 0)


def _unit_in(entries: Iterable[Entry]) -> str:
    """No unit was named: the last one that failed, else the one with most lines that looks like an engine's."""
    failed, counts = "", {}  # type: str, dict[str, int]
    for entry in entries:
        unit = unit_of(entry)
        if not unit.endswith(".service"):
            continue
        if first(entry, "MESSAGE_ID") == MSG_UNIT_FAILED:
            failed = unit
        comm = first(entry, "_COMM", "SYSLOG_IDENTIFIER")
        if comm.startswith(("python", "sglang", "vllm")) or "sglang" in unit:
            counts[unit] = counts.get(unit, 0) + 1
    if failed and (failed in counts or not counts):
        return failed
    return max(counts, key=lambda unit: counts[unit]) if counts else ""


def choose(runs: list[_Run], boots: list[str]) -> str:
    """The newest run that ended; one of an earlier boot ended with that boot; else the newest."""
    if not runs:
        return ""
    ordered = sorted(runs, key=lambda run: run.first_seen)
    newest = ordered[-1]
    for run in reversed(ordered):
        cut_off = run is not newest or (bool(boots) and bool(run.boot) and run.boot != boots[-1])
        if run.ended or cut_off:
            return run.invocation
    return newest.invocation


def previous_run(runs: list[_Run], chosen: str) -> str:
    """The run just before the chosen one; empty when there is none."""
    ordered = [run.invocation for run in sorted(runs, key=lambda run: run.first_seen)]
    at = ordered.index(chosen) if chosen in ordered else 0
    return ordered[at - 1] if at > 0 else ""


_KERNEL_INTEREST = re.compile(
    r"NVRM|Xid|nvidia|oom|Out of memory|Killed process|segfault|general protection|trap |traps:|invalid opcode|amdgpu|Memory cgroup|I/O error|EXT4-fs error|XFS|NV_ERR"
    r"|nvme|mce:|Hardware Error|AER|pcieport|hung_task|blocked for more than|soft lockup|Bus error"
)


def kernel_interest(text: str) -> bool:
    return bool(_KERNEL_INTEREST.search(text))


# --------------------------------------------------------------------------------------------- journalctl


class Journalctl:
    """The journal of this host, or one `.journal` file or directory, by the journalctl binary."""

    def __init__(self, file: str = "", directory: str = "", binary: str = "journalctl") -> None:
        self.base = [binary, "--quiet", "--no-pager", "--all", "-o", "json", "--output-fields=" + ",".join(FIELDS)]
        if file:
            self.base.append("--file=" + re.sub(r"([\[\]*?])", r"[\1]", file))
        elif directory:
            self.base.append("--directory=" + directory)
        self.is_host = not (file or directory)
        self.errors: list[str] = []

    def start(
        self, matches: Iterable[str], *, reverse: bool = False, limit: int | None = None, extra: Iterable[str] = ()
    ) -> Query:
        command = list(self.base)
        if reverse:
            command.append("--reverse")
        if limit is not None:
            command.append(f"--lines={limit}")
        command += [*extra, *matches]
        return Query(command, self.errors)

    def fetch(self, matches: Iterable[str], **options: Any) -> list[Entry]:
        with self.start(matches, **options) as query:
            return list(itertools.islice(query.entries(seconds=MAX_SCAN_SECONDS), options.get("limit")))


class Query:
    """One running journalctl; entries come as they are read, and leaving early ends it."""

    def __init__(self, command: list[str], errors: list[str]) -> None:
        self.errors = errors
        environment = dict(os.environ, LC_ALL="C.UTF-8", SYSTEMD_COLORS="0")
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                close_fds=True,
            )
        except OSError as error:
            raise JournalError(f"cannot run journalctl: {error}") from error
        # Room for a whole crash: journalctl then works on while this process looks at another one's answer.
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.process.stdout.fileno(), F_SETPIPE_SZ, PIPE_BYTES)
        self.timed_out = False
        self.oversized = 0

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def entries(self, seconds: float) -> Iterator[Entry]:
        for line in self.lines(seconds):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value

    def lines(self, seconds: float) -> Iterator[bytes]:
        """Lines of output until the end or the deadline; one that is longer than MAX_LINE_BYTES is dropped."""
        assert self.process.stdout is not None
        handle = self.process.stdout.fileno()
        poller = select.poll()
        poller.register(handle, select.POLLIN | select.POLLHUP)
        deadline = time.monotonic() + seconds
        rest = b""
        skipping = False
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                self.timed_out = True
                return
            if not poller.poll(left * 1000):
                self.timed_out = True
                return
            chunk = os.read(handle, 1 << 16)
            if not chunk:
                if rest and not skipping:
                    yield rest
                return
            parts = chunk.split(b"\n")
            if len(parts) == 1:
                rest = b"" if skipping else rest + chunk
            else:
                if not skipping:
                    yield rest + parts[0]
                skipping = False
                yield from parts[1:-1]
                rest = parts[-1]
            if len(rest) > MAX_LINE_BYTES:
                rest, skipping = b"", True
                self.oversized += 1

    def close(self) -> None:
        process = self.process
        if process.poll() is None:
            # Only ends our own child; it has nothing to save.
            process.kill()
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdout.close()
        with contextlib.suppress(OSError, ValueError):
            message = process.stderr.read(4096).decode("utf-8", "replace").strip()
            process.stderr.close()
            if message and process.returncode not in (None, 0):
                self.errors.append(message.splitlines()[0][:300])
        process.wait()


def find_invocation(source: Journalctl, unit: str) -> tuple[str | None, list[Entry], bool]:
    """The newest run that ended, else the current one. Also PID 1's recent entries, and whether the run was cut off by a reset."""
    ids = (MSG_UNIT_STARTED, MSG_UNIT_STARTING, MSG_UNIT_FAILED, MSG_UNIT_SUCCESS, MSG_UNIT_START_FAILED)
    told = source.fetch([*(f"MESSAGE_ID={value}" for value in ids), f"UNIT={unit}"], reverse=True, limit=TOLD_ENTRIES)
    seen: list[str] = []
    ended: set[str] = set()
    boot_of: dict[str, str] = {}
    for entry in told:  # newest first
        invocation = invocation_of(entry)
        if not invocation:
            continue
        if invocation not in seen:
            seen.append(invocation)
            boot_of[invocation] = first(entry, "_BOOT_ID")
        if first(entry, "MESSAGE_ID") in ENDED_IDS:
            ended.add(invocation)
    if seen:
        boot_now = _newest_boot(source) if seen[0] not in ended else ""
        for position, invocation in enumerate(seen):
            cut_off = position > 0 or (bool(boot_now) and boot_of[invocation] not in ("", boot_now))
            if invocation in ended or cut_off:
                return invocation, told, invocation not in ended
        return seen[0], told, False
    # PID 1 said nothing (rotated away, or its log level is higher): the unit's own newest line knows.
    last = source.fetch([f"_SYSTEMD_UNIT={unit}"], reverse=True, limit=1)
    return (invocation_of(last[0]) or None if last else None), told, False


def _newest_boot(source: Journalctl) -> str:
    if source.is_host:
        with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as handle:
            return handle.read().strip().replace("-", "")
    newest = source.fetch([], reverse=True, limit=1)
    return first(newest[0], "_BOOT_ID") if newest else ""


def _beside(source: Journalctl, unit: str, begin: int | None, end: int | None) -> Query:
    """What the kernel, systemd-coredump and journald wrote in a stretch of time, newest first."""
    around = [f"--since=@{max(0, begin - BESIDE_US) / 1e6:.6f}"] if begin is not None else []
    if end is not None:
        around.append(f"--until=@{(end + KERNEL_AFTER_US) / 1e6:.6f}")
    matches = ["_TRANSPORT=kernel", "+", f"MESSAGE_ID={MSG_COREDUMP}", f"COREDUMP_UNIT={unit}", "+", f"MESSAGE_ID={MSG_DROPPED}"]
    return source.start(matches, reverse=True, limit=KERNEL_ENTRIES, extra=around)


def _ended_last(peeked: Iterable[Entry]) -> tuple[str, int | None]:
    """From the unit's newest entries, newest first: the run they end with and when, empty where they do not end with one."""
    seen = ""
    for entry in peeked:
        invocation = invocation_of(entry)
        if not invocation:
            continue
        if seen and invocation != seen:
            return "", None
        seen = invocation
        if first(entry, "MESSAGE_ID") in ENDED_IDS:
            return invocation, realtime(entry)
    return "", None


def read_invocation(unit: str, invocation_id: str | None = None, source: Journalctl | None = None) -> Collected:
    """Entries of one invocation of a unit from journalctl, with the kernel's of the same boot and time."""
    source = source or Journalctl()
    unit = unit_name(unit)
    with contextlib.ExitStack() as queries:
        return _read_invocation(source, unit, (invocation_id or "").replace("-", ""), queries)


def _read_invocation(source: Journalctl, unit: str, wanted: str, queries: contextlib.ExitStack) -> Collected:
    chosen: str | None = wanted or None
    told: list[Entry] = []
    cut_off = over = False
    end: int | None = None
    begin: int | None = None
    # The last lines of a process that is gone lose their invocation id (journald looks it up when it reads them), so the
    # end is read by unit, and whatever names another run is left out.
    by_unit = [f"_SYSTEMD_UNIT={unit}", "+", f"UNIT={unit}"]
    tail_query: Query | None = None
    tail_entries: Iterator[Entry] = iter(())
    if chosen is None:
        # Mostly the run asked for has just ended: then the newest entries say so, and nothing else need be asked first.
        tail_query = queries.enter_context(source.start(by_unit, reverse=True))
        stream = tail_query.entries(seconds=MAX_SCAN_SECONDS)
        peeked = list(itertools.islice(stream, PEEKED_ENTRIES))
        tail_entries = itertools.chain(peeked, stream)
        newest, end = _ended_last(peeked)
        if newest:
            chosen, over = newest, True
        else:
            chosen, told, cut_off = find_invocation(source, unit)
            if not told or invocation_of(next((entry for entry in told if invocation_of(entry)), {})) != chosen:
                tail_query.close()
                tail_query = None
    collected = Collected(unit=unit, invocation_id=chosen, source=source)
    if chosen is None:
        if source.errors:
            collected.gaps.append("the journal could not be read: " + source.errors[0])
        return collected
    by_run = [f"_SYSTEMD_INVOCATION_ID={chosen}", "+", f"INVOCATION_ID={chosen}"]
    until: list[str] = []
    if not over:
        bounds = [moment for entry in told if invocation_of(entry) == chosen for moment in [realtime(entry)] if moment is not None]
        over = any(invocation_of(entry) == chosen and is_end(entry) for entry in told)
        if not bounds:
            newest_of_run = source.fetch(by_run, reverse=True, limit=1)
            bounds = [moment for moment in (realtime(entry) for entry in newest_of_run) if moment is not None]
            over = bool(bounds) and not wanted
        if bounds and (over or wanted):
            until = [f"--until=@{(max(bounds) + AFTER_END_US) / 1e6:.6f}"]
        if bounds and told:
            begin, end = min(bounds), max(bounds) if over else None
    # All that is known by now is read at the same time: most of the cost is starting journalctl and opening the files.
    head_query = queries.enter_context(source.start(by_run))
    beside: Query | None = None
    if end is not None or begin is not None:
        beside = queries.enter_context(_beside(source, unit, begin, end))
    if tail_query is None:
        tail_query = queries.enter_context(source.start(by_unit, reverse=True, extra=until))
        tail_entries = tail_query.entries(seconds=MAX_SCAN_SECONDS)
    tail, reached_start = _read_back(tail_query, tail_entries, collected)
    head: list[Entry] = []
    if not reached_start:
        for entry in head_query.entries(seconds=5.0):
            head.append(project(entry))
            if len(head) >= HEAD_ENTRIES_INDEXED:
                break
    cursors = {entry.get("__CURSOR") for entry in tail}
    entries = [entry for entry in head if entry.get("__CURSOR") not in cursors] + tail
    times = [moment for moment in (realtime(entry) for entry in entries) if moment is not None]
    if times:
        boot = first(entries[-1], "_BOOT_ID")
        beside = beside or queries.enter_context(_beside(source, unit, min(times), max(times)))
        found = []
        size = 0
        for entry in beside.entries(seconds=5.0):
            if (realtime(entry) or 0) < min(times) - BESIDE_US or size > TAIL_BYTES // 4:
                break  # newest first: the rest is older still
            if kernel_interest(first(entry, "MESSAGE")) if is_kernel(entry) else about_unit(entry, unit):
                found.append(project(entry))
                size += _weight(found[-1])
        for entry in reversed(found):
            if not is_kernel(entry):
                entries.append(entry)
            elif first(entry, "_BOOT_ID") in ("", boot):
                collected.kernel.append(entry)
    context = [entry for entry in reversed(told) if invocation_of(entry) != chosen]
    if cut_off and not context:
        collected.gaps.append("the journal holds no end of this run: the host was reset, froze or lost power")
    collected.entries = _in_order(entries + [project(entry) for entry in context])
    if not entries and source.errors:
        collected.gaps.append("the journal could not be read: " + source.errors[0])
    return collected


def add_previous_run(collected: Collected) -> bool:
    """Add the end of the run before this one; False when there is none. Only some causes need it, so it is read apart."""
    source = collected.source
    if source is None or not collected.invocation_id:
        return False
    ids = [f"MESSAGE_ID={value}" for value in (MSG_UNIT_STARTED, MSG_UNIT_STARTING, MSG_UNIT_FAILED)]
    order: list[str] = []  # newest first
    for entry in source.fetch([*ids, f"UNIT={collected.unit}"], reverse=True, limit=40):
        invocation = invocation_of(entry)
        if invocation and invocation not in order:
            order.append(invocation)
    if collected.invocation_id not in order[:-1]:
        return False
    before = order[order.index(collected.invocation_id) + 1]
    matches = [f"_SYSTEMD_INVOCATION_ID={before}", "+", f"INVOCATION_ID={before}"]
    found = source.fetch(matches, reverse=True, limit=PREVIOUS_ENTRIES)
    known = {entry.get("__CURSOR") for entry in collected.entries}
    fresh = [project(entry) for entry in found if entry.get("__CURSOR") not in known]
    collected.entries = _in_order(fresh[::-1] + collected.entries)
    return bool(found)


_CERTAIN = re.compile(
    r"hit an exception|Traceback \(most recent|Fatal Python error|terminate called|error: |crashed with exit code"
)
_TRAILING = re.compile(r"ProcessGroupNCCL|NCCL|[Ww]atchdog|Connection (?:closed|reset)|Health check failed|TCPStore")


def _read_back(query: Query, stream: Iterable[Entry], collected: Collected) -> tuple[list[Entry], bool]:
    """Walk back from the end of the run until the failure and a quiet stretch before it are read. True: the start was reached."""
    kept: deque[list[Entry]] = deque()
    chunk: list[Entry] = []
    size = chunk_bytes = 0
    quiet = 0
    certain = trailing = False
    count = others = 0
    dropped = 0

    def finish() -> list[Entry]:
        entries = [entry for part in kept for entry in part] + chunk
        entries.reverse()
        collected.scanned += count
        return entries

    chosen = collected.invocation_id
    for entry in stream:
        of_run = invocation_of(entry)
        if of_run and of_run != chosen:
            if count:
                # An older run: the start of this one is passed. (PID 1 may still speak of an older one for a moment.)
                others += 1
                if others > 20:
                    return finish(), dropped == 0
            continue
        count += 1
        entry = project(entry)
        chunk.append(entry)
        size += _weight(entry)
        chunk_bytes += _weight(entry)
        text = text_of(entry.get("MESSAGE")) or ""
        if text.startswith(("  File ", "    ")) or marked(text[:4096]):
            quiet = 0
            certain = certain or bool(_CERTAIN.search(text[:4096]))
            trailing = trailing or bool(_TRAILING.search(text[:4096]))
        else:
            quiet += 1
        enough = QUIET_ENTRIES if certain and not trailing else 25 * QUIET_ENTRIES
        if quiet >= enough and (certain or trailing):
            return finish(), False
        if len(chunk) >= 512 or chunk_bytes > CHUNK_BYTES:
            # Beyond the tail only stretches with a marker are worth their memory.
            if size > TAIL_BYTES or count > TAIL_ENTRIES:
                if (
                    any(marked((text_of(item.get("MESSAGE")) or "")[:4096]) for item in chunk)
                    and size < 2 * TAIL_BYTES
                ):
                    kept.append(_thin(chunk))
                else:
                    size -= sum(_weight(item) for item in chunk)
                    dropped += len(chunk)
            else:
                kept.append(chunk)
            chunk = []
            chunk_bytes = 0
        if count >= MAX_SCAN_ENTRIES:
            break
    if count >= MAX_SCAN_ENTRIES or query.timed_out:
        if not certain:
            collected.gaps.append(
                f"only the last {count} entries of this run were read; nothing in them says why it failed"
            )
        return finish(), False
    if query.oversized:
        collected.gaps.append(f"{query.oversized} entries of more than {MAX_LINE_BYTES >> 20} MiB were skipped")
    return finish(), dropped == 0


def _thin(chunk: list[Entry]) -> list[Entry]:
    """Drop repetitions of one shape: a flood is one fact."""
    counts: dict[str, int] = {}
    out = []
    for entry in chunk:
        text = text_of(entry.get("MESSAGE")) or ""
        shape = first(entry, "_PID") + re.sub(r"\d+", "0", text[:160])
        counts[shape] = counts.get(shape, 0) + 1
        if counts[shape] <= 10:
            out.append(entry)
    return out


def collect(unit: str = "", invocation_id: str | None = None, journal_file: str = "") -> Collected:
    """One entrance for the module: the host's journal, or a file of any of the known kinds."""
    if not journal_file:
        return read_invocation(unit, invocation_id)
    if os.path.isdir(journal_file):
        return read_invocation(unit, invocation_id, Journalctl(directory=journal_file))
    if not os.path.exists(journal_file):
        raise JournalError(f"{journal_file}: no such file")
    try:
        kind = file_kind(journal_file)
    except (OSError, EOFError, zlib.error) as error:
        raise JournalError(f"{journal_file}: {error}") from error
    if kind != "journal":
        try:
            return collect_from_text(journal_file, unit, invocation_id)
        except OSError as error:
            raise JournalError(f"{journal_file}: {error}") from error
    source = Journalctl(file=journal_file)
    if not unit:
        recent = source.fetch([], reverse=True, limit=2000)
        unit = _unit_in(reversed(recent))
    return read_invocation(unit, invocation_id, source)


def cursor_time(value: int | str | None) -> int | None:
    """A timestamp field as microseconds, None where it is none."""
    try:
        return int(value) if value is not None else None
    except (TypeError, ValueError):
        return None
