"""The controller half of a fetch: slices, and lines for a person."""

from __future__ import annotations

import action_run
import plugins
import pytest
from ansible.errors import AnsibleConnectionFailure

plugin = plugins.load("action_plugins/hf_snapshot.py")
DONE = {"finished": True, "changed": True, "action": "fetch", "path": "/m"}


def unfinished(step, seconds, done=0, total=0, rate=0, remaining=None):
    shot = {"repo": "org/model", "step": step, "seconds": seconds, "done_bytes": done, "total_bytes": total}
    shot["percent"] = done * 100 // total if total else None
    shot.update(bytes_per_second=rate, remaining=remaining)
    return {"finished": False, "changed": False, "path": "/m", "progress": shot}


class Run(action_run.Run):
    """One fetch."""

    def __init__(self, monkeypatch, answers, args=None, **more):
        super().__init__(plugin, monkeypatch, answers, args or {"repo": "org/model"}, **more)


def test_lines_of_a_long_fetch(monkeypatch):
    total = 610_000_000_000
    run = Run(
        monkeypatch,
        [
            (unfinished("list", 9.8), 10),
            (unfinished("fetch", 19.9, 11_000_000_000, total, 1_100_000_000, 544), 10),
            (unfinished("fetch", 29.9, 190_100_000_000, total, 1_100_000_000, 380), 10),
            (AnsibleConnectionFailure("no route"), 3),
            (unfinished("verify", 999, 305_000_000_000, total), 10),
            (DONE, 2),
        ],
    )
    assert run.go() == {"changed": True, "action": "fetch", "path": "/m"}
    assert run.lines == [
        "gpu-1    0:09  org/model  asking for the list of files",
        "gpu-1    0:19  org/model   1 %  11 GB of 610 GB  1.1 GB/s  about 9:04 left",
        "gpu-1    0:29  org/model  31 %  190 GB of 610 GB  1.1 GB/s  about 6:20 left",
        "gpu-1    out of reach, trying again for up to 3:00",
        "gpu-1    16:39  org/model  checking  50 %  305 GB of 610 GB",
    ]
    assert {call["slice"] for call in run.calls} == {plugin.slices.SLICE}


def test_a_short_fetch_says_nothing(monkeypatch):
    run = Run(monkeypatch, [(DONE, 4)])
    assert run.go()["changed"]
    assert run.lines == []


@pytest.mark.parametrize(
    ("terminal", "mode", "shown"),
    [(True, "auto", True), (False, "auto", False), (False, "always", True), (True, "never", False)],
)
def test_quiet_where_nobody_looks(monkeypatch, terminal, mode, shown):
    answers = [(unfinished("list", 10), 10), (DONE, 1)]
    run = Run(monkeypatch, answers, terminal=terminal, model_weights_progress=mode)
    run.go()
    assert bool(run.lines) is shown
    assert run.calls[0]["slice"] == (plugin.slices.SLICE if shown else plugin.slices.QUIET_SLICE)


@pytest.mark.parametrize("more", [{"async_val": 300}, {"args": {"repo": "org/model", "slice": 5}}])
def test_one_plain_run_where_there_is_nothing_to_slice(monkeypatch, more):
    run = Run(monkeypatch, [(unfinished("list", 1), 1)], **more)
    assert run.go()["finished"] is False
    assert run.calls == [{**run.action._task.args, "_async": bool(more.get("async_val"))}]


def test_failure_passes_through(monkeypatch):
    run = Run(monkeypatch, [({"failed": True, "msg": "org/model is gated", "kind": "gated"}, 1)])
    assert run.go() == {"failed": True, "msg": "org/model is gated", "kind": "gated"}
