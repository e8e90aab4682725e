"""The cases behind tests/fixtures/journals: one journal and one expected answer each, by kind of the crash corpus.

Text that programs print is in their own words; hosts, paths and models are neutral. `python tests/journal_cases.py` writes the
fixtures anew; `make diagnose-corpus` holds the diagnosis against them.
"""

# ruff: noqa: E501  (log lines are as long as programs print them)
from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from journal_builder import (
    BATCH,
    INIT,
    LOOP,
    RUN,
    RUNNER_INIT,
    SITE,
    WORKER_INIT,
    Journal,
    Run,
    S,
    chain,
    frames,
    to_export,
    to_json,
    traceback,
    write_journal,
)

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "journals"


@dataclass
class Case:
    name: str
    kind: str
    corpus: tuple[int, ...]
    build: Callable[[], Journal]
    expect: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)  # engine_version, in_effect, invocation_id
    form: str = "json"  # json, export, journal


CASES: list[Case] = []


def case(name: str, kind: str, corpus: tuple[int, ...] = (), form: str = "json", arguments: dict[str, Any] | None = None, **expect: Any) -> Callable[[Callable[[], Journal]], Callable[[], Journal]]:
    def register(build: Callable[[], Journal]) -> Callable[[], Journal]:
        CASES.append(Case(name, kind, corpus, build, expect, arguments or {}, form))
        return build

    return register


# --------------------------------------------------------------------------------------------- pieces

