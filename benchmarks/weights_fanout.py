"""How long one model takes to N hosts that pass it on, beside N hosts that each fetch it from the hub.

Hosts are network namespaces of this machine, each on a link of its own that a token bucket holds to the same rate in
each direction (tc tbf); so is the hub's. What runs in them is the real thing: hf_snapshot's code with the
huggingface_hub client, the peer's server, and the line of hosts that role model_weights works out. All hosts start in
the same second, as in a play.

The last line is one JSON object. `seconds` counts from the common start to the last host's published folder, per N;
`hub_copies` is what left the hub, in copies; `baseline` is the same with every host fetching from the hub. `ratio` is
the largest N against N=1. `cpu_busy` is how much of the machine was in use meanwhile: well below 1, the links are what
was measured. Needs root, for the namespaces.

    python benchmarks/weights_fanout.py [--hosts 1 4 16] [--baseline 1 4] [--files 64] [--seconds 64]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "module_utils"))

from dflash_fleet import peer_server, peers, snapshot  # noqa: E402

REPO, COMMIT = "bench/model", "b" * 40
PORT = 18560
WANTED = {"repo": REPO, "revision": COMMIT, "allow_patterns": [], "ignore_patterns": []}


# ---------------------------------------------------------------------------------------------------------------------
# One host: a process in its namespace


def host() -> int:
    """Serve and fetch as told on standard input; the result goes to standard output."""
    told = json.loads(sys.stdin.readline())
    server = peer_server.Server((told["address"], PORT), told["root"], [WANTED], told["token"])
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    request = snapshot.Request(
        repo=REPO,
        revision=COMMIT,
        root=told["root"],
        python=sys.executable,
        endpoint=told["hub"],
        owner=str(os.getuid()),
        group=str(os.getgid()),
        tmpdir=told["root"],
    )
    print("ready", flush=True)
    sys.stdin.readline()
    warnings: list[str] = []
    given = peers.Sources(peers=tuple(told["peers"]), token=told["token"], workers=told["workers"])
    result = peers.ensure(request, given, warn=warnings.append)
    ended = time.time()
    print(json.dumps({"ended": ended, "bytes": result["bytes"], "warnings": warnings}), flush=True)
    sys.stdin.readline()  # others may still fetch from here
    os._exit(0)


# ---------------------------------------------------------------------------------------------------------------------
# The network


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def network(count: int, rate: int) -> Iterator[list[str]]:
    """Namespaces of a hub and `count` hosts on one switch, each link held to `rate` bytes/s both ways."""
    switch = f"dff{os.getpid()}"
    names = [f"{switch}-{number}" for number in range(count + 1)]
    made = []
    # A switch holds milliseconds of a link. Much more, and what a host sends would delay what it acknowledges.
    shape = ["root", "tbf", "rate", f"{rate * 8}bit", "burst", "32kb", "latency", "20ms"]
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
            made.append(name)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.99.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            subprocess.run(["tc", "-n", switch, "qdisc", "add", "dev", port, *shape], check=True)
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape], check=True)
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def in_namespace(name: str, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a host ended with status {process.wait()}")
    return line.strip()


# ---------------------------------------------------------------------------------------------------------------------
# A measurement


def cpu() -> tuple[int, int]:
    """(busy, all) ticks of all CPUs so far."""
    ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def measure(count: int, passing_on: bool, files: Path, scratch: Path, rate: int, workers: int) -> dict[str, Any]:
    """Bring the model to `count` hosts; seconds, what left the hub, and how busy the machine was."""
    names = [f"host-{number}" for number in range(1, count + 1)]
    result = {"repo": REPO, "revision": COMMIT, "action": "fetch"}
    stocks = {
        name: peers.stock([result], [], [], {"address": f"10.99.0.{number + 1}", "port": PORT})
        for number, name in enumerate(names, 1)
    }
    plan = peers.plan(names, names, stocks)
    token = secrets.token_urlsafe(32)
    hub_url = "http://10.99.0.1:8080"
    with contextlib.ExitStack() as stack:
        namespaces = stack.enter_context(network(count, rate))
        hub = in_namespace(
            namespaces[0], sys.executable, str(ROOT / "rehearsal/hub.py"), "--root", str(files), "--bind", "0.0.0.0",
            "--port", "8080",
        )  # fmt: skip
        processes = [hub]
        stack.callback(lambda: [(process.kill(), process.wait()) for process in processes])
        hear(hub)
        for number, name in enumerate(names, 1):
            folder = Path(tempfile.mkdtemp(dir=scratch))
            stack.callback(shutil.rmtree, folder)
            process = in_namespace(namespaces[number], sys.executable, __file__, "--as-host")
            processes.append(process)
            sources = peers.sources(plan, name, peers.key(REPO, COMMIT, [], [])) if passing_on else []
            told = {"address": f"10.99.0.{number + 1}", "root": str(folder), "hub": hub_url, "token": token}
            say(process, json.dumps({**told, "peers": sources, "workers": workers}))
        for process in processes[1:]:
            assert hear(process) == "ready"
        before, started = cpu(), time.time()
        for process in processes[1:]:
            say(process, "go")
        results = [json.loads(hear(process)) for process in processes[1:]]
        after = cpu()
        # The statistics come over the hub's own link, so from a namespace.
        code = f"import urllib.request; print(urllib.request.urlopen('{hub_url}/__stats').read().decode())"
        asked = in_namespace(namespaces[0], sys.executable, "-c", code)
        sent = json.loads(hear(asked))["bytes"]
        asked.wait()
    for one in results:
        if one["warnings"]:
            print("\n".join(one["warnings"]), file=sys.stderr)
    size = results[0]["bytes"]
    assert all(one["bytes"] == size for one in results)
    return {
        "seconds": round(max(one["ended"] for one in results) - started, 1),
        "hub_copies": round(sent / size, 3),
        "cpu_busy": round((after[0] - before[0]) / (after[1] - before[1]), 2),
    }


def scratch_folder(need: int) -> Path:
    """Memory where it is enough: a disk that all hosts share would be what is measured."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > need else Path(tempfile.gettempdir())


