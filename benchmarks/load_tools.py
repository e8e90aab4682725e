#!/usr/bin/env python3
"""How near our load client's figures are to those of SGLang's own tool (sglang.bench_serving), on the same server.

Both measure one rehearsal engine in turns, `--rounds` times each; what is compared are the means over the rounds. The
baseline is SGLang's tool. Needs SGLang's packages for the CPU (2 GB in the cache, fetched once). The last line of the
output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import ROOT

sys.path.insert(0, str(ROOT / "tests" / "parsers"))

import load_tools

RATES = ("output_throughput", "request_throughput")
TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


def figures(run: dict[str, Any]) -> dict[str, float]:
    """What is compared: rates, and the means of the times."""
    return {**{name: run[name] for name in RATES}, **{name: run[name]["mean"] for name in TIMES}}


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default="0.5.23", help="of the tool")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    size = {"requests": options.requests, "streams": options.streams, "tokens": options.tokens}
    found: dict[str, list[dict[str, float]]] = {"client": [], "bench_serving": []}
    with tempfile.TemporaryDirectory() as folder, load_tools.server(Path(folder)) as url:
        (Path(folder) / "models").mkdir()
        tokenizer = load_tools.tokenizer(Path(folder) / "models")
        bench = load_tools.Bench(url, load_tools.packages(options.release), tokenizer)
        bench.measure("client", options.release, **size)  # the server's first batches, which are nobody's figures
        for _round in range(options.rounds):
            for generator, rows in found.items():
                rows.append(figures(bench.measure(generator, options.release, **size)))
    mean = {
        generator: {name: round(statistics.fmean(row[name] for row in rows), 3) for name in rows[0]}
        for generator, rows in found.items()
    }
    ratio = {name: round(mean["client"][name] / mean["bench_serving"][name], 4) for name in mean["client"]}
    print(json.dumps({
        "benchmark": "load_tools", "release": options.release, "rounds": options.rounds, **size,
        "client": mean["client"], "bench_serving": mean["bench_serving"], "ratio": ratio,
        "worst_rate_percent": round(100 * max(abs(ratio[name] - 1) for name in RATES), 2),
        "goal": {"worst_rate_percent": 5},
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
