"""Paths, state files, rungs, and the comparison of actual with desired."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import state

REVISION = "0123456789abcdef0123456789abcdef01234567"
LOCK = "5d41402abc4b2a76"
UNIT = "sglang-main-ep8.service"


def unit(**changes: Any) -> dict[str, Any]:
    """A healthy unit as `hostfacts.unit_facts` gives it."""
    return {
        "name": UNIT,
        "load_state": "loaded",
        "active_state": "active",
        "sub_state": "running",
        "result": "success",
        "main_pid": 100,
        "n_restarts": 0,
        "invocation_id": "a" * 32,
        "enabled": "enabled",
        "active_since": "2026-11-30T00:00:00.000000Z",
        "since": "2026-11-30T00:00:00.000000Z",
        "stop_asked": False,
        "need_daemon_reload": False,
        **changes,
    }


def instance(*units: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An instance that serves, as `read_instance` gives it."""
    facts = {
        "current": "r1",
        "release": {"schema": 1, "unit": UNIT},
        "units": list(units),
        "ready": {"schema": 1, "unit": UNIT, "invocation_id": "a" * 32},
        **changes,
    }
    facts.update(state.condition(facts))
    return facts


# --- paths -----------------------------------------------------------------------------------------------------------


def test_every_path_of_the_layout() -> None:
    layout = state.Layout()
    found = {
        "venv": layout.venv_python(LOCK),
        "mark": layout.venv_mark(LOCK),
        "model": layout.model("moonshotai/Kimi-K2.6", REVISION),
        "partial": layout.model_partial("moonshotai/Kimi-K2.6", REVISION),
        "manifest": layout.model_manifest("moonshotai/Kimi-K2.6", REVISION),
        "unit": layout.release_unit("main", "r1", UNIT),
        "release": layout.release_json("main", "r1"),
        "current": layout.current("main"),
        "etc": layout.etc_link("main"),
        "installed": layout.unit_file(UNIT),
        "key": layout.api_key("main"),
        "ready": layout.ready("main"),
        "rungs": layout.rungs("main"),
        "last_good": layout.last_good("main"),
        "starts": layout.starts("main"),
        "reports": layout.reports("main"),
        "program": layout.program("0.1.0"),
    }
    assert {name: str(path) for name, path in found.items()} == {
        "venv": f"/var/lib/sglang/venvs/{LOCK}/bin/python",
        "mark": f"/var/lib/sglang/venvs/{LOCK}/.complete",
        "model": f"/var/lib/sglang/models/moonshotai--Kimi-K2.6/{REVISION}",
        "partial": f"/var/lib/sglang/models/moonshotai--Kimi-K2.6/{REVISION}.partial",
        "manifest": f"/var/lib/sglang/models/moonshotai--Kimi-K2.6/{REVISION}/.dflash-fleet.json",
        "unit": f"/var/lib/sglang/main/releases/r1/{UNIT}",
        "release": "/var/lib/sglang/main/releases/r1/release.json",
        "current": "/var/lib/sglang/main/current",
        "etc": "/etc/sglang/main",
        "installed": f"/etc/systemd/system/{UNIT}",
        "key": "/var/lib/sglang/main/credentials/api_key",
        "ready": "/var/lib/sglang/main/state/ready.json",
        "rungs": "/var/lib/sglang/main/state/rungs.json",
        "last_good": "/var/lib/sglang/main/state/last_good.json",
        "starts": "/var/lib/sglang/main/state/starts.jsonl",
        "reports": "/var/lib/sglang/main/state/reports",
        "program": "/usr/local/lib/dflash-fleet/0.1.0",
    }


@pytest.mark.parametrize("name", ["", "Main", "../x", "a/b", "venvs", "models", "-a", "x" * 64, "a b"])
def test_a_bad_instance_name_never_becomes_a_path(name: str) -> None:
    with pytest.raises(state.StateError, match="sglang_instances"):
        state.Layout().instance(name)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("sglang-main-ep8.service", "main"),
        ("sglang-main-b-ep8.service", "main-b"),
        ("sglang-k26-dflash.service", None),
        ("sglang-router.service", None),
        ("sglang-mainly-ep8.service", None),
    ],
)
def test_units_belong_to_the_longest_instance_name(name: str, owner: str | None) -> None:
    assert state.instance_of_unit(name, ["main", "main-b"]) == owner


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_state_file_is_replaced_whole_with_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    state.write_state(path, {"unit": UNIT})
    state.write_state(path, {"unit": "other"}, mode=0o600)
    assert state.read_state(path) == {"schema": 1, "unit": "other"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["ready.json"]


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    state.write_state(path, {"unit": UNIT})
    with pytest.raises(TypeError):
        state.write_state(path, {"unit": object()})
    assert state.read_state(path) == {"schema": 1, "unit": UNIT}
    assert [entry.name for entry in tmp_path.iterdir()] == ["ready.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 7}', r"ready\.json: schema 7 is not known.*reads schema 1"),
        ("{}", r"ready\.json: schema None"),
        ("[1]", r"ready\.json: holds list"),
        ('{"schema": 1', r"ready\.json: is not JSON"),
    ],
)
def test_a_state_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ready.json"
    path.write_text(text)
    with pytest.raises(state.StateError, match=message):
        state.read_state(path)


