"""/metrics: the Prometheus names that dashboards and alerts of SGLang use."""

from __future__ import annotations

import threading
from typing import Any

from . import releases, shapes
from .server_args import Plan

TTFT = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)
ITL = (
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.035,
    0.04,
    0.06,
    0.08,
    0.1,
    0.2,
    0.4,
    0.6,
    0.8,
    1.0,
)
E2E = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0, 600.0)


class Histogram:
    """Cumulative buckets, sum and count."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        place = next((i for i, edge in enumerate(self.buckets) if value <= edge), len(self.buckets))
        self.counts[place] += 1
        self.sum += value


class Metrics:
    """Counters of the main process; gauges come from rank 0's last report."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.lock = threading.Lock()
        self.ttft, self.itl, self.e2e = Histogram(TTFT), Histogram(ITL), Histogram(E2E)
        self.requests = self.aborted = self.prompt = self.generated = 0
        self.startup: dict[str, float] = {}

    def finished(self, prompt: int, tokens: int, ttft: float, e2e: float) -> None:
        """Counts one request that ended well; times in seconds."""
        with self.lock:
            self.requests += 1
            self.prompt += prompt
            self.generated += tokens
            self.ttft.add(ttft)
            self.e2e.add(e2e)
            if tokens > 1:
                self.itl.add((e2e - ttft) / (tokens - 1))

    def render(self, stats: dict[str, Any]) -> str:
        """The exposition text."""
        name = str(self.plan.args.served_model_name).replace("\\", "\\\\").replace('"', '\\"')
        base = f'engine_type="unified",model_name="{name}"'
        ranked = f'engine_type="unified",model_name="{name}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        graphs = self.plan.decode_graphs
        block = self.plan.block
        accept = float(stats.get("last_accept") or stats.get("accept") or 0.0)
        gauges: list[tuple[str, float]] = [
            ("num_running_reqs", stats.get("running", 0)),
            ("num_queue_reqs", stats.get("queued", 0)),
            ("gen_throughput", stats.get("speed", 0.0)),
            ("token_usage", stats.get("usage", 0.0)),
            ("cache_hit_rate", 0.0),
            ("is_cuda_graph", float(graphs)),
            ("weight_load_duration_seconds", self.startup.get("weights", 0.0)),
            ("max_total_num_tokens", stats.get("pool", 0)),
            ("weight_memory_usage_gb", stats.get("weight_gb", 0.0)),
            ("kv_cache_memory_usage_gb", stats.get("kv_gb", 0.0)),
            ("graph_memory_usage_gb", 1.04 if graphs else 0.0),
        ]
        if self.plan.speculative:
            gauges += [
                ("spec_accept_length", accept),
                ("spec_accept_rate", (accept - 1) / max(1, block - 1) if accept else 0.0),
                ("spec_num_draft_tokens", block),
            ]
        phases = {"load_weight": "weights", "kv_cache_allocation": "kv", "scheduler_e2e": "scheduler"}
        startup = [(name, self.startup.get(source, 0.0)) for name, source in phases.items()]
        startup.append(("tokenizer_e2e", self.startup.get("total", 0.0)))
        graph_times = shapes.graph_times(self.startup.get("graph", 0.0), self.plan)
        steps = float(stats.get("steps", 0.0))
        with self.lock:
            counters: list[tuple[str, str, float]] = [
                ("prompt_tokens_total", base, self.prompt),
                ("generation_tokens_total", base, self.generated),
                ("num_requests_total", base, self.requests),
                (
                    "cuda_graph_passes_total",
                    f'{ranked},mode="{"decode_cuda_graph" if graphs else "decode_none"}"',
                    steps,
                ),
            ]
            if self.aborted:
                counters.append(("num_aborted_requests_total", base, self.aborted))
            if self.plan.speculative:
                counters.append(("spec_verify_calls_total", base, float(stats.get("verifies", 0.0))))
            lines = ["# This is a rehearsal: no number here was measured on a GPU. [rehearsal]"]
            for metric, value in gauges:
                lines += [f"# TYPE sglang:{metric} gauge", f"sglang:{metric}{{{ranked}}} {float(value)}"]
            lines += ["# TYPE sglang:startup_time_seconds gauge"]
            for phase, value in startup:
                lines.append(f'sglang:startup_time_seconds{{{base},phase="{phase}"}} {value}')
            lines += ["# TYPE sglang:startup_cuda_graph_time_seconds gauge"]
            for phase, value in graph_times.items():
                lines.append(f'sglang:startup_cuda_graph_time_seconds{{{base},phase="{phase}"}} {value}')
            for metric, labels, count in counters:
                lines += [f"# TYPE sglang:{metric} counter", f"sglang:{metric}{{{labels}}} {float(count)}"]
            latency = "inter_token_latency_seconds"
            for metric, histogram in (
                ("time_to_first_token_seconds", self.ttft),
                (latency, self.itl),
                ("e2e_request_latency_seconds", self.e2e),
            ):
                lines.append(f"# TYPE sglang:{metric} histogram")
                total = 0
                for edge, count in zip((*histogram.buckets, "+Inf"), histogram.counts):
                    total += count
                    lines.append(f'sglang:{metric}_bucket{{le="{edge}",{base}}} {float(total)}')
                lines += [
                    f"sglang:{metric}_sum{{{base}}} {histogram.sum}",
                    f"sglang:{metric}_count{{{base}}} {float(total)}",
                ]
        lines.append(f"# release imitated: {releases.RELEASE}")
        return "\n".join(lines) + "\n"
