"""The lines of a load and of serving, by release. Numbers are the incident's: eight GPUs of 96 GB, 74 GB of weights."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .releases import has
from .server_args import Plan

READY = "The server is fired up and ready to roll!"


@dataclass
class Memory:
    """One GPU's memory in GB as the log tells it; small differences between ranks as on real cards."""

    total: float
    rank: int

    def __post_init__(self) -> None:
        dice = random.Random(self.rank)
        self.context = 0.91 + dice.random() * 0.12  # CUDA context and NCCL buffers
        self.weights = self.total * 0.7793 + dice.random() * 0.05
        self.draft = self.total * 0.0086 + dice.random() * 0.01
        self.graph = 1.02 + dice.random() * 0.05
        self.draft_graph = 0.21 + dice.random() * 0.02
        self.free = self.total - self.context

    def take(self, gb: float) -> float:
        """Takes memory and returns what is left."""
        self.free -= gb
        return self.free


# Distributed initialisation ---------------------------------------------------------------------------------------
def dist_begin() -> str:
    return "Init parallel begin." if has("init_parallel") else "Init torch distributed begin."


def dist_end(seconds: float, used: float) -> list[str]:
    if has("init_parallel"):
        return [f"Init parallel ends. elapsed={seconds:.2f} s", f"Memory baseline taken. mem usage={used:.2f} GB"]
    return [f"Init torch distributed ends. elapsed={seconds:.2f} s, mem usage={used:.2f} GB"]


def draft_dist() -> list[str]:
    """The drafter joins the groups that exist: the same words again, in no time."""
    if has("init_parallel"):
        return ["Memory baseline taken. mem usage=0.00 GB"]
    if has("graph_roles") and has("args_as_dict"):
        return []  # 0.5.19, 0.5.20: one bootstrap for both
    return ["Init torch distributed begin.", "Init torch distributed ends. elapsed=0.04 s, mem usage=0.00 GB"]


# Weights ----------------------------------------------------------------------------------------------------------
def weights_begin(memory: Memory) -> str:
    return f"Load weight begin. avail mem={memory.free:.2f} GB"


def weights_end(memory: Memory, seconds: float, kind: str, quantization: str, used: float) -> str:
    left = memory.take(used)
    quant = f"quant={quantization}, " if quantization else ""
    return (
        f"Load weight end. elapsed={seconds:.2f} s, type={kind}, {quant}"
        f"avail mem={left:.2f} GB, mem usage={used:.2f} GB."
    )


def clock(seconds: float) -> str:
    """tqdm's mm:ss or h:mm:ss."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes:02d}:{secs:02d}"


def rate(done: int, seconds: float) -> str:
    """tqdm's rate: iterations per second, or seconds per iteration below one."""
    if done == 0 or seconds <= 0:
        return "?it/s"
    value = done / seconds
    return f"{value:5.2f}it/s" if value >= 1 else f"{1 / value:5.2f}s/it"


def shards(done: int, total: int, elapsed: float) -> str:
    """One redraw of the loading bar."""
    remaining = clock(elapsed / done * (total - done)) if done else "?"
    percent = 100 * done / total
    return (
        f"Multi-thread loading shards: {percent:3.0f}% Completed | {done}/{total} "
        f"[{clock(elapsed)}<{remaining}, {rate(done, elapsed)}]"
    )


# Cache pools ------------------------------------------------------------------------------------------------------
def kv_pool(plan: Plan, memory: Memory, draft: bool) -> list[str]:
    tokens = pool_tokens(plan)
    dtype = "dtype: torch.bfloat16, " if has("kv_dtype") else ""
    if draft:
        # One KV head a rank, 256 wide for K and V together, six layers, two bytes.
        half = tokens * 3072 / 2 / 2**30
        lines = [f"KV Cache is allocated. {dtype}#tokens: {tokens}, K size: {half:.2f} GB, V size: {half:.2f} GB"]
        left = memory.take(2 * half)
    else:
        gb = tokens * 70272 / 2**30
        lines = [f"KV Cache is allocated. {dtype}#tokens: {tokens}, KV size: {gb:.2f} GB"]
        left = memory.take(gb)
    return [*lines, f"Memory pool end. avail mem={left:.2f} GB"]