def test_a_missing_state_file_is_nothing(tmp_path: Path) -> None:
    assert state.read_state(tmp_path / "none.json") is None
    assert state.read_starts(tmp_path / "none.jsonl") == []


def test_the_last_starts_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    for number in range(5):
        state.append_start(path, {"number": number})
    with path.open("a") as stream:
        stream.write('{"schema": 1, "num')  # the power went here
    assert [entry["number"] for entry in state.read_starts(path)] == [2, 3, 4]
    state.append_start(path, {"number": 6})
    assert [entry["number"] for entry in state.read_starts(path)] == [3, 4, 6]


def test_the_last_starts_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    path.write_text("".join(json.dumps({"schema": 1, "n": n, "pad": "x" * 500}) + "\n" for n in range(1000)))
    assert [entry["n"] for entry in state.read_starts(path)] == [997, 998, 999]


def test_a_start_of_another_schema_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    path.write_text('{"schema": 2}\n')
    with pytest.raises(state.StateError, match=r"starts\.jsonl: schema 2"):
        state.read_starts(path)


def test_times_are_iso_utc_with_microseconds() -> None:
    assert state.now_utc(0.25) == "1970-01-01T00:00:00.250000Z"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", state.now_utc())


# --- rungs -----------------------------------------------------------------------------------------------------------

KEY = state.rung_key(
    engine_version="0.5.11",
    driver="580.105.08",
    drafter_revision=REVISION,
    profile="ep8",
    drafter="dflash",
    cuda_graph_requested="enabled",
    model_revision=REVISION,
)


def rungs_file() -> dict[str, Any]:
    return state.record_rung(
        None,
        KEY,
        remedy="disable_cuda_graph",
        set={"sglang_cuda_graph": "disabled"},
        cause="cuda_graph_replay_failure",
        unit=UNIT,
        seconds_to_ready=210.0,
        recorded_at="2026-11-30T00:00:00.000000Z",
    )


def test_the_recorded_rung_is_found_again() -> None:
    found = state.matching_rung(rungs_file(), KEY)
    assert found is not None
    assert (found["remedy"], found["set"]) == ("disable_cuda_graph", {"sglang_cuda_graph": "disabled"})


@pytest.mark.parametrize("part", state.RUNG_KEY)
def test_another_release_driver_or_wish_tries_the_better_one_again(part: str) -> None:
    assert state.matching_rung(rungs_file(), {**KEY, part: "another"}) is None


def test_without_a_driver_or_record() -> None:
    key = state.rung_key(
        engine_version="0.5.23",
        driver=None,
        drafter_revision=None,
        profile="single",
        drafter=None,
        cuda_graph_requested=None,
        model_revision=None,
    )
    assert state.matching_rung(None, key) is None
    assert state.matching_rung({"schema": 1, "rungs": []}, key) is None
    recorded = state.record_rung(
        rungs_file(), key, remedy="x", set={}, cause="unknown", unit=UNIT, seconds_to_ready=None
    )
    assert len(recorded["rungs"]) == 2
    found = state.matching_rung(recorded, {**key, "driver": None})
    assert found is not None
    assert found["remedy"] == "x"


def test_a_rung_for_the_same_key_replaces_the_one_before() -> None:
    deeper = state.record_rung(
        rungs_file(),
        KEY,
        remedy="use_tp8",
        set={"sglang_profile": "tp8"},
        cause="unknown",
        unit=UNIT,
        seconds_to_ready=1.0,
    )
    assert [entry["remedy"] for entry in deeper["rungs"]] == ["use_tp8"]


# --- directories -----------------------------------------------------------------------------------------------------


