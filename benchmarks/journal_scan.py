"""How long a diagnosis takes on a small and on a large journal, beside what one does by hand.

    python benchmarks/journal_scan.py                      100,000 and 400,000 entries: what CI can afford
    python benchmarks/journal_scan.py --sizes 100000 5000000

Builds real journals with systemd-journal-remote (kept in the cache folder, so that a second run measures at once), then measures, on
a warm page cache: the diagnosis of the newest failed run of one unit, in this process; `journalctl -u UNIT | grep | tail`; and
reading all entries of the unit as JSON. The last line of output is one JSON object.
"""

# ruff: noqa: E501  (log lines are as long as programs print them)
from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "module_utils"))
sys.path.insert(0, str(ROOT / "tests"))

UNIT = "sglang-main-ep8.service"
OTHERS = ("sshd.service", "node-exporter.service", "trainer.service", "cron.service", "nginx.service")
RUNS = 20
CACHE = Path(os.environ.get("DFLASH_FLEET_CACHE") or Path.home() / ".cache" / "dflash-fleet") / "journal-scan"
GOALS = {"diagnosis_ms": 50, "ratio": 1.5, "peak_memory_mb": 64}


def entries(count: int) -> Iterator[bytes]:
    """Export text: 20 runs of the unit among five other units, each run ending in the incident's crash."""
    from journal_builder import BATCH, LOOP, RUN, Journal, export_parts
    from journal_cases import INCIDENT, INCIDENT_ROWS, all_ranks, traceback

    journal = Journal(UNIT)
    per_run = count // RUNS
    fixed = (
        "_BOOT_ID={boot}\n_MACHINE_ID=ffffffffffffffffffffffffffffffff\n_HOSTNAME=gpu-01\nPRIORITY=6\nSYSLOG_FACILITY=3\n_UID=990\n_GID=990\n_SELINUX_CONTEXT=unconfined\n"
        "_SYSTEMD_SLICE=system.slice\n_CAP_EFFECTIVE=0\n_TRANSPORT=stdout\n_STREAM_ID=55555555555555555555555555555555\n"
    )
    for number in range(RUNS):
        run = journal.run().begin(8, True, speculative_algorithm="DFLASH")
        run.to_serving()
        yield from export_parts(journal.entries)
        written = len(journal.entries)
        journal.entries.clear()
        common = fixed.format(boot=journal.boot)
        mine = (
            f"{common}_EXE=/opt/venv/bin/python3.11\n_SYSTEMD_CGROUP=/system.slice/{UNIT}\n_SYSTEMD_UNIT={UNIT}\n_SYSTEMD_INVOCATION_ID={run.invocation}\nSYSLOG_IDENTIFIER=python3\n"
            f"_COMM=sglang::schedul\n_CMDLINE=sglang::scheduler_TP0_EP0\n_PID={run.pid_of(0)}\n"
        )
        theirs = [f"{common}_SYSTEMD_CGROUP=/system.slice/{unit}\n_SYSTEMD_UNIT={unit}\n_SYSTEMD_INVOCATION_ID={0xB0 + place:032x}\nSYSLOG_IDENTIFIER={unit[:-8]}\n_COMM={unit[:-8]}\n_CMDLINE={unit[:-8]} -D\n_EXE=/usr/bin/{unit[:-8]}\n_PID={700 + place}\n" for place, unit in enumerate(OTHERS)]
        for line in range(max(0, per_run - written - 120)):
            journal.now += 9_000
            times = f"__REALTIME_TIMESTAMP={journal.now}\n__MONOTONIC_TIMESTAMP={journal.now - journal.boot_began}\n"
            if line % 20 < 11:
                text = f"MESSAGE=[{run.clock if line % 500 == 0 else '2025-11-30 01:00:00'} TP0 EP0] Decode batch, #running-req: {line % 40}, #token: {line}, token usage: 0.31, accept len: 3.21, cuda graph: True, gen throughput (token/s): {line % 900}.25, #queue-req: 0,\n"
                yield (times + mine + text + "\n").encode()
            else:
                yield (times + theirs[line % 5] + f"MESSAGE=request {line} from 10.0.0.{line % 250} took {line % 977} ms, status {200 if line % 40 else 500}\n\n").encode()
        all_ranks(run, traceback([RUN, LOOP, BATCH, *INCIDENT_ROWS], INCIDENT), (3, 0, 1, 2, 4, 5, 6, 7))
        run.self_kill(serving=True)
        run.systemd(f"{UNIT}: Scheduled restart job, restart counter is at {number + 1}.", "restart", N_RESTARTS=str(number + 1))
        journal.tick(20)
        yield from export_parts(journal.entries)
        journal.entries.clear()