def pool_tokens(plan: Plan) -> int:
    """Tokens that the pool holds: what --mem-fraction-static leaves after the weights, or what was asked for."""
    if plan.args.max_total_tokens:
        return int(plan.args.max_total_tokens)
    fraction = float(plan.args.mem_fraction_static or 0.88)
    free = max(0.5, 94.97 * (fraction - 0.7793 - 0.0086) - 0.9)
    return int(free * 2**30 / (70272 + (3072 if plan.speculative else 0)))


def sizing(plan: Plan, memory: Memory) -> str:
    args = plan.args
    context = int(args.context_length or plan.target.context)
    return (
        f"max_total_num_tokens={pool_tokens(plan)}, chunked_prefill_size={args.chunked_prefill_size}, "
        f"max_prefill_tokens={args.max_prefill_tokens or 16384}, max_running_requests={args.max_running_requests}, "
        f"context_len={context}, available_gpu_mem={memory.free:.2f} GB"
    )


# Graphs -----------------------------------------------------------------------------------------------------------
def _role(plan: Plan, draft: bool) -> str:
    return f"{'draft' if draft else 'target'} {'verify' if plan.speculative else 'decode'}"


def graph_begin(plan: Plan, memory: Memory, draft: bool) -> list[str]:
    """The line of every rank, and those of rank 0 after it."""
    if not has("graph_roles"):
        return [f"Capture cuda graph begin. This can take up to several minutes. avail mem={memory.free:.2f} GB"]
    per = plan.block
    backend = f"backend=full, num_tokens_per_req={per}, " if has("graph_backend") else ""
    sizes = "" if has("graph_bs_at_end") else f"bs={plan.capture_sizes}, "
    return [f"Capture {_role(plan, draft)} CUDA graph begin. {backend}{sizes}avail mem={memory.free:.2f} GB"]


def graph_sizes(plan: Plan) -> list[str]:
    """Rank 0 lists the sizes in a line of its own up to 0.5.13."""
    return [] if has("graph_roles") else [f"Capture cuda graph bs {plan.capture_sizes}"]


def graph_end(plan: Plan, memory: Memory, draft: bool, seconds: float) -> str:
    used = memory.draft_graph if draft else memory.graph
    left = memory.take(used)
    if not has("graph_roles"):
        return (
            f"Capture cuda graph end. Time elapsed: {seconds:.2f} s. mem usage={used:.2f} GB. avail mem={left:.2f} GB."
        )
    sizes = f"bs={plan.capture_sizes}, " if has("graph_bs_at_end") else ""
    return (
        f"Capture {_role(plan, draft)} CUDA graph end. {sizes}elapsed={seconds:.2f} s, "
        f"mem usage={used:.2f} GB, avail mem={left:.2f} GB."
    )


def graph_bar(done: int, total: int, size: int, free: float, elapsed: float) -> str:
    """One redraw of the capture bar."""
    percent = 100 * done / total
    cells = int(10 * done / total)
    bar = "█" * cells + " " * (10 - cells)
    remaining = clock(elapsed / done * (total - done)) if done else "?"
    return (
        f"Capturing batches (bs={size} avail_mem={free:.2f} GB): {percent:3.0f}%|{bar}| {done}/{total} "
        f"[{clock(elapsed)}<{remaining}, {rate(done, elapsed)}]"
    )


# Drafter ----------------------------------------------------------------------------------------------------------
def drafter_ready(plan: Plan) -> list[str]:
    """Rank 0, once the drafter is loaded."""
    assert plan.drafter is not None
    window = plan.args.speculative_draft_window_size or plan.args.speculative_dflash_draft_window_size
    backend = plan.args.speculative_draft_attention_backend or plan.args.attention_backend
    scale = ", noise_embed_scale=1.0" if has("noise_embed_scale") else ""
    return [
        f"Initialized DFLASH draft runner. attention_backend={backend}, model={plan.drafter.architecture}, "
        f"block_size={plan.block}, draft_window_size={window}, compact_cache={window is not None}",
        f"DFLASH draft runner ready. mask_token={plan.drafter.mask_token}, mask_token_id={plan.drafter.mask_token_id}, "
        f"mask_token_id_override={plan.drafter.mask_token_id}{scale}",
    ]


