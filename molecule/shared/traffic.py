"""Users of a fleet while tests work on it: requests at its router, streamed, and what became of each."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import controller
import engine
import yaml

ROUTER = "router-01"
ROUTER_UNIT = "dflash-fleet-router.service"
DIRECTORY = "/var/lib/dflash-fleet-router"
PORT = 8000
CLIENT = controller.ROOT / "module_utils/dflash_fleet/load.py"
# So many beginnings that no worker has them all, as with users who have little in common.
PROMPTS = [f"{number} bottles of beer on the wall, and then?" for number in range(1, 400)]


def address(test_file: str, name: str) -> str:
    """A host's address, as the inventory has it."""
    inventory = Path(test_file).resolve().parents[1] / "inventory/hosts.yml"
    return str(yaml.safe_load(inventory.read_text())["all"]["hosts"][name]["ansible_host"])


def worker(test_file: str, name: str) -> str:
    """How the router knows a host's engine."""
    return f"http://{address(test_file, name)}:30000"


def rotation(test_file: str) -> set[str]:
    """The engines that the router sends to now and calls healthy."""
    on = controller.scenario_host(test_file, ROUTER)
    control = engine.read_json(on, f"{DIRECTORY}/control.json")
    status, answer = engine.request(on, "/workers", key=control["key"], port=PORT, address=address(test_file, ROUTER))
    assert status == 200, answer
    return {found["url"] for found in answer["workers"] if found["is_healthy"]}


class Traffic:
    """`with Traffic(__file__) as traffic: ...`; then `traffic.result` is the client's own count."""

    def __init__(self, test_file: str, streams: int = 16, tokens: int = 48) -> None:
        self.url = f"http://{address(test_file, ROUTER)}:{PORT}"
        self.streams, self.tokens = streams, tokens
        self.result: dict[str, Any] = {}

    def __enter__(self) -> Traffic:
        self.folder = tempfile.TemporaryDirectory()
        prompts = Path(self.folder.name, "prompts.txt")
        prompts.write_text("\n".join(PROMPTS))
        command = [sys.executable, str(CLIENT), "--url", self.url, "--model", "kimi-k2.6", "--seconds", "3600"]
        command += ["--concurrency", str(self.streams), "--max-tokens", str(self.tokens), "--prompts", str(prompts)]
        self.run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.run.send_signal(signal.SIGTERM)
        output, errors = self.run.communicate(timeout=120)
        self.folder.cleanup()
        assert output, errors
        self.result = json.loads(output)
        print("traffic:", {name: self.result[name] for name in ("requests", "ok", "failed", "cut", "reasons")})

    def lost(self) -> dict[str, Any]:
        """What was lost, by the client's own count; empty where nothing was."""
        assert self.result["requests"] > 0
        return {name: self.result[name] for name in ("failed", "cut", "reasons") if self.result[name]}
