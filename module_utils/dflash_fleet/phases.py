"""Where a starting engine stands, read from its log lines.

SGLang prints one line per step and rank; wording differs by release and the drafter repeats the weights, KV pool and
graph steps of the target. Nothing here depends on the order of steps: a phase once reached is never left backwards
(options such as post-capture sizing and overlapped loading print early steps late), and whatever moves is progress.
Wording: SGLang 0.5.11 to 0.5.23, log calls in `sglang/srt/model_executor` and `sglang/srt/speculative`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from . import own_log, words
from .tracebacks import BEHIND_BAR

PHASES = ("launch", "dist_init", "weights", "kv_cache", "graph_capture", "warmup", "serving", "stopping")
_ORDER = {name: index for index, name in enumerate(PHASES)}

# Seconds without progress after which a phase counts as hung. Launch and warm-up print nothing while Python imports and
# kernels are compiled; one shard of a large model from a slow disk takes minutes; a first NCCL init crosses every link.
STALL = {
    "launch": 300.0,
    "dist_init": 600.0,
    "weights": 300.0,
    "kv_cache": 120.0,
    "graph_capture": 600.0,
    "warmup": 600.0,
    "serving": 600.0,
    "stopping": 600.0,
}

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# "[2026-11-29 12:00:00 TP3 EP3] text"; the rank part appears only for sizes above one.
_PREFIX = re.compile(
    r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?"
    r"(?P<rank>(?: (?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d+)*)\] ?(?P<text>.*)$",
    re.DOTALL,
)
_TITLE_RANK = re.compile(r"^sglang::scheduler((?:_(?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d+)*)")

_RANK_PART = re.compile(r"(?:ATTN_CP|MOE_DP|DP|PP|TP|EP)\d+")

_CAPTURE_STEP = r"^Capture (?:(?P<who>target|draft) (?P<what>verify|decode|prefill) |piecewise )?(?i:cuda graph) "

# (phase, what it says, pattern): begin enters the phase; end finishes it for the rank that printed it.
_MARKS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("dist_init", "begin", re.compile(r"^Init (?:torch distributed|parallel) begin")),  # second wording from 0.5.21
    ("dist_init", "end", re.compile(r"^Init (?:torch distributed|parallel) ends?\b")),
    ("weights", "begin", re.compile(r"^Load weight begin")),
    ("weights", "end", re.compile(r"^Load weight end")),
    ("kv_cache", "begin", re.compile(r"KV Cache is allocated|^KV Cache VA upper bound")),
    ("kv_cache", "end", re.compile(r"^Memory pool end")),
    # "Capture cuda graph begin" up to 0.5.13, "Capture target verify CUDA graph begin" from 0.5.14.
    ("graph_capture", "begin",
     re.compile(_CAPTURE_STEP + r"begin\b")),
    ("graph_capture", "end",
     re.compile(_CAPTURE_STEP + r"end\b")),
    ("warmup", "begin", re.compile(r"Uvicorn running on |^(?:INFO: +)?Application startup complete")),
    ("serving", "begin", re.compile(r"^The server is fired up and ready to roll")),
    ("stopping", "begin", re.compile(r"^SIGTERM received\.|^Gracefully exiting\.\.\.")),
)  # fmt: skip

# "Multi-thread loading shards:  31% Completed | 20/64 [00:12<00:27, 1.6it/s]" and plain tqdm bars.
_SHARDS = re.compile(
    r"loading (?:safetensors )?(?:checkpoint )?(?:shards|weights).*?(\d{1,3})%.*?\| *(\d+)/(\d+)", re.IGNORECASE
)
# "Capturing batches (bs=48 avail_mem=7.31 GB):  35%|###   | 6/17 [00:02<00:04]"
_CAPTURE = re.compile(r"Capturing (?:batches|num tokens).*?(\d{1,3})%.*?\| *(\d+)/(\d+)")
_GRAPH_OFF = re.compile(r"^Decode batch\b.*\bcuda graph: False\b")
_GRAPH_ON = re.compile(r"^Decode batch\b.*\bcuda graph: True\b")
# Lines that a probe causes, or that repeat for ever: they prove that something runs, not that it gets further.
_NOISE = re.compile(r'"(?:GET|POST|HEAD) /\S* HTTP/|^Prefill batch|^Decode batch|HEALTH_CHECK')
# The engine says that it is about to end, or has lost a part of itself.
_FATAL = re.compile(
    r"Scheduler hit an exception|Received sigquit from a child process|SIGQUIT received\.|"
    r"Subprocess \S+ \(pid=\d+\) crashed|TokenizerManager hit an exception|DetokenizerManager hit an exception|"
    r"Rank \d+ scheduler (?:died|is dead)|Initialization failed\.|watchdog timeout \(self\.watchdog_timeout=",
    re.IGNORECASE,
)


def message_lines(message: Any) -> list[str]:
    """The lines of a journal MESSAGE: text, a list of byte numbers (it has control characters, as bars do), or null."""
    if message is None:
        return []
    if isinstance(message, list):
        if message and all(isinstance(item, int) for item in message):
            message = bytes(item & 0xFF for item in message).decode("utf-8", "replace")
        else:  # a field that occurs more than once
            return [line for item in message for line in message_lines(item)]
    text = BEHIND_BAR.sub("\n", _ANSI.sub("", str(message)))
    return [part for part in re.split(r"[\r\n]+", text) if part.strip()]


def rank_of(text: str, entry: dict[str, Any]) -> tuple[str | None, str]:
    """(rank as the log writes it, text without its prefix); the rank is None for the parent and for a single rank."""
    found = _PREFIX.match(text)
    if found:
        rank = found.group("rank").strip()
        if rank:
            return rank, found.group("text")
        text = found.group("text")
    title = _TITLE_RANK.match(str(entry.get("_CMDLINE") or ""))
    if title and title.group(1):
        return " ".join(_RANK_PART.findall(title.group(1))), text
    return None, text


def entry_time(entry: dict[str, Any]) -> float | None:
    """Monotonic seconds of a journal entry (the same clock as systemd's *Monotonic timestamps)."""
    value = entry.get("__MONOTONIC_TIMESTAMP")
    try:
        return int(value) / 1e6 if value is not None else None
    except (TypeError, ValueError):
        return None


class PhaseTracker:
    """Follows one start of one engine. Feed it the unit's journal entries; ask `snapshot()` at any time."""

    def __init__(self, ranks: int = 1, drafter: bool = False, started: float | None = None) -> None:
        self.ranks = max(1, int(ranks))
        self.drafter = drafter
        self.started = started  # monotonic seconds
        self.phase = "launch"
        self.entered: dict[str, float] = {}
        if started is not None:
            self.entered["launch"] = started
        self.last_progress = started
        self.last_seen = started
        self.activity: int | None = None
        self.done: dict[str, set[str]] = {}
        self.passes: dict[str, int] = {}  # ends per "phase/rank": a second one belongs to the drafter
        self.percent: float | None = None
        self.step: tuple[int, int] | None = None
        self.detail = ""
        self.graphs: bool | None = None  # what the decode lines say; None: none seen yet
        self.fatal: str | None = None
        self.fatal_at: float | None = None

    # feeding

    def feed(self, entry: dict[str, Any]) -> bool:
        """Take one journal entry (or a mapping with MESSAGE); True when it showed progress."""
        when = entry_time(entry)
        if when is not None:
            self.last_seen = when if self.last_seen is None else max(self.last_seen, when)
            if self.started is None:
                self.started = when
                self.entered.setdefault("launch", when)
                self.last_progress = when
        moved = False
        for line in message_lines(entry.get("MESSAGE")):
            moved = self._line(line, entry, when) or moved
        if moved and when is not None:
            self.last_progress = when if self.last_progress is None else max(self.last_progress, when)
        return moved

    def feed_many(self, entries: Iterable[dict[str, Any]]) -> None:
        for entry in entries:
            self.feed(entry)

    def _line(self, line: str, entry: dict[str, Any], when: float | None) -> bool:
        rank, text = rank_of(line, entry)
        if entry.get("_PID") == "1" or entry.get("_SYSTEMD_UNIT") == "init.scope":
            return False  # systemd's own words about the unit
        if entry.get("SYSLOG_IDENTIFIER") == own_log.IDENTIFIER:
            return False  # ours
        if _FATAL.search(text) and self.fatal is None:
            self.fatal, self.fatal_at = text.splitlines()[0][:300], when
        if _GRAPH_OFF.match(text):
            self.graphs = False
        elif _GRAPH_ON.match(text) and self.graphs is None:
            self.graphs = True
        for phase, what, pattern in _MARKS:
            found = pattern.search(text)
            if found:
                return self._mark(phase, what, rank, found, text, when)
        bar = _SHARDS.search(text)
        if bar:
            return self._bar("weights", bar, when)
        bar = _CAPTURE.search(text)
        if bar:
            return self._bar("graph_capture", bar, when)
        # In the early phases any line of the engine is a sign of life; later only real steps are.
        return _ORDER[self.phase] <= _ORDER["dist_init"] and not _NOISE.search(text)

    def _mark(
        self, phase: str, what: str, rank: str | None, found: re.Match[str], text: str, when: float | None
    ) -> bool:
        key = rank or "0"
        moved = self._enter(phase, when)
        groups = found.groupdict()
        if phase == "graph_capture":
            draft_pass = groups.get("who") == "draft" or (
                not groups.get("who") and self.passes.get(f"weights/{key}", 0) >= 2
            )
            if what == "begin" and self.phase == phase:
                self.detail = " ".join(
                    part for part in ("draft" if draft_pass else "", groups.get("what") or "") if part
                )
                self.percent, self.step = None, None
        if (
            what == "begin"
            and phase == "weights"
            and self.passes.get(f"weights/{key}", 0) >= 1
            and _ORDER[self.phase] < _ORDER["warmup"]
        ):
            self.percent, self.step, self.detail = None, None, "drafter weights"
            moved = True
        if what == "end":
            self.passes[f"{phase}/{key}"] = self.passes.get(f"{phase}/{key}", 0) + 1
            self.done.setdefault(phase, set()).add(key)
            moved = True
        return moved

    def _bar(self, phase: str, bar: re.Match[str], when: float | None) -> bool:
        moved = self._enter(phase, when)
        step = (int(bar.group(2)), int(bar.group(3)))
        if self.phase == phase or (phase == "weights" and self.detail == "drafter weights"):
            moved = moved or step != self.step
            self.step = step
            self.percent = min(100.0, 100.0 * step[0] / step[1]) if step[1] else float(bar.group(1))
        return moved

    def _enter(self, phase: str, when: float | None) -> bool:
        if _ORDER[phase] <= _ORDER[self.phase]:
            return False
        self.phase = phase
        self.percent, self.step, self.detail = None, None, ""
        if when is not None:
            self.entered[phase] = when
        return True

    def enter(self, phase: str, when: float) -> bool:
        """Move on for a reason outside the log (the port opened, the gate passed)."""
        moved = self._enter(phase, when)
        if moved:
            self.last_progress = when if self.last_progress is None else max(self.last_progress, when)
        return moved

    def alive(self, activity: int, now: float, step: int = 1024) -> None:
        """Note a counter of work done (see `units.activity`); it counts as progress once it has grown by `step`.

        A progress bar reaches the journal only with its newline, at its end: the longest part of a load prints nothing.
        """
        if self.activity is None or activity < self.activity:
            self.activity = activity
        elif activity - self.activity >= step and _ORDER[self.phase] < _ORDER["serving"]:
            self.activity = activity
            self.last_progress = now if self.last_progress is None else max(self.last_progress, now)

    # reading

    def ranks_done(self, phase: str) -> int:
        """How many ranks have finished the phase; all of them once a later phase is entered."""
        done = len(self.done.get(phase, ()))
        if done and _ORDER[phase] < _ORDER[self.phase]:
            # Ranks move on together (they meet in collectives), so a missing line was lost on the way.
            return self.ranks
        return min(done, self.ranks)

    def seconds(self, now: float | None = None) -> dict[str, float]:
        """Seconds spent in each phase that was entered; the present one up to `now` (or the last line)."""
        order = [name for name in PHASES if name in self.entered]
        until = now if now is not None else self.last_seen
        out: dict[str, float] = {}
        for index, name in enumerate(order):
            end = self.entered[order[index + 1]] if index + 1 < len(order) else until
            out[name] = max(0.0, round((end if end is not None else self.entered[name]) - self.entered[name], 1))
        return out

    def snapshot(self, now: float | None = None) -> dict[str, Any]:
        """{phase, phases: [{name, seconds, ranks_done, ranks}], percent, step, detail, ranks_done, ranks}."""
        seconds = self.seconds(now)
        rows: list[dict[str, Any]] = []
        for name in PHASES:
            if name not in seconds:
                continue
            row: dict[str, Any] = {"name": name, "seconds": seconds[name]}
            if name in ("dist_init", "weights", "kv_cache", "graph_capture"):
                row["ranks_done"] = self.ranks_done(name)
                row["ranks"] = self.ranks
            rows.append(row)
        return {
            "phase": self.phase,
            "phases": rows,
            "percent": None if self.percent is None else round(self.percent),
            "step": None if self.step is None else list(self.step),
            "detail": self.detail,
            "ranks_done": self.ranks_done(self.phase),
            "ranks": self.ranks,
        }

    def remaining(self, baseline: dict[str, Any] | None, now: float | None = None) -> float | None:
        """Seconds left until it serves, by the phases of the last good start; None without one."""
        return remaining(self.phase, self.seconds(now).get(self.phase, 0.0), self.percent, baseline)

    def stalled(self, now: float, limits: dict[str, float] | None = None, since: float = 0.0) -> float | None:
        """Seconds without progress, from `since` on, when they exceed the limit of the phase, else None."""
        limit = {**STALL, **(limits or {})}[self.phase]
        if self.last_progress is None or limit <= 0:
            return None
        quiet = now - max(self.last_progress, since)
        return quiet if quiet >= limit else None

    # handing on to a later process

    def state(self) -> dict[str, Any]:
        """Everything, as plain data for `from_state`."""
        return {
            "ranks": self.ranks, "drafter": self.drafter, "started": self.started, "phase": self.phase,
            "entered": self.entered,
            "last_progress": self.last_progress, "last_seen": self.last_seen, "passes": self.passes,
            "done": {name: sorted(ranks) for name, ranks in self.done.items()}, "percent": self.percent,
            "step": None if self.step is None else list(self.step), "detail": self.detail, "graphs": self.graphs,
            "fatal": self.fatal, "fatal_at": self.fatal_at,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PhaseTracker:
        tracker = cls(state["ranks"], state["drafter"])
        for name in (
            "started",
            "phase",
            "last_progress",
            "last_seen",
            "percent",
            "detail",
            "graphs",
            "fatal",
            "fatal_at",
        ):
            setattr(tracker, name, state[name])
        tracker.entered = {name: float(when) for name, when in state["entered"].items()}
        tracker.passes = {name: int(count) for name, count in state["passes"].items()}
        tracker.done = {name: set(ranks) for name, ranks in state["done"].items()}
        tracker.step = None if state["step"] is None else (int(state["step"][0]), int(state["step"][1]))
        return tracker


def remaining(phase: str, elapsed: float, percent: float | None, baseline: dict[str, Any] | None) -> float | None:
    """Seconds left: the rest of this phase (by its percentage where there is one), and all later ones, as last time.

    `baseline` is {phase: seconds} of the last good start.
    """
    if not baseline or phase not in _ORDER or _ORDER[phase] >= _ORDER["serving"]:
        return None
    usual = {name: float(baseline.get(name) or 0.0) for name in PHASES}
    later = sum(usual[name] for name in PHASES[_ORDER[phase] + 1 : _ORDER["serving"]])
    here = max(0.0, usual[phase] - elapsed)
    if percent is not None and percent >= 5 and elapsed > 0:
        # This start's own speed, weighted more the further it has come.
        share = min(percent, 100.0) / 100.0
        here = share * (elapsed / share - elapsed) + (1 - share) * here
    return round(later + here, 1)


def progress_line(
    host: str, elapsed: float, snapshot: dict[str, Any], left: float | None = None, width: int = 0
) -> str:
    """One line for a person: `gpu-01  0:14  weights        8/8 ranks  31 %   about 1:40 left`."""
    parts = [f"{host:<{width}}", f"{words.clock(elapsed):>4}", f"{snapshot['phase']:<13}"]
    if snapshot["phase"] in ("dist_init", "weights", "kv_cache", "graph_capture") and snapshot["ranks"] > 1:
        parts.append(f"{snapshot['ranks_done']}/{snapshot['ranks']} ranks")
    step = snapshot.get("step")
    if snapshot["phase"] == "graph_capture" and step:
        parts.append(f"{snapshot.get('detail') or 'graphs'} {step[0]}/{step[1]}")
    elif snapshot.get("detail"):
        parts.append(str(snapshot["detail"]))
    if snapshot.get("percent") is not None:
        parts.append(f"{snapshot['percent']:>2} %")
    if left is not None:
        parts.append(f" about {words.clock(left)} left" if left >= 1 else " any moment now")
    return "  ".join(parts).rstrip()
