"""What belongs to an instance, and what may go with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sglang_remove
from ansible.module_utils.testing import patch_module_args
from dflash_fleet import removal, state

UNIT = "# Managed by dflash-fleet.\n[Service]\nExecStart=/v/bin/python -m sglang.launch_server\n"


@pytest.fixture
def host(tmp_path: Path) -> state.Layout:
    """Two instances, one of which has a name that begins with the other's, and a hand-made unit."""
    layout = state.Layout(tmp_path / "sglang", tmp_path / "etc", tmp_path / "units")
    (layout.units / "multi-user.target.wants").mkdir(parents=True)
    layout.etc.mkdir()
    for name, venv in (("a", "v1"), ("a-b", "v2")):
        folder = layout.release_dir(name, "r1")
        folder.mkdir(parents=True)
        release = {"schema": 1, "venv": str(layout.venv(venv)), "model": {"path": str(layout.models() / "m" / "r")}}
        layout.release_json(name, "r1").write_text(json.dumps(release))
        layout.etc_link(name).symlink_to(layout.current(name))
        layout.unit_file(f"sglang-{name}-tp8.service").write_text(UNIT)
        (tmp_path / "cache" / name).mkdir(parents=True)
        layout.venv(venv).mkdir(parents=True)
        layout.venv_mark(venv).write_text('{"engine": "sglang"}')
    layout.boot_link("sglang-a-tp8.service").symlink_to(layout.unit_file("sglang-a-tp8.service"))
    layout.unit_file("sglang-k26-dflash.service").write_text("[Service]\nExecStart=/bin/true\n")
    (layout.models() / "m" / "r").mkdir(parents=True)
    (layout.models() / "m" / "old").mkdir()
    client = layout.venv("client")
    client.mkdir()
    (client / ".complete").write_text('{"engine": null}')
    return layout


def short(found: dict[str, Any], tmp_path: Path) -> list[str]:
    return [path.replace(str(tmp_path) + "/", "") for path in found["paths"]]


def test_an_instance_owns_its_own_alone(host: state.Layout, tmp_path: Path) -> None:
    found = removal.plan(host, ["a"], False, tmp_path / "cache")
    assert found["units"] == ["sglang-a-tp8.service"]
    assert short(found, tmp_path) == [
        "units/sglang-a-tp8.service", "units/multi-user.target.wants/sglang-a-tp8.service", "etc/a", "sglang/a",
        "cache/a",
    ]  # fmt: skip
    # Somebody removed the file: what would start at boot is still found, running or not.
    host.unit_file("sglang-a-tp8.service").unlink()
    found = removal.plan(host, ["a"], False, tmp_path / "cache")
    assert found["units"] == ["sglang-a-tp8.service"]
    assert short(found, tmp_path)[0] == "units/multi-user.target.wants/sglang-a-tp8.service"


def test_shared_things_go_only_when_asked_and_unused(host: state.Layout, tmp_path: Path) -> None:
    paths = short(removal.plan(host, ["a"], True, tmp_path / "cache"), tmp_path)
    assert "sglang/venvs/v1" in paths
    assert "sglang/models/m/old" in paths
    # a-b still names these, and the client serves the next fetch.
    assert not {"sglang/venvs/v2", "sglang/models/m/r", "sglang/venvs/client"} & set(paths)


def test_with_the_last_instance_everything_goes(host: state.Layout, tmp_path: Path) -> None:
    paths = short(removal.plan(host, ["a", "a-b"], True, tmp_path / "cache"), tmp_path)
    assert {"sglang/venvs", "sglang/models"} <= set(paths)


