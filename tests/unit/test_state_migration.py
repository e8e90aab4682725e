"""State files of earlier versions are read by this one, and follow when they are written next.

tests/fixtures/state/<schema>/ holds files as dflash-fleet of that schema wrote them on a rehearsal host. Whoever raises
the schema adds a folder and a step of `state.MIGRATIONS`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from dflash_fleet import lock, state
from plugins import ROOT

FIXTURES = ROOT / "tests/fixtures/state"
SCHEMAS = sorted(int(path.name) for path in FIXTURES.iterdir())
UNIT = {"name": "sglang-main-ep8.service", "load_state": "loaded", "active_state": "active", "sub_state": "running",
        "result": "success", "n_restarts": 0, "main_pid": 1, "enabled": "enabled", "since": None, "stop_asked": False,
        "need_daemon_reload": False}  # fmt: skip


def test_every_schema_has_its_files_and_its_step():
    assert list(range(1, state.SCHEMA + 1)) == SCHEMAS
    assert sorted(state.MIGRATIONS) == SCHEMAS[:-1]


@pytest.fixture(params=SCHEMAS)
def layout(request, tmp_path):
    """A host as a version of that schema left it."""
    files = FIXTURES / str(request.param)
    found = state.Layout(tmp_path / "root")
    release_id = json.loads((files / "last_good.json").read_text())["release_id"]
    found.state("main").mkdir(parents=True)
    found.host_state().mkdir()
    found.release_dir("main", release_id).mkdir(parents=True)
    found.current("main").symlink_to(found.current_target(release_id))
    for name in ("last_good.json", "ready.json", "rungs.json", "starts.jsonl"):
        shutil.copy(files / name, found.state("main"))
    shutil.copy(files / "release.json", found.release_dir("main", release_id))
    shutil.copy(files / "rollout.json", found.host_state())
    return found


def test_a_host_of_an_earlier_version_is_understood(layout):
    invocation = json.loads(layout.ready("main").read_text())["invocation_id"]
    facts = state.read_instance(layout, "main", [{**UNIT, "invocation_id": invocation}])
    assert facts["serving"]
    assert facts["condition"] == "serving"
    assert facts["last_good"]["release_id"] == facts["current"]
    assert facts["ready"]["phases"][0]["seconds"] > 0
    assert [start["outcome"] for start in facts["last_starts"]] == ["ready", "ready"]
    assert facts["release"]["engine"]["version"] == "0.5.20"
    assert facts["rungs"][0]["set"] == {"sglang_cuda_graph": "disabled"}
    key = facts["rungs"][0]["key"]
    assert state.matching_rung(facts["rungs"], key)["remedy"] == "disable_cuda_graph"


def test_a_lock_of_an_earlier_version_is_respected_and_taken_over(layout):
    mine = {"id": "mine", "user": "bert", "controller": "ctl-2", "pid": 1, "started": "x"}
    held = lock.take(layout, mine)
    assert held["user"] == "anna"
    assert lock.take(layout, mine, takeover=held["id"]) is None
    assert lock.holder(layout)["continues"] == [held["id"]]


def test_documents_climb_step_by_step(monkeypatch, tmp_path):
    steps = {
        1: lambda name, document: {"renamed": document.pop("old"), **document} if name == "ready.json" else document,
        2: lambda name, document: {**document, "by": name},
    }
    monkeypatch.setattr(state, "SCHEMA", 3)
    monkeypatch.setattr(state, "MIGRATIONS", steps)
    path = tmp_path / "ready.json"
    path.write_text('{"schema": 1, "old": 5}')
    assert state.read_state(path) == {"schema": 3, "renamed": 5, "by": "ready.json"}
    assert json.loads(path.read_text())["schema"] == 1, "a look changes nothing"
    (tmp_path / "starts.jsonl").write_text('{"schema": 1, "n": 1}\n{"schema": 2, "n": 2}\n{"schema": 3, "n": 3}\n')
    assert [(one["schema"], one["n"]) for one in state.read_starts(Path(tmp_path, "starts.jsonl"))] == [
        (3, 1), (3, 2), (3, 3),
    ]  # fmt: skip
    state.write_state(path, {**state.read_state(path)})
    assert json.loads(path.read_text())["schema"] == 3, "the file follows when it is written"


@pytest.mark.parametrize("found", [4, 0, -1, "1", None, True])
def test_what_no_step_leads_up_from_is_refused_with_its_number(monkeypatch, tmp_path, found):
    monkeypatch.setattr(state, "SCHEMA", 3)
    monkeypatch.setattr(state, "MIGRATIONS", {2: lambda name, document: document})
    path = tmp_path / "ready.json"
    path.write_text(json.dumps({"schema": found}))
    with pytest.raises(state.StateError, match="is not known to this dflash-fleet, which reads schema 3"):
        state.read_state(path)
