"""Everything that can go wrong, as a table, and the words in which it does.

KINDS lists what a settings file can ask for. The functions below build the tracebacks; their messages are those of the
programs that raise them (SGLang, torch, NCCL, safetensors), so diagnosis can be tried against them.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Callable

from . import frames, releases
from .frames import Frame, other
from .server_args import Plan
from .settings import Failure


@dataclass(frozen=True)
class Kind:
    """How one kind of failure behaves."""

    at: str  # phase it belongs to unless the settings say otherwise
    how: str  # raise, native, hang, kill, quiet
    every_rank: bool = False  # all ranks meet it, within milliseconds of each other
    text: Callable[[Plan, int, Failure], str] | None = None  # traceback for how == raise
    rule_only: bool = False  # follows from a drafter's files; cannot be asked for


# Chains of frames -------------------------------------------------------------------------------------------------
def init_chain(phase: str) -> list[str]:
    """Keys of the frames from the process's entry down to this phase of the load."""
    start = ["sched.proc_init", "sched.init"]
    runner = [*start, "sched.init_model_worker.tp", "sched.tp", "tp.init", "tp.runner"]
    grouped = releases.has("overlap_drafter")  # pools and graphs have calls of their own
    if phase in ("launch", "dist_init"):
        return [*runner, "mr.init_dist", "mr.dist11", "dist.pg"]
    if phase == "weights":
        return [*runner, "mr.init", "mr.load", "mr.load_model"]
    if phase == "draft":
        return [*start, "sched.init_model_worker.draft", "sched.draft", "df.init"]
    if phase == "kv_cache":
        if grouped:
            return [
                *start,
                "sched.init_model_worker.pools",
                "sched.pools_target",
                "sched.pools",
                "tp.pool",
                "mr.pool14",
            ]
        return [*runner, "mr.init", "mr.pool11"]
    if grouped:
        return [*start, "sched.init_model_worker.graphs", "sched.graphs", "tp.graphs", "mr.graphs14", "cg.capture"]
    return [*runner, "mr.init", "mr.graphs11", "cg.capture"]


def event_loop(plan: Plan) -> list[str]:
    """Keys of the frames from the process's entry down to the worker that gets the batch."""
    kind = "overlap" if plan.runs_overlapped else "normal"
    batch = "sched.run_batch_overlap" if plan.runs_overlapped else "sched.run_batch"
    # The event loop is decorated by torch, run_batch by SGLang's profiling (which some releases do not have).
    dispatch = ["sched.dispatch_outer", f"sched.dispatch_{kind}", "torch.context"]
    wrappers = []
    if releases.has("overlap_drafter"):
        wrappers = ["stage.wrapper", "nvtx.wrapper"] if releases.has("ready_endpoint") else ["nvtx.wrapper"]
    chain = ["sched.proc_loop", "sched.run_loop", *dispatch, f"sched.{kind}", *wrappers, batch]
    return chain


def loop_chain(plan: Plan) -> list[str]:
    """... and on, down to the forward pass of the model that runs first in a step."""
    if plan.speculative:
        return [*event_loop(plan), "df.forward", "df.draft", "mr.forward"]
    return [*event_loop(plan), "tp.forward", "mr.forward"]


def named(keys: list[str]) -> list[Frame]:
    return [found for name in keys for found in frames.frame(name)]


def chain(plan: Plan, phase: str) -> list[Frame]:
    return named(loop_chain(plan) if phase in ("warmup", "serving") else init_chain(phase))