GRAPH = f"{S}/model_executor/cuda_graph_runner.py"
RUNNER = f"{S}/model_executor/model_runner.py"
DFLASH = f"{S}/speculative/dflash_worker.py"
EAGLE = f"{S}/speculative/eagle_worker.py"
SCHED = f"{S}/managers/scheduler.py"
HINT = """Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
2. set --cuda-graph-max-bs to a smaller value (e.g., 16)
3. disable torch compile by not using --enable-torch-compile
4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)
Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose """
CUDA_TAIL = """CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
CAPTURE = [(GRAPH, 461, "__init__"), (GRAPH, 570, "capture"), (GRAPH, 663, "capture_one_batch_size"), (GRAPH, 642, "run_once")]
INIT_ROWS = [RUN, INIT, WORKER_INIT, RUNNER_INIT]
VERIFY = [RUN, LOOP, BATCH]


def start(ranks: int = 8, ep: bool = False, **arguments: Any) -> tuple[Journal, Run]:
    journal = Journal()
    journal.other("10.0.0.9 - - \"GET /metrics HTTP/1.1\" 200")
    return journal, journal.run().begin(ranks, ep, **arguments)


def capture_error(inner_frames: list[Any], error: str, carets: bool = False, wrapper: bool = True) -> str:
    inner = traceback([*CAPTURE, *inner_frames], error, carets)
    text = error.split(": ", 1)[-1] if ": " in error else ""
    outer = traceback([*INIT_ROWS, (RUNNER, 1100, "init_device_graphs"), (GRAPH, 470, "__init__", "raise Exception(")], f"Exception: Capture cuda graph failed: {text}\n{HINT}", carets)
    return chain(inner, outer) if wrapper else inner


def all_ranks(run: Run, text: str, order: tuple[int, ...] = (2, 0, 1, 3, 4, 5, 6, 7), gap: float = 0.02) -> None:
    for rank in order:
        if rank < max(1, len(run.ranks)):
            run.raise_in(rank, text)
            run.journal.tick(gap)


def all_ranks_interleaved(run: Run, text: str, order: tuple[int, ...]) -> None:
    """Blocks of several ranks, each line by line and in turns, as small writes come in."""
    rows = text.split("\n")
    for number, row in enumerate(rows):
        for rank in order:
            if number == 0:
                run.rank(rank, "Scheduler hit an exception: " + row)
            else:
                run.rank_raw(rank, row)


def printed(text: str, **ending: Any) -> Journal:
    """A start that prints a text before it has any ranks, and ends (Run.exit)."""
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(text)
    run.exit(**ending)
    return journal


def early_crash(error: str, rows: Any = (("sglang/launch_server.py", 40, "<module>"),)) -> Journal:
    return printed(traceback(rows, error), status=1)


def simple_load_crash(error: str, rows: list[Any], ranks: int = 8, phase: str = "weights", **arguments: Any) -> Journal:
    journal, run = start(ranks, **arguments)
    getattr(run, {"dist_init": "to_weights", "weights": "to_weights", "kv_cache": "to_kv", "graph_capture": "to_graphs"}[phase])()
    all_ranks(run, traceback([*INIT_ROWS, *rows], error))
    run.self_kill()
    return journal


def serving_crash(error: str, rows: list[Any], ranks: int = 8, order: tuple[int, ...] = (3, 0, 1, 2, 4, 5, 6, 7), ep: bool = False, **arguments: Any) -> Journal:
    journal, run = start(ranks, ep, speculative_algorithm=arguments.pop("algorithm", "DFLASH"), **arguments)
    run.to_serving()
    all_ranks(run, traceback([*VERIFY, *rows], error), order if ranks > 1 else (0,))
    run.self_kill(serving=True)
    return journal


# --------------------------------------------------------------------------------------------- CUDA graphs: replay

INCIDENT_ROWS = [
    (DFLASH, 1193, "forward_batch_generation", "self._prepare_for_speculative_decoding(batch)"),
    (DFLASH, 660, "_prepare_for_speculative_decoding", "draft_logits = self.draft_model_runner.forward("),
    (RUNNER, 3201, "forward"),
    (RUNNER, 3260, "_forward_raw", "ret = self.graph_runner.replay("),
    (GRAPH, 1120, "replay"),
    (GRAPH, 1071, "replay_prepare", "self.buffers.populate_from_forward_batch("),
    (GRAPH, 359, "populate_from_forward_batch", "_grouped_foreach_copy_(dsts, srcs)"),
    (GRAPH, 124, "_grouped_foreach_copy_", "if src.dtype != dst.dtype:"),
]
INCIDENT = "AttributeError: 'NoneType' object has no attribute 'dtype'"


@case("incident_dflash_ep8", "cuda_graph_replay", (1,), arguments={"engine_version": "0.5.11", "in_effect": {"sglang_cuda_graph": "enabled"}},
      verdict="crashed", cause="cuda_graph_replay_failure", phase="warmup", exception={"type": "AttributeError", "message": "'NoneType' object has no attribute 'dtype'"},
      root_frame={"file": "cuda_graph_runner.py", "line": 124, "function": "_grouped_foreach_copy_"}, first_failure={"rank": "TP3 EP3", "process": "scheduler"}, ranks_failed=8,
      exit={"code": "killed", "status": 9, "self_inflicted": True}, complete=True, remedies=["upgrade_sglang", "use_tp8", "disable_cuda_graph"])  # fmt: skip
def _() -> Journal:
    journal, run = start(ep=True, speculative_algorithm="DFLASH")
    run.to_warmup()
    all_ranks(run, traceback([*VERIFY, *INCIDENT_ROWS], INCIDENT), (3, 0, 1, 2, 4, 5, 6, 7))
    run.self_kill(serving=True)
    return journal


@case("incident_interleaved", "cuda_graph_replay", (1,), form="export", arguments={"engine_version": "0.5.12"},
      verdict="crashed", cause="cuda_graph_replay_failure", phase="warmup", exception={"type": "AttributeError", "message": "'NoneType' object has no attribute 'dtype'"},
      root_frame={"file": "cuda_graph_runner.py", "line": 124, "function": "_grouped_foreach_copy_"}, first_failure={"rank": "TP5 EP5"}, ranks_failed=8)  # fmt: skip
def _() -> Journal:
    journal, run = start(ep=True, speculative_algorithm="DFLASH")
    run.to_warmup()
    all_ranks_interleaved(run, traceback([*VERIFY, *INCIDENT_ROWS], INCIDENT), (5, 0, 3, 1, 2, 4, 6, 7))
    run.self_kill(serving=True)
    return journal


@case("incident_cut_off", "cuda_graph_replay", (1,), verdict="crashed", cause="unknown", exception={"type": None}, complete=False,
      root_frame={"file": "dflash_worker.py", "line": 715})  # fmt: skip
def _() -> Journal:
    """The seed as it came: the line with the exception is gone. Nothing is invented."""
    journal, run = start(ep=True, speculative_algorithm="DFLASH")
    run.to_warmup()
    run.rank(0, "Scheduler hit an exception: Traceback (most recent call last):\n" + frames(RUN, LOOP, BATCH, (DFLASH, 1507, "forward_batch_generation"), (DFLASH, 715, "_draft_forward")))
    run.self_kill(serving=True)
    return journal


@case("incident_then_healthy", "cuda_graph_replay", (1,), form="journal", verdict="crashed", cause="cuda_graph_replay_failure", invocation="first", remedies_without=[])
def _() -> Journal:
    """The failed run is the previous one; the current one is healthy."""
    journal, run = start(ep=True, speculative_algorithm="DFLASH")
    run.to_warmup()
    all_ranks(run, traceback([*VERIFY, *INCIDENT_ROWS], INCIDENT), (3, 0))
    run.self_kill(serving=True)
    run.systemd(f"{run.unit}: Scheduled restart job, restart counter is at 1.", "restart", N_RESTARTS="1")
    journal.tick(20)
    again = journal.run().begin(8, True, speculative_algorithm="DFLASH", disable_cuda_graph=True)
    again.to_serving(graphs=False)
    return journal


@case("rocm_all_gpus_first_request", "cuda_graph_replay", (12,), verdict="crashed", cause="cuda_graph_replay_failure", phase="warmup", native_fault={"signal": "SIGABRT"})
def _() -> Journal:
    journal, run = start(speculative_algorithm="DFLASH")
    run.to_warmup()
    for rank in range(8):
        run.rank_raw(rank, f"Memory access fault by GPU node-{rank + 2} (Agent handle: 0x55d0c0{rank}a0) on address 0x7f{rank}a00000000. Reason: Unknown.")
    journal.tick(1)
    run.log(f"Subprocess scheduler_0 (pid={run.pid_of(0)}) crashed with exit code -6. Triggering SIGQUIT for cleanup...")
    run.self_kill(serving=True)
    return journal


# --------------------------------------------------------------------------------------------- CUDA graphs: capture


@case("capture_torch_compile", "cuda_graph_capture", (2, 8), verdict="crashed", cause="cuda_graph_capture_failed", phase="graph_capture",
      exception={"type": "RuntimeError", "message": "CUDA error: operation not permitted when stream is capturing", "links": 2}, root_frame={"file": "_ops.py", "line": 756},
      first_failure={"rank": "TP1"}, remedies_first="drop_torch_compile")  # fmt: skip
def _() -> Journal:
    journal, run = start(2, enable_torch_compile=True)
    run.to_graphs()
    error = "RuntimeError: CUDA error: operation not permitted when stream is capturing\n" + CUDA_TAIL
    all_ranks(run, capture_error([(f"{S}/models/llama.py", 457, "forward"), (f"{S}/layers/moe/topk.py", 322, "biased_grouped_topk_gpu"), ("torch/_ops.py", 756, "__call__")], error), (1, 0))
    run.self_kill()
    return journal


@case("capture_attention_backend", "cuda_graph_capture", (3,), verdict="crashed", cause="cuda_graph_capture_failed", phase="graph_capture",
      exception={"type": "RuntimeError"}, root_frame={"file": "decode.py", "function": "plan"}, first_failure={"rank": "TP0"})  # fmt: skip
def _() -> Journal:
    """Old form: the record begins with Traceback at once, without "hit an exception"."""
    journal, run = start(2)
    run.to_graphs()
    rows = [(f"{S}/layers/attention/flashinfer_backend.py", 352, "update_single_wrapper"), (f"{S}/layers/attention/flashinfer_backend.py", 452, "call_begin_forward"), ("flashinfer/decode.py", 530, "plan")]
    run.rank(0, capture_error(rows, "RuntimeError: Failed to allocate memory for batch_prefill_tmp_v with size 1048576 and alignment 16 in AlignedAllocator"))
    run.self_kill()
    return journal


@case("capture_oom_in_wrapper", "cuda_graph_capture_oom", (4,), verdict="crashed", cause="cuda_graph_capture_oom", phase="graph_capture",
      exception={"type": "Exception", "message": "Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB."}, remedies_first="smaller_graphs")  # fmt: skip
def _() -> Journal:
    journal, run = start()
    run.to_graphs()
    oom = "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 7 has a total capacity of 95.59 GiB of which 265.88 MiB is free.\n" + HINT
    run.raise_in(7, traceback([*INIT_ROWS, (GRAPH, 269, "__init__", "raise Exception(")], oom))
    run.self_kill()
    return journal


@case("capture_oom_inner", "cuda_graph_capture_oom", (4,), arguments={"engine_version": "0.5.12"}, verdict="crashed", cause="cuda_graph_capture_oom", phase="graph_capture",
      exception={"type": "torch.OutOfMemoryError", "links": 2}, first_failure={"rank": "TP6"}, remedies_first="smaller_graphs_legacy")  # fmt: skip
def _() -> Journal:
    journal, run = start()
    run.to_graphs()
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 6 has a total capacity of 95.59 GiB of which 900.00 MiB is free. Process 4711 has 94.60 GiB memory in use."
    text = capture_error([(f"{S}/models/kimi_k25.py", 700, "forward")], error).replace("Process 4711", f"Process {run.pid_of(6)}")
    run.raise_in(6, text)
    run.self_kill()
    return journal


@case("capture_hidden_by_logging", "cuda_graph_capture", (5,), verdict="crashed", cause="cuda_graph_capture_failed", phase="graph_capture", exception={"type": "RuntimeError"},
      root_frame={"file": "_tensor_str.py", "function": "_tensor_str"})  # fmt: skip
def _() -> Journal:
    journal, run = start(4)
    run.to_graphs()
    rows = [(f"{S}/models/qwen2.py", 290, "forward"), (f"{S}/layers/logits_processor.py", 184, "forward"), (f"{S}/distributed/parallel_state.py", 444, "all_gather"), ("torch/distributed/c10d_logger.py", 85, "wrapper"),
            ("torch/distributed/c10d_logger.py", 56, "_get_msg_dict"), ("torch/_tensor.py", 523, "__repr__"), ("torch/_tensor_str.py", 625, "_tensor_str")]  # fmt: skip
    all_ranks(run, capture_error(rows, "RuntimeError: CUDA error: operation failed due to a previous error during capture\n" + CUDA_TAIL, carets=True))
    run.self_kill()
    return journal


@case("capture_custom_allreduce", "cuda_graph_capture", (6,), verdict="crashed", cause="cuda_graph_custom_allreduce", phase="graph_capture", exception={"type": "RuntimeError", "message": "invalid argument"},
      root_frame={"file": "custom_all_reduce.py", "line": 307, "function": "register_graph_buffers"}, remedies_first="disable_custom_all_reduce")  # fmt: skip
def _() -> Journal:
    journal, run = start()
    run.to_graphs()
    rows = [(f"{S}/distributed/device_communicators/custom_all_reduce.py", 262, "capture"), (f"{S}/distributed/device_communicators/custom_all_reduce.py", 307, "register_graph_buffers")]
    inner = traceback([*INIT_ROWS, (GRAPH, 570, "capture"), *rows], "RuntimeError: invalid argument")
    all_ranks(run, inner)
    run.self_kill()
    return journal


@case("capture_prefill_breakable", "cuda_graph_capture", (7,), arguments={"engine_version": "0.5.17"}, verdict="crashed", cause="cuda_graph_capture_failed", phase="graph_capture",
      exception={"type": "RuntimeError", "message": 'num_active_captures_ > 0 INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":3211'}, root_frame={"file": "breakable_cuda_graph.py", "line": 397},
      remedies_first="disable_prefill_cuda_graph")  # fmt: skip
def _() -> Journal:
    journal, run = start(1, speculative_algorithm="DFLASH")
    run.to_graphs()
    run.raise_in(0, traceback([*INIT_ROWS, (f"{S}/model_executor/breakable_cuda_graph.py", 512, "capture"), (f"{S}/model_executor/breakable_cuda_graph.py", 397, "_end_current_segment")],
                              'RuntimeError: num_active_captures_ > 0 INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":3211, please report a bug to PyTorch.'))  # fmt: skip
    run.self_kill()
    return journal


@case("capture_kernel_not_built", "cuda_graph_capture", (9,), verdict="crashed", cause="package_mismatch", phase="graph_capture", exception={"type": "NotImplementedError", "links": 2}, first_failure={"rank": None})
def _() -> Journal:
    journal, run = start(1)
    run.to_graphs()
    error = "NotImplementedError: Could not run 'sgl_kernel::rmsnorm' with arguments from the 'CUDA' backend. This could be because the operator doesn't exist for this backend.\n\n" + "\n".join(
        f"{name}: registered at /pytorch/aten/src/ATen/core/{name}.cpp:{number} [backend fallback]" for number, name in enumerate(["Meta", "BackendSelect", "Python", "FuncTorchDynamicLayerBackMode"] * 20))  # fmt: skip
    run.raise_in(0, capture_error([(f"{S}/layers/layernorm.py", 60, "forward_cuda")], error))
    run.self_kill()
    return journal


@case("capture_other_error", "cuda_graph_capture", (10,), verdict="crashed", cause="cuda_graph_capture_failed", phase="graph_capture", exception={"type": "RuntimeError"}, first_failure={"rank": "TP2"}, root_frame={"file": "llama.py", "line": 457})
def _() -> Journal:
    journal, run = start(4)
    run.to_graphs()
    all_ranks(run, capture_error([(f"{S}/models/llama.py", 457, "forward")], "RuntimeError: Expected contiguous tensor, but got non-contiguous tensor for argument #1 'input'"), (2, 0, 3, 1))
    run.self_kill()
    return journal


def vllm_block(prefix: str, text: str) -> str:
    return "\n".join(f"{prefix} {line}".rstrip() for line in text.split("\n"))


def vllm_start(unit: str = "vllm-main.service") -> tuple[Journal, Run]:
    journal = Journal(unit)
    run = journal.run()
    run.start()
    run.lines(run.main, f"(APIServer pid={run.main}) INFO 11-30 00:00:05 [api_server.py:1896] vLLM API server version 0.11.0", "/opt/venv/bin/python /opt/venv/bin/vllm serve", "vllm")
    run.lines(run.main, f"(APIServer pid={run.main}) INFO 11-30 00:00:05 [utils.py:233] non-default args: {{'model': '/models/k', 'tensor_parallel_size': 2}}", "/opt/venv/bin/python /opt/venv/bin/vllm serve", "vllm")
    return journal, run


def vllm_say(run: Run, who: str, pid: int, text: str, level: str = "ERROR", origin: str = "core.py:710", nested: str = "") -> None:
    prefix = f"{nested}({who} pid={pid}) {level} 11-30 00:01:57 [{origin}]"
    run.lines(pid, vllm_block(prefix, text), "VLLM::EngineCore" if "Engine" in who else "VLLM::Worker", "VLLM::EngineCor" if "Engine" in who else "VLLM::Worker")


VLLM_INIT = [("vllm/v1/engine/core.py", 700, "run_engine_core"), ("vllm/v1/engine/core.py", 498, "__init__"), ("vllm/v1/engine/core.py", 83, "__init__")]
VLLM_API = traceback([("vllm/entrypoints/openai/api_server.py", 1900, "run_server"), ("vllm/v1/engine/core_client.py", 446, "__init__"), ("vllm/v1/engine/utils.py", 759, "wait_for_engine_startup")],
                     "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")  # fmt: skip


def vllm_end(run: Run) -> None:
    run.lines(run.main, "\n".join(f"(APIServer pid={run.main}) {line}".rstrip() for line in VLLM_API.split("\n")), "/opt/venv/bin/python /opt/venv/bin/vllm serve", "vllm")
    run.journal.tick(0.4)
    run.exit(1)


@case("vllm_capture_model", "cuda_graph_capture", (11,), verdict="crashed", cause="cuda_graph_capture_failed", phase="graph_capture", exception={"type": "RuntimeError"}, first_failure={"rank": "TP3", "process": "worker"}, engine="vllm")
def _() -> Journal:
    journal, run = vllm_start()
    pid = run.main + 7
    vllm_say(run, "Worker_TP3", pid, "Capturing CUDA graphs (decode, FULL)", "INFO", "gpu_model_runner.py:3500")
    vllm_say(run, "Worker_TP3", pid, "WorkerProc hit an exception.\n" + traceback([("vllm/v1/worker/gpu_worker.py", 350, "compile_or_warm_up_model"), ("vllm/v1/worker/gpu_model_runner.py", 3550, "capture_model"),
             ("vllm/v1/worker/gpu_model_runner.py", 3600, "_capture_cudagraphs")], "RuntimeError: offset is too large for a 32 bit index"), origin="multiproc_executor.py:671")  # fmt: skip
    vllm_say(run, "EngineCore_DP0", run.main + 3, "EngineCore failed to start.\n" + traceback(VLLM_INIT, "RuntimeError: Worker failed with error 'offset is too large for a 32 bit index', please check the stack trace above for the root cause"))
    vllm_end(run)
    return journal


# --------------------------------------------------------------------------------------------- CUDA faults

ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered\n" + CUDA_TAIL


@case("illegal_access_dflash_v2", "speculative_worker", (14,), verdict="crashed", cause="cuda_illegal_memory_access", phase="serving", exception={"type": "RuntimeError", "message": "CUDA error: an illegal memory access was encountered"},
      root_frame={"file": "dflash_worker_v2.py", "line": 335}, first_failure={"rank": "TP3"})  # fmt: skip
def _() -> Journal:
    return serving_crash(ILLEGAL, [(f"{S}/speculative/dflash_worker_v2.py", 335, "forward_batch_generation")])


@case("illegal_access_mtp", "speculative_worker", (27, 28, 29, 30), verdict="crashed", cause="cuda_illegal_memory_access", phase="serving", exception={"type": "torch.AcceleratorError"}, first_failure={"rank": None})
def _() -> Journal:
    return serving_crash(ILLEGAL.replace("RuntimeError", "torch.AcceleratorError"), [(f"{S}/managers/schedule_batch.py", 2100, "prepare_mlp_sync_batch")], ranks=1, algorithm="EAGLE")


@case("vllm_illegal_address_after_dump", "speculative_worker", (13,), verdict="crashed", cause="cuda_illegal_memory_access", exception={"type": "torch.AcceleratorError"}, first_failure={"process": "engine_core"}, engine="vllm")
def _() -> Journal:
    journal, run = vllm_start()
    pid = run.main + 3
    vllm_say(run, "EngineCore_DP0", pid, "Dumping input data for V1 LLM engine (v0.11.0) with config: model='/models/k', speculative_config=SpeculativeConfig(method='dflash')", origin="dump_input.py:69")
    vllm_say(run, "EngineCore_DP0", pid, "Dumping scheduler output for model execution: SchedulerOutput(num_scheduled_tokens={'cmpl-1': 9}, total_num_scheduled_tokens=288, num_computed_tokens=[812, 911])", origin="dump_input.py:76")
    vllm_say(run, "EngineCore_DP0", pid, "EngineCore encountered a fatal error.\n" + traceback([("vllm/v1/engine/core.py", 701, "run_engine_core"), ("vllm/v1/engine/core.py", 728, "run_busy_loop"), ("vllm/v1/worker/gpu_model_runner.py", 2300, "execute_model"),
             ("vllm/v1/spec_decode/dflash.py", 240, "propose")], "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in the CUDA documentation for more information.\n" + CUDA_TAIL))  # fmt: skip
    run.lines(run.main, f"(APIServer pid={run.main}) ERROR 11-30 00:10:01 [async_llm.py:480] AsyncLLM output_handler failed.\n" + "\n".join(f"(APIServer pid={run.main}) ERROR 11-30 00:10:01 [async_llm.py:480] {line}" for line in traceback(
        [("vllm/v1/engine/async_llm.py", 439, "output_handler"), ("vllm/v1/engine/core_client.py", 846, "get_output_async")], "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.").split("\n")), "vllm serve", "vllm")  # fmt: skip
    run.exit(1)
    return journal


@case("cublas_internal_peer_text", "cuda_fault", (59,), verdict="crashed", cause="cuda_illegal_memory_access", first_failure={"rank": "TP6"}, exception={"type": "c10::DistBackendError"}, native_fault={"signal": "SIGABRT"})
def _() -> Journal:
    journal, run = start()
    run.to_weights()
    run.rank_raw(6, "[rank6]:[E1130 00:00:52.781234567 ProcessGroupNCCL.cpp:1895] [PG ID 2 PG GUID 3 Rank 6] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered")
    run.rank_raw(6, "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.")
    run.rank_raw(6, "terminate called after throwing an instance of 'c10::DistBackendError'")
    run.rank_raw(6, "  what():  [PG ID 2 PG GUID 3 Rank 6] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n" + CUDA_TAIL
                 + "\nException raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:43 (most recent call first):\nframe #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f19 in libc10.so)")  # fmt: skip
    run.rank_raw(6, "Fatal Python error: Aborted\n\nThread 0x00007f0000000740 (most recent call first):\n" + '  File "/usr/lib/python3.11/threading.py", line 331 in wait')
    journal.tick(1)
    run.log(f"Subprocess scheduler_6 (pid={run.pid_of(6)}) crashed with exit code -6. Triggering SIGQUIT for cleanup...")
    run.self_kill()
    return journal


@case("device_assert_flood", "speculative_worker", (25,), verdict="crashed", cause="cuda_device_side_assert", phase="serving", exception={"type": "RuntimeError", "message": "CUDA error: device-side assert triggered"},
      first_failure={"rank": "TP0"})  # fmt: skip
def _() -> Journal:
    journal, run = start(4, speculative_algorithm="EAGLE")
    run.to_serving()
    for number in range(300):
        run.rank_raw(0, f"/pytorch/aten/src/ATen/native/cuda/IndexKernelUtils.cu:16: vectorized_gather_kernel: block: [{number // 64},0,0], thread: [{number % 64},0,0] Assertion `ind >=0 && ind < ind_dim_size` failed.")
    run.raise_in(0, traceback([*VERIFY, (EAGLE, 990, "_draft_extend_for_decode")], "RuntimeError: CUDA error: device-side assert triggered\n" + CUDA_TAIL))
    run.self_kill(serving=True)
    return journal


@case("vllm_inductor_assert", "speculative_worker", (21, 22), verdict="crashed", cause="cuda_device_side_assert", engine="vllm", exception={"type": "torch.AcceleratorError"})
def _() -> Journal:
    journal, run = vllm_start()
    pid = run.main + 3
    run.lines(run.main, f"(APIServer pid={run.main}) INFO 11-30 00:09:00 [metrics.py:96] SpecDecoding metrics: Mean acceptance length: 4.10, Accepted throughput: 60.1 tokens/s", "vllm serve", "vllm")
    for thread in range(6):
        run.line(pid, f"/tmp/torchinductor_u/xx/cxx.py:45: unknown: block: [0,0,0], thread: [{thread},0,0] Assertion `index out of bounds: 0 <= tmp5 < 248320` failed.", "VLLM::EngineCore", "VLLM::EngineCor")
    vllm_say(run, "EngineCore_DP0", pid, "EngineCore encountered a fatal error.\n" + traceback([("vllm/v1/engine/core.py", 728, "run_busy_loop"), ("vllm/v1/worker/gpu_model_runner.py", 2300, "execute_model")],
             "torch.AcceleratorError: CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in the CUDA documentation for more information.\n" + CUDA_TAIL))  # fmt: skip
    run.exit(1)
    return journal


@case("vllm_not_permitted_in_sampler", "speculative_worker", (20,), verdict="crashed", cause="cuda_graph_replay_failure", engine="vllm", first_failure={"rank": "TP0"})
def _() -> Journal:
    journal, run = vllm_start()
    vllm_say(run, "Worker_TP0", run.main + 7, "WorkerProc hit an exception.\n" + traceback([("vllm/v1/executor/multiproc_executor.py", 666, "worker_busy_loop"), ("vllm/v1/worker/gpu_model_runner.py", 2300, "execute_model"),
             ("vllm/v1/sample/rejection_sampler.py", 90, "forward"), ("vllm/v1/sample/ops/topk_topp_sampler.py", 210, "apply_top_k_top_p_pytorch", "torch.cumsum(probs_sort, dim=-1)")],
             "torch.AcceleratorError: CUDA error: operation not permitted\nSearch for `cudaErrorNotPermitted' in the CUDA documentation for more information.\n" + CUDA_TAIL), origin="multiproc_executor.py:671")  # fmt: skip
    vllm_say(run, "EngineCore_DP0", run.main + 3, "EngineCore encountered a fatal error.\n" + traceback(VLLM_INIT, "RuntimeError: Worker failed with error 'CUDA error: operation not permitted', please check the stack trace above for the root cause"))
    run.exit(1)
    return journal


# --------------------------------------------------------------------------------------------- speculation


@case("dflash_mixed_batch", "speculative_worker", (16, 26), verdict="crashed", cause="speculative_worker_bug", phase="serving", exception={"type": "RuntimeError"},
      root_frame={"file": "dflash_worker.py", "function": "_append_target_hidden_to_draft_kv"}, arguments={"engine_version": "0.5.12"}, remedies_first="upgrade_for_speculation")  # fmt: skip
def _() -> Journal:
    return serving_crash("RuntimeError: ctx_hidden rows (812) do not match cache_loc rows (804)", [(DFLASH, 1150, "forward_batch_generation"), (DFLASH, 900, "_append_target_hidden_to_draft_kv")])


@case("dflash_prefix_hit", "speculative_worker", (17,), verdict="crashed", cause="speculative_worker_bug", phase="serving", exception={"type": "IndexError"})
def _() -> Journal:
    return serving_crash("IndexError: index 7 is out of bounds for dimension 0 with size 4", [(DFLASH, 1150, "forward_batch_generation"), (DFLASH, 870, "_gather_prefix_hidden")], ranks=4, order=(0, 1, 2, 3))


@case("eagle3_bare_assertion", "speculative_worker", (24,), verdict="crashed", cause="speculative_worker_bug", phase="serving", exception={"type": "AssertionError", "message": ""}, root_frame={"file": "flashattention_backend.py", "line": 832})
def _() -> Journal:
    return serving_crash("AssertionError", [(EAGLE, 330, "forward_batch_generation"), (EAGLE, 700, "verify"), (RUNNER, 2200, "forward"), (f"{S}/models/kimi_k25.py", 300, "forward"), (f"{S}/layers/attention/flashattention_backend.py", 832, "forward_extend", "assert forward_batch.num_splits")], algorithm="EAGLE3")


@case("eagle_merge_batch", "speculative_worker", (26,), verdict="crashed", cause="speculative_worker_bug", exception={"type": "RuntimeError"}, root_frame={"file": "eagle_utils.py", "line": 210, "function": "merge_batch"})
def _() -> Journal:
    journal, run = start(1, speculative_algorithm="STANDALONE")
    run.to_serving()
    run.raise_in(0, traceback([RUN, ("torch/utils/_contextlib.py", 120, "decorate_context"), (SCHED, 814, "event_loop_normal"), (SCHED, 1570, "get_next_batch_to_run"), (f"{S}/managers/schedule_batch.py", 1692, "merge_batch"),
                              (f"{S}/speculative/eagle_utils.py", 210, "merge_batch")], "RuntimeError: Sizes of tensors must match except in dimension 0. Expected size 4096 but got size 12288 for tensor number 1 in the list."))  # fmt: skip
    run.self_kill(serving=True)
    return journal


@case("pd_spec_warning_only", "speculative_worker", (32,), verdict="crashed", cause="speculative_worker_bug", exception=None)
def _() -> Journal:
    journal, run = start(speculative_algorithm="EAGLE", disaggregation_mode="decode")
    run.to_serving()
    for rank in range(8):
        run.rank(rank, "Cache flushed successfully!")
    run.rank(0, "length of new_indices: 5 != length of topk_p: 7, this should not happen")
    run.self_kill(serving=True)
    return journal


@case("spec_no_hook", "speculative_worker", (18,), verdict="crashed", cause="speculative_unsupported_model", exception={"type": "ValueError"}, first_failure={"rank": "TP2"})
def _() -> Journal:
    return simple_load_crash("ValueError: Model KimiK3ForConditionalGeneration implements neither set_dspark_layers_to_capture nor set_dflash_layers_to_capture, one of which is required for DFLASH/DSPARK.",
                             [(RUNNER, 900, "init_aux_hidden_state_capture")], phase="kv_cache", speculative_algorithm="DFLASH")  # fmt: skip


@case("vllm_hybrid_pages", "speculative_worker", (15,), verdict="crashed", cause="speculative_unsupported_model", exception={"type": "AssertionError", "message": ""}, engine="vllm")
def _() -> Journal:
    journal, run = vllm_start()
    text = traceback([*VLLM_INIT, ("vllm/v1/engine/core.py", 200, "_initialize_kv_caches"), ("vllm/v1/core/kv_cache_utils.py", 1000, "get_kv_cache_config"), ("vllm/v1/core/kv_cache_utils.py", 880, "unify_kv_cache_spec_page_size", "assert max_page % page == 0")], "AssertionError")
    vllm_say(run, "EngineCore_DP0", run.main + 3, "EngineCore failed to start.\n" + text)
    run.lines(run.main + 3, f"(EngineCore_DP0 pid={run.main + 3}) Process EngineCore_DP0:\n" + "\n".join(f"(EngineCore_DP0 pid={run.main + 3}) {line}" for line in text.split("\n")), "VLLM::EngineCore", "VLLM::EngineCor")
    vllm_end(run)
    return journal


@case("spec_tool_of_other_release", "speculative_worker", (19,), verdict="crashed", cause="speculative_version_mismatch", exception={"type": "AttributeError", "message": "'NoneType' object has no attribute 'device'"}, root_frame={"file": "schedule_batch.py", "line": 1866})
def _() -> Journal:
    journal, run = start(1)
    run.to_kv()
    run.raise_in(0, traceback([("/opt/specforge/specforge/modeling/target/sglang_backend.py", 210, "extend"), (f"{S}/managers/schedule_batch.py", 1866, "init_new", "device=req_to_token_pool.device")], "AttributeError: 'NoneType' object has no attribute 'device'"))
    run.self_kill()
    return journal


@case("eagle_without_draft_path", "speculative_worker", (23,), verdict="crashed", cause="speculative_missing_draft_path", exception={"type": "AttributeError"}, remedies_first="set_drafter")
def _() -> Journal:
    journal, run = start(2, speculative_algorithm="EAGLE3", speculative_draft_model_path=None)
    run.to_kv()
    run.each_rank("Load weight begin. avail mem=19.55 GB")
    run.each_rank("Load weight end. elapsed=70.1 s, type=Qwen3ForCausalLM, avail mem=4.1 GB, mem usage=15.4 GB.")
    all_ranks(run, traceback([RUN, INIT, (SCHED, 500, "init_model_worker"), (EAGLE, 150, "__init__")], "AttributeError: 'Qwen3ForCausalLM' object has no attribute 'set_embed'"), (0, 1))
    run.self_kill()
    return journal


@case("sigquit_loop_as_pid_1", "speculative_worker", (37,), verdict="running_but_dead", cause="speculative_worker_bug", exception={"type": "RuntimeError"}, first_failure={"rank": "TP0"})
def _() -> Journal:
    journal, run = start(2, speculative_algorithm="DSPARK")
    run.to_serving()
    run.raise_in(0, traceback([*VERIFY, (f"{S}/speculative/dspark_worker.py", 410, "forward_batch_generation")], "RuntimeError: shape '[3, 8, 7168]' is invalid for input of size 150528"))
    for _turn in range(30):
        run.log("SIGQUIT received. signum=3, frame=None. It usually means one child failed.")
        run.log("crash dump already performed, skipping.")
        run.log("kill_process_tree called: parent_pid=1, include_parent=True, pid=1")
        journal.tick(1)
    return journal


@case("spec_exception_unseen", "speculative_worker", (31, 38), verdict="crashed", cause="unknown", exception={"type": "kimi.audio.CodecError", "message": "frame 7 is not decodable"}, root_frame={"file": "codec.py", "line": 12})
def _() -> Journal:
    """Nothing that a row knows: the whole exception, and no guess."""
    return serving_crash("kimi.audio.CodecError: frame 7 is not decodable", [(f"{S}/managers/tp_worker.py", 300, "forward_batch_generation"), ("kimi/audio/codec.py", 12, "decode")], algorithm=None)


@case("bad_drafter_target_layer_ids", "drafter", (), verdict="crashed", cause="drafter_mismatch", exception={"type": "ValueError"}, remedies_first="matching_drafter")
def _() -> Journal:
    return simple_load_crash("ValueError: DFLASH target_layer_ids contains an out-of-range layer id. target_layer_ids[2]=9, target_num_layers=4.", [(f"{S}/speculative/dflash_utils.py", 700, "parse_dflash_draft_config")], ranks=1, phase="kv_cache", speculative_algorithm="DFLASH")


@case("bad_drafter_fc_shape", "drafter", (), verdict="crashed", cause="drafter_mismatch", exception={"type": "ValueError"})
def _() -> Journal:
    return simple_load_crash("ValueError: DFLASH fc.weight shape mismatch. This usually means that the drafter was trained with another number of target layers.", [(f"{S}/models/dflash.py", 969, "load_weights")], ranks=1, phase="kv_cache", speculative_algorithm="DFLASH")


@case("bad_drafter_hidden_size", "drafter", (), verdict="crashed", cause="drafter_mismatch", phase="warmup", exception={"type": "ValueError", "message": "DFLASH target_hidden feature dim mismatch."})
def _() -> Journal:
    """Loads, binds the port, and dies in its own warm-up."""
    journal, run = start(1, speculative_algorithm="DFLASH")
    run.to_warmup(graphs=False)
    run.raise_in(0, traceback([*VERIFY, (f"{S}/speculative/dflash_worker_v2.py", 1300, "forward_batch_generation"), (f"{S}/models/dflash.py", 835, "project_target_hidden")],
                              "ValueError: DFLASH target_hidden feature dim mismatch. Expected shape [N, 96] (num_context_features=3, hidden_size=32), but got [6, 192]."))  # fmt: skip
    run.self_kill(serving=True)
    return journal


@case("bad_drafter_unknown_architecture", "drafter", (), verdict="crashed", cause="drafter_mismatch", exception={"type": "ValueError"})
def _() -> Journal:
    return simple_load_crash("ValueError: Cannot find model module. 'NoSuchDraftModel' is not a registered model in the Transformers library (only relevant if the model is meant to be in Transformers) and 'AutoModel' is not present in the model config's 'auto_map'.",
                             [(f"{S}/speculative/dflash_worker_v2.py", 400, "__init__"), (f"{S}/model_loader/loader.py", 300, "load_model"), (f"{S}/models/registry.py", 90, "resolve_model_cls")], ranks=1, phase="kv_cache", speculative_algorithm="DFLASH")  # fmt: skip


@case("target_unknown_architecture", "weights", (), verdict="crashed", cause="package_mismatch", exception={"type": "ValueError"})
def _() -> Journal:
    return simple_load_crash("ValueError: Cannot find model module. 'KimiK4ForConditionalGeneration' is not a registered model in the Transformers library.",
                             [(f"{S}/model_loader/loader.py", 300, "load_model"), (f"{S}/models/registry.py", 90, "resolve_model_cls")], ranks=1)  # fmt: skip


# --------------------------------------------------------------------------------------------- arguments


@case("hybrid_backend_no_spec", "server_args", (33,), verdict="crashed", cause="unsupported_flag_combination", exception={"type": "AssertionError"}, ranks_failed=8)
def _() -> Journal:
    return simple_load_crash("AssertionError: Currently HybridAttentionBackend does not support speculative decoding.", [(RUNNER, 1500, "init_attention_backend"), (f"{S}/layers/attention/hybrid_attn_backend.py", 30, "__init__")], phase="kv_cache", speculative_algorithm="EAGLE")


@case("page_size_with_topk", "server_args", (34,), verdict="crashed", cause="unsupported_flag_combination", exception={"type": "ValueError"}, first_failure={"rank": "TP2"})
def _() -> Journal:
    return simple_load_crash("ValueError: EAGLE with topk > 1 is not supported when page_size > 1, please use --page-size 1", [(EAGLE, 90, "__init__")], phase="kv_cache", speculative_algorithm="EAGLE")


@case("pp_with_dflash", "server_args", (), verdict="crashed", cause="unsupported_flag_combination", phase="launch", exception={"type": "ValueError"}, exit={"code": "exited", "status": 1, "self_inflicted": False})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("/opt/venv/bin/launch", 1, "<module>"), ("sglang/launch_server.py", 40, "<module>"), (f"{S}/server_args.py", 7300, "prepare_server_args"), (f"{S}/server_args.py", 3327, "_handle_speculative_decoding")], "ValueError: DFLASH speculative decoding requires pp_size == 1."))
    run.exit(1)
    return journal


USAGE = "usage: launch_server.py [-h] --model-path MODEL_PATH [--tokenizer-path TOKENIZER_PATH]\n" + "\n".join(f"                        [--option-{number} OPTION_{number}]" for number in range(120))


@case("unknown_flag", "cli", (89,), verdict="crashed", cause="unknown_argument", phase="launch", exception=None, exit={"code": "exited", "status": 2})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw("INFO 11-30 00:00:02 __init__.py:190] Automatically detected platform cuda.")
    run.raw(USAGE + "\nlaunch_server.py: error: unrecognized arguments: --enable-reasoning")
    run.exit(2)
    return journal


@case("ambiguous_flag_start_limit", "cli", (89, 91), verdict="crashed", cause="unknown_argument", exit={"code": "exited", "status": 2, "result": "exit-code"})
def _() -> Journal:
    journal = Journal()
    for attempt in range(3):
        run = journal.run()
        run.start()
        run.raw(USAGE + "\nlaunch_server.py: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill")
        run.exit(2)
        run.systemd(f"{run.unit}: Scheduled restart job, restart counter is at {attempt + 1}.", "restart", N_RESTARTS=str(attempt + 1))
        journal.tick(20)
    for text in (f"{run.unit}: Start request repeated too quickly.", f"{run.unit}: Failed with result 'exit-code'.", f"Failed to start {run.unit} - SGLang main."):
        journal.add(text, _PID="1", _COMM="systemd", SYSLOG_IDENTIFIER="systemd", _TRANSPORT="journal", UNIT=run.unit)
    return journal


@case("system_exit_text", "cli", (90,), verdict="crashed", cause="unknown_argument", exit={"status": 1})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw("error: unrecognized arguments: --served-model-name=k")
    run.exit(1)
    return journal


@case("config_key_refused", "cli", (91,), verdict="crashed", cause="unknown_argument", exception={"type": "ValueError"})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("sglang/launch_server.py", 40, "<module>"), (f"{S}/server_args_config_parser.py", 130, "_add_store_true")], "ValueError: Unsupported config option 'disable-cuda-graph' with action 'DeprecatedStoreTrueAction'"))
    run.exit(1)
    return journal


# --------------------------------------------------------------------------------------------- memory


@case("kv_pool_too_small", "kv_pool", (39,), arguments={"in_effect": {"sglang_mem_fraction_static": 0.84}}, verdict="crashed", cause="kv_pool_too_small", phase="kv_cache", exception={"type": "RuntimeError"}, remedies_first="raise_mem_fraction")
def _() -> Journal:
    return simple_load_crash("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.84", [(RUNNER, 1200, "init_memory_pool"), (f"{S}/mem_cache/pool_configurator.py", 96, "check")], ranks=1, phase="kv_cache", mem_fraction_static=0.84)


@case("kv_pool_in_message", "kv_pool", (40,), verdict="crashed", cause="kv_pool_too_small", exception={"type": "RuntimeError"})
def _() -> Journal:
    """Very old form: the parent prints the child's traceback inside a message of its own."""
    journal, run = start(1)
    run.to_kv()
    run.raw("router init state: " + traceback([(f"{S}/managers/router/manager.py", 48, "start_router_process"), (RUNNER, 311, "init_memory_pool")], "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."))
    run.exit(1)
    return journal


