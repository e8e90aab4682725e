#!/usr/bin/env python3
"""How long after the death of an engine's main process somebody knows: the module on the host, and the play over SSH.

Boots one rehearsal host (or takes one: --inventory DIR --host NAME), kills the main process of a unit of the real type
again and again, and measures on the kernel's monotonic clock, which host and controller share here:

  module   the watch and the diagnosis that `sglang_wait` runs, on the host: death to notice, death to return. The death
           is what the engine itself noted just before it; what systemd thinks of the time does not enter
  play     `ansible-playbook` with one sglang_wait task over SSH: death to the printed failure
  follow   a loop over `journalctl --follow`, of the same crashes as `module`
  uri      a play with ansible.builtin.uri, until: status == 200, delay: 5. It never learns of a death: it ends when its
           retries do (the few given here; a real one has as many as the load may take)

The last line of the output is one JSON object. `--count` crashes on the host (default 50), `--plays` plays (default 5).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import ROOT, booted, environment

FLEET = "bench_crash"
UNIT = "sglang-bench-ep8.service"
DIED = "/dev/shm/crash-notice"  # on the host, whose every user is ours

# The engine of this benchmark: some lines as a load prints them, then its own death, with its time noted just before.
VICTIM = f"""
import os, random, signal, time
print("Load weight begin. avail mem=90.00 GB", flush=True)
time.sleep(random.uniform(0.5, 0.9) + float(os.environ.get("EXTRA", "0")))
print("Traceback (most recent call last):\\n  File \\"/x/dflash_worker.py\\", line 660, in f\\n    y.dtype\\n"
      "AttributeError: 'NoneType' object has no attribute 'dtype'", flush=True)
time.sleep(0.3)
with open("{DIED}.new", "w") as out:
    out.write(str(time.monotonic()))
os.replace("{DIED}.new", "{DIED}")
os.kill(os.getpid(), signal.SIGKILL)
"""

UNIT_TEXT = f"""[Unit]
StartLimitIntervalSec=0
[Service]
Type=notify
NotifyAccess=all
Environment=EXTRA=%s
ExecStart=/usr/bin/python3 -I /root/victim.py
KillMode=mixed
# {UNIT}
"""

# Runs on the host with the code that sglang_support has installed there.
DRIVER = """
import json, os, subprocess, sys, threading, time
count, package, unit, died = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
sys.path.insert(0, package)
from dflash_fleet import diagnosis, journal, remedies, watch

PARAMS = {"unit": unit, "host": "127.0.0.1", "port": 39999, "served_model_name": "", "api_key": None, "drafter": True,
          "block_size": 8, "cuda_graph": True, "ranks": 8, "engine": "sglang", "engine_version": "0.5.20",
          "in_effect": {},
          "invocation_id": None, "timeout": 60, "stall": {}, "settle": 0, "requests": 4, "generation_timeout": 60,
          "min_accept_length": 1.1, "poll": "until", "slice": 0, "resume": None, "baseline": {}}

def read_all(invocation):
    end = time.monotonic() + 0.5
    while True:
        found = journal.read_invocation(unit, invocation)
        if any(journal.is_exit(entry) for entry in found.entries[-100:]) or time.monotonic() >= end:
            return found
        time.sleep(0.02)

def diagnose(invocation, ended):
    found = read_all(invocation)
    return diagnosis.diagnose(found.entries, unit, invocation_id=invocation, engine_version="0.5.20",
                              kernel_entries=found.kernel, gaps=found.gaps)

rows = []
for number in range(count):
    if os.path.exists(died):
        os.unlink(died)
    command = ["journalctl", "-f", "-n", "0", "-o", "cat", "-u", unit]
    follow = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    seen = []
    def read():
        for line in follow.stdout:
            if "Main process exited" in line:
                seen.append(time.monotonic())
                return
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    time.sleep(0.2)
    since = time.monotonic()
    subprocess.run(["systemctl", "restart", "--no-block", unit], check=True)
    result = watch.Watch({**PARAMS, "since_monotonic": since}, diagnose, lambda cause: []).run()
    back = time.monotonic()
    assert result["outcome"] == "crashed", result
    at = float(open(died).read())
    reader.join(5)
    follow.kill()
    follow.wait()
    took = result["timings"]["diagnosis_ms"]
    rows.append({"notice": (back - at) * 1000 - took, "diagnosis": took,
                 "return": (back - at) * 1000, "follow": (seen[0] - at) * 1000 if seen else None})
print(json.dumps(rows))
"""

PREPARE = """
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - sglang_support:
      register: support
    - ansible.builtin.copy: {content: "{{ victim }}", dest: /root/victim.py, mode: "0644"}
    - ansible.builtin.copy: {content: "{{ driver }}", dest: /root/driver.py, mode: "0644"}
    - ansible.builtin.copy: {content: "{{ unit_text }}", dest: "/run/systemd/system/{{ unit }}", mode: "0644"}
    - ansible.builtin.systemd_service: {daemon_reload: true}
