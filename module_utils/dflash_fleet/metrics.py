"""What an engine's /metrics say of the present moment: tokens per second, accept length, requests. Pure but for `ask`.

SGLang publishes a gauge once per scheduler. Ranks of one tensor- or pipeline-parallel group say the same, so one of
them is read; data-parallel ranks are engines of their own, so they are added up.
"""

from __future__ import annotations

import re
from typing import Any

from . import gate

_SAMPLE = re.compile(r"^sglang:(?P<name>\w+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# What is read, by the name under which they are kept.
GAUGES = {
    "tokens_per_second": "gen_throughput",
    "accept_length": "spec_accept_length",
    "running": "num_running_reqs",
    "queued": "num_queue_reqs",
    # Counters, since the engine's start. SGLang shows the second one from the first abort on.
    "requests": "num_requests_total",
    "aborted": "num_aborted_requests_total",
}
TIMEOUT = 3.0  # s; the server's own thread answers at once or is stuck


def samples(text: str, gauge: str) -> list[float]:
    """Values of a gauge, one for each data-parallel rank."""
    found: dict[str, tuple[tuple[int, ...], float]] = {}
    for sample in _SAMPLE.finditer(text):
        if sample["name"] != gauge:
            continue
        labels = dict(_LABEL.findall(sample["labels"] or ""))
        try:
            value = float(sample["value"])
            place = tuple(int(labels.get(name, 0)) for name in ("pp_rank", "tp_rank"))
        except ValueError:
            continue
        engine = labels.get("dp_rank", "")
        # A gauge that was never set may be NaN.
        if value == value and (engine not in found or place < found[engine][0]):
            found[engine] = (place, value)
    return [value for _, value in found.values()]


def live(text: str) -> dict[str, float | None]:
    """By the names of GAUGES; None for what the text does not hold, and for an accept length before the first draft."""
    values = {name: samples(text, gauge) for name, gauge in GAUGES.items()}
    drafted = [value for value in values.pop("accept_length") if value > 0]
    return {
        **{name: round(sum(found), 3) if found else None for name, found in values.items()},
        "accept_length": round(sum(drafted) / len(drafted), 3) if drafted else None,
    }


def ask(host: str, port: int) -> dict[str, Any]:
    """The same of an engine that serves, or {error} where it does not tell."""
    try:
        status, body = gate.Client(host, port).request("GET", "/metrics", timeout=TIMEOUT)
    except gate.GateError as problem:
        return {"error": str(problem)}
    if status != 200 or not isinstance(body, str):
        return {"error": f"GET /metrics: status {status}"}
    return live(body)