@case("kv_pool_negative_profile", "kv_pool", (41,), verdict="crashed", cause="kv_pool_too_small", ranks_failed=8)
def _() -> Journal:
    journal, run = start()
    run.to_kv()
    run.each_rank("max_total_tokens=131072 is larger than the profiled value -561981. Use the profiled value instead.")
    all_ranks(run, traceback([*INIT_ROWS, (RUNNER, 1200, "init_memory_pool")], "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."))
    run.self_kill()
    return journal


@case("two_runs_opposite_advice", "kv_pool", (40,), verdict="crashed", cause="kv_pool_too_small", exception={"type": "RuntimeError"}, remedies_without=["raise_mem_fraction", "lower_mem_fraction"])
def _() -> Journal:
    """Out of memory at 0.85, then too little at 0.84: neither direction alone is a remedy."""
    journal, run = start(1, mem_fraction_static=0.85)
    run.to_serving(graphs=False)
    run.raise_in(0, traceback([*VERIFY, (RUNNER, 2200, "forward"), (f"{S}/layers/logits_processor.py", 300, "forward")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 95.59 GiB of which 1.10 GiB is free."))
    run.self_kill(serving=True)
    journal.tick(60)
    again = journal.run().begin(1, mem_fraction_static=0.84)
    again.to_kv()
    again.raise_in(0, traceback([*INIT_ROWS, (RUNNER, 1200, "init_memory_pool")], "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.84"))
    again.self_kill()
    return journal


@case("oom_at_run_time", "gpu_oom", (42,), verdict="crashed", cause="gpu_oom", phase="serving", exception={"type": "torch.OutOfMemoryError"}, remedies_first="lower_mem_fraction", first_failure={"rank": "TP4"})
def _() -> Journal:
    return serving_crash("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 4 has a total capacity of 95.59 GiB of which 2.20 GiB is free. Including non-PyTorch memory, this process has 93.30 GiB memory in use.",
                         [(DFLASH, 1100, "forward_batch_generation"), (RUNNER, 2200, "forward"), (f"{S}/layers/moe/fused_moe_triton/layer.py", 600, "forward")], order=(4, 0, 1, 2, 3, 5, 6, 7))  # fmt: skip


@case("oom_in_create_weights", "gpu_oom", (43,), verdict="crashed", cause="gpu_oom_weights", phase="weights", exception={"type": "torch.OutOfMemoryError"}, root_frame={"file": "_device.py"})
def _() -> Journal:
    return simple_load_crash("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 462.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 61.44 MiB is free.",
                             [(RUNNER, 700, "load_model"), (f"{S}/model_loader/loader.py", 180, "_initialize_model"), (f"{S}/layers/linear.py", 120, "create_weights"), ("torch/utils/_device.py", 104, "__torch_function__")])  # fmt: skip


@case("oom_cuda_error_form", "gpu_oom", (44,), verdict="crashed", cause="gpu_oom", exception={"type": "RuntimeError", "message": "CUDA error: out of memory"})
def _() -> Journal:
    journal, run = start(1)
    run.to_serving()
    run.rank(0, "TpModelWorkerClient hit an exception: " + traceback([(f"{S}/managers/tp_worker_overlap_thread.py", 111, "forward_thread_func"), ("torch/cuda/streams.py", 37, "__new__")], "RuntimeError: CUDA error: out of memory\n" + CUDA_TAIL))
    run.self_kill(serving=True)
    return journal


@case("vllm_oom_prefixed", "gpu_oom", (46,), verdict="crashed", cause="gpu_oom", engine="vllm", exception={"type": "torch.OutOfMemoryError", "links": 2}, first_failure={"process": "engine_core"})
def _() -> Journal:
    journal, run = vllm_start()
    text = chain(traceback([("vllm/v1/worker/gpu_model_runner.py", 2300, "execute_model")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.17 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.06 GiB is free."),
                 traceback([("vllm/v1/engine/core.py", 728, "run_busy_loop")], "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization`."), cause=True)  # fmt: skip
    vllm_say(run, "EngineCore_DP0", run.main + 3, "EngineCore encountered a fatal error.\n" + text)
    run.exit(1)
    return journal


@case("vllm_memory_busy_four_times", "gpu_oom", (47,), verdict="crashed", cause="gpu_memory_busy", engine="vllm", exception={"type": "ValueError"}, first_failure={"process": "worker"})
def _() -> Journal:
    journal, run = vllm_start()
    error = "ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.9, 42.64 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    worker = traceback([("vllm/v1/executor/multiproc_executor.py", 560, "worker_main"), ("vllm/v1/worker/gpu_worker.py", 180, "init_device")], error)
    vllm_say(run, "VllmWorker TP0", run.main + 7, "WorkerProc failed to start.\n" + worker, origin="multiproc_executor.py:581")
    core = traceback([*VLLM_INIT, ("vllm/v1/executor/multiproc_executor.py", 98, "_init_executor")], error)
    pid = run.main + 3
    vllm_say(run, "EngineCore_DP0", pid, "EngineCore failed to start.\n" + core, origin="core.py:708")
    run.lines(pid, f"(EngineCore_DP0 pid={pid}) Process EngineCore_DP0:\n" + "\n".join(f"(EngineCore_DP0 pid={pid}) {line}" for line in core.split("\n")), "VLLM::EngineCore", "VLLM::EngineCor")
    vllm_end(run)
    return journal


@case("memory_unbalanced", "gpu_oom", (48,), verdict="crashed", cause="gpu_memory_busy", exception={"type": "ValueError"}, ranks_failed=8, remedies_first="free_gpu")
def _() -> Journal:
    return simple_load_crash("ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=71.2, local_gpu_memory=94.5, local_gpu_memory * 0.9=85.0", [(RUNNER, 520, "init_torch_distributed")], phase="dist_init")


@case("oom_neighbour_holds_most", "gpu_oom", (44, 48), verdict="crashed", cause="gpu_memory_busy", exception={"type": "torch.OutOfMemoryError"})
def _() -> Journal:
    return simple_load_crash("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacity of 95.59 GiB of which 412.00 MiB is free. Process 991 has 70.11 GiB memory in use. Including non-PyTorch memory, this process has 24.90 GiB memory in use.",
                             [(RUNNER, 700, "load_model"), (f"{S}/layers/linear.py", 120, "create_weights")], ranks=1)  # fmt: skip


@case("nvml_assert", "gpu_fault", (71,), verdict="crashed", cause="gpu_oom", engine="vllm", exception={"type": "RuntimeError"})
def _() -> Journal:
    journal, run = vllm_start()
    text = traceback([("vllm/engine/async_llm_engine.py", 58, "_log_task_completion"), ("vllm/worker/worker.py", 200, "execute_model")], 'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1085, please report a bug to PyTorch.')
    run.lines(run.main, vllm_block("ERROR 10-29 18:38:39 async_llm_engine.py:58]", "Engine background task failed\n" + text), "vllm serve", "vllm")
    run.exit(1)
    return journal


@case("hicache_too_big", "host_memory", (49,), verdict="crashed", cause="hicache_host_memory", exception={"type": "ValueError"}, remedies_first="smaller_hicache")
def _() -> Journal:
    return simple_load_crash("ValueError: Not enough host memory available. Requesting 40.00 GB but only have 44.87 GB free. Please reduce the size of the hierarchical cache.", [(f"{S}/mem_cache/memory_pool_host.py", 87, "__init__")], phase="kv_cache")


@case("hicache_silence_then_kill", "host_memory", (50,), verdict="crashed", cause="hicache_host_memory", kernel={"oom_killed": True}, first_failure={"rank": "TP1"})
def _() -> Journal:
    journal, run = start(4)
    run.to_kv()
    run.each_rank("Allocating 40.00 GB host memory for hierarchical KV cache.")
    journal.tick(20)
    journal.kernel(f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/system.slice/{run.unit},task=sglang::schedul,pid={run.pid_of(1)},uid=990")
    journal.kernel(f"Out of memory: Killed process {run.pid_of(1)} (sglang::schedul) total-vm:180000000kB, anon-rss:60000000kB, file-rss:0kB, shmem-rss:0kB, UID:990 pgtables:1kB oom_score_adj:0")
    run.raw(traceback([("sglang/launch_server.py", 50, "<module>"), (f"{S}/entrypoints/engine.py", 2002, "_wait_for_schedulers")], "RuntimeError: Rank 1 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."))
    run.exit(1)
    return journal


@case("hicache_pin_refused", "host_memory", (51,), verdict="crashed", cause="hicache_host_memory", exception={"type": "RuntimeError", "message": "CUDA error: invalid argument"}, root_frame={"file": "memory_pool_host.py", "line": 240})
def _() -> Journal:
    return simple_load_crash("RuntimeError: CUDA error: invalid argument\n" + CUDA_TAIL, [(f"{S}/mem_cache/hiradix_cache.py", 40, "__init__"), (f"{S}/mem_cache/memory_pool_host.py", 87, "__init__"), (f"{S}/mem_cache/memory_pool_host.py", 240, "init_kv_buffer")], phase="kv_cache")


@case("rank_killed_by_oom_looks_like_exit_1", "host_oom", (52,), form="journal", verdict="crashed", cause="host_oom_killer", phase="weights", first_failure={"rank": "TP5", "process": "scheduler"}, kernel={"oom_killed": True},
      exit={"code": "exited", "status": 1, "self_inflicted": False})  # fmt: skip
def _() -> Journal:
    journal, run = start()
    run.to_weights()
    journal.tick(300)
    journal.kernel(f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/system.slice/{run.unit},task=sglang::schedul,pid={run.pid_of(5)},uid=990")
    journal.kernel(f"Out of memory: Killed process {run.pid_of(5)} (sglang::schedul) total-vm:180000000kB, anon-rss:60000000kB, file-rss:0kB, shmem-rss:0kB, UID:990 pgtables:1kB oom_score_adj:0")
    run.systemd(f"{run.unit}: A process of this unit has been killed by the OOM killer.", "oom")
    run.log("Rank 5 scheduler is dead. Please check if there are relevant logs.")
    run.log("Exit code: -9")
    run.raw(traceback([("sglang/launch_server.py", 50, "<module>"), (f"{S}/entrypoints/engine.py", 700, "_launch_subprocesses"), ("/usr/lib/python3.11/multiprocessing/connection.py", 250, "recv"), ("/usr/lib/python3.11/multiprocessing/connection.py", 383, "_recv")], "EOFError"))
    run.exit(1)
    return journal


@case("rank_killed_by_nobody_knows", "host_oom", (52,), verdict="crashed", cause="unknown", phase="weights", first_failure={"rank": "TP5"}, kernel={"oom_killed": False}, remedies=[])
def _() -> Journal:
    """Status 9 is no evidence of the OOM killer."""
    journal, run = start()
    run.to_weights()
    run.raw(traceback([("sglang/launch_server.py", 50, "<module>"), (f"{S}/entrypoints/engine.py", 2002, "_wait_for_schedulers")], "RuntimeError: Rank 5 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."))
    run.exit(1)
    return journal


@case("oom_kill_of_another_unit", "host_oom", (52,), verdict="crashed", cause="gpu_oom", kernel={"oom_killed": False})
def _() -> Journal:
    journal, run = start(2)
    run.to_serving()
    journal.kernel("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/system.slice/build.service,task_memcg=/system.slice/build.service,task=cc1plus,pid=777,uid=1000")
    journal.kernel("Memory cgroup out of memory: Killed process 777 (cc1plus) total-vm:2000000kB, anon-rss:1000000kB, file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:1kB oom_score_adj:0")
    run.raise_in(1, traceback([*VERIFY, (RUNNER, 2200, "forward")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB."))
    run.self_kill(serving=True)
    return journal


@case("cgroup_limit", "host_oom", (), verdict="crashed", cause="host_memory_limit", kernel={"oom_killed": True}, exit={"code": "killed", "status": 9, "result": "oom-kill", "self_inflicted": False})
def _() -> Journal:
    journal, run = start(1)
    run.to_weights()
    for line in (f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/system.slice/{run.unit},task_memcg=/system.slice/{run.unit},task=python3,pid={run.main},uid=990",
                 f"Memory cgroup out of memory: Killed process {run.main} (python3) total-vm:9000000kB, anon-rss:8000000kB, file-rss:0kB, shmem-rss:0kB, UID:990 pgtables:1kB oom_score_adj:0"):  # fmt: skip
        journal.kernel(line)
    run.systemd(f"{run.unit}: A process of this unit has been killed by the OOM killer.", "oom")
    run.systemd(f"{run.unit}: Main process exited, code=killed, status=9/KILL", "exit", EXIT_CODE="killed", EXIT_STATUS="9")
    run.failed("oom-kill")
    return journal


@case("systemd_oomd", "host_oom", (), verdict="crashed", cause="host_oom_killer", kernel={"oom_killed": True})
def _() -> Journal:
    journal, run = start(1)
    run.to_serving()
    run.systemd(f"{run.unit}: systemd-oomd killed 11 process(es) in this unit.", "oomd")
    run.systemd(f"{run.unit}: Main process exited, code=killed, status=9/KILL", "exit", EXIT_CODE="killed", EXIT_STATUS="9")
    run.failed("oom-kill")
    return journal


@case("unified_memory_freeze", "host_oom", (53,), verdict="crashed", cause="unified_memory_exhausted", complete=False, exit=None)
def _() -> Journal:
    journal, run = start(1)
    run.to_kv()
    for _number in range(40):
        journal.kernel("NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from _memdescAllocInternal(pMemDesc) @ mem_desc.c:1359")
        journal.tick(0.2)
    journal.reboot()
    again = journal.run()
    again.start()
    return journal


# --------------------------------------------------------------------------------------------- NCCL


@case("nccl_shm", "nccl", (54, 55), verdict="crashed", cause="nccl_shm_too_small", phase="dist_init", exception={"type": "torch.distributed.DistBackendError"}, first_failure={"rank": "TP2"})
def _() -> Journal:
    journal, run = start()
    run.to_weights()
    for number in range(60):
        run.rank_raw(number % 8, f"gpu-01:{run.pid_of(number % 8)}:{run.pid_of(number % 8) + 900} [{number % 8}] NCCL INFO Channel {number:02d}/0 : 0[0] -> 1[1] via SHM/direct/direct")
    error = ("torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\n"
             "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\nError while creating shared memory segment /dev/shm/nccl-lNPZ0f (size 9637888), error: No space left on device (28)")  # fmt: skip
    all_ranks(run, traceback([*INIT_ROWS, (RUNNER, 480, "init_torch_distributed"), ("torch/distributed/distributed_c10d.py", 4000, "barrier")], error))
    run.self_kill()
    return journal


@case("nccl_shm_newest_first", "nccl", (54,), verdict="crashed", cause="nccl_shm_too_small", first_failure={"rank": "TP0"}, reversed=True)
def _() -> Journal:
    journal, run = start(2)
    run.to_weights()
    run.raise_in(0, traceback([*INIT_ROWS, (RUNNER, 480, "init_torch_distributed")], "RuntimeError: NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)\nLast error:\nError while creating shared memory segment /dev/shm/nccl-aB3 (size 33030528)"))
    run.self_kill()
    journal.entries.reverse()
    return journal


@case("nccl_other_error", "nccl", (55,), verdict="crashed", cause="nccl_error", exception={"type": "torch.distributed.DistBackendError"})
def _() -> Journal:
    return simple_load_crash("torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 999 'unknown error'",
                             [(RUNNER, 480, "init_torch_distributed"), ("torch/distributed/distributed_c10d.py", 4000, "all_reduce")], phase="dist_init")  # fmt: skip


def nccl_timeout(run: Run, rank: int, work: int) -> None:
    head = f"[rank{rank}]:[E1130 01:45:30.{100000000 + rank} ProcessGroupNCCL.cpp:"
    what = f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={work}, OpType=ALLREDUCE, NumelIn=7168, NumelOut=7168, Timeout(ms)=600000) ran for 60002{rank} milliseconds before timing out."
    run.rank_raw(rank, f"{head}632] {what}")
    run.rank_raw(rank, f"{head}2252] [PG ID 2 PG GUID 3 Rank {rank}]  failure detected by watchdog at work sequence id: {work} PG status: last enqueued work: {work + 2}, last completed work: {work - 1}")
    run.journal.tick(0.3)
    run.rank_raw(rank, "terminate called after throwing an instance of 'c10::DistBackendError'")
    run.rank_raw(rank, f"  what():  [PG ID 2 PG GUID 3 Rank {rank}] Process group watchdog thread terminated with exception: {what}\nException raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:635 (most recent call first):\n"
                 + "\n".join(f"frame #{number}: c10d::ProcessGroupNCCL::watchdogHandler() + 0x{number}c7 (0x7f7ed{number} in {SITE}/torch/lib/libtorch_cuda.so)" for number in range(6)))  # fmt: skip


@case("collective_timeout", "nccl", (56, 57, 58), verdict="crashed", cause="nccl_collective_timeout", phase="serving", exception={"type": "c10::DistBackendError"}, first_failure={"rank": "TP1"}, native_fault={"signal": "SIGABRT", "number": 6},
      exit={"self_inflicted": True})  # fmt: skip
def _() -> Journal:
    journal, run = start(4)
    run.to_serving()
    journal.tick(600)
    nccl_timeout(run, 1, 40231)
    nccl_timeout(run, 0, 40231)
    nccl_timeout(run, 3, 40231)
    journal.tick(0.7)
    # The parent polls in list order and names a rank that was not the first.
    run.log(f"Subprocess scheduler_0 (pid={run.pid_of(0)}) crashed with exit code -6. Triggering SIGQUIT for cleanup...")
    run.self_kill(serving=True)
    return journal


@case("collateral_noise_of_survivors", "nccl", (60, 4), verdict="crashed", cause="gpu_oom", exception={"type": "torch.OutOfMemoryError"}, first_failure={"rank": "TP6"})
def _() -> Journal:
    """The others complain about the peer that is gone; they are many and loud, and come first in rank, not in time."""
    journal, run = start()
    run.to_serving()
    run.raise_in(6, traceback([*VERIFY, (RUNNER, 2200, "forward")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB."))
    for rank in (0, 1, 2, 3):
        run.raise_in(rank, traceback([*VERIFY, (f"{S}/distributed/parallel_state.py", 700, "broadcast")], "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41234"))
        for _number in range(6):
            run.rank_raw(rank, f"[rank{rank}]:[W1130 00:02:1{rank}.120 ProcessGroupNCCL.cpp:1826] [PG ID 0 PG GUID 0 Rank {rank}] Failed to check the \"should dump\" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe")
    run.self_kill(serving=True)
    return journal


@case("only_collateral_names_no_one", "nccl", (60,), verdict="crashed", cause="unknown", first_failure=None)
def _() -> Journal:
    """A rank vanished without a word: the log cannot tell which."""
    journal, run = start(4)
    run.to_serving()
    for rank in (1, 2):
        run.raise_in(rank, traceback([*VERIFY, (f"{S}/distributed/parallel_state.py", 700, "broadcast")], "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41234"))
    run.self_kill(serving=True)
    return journal


@case("killed_rank_named_by_parent", "nccl", (), verdict="crashed", cause="unknown", first_failure={"rank": "TP2", "process": "scheduler"}, exit={"self_inflicted": True})
def _() -> Journal:
    journal, run = start(4)
    run.to_serving()
    run.raise_in(0, traceback([*VERIFY, (f"{S}/distributed/parallel_state.py", 700, "broadcast")], "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41234"))
    run.log(f"Subprocess scheduler_2 (pid={run.pid_of(2)}) crashed with exit code -9. Triggering SIGQUIT for cleanup...")
    run.self_kill(serving=True)
    return journal


@case("nixl_bad_status", "nccl", (61,), verdict="crashed", cause="network_transfer_failed", engine="vllm", first_failure={"rank": "TP0"})
def _() -> Journal:
    journal, run = vllm_start()
    pid = run.main + 7
    nested = f"(APIServer pid={run.main}) (EngineCore_0 pid={run.main + 3}) "
    vllm_say(run, "VllmWorker TP0", pid, "WorkerProc hit an exception.\n" + traceback([("vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py", 900, "_pop_done_transfers")], "RuntimeError: Transfer failed with state BAD_STATUS"), origin="multiproc_executor.py:596", nested=nested)
    run.exit(1)
    return journal


# --------------------------------------------------------------------------------------------- architecture, drivers, GPUs


@case("trtllm_on_sm120", "arch_mismatch", (35,), verdict="crashed", cause="unsupported_gpu_architecture", exception={"type": "tvm.error.InternalError"}, root_frame={"file": "error.pxi"})
def _() -> Journal:
    return simple_load_crash("tvm.error.InternalError: Error in function 'TllmGenFmhaRunner' at /workspace/include/flashinfer/trtllm/fmha/fmhaRunner.cuh:37: Unsupported architecture", [("flashinfer/autotuner.py", 400, "choose_one"), ("/opt/python/tvm_ffi/cython/error.pxi", 180, "tvm_ffi.core.FFIObject")], phase="kv_cache")


@case("no_kernel_image", "arch_mismatch", (62,), verdict="crashed", cause="unsupported_gpu_architecture", exception={"type": "RuntimeError"})
def _() -> Journal:
    return serving_crash("RuntimeError: BatchPrefillWithPagedKVCache failed with error code no kernel image is available for execution on the device", [(f"{S}/layers/attention/flashinfer_backend.py", 500, "forward_extend")], ranks=1, algorithm=None)


@case("vllm_ansi_no_kernel", "arch_mismatch", (108,), verdict="crashed", cause="unsupported_gpu_architecture", engine="vllm", exception={"type": "RuntimeError", "message": "CUDA error: no kernel image is available for execution on the device"}, first_failure={"process": "worker"})
def _() -> Journal:
    journal, run = vllm_start()
    pid = run.main + 7
    text = traceback([("vllm/v1/worker/gpu_worker.py", 200, "load_model"), ("vllm/_custom_ops.py", 1700, "rms_norm")], "RuntimeError: CUDA error: no kernel image is available for execution on the device\n" + CUDA_TAIL)
    for line in ("WorkerProc failed to start.\n" + text).split("\n"):
        run.line(pid, f"\x1b[1;36m(VllmWorker pid={pid})\x1b[0;0m ERROR 11-30 00:01:00 [multiproc_executor.py:487] {line}", "VLLM::Worker", "VLLM::Worker")
    vllm_say(run, "EngineCore_DP0", run.main + 3, "EngineCore failed to start.\n" + traceback(VLLM_INIT, "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."))
    vllm_end(run)
    return journal


@case("triton_shared_memory", "arch_mismatch", (), verdict="crashed", cause="unsupported_gpu_architecture", exception={"type": "triton.runtime.errors.OutOfResources"})
def _() -> Journal:
    return serving_crash("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.", [(f"{S}/layers/attention/triton_ops/extend_attention.py", 500, "extend_attention_fwd"), ("triton/compiler/compiler.py", 480, "_init_handles")], ranks=1, algorithm=None)


@case("triton_ptxas", "triton_jit", (63,), verdict="crashed", cause="triton_ptxas_mismatch", exception={"type": "triton.runtime.errors.PTXASError"}, remedies_first="use_system_ptxas")
def _() -> Journal:
    return simple_load_crash("triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'\n\nRepro command: /opt/venv/lib/python3.11/site-packages/triton/backends/nvidia/bin/ptxas -lineinfo -v --gpu-name=sm_121a /tmp/tmp1.ptx -o /tmp/tmp1.ptx.o\n",
                             [(f"{S}/layers/attention/triton_backend.py", 200, "forward_decode"), ("triton/backends/nvidia/compiler.py", 460, "make_cubin")], phase="kv_cache")  # fmt: skip


@case("driver_too_old", "driver", (64,), verdict="crashed", cause="driver_too_old", exception={"type": "RuntimeError"}, phase="launch", first_failure={"process": "main"})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("sglang/launch_server.py", 40, "<module>"), ("torch/cuda/__init__.py", 412, "_lazy_init", "torch._C._cuda_init()")], "RuntimeError: The NVIDIA driver on your system is too old (found version 11080). Please update your GPU driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"))
    run.exit(1)
    return journal


@case("fabric_not_ready", "driver", (), verdict="crashed", cause="cuda_init_failed", exception={"type": "RuntimeError"})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(f"{SITE}/torch/cuda/__init__.py:182: UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:109.)")
    run.raw("  return torch._C._cuda_getDeviceCount() > 0")
    run.raw(traceback([("sglang/launch_server.py", 40, "<module>"), (f"{S}/server_args.py", 900, "__post_init__"), (f"{S}/utils/common.py", 1700, "get_device")], "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) is available."))
    run.exit(1)
    return journal


@case("nvml_version_mismatch", "driver", (), verdict="crashed", cause="driver_library_mismatch")
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("sglang/launch_server.py", 40, "<module>"), ("pynvml.py", 2400, "nvmlInit")], "pynvml.NVMLError_LibRmVersionMismatch: Driver/library version mismatch"))
    run.exit(1)
    return journal


@case("gpu_off_the_bus", "gpu_fault", (72,), form="journal", verdict="crashed", cause="gpu_fallen_off_bus", kernel={"xid": [79]}, exception={"type": "torch.AcceleratorError"})
def _() -> Journal:
    journal, run = start()
    run.to_serving()
    journal.kernel("NVRM: GPU at PCI:0000:c1:00: GPU-5f0a")
    journal.kernel("NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.")
    journal.tick(1)
    all_ranks(run, traceback([*VERIFY, (RUNNER, 2200, "forward")], "torch.AcceleratorError: CUDA error: unknown error\n" + CUDA_TAIL), (3, 1))
    run.self_kill(serving=True)
    return journal


@case("launch_failure_with_xid", "gpu_fault", (70,), verdict="crashed", cause="gpu_xid_hardware", kernel={"xid": [48, 45]})
def _() -> Journal:
    journal, run = start()
    run.to_serving()
    journal.kernel(f"NVRM: Xid (PCI:0000:41:00): 48, pid={run.pid_of(2)}, name=sglang::schedul, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 6, subpartition 1.")
    journal.kernel(f"NVRM: Xid (PCI:0000:41:00): 45, pid={run.pid_of(2)}, name=sglang::schedul, Ch 00000010")
    run.raise_in(2, traceback([*VERIFY, (RUNNER, 2200, "forward")], "torch.AcceleratorError: CUDA error: unspecified launch failure\n" + CUDA_TAIL))
    run.self_kill(serving=True)
    return journal


@case("xid_31_by_the_program", "gpu_fault", (), verdict="crashed", cause="gpu_xid_application_fault", kernel={"xid": [31]}, first_failure={"rank": "TP2"})
def _() -> Journal:
    journal, run = start()
    run.to_serving()
    journal.kernel(f"NVRM: Xid (PCI:0000:41:00): 31, pid={run.pid_of(2)}, name=sglang::schedul, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 faulted @ 0x7f1a_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ")
    run.raise_in(2, traceback([*VERIFY, (RUNNER, 2200, "forward")], "torch.AcceleratorError: CUDA error: unspecified launch failure\n" + CUDA_TAIL))
    run.self_kill(serving=True)
    return journal


@case("xid_of_a_neighbour", "gpu_fault", (), verdict="crashed", cause="gpu_oom", kernel={"xid": []})
def _() -> Journal:
    journal, run = start(2)
    run.to_serving()
    journal.kernel("NVRM: Xid (PCI:0000:81:00): 31, pid=5150, name=train.py, Ch 00000010, intr 00000000. MMU Fault")
    run.raise_in(1, traceback([*VERIFY, (RUNNER, 2200, "forward")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB."))
    run.self_kill(serving=True)
    return journal


# --------------------------------------------------------------------------------------------- libraries and compilers


@case("undefined_symbol", "library", (65,), verdict="crashed", cause="package_mismatch", phase="launch", exception={"type": "ImportError"}, exit={"code": "exited", "status": 1})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("sglang/launch_server.py", 6, "<module>"), ("sgl_kernel/__init__.py", 5, "<module>", "from sgl_kernel import common_ops")], f"ImportError: {SITE}/sgl_kernel/common_ops.abi3.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs", carets=True))
    run.exit(1)
    return journal


COMMON_OPS = """ImportError:
[sgl_kernel] CRITICAL: Could not load any common_ops library!

Attempted locations:
1. Architecture-specific pattern: {site}/sgl_kernel/sm100/common_ops.* - found files: ['{site}/sgl_kernel/sm100/common_ops.abi3.so']
2. Fallback pattern: {site}/sgl_kernel/common_ops.* - found files: []
3. Standard Python import: common_ops - failed

GPU Info:
- Compute capability: 120
- Expected variant: SM120 (precise math for compatibility)

Please ensure sgl_kernel is properly installed with:
pip install --upgrade sgl_kernel

Error details from previous import attempts:
- ImportError: {inner}
- ModuleNotFoundError: No module named 'common_ops'"""


@case("common_ops_inner_symbol", "library", (66,), verdict="crashed", cause="package_mismatch", exception={"type": "ImportError", "message": "[sgl_kernel] CRITICAL: Could not load any common_ops library!"})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("sglang/launch_server.py", 6, "<module>"), ("sgl_kernel/load_utils.py", 180, "_load_architecture_specific_ops", "raise ImportError(error_msg)")], COMMON_OPS.format(site=SITE, inner=f"{SITE}/sgl_kernel/sm100/common_ops.abi3.so: undefined symbol: _ZNK3c106SymInt22maybe_as_int_slow_pathEv")))
    run.exit(1)
    return journal


@case("common_ops_inner_libnuma", "library", (67,), verdict="crashed", cause="missing_system_library", exception={"type": "ImportError"}, remedies_first="install_library")
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("sglang/launch_server.py", 6, "<module>"), ("sgl_kernel/load_utils.py", 180, "_load_architecture_specific_ops")], COMMON_OPS.format(site=SITE, inner="libnuma.so.1: cannot open shared object file: No such file or directory")))
    run.exit(1)
    return journal


