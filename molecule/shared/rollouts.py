"""What tests of rollouts share: the fleet's hosts as a whole, its wish, and what a run printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from typing import Any

import controller
import engine
import starts
import traffic

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


def read_until(run: subprocess.Popen[str], marker: str, nth: int = 1, seconds: float = 300) -> str:
    """Read a play's output until the nth line that holds the marker; returns what was read."""
    text, end = "", time.monotonic() + seconds
    assert run.stdout is not None
    for line in run.stdout:
        text += line
        nth -= marker in line
        if not nth:
            break
        assert time.monotonic() < end, text
    assert not nth, text
    return text


def kill_when(run: subprocess.Popen[str], marker: str, nth: int = 1) -> str:
    """Kill a play and its workers at the nth line of its output that holds the marker; returns what was read."""
    text = read_until(run, marker, nth)
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
        """How every rollout and every rerun must leave the fleet: each engine by a start that has passed its gate."""
        states = {name: line["state"] for name, line in self.status().items()}
        assert states == dict.fromkeys(self.names, "serving")
        assert [name for name in self.names if self.host(name).file(LOCK).exists] == []

    def status(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """The lines of playbooks/status.yml by host; hosts have one instance here."""
        text = self.play("playbooks/status.yml", *arguments, "-e", "format=json")
        document = json.loads(text[text.index("\n{") : text.rindex("\n}") + 2])
        return {line["host"]: line for line in document["instances"] if line["host"] in self.names}

    def rotation(self) -> list[str]:
        """The hosts that the router sends to."""
        urls = traffic.rotation(self.test_file)
        return [name for name in self.names if traffic.worker(self.test_file, name) in urls]

    def fail_where(self, name: str, **arguments: Any) -> None:
        """From now on a start with these arguments dies on this host while it loads weights; without any, none does."""
        failures = [{"kind": "gpu_oom", "at": "weights", "when": arguments}] if arguments else []
        starts.set_pace(self.host(name), *failures, pace=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Faults: whatever happens, one plain rerun must end where an undisturbed run ends

# What a rollout leaves on a host, without what may differ: times, crash reports, caches, marks of a deployment's end.
END_STATE = """
import glob, hashlib, json, os, subprocess, sys
root, unit = json.load(sys.stdin)
def show(name):
    command = ["systemctl", "show", unit, "--value", "--property=" + name]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
def read(path):
    with open(path, "rb") as stream:
        return stream.read()
def left_out(path):
    parts = "/state/reports", "/state/crashes.json", "/home/", "/cache/", "__pycache__", "/venvs/"
    return any(part in path for part in parts)
places = [root, "/etc/sglang", "/usr/local/lib/dflash-fleet", *glob.glob("/etc/systemd/system/sglang-*")]
files = {os.path.join(parent, name) for place in places for parent, _, names in os.walk(place) for name in names}
files |= {place for place in places if os.path.isfile(place)} | set(glob.glob(root + "/venvs/*/.complete"))
print(json.dumps({
    "current": os.readlink(root + "/main/current"),
    "release": hashlib.sha256(read(root + "/main/current/release.json")).hexdigest(),
    "unit": hashlib.sha256(read("/etc/systemd/system/" + unit)).hexdigest(),
    "active": show("ActiveState"), "enabled": show("UnitFileState"), "reload": show("NeedDaemonReload"),
    "last_good": json.loads(read(root + "/main/state/last_good.json"))["release_id"],
    "files": sorted(path for path in files if not left_out(path)),
}))
"""


def end_state(host: Any) -> dict[str, Any]:
    """What a rollout has left on a host."""
    told = json.dumps([engine.ROOT, UNIT])
    return dict(json.loads(engine.sudo(host, f"printf %s {shlex.quote(told)} | python3 -c {shlex.quote(END_STATE)}")))


class Faults(Fleet):
    """A fleet that goes back and forth between two wishes, whose end is known from runs that nothing disturbed."""

    LENGTHS = (2048, 4096)

    def __init__(self, test_file: str, **variables: Any) -> None:
        super().__init__(test_file)
        self.variables = variables
        self.known: dict[int, dict[str, dict[str, Any]]] = {}
        self.length_wanted = 0

    def arguments(self, **more: Any) -> list[str]:
        """The fleet's present wish."""
        return wish(**{"sglang_context_length": self.length_wanted, **self.variables, **more})

    def learn(self) -> None:
        """Undisturbed runs to both wishes; once there and back first, so that both releases are kept."""
        for turn, length in enumerate(self.LENGTHS * 2):
            self.length_wanted = length
            self.deploy(*self.arguments(sglang_rollout_batches=["100%"]))
            if turn >= len(self.LENGTHS):
                self.known[length] = {name: end_state(self.host(name)) for name in self.names}
        self.all_serve_and_nobody_holds_them()

    def turn(self) -> None:
        """From now on the other wish."""
        self.length_wanted = self.LENGTHS[1 - self.LENGTHS.index(self.length_wanted)]

    def ends_as_if_nothing_had_happened(self) -> None:
        """The same end as without the fault: releases, units, files, and an engine that answers."""
        for name in self.names:
            found, known = end_state(self.host(name)), self.known[self.length_wanted][name]
            found["files"], known = sorted(set(found["files"]) ^ set(known["files"])), {**known, "files": []}
            assert found == known, name
            assert engine.generate(self.host(name), "still there?", 4)["text"]
        self.all_serve_and_nobody_holds_them()

    def rerun(self, *arguments: str, **more: Any) -> str:
        """One plain rerun, and the end is that of an undisturbed run."""
        output = self.deploy(*self.arguments(**more), *arguments)
        self.ends_as_if_nothing_had_happened()
        return output

    def power_off(self, name: str) -> None:
        """Cut it, as a power supply does."""
        controller.fleet(self.test_file, "off", name)

    def power_on(self, name: str, seconds: float = 90) -> None:
        """Boot it; its engine comes back by itself."""
        controller.fleet(self.test_file, "reboot", name)
        self.until(name, "ActiveState", "active", seconds)

    def until(self, name: str, key: str, value: str, seconds: float = 90) -> None:
        """Wait until a property of the unit has a value."""
        end = time.monotonic() + seconds
        while engine.show(self.host(name), UNIT, key) != value:
            assert time.monotonic() < end, engine.journal(self.host(name), UNIT)[-3000:]
            time.sleep(0.5)

    def inside(self, name: str, *command: str) -> str:
        """A command in a host as root, without SSH."""
        return controller.fleet(self.test_file, "exec", name, "--", *command)
