#!/usr/bin/env python3
"""How long a batch takes beside one host, with few forks: loads must not wait for one another.

Boots `--hosts` rehearsal hosts (default 12; 250 MB of memory each), deploys to them once, and measures, on one machine
and in one run, a new wish whose load is paced to about a minute:

  one     ansible-playbook deploy-dflash.yml -l <one host>
  batch   the same for all hosts in one batch, with `--forks` forks (default 3)
  turns   the same in the default batches (one host, a tenth, a quarter, the rest), with `--turns`

Seconds are the whole command's and, from the rollout's own report, those of the hosts' loads; memory is the
controller's, all processes of the run together. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import ROOT, environment, rehearsals
from support.memory import Peak

FLEET = "bench_rollout"
# Each on its own address, as behind a router: what hosts are given differs, which must not make them take turns.
WISH = {"sglang_version": "0.5.20", "sglang_host": "{{ ansible_host }}", "sglang_behind_router": True,
        "sglang_rollout_batches": ["100%"], "sglang_rollout_soak": 0}  # fmt: skip
GOAL = 1.5


def play(inventory: Path, playbook: str, *arguments: str, **variables: Any) -> dict[str, Any]:
    """One run that must succeed: its seconds, the controller's memory, and the report where it was a rollout."""
    with tempfile.TemporaryDirectory() as reports, tempfile.TemporaryFile("w+") as out:
        wish = {**WISH, "sglang_reports_dir": reports, **variables}
        command = ["ansible-playbook", "-i", str(inventory), playbook, "-e", json.dumps(wish), *arguments]
        begun = time.monotonic()
        run = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        peak = Peak(run.pid)
        peak.start()
        status = run.wait()
        seconds, memory = time.monotonic() - begun, peak.stop()
        if status:
            out.seek(0)
            raise SystemExit(out.read())
        written = list(Path(reports).glob("rollouts/*/rollout.json"))
        report = json.loads(written[0].read_text()) if written else {}
    return {"seconds": round(seconds, 1), "controller_mib": memory, "report": report}


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a rollout."""
    hosts = run["report"]["hosts"]
    loads = [bar for host in hosts for bar in host["bars"] if bar["phase"] == "load"]
    waits = [attempt["seconds"] for host in hosts for attempt in host["attempts"]]
    if run["report"]["counts"] != {"done": len(hosts)}:
        raise SystemExit(f"a rollout did not end well: {run['report']['counts']}")
    return {
        "hosts": len(hosts),
        "batches": [len(batch["hosts"]) for batch in run["report"]["batches"]],
        "seconds": run["seconds"],
        "loads_seconds": round(max(bar["end"] for bar in loads) - min(bar["begin"] for bar in loads), 1),
        "longest_load_of_a_host": max(waits),
        "controller_mib": run["controller_mib"],
    }


def measure(inventory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    play(inventory, "rehearsal/prepare.yml", rehearsal_config={"pace": 0.02, "failures": []})
    first = play(inventory, "deploy-dflash.yml")
    print(f"deployed to {options.hosts} hosts in {first['seconds']:.0f} s", flush=True)
    play(inventory, "rehearsal/prepare.yml", rehearsal_config={"pace": options.pace, "failures": []})
    forks = ("-f", str(options.forks))
    one = figures(play(inventory, "deploy-dflash.yml", "-l", "rehearsal-01", *forks, sglang_context_length=4096))
    print("one host is measured", flush=True)
    batch = figures(play(inventory, "deploy-dflash.yml", *forks, sglang_context_length=8192))
    result = {
        "benchmark": "rollout",
        "cores": os.cpu_count(),
        "forks": options.forks,
        "pace": options.pace,
        "one": one,
        "batch": batch,
        "ratio_batch_to_one": round(batch["seconds"] / one["seconds"], 2),
        "ratio_of_loads": round(batch["loads_seconds"] / one["loads_seconds"], 2),
        "controller_mib_per_extra_host": round(
            (batch["controller_mib"] - one["controller_mib"]) / (options.hosts - 1), 2
        ),
        "goals": {"hosts": 12, "forks": 3, "ratio_batch_to_one": GOAL},
    }
    if options.turns:
        print("the batch is measured", flush=True)
        turns = play(inventory, "deploy-dflash.yml", *forks, sglang_context_length=2048,
                     sglang_rollout_batches=[1, "10%", "25%", "100%"])  # fmt: skip
        result["turns"] = figures(turns)
    return result


def main() -> int:
    """Boot, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=12)
    parser.add_argument("--forks", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.3, help="of the load; 1 takes about three minutes")
    parser.add_argument("--turns", action="store_true", help="also measure the default batches (four loads)")
    options = parser.parse_args()
    if options.hosts < 2:
        parser.error("--hosts: two at least, since one of them is measured alone")
    with rehearsals(FLEET, options.hosts) as inventory:
        result = measure(inventory, options)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