def make_host(root: Path) -> state.Layout:
    """A host with one complete and one interrupted venv, three revisions of a model, and an instance."""
    layout = state.Layout(root)
    layout.venv(LOCK).mkdir(parents=True)
    mark = {"engine": "sglang", "version": "0.5.20", "build": "cuda", "python": "3.11.2", "cuda_toolkit": "13.0.88"}
    layout.venv_mark(LOCK).write_text(json.dumps(mark))
    layout.venv("e" * 16).mkdir()
    whole = layout.model("org/tiny", REVISION)
    whole.mkdir(parents=True)
    (whole / "config.json").write_text("{}")
    (whole / "a.safetensors").write_bytes(b"x" * 10)
    layout.model_manifest("org/tiny", REVISION).write_text(
        json.dumps({"files": {"config.json": {"size": 2}, "a.safetensors": {"size": 10}}})
    )
    layout.model_partial("org/tiny", "f" * 40).mkdir()
    damaged = layout.model("org/tiny", "d" * 40)
    damaged.mkdir()
    (damaged / "a.safetensors").write_bytes(b"x")
    layout.model_manifest("org/tiny", "d" * 40).write_text(
        json.dumps({"files": [{"path": "a.safetensors", "size": 2}, {"path": "b.safetensors", "size": 2}]})
    )
    (layout.models() / "org--tiny" / "tmp").mkdir()
    release = layout.release_dir("main", "r1")
    release.mkdir(parents=True)
    state.write_state(layout.release_json("main", "r1"), {"unit": UNIT, "profile": "ep8"})
    (layout.releases("main") / ".staging-x").mkdir()
    layout.current("main").symlink_to(layout.current_target("r1"))
    (layout.reports("main") / "2026-11-30T00:00:00Z").mkdir(parents=True)
    (layout.reports("main") / "2026-11-30T00:03:51Z").mkdir(parents=True)
    (root / "cache").mkdir()
    (root / "lost+found").mkdir()
    return layout


def test_what_the_directories_hold(tmp_path: Path) -> None:
    layout = make_host(tmp_path)
    assert state.read_venvs(layout) == {
        LOCK: {
            "complete": True, "engine": "sglang", "version": "0.5.20", "build": "cuda", "python": "3.11.2",
            "cuda_toolkit": "13.0.88",
        },
        "e" * 16: {
            "complete": False, "engine": None, "version": None, "build": None, "python": None, "cuda_toolkit": None
        },
    }  # fmt: skip
    assert state.read_models(layout) == {
        "org--tiny": {
            REVISION: {"complete": True, "bytes": 12, "files": 2, "damaged": []},
            "f" * 40: {"complete": False, "bytes": 0, "files": 0, "damaged": []},
            "d" * 40: {"complete": False, "bytes": 1, "files": 2, "damaged": ["a.safetensors", "b.safetensors"]},
        }
    }
    assert state.list_instances(layout) == ["main"]
    found = state.read_instance(layout, "main", [unit()])
    assert (found["current"], found["releases"], found["condition"]) == ("r1", ["r1"], "starting")
    assert found["release"]["profile"] == "ep8"
    assert found["last_report"] == str(layout.reports("main") / "2026-11-30T00:03:51Z")


def test_an_engine_as_a_mapping_in_the_mark(tmp_path: Path) -> None:
    layout = state.Layout(tmp_path)
    layout.venv(LOCK).mkdir(parents=True)
    layout.venv_mark(LOCK).write_text('{"engine": {"name": "sglang", "version": "0.5.23", "build": "cpu"}}')
    assert state.read_venvs(layout)[LOCK]["version"] == "0.5.23"


def test_nothing_on_the_host(tmp_path: Path) -> None:
    layout = state.Layout(tmp_path / "none")
    assert (state.read_venvs(layout), state.read_models(layout), state.list_instances(layout)) == ({}, {}, [])
    found = state.read_instance(layout, "main", [])
    assert (found["condition"], found["serving"], found["current"]) == ("absent", False, None)


def test_a_published_revision_counts_beside_its_partial_one(tmp_path: Path) -> None:
    layout = make_host(tmp_path)
    layout.model_partial("org/tiny", REVISION).mkdir()
    assert state.read_models(layout)["org--tiny"][REVISION]["complete"]


