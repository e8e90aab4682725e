"""Results of benchmarks: one record a line of JSON, whatever generator has measured it.

A record is what one run at one concurrency gave (`kind: measured`), or a candidate that did not come to serve
(`kind: failed`), together with everything that makes it comparable later: host, GPUs, driver, release, revisions,
configuration, known issues, prompts. Times are milliseconds, rates per second. `ok` + `errors` = `requests`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import ladder, load

SCHEMA = 1
KINDS = ("measured", "failed")

# What every generator gives, and where SGLang's own (`sglang.bench_serving --output-details`) has it.
_BENCH_SERVING = {
    "duration": "duration",
    "ok": "completed",
    "input_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "request_throughput": "request_throughput",
    "output_throughput": "output_throughput",
}
_LATENCIES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2e_latency"}
_STATISTICS = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
_OF_LOAD = (
    "endpoint", "concurrency", "max_tokens", "duration", "requests", "ok", "without_usage", "input_tokens",
    "output_tokens", "request_throughput", "output_throughput", "request_tps", "accept_length", "accept_lengths",
    "reasons", "cpu_seconds",
)  # fmt: skip


class ResultError(ValueError):
    """A file of results cannot be read; the message names file and line."""


def from_load(result: Mapping[str, Any]) -> dict[str, Any]:
    """What dflash_fleet.load has measured."""
    latencies = {name: _four(result[name]) for name in _LATENCIES}
    errors = result["failed"] + result["cut"]
    return {"generator": "client", **{name: result[name] for name in _OF_LOAD}, "errors": errors, **latencies}


def _four(statistics: Mapping[str, float] | None) -> dict[str, float] | None:
    """The statistics that both generators have."""
    return {name: statistics[name] for name in _STATISTICS} if statistics else None


def from_bench_serving(line: Mapping[str, Any], requests: int, max_tokens: int) -> dict[str, Any]:
    """A line of sglang.bench_serving's own output file; with --output-details also what is known by request.

    Left out are server_info, which may show the key, and `accept_length`, which that tool takes from the server's mean
    since its start.
    """
    measured: dict[str, Any] = {"generator": "bench_serving", "endpoint": "generate", "max_tokens": max_tokens}
    measured["concurrency"] = line.get("max_concurrency")
    measured["requests"] = requests
    measured.update({name: line.get(theirs) for name, theirs in _BENCH_SERVING.items()})
    measured["errors"] = requests - int(line["completed"])
    for name, theirs in _LATENCIES.items():
        found = {ours: line.get(f"{prefix}_{theirs}_ms") for ours, prefix in _STATISTICS.items()}
        measured[name] = found if found["p50"] is not None else None
    lengths, firsts, gaps = (line.get(name) or [] for name in ("output_lens", "ttfts", "itls"))
    rates = [
        count / (first + sum(between))
        for count, first, between in zip(lengths, firsts, gaps)
        if count and first + sum(between) > 0
    ]
    reasons: dict[str, int] = {}
    for text in line.get("errors") or []:
        if text:
            short = " ".join(str(text).split())[-160:]
            reasons[short] = reasons.get(short, 0) + 1
    return {
        **measured,
        "without_usage": 0,
        "request_tps": load.spread(rates),
        "accept_length": None,
        "accept_lengths": None,
        "reasons": reasons,
        "cpu_seconds": None,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def prompts_of(text: str) -> list[str]:
    """Prompts of a file: lines of JSON ({"prompt": ...} or text in quotes), or one a line; # begins a comment."""
    found = []
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        value: Any = line
        if line[0] in '{"':
            try:
                value = json.loads(line)
            except ValueError:
                value = line
        if isinstance(value, Mapping):
            value = value.get("prompt")
        if isinstance(value, str) and value.strip():
            found.append(value)
    return found


def in_order(prompts: Sequence[str], seed: int) -> list[str]:
    """The same prompts in the order of a seed: every run of a sweep asks the same in the same order."""
    mixed = list(prompts)
    random.Random(seed).shuffle(mixed)
    return mixed


