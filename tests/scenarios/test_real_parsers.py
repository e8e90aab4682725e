"""What SGLang's own code says: its parsers of what the resolver renders, its load tool of what ours measures."""

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
@pytest.mark.parametrize(
    ("file", "tests"),
    [
        pytest.param("test_real_parsers.py", 18, id="three questions to each of six releases"),
        pytest.param("test_bench_serving.py", 4, id="two kinds of lengths on two releases"),
    ],
)
def test_real_code(file: str, tests: int) -> None:
    """In a process of its own, since it puts packages of SGLang's size in memory."""
    environment = {name: value for name, value in os.environ.items() if name != "DFLASH_FLEET_REAL_PARSERS"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/parsers/{file}"]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:]
    # One that was skipped would be missing here.
    assert re.search(rf"\b{tests} passed in\b", run.stdout), run.stdout[-2000:]
