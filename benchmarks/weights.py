#!/usr/bin/env python3
"""What weights cost: a look that finds nothing to do, a full verification, and the bytes that a kill makes come twice.

Each figure stands beside a baseline of the same run, on the same files:

  noop      64 shards that are all there: hf_snapshot against `hf download` (which looks at sizes alone)
  verify    reading and hashing everything: hf_snapshot with verify: full against sha256sum and openssl, one file after
            the other and as many at a time as there are cores
  refetch   SIGKILL in the middle of a fetch from the rehearsal hub and again: hf_snapshot against `hf download`

The files are in the page cache, so `verify` shows what the hashing can do; a slower disk would be the limit instead.
The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import BIN, ROOT

sys.path.insert(0, str(ROOT / "module_utils"))
sys.path.insert(0, str(ROOT / "rehearsal"))
import hub as rehearsal_hub
from dflash_fleet import snapshot

REPO, COMMIT = "bench/model", "b" * 40
# A run that is killed: a process of its own, as Ansible has it.
FETCH = """
import json, sys
sys.path.insert(0, sys.argv[1])
from dflash_fleet import snapshot
snapshot.ensure(snapshot.Request(**json.loads(sys.stdin.read())))
"""


@contextlib.contextmanager
def hub(repos: Path) -> Iterator[tuple[Any, str]]:
    """The rehearsal hub in this process: (server, address)."""
    server = rehearsal_hub.serve(repos, faults=repos.parent / "faults.json")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


def shards(folder: Path, count: int, size: int) -> None:
    """Weights that no two files of share a block."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    noise = random.Random(0)
    block = noise.randbytes(min(size, 1 << 20))
    for number in range(1, count + 1):
        with (folder / f"model-{number:05d}-of-{count:05d}.safetensors").open("wb") as out:
            for start in range(0, size, len(block)):
                out.write(
                    (number.to_bytes(4, "big") + start.to_bytes(8, "big") + block)[: min(len(block), size - start)]
                )


def request(root: Path, endpoint: str, **more: Any) -> snapshot.Request:
    """What a play would ask for, as the user who measures."""
    return snapshot.Request(
        REPO,
        COMMIT,
        str(root),
        sys.executable,
        endpoint=endpoint,
        owner=str(os.getuid()),
        group=str(os.getgid()),
        **more,
    )


def hf(endpoint: str, folder: Path, home: Path) -> tuple[list[str], dict[str, str]]:
    """`hf download` of the same: (command, environment)."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.update(HF_HUB_DISABLE_UPDATE_CHECK="1", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_XET="1")
    return [str(BIN / "hf"), "download", REPO, "--revision", COMMIT, "--local-dir", str(folder)], environment


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def noop(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All shards there: stat calls, no network."""
    count = options.shards
    shards(folder / "repos" / REPO / COMMIT, count, 1000)
    with hub(folder / "repos") as (server, endpoint):
        asked = request(folder / "models", endpoint)
        snapshot.ensure(asked)
        command, environment = hf(endpoint, folder / "hf", folder / "home")
        subprocess.run(command, env=environment, check=True, capture_output=True)
        server.stats.clear()
        results = [snapshot.ensure(asked) for _ in range(options.repeats)]
        requests = server.stats["requests"]
        client = [
            seconds(lambda: subprocess.run(command, env=environment, check=True, capture_output=True)) for _ in range(3)
        ]
    if any(result["changed"] for result in results):
        raise SystemExit("a second run changed something")
    took = sorted(result["seconds"] * 1000 for result in results)
    return {
        "shards": count,
        "median_ms": round(statistics.median(took), 2),
        "max_ms": round(took[-1], 2),
        "requests": requests,
        "baseline_hf_download_ms": round(statistics.median(client) * 1000),
    }


