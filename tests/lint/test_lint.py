"""The linters are part of the tests: each is one, and must find nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

LINTERS = {
    "ruff": ["ruff", "check", "."],
    "mypy": ["mypy"],
    "yamllint": ["yamllint", "--strict", "."],
    "ansible-lint": ["ansible-lint", "--offline", "-q"],
}


@pytest.mark.parametrize("name", LINTERS)
def test_linter_finds_nothing(name: str) -> None:
    """Run from the root, where its configuration lies."""
    command = LINTERS[name]
    run = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
