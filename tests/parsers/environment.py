"""Parse command lines with SGLang's own parsers, without a GPU and without starting a server.

One environment serves every release: the packages of the CPU engine (rehearsal/wheels.py cpu) with the release's wheel
unpacked in front of them. `python tests/parsers/environment.py [RELEASE ...]` prepares it (2 GB in the cache, about a
minute); test_real_parsers.py then uses it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import option_table

CACHE = Path(os.environ.get("DFLASH_FLEET_CACHE", Path.home() / ".cache" / "dflash-fleet"))
WHEELHOUSE = CACHE / "wheelhouses" / "sglang-0.5.23-cpu"
FOLDER = CACHE / "parsers"
PYTHON = FOLDER / "venv" / "bin" / "python"

# Runs inside: what the parser has, and what it makes of each command line on standard input.
PROGRAM = r"""
import argparse, contextlib, io, json, sys

# Releases before 0.5.19 were made for an older transformers, which did not know some of the configurations they add.
from transformers.models.auto import configuration_auto
mapping = configuration_auto._LazyConfigMapping
register = mapping.register
mapping.register = lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)

from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser(prog="sglang serve")
ServerArgs.add_cli_args(parser)
options = {
    option[2:]: action.nargs == 0
    for action in parser._actions for option in action.option_strings
    if option.startswith("--") and option != "--help"
}
results = []
for argv in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parsed = vars(parser.parse_args(argv))
        results.append({"ok": True, "said": said.getvalue(), "parsed": {k: repr(v) for k, v in parsed.items()}})
    except SystemExit as end:
        results.append({"ok": False, "said": said.getvalue(), "exit": end.code})
json.dump({"options": options, "results": results}, sys.stdout)
"""


def tree(release: str) -> Path:
    """The release's package, unpacked once."""
    folder = FOLDER / release
    if not (folder / ".complete").exists():
        with zipfile.ZipFile(option_table.fetch(release, CACHE / "sglang-wheels")) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("sglang/")])
        (folder / ".complete").touch()
    return folder


def ready(release: str) -> bool:
    """Whether the parser of this release can be used at once."""
    return (FOLDER / "venv" / ".complete").exists() and (FOLDER / release / ".complete").exists()


def prepare(releases: list[str]) -> None:
    """Install the environment and unpack the releases, what is there already left alone."""
    if not (WHEELHOUSE / "requirements.txt").exists():
        sys.exit(f"{WHEELHOUSE} is missing: python rehearsal/wheels.py cpu")
    mark = FOLDER / "venv" / ".complete"
    if not mark.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(mark.parent)], check=True)
        install = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(PYTHON),
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
        ]
        wheels = ["--find-links", str(WHEELHOUSE), "--requirement", str(WHEELHOUSE / "requirements.txt")]
        subprocess.run([*install, *wheels], check=True)
        mark.touch()
    for release in releases:
        tree(release)


def parse(release: str, command_lines: list[list[str]]) -> dict[str, Any]:
    """{options: {name: is a switch}, results: [{ok, said, parsed | exit}]} of the release's own parser."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tree(release)), "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [str(PYTHON), "-c", PROGRAM],
        input=json.dumps(command_lines),
        env={**environment, "HOME": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"SGLang {release}'s parser did not load:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index('{"options"') :])
    return answer


if __name__ == "__main__":
    prepare(sys.argv[1:] or option_table.RELEASES)
