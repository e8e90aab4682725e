"""The module itself, run as Ansible runs it."""

# ruff: noqa: E501  (one command, one line)
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import journal_cases  # noqa: E402  (the path above comes first)
from dflash_fleet import diagnosis  # noqa: E402
from journal_builder import to_json  # noqa: E402

SCHEMA = {
    "verdict", "cause", "summary", "phase", "exception", "native_fault", "root_frame", "first_failure", "ranks_failed", "exit", "kernel", "complete", "gaps", "remedies", "evidence", "unit",
    "invocation_id", "engine",
}  # fmt: skip


def run_module(**arguments: Any) -> dict[str, Any]:
    """The file as it is, with the arguments Ansible would hand it."""
    code = (
        "import sys, json, runpy; sys.path[:0] = [sys.argv[1] + '/module_utils', sys.argv[1] + '/library']\n"
        "import ansible.module_utils as mu; mu.__path__.append(sys.argv[1] + '/module_utils')\n"
        "from ansible.module_utils import basic\n"
        "basic._ANSIBLE_ARGS = sys.stdin.buffer.read()\n"
        "basic._ANSIBLE_PROFILE = 'legacy'\n"
        "runpy.run_path(sys.argv[1] + '/library/journal_crash.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}), capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journal") / "incident.json"
    path.write_text(to_json(next(case for case in journal_cases.CASES if case.name == "incident_dflash_ep8").build().entries))
    return path


def test_result(incident: Path) -> None:
    result = run_module(unit="sglang-main-ep8", journal_file=str(incident), engine_version="0.5.11", in_effect={"sglang_cuda_graph": "enabled"}, report=True)
    assert set(result) >= SCHEMA
    assert set(result["crash"]) == SCHEMA
    assert set(diagnosis.empty_result("x")) == SCHEMA
    assert result["changed"] is False
    assert "rc" not in result
    assert (result["cause"], result["exception"]["type"], result["first_failure"]["rank"]) == ("cuda_graph_replay_failure", "AttributeError", "TP3 EP3")
    assert result["headline"].startswith("sglang-main-ep8.service died on its first batch")
    assert "Frames of the root" in result["report"]


def test_failures_are_told() -> None:
    assert "no such file" in run_module(unit="x", journal_file="/nonexistent")["msg"]
    assert run_module()["failed"] is True
    assert "not a regular expression" in run_module(journal_file=str(Path(__file__)), causes=[{"id": "x", "cause": "y", "pattern": "("}])["msg"]


def test_unit_that_is_not_there(incident: Path) -> None:
    result = run_module(unit="other", journal_file=str(incident))
    assert (result["verdict"], result["cause"], result["complete"]) == ("no_evidence", "none", False)


def test_documentation_names_every_argument_and_key() -> None:
    import yaml

    spec: dict[str, Any] = {}
    exec(compile((ROOT / "library" / "journal_crash.py").read_text().split("import socket")[0], "journal_crash", "exec"), spec)
    documented = yaml.safe_load(spec["DOCUMENTATION"])["options"]
    assert set(documented) == {"unit", "invocation_id", "journal_file", "engine_version", "in_effect", "causes", "report"}
    assert set(yaml.safe_load(spec["RETURN"])) == SCHEMA | {"crash", "headline", "report"}
    assert yaml.safe_load(spec["EXAMPLES"])


def test_ansible_keeps_the_finding(incident: Path, tmp_path: Path) -> None:
    """Through ansible itself: no error on the screen, and the whole finding in `crash`."""
    play = tmp_path / "play.yml"
    play.write_text(
        f"- hosts: localhost\n  gather_facts: false\n  tasks:\n    - journal_crash: {{unit: sglang-main-ep8, journal_file: {incident}}}\n      register: found\n"
        "    - ansible.builtin.assert: {that: [found.crash.exception.type == 'AttributeError', found.cause == 'cuda_graph_replay_failure', not found.changed]}\n"
    )
    done = subprocess.run([sys.executable, "-m", "ansible", "playbook", "-e", f"ansible_python_interpreter={sys.executable}", str(play)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "ANSIBLE_FORCE_COLOR": "0"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR" not in done.stdout + done.stderr