# --- judging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (instance(unit()), "serving"),
        (instance(unit(), ready={"invocation_id": "a" * 32, "degraded": True}), "degraded"),
        (instance(unit(), release={"unit": UNIT, "overrides": {"sglang_cuda_graph": "disabled"}}), "degraded"),
        (instance(unit(invocation_id="b" * 32)), "starting"),
        (instance(unit(), ready=None), "starting"),
        (instance(unit(active_state="activating", sub_state="start")), "starting"),
        (instance(unit(active_state="activating", sub_state="auto-restart", invocation_id="")), "restarting"),
        (instance(unit(active_state="deactivating", sub_state="stop-sigterm")), "stopping"),
        (instance(unit(active_state="failed", sub_state="failed", result="exit-code")), "failed"),
        (instance(unit(active_state="failed", sub_state="failed", result="start-limit-hit")), "failed"),
        # SGLang before 0.5.19 kills itself at the end of a stop that someone asked for.
        (instance(unit(active_state="failed", sub_state="failed", result="signal", stop_asked=True)), "stopped"),
        (instance(unit(active_state="failed", sub_state="failed", result="signal")), "failed"),
        (instance(unit(active_state="inactive", sub_state="dead")), "stopped"),
        (instance(unit(active_state="inactive", sub_state="dead", load_state="not-found")), "absent"),
        (instance(), "stopped"),
        (instance(current=None, release=None, ready=None), "absent"),
    ],
)
def test_the_condition_in_one_word(found: dict[str, Any], word: str) -> None:
    assert found["condition"] == word
    assert found["serving"] == (word in ("serving", "degraded"))
    assert found["degraded"] == (word == "degraded")


def test_the_running_unit_stands_for_the_instance() -> None:
    old = unit(name="sglang-main-tp8.service")
    new = unit(active_state="failed", result="exit-code")
    assert instance(new, old)["unit"] == "sglang-main-tp8.service"
    assert instance(unit(name="sglang-main-tp8.service", active_state="inactive"), new)["unit"] == UNIT


def host_state(**changes: Any) -> dict[str, Any]:
    return {
        "venvs": {LOCK: {"complete": True}},
        "models": {"org--tiny": {REVISION: {"complete": True, "damaged": []}}},
        "instances": {"main": instance(unit())},
        **changes,
    }


DESIRED = {
    "venvs": [LOCK],
    "models": [{"repo": "org/tiny", "revision": REVISION}],
    "releases": {"main": {"unit": UNIT, "release_id": "r1"}},
}


def test_nothing_differs_on_a_host_as_desired() -> None:
    assert state.differences(host_state(), DESIRED) == []
    assert state.differences(host_state(), {}) == []


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"venvs": {}}, [("sglang_venv", f"environment {LOCK}", "absent")]),
        ({"venvs": {LOCK: {"complete": False}}}, [("sglang_venv", f"environment {LOCK}", "incomplete")]),
        ({"models": {}}, [("model_weights", "org/tiny 0123456789ab", "absent")]),
        (
            {"models": {"org--tiny": {REVISION: {"complete": False, "damaged": ["a.safetensors"]}}}},
            [("model_weights", "org/tiny 0123456789ab", "damaged: a.safetensors")],
        ),
        (
            {"instances": {}},
            [("sglang_service", "main: release", "absent"), ("sglang_service", f"main: unit {UNIT}", "absent")],
        ),
        ({"instances": {"main": instance(unit(), current="r0")}}, [("sglang_service", "main: release", "r0")]),
        (
            {"instances": {"main": instance(unit(active_state="failed", result="exit-code"))}},
            [("sglang_service", f"main: unit {UNIT}", "failed (exit-code)")],
        ),
        (
            {"instances": {"main": instance(unit(invocation_id="c" * 32))}},
            [("sglang_service", f"main: {UNIT}", "active, this start not gated")],
        ),
        (
            {"instances": {"main": instance(unit(enabled="disabled"))}},
            [("sglang_service", f"main: unit {UNIT} at boot", "disabled")],
        ),
        (
            {"instances": {"main": instance(unit(need_daemon_reload=True))}},
            [("sglang_service", f"main: unit {UNIT}", "changed on disk, not reloaded")],
        ),
        (
            {"instances": {"main": instance(unit(), unit(name="sglang-main-tp8.service", sub_state="running"))}},
            [
                ("sglang_service", "main: unit sglang-main-tp8.service", "active (running)"),
                ("sglang_service", "main: unit sglang-main-tp8.service at boot", "enabled"),
            ],
        ),
    ],
)
def test_each_difference_has_its_row(changes: dict[str, Any], rows: list[tuple[str, str, str]]) -> None:
    found = state.differences(host_state(**changes), DESIRED)
    assert [(row["role"], row["what"], row["actual"]) for row in found] == rows
    assert all(row["desired"] for row in found)


