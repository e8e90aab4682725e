#!/usr/bin/env python3
"""What the load client misstates and costs: many streams of a mock server that notes when it sent each token.

The mock is a process of its own. It sends the tokens of `--streams` streams (default 256), each at its even pace, so
that together they are `--rate` tokens a second (default 1500), once with one token a chunk and once with four, as an
engine that speculates does. Truth is the mock's own note of when it sent what; beside it stands what a client that
counts chunks would say. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from support import ROOT

PIECE = "word "


class Mock:
    """Answers POST /generate as SGLang does, and keeps the time between the tokens that it sent."""

    def __init__(self, gap: float, tokens_a_chunk: int) -> None:
        self.gap, self.chunk = gap, tokens_a_chunk
        self.gaps: list[float] = []  # s per token
        self.between: list[float] = []  # s per chunk
        self.tokens = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        limit = json.loads(await reader.readexactly(length))["sampling_params"]["max_new_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        done, last, due = 0, 0.0, time.perf_counter()
        while done < limit:
            new = 1 if not done else min(self.chunk, limit - done)
            done += new
            meta = {"prompt_tokens": 8, "completion_tokens": done, "finish_reason": None}
            self.send(writer, json.dumps({"text": PIECE * done, "meta_info": meta}))
            now = time.perf_counter()
            if last:
                self.gaps += [(now - last) / new] * new
                self.between.append(now - last)
            last = now
            # Paces are kept over the whole answer: a late token is followed by an early one, as from a busy engine.
            due += self.gap * min(self.chunk, limit - done)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self.tokens += done
        self.send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    @staticmethod
    def send(writer: asyncio.StreamWriter, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))


async def serve(gap: float, chunk: int) -> None:
    """Until standard input ends; prints the port, and at the end the truth."""
    mock = Mock(gap, chunk)
    server = await asyncio.start_server(mock.answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps({"gaps": mock.gaps, "between": mock.between, "tokens": mock.tokens}), flush=True)


def case(streams: int, rate: float, tokens: int, chunk: int) -> dict[str, Any]:
    """One run against a mock of its own."""
    command = [sys.executable, __file__, "--serve", str(streams / rate), str(chunk)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mock:
        assert mock.stdout is not None
        port = mock.stdout.readline().strip()
        run = subprocess.run(
            [sys.executable, "-m", "dflash_fleet.load", "--url", f"http://127.0.0.1:{port}", "--model", "m",
             "--endpoint", "generate", "--concurrency", str(streams), "--requests", str(streams),
             "--max-tokens", str(tokens)],
            cwd=ROOT / "module_utils", capture_output=True, text=True, check=True,
        )  # fmt: skip
        out, _ = mock.communicate()
    client, truth = json.loads(run.stdout), json.loads(out)
    ordered = sorted(truth["gaps"])
    wanted = {
        "mean": statistics.fmean(ordered) * 1000,
        **{f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] * 1000 for p in (50, 90, 99)},
    }
    measured = {name: client["itl_ms"][name] for name in wanted}
    chunks = statistics.fmean(truth["between"]) * 1000
    return {
        "tokens_a_chunk": chunk,
        "requests_ok": client["ok"],
        "tokens_agree": client["output_tokens"] == truth["tokens"] == streams * tokens,
        "tokens_per_second": client["output_throughput"],
        "itl_ms": measured,
        "itl_ms_truth": {name: round(value, 3) for name, value in wanted.items()},
        "misstated_percent": {
            name: round(100 * abs(measured[name] - value) / value, 3) for name, value in wanted.items()
        },
        "misstated_percent_by_counting_chunks": round(100 * (chunks / wanted["mean"] - 1), 1),
        "core_percent": round(100 * client["cpu_seconds"] / client["duration"], 2),
    }


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1500.0, help="tokens per second of all streams together")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--serve", nargs=2, metavar=("GAP", "CHUNK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(float(options.serve[0]), int(options.serve[1])))
        return 0
    cases = [case(options.streams, options.rate, options.tokens, chunk) for chunk in (1, 4)]
    worst = max(found["misstated_percent"][name] for found in cases for name in ("mean", "p50"))
    print(json.dumps({
        "benchmark": "load_client",
        "streams": options.streams,
        "goal_tokens_per_second": options.rate,
        "cases": cases,
        "worst_misstated_percent": worst,
        "worst_core_percent": max(found["core_percent"] for found in cases),
        "goals": {"misstated_percent": 2, "core_percent": 10},
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