def build(size: int) -> Path:
    """The journal of that many entries; written once, marked when it is whole."""
    from journal_builder import JOURNAL_REMOTE

    folder = CACHE / str(size)
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    process = subprocess.Popen([JOURNAL_REMOTE, "-o", str(folder / "system.journal"), "--split-mode=none", "--seal=no", "--compress=yes", "-"],
                               stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, bufsize=1 << 20)  # fmt: skip
    assert process.stdin is not None
    for part in entries(size):
        process.stdin.write(part)
    process.stdin.close()
    if process.wait() != 0:
        raise SystemExit("systemd-journal-remote failed")
    (folder / "complete").touch()
    return folder


def diagnose(folder: Path) -> dict[str, Any]:
    from dflash_fleet import diagnosis, journal

    collected = journal.collect(UNIT, None, str(folder))
    return diagnosis.diagnose_collected(collected, engine_version="0.5.11")


def floor(folder: Path, turns: int) -> float:
    """Milliseconds of one journalctl that prints the newest entry: starting it and opening the files, which no diagnosis can avoid."""
    times = []
    for _turn in range(turns + 1):
        began = time.perf_counter()
        subprocess.run(["journalctl", "-q", "-D", str(folder), "-n", "1", "-o", "json"], check=True, stdout=subprocess.DEVNULL)
        times.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(times[1:]), 1)


def in_child(folder: Path, turns: int) -> dict[str, Any]:
    """Times and peak memory of a process that does nothing else."""
    done = subprocess.run([sys.executable, __file__, "--measure", str(folder), "--turns", str(turns)], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(folder: Path, turns: int) -> dict[str, Any]:
    diagnose(folder)  # warm
    times = []
    result: dict[str, Any] = {}
    for _turn in range(turns):
        began = time.perf_counter()
        result = diagnose(folder)
        times.append((time.perf_counter() - began) * 1000)
    return {
        "p50_ms": round(statistics.median(times), 1),
        "min_ms": round(min(times), 1),
        "max_ms": round(max(times), 1),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "cause": result["cause"],
        "exception": (result["exception"] or {}).get("message"),
    }


def by_hand(folder: Path) -> float:
    """What the seed's operator did: the unit's whole text through grep, the last lines of it."""
    began = time.perf_counter()
    subprocess.run(f"journalctl -q -D {folder} -u {UNIT} --no-pager | grep -i error | tail -n 20", shell=True, check=True, stdout=subprocess.DEVNULL)  # noqa: S602  (fixed text)
    return time.perf_counter() - began


def all_as_json(folder: Path, size: int, limit: int) -> tuple[float, bool]:
    """Reading every entry of the unit as JSON; of a large journal a part, scaled up."""
    command = ["journalctl", "-q", "-D", str(folder), "-u", UNIT, "-o", "json", "--no-pager"]
    scaled = size > limit
    if scaled:
        command.append(f"--lines={limit // 2}")
    began = time.perf_counter()
    count = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            json.loads(line)
            count += 1
    seconds = time.perf_counter() - began
    return (seconds * (size * 0.55 / max(count, 1)) if scaled else seconds), scaled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs=2, default=[100_000, 400_000], metavar=("SMALL", "LARGE"))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--skip-baselines", action="store_true", help="only the diagnosis")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.turns)))
        return 0
    out: dict[str, Any] = {"benchmark": "journal_scan", "goals": GOALS, "sizes": {}}
    for size in options.sizes:
        print(f"{size} entries: building", file=sys.stderr)
        folder = build(size)
        print(f"{size} entries: measuring", file=sys.stderr)
        row = in_child(folder, options.turns)
        row["journalctl_floor_ms"] = floor(folder, options.turns)
        row["journal_files"] = len(list(folder.glob("*.journal")))
        row["journal_mb"] = round(sum(path.stat().st_size for path in folder.glob("*.journal")) / 1e6, 1)
        if not options.skip_baselines:
            row["grep_tail_s"] = round(by_hand(folder), 2)
            seconds, scaled = all_as_json(folder, size, 400_000)
            row["all_json_s"] = round(seconds, 2)
            row["all_json_scaled_up"] = scaled
            row["times_faster_than_grep_tail"] = round(row["grep_tail_s"] * 1000 / row["p50_ms"], 1)
            row["times_faster_than_all_json"] = round(row["all_json_s"] * 1000 / row["p50_ms"], 1)
        out["sizes"][str(size)] = row
    small, large = (out["sizes"][str(size)] for size in options.sizes)
    out["ratio_large_to_small"] = round(large["p50_ms"] / small["p50_ms"], 2)
    out["within_goals"] = large["p50_ms"] <= GOALS["diagnosis_ms"] and out["ratio_large_to_small"] <= GOALS["ratio"] and large["peak_memory_mb"] <= GOALS["peak_memory_mb"]
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
