"""A long task as a row of short runs of its module: what the controller does while a host works.

Shared by action plugins. Nothing of Ansible is imported here; what belongs to it is handed in.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from . import words

# Asked when a plugin is loaded, which the main process does: workers have lost the terminal.
ON_TERMINAL = bool(sys.stdout and sys.stdout.isatty())

SLICE = 10.0  # s between lines of a host while nothing changes
QUIET_SLICE = 60.0  # s; with nothing to show, slices only keep a lost host from going unnoticed
AWAY = 180.0  # s a host may be out of reach (a reboot) before the task gives up on it, where nothing else is said
AWAY_PAUSE = 5.0  # s between attempts to reach it


def wanted(mode: str, variable: str, warn: Callable[[str], None]) -> bool:
    """Whether lines are shown, from the variable that says so."""
    if mode not in ("auto", "always", "never"):
        warn(f"{variable} is auto, always or never, not {mode}: taken as auto")
    return mode == "always" or (mode != "never" and ON_TERMINAL)


def width(host: str, task_vars: dict[str, Any]) -> int:
    """How wide the column of hosts is."""
    return max([len(name) for name in task_vars.get("ansible_play_hosts_all") or [host]] + [len(host)])


def follow(
    run: Callable[[Any, float], dict[str, Any]],
    begin: Any,
    lost: type[Exception],
    connection: Any,
    host: str,
    line: Callable[[dict[str, Any]], tuple[Any, str]],
    show: Callable[[str], None] | None,
    away: float = AWAY,
) -> dict[str, Any]:
    """Run slice after slice until one has finished; its answer.

    `run(resume, seconds)` is one slice, which goes on from what the last one gave as `resume` (first: `begin`).
    `lost` is what it raises when the host is out of reach, in the end for longer than `away` seconds.
    `line(answer)` is (what it is about, text): a line is shown when what it is about changes, else every SLICE seconds,
    and none where the text is empty. `host` is its name as it stands in lines.
    """
    resume = begin
    away_since: float | None = None
    printed: tuple[Any, float] = (None, 0.0)
    while True:
        failure: Exception | None = None
        answer: dict[str, Any] = {}
        try:
            answer = run(resume, SLICE if show else QUIET_SLICE)
        except lost as error:
            failure = error
        if failure is not None or answer.get("unreachable"):
            now = time.monotonic()
            away_since = now if away_since is None else away_since
            if now - away_since >= away:
                if failure is not None:
                    raise failure
                return answer
            if show and printed[0] != "away":
                show(f"{host}  out of reach, trying again for up to {words.clock(away)}")
                printed = ("away", now)
            _drop(connection, lost)
            time.sleep(AWAY_PAUSE)
            continue
        away_since = None
        if answer.get("finished", True):
            return answer
        if show:
            about, text = line(answer)
            if text and (about != printed[0] or time.monotonic() - printed[1] >= SLICE - 1):
                show(text)
                printed = (about, time.monotonic())
        resume = answer.get("resume")


def _drop(connection: Any, lost: type[Exception]) -> None:
    """A kept SSH master of a host that has rebooted answers nothing: open a new one."""
    try:
        connection.reset()
    except (lost, AttributeError, OSError):
        return  # nothing was kept, or there is nothing to reach yet