"""

WAIT = """
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.command: systemctl restart --no-block {{ unit }}
    - sglang_wait: {unit: "{{ unit }}", port: 39999, ranks: 8, engine_version: 0.5.20}
"""

URI = """
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.command: systemctl restart --no-block {{ unit }}
    - ansible.builtin.uri: {url: "http://127.0.0.1:39999/health"}
      register: answer
      until: answer.status == 200
      delay: 5
      retries: 3
"""


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def figures(values: list[float]) -> dict[str, Any]:
    """Milliseconds as p50, p99 and their number."""
    if not values:
        return {"n": 0}
    return {
        "p50_ms": round(statistics.median(values), 1),
        "p99_ms": round(percentile(values, 0.99), 1),
        "max_ms": round(max(values), 1),
        "n": len(values),
    }


class Host:
    """The one host of the benchmark."""

    def __init__(self, fleet: str, name: str, inventory: Path) -> None:
        self.fleet, self.name, self.inventory = fleet, name, inventory

    def execute(self, *command: str) -> str:
        """A command on the host, over nothing that takes part in the measurement."""
        done = subprocess.run(
            [sys.executable, str(ROOT / "rehearsal/fleet.py"), "exec", self.fleet, self.name, "--", *command],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def play(self, text: str, folder: Path, **variables: str) -> tuple[int, float, str]:
        """(exit code, monotonic time of the printed failure or of the end, output)."""
        playbook, values = folder / "play.yml", folder / "vars.json"
        playbook.write_text(text)
        values.write_text(json.dumps({"unit": UNIT, **variables}))
        run = subprocess.Popen(
            ["ansible-playbook", "-i", str(self.inventory), "-l", self.name, str(playbook), "-e", f"@{values}"],
            cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        failed, lines = 0.0, []
        assert run.stdout is not None
        for line in run.stdout:
            if not failed and line.startswith(("fatal: ", "[ERROR]: Task failed")):
                failed = time.monotonic()
            lines.append(line)
        run.wait()
        return run.returncode, failed or time.monotonic(), "".join(lines)

    def died(self) -> float:
        """When the unit's main process ended itself, by the host's clock, which is ours."""
        return float(self.execute("cat", DIED))


def measure(host: Host, count: int, plays: int) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, _, output = host.play(PREPARE, folder, victim=VICTIM, driver=DRIVER, unit_text=UNIT_TEXT % "0")
        if code:
            raise SystemExit(output)
        package = host.execute("sh", "-c", "ls -d /usr/local/lib/dflash-fleet/*").split()[-1]
        rows = json.loads(host.execute("python3", "/root/driver.py", str(count), package, UNIT, DIED).splitlines()[-1])
        print(f"{count} crashes on the host are measured", flush=True)
        # A play needs longer to reach its wait than the victim lives.
        code, _, output = host.play(PREPARE, folder, victim=VICTIM, driver=DRIVER, unit_text=UNIT_TEXT % "4")
        waits, loops = [], []
        for _ in range(plays):
            code, failed, output = host.play(WAIT, folder)
            if code != 2:
                raise SystemExit(output)
            waits.append((failed - host.died()) * 1000)
        print(f"{plays} plays with sglang_wait are measured", flush=True)
        for _ in range(1 if plays else 0):
            code, failed, output = host.play(URI, folder)
            loops.append((failed - host.died()) * 1000)
    notices = [row["notice"] for row in rows]
    return {
        "benchmark": "crash_notice",
        "host": {"notice": figures(notices), "diagnosis": figures([row["diagnosis"] for row in rows]),
                 "death_to_return": figures([row["return"] for row in rows])},
        "play": {"death_to_failed_task": figures(waits)},
        "baselines": {
            "journalctl_follow_notice": figures([row["follow"] for row in rows if row["follow"] is not None]),
            "uri_until_delay_5_retries_3": figures(loops),
        },
        "goals": {"notice_p99_ms": 10, "death_to_return_p99_ms": 150, "play_p99_ms": 1000},
    }  # fmt: skip


def main() -> int:
    """Boot, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="crashes on the host")
    parser.add_argument("--plays", type=int, default=5, help="plays over SSH")
    parser.add_argument("--fleet", default="", help="an existing fleet to use instead of booting one")
    parser.add_argument("--host", default="rehearsal-01")
    parser.add_argument("--inventory", type=Path, help="folder of its inventory")
    options = parser.parse_args()
    if options.fleet:
        result = measure(Host(options.fleet, options.host, options.inventory), options.count, options.plays)
    else:
        with booted(FLEET, "hosts:\n  - {name: rehearsal-01, image: bookworm, groups: [bench]}\n") as inventory:
            result = measure(Host(FLEET, "rehearsal-01", inventory), options.count, options.plays)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