@case("libcuda_missing", "library", (68,), verdict="crashed", cause="missing_system_library", exception={"type": "ImportError"})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("sglang/launch_server.py", 40, "<module>"), (f"{S}/server_args.py", 900, "__post_init__"), ("triton/backends/nvidia/driver.py", 30, "libcuda_dirs")], "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", carets=True))
    run.exit(1)
    return journal


@case("nvcc_not_there", "jit", (69, 75), verdict="crashed", cause="cuda_toolkit_missing", exception={"type": "RuntimeError"}, remedies_first="install_cuda_toolkit")
def _() -> Journal:
    return simple_load_crash("RuntimeError: Worker failed with error 'Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist', please check the stack trace above for the root cause", [("flashinfer/jit/cpp_ext.py", 80, "get_cuda_path")], ranks=1, phase="kv_cache")


@case("cuda_home_not_set", "jit", (69,), verdict="crashed", cause="cuda_toolkit_missing", exception={"type": "OSError"})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("sglang/launch_server.py", 6, "<module>"), (f"{S}/entrypoints/engine.py", 40, "<module>"), ("torch/utils/cpp_extension.py", 2400, "_join_cuda_home")], "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root."))
    run.exit(1)
    return journal


NINJA = """Ninja build failed. Ninja output:
ninja: Entering directory `/home/u/.cache/flashinfer/0.6.4/120/cached_ops'
[1/9] {nvcc} --generate-dependencies-with-compile --dependency-output batch_prefill.cuda.o.d -gencode=arch=compute_120a,code=sm_120a -c batch_prefill.cu -o batch_prefill.cuda.o
FAILED: [code={code}] batch_prefill.cuda.o
{nvcc} --generate-dependencies-with-compile --dependency-output batch_prefill.cuda.o.d -c batch_prefill.cu -o batch_prefill.cuda.o
{said}
ninja: build stopped: subcommand failed."""