def test_the_owner_of_the_directory_owns_the_state_file(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    os.chown(tmp_path, 65534, 65534)
    state.write_state(tmp_path / "ready.json", {})
    assert (tmp_path / "ready.json").stat().st_uid == 65534


def test_a_profile_on_standby_that_someone_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its release is known, and what the supervisor's gate says of it is its own, not the current release's."""
    from dflash_fleet import verdict

    layout = make_host(tmp_path)
    other = "sglang-main-tp8.service"
    layout.release_dir("main", "r0").mkdir()
    state.write_state(layout.release_json("main", "r0"), {"unit": other, "profile": "tp8", "overrides": {}})
    path = tmp_path / "run" / "gate.json"
    path.parent.mkdir()
    monkeypatch.setattr(verdict, "path_of", lambda _name: path)
    verdict.write(path, {"invocation_id": "d" * 32, "outcome": "ready", "seconds": 9.5, "smoke": {}})
    idle, running = unit(active_state="inactive", invocation_id=""), unit(name=other, invocation_id="d" * 32)
    assert state.read_instance(layout, "main", [idle, running])["by_hand"] is None, "nobody installed that unit"
    state.write_state(layout.standby("main"), {"units": {other: "r0"}})
    found = state.read_instance(layout, "main", [idle, running])
    assert found["by_hand"]["release"]["profile"] == "tp8"
    assert (found["condition"], found["unit"], found["ready"]["release_id"]) == ("serving", other, "r0")
    assert (found["current"], found["release"]["profile"]) == ("r1", "ep8")
    assert state.release_of_unit(layout, "main", UNIT)[0] == "r1"
    assert state.release_of_unit(layout, "main", "sglang-main-pp8.service") is None
    assert state.read_instance(layout, "main", [unit()])["by_hand"] is None


def test_a_start_that_only_the_supervisor_gated_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_fleet import verdict

    layout = make_host(tmp_path)
    path = tmp_path / "run" / "gate.json"
    path.parent.mkdir()
    monkeypatch.setattr(verdict, "path_of", lambda _name: path)
    again = unit(invocation_id="d" * 32)
    assert state.read_instance(layout, "main", [again])["condition"] == "starting"
    verdict.write(path, {"invocation_id": "d" * 32, "outcome": None})
    assert state.read_instance(layout, "main", [again])["condition"] == "starting"
    ready = {"outcome": "ready", "seconds": 9.5, "smoke": {"accept_length": 3.2}}
    verdict.write(path, {"invocation_id": "d" * 32, **ready})
    found = state.read_instance(layout, "main", [again])
    assert found["serving"] is True
    assert (found["ready"]["seconds"], found["ready"]["accept_length"]) == (9.5, 3.2)


@pytest.mark.parametrize(
    ("current", "last_good", "starts", "expected"),
    [
        pytest.param("b", "b", [("a", "ready"), ("b", "ready")], "a", id="the one before"),
        pytest.param("b", "a", [("a", "ready"), ("b", "crashed")], "a", id="the last good one, if the current is not"),
        pytest.param("b", "b", [("c", "crashed"), ("b", "ready")], None, id="one that never served does not count"),
        pytest.param("b", "b", [("gone", "ready"), ("b", "ready")], None, id="one that is not kept does not count"),
        pytest.param("b", "b", [("a", "ready"), ("c", "ready"), ("b", "ready")], "c", id="the newest"),
    ],
)
def test_previous_good(current, last_good, starts, expected):
    instance = {
        "current": current, "releases": ["a", "b", "c"],
        "last_good": {"release_id": last_good, "unit": f"sglang-main-{last_good}.service"},
    }  # fmt: skip
    history = [{"release_id": name, "outcome": word, "unit": f"sglang-main-{name}.service"} for name, word in starts]
    found = state.previous_good(instance, history)
    wanted = expected and {"release_id": expected, "unit": f"sglang-main-{expected}.service"}
    assert found == wanted


@pytest.mark.parametrize("current", ["a", "b"])
def test_during_a_trial_the_way_back_is_what_ran_before(current):
    before = {"release_id": "a", "unit": "sglang-main-a.service"}
    instance = {"current": current, "releases": ["a", "b", "c"], "last_good": before, "trial": {**before}}
    history = [{"release_id": "c", "outcome": "ready", "unit": "sglang-main-c.service"}]
    assert state.previous_good(instance, history) == before
    # One that somebody has removed is none.
    assert state.previous_good({**instance, "releases": ["b", "c"]}, history)["release_id"] == "c"