def main() -> int:
    """Measure, print, compare with the goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--as-host", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--baseline", type=int, nargs="*", default=[1, 4], help="hosts that all fetch from the hub")
    parser.add_argument("--files", type=int, default=64)
    # A file takes 1 s then: what a question costs on a busy machine is little beside it, as it is with files of 10 GB.
    parser.add_argument("--seconds", type=float, default=64.0, help="how long one copy takes over one link")
    parser.add_argument("--rate", type=int, default=2_000_000, help="bytes/s of each link, each way")
    parser.add_argument("--workers", type=int, default=1, help="model_weights_peer_workers")
    parser.add_argument("--goal", type=float, default=1.6, help="most seconds of the largest N against N=1")
    args = parser.parse_args()
    if args.as_host:
        return host()
    size = int(args.rate * args.seconds) // args.files
    with tempfile.TemporaryDirectory(dir=scratch_folder(size * args.files * (max(args.hosts) + 2))) as name:
        scratch = Path(name)
        model = scratch / "repos" / REPO / COMMIT
        model.mkdir(parents=True)
        for number in range(1, args.files + 1):
            data = random.Random(number).randbytes(size)
            (model / f"model-{number:05}-of-{args.files:05}.safetensors").write_bytes(data)
        runs: dict[bool, dict[int, dict[str, Any]]] = {True: {}, False: {}}
        for passing_on, counts in ((True, args.hosts), (False, args.baseline)):
            for count in counts:
                run = measure(count, passing_on, scratch / "repos", scratch, args.rate, args.workers)
                runs[passing_on][count] = run
                print(f"{'passed on' if passing_on else 'from the hub'}, {count} hosts: {run}", flush=True)
    first, largest = runs[True][min(args.hosts)], runs[True][max(args.hosts)]
    ratio = round(largest["seconds"] / first["seconds"], 2)

    def column(passing_on: bool, figure: str) -> dict[str, Any]:
        return {str(count): run[figure] for count, run in runs[passing_on].items()}

    figures = {
        "benchmark": "weights_fanout",
        "files": args.files,
        "bytes": size * args.files,
        "link_bytes_per_second": args.rate,
        "seconds": column(True, "seconds"),
        "hub_copies": column(True, "hub_copies"),
        "cpu_busy": column(True, "cpu_busy"),
        "ratio": ratio,
        "baseline": {name: column(False, name) for name in ("seconds", "hub_copies", "cpu_busy")},
        "goal_ratio": args.goal,
        "within_goal": ratio <= args.goal,
    }
    print(json.dumps(figures))
    return 0 if figures["within_goal"] else 1


if __name__ == "__main__":
    sys.exit(main())