def ninja_crash(nvcc: str, code: int, said: str) -> Journal:
    journal, run = start(2)
    run.to_graphs()
    called = traceback([*CAPTURE, ("flashinfer/jit/cpp_ext.py", 299, "run_ninja"), ("/usr/lib/python3.11/subprocess.py", 571, "run")], f"subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/home/u/.cache/flashinfer/0.6.4/120/cached_ops']' returned non-zero exit status {code}.")
    failed = traceback([*CAPTURE, ("flashinfer/jit/core.py", 310, "build_and_load"), ("flashinfer/jit/cpp_ext.py", 311, "run_ninja")], "RuntimeError: " + NINJA.format(nvcc=nvcc, code=code, said=said))
    outer = traceback([*INIT_ROWS, (GRAPH, 470, "__init__")], "Exception: Capture cuda graph failed: " + NINJA.format(nvcc=nvcc, code=code, said=said) + "\n" + HINT)
    run.raise_in(1, chain(chain(called, failed, cause=True), outer))
    run.self_kill()
    return journal


@case("ninja_compile_error", "jit", (74, 76, 77, 81), verdict="crashed", cause="jit_compile_failed", exception={"type": "subprocess.CalledProcessError", "links": 3}, first_failure={"rank": "TP1"})
def _() -> Journal:
    return ninja_crash("/usr/local/cuda/bin/nvcc", 1, "In file included from batch_prefill.cu:3:\n/opt/venv/include/flashinfer/vec_dtypes.cuh:57:10: fatal error: cuda_fp8.h: No such file or directory\n   57 | #include <cuda_fp8.h>\n      |          ^~~~~~~~~~~~\ncompilation terminated.")


