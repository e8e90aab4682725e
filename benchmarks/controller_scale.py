#!/usr/bin/env python3
"""What a fleet costs its controller: time and memory by hosts and forks, without a fleet.

Every host of the inventory is this machine (connection local), so that hundreds of them need none of their own; each
costs the fork, the module and its answer, and no SSH. `playbooks/status.yml` asks each host once, as the look of a
deployment does. Measured for `--hosts` and for a tenth of them, and with `--forks` and a quarter of those. Memory is
that of all processes of the run, pages that they share counted once. The last line is one JSON object.
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

from support import ROOT, environment
from support.memory import Peak


def look(folder: Path, hosts: int, forks: int) -> dict[str, Any]:
    """One run over that many hosts."""
    wish = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable,
            "sglang_root": str(folder / "root"), "sglang_version": "0.5.20", "sglang_profile": "tp8",
            "sglang_model": "moonshotai/Kimi-K2.6"}  # fmt: skip
    inventory = folder / "hosts.json"
    named = {f"gpu-{number:04d}": {} for number in range(1, hosts + 1)}
    inventory.write_text(json.dumps({"all": {"vars": wish, "hosts": named}}))
    command = ["ansible-playbook", "-i", str(inventory), "-f", str(forks), "playbooks/status.yml", "-e", "format=json"]
    with tempfile.TemporaryFile("w+") as out:
        begun = time.monotonic()
        run = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        peak = Peak(run.pid)
        peak.start()
        _, status, used = os.wait4(run.pid, 0)
        seconds, memory = time.monotonic() - begun, peak.stop()
        out.seek(0)
        text = out.read()
    if status or text.count('"host": "gpu-') != hosts:
        raise SystemExit(text[-3000:])
    return {"hosts": hosts, "forks": forks, "seconds": round(seconds, 1), "controller_mib": memory,
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
            "largest_process_mib": round(used.ru_maxrss / 1024, 1),
            }  # fmt: skip


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--forks", type=int, default=40)
    options = parser.parse_args()
    if options.hosts < 10 or options.forks < 4:
        parser.error("ten hosts and four forks at least, since a part of them is measured too")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few = look(folder, options.hosts // 10, options.forks // 4)
        narrow = look(folder, options.hosts, options.forks // 4)
        wide = look(folder, options.hosts, options.forks)
    more = options.hosts - few["hosts"]
    forks = wide["forks"] - narrow["forks"]
    print(json.dumps({
        "benchmark": "controller_scale",
        "cores": os.cpu_count(),
        "few": few, "narrow": narrow, "wide": wide,
        "cpu_seconds_per_extra_host": round((narrow["cpu_seconds"] - few["cpu_seconds"]) / more, 3),
        "largest_process_kib_per_extra_host": round(
            1024 * (narrow["largest_process_mib"] - few["largest_process_mib"]) / more
        ),
        "mib_per_extra_fork": round((wide["controller_mib"] - narrow["controller_mib"]) / forks, 1),
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