def test_a_unit_without_its_directory_is_still_found(host: state.Layout) -> None:
    host.unit_file("sglang-lost-ep8.service").write_text(UNIT)
    assert removal.present(host) == ["a", "a-b", "lost"]  # and not k26, which is nobody's of ours
    assert removal.plan(host, ["lost"], False)["units"] == ["sglang-lost-ep8.service"]
    assert removal.plan(host, ["a"], False, running=["sglang-a-ep4.service", "sglang-a-b-ep4.service"])["units"] == [
        "sglang-a-ep4.service", "sglang-a-tp8.service",
    ]  # fmt: skip
    assert removal.plan(host, ["never"], False) == {"instances": [], "units": [], "paths": []}


@pytest.mark.parametrize(
    ("unlisted", "gone"),
    [(True, ["b", "old"]), (False, ["b"])],
)
def test_unwanted(unlisted: bool, gone: list[str]) -> None:
    listed = [{"name": "a"}, {"name": "b", "state": "absent"}]
    assert removal.unwanted(["a", "b", "old"], [{"instance": "a"}], listed, unlisted) == gone


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the module with a systemctl that only notes what it is asked."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nif [ $1 = list-units ]; then cat {tmp_path}/running 2>/dev/null; exit 0; fi\n'
        f'echo "$@" >> {tmp_path}/asked\n'
        # As systemd answers for a unit of which it knows nothing.
        f'if [ $1 = stop ] && ! grep -qs "^$2 " {tmp_path}/running; then echo "Unit $2 not loaded." >&2; exit 5; fi\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(removal, "CACHE", tmp_path / "cache")

    def run(layout: state.Layout, check: bool, **arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(sglang_remove.states, "Layout", lambda root: layout)
        with (
            patch_module_args({"root": str(layout.root), "_ansible_check_mode": check, **arguments}),
            pytest.raises(SystemExit),
        ):
            sglang_remove.main()
        result: dict[str, Any] = json.loads(capfd.readouterr().out)
        return result

    return run


def test_check_mode_lists_and_the_run_removes(call: Callable[..., Any], host: state.Layout, tmp_path: Path) -> None:
    (tmp_path / "running").write_text("sglang-a-tp8.service loaded active running engine\n")
    predicted = call(host, True, instances=["a"])
    assert predicted["changed"]
    assert host.instance("a").exists()
    assert not (tmp_path / "asked").exists()
    done = call(host, False, instances=["a"])
    assert (done["units"], done["paths"]) == (predicted["units"], predicted["paths"])
    assert not any(Path(path).exists() or Path(path).is_symlink() for path in done["paths"])
    assert not host.unit_file("sglang-a-tp8.service").exists()
    assert host.unit_file("sglang-a-b-tp8.service").exists()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:3] == ["stop sglang-a-tp8.service", "disable sglang-a-tp8.service", "daemon-reload"]
    assert call(host, False, instances=["a"])["changed"] is False


def test_all_but_those_named(call: Callable[..., Any], host: state.Layout) -> None:
    assert call(host, True, except_instances=["a"])["instances"] == ["a-b"]
    assert call(host, True, except_instances=[])["instances"] == ["a", "a-b"]
    assert "cannot name an instance" in call(host, True, instances=["venvs"])["msg"]


def test_an_instance_is_only_stopped_and_removed_afterwards(
    call: Callable[..., Any], host: state.Layout, tmp_path: Path
) -> None:
    """Its file is gone, it runs, and it would start at boot: after the stop only the link is left of it."""
    unit = "sglang-a-tp8.service"
    host.unit_file(unit).unlink()
    (tmp_path / "running").write_text(f"{unit} not-found active running {unit}\n")
    for check in (True, False):
        stopped = call(host, check, instances=["a"], state="stopped")
        assert (stopped["changed"], stopped["units"], stopped["paths"]) == (True, [unit], [])
    assert host.boot_link(unit).is_symlink()
    assert host.instance("a").exists()
    (tmp_path / "running").unlink()
    assert not call(host, False, instances=["a"], state="stopped")["changed"]
    done = call(host, False, instances=["a"])
    assert str(host.boot_link(unit)) in done["paths"]
    assert not host.boot_link(unit).is_symlink()
    assert not host.instance("a").exists()