@case("ninja_cuda_home_colon", "jit", (73,), verdict="crashed", cause="cuda_home_invalid", remedies_first="fix_cuda_home")
def _() -> Journal:
    return ninja_crash(":/usr/local/cuda-12.8/bin/nvcc", 127, "/bin/sh: 1: :/usr/local/cuda-12.8/bin/nvcc: not found")


@case("deep_gemm_through_executor", "jit", (78,), verdict="crashed", cause="jit_compile_failed", root_frame={"file": "compiler.py", "function": "build"})
def _() -> Journal:
    rows = [(f"{S}/layers/quantization/deep_gemm_wrapper/compile_utils.py", 332, "deep_gemm_execution_hook"), (f"{S}/layers/quantization/deep_gemm_wrapper/compile_utils.py", 297, "_compile_all"), ("tqdm/contrib/concurrent.py", 69, "thread_map"), ("/usr/lib/python3.11/concurrent/futures/_base.py", 619, "result_iterator"),
            ("/usr/lib/python3.11/concurrent/futures/_base.py", 401, "__get_result"), ("/usr/lib/python3.11/concurrent/futures/thread.py", 58, "run"), ("deep_gemm/jit/compiler.py", 151, "build")]  # fmt: skip
    return simple_load_crash("AssertionError: Failed to compile /home/u/.deep_gemm/tmp/kernel.cu", rows, ranks=1, phase="kv_cache")


@case("deep_gemm_nvcc_old", "jit", (79,), verdict="crashed", cause="cuda_toolkit_too_old", exception={"type": "RuntimeError"})
def _() -> Journal:
    return simple_load_crash("RuntimeError: Assertion error (/workspace/csrc/jit/compiler.hpp:187): major > 12 or (major == 12 and minor >= 3)\nand \"NVCC version should be >= 12.3\"", [(RUNNER, 700, "load_model"), ("deep_gemm/__init__.py", 80, "_C.init")], ranks=1)


@case("nvrtc_identifier", "jit", (80,), verdict="crashed", cause="jit_compile_failed", exception={"type": "RuntimeError"})
def _() -> Journal:
    journal, run = start(1)
    run.to_kv()
    run.rank_raw(0, 'NVRTC compilation error: kernel.cu(12): error: identifier "__nv_fp8_e8m0" is undefined')
    run.raise_in(0, traceback([*INIT_ROWS, ("deep_gemm/jit/runtime.py", 90, "load")], "RuntimeError: CUDA driver error: CUDA_ERROR_INVALID_IMAGE (200)"))
    run.self_kill()
    return journal


# --------------------------------------------------------------------------------------------- native deaths


@case("segfault_thread_only", "segfault", (82,), verdict="crashed", cause="native_segfault", native_fault={"signal": "SIGSEGV", "number": 11}, root_frame=None, exception=None, first_failure={"process": "scheduler"})
def _() -> Journal:
    journal, run = start(1)
    run.to_serving()
    run.rank_raw(0, "Fatal Python error: Segmentation fault\n\nThread 0x00007fcd7a1e3740 (most recent call first):\n" + "\n\n".join(
        [f'  File "{SITE}/zmq/sugar/socket.py", line 975 in recv_pyobj', f'  File "{SITE}/{S}/managers/scheduler.py", line 1075 in recv_requests', f'  File "{SITE}/{S}/managers/scheduler.py", line 2640 in run_scheduler_process'])
        + "\n\nExtension modules: numpy._core._multiarray_umath, torch._C, zmq.backend.cython._zmq (total: 50)")  # fmt: skip
    run.log(f"Subprocess scheduler_0 (pid={run.pid_of(0)}) crashed with exit code -11. Triggering SIGQUIT for cleanup...")
    run.self_kill(serving=True)
    return journal


@case("segfault_two_processes", "segfault", (83, 86), verdict="crashed", cause="native_segfault", native_fault={"signal": "SIGSEGV"}, first_failure={"rank": "TP1"}, root_frame={"file": "linear.py", "line": 1254}, ranks_failed=2)
def _() -> Journal:
    """Two dumps, piece by piece: the names of modules are shuffled between the processes."""
    journal, run = start(2)
    run.to_weights()
    for rank in (1, 0):
        run.rank_raw(rank, "Fatal Python error: Segmentation fault")
    for rank in (0, 1):
        run.rank_raw(rank, f"Current thread 0x0000763bcdcde1c{rank} (most recent call first):")
    for rank in (0, 1):
        for text in ("  File", f'"{SITE}/{S}/layers/linear.py"', ", line", "1254"):
            run.line(run.pid_of(rank), text, run.title_of(rank), run.title_of(rank)[:15], _LINE_BREAK="pid-change")
        run.line(run.pid_of(rank), " in weight_loader", run.title_of(rank), run.title_of(rank)[:15])
    for number, name in enumerate(["numpy.core._multiarray_umath", "torch._C", "zmq.backend.cython._zmq", "yaml._yaml"]):
        for rank in (0, 1):
            run.line(run.pid_of(rank), ("Extension modules: " if number == 0 else ", ") + name, run.title_of(rank), run.title_of(rank)[:15], _LINE_BREAK="pid-change")
    journal.tick(1)
    run.log(f"Subprocess scheduler_0 (pid={run.pid_of(0)}) crashed with exit code -11. Triggering SIGQUIT for cleanup...")
    run.self_kill()
    return journal


@case("segfault_nccl_proxy_ucx", "segfault", (84,), verdict="crashed", cause="native_segfault_nccl", native_fault={"signal": "SIGSEGV"}, first_failure={"rank": "TP3"})
def _() -> Journal:
    journal, run = start(4)
    run.to_serving()
    run.rank_raw(3, f"[gpu-01:{run.pid_of(3)}:0:{run.pid_of(3) + 40}] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x18)")
    run.rank_raw(3, f"==== backtrace (tid:  {run.pid_of(3) + 40}) ====\n 0 0x0000000000042520 __sigaction()  ???:0\n 1 0x0000000000078c1e ncclProxySaveOp()  ???:0\n 2 0x0000000000066a30 addP2pToPlan()  ???:0\n=================================")
    run.rank_raw(3, f'Fatal Python error: Segmentation fault\n\nThread 0x00007f48 (most recent call first):\n  File "{SITE}/torch/distributed/distributed_c10d.py", line 2500 in send')
    run.log(f"Subprocess scheduler_3 (pid={run.pid_of(3)}) crashed with exit code -11. Triggering SIGQUIT for cleanup...")
    run.self_kill(serving=True)
    return journal


@case("segfault_comm_init", "segfault", (85,), verdict="crashed", cause="native_segfault_nccl", phase="dist_init", root_frame={"file": "pynccl_wrapper.py", "line": 351, "function": "ncclCommInitRank"}, native_fault={"signal": "SIGSEGV"}, exit={"status": 1})
def _() -> Journal:
    journal, run = start(2)
    journal.tick(5)
    run.each_rank("Init torch distributed begin.")
    run.rank_raw(0, f'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f4858f86740 (most recent call first):\n  File "{SITE}/{S}/distributed/device_communicators/pynccl_wrapper.py", line 351 in ncclCommInitRank\n  File "{SITE}/{S}/distributed/device_communicators/pynccl.py", line 108 in __init__\n  File "{SITE}/{S}/model_executor/model_runner.py", line 253 in init_torch_distributed')
    run.raw(traceback([("sglang/launch_server.py", 50, "<module>"), (f"{S}/entrypoints/engine.py", 2002, "_wait_for_schedulers")], "RuntimeError: Rank 0 scheduler died during initialization (exit code: -11). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer."))
    run.exit(1)
    return journal


@case("segfault_kernel_and_core", "segfault", (83,), form="journal", verdict="crashed", cause="native_segfault_nccl", native_fault={"signal": "SIGSEGV"}, first_failure={"rank": "TP2"}, exception=None, kernel={"segfault": 1})
def _() -> Journal:
    """No word from the process itself: kernel and systemd-coredump know."""
    journal, run = start(4)
    run.to_serving()
    journal.kernel(f"sglang::schedul[{run.pid_of(2)}]: segfault at 18 ip 00007f2ad3c66a30 sp 00007ffd5 error 4 in libnccl.so.2.27.3[7f2ad3c00000+14000000] likely on CPU 5 (core 5, socket 0)")
    journal.tick(0.9)
    run.log(f"Subprocess scheduler_2 (pid={run.pid_of(2)}) crashed with exit code -11. Triggering SIGQUIT for cleanup...")
    run.self_kill(serving=True)
    journal.tick(2)
    run.coredump(run.pid_of(2), "sglang::schedul", 11, f"Stack trace of thread {run.pid_of(2)}:\n#0  0x00007f2ad3c66a30 n/a (libnccl.so.2 + 0x66a30)\n#1  0x00007f2ad3c78c1e ncclLaunchKernel (libnccl.so.2 + 0x78c1e)")
    return journal


@case("abort_heap", "segfault", (), verdict="crashed", cause="native_abort", native_fault={"signal": "SIGABRT"}, exception=None, first_failure={"rank": "TP1"})
def _() -> Journal:
    journal, run = start(2)
    run.to_serving()
    run.rank_raw(1, "malloc(): unaligned tcache chunk detected")
    run.rank_raw(1, f'Fatal Python error: Aborted\n\nCurrent thread 0x00007f48 (most recent call first):\n  File "{SITE}/{S}/managers/scheduler.py", line 900 in recv_requests')
    run.log(f"Subprocess scheduler_1 (pid={run.pid_of(1)}) crashed with exit code -6. Triggering SIGQUIT for cleanup...")
    run.self_kill(serving=True)
    return journal


# --------------------------------------------------------------------------------------------- ports, weights, hub


@case("zmq_port", "port", (87,), verdict="crashed", cause="port_in_use", exception={"type": "zmq.error.ZMQError"}, first_failure={"rank": "TP0"})
def _() -> Journal:
    journal, run = start(2)
    journal.tick(3)
    run.rank_raw(0, f"I0820 02:41:20.446154 {run.pid_of(0)} transfer_engine.cpp:422] Metrics reporting is disabled (set MC_TE_METRIC=1 to enable)")
    run.raise_in(0, traceback([RUN, INIT, (f"{S}/utils/common.py", 1300, "get_zmq_socket"), ("zmq/sugar/socket.py", 311, "bind")], "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:30008')"))
    run.self_kill()
    return journal


