"""SGLang's own parsers take what the resolver renders, on every release at which options moved."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 15 * 60  # seconds, the environment's installation with it


@pytest.mark.faults
def test_real_parsers() -> None:
    """In a process of its own, since it puts packages of SGLang's size in memory."""
    environment = {name: value for name, value in os.environ.items() if name != "DFLASH_FLEET_REAL_PARSERS"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/parsers/test_real_parsers.py"]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:]
    # Three questions to each of six releases; one that was skipped would be missing here.
    assert re.search(r"\b18 passed in\b", run.stdout), run.stdout[-2000:]
