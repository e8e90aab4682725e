"""SGLang's own load tool and ours on the same server: tokens, requests and errors agree, and rates nearly.

Needs the environment of 2 GB that test_real_parsers.py uses, and a few packages that only this tool imports; run by
`make test-faults` (tests/scenarios/test_real_parsers.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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

RELEASES = ("0.5.11", "0.5.23")  # the tool under its old name, and under its new one
REQUESTS, STREAMS, TOKENS = 48, 8, 40
# Of the tool's imports those that the CPU engine's environment lacks; pinned as the CUDA locks pin them.
LACKING = ("datasets", "pyarrow", "pandas", "multiprocess", "xxhash", "python-dateutil", "six")
LOCK = ROOT / "roles/sglang_venv/files/locks/sglang-0.5.23-cuda-cp311.txt"


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder with what only this tool imports."""
    environment.prepare(list(RELEASES))
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A rehearsal engine with a drafter; the address."""
    folder = tmp_path_factory.mktemp("engine")
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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's: the tool wants one, to count what it has sent."""
    folder = tmp_path_factory.mktemp("models")
    models.write(folder, models.build())
    return next(path.parent for path in folder.rglob("tokenizer.json"))


@pytest.fixture
def measure(
    server: str, packages: Path, tokenizer: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """One run of the module, as Ansible runs it on a host."""

    def run(release: str, generator: str, lengths: str) -> dict[str, Any]:
        prompts = [f"Say something about the number {number}." for number in range(REQUESTS)]
        arguments = {
            "url": server, "model": "kimi-k2.6", "concurrency": STREAMS, "requests": REQUESTS, "repeats": 1,
            "max_tokens": TOKENS, "lengths": lengths, "prompts": prompts, "generator": generator,
            "python": str(environment.PYTHON), "tokenizer": str(tokenizer),
            "environment": {
                "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{environment.tree(release)}:{packages}",
            },
        }  # fmt: skip
        with patch_module_args(arguments), pytest.raises(SystemExit):
            sglang_benchmark.main()
        answer = json.loads(capfd.readouterr().out)
        assert not answer.get("failed"), answer
        found: dict[str, Any] = answer["runs"][0]
        return found

    return run


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("lengths", ["fixed", "natural"])
def test_both_generators_say_the_same(measure: Callable[..., dict[str, Any]], release: str, lengths: str) -> None:
    ours, theirs = (measure(release, generator, lengths) for generator in ("client", "bench_serving"))
    assert theirs["generator"] == "bench_serving"
    exact = ("requests", "ok", "errors")
    assert {name: ours[name] for name in exact} == {name: theirs[name] for name in exact}
    assert ours["ok"] == REQUESTS
    if lengths == "fixed":
        assert ours["output_tokens"] == theirs["output_tokens"] == REQUESTS * TOKENS
    assert set(ours) == set(theirs)
    for name in ("output_throughput", "request_throughput"):
        assert ours[name] == pytest.approx(theirs[name], rel=0.25), (ours, theirs)
    for name in ("ttft_ms", "itl_ms", "e2e_ms", "tpot_ms"):
        assert ours[name]["mean"] == pytest.approx(theirs[name]["mean"], rel=0.25), (name, ours, theirs)