# Messages ---------------------------------------------------------------------------------------------------------
ASYNCHRONOUS = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def out_of_memory(plan: Plan, rank: int, failure: Failure) -> str:
    total = 94.97
    return (
        f"CUDA out of memory. Tried to allocate 448.00 MiB. GPU {rank} has a total capacity of {total:.2f} GiB of "
        f"which 312.38 MiB is free. Including non-PyTorch memory, this process has {total - 0.31:.2f} GiB memory in "
        "use. Of the allocated memory 91.37 GiB is allocated by PyTorch, with 1.04 GiB allocated in private pools "
        "(e.g., CUDA Graphs), and 1.61 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
        "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def capture_advice() -> str:
    """The list that every capture failure ends with; its second line moved with the option's name."""
    if releases.has("graph_roles"):
        option, last = (
            "--cuda-graph-max-bs-decode",
            "3. disable decode CUDA graph by --cuda-graph-backend-decode=disabled.",
        )
    else:
        option = "--cuda-graph-max-bs"
        last = (
            "3. disable torch compile by not using --enable-torch-compile\n"
            "4. disable CUDA graph by --disable-cuda-graph."
        )
    return (
        "Possible solutions:\n"
        "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
        f"2. set {option} to a smaller value (e.g., 16)\n"
        f"{last} (Not recommended. Huge performance loss)\n"
        "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose \n"
    )


# Tracebacks -------------------------------------------------------------------------------------------------------
def none_type_replay(plan: Plan, rank: int, failure: Failure) -> str:
    """The incident: graph replay copies from the drafter's missing num_token_non_padded."""
    top = chain(plan, "warmup")
    if not releases.has("draft_slot_skips_none"):
        keys = ["mr.raw_graph", "runner.replay", "runner.prepare", "buffers.populate", "buffers.copy"]
        return frames.traceback([*top, *named(keys)], "AttributeError: 'NoneType' object has no attribute 'dtype'")
    # Later releases skip the copy; what can still meet the missing value there is the count for this rank.
    last = other(
        "sglang/srt/model_executor/forward_batch_info.py",
        214,
        "compute_local_num_token_non_padded",
        "global_num_token_non_padded - tokens_per_rank * attn_tp_rank,",
    )
    below = named(["mr.raw_graph", "runner.replay"])
    error = "TypeError: unsupported operand type(s) for -: 'NoneType' and 'int'"
    return frames.traceback([*top, *below, last], error)


def capture_failed(plan: Plan, rank: int, failure: Failure, inner: str = "", type_: str = "RuntimeError") -> str:
    inner = inner or "CUDA error: operation not permitted when stream is capturing\n" + ASYNCHRONOUS
    keys = ["runner.init", "runner.capture", "runner.one_stream", "runner.one_shape", "runner.run_once"]
    deepest = other(
        "triton/backends/nvidia/driver.py",
        529,
        "__call__",
        "self.launch(gridX, gridY, gridZ, stream, function, *args)",
    )
    first = frames.traceback([*named(keys), deepest], f"{type_}: {inner}")
    text = f"Exception: Capture cuda graph failed: {inner}\n{capture_advice()}"
    return frames.chained(first, frames.traceback([*named([*init_chain("graph_capture"), "runner.raise"])], text))


def gpu_oom(plan: Plan, rank: int, failure: Failure) -> str:
    message = out_of_memory(plan, rank, failure)
    if failure.at == "graph_capture":
        return capture_failed(plan, rank, failure, message, "torch.OutOfMemoryError")
    if failure.at == "weights":
        below = [
            other("sglang/srt/models/deepseek_v2.py", 1207, "__init__", "self.mlp = DeepseekV2MoE("),
            other(
                "sglang/srt/layers/moe/fused_moe_triton/layer.py", 283, "__init__", "self.quant_method.create_weights("
            ),
            other("torch/utils/_device.py", 109, "__torch_function__", "return func(*args, **kwargs)"),
        ]
    elif failure.at == "kv_cache":
        below = [
            other(
                "sglang/srt/mem_cache/memory_pool.py",
                1652,
                "_create_buffers",
                "torch.zeros(size, dtype=self.store_dtype)",
            ),
        ]
    else:
        below = [
            *named(["mr.raw_decode"]),
            other("sglang/srt/models/deepseek_v2.py", 2893, "forward", "hidden_states = self.model("),
            other(
                "sglang/srt/layers/moe/fused_moe_triton/fused_moe.py", 640, "fused_experts_impl", "cache = torch.empty("
            ),
        ]
    return frames.traceback([*chain(plan, failure.at), *below], f"torch.OutOfMemoryError: {message}")


def kv_pool_too_small(plan: Plan, rank: int, failure: Failure) -> str:
    fraction = plan.args.mem_fraction_static
    text = (
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
        f"Current value: mem_fraction_static={fraction}"
    )
    return frames.traceback([*chain(plan, "kv_cache"), *named(["pool.raise"])], text)


def cuda_error(words: str, code: str) -> Callable[[Plan, int, Failure], str]:
    """A CUDA error that torch reports at some later call: four lines and more."""

    def build(plan: Plan, rank: int, failure: Failure) -> str:
        text = (
            f"torch.AcceleratorError: CUDA error: {words}\n"
            f"Search for `{code}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
            f"information.\n{ASYNCHRONOUS}"
        )
        last = other("torch/cuda/streams.py", 231, "synchronize", "super().synchronize()")
        top = named(event_loop(plan)) if failure.at in ("warmup", "serving") else chain(plan, failure.at)
        return frames.traceback([*top, last], text)

    return build


def gpu_memory_busy(plan: Plan, rank: int, failure: Failure) -> str:
    text = (
        "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
        "pre_model_load_memory=61.20361328125, local_gpu_memory=93.98193359375, local_gpu_memory * 0.9=84.583740234375"
    )
    return frames.traceback(named(init_chain("dist_init")[:-2]), text)


def weights_corrupt(plan: Plan, rank: int, failure: Failure) -> str:
    below = other(
        "sglang/srt/model_loader/weight_utils.py",
        1343,
        "_load_file",
        "with safetensors.safe_open(st_file, framework='pt', device='cpu') as f:",
    )
    text = (
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, "
        "file not fully covered"
    )
    return frames.traceback([*chain(plan, "weights"), *named(["loader.weights"]), below], text)


def unknown_exception(plan: Plan, rank: int, failure: Failure) -> str:
    """Something no table knows; type and message can be set."""
    type_ = str(failure.options.get("type", "rehearsal_plugin.errors.UnheardOfError"))
    message = str(failure.options.get("message", "the third flange does not answer"))
    last = other("rehearsal_plugin/flange.py", 88, "poll", "raise UnheardOfError(message)")
    return frames.traceback([*chain(plan, failure.at), last], f"{type_}: {message}")


def drafter_dims(plan: Plan, rank: int, failure: Failure) -> str:
    """A drafter of another width: loads, binds the port, dies on the first batch."""
    assert plan.drafter is not None
    count = len(plan.drafter.layer_ids or [0] * plan.drafter.layers)
    hidden = int(plan.drafter.hidden or 0)
    text = (
        "ValueError: DFLASH target_hidden feature dim mismatch. "
        f"Expected shape [N, {count * hidden}] (num_context_features={count}, hidden_size={hidden}), "
        f"but got shape=(6, {count * plan.target.hidden}). "
        "This usually means the target model is capturing a different number of layer features than "
        "the draft checkpoint/config expects."
    )
    keys = [*event_loop(plan), "df.append", "df.project", "draft.dims"]
    return frames.traceback(named(keys), text)


def drafter_layer_ids(plan: Plan, rank: int, failure: Failure) -> str:
    assert plan.drafter is not None
    index, value = next(
        (i, v) for i, v in enumerate(plan.drafter.layer_ids or []) if not 0 <= int(v) < plan.target.layers
    )
    text = (
        "ValueError: DFLASH target_layer_ids contains an out-of-range layer id. "
        f"target_layer_ids[{index}]={value}, target_num_layers={plan.target.layers}."
    )
    keys = [*init_chain("weights")[:-3], "mr.ids", "df.ids"]
    return frames.traceback(named(keys), text)


def drafter_mask(plan: Plan, rank: int, failure: Failure) -> str:
    assert plan.drafter is not None
    text = (
        "ValueError: DFLASH mask_token_id is outside the target vocab size. "
        f"mask_token_id={plan.drafter.mask_token_id}, vocab_size={plan.target.vocab}. "
        f"This likely means mask_token={plan.drafter.mask_token!r} requires vocab expansion beyond the model's "
        "embedding size. SGLang does not support resizing target embeddings for DFLASH yet."
    )
    return frames.traceback(named([*init_chain("draft")[:-1], "df.init_mask", "df.mask"]), text)


def drafter_architecture(plan: Plan, rank: int, failure: Failure) -> str:
    assert plan.drafter is not None
    text = (
        f"ValueError: Cannot find model module. '{plan.drafter.architecture}' is not a registered model in the "
        "Transformers library (only relevant if the model is meant to be in Transformers) and 'AutoModel' is not "
        "present in the model config's 'auto_map' (relevant if the model is custom)."
    )
    return frames.traceback(named([*init_chain("draft"), "tp.init", "tp.runner", "mr.init", "mr.load", "arch"]), text)


# The table --------------------------------------------------------------------------------------------------------
KINDS: dict[str, Kind] = {
    # Exceptions
    "cuda_graph_replay": Kind("warmup", "raise", True, none_type_replay),
    "cuda_graph_capture": Kind("graph_capture", "raise", True, capture_failed),
    "gpu_oom": Kind("serving", "raise", False, gpu_oom),
    "kv_pool_too_small": Kind("kv_cache", "raise", True, kv_pool_too_small),
    "illegal_memory_access": Kind(
        "serving", "raise", False, cuda_error("an illegal memory access was encountered", "cudaErrorIllegalAddress")
    ),
    "device_side_assert": Kind(
        "serving", "raise", False, cuda_error("device-side assert triggered", "cudaErrorAssert")
    ),
    "gpu_memory_busy": Kind("dist_init", "raise", True, gpu_memory_busy),
    "weights_corrupt": Kind("weights", "raise", True, weights_corrupt),
    "unknown_exception": Kind("serving", "raise", False, unknown_exception),
    # Deaths without Python
    "nccl_timeout": Kind("serving", "native"),
    "segfault": Kind("serving", "native"),
    "abort": Kind("serving", "native"),
    "kill_rank": Kind("weights", "kill"),
    # Not dying when it should
    "hang": Kind("weights", "hang"),
    "zombie": Kind("serving", "raise", True, none_type_replay),
    "exit_zero": Kind("warmup", "raise", True, none_type_replay),
    # Not dying, but of no use
    "useless_drafter": Kind("serving", "quiet"),
    "slow": Kind("weights", "quiet"),
    # What a drafter's config.json brings on by itself
    "drafter_dims": Kind("warmup", "raise", True, drafter_dims, rule_only=True),
    "drafter_layer_ids": Kind("draft", "raise", True, drafter_layer_ids, rule_only=True),
    "drafter_mask": Kind("draft", "raise", True, drafter_mask, rule_only=True),
    "drafter_architecture": Kind("draft", "raise", True, drafter_architecture, rule_only=True),
}


# By rule ----------------------------------------------------------------------------------------------------------
def by_rule(plan: Plan, asked: list[Failure]) -> list[Failure]:
    """The failures that this release, these options and these files bring on without being asked."""
    found: list[Failure] = []

    def add(kind: str, rank: int = 0, after: float = 0.0, **options: Any) -> None:
        if not any(item.kind == kind for item in asked):
            found.append(Failure(kind=kind, at=KINDS[kind].at, rank=rank, after=after, options=options))

    dflash = plan.args.speculative_algorithm == "DFLASH" and plan.speculative
    if dflash and plan.ep > 1 and plan.decode_graphs and not releases.has("draft_slot_skips_none"):
        add("cuda_graph_replay", rank=3 % len(plan.ranks), decode=True)
    drafter, target = plan.drafter, plan.target
    if drafter is not None and dflash:
        from .model import DRAFT_ARCHITECTURES

        if drafter.architecture not in DRAFT_ARCHITECTURES:
            add("drafter_architecture")
        elif any(not 0 <= int(value) < target.layers for value in drafter.layer_ids or []):
            add("drafter_layer_ids")
        elif drafter.mask_token_id >= target.vocab:
            add("drafter_mask")
        elif drafter.hidden is not None and drafter.hidden != target.hidden:
            add("drafter_dims", after=float("inf"))  # when the first batch is through the target
    # The pool is what the fraction leaves beside the weights; only the incident's model has known weights.
    fraction = plan.args.mem_fraction_static
    if target.layers == 61 and target.hidden == 7168 and fraction is not None and float(fraction) < 0.8:
        add("kv_pool_too_small")
    return found


# The C++ side -----------------------------------------------------------------------------------------------------
def glog(rank: int, level: str, source: str, text: str) -> str:
    """A line in the form torch's C++ log has: no Python prefix, its own clock."""
    now = datetime.datetime.now()
    stamp = now.strftime("%m%d %H:%M:%S.") + f"{now.microsecond * 1000:09d}"
    return f"[rank{rank}]:[{level}{stamp} {source}] {text}\n"


def nccl_timeout_lines(rank: int, ranks: int) -> list[str]:
    """What a rank prints before it aborts; written line by line."""
    work = (
        "WorkNCCL(SeqNum=40231, OpType=ALLREDUCE, NumelIn=57344, NumelOut=57344, Timeout(ms)=600000) ran for 600018 "
        "milliseconds before timing out."
    )
    caught = f"[PG ID 2 PG GUID 3 Rank {rank}] Watchdog caught collective operation timeout: {work}"
    ended = f"[PG ID 2 PG GUID 3 Rank {rank}] Process group watchdog thread terminated with exception: "
    inner = f"[Rank {rank}] Watchdog caught collective operation timeout: {work}"
    stack = [
        "Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:683 "
        "(most recent call first):\n",
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f2a4c178b80 in libc10.so)\n",
        "frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<std::chrono::duration<long, "
        "std::ratio<1l, 1000l> > >) + 0x247 (0x7f29eb7f1b57 in libtorch_cuda.so)\n",
        "frame #2: c10d::ProcessGroupNCCL::Watchdog::runLoop() + 0xa31 (0x7f29eb7f7ae1 in libtorch_cuda.so)\n",
        "frame #3: <unknown function> + 0xdbbf4 (0x7f2a4bdd3bf4 in libstdc++.so.6)\n",
        "\n",
    ]
    return [
        glog(rank, "E", "ProcessGroupNCCL.cpp:683", caught),
        glog(rank, "E", "ProcessGroupNCCL.cpp:2252", f"[PG ID 2 PG GUID 3 Rank {rank}] failure detected by watchdog at "
             "work sequence id: 40231 PG status: last enqueued work: 40233, last completed work: 40230"),
        glog(rank, "E", "ProcessGroupNCCL.cpp:730", "To avoid data inconsistency, we are taking the entire process "
             "down."),
        glog(rank, "E", "ProcessGroupNCCL.cpp:2068", ended + inner),
        *stack,
        "terminate called after throwing an instance of 'c10::DistBackendError'\n",
        f"  what():  {ended}{inner}\n",
        *stack,
    ]  # fmt: skip


