#!/usr/bin/env python3
"""What a run costs that finds nothing to do: the whole playbook on an unchanged fleet, with the one look and without.

Boots `--hosts` rehearsal hosts (default 20; 250 MB of memory each), deploys to them once, and measures, on one machine
and in one run, each `--repeats` times:

  probe     ansible-playbook deploy-dflash.yml: one look at each host
  roles     the same with sglang_skip_unchanged=false: every role asks every host
  extra     what one more host costs with the probe: all hosts against half of them

and the controller's peak memory with all hosts and with half of them. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import ROOT, environment, rehearsals

FLEET = "bench_second_run"
WISH = {"sglang_version": "0.5.20", "sglang_rollout_batches": ["100%"]}


def play(inventory: Path, playbook: str, *arguments: str, **variables: Any) -> tuple[float, int, str]:
    """(seconds, peak memory of the controller's largest process in KiB, output); the run must succeed."""
    command = ["ansible-playbook", "-i", str(inventory), playbook, "-e", json.dumps({**WISH, **variables}), *arguments]
    with tempfile.TemporaryFile("w+") as out:
        begun = time.monotonic()
        run = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        _, status, used = os.wait4(run.pid, 0)
        seconds = time.monotonic() - begun
        out.seek(0)
        text = out.read()
    if status:
        raise SystemExit(text)
    return seconds, used.ru_maxrss, text


def unchanged(inventory: Path, repeats: int, *arguments: str, **variables: Any) -> dict[str, Any]:
    """Figures of runs that must change nothing."""
    seconds, memory = [], []
    for _ in range(repeats):
        took, peak, text = play(inventory, "deploy-dflash.yml", *arguments, **variables)
        if any("changed=0" not in line for line in text.splitlines() if "unreachable=" in line):
            raise SystemExit(f"a second run changed something:\n{text}")
        seconds.append(took)
        memory.append(peak)
    return {"seconds": round(statistics.median(seconds), 2), "max_seconds": round(max(seconds), 2),
            "controller_mib": round(max(memory) / 1024, 1)}  # fmt: skip


def measure(inventory: Path, hosts: int, repeats: int) -> dict[str, Any]:
    """All figures."""
    play(inventory, "rehearsal/prepare.yml", rehearsal_config={"pace": 0.02, "failures": []})
    first, _, _ = play(inventory, "deploy-dflash.yml")
    print(f"deployed to {hosts} hosts in {first:.0f} s", flush=True)
    half = f"rehearsal[0:{hosts // 2 - 1}]"
    probe, part = unchanged(inventory, repeats), unchanged(inventory, repeats, "-l", half)
    print("the look is measured", flush=True)
    roles = unchanged(inventory, max(1, repeats // 2), sglang_skip_unchanged=False)
    other = hosts - hosts // 2
    return {
        "benchmark": "second_run",
        "hosts": hosts,
        "cores": os.cpu_count(),
        "first_deployment_seconds": round(first, 1),
        "probe": probe,
        "probe_half_of_the_hosts": part,
        "seconds_per_extra_host": round((probe["seconds"] - part["seconds"]) / other, 3),
        "controller_mib_per_extra_host": round((probe["controller_mib"] - part["controller_mib"]) / other, 2),
        "roles": roles,
        "ratio_roles_to_probe": round(roles["seconds"] / probe["seconds"], 1),
        "goals": {"hosts": 20, "seconds": 10, "seconds_per_extra_host": 0.35},
    }


def main() -> int:
    """Boot, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.hosts < 2:
        parser.error("--hosts: two at least, since half of them are measured too")
    with rehearsals(FLEET, options.hosts) as inventory:
        result = measure(inventory, options.hosts, options.repeats)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