@case("http_port_looks_ready", "port", (88,), verdict="crashed", cause="port_in_use", exit={"code": "exited", "status": 3}, exception=None)
def _() -> Journal:
    """The readiness line lies: the warm-up asked the other server."""
    journal, run = start(1)
    run.to_warmup(graphs=False)
    run.log("ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use")
    run.log("INFO:     Waiting for application shutdown.")
    run.log("The server is fired up and ready to roll!")
    run.log("INFO:     Application shutdown complete.")
    run.exit(3)
    return journal


@case("weights_cut_off", "weights", (92,), verdict="crashed", cause="weights_corrupt", phase="weights", exception={"type": "safetensors_rust.SafetensorError"}, remedies_first="fetch_again")
def _() -> Journal:
    return simple_load_crash("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", [(RUNNER, 700, "load_model"), (f"{S}/model_loader/weight_utils.py", 600, "safetensors_weights_iterator", "with safe_open(st_file, framework=\"pt\") as f:")], ranks=2)


@case("remote_code_prompt", "tokenizer", (93,), verdict="crashed", cause="trust_remote_code_required", phase="launch", exception={"type": "EOFError", "message": "EOF when reading a line", "links": 2}, remedies_first="allow_remote_code")
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw("The repository /models/k contains custom code which must be executed to correctly load the model. You can inspect the repository content at https://hf.co//models/k .\nYou can inspect the repository content at https://hf.co//models/k.\nPlease pass the argument `trust_remote_code=True` to allow custom code to be run.")
    run.line(run.main, "Do you wish to run the custom code? [y/N] Traceback (most recent call last):")
    inner = traceback([("transformers/dynamic_module_utils.py", 680, "resolve_trust_remote_code", "answer = input(")], "EOFError: EOF when reading a line")
    outer = traceback([("sglang/launch_server.py", 40, "<module>"), ("transformers/dynamic_module_utils.py", 700, "resolve_trust_remote_code")], "ValueError: The repository /models/k contains custom code which must be executed to correctly load the model. You can inspect the repository content at https://hf.co//models/k .\n Please pass the argument `trust_remote_code=True` to allow custom code to be run.")
    run.raw(chain(inner, outer).split("\n", 1)[1])
    run.exit(1)
    return journal


@case("preprocessor_missing", "weights", (94,), verdict="crashed", cause="missing_model_file", exception={"type": "OSError"})
def _() -> Journal:
    journal, run = start(1)
    run.raw(traceback([("sglang/launch_server.py", 50, "<module>"), (f"{S}/managers/tokenizer_manager.py", 200, "__init__"), ("transformers/utils/hub.py", 400, "cached_files")], "OSError: /models/k does not appear to have a file named preprocessor_config.json. Checkout 'https://huggingface.co//models/k/tree/None' for available files."))
    run.exit(1)
    return journal


@case("path_missing", "weights", (), verdict="crashed", cause="missing_model_file", phase="launch", exception={"type": "OSError"})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    inner = traceback([("transformers/utils/hub.py", 479, "cached_files"), ("huggingface_hub/utils/_validators.py", 153, "validate_repo_id")], "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/none'. Use `repo_type` argument if needed.")
    outer = traceback([("sglang/launch_server.py", 40, "<module>"), (f"{S}/server_args.py", 900, "__post_init__"), ("transformers/configuration_utils.py", 721, "_get_config_dict")], "OSError: Incorrect path_or_model_id: '/models/none'. Please provide either the path to a local folder or the repo_id of a model on the Hub.")
    run.raw(chain(inner, outer, cause=True))
    run.exit(1)
    return journal


# The root is what the hub's client raised.
CASES[-1].expect["exception"] = {"type": "huggingface_hub.errors.HFValidationError", "links": 2}


@case("hub_gated", "weights", (95,), verdict="crashed", cause="hf_auth_gated", exception={"type": "OSError"})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("sglang/launch_server.py", 40, "<module>"), ("transformers/utils/hub.py", 419, "cached_files")],
                      "OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/org/k.\n401 Client Error. (Request ID: Root=1-67)\n\nCannot access gated repo for url https://huggingface.co/org/k/resolve/main/config.json.\nAccess to model org/k is restricted. You must have access to it and be authenticated to access it. Please log in."))  # fmt: skip
    run.exit(1)
    return journal


@case("hub_not_found", "weights", (), verdict="crashed", cause="hf_not_found", exception={"type": "requests.exceptions.HTTPError", "links": 3})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    url = "https://huggingface.co/org/none/resolve/main/config.json"
    run.raw(chain(chain(traceback([("huggingface_hub/utils/_http.py", 409, "hf_raise_for_status")], f"requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: {url}"),
                        traceback([("huggingface_hub/utils/_http.py", 459, "hf_raise_for_status")], f"huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1-68)\n\nRepository Not Found for url: {url}.\nPlease make sure you specified the correct `repo_id` and `repo_type`.\nIf you are trying to access a private or gated repo, make sure you are authenticated.\nInvalid username or password."), cause=True),
                  traceback([("sglang/launch_server.py", 40, "<module>"), ("transformers/utils/hub.py", 424, "cached_files")], "OSError: org/none is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'\nIf this is a private repository, make sure to pass a token having permission to this repo."), cause=True))  # fmt: skip
    run.exit(1)
    return journal


# --------------------------------------------------------------------------------------------- dead but up, hangs