def verify(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything read and hashed."""
    size = options.mib << 20
    shards(folder / "repos" / REPO / COMMIT, options.shards, size // options.shards)
    with hub(folder / "repos") as (_server, endpoint):
        snapshot.ensure(request(folder / "models", endpoint))
    files = sorted((folder / "models" / "bench--model" / COMMIT).glob("*.safetensors"))
    names = b"\0".join(os.fsencode(file) for file in files)
    total = sum(file.stat().st_size for file in files)
    cores = snapshot.hash_workers()

    def tool(parallel: int, *command: str) -> float:
        one = ["xargs", "-0", f"-P{parallel}", "-n1", *command]
        return seconds(lambda: subprocess.run(one, input=names, check=True, stdout=subprocess.DEVNULL))

    def ours() -> float:
        result = snapshot.ensure(request(folder / "models", "http://127.0.0.1:1", full=True))
        if result["changed"] or result["verified"] != "hash":
            raise SystemExit(f"the verification found something: {result}")
        return float(result["seconds"])

    ways = {
        "ours": ours,
        "sha256sum": lambda: tool(1, "sha256sum"),
        "sha256sum_parallel": lambda: tool(cores, "sha256sum"),
        "openssl": lambda: tool(1, "openssl", "dgst", "-sha256"),
        "openssl_parallel": lambda: tool(cores, "openssl", "dgst", "-sha256"),
    }
    ours()  # what comes first fills the cache
    rates = {name: round(total / min(way() for _ in range(2)) / 1e9, 3) for name, way in ways.items()}
    return {"bytes": total, "threads": cores, "gb_per_second": rates,
            "ratio_to_openssl_parallel": round(rates["ours"] / rates["openssl_parallel"], 2)}  # fmt: skip


def refetch(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Killed when half of it has been sent, and run again."""
    count, size = 4, 48 << 20
    shards(folder / "repos" / REPO / COMMIT, count, size)
    whole = sum(file.stat().st_size for file in (folder / "repos" / REPO / COMMIT).iterdir())
    slow = json.dumps([{"path": "safetensors", "do": "slow", "rate": 25e6}])
    faults = folder / "faults.json"

    def killed_and_again(server: Any, begin: Callable[[], subprocess.Popen[bytes]]) -> dict[str, Any]:
        faults.write_text(slow)
        server.stats.clear()
        run = begin()
        while server.stats["bytes"] < whole // 2:
            if run.poll() is not None:
                raise SystemExit("it ended before it could be killed")
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        time.sleep(1)  # what is still in sockets belongs to the first run
        first = server.stats["bytes"]
        faults.write_text("[]")
        again = begin()
        if again.wait():
            raise SystemExit("the second run failed")
        second = server.stats["bytes"] - first
        twice = max(0, first + second - whole)
        return {"sent_before": first, "sent_again": second, "sent_twice": twice, "twice_per_file": twice // count}

    with hub(folder / "repos") as (server, endpoint):
        asked = json.dumps(vars(request(folder / "models", endpoint))).encode()

        def ours() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", FETCH, str(ROOT / "module_utils")]
            run = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            assert run.stdin is not None
            run.stdin.write(asked)
            run.stdin.close()
            return run

        command, environment = hf(endpoint, folder / "hf", folder / "home")

        def client() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                    start_new_session=True)  # fmt: skip

        mine, theirs = killed_and_again(server, ours), killed_and_again(server, client)
    left = [str(path.relative_to(folder)) for path in (folder / "models" / "bench--model").iterdir()]
    orphans = list((folder / "hf").rglob("*.incomplete"))
    return {
        "bytes": whole, "files": count, **mine, "orphans": len(left) - 1,
        "baseline_hf_download": {**theirs, "orphans": len(orphans),
                                 "orphaned_bytes": sum(path.stat().st_size for path in orphans)},
    }  # fmt: skip


# Name -> what measures it, given an empty folder and the options. A figure of the whole fleet is added here.
PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "noop": noop,
    "verify": verify,
    "refetch": refetch,
}


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--mib", type=int, default=2048, help="size of what is verified (%(default)s)")
    parser.add_argument("--repeats", type=int, default=50, help="looks that find nothing to do (%(default)s)")
    parser.add_argument("--only", choices=PARTS, help="measure one part")
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "weights", "cores": os.cpu_count()}
    for name, measure in PARTS.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="bench-weights-") as folder:
                result[name] = measure(Path(folder), options)
            print(f"{name} is measured", flush=True)
    result["goals"] = {"noop_ms": 50, "sent_twice_per_file": 10 << 20}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