def prompts_mark(prompts: Sequence[str]) -> dict[str, Any]:
    """What tells one set of prompts from another."""
    digest = hashlib.sha256("\0".join(prompts).encode()).hexdigest()
    characters = sum(map(len, prompts))
    return {"count": len(prompts), "sha256": digest[:16], "mean_characters": round(characters / max(1, len(prompts)))}


def requests_at(concurrency: int, rounds: int, least: int) -> int:
    """Requests of a run: whole rounds of the concurrency, and enough of them to mean something."""
    return concurrency * max(rounds, -(-least // concurrency))


# ---------------------------------------------------------------------------------------------------------------------
# Candidates

# What a candidate may change: everything that a start of the same release with the same weights can.
OVERLAY = (
    "profile", "drafter", "drafter_block_size", "cuda_graph", "known_issues", "mem_fraction_static", "context_length",
    "max_running_requests", "attention_backend", "extra_args", "environment",
)  # fmt: skip


def overlaid(request: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """A request with a candidate laid over it; mappings are laid over key by key. ValueError for another key."""
    found = dict(request)
    for spelled, value in overlay.items():
        if spelled == "name":
            continue
        if spelled not in OVERLAY:
            raise ValueError(f"a candidate has the key {spelled!r}; it may have name, {', '.join(OVERLAY)}")
        key = "block_size" if spelled == "drafter_block_size" else spelled
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            value = {**found[key], **value}
        found[key] = value
    return found


def name_of(resolved: Mapping[str, Any]) -> str:
    """`ep8+dflash, graphs disabled`: a configuration as a person calls it."""
    effective = resolved["cuda_graph"]["effective"]
    built = resolved["engine"]["build"] != "cpu"
    graphs = f", graphs {effective}" if built and effective != "enabled" else ""
    return ladder.profile_text(resolved) + graphs


def context(
    host: str,
    run: str,
    resolved: Mapping[str, Any],
    candidate: Mapping[str, Any],
    order: int,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything about a run that is no measurement; `facts` is what gpu_facts says of the host."""
    gpus = [gpu.get("name") for gpu in (((facts or {}).get("gpus") or {}).get("list") or [])]
    overlay = {key: value for key, value in candidate.items() if key != "name"}
    return {
        "schema": SCHEMA,
        "run": run,
        "host": host,
        "gpu": gpus[0] if gpus else None,
        "gpus": len(gpus) or None,
        "driver": (facts or {}).get("driver"),
        "instance": resolved["instance"],
        "candidate": str(candidate.get("name") or name_of(resolved)),
        "order": order,
        "overlay": overlay,
        "engine": dict(resolved["engine"]),
        "rehearsal": resolved["engine"]["build"] == "rehearsal",
        "profile": resolved["profile"],
        "parallel": dict(resolved["parallel"]),
        "drafter": resolved["drafter"]["name"],
        "cuda_graph": resolved["cuda_graph"]["effective"],
        "model": dict(resolved["model"]),
        "drafter_model": _drafter(resolved["drafter"]),
        "arguments": list(resolved["argv"]),
        "environment": dict(resolved["environment"]),
        "known_issues": [issue["id"] for issue in resolved["known_issues"]],
    }


def _drafter(drafter: Mapping[str, Any]) -> dict[str, Any] | None:
    if drafter["name"] == "none":
        return None
    return {"name": drafter["model"], "revision": drafter["revision"], "block_size": drafter["block_size"]}


# ---------------------------------------------------------------------------------------------------------------------
# Files


def line_of(record: Mapping[str, Any]) -> str:
    """A record as it is kept."""
    return json.dumps(record, sort_keys=True, separators=(",", ":")) + "\n"


def append(path: str, records: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a file. One that an interruption has cut off goes first: half a record is none."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a+b") as stream:
        stream.seek(0)
        text = stream.read()
        if not text.endswith(b"\n"):
            stream.truncate(text.rfind(b"\n") + 1)
        stream.write("".join(map(line_of, records)).encode())


def read_folder(folder: str) -> list[dict[str, Any]]:
    """The records of every host: each has a file of its own."""
    found: list[dict[str, Any]] = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.jsonl"))):
        with open(path, encoding="utf-8") as stream:
            found += read(stream.read(), path)
    return found


def read(text: str, name: str = "results") -> list[dict[str, Any]]:
    """The records of a file. The last line may be cut off by an interruption; any other that is broken is an error."""
    records = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):  # without its newline
                continue
            raise ResultError(f"{name}, line {number}: not JSON")
        if not isinstance(record, dict) or record.get("kind") not in KINDS:
            raise ResultError(f"{name}, line {number}: not a result of a benchmark")
        if record.get("schema") != SCHEMA:
            raise ResultError(f"{name}, line {number}: schema {record.get('schema')}, this version reads {SCHEMA}")
        records.append(record)
    return records


def newest(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each candidate on each host its newest run, with what older runs of the very same wish add to it.

    A run at other concurrencies completes what is known; one with other arguments, prompts or lengths replaces it, and
    so does one that failed.
    """
    kept = [dict(record) for record in records]
    runs: dict[tuple[str, ...], dict[str, list[dict[str, Any]]]] = {}
    for record in kept:
        key = (record["host"], record["instance"], record["candidate"])
        runs.setdefault(key, {}).setdefault(record["run"], []).append(record)
    found: list[int] = []
    for by_run in runs.values():
        last = max(by_run)
        found += map(id, by_run[last])
        if any(record["kind"] == "failed" for record in by_run[last]):
            continue
        wish, known = _asked(by_run[last][0]), {record["concurrency"] for record in by_run[last]}
        for run in sorted(by_run, reverse=True)[1:]:
            added = [r for r in by_run[run] if r["kind"] == "measured" and _asked(r) == wish]
            added = [record for record in added if record["concurrency"] not in known]
            known |= {record["concurrency"] for record in added}
            found += map(id, added)
    chosen = set(found)
    return [record for record in kept if id(record) in chosen]


def _asked(record: Mapping[str, Any]) -> list[Any]:
    """What has to be the same for two runs to be of one curve."""
    named = ("engine", "model", "arguments", "environment", "prompts", "seed", "lengths", "max_tokens", "generator")
    return [record.get(name) for name in named]


def groups(records: Iterable[Mapping[str, Any]]) -> tuple[list[list[dict[str, Any]]], int]:
    """The newest runs in groups that can be compared (same release, model, instance and GPUs), the newest group first.

    A host stands in the group of its newest run only; with it comes the number of records that this leaves out.
    """
    kept = newest(records)

    def wish(record: Mapping[str, Any]) -> tuple[str, ...]:
        engine, gpus = record["engine"], f"{record['gpus']} {record['gpu']}"
        return engine["version"], engine["build"], str(record["model"].get("revision")), record["instance"], gpus

    last: dict[tuple[str, str], dict[str, Any]] = {}
    for record in kept:
        key = (record["host"], record["instance"])
        last[key] = max(last.get(key, record), record, key=lambda one: (one["run"], one["at"]))
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in kept:
        if wish(record) == wish(last[(record["host"], record["instance"])]):
            found.setdefault(wish(record), []).append(record)
    ordered = sorted(found.values(), key=lambda group: max(record["at"] for record in group), reverse=True)
    return ordered, len(kept) - sum(map(len, ordered))


def same_wish(record: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    """Whether a result tells something about what a request asks for: same release, model and, where used, drafter."""
    engine, drafter = record["engine"], record.get("drafter_model")
    if (engine["version"], engine["build"]) != (str(request["version"]), str(request["build"])):
        return False
    if record["instance"] != request["instance"] or record["model"].get("revision") != request["model_revision"]:
        return False
    return not drafter or drafter.get("revision") == request["drafter_revision"]
