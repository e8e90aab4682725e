"""What tests of rollouts share: the fleet's hosts as a whole, its wish, and what a run printed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from typing import Any

import controller
import engine
import starts

UNIT = starts.UNIT
BATCHES = {"sglang_rollout_batches": [1, 2, "100%"], "sglang_rollout_soak": 0}
LOCK = f"{engine.ROOT}/state/rollout.json"


def wish(**variables: Any) -> list[str]:
    """Arguments for the fleet's wish, three batches unless told otherwise."""
    return ["-e", json.dumps({"sglang_version": "0.5.20", **BATCHES, **variables})]


def recap(output: str, name: str) -> dict[str, int]:
    """The counts of a host in Ansible's recap."""
    line = re.search(rf"^{name}\s+: (.*)$", output, re.M)
    assert line, output
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line[1])}


def row(output: str, name: str) -> str:
    """The words of a host's line in the last table."""
    return output.rpartition("SGLANG ***")[2].partition(f"\n{name} ")[2].splitlines()[0]


def kill_when(run: subprocess.Popen[str], marker: str, seconds: float = 120) -> str:
    """Read a play's output until a line holds the marker, then kill it and its workers; returns what was read."""
    text, end = "", time.monotonic() + seconds
    assert run.stdout is not None
    for line in run.stdout:
        text += line
        if marker in line:
            break
        assert time.monotonic() < end, text
    assert marker in text, text
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    return text


class Fleet:
    """The hosts of the scenario that a test file belongs to."""

    def __init__(self, test_file: str) -> None:
        self.test_file = test_file
        self.names = controller.host_names(test_file)

    def host(self, name: str) -> Any:
        """Testinfra's view of one of them."""
        return controller.scenario_host(self.test_file, name)

    def deploy(self, *arguments: str, rc: int | None = 0) -> str:
        """The advertised command to its end; what it printed."""
        return controller.deploy(self.test_file, *arguments, rc=rc)

    def play(self, playbook: str, *arguments: str, rc: int | None = 0) -> str:
        """Another playbook to its end; what it printed."""
        return controller.play(self.test_file, playbook, *arguments, rc=rc)

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """The advertised command, running, with its workers in a process group of its own."""
        return controller.start(self.test_file, "deploy-dflash.yml", *arguments, own_group=True)

    def invocations(self, *names: str) -> dict[str, str]:
        """The start that each engine runs by."""
        return {name: engine.show(self.host(name), UNIT, "InvocationID") for name in names or self.names}

    def length(self, name: str) -> int | None:
        """The context length that a host's current release asks for, as a mark of which wish it has."""
        arguments = engine.release(self.host(name))["arguments"]
        if "--context-length" not in arguments:
            return None
        return int(arguments[arguments.index("--context-length") + 1])

    def lengths(self) -> dict[str, int | None]:
        """The same of every host."""
        return {name: self.length(name) for name in self.names}

    def all_serve_and_nobody_holds_them(self) -> None:
        """How every rollout and every rerun must leave the fleet."""
        for name in self.names:
            on = self.host(name)
            ready = engine.state(on, "ready.json")
            assert engine.show(on, UNIT, "ActiveState") == "active"
            assert ready["invocation_id"] == engine.show(on, UNIT, "InvocationID")
            assert not on.file(LOCK).exists

    def fail_where(self, name: str, **arguments: Any) -> None:
        """From now on a start with these arguments dies on this host while it loads weights; without any, none does."""
        failures = [{"kind": "gpu_oom", "at": "weights", "when": arguments}] if arguments else []
        starts.set_pace(self.host(name), *failures, pace=0.02)
