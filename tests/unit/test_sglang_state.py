"""The module around the probe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sglang_state
import yaml
from ansible.module_utils.testing import patch_module_args
from dflash_fleet import state

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the module and returns what it prints."""

    def run(**arguments: Any) -> dict[str, Any]:
        with patch_module_args(arguments), pytest.raises(SystemExit):
            sglang_state.main()
        result: dict[str, Any] = json.loads(capfd.readouterr().out)
        return result

    return run


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that knows no unit."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


@pytest.mark.usefixtures("systemctl")
def test_an_empty_host(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = call(root=str(tmp_path / "none"), instances=["main"], paths=[str(tmp_path / "none")])
    assert result["changed"] is False
    assert result["differences"] == []
    assert result["state"]["instances"]["main"]["condition"] == "absent"
    assert result["state"]["schema"] == 1
    assert "rc" not in result


@pytest.mark.usefixtures("systemctl")
def test_what_differs_from_desired(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = call(
        root=str(tmp_path),
        desired={
            "venvs": ["a"],
            "models": [{"repo": "org/tiny", "revision": REVISION}],
            "releases": {"main": {"unit": "sglang-main-ep8.service", "release_id": "r1"}},
        },
        _ansible_check_mode=True,
    )
    assert [row["role"] for row in result["differences"]] == [
        "sglang_venv",
        "model_weights",
        "sglang_service",
        "sglang_service",
    ]
    assert list(result["state"]["instances"]) == ["main"]


@pytest.mark.usefixtures("systemctl")
def test_a_state_file_of_another_schema_ends_it_with_its_name(
    call: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    layout = state.Layout(tmp_path)
    layout.state("main").mkdir(parents=True)
    layout.ready("main").write_text('{"schema": 9}')
    result = call(root=str(tmp_path))
    assert result["failed"]
    assert f"{layout.ready('main')}: schema 9" in result["msg"]


@pytest.mark.usefixtures("systemctl")
def test_bad_names_are_refused(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert "sglang_instances: '../x'" in call(root=str(tmp_path), instances=["../x"])["msg"]
    assert "desired.releases.main" in call(root=str(tmp_path), desired={"releases": {"main": "r1"}})["msg"]


def test_a_release_is_not_compared_without_systemd(
    call: Callable[..., dict[str, Any]], tmp_path: Path, systemctl: Path
) -> None:
    systemctl.write_text("#!/bin/sh\necho 'Host is down' >&2\nexit 1\n")
    assert call(root=str(tmp_path))["state"]["systemd_error"] == "Host is down"
    result = call(root=str(tmp_path), desired={"releases": {"main": {"unit": "sglang-main-ep8.service"}}})
    assert result["msg"] == "systemd does not answer: Host is down"


def test_a_directory_that_may_not_be_read_is_named(
    call: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_more: Any) -> None:
        raise PermissionError(13, "Permission denied", "/var/lib/sglang/main/state/ready.json")

    monkeypatch.setattr(sglang_state.hostfacts, "probe", refuse)
    message = call(root=str(tmp_path))["msg"]
    assert message == "/var/lib/sglang/main/state/ready.json: may not be read by this user (run this with become)"


def test_the_documentation_names_every_argument() -> None:
    options = yaml.safe_load(sglang_state.DOCUMENTATION)["options"]
    spec = sglang_state.argument_spec()
    assert set(options) == set(spec)
    assert set(options["desired"]["suboptions"]) == set(spec["desired"]["options"])
    for name, entry in spec.items():
        assert options[name].get("default") == entry.get("default"), name
    assert yaml.safe_load(sglang_state.EXAMPLES)


@pytest.mark.usefixtures("systemctl")
def test_the_documentation_names_every_key(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    documented = yaml.safe_load(sglang_state.RETURN)["state"]["contains"]
    assert set(call(root=str(tmp_path))["state"]) == set(documented)
