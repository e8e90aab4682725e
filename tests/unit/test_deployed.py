"""The quick second run: what counts as moved, and what as the same wish."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from dflash_fleet import deployed, rollout, state

UNIT = "sglang-main-ep8.service"


def unit(**more):
    return {
        "name": UNIT, "active_state": "active", "enabled": "enabled", "need_daemon_reload": False,
        "load_state": "loaded", **more,
    }  # fmt: skip


def instance(serving=True, **more):
    return {"serving": serving, "units": [unit(**more)], "release": {"unit": UNIT}}


@pytest.fixture
def layout(tmp_path):
    """A host after a deployment; the record is taken by each test's first call."""
    found = state.Layout(tmp_path / "root", tmp_path / "etc", tmp_path / "units", tmp_path / "programs")
    for path, text in {
        found.unit_file(UNIT): "[Service]\n",
        found.release_dir("main", "a") / UNIT: "[Service]\n",
        found.release_json("main", "a"): "{}",
        found.api_key("main"): "canary",
        found.venv_mark("1234"): "{}",
        found.program("0.1.0") / "supervisor.py": "",
        found.model_manifest("org/name", "f" * 40): "{}",
        found.model("org/name", "f" * 40) / "sub/model.safetensors": "weights",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found.boot_link(UNIT).parent.mkdir()
    found.boot_link(UNIT).symlink_to(found.unit_file(UNIT))
    found.current("main").symlink_to("releases/a")
    found.etc.mkdir()
    found.etc_link("main").symlink_to(found.current("main"))
    found.host_state().mkdir()
    assert deployed.record(found, "wish", {"main": instance()})
    return found


def moved(layout, facts=None):
    return deployed.differences(layout, "wish", {"main": instance()} if facts is None else facts)


def test_nothing_has_moved(layout):
    assert moved(layout) == []


def touch(path):
    os.utime(path, (1, 1))


@pytest.mark.parametrize(
    ("act", "path"),
    [
        pytest.param(touch, lambda on: on.unit_file(UNIT), id="unit touched"),
        pytest.param(Path.unlink, lambda on: on.unit_file(UNIT), id="unit gone"),
        pytest.param(Path.unlink, lambda on: on.boot_link(UNIT), id="not started at boot"),
        pytest.param(Path.unlink, lambda on: on.etc_link("main"), id="link gone"),
        pytest.param(Path.touch, lambda on: on.units / "sglang-main-tp8.service", id="a unit came"),
        pytest.param(Path.unlink, lambda on: on.api_key("main"), id="key gone"),
        pytest.param(lambda path: path.chmod(0o666), lambda on: on.api_key("main"), id="key readable"),
        pytest.param(touch, lambda on: on.release_json("main", "a"), id="release changed"),
        pytest.param(Path.unlink, lambda on: on.venv_mark("1234"), id="environment unfinished"),
        pytest.param(touch, lambda on: on.program("0.1.0") / "supervisor.py", id="supervisor touched"),
        pytest.param(lambda path: path.chmod(0o700), lambda on: on.releases("main"), id="a folder closed"),
        pytest.param(
            lambda path: path.write_text("weight"),
            lambda on: on.model("org/name", "f" * 40) / "sub/model.safetensors",
            id="shard cut",
        ),
    ],
)
def test_whatever_moves_is_named(layout, act, path):
    act(path(layout))
    assert str(path(layout)) in moved(layout)


def test_another_release_is_current(layout):
    layout.current("main").unlink()
    layout.current("main").symlink_to("releases/b")
    assert moved(layout) == [str(layout.current("main"))]


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"main": instance(serving=False)}, id="not gated"),
        pytest.param({"main": instance(enabled="disabled")}, id="not enabled"),
        pytest.param({"main": instance(need_daemon_reload=True)}, id="another text than systemd has"),
        pytest.param({}, id="gone"),
        pytest.param({"main": instance(), "main-2": instance()}, id="one more"),
    ],
)
def test_an_instance_that_does_not_serve_as_left(layout, facts):
    assert moved(layout, facts)[0].startswith("main")


def test_another_wish(layout):
    assert deployed.differences(layout, "other", {"main": instance()}) == ["the wish"]
    assert deployed.differences(layout, "", {"main": instance()}) == ["the wish"], "one that cannot be known"


def test_a_damaged_record_is_none(layout):
    layout.deployed().write_text("{")
    assert moved(layout) == ["no whole deployment is on record"]


def test_nothing_is_recorded_while_an_instance_is_down(layout):
    layout.deployed().unlink()
    assert not deployed.record(layout, "wish", {"main": instance(serving=False)})
    assert not deployed.record(layout, "wish", {})
    assert not layout.deployed().exists()


def test_the_record_holds_no_secret(layout):
    assert "canary" not in layout.deployed().read_text()


def test_a_wish_is_its_variables_its_files_and_our_code(tmp_path):
    for folder in rollout.CODE:
        (tmp_path / folder).mkdir()
    lock = tmp_path / "lock.txt"
    lock.write_text("sglang==0.5.20")
    wish = {"sglang_version": "0.5.20", "sglang_venv_lock": str(lock), "ansible_host": "192.0.2.1"}
    first = rollout.wish_digest(wish, tmp_path)
    assert first
    assert rollout.wish_digest({**wish, "ansible_host": "192.0.2.2"}, tmp_path) == first
    how = {"sglang_skip_unchanged": False, "sglang_rollout_batches": ["100%"], "sglang_reports_dir": "/tmp/x"}
    assert rollout.wish_digest({**wish, **how}, tmp_path) == first, "how a run goes about it"
    assert rollout.wish_digest({**wish, "sglang_version": "0.5.23"}, tmp_path) != first
    lock.write_text("sglang==0.5.23")
    assert rollout.wish_digest(wish, tmp_path) != first
    lock.write_text("sglang==0.5.20")
    assert rollout.wish_digest(wish, tmp_path) == first
    elsewhere = shutil.copytree(tmp_path, tmp_path.parent / "newer")
    (elsewhere / "roles/x.yml").write_text("new")
    assert rollout.wish_digest(wish, elsewhere) != first


def test_a_wish_that_cannot_be_known_has_no_digest(tmp_path):
    class Lazy(dict):
        def __getitem__(self, name):
            raise RuntimeError("undefined")

    assert rollout.wish_digest(Lazy(sglang_x="{{ later }}"), tmp_path) == ""