def first_verify(drafts: int) -> list[str]:
    """Logged once after the first verify, up to 0.5.13."""
    if has("overlap_drafter"):
        return []
    field = "num_correct_drafts_per_req" if has("correct_drafts_names") else "num_accepted_drafts_per_req"
    return [f"DFLASH verify completed. {field}=[{drafts}]"]


# Serving ----------------------------------------------------------------------------------------------------------
def graph_times(seconds: float, plan: Plan) -> dict[str, float]:
    """Capture seconds by the names of the real report; the drafter's verify graph counts as its decode graph."""
    times = dict.fromkeys(("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend"), 0.0)
    if plan.speculative:
        times["target_verify"], times["draft_decode"] = seconds * 0.7, seconds * 0.3
    else:
        times["decode"] = seconds
    return times


def after_pools(plan: Plan) -> list[str]:
    """Each rank, before any graph."""
    lines = []
    backend = plan.args.speculative_draft_attention_backend
    if plan.speculative and (backend or plan.args.attention_backend):
        lines.append(f"Overriding draft attention backend to {backend or plan.args.attention_backend}.")
    if has("graph_roles") and not plan.prefill_graphs:
        reason = (
            "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' "
            "(e.g. via --cuda-graph-backend-prefill=disabled or auto-disable rules)."
        )
        lines += [reason] * (2 if plan.speculative else 1)
    return lines


def prefix_cache() -> list[str]:
    """Each rank, once its scheduler has a cache for prefixes."""
    lines = []
    if has("unified_cache"):
        lines.append("Init Unified Radix Cache. Components: (<ComponentType.FULL: 0>,). Tree Core: RustUnifiedTreeCore")
    if has("kv_dtype"):
        kind = "UnifiedRadixCache" if has("unified_cache") else "RadixCache"
        more = "" if has("init_parallel") else " streaming_wrapped=False"
        lines.append(
            f"Tree cache initialized: source=default impl={kind} hybrid_swa=False hybrid_ssm=False "
            f"hicache_attached=False{more}"
        )
    return lines


def startup_timings(seconds: dict[str, float], plan: Plan) -> list[str]:
    if not has("startup_timings"):
        return []
    graphs = ", ".join(f"{name}={value:.2f}" for name, value in graph_times(seconds["graph"], plan).items())
    return [
        f"Engine startup timings (s): load_weight={seconds['weights']:.2f}, kv_cache_allocation={seconds['kv']:.2f}, "
        f"scheduler_e2e={seconds['scheduler']:.2f}, cuda_graph={{{graphs}}}, tokenizer_e2e={seconds['total']:.2f}"
    ]


def prefill(new: int, tokens: int, usage: float, running: int, queued: int, graph: bool, speed: float) -> str:
    return (
        f"Prefill batch, #new-seq: {new}, #new-token: {tokens}, #cached-token: 0, token usage: {usage:.2f}, "
        f"#running-req: {running}, #queue-req: {queued}, #pending-token: 0, cuda graph: {graph}, "
        f"input throughput (token/s): {speed:.2f}"
    )


def decode(
    running: int, tokens: int, usage: float, accept: float, block: int, graph: bool, speed: float, queued: int
) -> str:
    """`accept` is 0 without a drafter."""
    spec = ""
    if accept:
        spec = f"accept len: {accept:.2f}, accept rate: {(accept - 1) / max(1, block - 1):.2f}, "
    return (
        f"Decode batch, #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, {spec}"
        f"cuda graph: {graph}, gen throughput (token/s): {speed:.2f}, #queue-req: {queued}"
    )
