"""The module around facts and preflight."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_facts
import pytest
import yaml
from ansible.module_utils.dflash_fleet import hostfacts
from ansible.module_utils.testing import patch_module_args

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "nvidia-smi"
INSTANCE = {
    "instance": "main",
    "unit": "sglang-main-ep8.service",
    "port": 1,
    "profile": "ep8",
    "gpus": 8,
    "engine": {"build": "cuda", "version": "0.5.20"},
}


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the module and returns what it prints."""

    def run(**arguments: Any) -> dict[str, Any]:
        with patch_module_args(arguments), pytest.raises(SystemExit):
            gpu_facts.main()
        result: dict[str, Any] = json.loads(capfd.readouterr().out)
        return result

    return run


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that answers for eight RTX PRO 6000."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ncase "$*" in\n*--query-gpu*) cat {FIXTURES}/rtx-pro-6000.csv;;\n'
        f"-q*) cat {FIXTURES}/rtx-pro-6000.xml;;\n*) cat {FIXTURES}/p2p-ok.txt;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.usefixtures("nvidia_smi")
def test_facts_without_requirements(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = call(root=str(tmp_path))
    assert (result["changed"], result["checks"], result["table"], result["failed_checks"]) == (False, [], [], 0)
    assert result["facts"]["driver"] == "580.105.08"
    assert result["facts"]["gpu_architecture"] == "sm_120"
    assert len(result["facts"]["gpus"]["list"]) == 8
    assert set(result["facts"]["filesystems"]) == {str(tmp_path), "/dev/shm"}


@pytest.mark.usefixtures("nvidia_smi")
def test_checks_do_not_fail_the_module_by_themselves(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = call(root=str(tmp_path), requirements={"instances": [INSTANCE], "min_free_gb": 1e9})
    assert "failed" not in result
    assert result["failed_checks"] >= 1
    rows = {row["check"]: row for row in result["checks"]}
    assert rows["GPUs"]["status"] == "pass"
    assert rows["disk"]["status"] == "fail"


@pytest.mark.usefixtures("nvidia_smi")
def test_enforced_all_failures_stand_in_one_message(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = call(
        root=str(tmp_path),
        requirements={"instances": [INSTANCE], "min_free_gb": 1e9, "min_driver": "600"},
        enforce=True,
        _ansible_check_mode=True,
    )
    assert result["failed"]
    assert "nothing was changed" in result["msg"]
    assert "gpu_host_min_free_gb" in result["msg"]
    assert "gpu_host_min_driver" in result["msg"]
    assert "facts" not in result  # Ansible would print them all after the message


@pytest.mark.parametrize("enforce", [True, False])
def test_an_open_engine_is_said_aloud_in_a_deployment(
    call: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enforce: bool
) -> None:
    found = {"port": 8000, "address": "0.0.0.0", "pid": 7, "command": "vllm serve x", "unit": "old.service"}
    said: list[str] = []
    monkeypatch.setattr(hostfacts, "open_engines", lambda proc: [found])
    monkeypatch.setattr(gpu_facts.AnsibleModule, "warn", lambda _module, text: said.append(text))
    result = call(root=str(tmp_path), requirements={"build": "rehearsal", "min_free_gb": 0}, enforce=enforce)
    text = "open engine 8000: 0.0.0.0 answers without a key (old.service): set sglang_api_key"
    assert [line.startswith(text) for line in said] == [True] * enforce
    if not enforce:
        assert [row["status"] for row in result["checks"] if row["check"] == "open engine 8000"] == ["warn"]


def test_an_instance_that_lacks_a_key(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert "each instance needs" in call(root=str(tmp_path), requirements={"instances": [{"instance": "main"}]})["msg"]


def test_the_documentation_names_every_argument() -> None:
    options = yaml.safe_load(gpu_facts.DOCUMENTATION)["options"]
    spec = gpu_facts.argument_spec()
    assert set(options) == set(spec)
    for name, entry in spec.items():
        assert options[name].get("default") == entry.get("default"), name
    requirements, documented = spec["requirements"]["options"], options["requirements"]["suboptions"]
    assert {name: entry["default"] for name, entry in requirements.items()} == {
        name: entry["default"] for name, entry in documented.items()
    }
    assert yaml.safe_load(gpu_facts.EXAMPLES)


def test_the_documentation_names_every_fact(call: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    documented = yaml.safe_load(gpu_facts.RETURN)["facts"]["contains"]
    assert set(call(root=str(tmp_path))["facts"]) == set(documented)


def test_role_specs_defaults_and_page_agree() -> None:
    root = Path(__file__).resolve().parents[2]
    role = root / "roles" / "gpu_host"
    defaults = yaml.safe_load((role / "defaults" / "main.yml").read_text())
    options = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    assert {name: entry["default"] for name, entry in options.items()} == defaults
    page = (root / "docs" / "roles" / "gpu_host.md").read_text()
    assert all(f"`{name}`" in page for name in defaults)
