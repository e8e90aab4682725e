"""Each Molecule scenario is one test, and has to prove that it tested something: molecule passes when it finds none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LOGS = ROOT / ".cache" / "scenarios"
# What every change must pass; all others are the long matrices (make test-faults).
CORE = ("default", "incident", "readiness", "real_engine")
# Long matrices of which every change must pass the beginning: what makes them short.
SHORT = {
    "benchmark": {"BEGINNING": "1"},
    "check_mode": {"ROUNDS": "1"},
    "gpu_host": {"PYTEST_ADDOPTS": "-k 'newest_of or module_runs or journal_is'"},
    "rollout": {"PYTEST_ADDOPTS": "-k test_front_door"},
    "weights": {"PYTEST_ADDOPTS": "-k test_beginning"},
}
# Those that are too long for one turn among the matrices, in parts that stand for themselves.
PARTS = {
    "check_mode": [{"ROUNDS": "2,3"}, {"ROUNDS": "4,5"}],
    "rollout": [{"PYTEST_ADDOPTS": "-k 'not front_door'"}],
    "rollout_hosts": [
        {"PYTEST_ADDOPTS": "-k 'off or network'"},
        {"PYTEST_ADDOPTS": "-k 'not off and not network'"},
    ],
}
ALL = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
LIMIT = 30 * 60  # seconds; a scenario that hangs must not take the others with it


def scenarios() -> list[object]:
    """(title, name, settings) of the core scenarios in their order, then of the rest, marked."""
    named = {*CORE, *SHORT, *PARTS}
    assert named <= set(ALL), f"scenarios missing: {named - set(ALL)}"
    rest = [
        (name if name not in PARTS else f"{name}-{number}", name, settings)
        for name in ALL
        for number, settings in enumerate(PARTS.get(name, [{}]), 2 if name in SHORT else 1)
        if name not in CORE
    ]
    core = [pytest.param(name, name, {}, id=name) for name in CORE]
    return [*core, *(pytest.param(*one, id=one[0], marks=pytest.mark.faults) for one in rest)]


@pytest.mark.parametrize(("title", "name", "settings"), scenarios())
def test_scenario(title: str, name: str, settings: dict[str, str]) -> None:
    """Run it whole, or a part of it; its log stays in .cache/scenarios."""
    run_scenario(name, title, **settings)


@pytest.mark.parametrize("name", SHORT)
def test_beginning_of(name: str) -> None:
    """Run the first part of a long matrix."""
    run_scenario(name, f"{name}-short", **SHORT[name])


def run_scenario(name: str, title: str, **settings: str) -> None:
    """Run a scenario from its destroy to its destroy, and see that it tested something and skipped nothing."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{title}.log"
    path = f"{BIN}:{os.environ['PATH']}"
    environment = {**os.environ, **settings, "PATH": path, "PY_COLORS": "0", "ANSIBLE_NOCOLOR": "1"}
    started = time.monotonic()
    with log.open("w") as out:
        run = subprocess.run(
            [str(BIN / "molecule"), "test", "-s", name],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
            check=False,
        )
    text = log.read_text(errors="replace")
    print(f"{title}: {time.monotonic() - started:.0f} s, {log}")
    assert run.returncode == 0, f"{log}\n" + "\n".join(text.splitlines()[-120:])
    passed = sum(int(count) for count in re.findall(r"\b(\d+) passed\b", text))
    assert passed > 0, f"{name} ran no Testinfra test, see {log}"
    assert not re.search(r"\b[1-9]\d* (skipped|xfailed)\b[^\n]* in \d", text), f"{name} skipped tests, see {log}"
