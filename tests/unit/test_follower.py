"""Reading the journal of a start that has run for long: its beginning, then its last lines, whatever the clock did."""

from __future__ import annotations

import json
import subprocess

import pytest
from dflash_fleet import watch


def entries(steps):
    """A thousand lines, one a second; `steps` are (first line, seconds) by which the wall clock is set."""
    for number in range(1000):
        wall = 1_000_000_000 + number + sum(seconds for first, seconds in steps if number >= first)
        yield {"__CURSOR": f"c{number}", "__REALTIME_TIMESTAMP": str(wall * 10**6), "MESSAGE": str(number),
               "__MONOTONIC_TIMESTAMP": str((100 + number) * 10**6)}  # fmt: skip


@pytest.mark.parametrize("steps", [[], [(500, -86400)], [(500, 86400)], [(20, 86400), (700, -2 * 86400)]])
def test_the_last_lines_follow_the_first_ones_once(monkeypatch, tmp_path, steps):
    lines = [json.dumps(entry) for entry in entries(steps)]
    whole, tail = tmp_path / "whole", tmp_path / "tail"
    whole.write_text("\n".join(lines) + "\n")
    tail.write_text("\n".join(reversed(lines[-watch._TAIL :])) + "\n")

    def start(command):
        return subprocess.Popen(["cat", str(tail if "--reverse" in command else whole)], stdout=subprocess.PIPE)

    monkeypatch.setattr(watch.Follower, "_start", staticmethod(start))
    read = watch.Follower("1" * 32).catch_up(lambda entry: entry["MESSAGE"] == "10")
    assert [int(entry["MESSAGE"]) for entry in read] == [*range(11), *range(1000 - watch._TAIL, 1000)]