@case("oom_but_parent_lives", "dead_but_up", (45,), verdict="running_but_dead", cause="gpu_oom", exception={"type": "torch.OutOfMemoryError"}, exit=None)
def _() -> Journal:
    journal, run = start(1)
    run.to_serving()
    run.rank(0, "Exception in run_tp_server:\n" + traceback([*VERIFY, (RUNNER, 2200, "forward")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB."))
    for _number in range(30):
        journal.tick(10)
        run.log('INFO:     10.0.0.9:52000 - "GET /health HTTP/1.1" 200 OK')
    return journal


@case("health_200_for_an_hour", "dead_but_up", (96, 97, 100), verdict="running_but_dead", cause="running_but_dead", exception=None, remedies_first="restart_unit")
def _() -> Journal:
    journal, run = start(1)
    run.to_serving()
    for _number in range(5):
        journal.tick(10)
        run.log('INFO:     10.0.0.9:52000 - "GET /health_generate HTTP/1.1" 200 OK')
        run.rank(0, "Prefill batch, #new-seq: 1, #new-token: 1, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0,")
    for _number in range(300):
        journal.tick(10)
        run.log('INFO:     10.0.0.9:52000 - "GET /health_generate HTTP/1.1" 200 OK')
    return journal


@case("scheduler_dead_parent_answers", "dead_but_up", (102,), verdict="running_but_dead", cause="native_segfault", native_fault={"signal": "SIGSEGV"}, first_failure={"rank": "TP1"})
def _() -> Journal:
    journal, run = start(2)
    run.to_serving()
    run.rank_raw(1, f'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f48 (most recent call first):\n  File "{SITE}/{S}/managers/scheduler.py", line 900 in recv_requests')
    for _number in range(30):
        journal.tick(10)
        run.log('INFO:     10.0.0.9:52000 - "GET /health HTTP/1.1" 200 OK')
    return journal


PYSPY = "Pyspy dump for PID {pid}: Process {pid}: sglang::scheduler\nPython v3.11.9 (/opt/venv/bin/python3.11)\nThread {pid} (active): \"MainThread\"\n    cuModuleLoadData (libcuda.so.580.105.08)\n    forward (sglang/srt/models/kimi_k25.py:300)"


@case("watchdog_module_load", "hang", (36,), verdict="hung", cause="scheduler_watchdog_timeout", exception=None, first_failure={"rank": "TP4"}, remedies_first="eager_module_loading", exit={"self_inflicted": True})
def _() -> Journal:
    journal, run = start(speculative_algorithm="EAGLE")
    run.to_serving()
    journal.tick(300)
    for rank in (4, 0, 1, 2, 3, 5, 6, 7):
        run.rank(rank, "Scheduler debug info:\nself.cur_batch.batch_size()=2\nself.cur_batch.reqs=[Req(rid=1, input_ids=[1, 2]), Req(rid=2, input_ids=[3])]")
        run.rank(rank, PYSPY.format(pid=run.pid_of(rank)))
        run.rank(rank, "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)")
    journal.tick(5)
    run.self_kill(serving=True)
    return journal


@case("watchdog_old_form", "hang", (103,), verdict="hung", cause="scheduler_watchdog_timeout", first_failure={"rank": "TP0"})
def _() -> Journal:
    journal, run = start(2)
    run.to_serving()
    journal.tick(300)
    for rank in (0, 1):
        run.rank(rank, f"Pyspy failed to dump PID {run.pid_of(rank)}. Error: /bin/sh: 1: py-spy: not found")
        run.rank(rank, "Watchdog timeout (self.watchdog_timeout=300)")
    journal.tick(5)
    run.self_kill(serving=True)
    return journal


@case("watchdog_soft_is_no_death", "hang", (103,), verdict="running", cause="none")
def _() -> Journal:
    journal, run = start(2)
    run.to_serving()
    run.rank(0, "Scheduler watchdog timeout (self.watchdog_timeout=60, self.soft=True)")
    journal.tick(5)
    run.rank(0, "Decode batch, #running-req: 2, #token: 1801, token usage: 0.01, cuda graph: True, gen throughput (token/s): 171.20, #queue-req: 0,")
    return journal


@case("detokenizer_is_the_victim", "hang", (98, 99), verdict="hung", cause="scheduler_hang", exception=None)
def _() -> Journal:
    journal, run = start()
    run.to_serving()
    for _number in range(4):
        journal.tick(30)
        run.log("Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 00:05:00. last_heartbeat time: 00:04:31")
        run.log('INFO:     10.0.0.9:52000 - "GET /health HTTP/1.1" 503 Service Unavailable')
    return journal


@case("long_prefill_fails_health", "nccl", (60,), verdict="running", cause="health_check_false_negative", remedies_first="raise_health_timeout")
def _() -> Journal:
    journal, run = start()
    run.to_serving()
    run.log("Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 00:05:00. last_heartbeat time: 00:04:31")
    journal.tick(5)
    run.rank(0, "Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, token usage: 0.61, #running-req: 1, #queue-req: 0,")
    run.rank(0, "Decode batch, #running-req: 2, #token: 91801, token usage: 0.61, cuda graph: True, gen throughput (token/s): 171.20, #queue-req: 0,")
    return journal


@case("health_probes_pile_up", "hang", (101,), verdict="crashed", cause="health_probe_overload", exception={"type": "RuntimeError"})
def _() -> Journal:
    journal, run = start(1)
    run.to_serving()
    for number in range(6):
        journal.tick(10)
        run.log("Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 00:05:00. last_heartbeat time: 00:04:31")
        run.rank(0, f"Prefill batch, #new-seq: {number + 1}, #new-token: {number + 1}, #cached-token: 0, token usage: 0.91, #running-req: 48, #queue-req: {number},")
    run.raise_in(0, traceback([*VERIFY, (f"{S}/managers/schedule_batch.py", 1500, "prepare_for_extend"), (f"{S}/mem_cache/allocator.py", 300, "alloc_extend")], "RuntimeError: Prefill out of memory. Try to lower your batch size. Try to allocate 6 tokens. Available tokens: 0"))
    run.self_kill(serving=True)
    return journal


@case("warmup_through_proxy", "readiness", (104,), verdict="crashed", cause="warmup_failed_proxy", phase="warmup", exception={"type": "AssertionError", "message": "res=<Response [502]>, res.text=''"}, remedies_first="no_proxy")
def _() -> Journal:
    journal, run = start(1)
    run.to_kv()
    run.each_rank("KV Cache is allocated. #tokens: 131072, KV size: 8.59 GB")
    run.log(f"INFO:     Started server process [{run.main}]")
    run.log("INFO:     Application startup complete.")
    run.log("INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)")
    run.log("Initialization failed. warmup error: " + traceback([(f"{S}/entrypoints/http_server.py", 800, "_wait_and_warmup")], "AssertionError: res=<Response [502]>, res.text=''"))
    run.log(f"kill_process_tree called: parent_pid={run.main}, include_parent=True, pid={run.main}")
    run.exit(signal=9)
    return journal


# --------------------------------------------------------------------------------------------- vLLM's shapes


@case("vllm_core_only_consequence", "vllm_shape", (107, 110), verdict="crashed", cause="engine_core_failed", engine="vllm")
def _() -> Journal:
    journal, run = vllm_start()
    run.lines(run.main, f"(APIServer pid={run.main}) ERROR 11-30 00:05:00 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.", "vllm serve", "vllm")
    run.lines(run.main + 7, f"(Worker_TP0 pid={run.main + 7}) INFO 11-30 00:05:00 [multiproc_executor.py:558] Parent process exited, terminating worker", "VLLM::Worker", "VLLM::Worker")
    run.exit(1)
    return journal


@case("vllm_root_above_api_server", "vllm_shape", (105, 106), verdict="crashed", cause="missing_model_file", engine="vllm", exception={"type": "FileNotFoundError"}, first_failure={"process": "engine_core"})
def _() -> Journal:
    journal, run = vllm_start()
    pid = run.main + 3
    run.line(pid, "Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]\rLoading safetensors checkpoint shards:  25% Completed | 1/4 [00:02<00:06,  2.1s/it]", "VLLM::EngineCore", "VLLM::EngineCor")
    text = traceback([*VLLM_INIT, ("vllm/model_executor/model_loader/weight_utils.py", 700, "safetensors_weights_iterator")], "FileNotFoundError: No such file or directory: /models/k/model-00002-of-00004.safetensors", carets=True)
    vllm_say(run, "EngineCore_DP0", pid, "EngineCore failed to start.\n" + text, origin="core.py:708")
    vllm_end(run)
    return journal


@case("wrapper_calls_bars_errors", "progress_noise", (109,), verdict="crashed", cause="gpu_oom_weights", exception={"type": "torch.OutOfMemoryError"})
def _() -> Journal:
    """Progress bars at level ERROR through a wrapper are no errors."""
    journal, run = start(1)
    for number in range(20):
        run.raw(f"2026-11-30 00:00:{number:02d}.123 | ERROR    | stderr:write:10 - Loading safetensors checkpoint shards:  {number * 5:2d}% Completed | {number}/20 [00:{number:02d}<00:20,  1.01it/s]")
    run.to_weights()
    run.raise_in(0, traceback([*INIT_ROWS, (RUNNER, 700, "load_model"), (f"{S}/layers/linear.py", 120, "create_weights")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 462.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 61.44 MiB is free."))
    run.self_kill()
    return journal


# --------------------------------------------------------------------------------------------- ends that are none, and systemd's own


@case("operator_stop_new_release", "ends", (), verdict="stopped_by_operator", cause="none", phase="stopping", exception=None, exit={"code": "exited", "status": 0}, remedies=[])
def _() -> Journal:
    journal, run = start(1)
    run.to_serving()
    run.stopping()
    run.log("SIGTERM received. signum=15 frame=None. Draining requests and shutting down...")
    run.log("Gracefully exiting... Remaining number of requests 0. Remaining requests remaining_rids=[].")
    journal.tick(3)
    run.log(f"INFO:     Finished server process [{run.main}]")
    run.exit(0)
    run.stopped()
    return journal


@case("operator_stop_old_release", "ends", (), verdict="stopped_by_operator", cause="none", exit={"code": "killed", "status": 9, "self_inflicted": True})
def _() -> Journal:
    """0.5.11 ends even an orderly stop by SIGKILL on itself."""
    journal, run = start()
    run.to_serving()
    run.stopping()
    run.log("SIGTERM received. signum=15 frame=None. Draining requests and shutting down...")
    run.log("Gracefully exiting... Remaining number of requests 0. Remaining requests remaining_rids=[].")
    journal.tick(3)
    run.exit(signal=9)
    run.stopped()
    return journal


@case("operator_stop_whole_group", "ends", (), verdict="stopped_by_operator", cause="none")
def _() -> Journal:
    """KillMode=control-group: the schedulers die of SIGTERM and the parent takes it for a crash."""
    journal, run = start(2)
    run.to_serving()
    run.stopping()
    run.log(f"Subprocess scheduler_0 (pid={run.pid_of(0)}) crashed with exit code -15. Triggering SIGQUIT for cleanup...")
    run.log("SIGQUIT received. signum=3, frame=None. It usually means one child failed.")
    run.exit(signal=9)
    run.stopped()
    return journal


@case("crash_then_stop", "ends", (), verdict="crashed", cause="gpu_oom")
def _() -> Journal:
    journal, run = start(1)
    run.to_serving()
    run.raise_in(0, traceback([*VERIFY, (RUNNER, 2200, "forward")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB."))
    run.log("SIGQUIT received. signum=3, frame=None. It usually means one child failed.")
    run.stopping()
    run.exit(signal=9)
    run.stopped()
    return journal


@case("exit_zero_of_a_dead_engine", "ends", (), verdict="crashed_exit_zero", cause="kv_pool_too_small", exception={"type": "RuntimeError"}, exit={"code": "exited", "status": 0})
def _() -> Journal:
    journal, run = start(1)
    run.to_kv()
    run.raise_in(0, traceback([*INIT_ROWS, (RUNNER, 1200, "init_memory_pool")], "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."))
    run.log("Received sigquit from a child process. It usually means the child failed.")
    run.exit(0)
    return journal


@case("start_timeout", "ends", (), verdict="startup_timeout", cause="start_timeout", phase="weights", exit={"code": "killed", "status": 15})
def _() -> Journal:
    journal, run = start()
    run.to_weights()
    journal.tick(60)
    run.systemd(f"{run.unit}: start operation timed out. Terminating.", CODE_FUNC="service_dispatch_timer")
    run.systemd(f"{run.unit}: Main process exited, code=killed, status=15/TERM", "exit", EXIT_CODE="killed", EXIT_STATUS="15")
    run.failed("timeout")
    run.systemd(f"Failed to start {run.unit} - SGLang main.", "start_failed", JOB_RESULT="failed")
    return journal


@case("systemd_watchdog", "ends", (), verdict="hung", cause="scheduler_hang", exit={"code": "dumped", "status": 6, "result": "watchdog"})
def _() -> Journal:
    journal, run = start()
    run.to_serving()
    journal.tick(60)
    run.systemd(f"{run.unit}: Watchdog timeout (limit 1min)!", CODE_FUNC="service_dispatch_watchdog")
    run.systemd(f"{run.unit}: Killing process {run.main} (python3) with signal SIGABRT.")
    run.systemd(f"{run.unit}: Main process exited, code=dumped, status=6/ABRT", "exit", EXIT_CODE="dumped", EXIT_STATUS="6")
    run.failed("watchdog")
    return journal


@case("executable_missing", "ends", (), verdict="crashed", cause="executable_missing", phase="launch", exit={"code": "exited", "status": 203})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.systemd(f"Started {run.unit} - SGLang main.", "started", JOB_RESULT="done")
    journal.add("sglang-main-ep8.service: Failed to locate executable /opt/venv/bin/python: No such file or directory", _PID=str(run.main), _COMM="(python)", SYSLOG_IDENTIFIER="(python)", UNIT=run.unit, INVOCATION_ID=run.invocation, _TRANSPORT="journal")
    journal.add("sglang-main-ep8.service: Failed at step EXEC spawning /opt/venv/bin/python: No such file or directory", _PID=str(run.main), _COMM="(python)", SYSLOG_IDENTIFIER="(python)", UNIT=run.unit, INVOCATION_ID=run.invocation,
                MESSAGE_ID="641257651c1b4ec9a8624d7a40a9e1e7", EXECUTABLE="/opt/venv/bin/python", _TRANSPORT="journal")  # fmt: skip
    run.exit(203)
    return journal


@case("permission_denied_on_cache", "ends", (), verdict="crashed", cause="permission_denied", exception={"type": "PermissionError"})
def _() -> Journal:
    return simple_load_crash("PermissionError: [Errno 13] Permission denied: '/home/sglang/.cache/flashinfer'", [("flashinfer/jit/env.py", 60, "<module>")], ranks=1)


@case("disk_full", "ends", (), verdict="crashed", cause="disk_full", exception={"type": "OSError"})
def _() -> Journal:
    return simple_load_crash("OSError: [Errno 28] No space left on device: '/var/lib/sglang/cache/triton'", [("triton/runtime/cache.py", 100, "put")], ranks=1, phase="kv_cache")


@case("rate_limited", "honesty", (), verdict="crashed", cause="unknown", complete=False, exception=None)
def _() -> Journal:
    journal, run = start()
    run.to_serving()
    journal.dropped(4711)
    run.log("SIGQUIT received. signum=3, frame=None. It usually means one child failed.")
    run.exit(signal=9)
    return journal


@case("long_lines_null", "honesty", (), verdict="crashed", cause="gpu_oom", complete=False, exception={"type": "torch.OutOfMemoryError"})
def _() -> Journal:
    journal, run = start(1)
    run.to_serving()
    run.raise_in(0, traceback([*VERIFY, (RUNNER, 2200, "forward")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB."))
    run.self_kill(serving=True)
    for entry in journal.entries:
        if isinstance(entry["MESSAGE"], str) and "server_args=" in entry["MESSAGE"]:
            entry["MESSAGE"] = None
    return journal


@case("rotated_away", "honesty", (), verdict="crashed", cause="unknown", complete=False, exception=None, first_failure=None)
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.exit(signal=9)
    return journal


@case("harmless_tracebacks_before", "honesty", (), verdict="crashed", cause="cuda_illegal_memory_access", exception={"type": "RuntimeError"}, first_failure={"rank": "TP1"})
def _() -> Journal:
    """Things that look like deaths and are none: an ignored exception, one request's ASGI error, a warning with a traceback."""
    journal, run = start(2)
    run.rank_raw(0, f"{SITE}/torch/x.py:12: FutureWarning: torch.cuda.amp is deprecated")
    run.to_serving()
    run.rank_raw(0, "Exception ignored in: <function Pool.__del__ at 0x7f>\n" + traceback([("/usr/lib/python3.11/multiprocessing/pool.py", 270, "__del__")], "ResourceWarning: unclosed running multiprocessing pool"))
    run.log("ERROR:    Exception in ASGI application\n" + traceback([("uvicorn/protocols/http/h11_impl.py", 403, "run_asgi"), ("starlette/routing.py", 70, "app")], "ValueError: The input (300000 tokens) is longer than the model's context length (262144 tokens)."))
    journal.tick(3)
    run.rank(0, "Decode batch, #running-req: 2, #token: 1801, token usage: 0.01, cuda graph: True, gen throughput (token/s): 171.20, #queue-req: 0,")
    run.log('INFO:     10.0.0.9:52000 - "POST /v1/chat/completions HTTP/1.1" 200 OK')
    run.log('INFO:     10.0.0.9:52000 - "POST /v1/chat/completions HTTP/1.1" 200 OK')
    run.raise_in(1, traceback([*VERIFY, (RUNNER, 2200, "forward")], ILLEGAL))
    run.self_kill(serving=True)
    return journal


@case("still_loading", "ends", (), verdict="starting", cause="none", phase="weights", remedies=[])
def _() -> Journal:
    journal, run = start()
    run.to_weights()
    return journal


@case("healthy", "ends", (), verdict="running", cause="none", phase="serving")
def _() -> Journal:
    journal, run = start()
    run.to_serving()
    return journal


@case("other_unit_only", "ends", (), verdict="no_evidence", cause="none", complete=False)
def _() -> Journal:
    journal = Journal()
    for _number in range(5):
        journal.other("GET / 200")
    return journal


@case("secrets_in_arguments", "honesty", (), verdict="crashed", cause="hf_auth_gated", absent=["S3CRET-KEY", "hf_abcdefghijklmnop"])
def _() -> Journal:
    journal, run = start(1, api_key="S3CRET-KEY")
    run.raw(traceback([("sglang/launch_server.py", 40, "<module>"), ("transformers/utils/hub.py", 419, "cached_files")], "OSError: You are trying to access a gated repo.\nheaders={'authorization': 'Bearer hf_abcdefghijklmnop'} launch_command='python --api-key S3CRET-KEY'"))
    run.exit(1)
    return journal


@case("exception_group", "shapes", (), verdict="crashed", cause="disk_full", exception={"type": "OSError", "message": "[Errno 28] No space left on device", "links": 3})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(f"""  + Exception Group Traceback (most recent call last):
  |   File "{SITE}/sglang/launch_server.py", line 50, in <module>
  |     run_server(args)
  |   File "/usr/lib/python3.11/asyncio/taskgroups.py", line 145, in __aexit__
  |     raise me from None
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "{SITE}/sglang/srt/utils/dump.py", line 7, in write
    |     handle.write(data)
    | OSError: [Errno 28] No space left on device
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "{SITE}/sglang/srt/utils/dump.py", line 9, in flush
    |     flush()
    | ValueError: I/O operation on closed file
    +------------------------------------""")
    run.exit(1)
    return journal


@case("uncaught_interleaved", "shapes", (), form="export", verdict="crashed", cause="package_mismatch", exception={"type": "ModuleNotFoundError", "message": "No module named 'flashinfer'"}, first_failure={"process": "scheduler"})
def _() -> Journal:
    """Two children fail at import; their uncaught tracebacks are written line by line and mix."""
    journal, run = start(2)
    text = traceback([("/usr/lib/python3.11/multiprocessing/process.py", 314, "_bootstrap"), ("/usr/lib/python3.11/multiprocessing/process.py", 108, "run"), (f"{S}/managers/scheduler.py", 60, "<module>")], "ModuleNotFoundError: No module named 'flashinfer'").split("\n")
    for rank in (0, 1):
        run.rank_raw(rank, f"Process Process-{rank + 1}:")
    for row in text:
        for rank in (0, 1):
            run.rank_raw(rank, row)
    run.raw(traceback([("sglang/launch_server.py", 50, "<module>"), (f"{S}/entrypoints/engine.py", 2002, "_wait_for_schedulers")], "RuntimeError: Rank 0 scheduler died during initialization (exit code: 1)."))
    run.exit(1)
    return journal


@case("line_cut_in_the_middle", "shapes", (), verdict="crashed", cause="gpu_oom", exception={"type": "torch.OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 3.91 GiB."}, root_frame={"file": "model_runner.py", "line": 2200, "function": "forward"})
def _() -> Journal:
    journal, run = start(2)
    run.to_serving()
    title = run.title_of(1)
    run.rank(1, "Scheduler hit an exception: Traceback (most recent call last):\n" + frames(*VERIFY))
    run.line(run.pid_of(1), f'  File "{SITE}/{RUNNER}", line', title, title[:15], _LINE_BREAK="pid-change")
    run.rank(0, "Decode batch, #running-req: 2, #token: 1801, token usage: 0.01, cuda graph: True, gen throughput (token/s): 171.20, #queue-req: 0,")
    run.line(run.pid_of(1), "2200, in forward", title, title[:15])
    run.line(run.pid_of(1), "    output = self.model.forward(", title, title[:15])
    run.line(run.pid_of(1), "torch.OutOfMemoryError: CUDA out of memory. Tried to al", title, title[:15], _LINE_BREAK="pid-change")
    run.rank_raw(0, "gpu-01:1:1 [0] NCCL INFO comm 0x55 destroyed")
    run.line(run.pid_of(1), "locate 3.91 GiB.", title, title[:15])
    run.self_kill(serving=True)
    return journal


@case("syntax_error", "shapes", (), verdict="crashed", cause="unknown", phase="launch", exception={"type": "SyntaxError", "message": "invalid syntax"}, root_frame={"file": "patched.py", "line": 12})
def _() -> Journal:
    journal = Journal()
    run = journal.run()
    run.start()
    run.raw(traceback([("sglang/launch_server.py", 6, "<module>")], f'  File "{SITE}/sglang/patched.py", line 12\n    def f(:\n          ^\nSyntaxError: invalid syntax'))
    run.exit(1)
    return journal


# --------------------------------------------------------------------------------------------- writing and checking


def path_of(item: Case) -> Path:
    return FIXTURES / item.kind / f"{item.name}.{item.form}.gz"


def packed(data: bytes) -> bytes:
    """The same bytes for the same content, whenever it is written."""
    return gzip.compress(data, 9, mtime=0)


def write_all() -> None:
    for item in CASES:
        journal = item.build()
        path = path_of(item)
        path.parent.mkdir(parents=True, exist_ok=True)
        if item.form == "json":
            path.write_bytes(packed(to_json(journal.entries).encode()))
        elif item.form == "export":
            path.write_bytes(packed(to_export(journal.entries)))
        else:
            plain = path.with_suffix("")
            write_journal(journal.entries, plain)
            path.write_bytes(packed(plain.read_bytes()))
            plain.unlink()
        answer = {"unit": journal.unit, "corpus": list(item.corpus), "arguments": item.arguments, "expect": item.expect}
        (path.parent / f"{item.name}.expected.json").write_text(json.dumps(answer, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_all()
    print(f"{len(CASES)} fixtures in {FIXTURES}")
