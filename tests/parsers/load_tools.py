"""Both load tools on one server: ours, and the one that a release of SGLang brings (sglang.bench_serving).

For test_bench_serving.py and benchmarks/load_tools.py. Needs the environment of 2 GB that test_real_parsers.py uses,
and a few packages that only SGLang's tool imports.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in ("module_utils", "tests/unit", "tests/parsers", "library", "rehearsal"):
    sys.path.insert(0, str(ROOT / folder))

import ansible.module_utils  # noqa: E402

ansible.module_utils.__path__.append(str(ROOT / "module_utils"))

import environment  # noqa: E402
import models  # noqa: E402
import sglang_benchmark  # noqa: E402
import test_rehearsal_engine as rehearsal  # noqa: E402
from ansible.module_utils.testing import patch_module_args  # noqa: E402

# Of the tool's imports those that the CPU engine's environment lacks; pinned as the CUDA locks pin them.
LACKING = ("datasets", "pyarrow", "pandas", "multiprocess", "xxhash", "python-dateutil", "six")
LOCK = ROOT / "roles/sglang_venv/files/locks/sglang-0.5.23-cuda-cp311.txt"


def packages(*releases: str) -> Path:
    """Prepare the releases' code; a folder with what only their load tool imports."""
    environment.prepare(list(releases))
    target = environment.FOLDER / "bench-serving"
    if not (target / ".complete").exists():
        blocks = LOCK.read_text().replace("\\\n", " ").splitlines()
        wanted = [line for line in blocks if line.split("==")[0] in LACKING]
        assert len(wanted) == len(LACKING), wanted
        target.mkdir(parents=True, exist_ok=True)
        (target / "requirements.txt").write_text("\n".join(wanted) + "\n")
        command = [sys.executable, "-m", "pip", "--python", str(environment.PYTHON), "install", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--only-binary=:all:", "--upgrade", "--target", str(target)]
        subprocess.run([*command, "--requirement", str(target / "requirements.txt")], check=True)
        (target / ".complete").touch()
    return target


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """A rehearsal engine with a drafter, installed and run below `folder`; the address."""
    environ = {**os.environ, "REHEARSAL_RELEASE": "0.5.23", "PYTHONPATH": ""}
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(rehearsal.ENGINE)], env=environ, check=True)
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-index", *map(str, folder.glob("*.whl"))], check=True)
    running = rehearsal.Running(venv / "bin/python", folder, rehearsal.EP8, {"pace": 0.01})
    with contextlib.ExitStack() as stack:
        stack.callback(running.process.wait)
        stack.callback(running.process.terminate)
        address = f"http://127.0.0.1:{running.port}"
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
                if answer.status == 200:
                    break
            assert time.monotonic() < deadline, running.file.read_text()
            time.sleep(0.2)
        yield address


def tokenizer(folder: Path) -> Path:
    """The tiny model's, below `folder`: SGLang's tool wants one, to count what it has sent."""
    models.write(folder, models.build())
    return next(path.parent for path in folder.rglob("tokenizer.json"))


@dataclass
class Bench:
    """One server, measured by either tool."""

    url: str
    packages: Path
    tokenizer: Path

    def measure(
        self,
        generator: str,
        release: str,
        *,
        lengths: str = "fixed",
        requests: int = 48,
        streams: int = 8,
        tokens: int = 40,
    ) -> dict[str, Any]:
        """One run of the module, as Ansible runs it on a host; `release` is the one whose tool is taken."""
        arguments = {
            "url": self.url, "model": "kimi-k2.6", "concurrency": streams, "requests": requests, "repeats": 1,
            "max_tokens": tokens, "lengths": lengths, "generator": generator,
            "prompts": [f"Say something about the number {number}." for number in range(requests)],
            "python": str(environment.PYTHON), "tokenizer": str(self.tokenizer),
            "environment": {
                "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{environment.tree(release)}:{self.packages}",
            },
        }  # fmt: skip
        printed = io.StringIO()
        with patch_module_args(arguments), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            sglang_benchmark.main()
        answer = json.loads(printed.getvalue())
        assert not answer.get("failed"), answer
        found: dict[str, Any] = answer["runs"][0]
        return found