def collateral_lines(rank: int) -> list[str]:
    """What the other ranks say after a death: noise that must not be taken for the cause."""
    text = (
        f'[PG ID 0 PG GUID 0 Rank {rank}] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server '
        "has shut down too early), with error: failed to recv, got 0 bytes"
    )
    return [
        glog(rank, "W", "TCPStore.cpp:125", "recvValue failed on SocketImpl(fd=87, addr=[localhost]:46012, "
             "remote=[localhost]:31003): failed to recv, got 0 bytes"),
        "Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:678 "
        "(most recent call first):\n",
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f2a4c178b80 in libc10.so)\n",
        "frame #1: c10d::TCPStore::check(std::vector<std::string> const&) + 0x2a5 "
        "(0x7f2a2c3f21c5 in libtorch_cpu.so)\n",
        glog(rank, "W", "ProcessGroupNCCL.cpp:1826", text),
    ]  # fmt: skip


def assert_lines() -> list[str]:
    """The flood that precedes a device-side assert: one line a thread, unprefixed."""
    return [
        "/pytorch/aten/src/ATen/native/cuda/IndexKernelUtils.cu:16: vectorized_gather_kernel: block: "
        f"[{block},0,0], thread: [{thread},0,0] Assertion `ind >=0 && ind < ind_dim_size && "
        '"vectorized gather kernel index out of bounds"` failed.\n'
        for block in range(4)
        for thread in range(64)
    ]
