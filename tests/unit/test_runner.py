"""The playbooks run under ansible-runner as they are: what AWX and execution environments call."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import ansible_runner
import pytest
from plugins import ROOT


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private data directory as AWX makes one: inventory and variables in it, the project beside them."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    shutil.copytree(ROOT / "inventory/example", tmp_path / "inventory")
    (tmp_path / "project").symlink_to(ROOT)
    (tmp_path / "env").mkdir()
    (tmp_path / "env/extravars").write_text(json.dumps({"plan_offline": True, "sglang_version": "0.5.20"}))
    return tmp_path


def test_a_plan_under_ansible_runner(private: Path) -> None:
    """Offline: the plan of the example's fleet, with project, inventory and variables in ansible-runner's layout."""
    run = ansible_runner.run(private_data_dir=str(private), playbook="playbooks/plan.yml", quiet=True, timeout=120)
    text = run.stdout.read()
    assert (run.status, run.rc) == ("successful", 0), text
    assert "--ep-size 8" in text
    hosts = {event["event_data"]["host"] for event in run.events if event["event"] == "runner_on_ok"}
    assert hosts, "its events tell of our tasks"


def test_a_failure_under_ansible_runner_is_one(private: Path) -> None:
    """What the plan refuses ends as failed, with the reason."""
    run = ansible_runner.run(
        private_data_dir=str(private), playbook="playbooks/plan.yml", quiet=True, timeout=120,
        extravars={"plan_offline": True, "sglang_profile": "no-such-profile"},
    )  # fmt: skip
    assert (run.status, run.rc) == ("failed", 2)
    assert "no-such-profile" in run.stdout.read()
