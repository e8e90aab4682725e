"""Failures that no fixture holds, in the words of the programs that print them: the cause must follow all the same."""

# ruff: noqa: E501  (log lines are as long as programs print them; the table builds its journals in place)
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import diagnosis

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import journal_cases as jc
from journal_builder import Journal

S_ = "sglang/srt"


def rank(exc: str, rows: Any, phase: str = "weights", **a: Any) -> Journal:
    return jc.simple_load_crash(exc, rows, ranks=a.pop("ranks", 2), phase=phase, **a)


def serve(exc: str, rows: Any, **a: Any) -> Journal:
    return jc.serving_crash(exc, rows, **a)


M = [(jc.RUNNER, 700, "load_model")]
UNSEEN: list[tuple[str, Journal, str]] = [
    (
        "port",
        rank(
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            [(jc.RUNNER, 480, "init_torch_distributed")],
            "dist_init",
        ),
        "port_in_use",
    ),
    (
        "hub offline",
        jc.early_crash(
            "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub and we cannot find the requested files in the local cache. Please check your connection and try again or make sure your Internet connection is on."
        ),
        "network_transfer_failed",
    ),
    (
        "dns",
        jc.early_crash(
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /org/k/resolve/main/config.json (Caused by NameResolutionError(\"<urllib3.connection.HTTPSConnection object at 0x7f>: Failed to resolve 'huggingface.co' ([Errno -3] Temporary failure in name resolution)\"))"
        ),
        "network_transfer_failed",
    ),
    (
        "nvcc",
        rank(
            "FileNotFoundError: [Errno 2] No such file or directory: 'nvcc'",
            [("/usr/lib/python3.11/subprocess.py", 1955, "_execute_child")],
        ),
        "cuda_toolkit_missing",
    ),
    (
        "nvcc path",
        rank(
            "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda-12.4/bin/nvcc'",
            [("/usr/lib/python3.11/subprocess.py", 1955, "_execute_child")],
        ),
        "cuda_home_invalid",
    ),
    (
        "unrecognized model",
        jc.early_crash(
            "ValueError: Unrecognized model in /models/k. Should have a `model_type` key in its config.json, or contain one of the following strings in its name: albert, align"
        ),
        "missing_model_file",
    ),
    (
        "model type",
        jc.early_crash(
            "ValueError: The checkpoint you are trying to load has model type `kimi_k9` but Transformers does not recognize this architecture. This could be because of an issue with the checkpoint, or because your version of Transformers is out of date."
        ),
        "package_mismatch",
    ),
    (
        "enomem",
        rank("OSError: [Errno 12] Cannot allocate memory", [("/usr/lib/python3.11/mmap.py", 1, "x")]),
        "host_memory_limit",
    ),
    (
        "ordinal",
        rank(
            "RuntimeError: CUDA error: invalid device ordinal\n" + jc.CUDA_TAIL,
            [(jc.RUNNER, 480, "init_torch_distributed"), ("torch/cuda/__init__.py", 529, "set_device")],
            "dist_init",
        ),
        "cuda_init_failed",
    ),
    (
        "glibc",
        jc.early_crash(
            "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found (required by /opt/venv/lib/python3.11/site-packages/sgl_kernel/common_ops.abi3.so)"
        ),
        "missing_system_library",
    ),
    (
        "store timeout",
        rank(
            "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 7/8 clients joined.",
            [(jc.RUNNER, 480, "init_torch_distributed")],
            "dist_init",
        ),
        "unknown",
    ),
    ("prometheus", jc.early_crash("ModuleNotFoundError: No module named 'prometheus_client'"), "package_mismatch"),
    (
        "nonetype in model, dflash ep graphs",
        serve(
            "AttributeError: 'NoneType' object has no attribute 'dtype'",
            [
                (jc.DFLASH, 1112, "forward_batch_generation"),
                (jc.RUNNER, 2200, "forward"),
                (f"{S_}/models/kimi_k25.py", 300, "forward"),
            ],
            ep=True,
        ),
        "unknown",
    ),
    (
        "grammar",
        serve(
            "ValueError: Grammar-constrained decoding is not supported with DFLASH speculative decoding yet.",
            [(f"{S_}/managers/scheduler.py", 900, "handle_generate_request")],
        ),
        "speculative_grammar_incompatible",
    ),
    (
        "disagg",
        jc.early_crash(
            "ValueError: DFLASH speculative decoding does not support PD disaggregation.",
            (
                ("sglang/launch_server.py", 40, "<module>"),
                (f"{S_}/server_args.py", 3300, "_handle_speculative_decoding"),
            ),
        ),
        "speculative_disaggregation_unsupported",
    ),
    ("emfile", rank("OSError: [Errno 24] Too many open files: '/models/k/model-00031.safetensors'", M), "unknown"),
    (
        "ldso",
        jc.printed(
            "/opt/venv/bin/python: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared object file: No such file or directory",
            status=127,
        ),
        "missing_system_library",
    ),
    (
        "capture ima",
        (
            lambda: (
                lambda j, r: (
                    r.to_graphs(),
                    jc.all_ranks(
                        r,
                        jc.capture_error(
                            [(f"{S_}/models/x.py", 1, "forward")],
                            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
                            + jc.CUDA_TAIL,
                        ),
                    ),
                    r.self_kill(),
                    j,
                )[-1]
            )(*jc.start(2))
        )(),
        "cuda_illegal_memory_access",
    ),
    (
        "unspecified",
        serve(
            "torch.AcceleratorError: CUDA error: unspecified launch failure\n" + jc.CUDA_TAIL,
            [(jc.RUNNER, 2200, "forward")],
        ),
        "unknown",
    ),
    (
        "ecc",
        serve(
            "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n" + jc.CUDA_TAIL,
            [(jc.RUNNER, 2200, "forward")],
        ),
        "gpu_xid_hardware",
    ),
    ("lost", rank("pynvml.NVMLError_GpuIsLost: GPU is lost", [("pynvml.py", 2400, "nvmlInit")]), "gpu_fallen_off_bus"),
    (
        "transformers import",
        jc.early_crash(
            "ImportError: cannot import name 'PreTrainedConfig' from 'transformers.configuration_utils' (/opt/venv/lib/python3.11/site-packages/transformers/configuration_utils.py)"
        ),
        "package_mismatch",
    ),
    (
        "vllm kv",
        jc.early_crash(
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
        ),
        "kv_pool_too_small",
    ),
    (
        "lfs pointer",
        rank("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", M),
        "weights_corrupt",
    ),
    (
        "sha",
        jc.early_crash(
            "OSError: Consistency check failed: file should be of size 4976698672 but has size 1048576 (model-00001-of-00004.safetensors)."
        ),
        "weights_corrupt",
    ),
    (
        "shard missing",
        rank('FileNotFoundError: No such file or directory: "/models/k/model-00031-of-00064.safetensors"', M),
        "missing_model_file",
    ),
    ("perm", jc.early_crash("PermissionError: [Errno 13] Permission denied: '/models/k/config.json'"), "permission_denied"),
    (
        "oom hip",
        serve("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.", [(jc.RUNNER, 2200, "forward")]),
        "gpu_oom",
    ),
    (
        "draft oom",
        rank(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 252.00 MiB.",
            [
                (jc.DFLASH, 150, "__init__"),
                (jc.RUNNER, 700, "load_model"),
                (f"{S_}/layers/linear.py", 120, "create_weights"),
            ],
            "kv_cache",
            speculative_algorithm="DFLASH",
        ),
        "gpu_oom_weights",
    ),
    (
        "nccl oom",
        rank(
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
            [(jc.RUNNER, 480, "init_torch_distributed")],
            "dist_init",
        ),
        "gpu_oom",
    ),
    (
        "tp divide",
        rank(
            "ValueError: Total number of attention heads (30) must be divisible by tensor parallel size (8).",
            [(f"{S_}/configs/model_config.py", 500, "get_num_kv_heads")],
            "dist_init",
        ),
        "unsupported_flag_combination",
    ),
    (
        "user bug model",
        serve(
            "KeyError: 'image_grid_thw'",
            [(jc.RUNNER, 2200, "forward"), (f"{S_}/models/kimi_k25.py", 300, "forward")],
            algorithm=None,
        ),
        "unknown",
    ),
    (
        "enospc shm torch",
        rank(
            "RuntimeError: unable to write to file </torch_1234_567_0>: No space left on device (28)",
            [("torch/multiprocessing/reductions.py", 400, "reduce_storage")],
        ),
        "nccl_shm_too_small",
    ),
    ("quota", jc.early_crash("OSError: [Errno 122] Disk quota exceeded: '/home/sglang/.cache/triton/x'"), "disk_full"),
    (
        "cuda compat",
        rank(
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 804: forward compatibility was attempted on non supported HW",
            [(jc.RUNNER, 480, "init_torch_distributed")],
            "dist_init",
        ),
        "driver_library_mismatch",
    ),
    (
        "ptx",
        serve(
            "torch.AcceleratorError: CUDA error: the provided PTX was compiled with an unsupported toolchain.\n"
            + jc.CUDA_TAIL,
            [(jc.RUNNER, 2200, "forward")],
        ),
        "driver_too_old",
    ),
    (
        "flashinfer sm",
        rank(
            "RuntimeError: FlashInfer requires GPUs with sm75 or higher",
            [("flashinfer/jit/core.py", 30, "check_cuda_arch")],
        ),
        "unsupported_gpu_architecture",
    ),
    (
        "cutlass sm90",
        rank(
            "AssertionError: fa3 Attention backend requires SM>=80 and SM<=90. Please use `--attention-backend flashinfer`.",
            [(jc.RUNNER, 1500, "init_attention_backend")],
            "kv_cache",
        ),
        "unsupported_gpu_architecture",
    ),
    (
        "jit gcc",
        rank(
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.",
            [("triton/runtime/build.py", 40, "_build")],
        ),
        "jit_compile_failed",
    ),
    (
        "python.h",
        rank(
            "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/tmpx/cuda_utils.c', '-O3', '-shared', '-fPIC', '-o', '/tmp/tmpx/cuda_utils.so', '-lcuda', '-I/usr/include/python3.11']' returned non-zero exit status 1.",
            [("triton/runtime/build.py", 48, "_build")],
        ),
        "jit_compile_failed",
    ),
    (
        "prefill oom slots",
        serve(
            "RuntimeError: Prefill out of memory. Try to lower your batch size. Try to allocate 512 tokens. Available tokens: 120",
            [(f"{S_}/managers/schedule_batch.py", 1500, "prepare_for_extend")],
            algorithm=None,
        ),
        "unknown",
    ),
]


@pytest.mark.parametrize(("name", "journal", "cause"), UNSEEN, ids=[row[0] for row in UNSEEN])
def test_unseen(name: str, journal: Journal, cause: str) -> None:
    result = diagnosis.diagnose(journal.entries, journal.unit)
    assert (result["verdict"], result["cause"]) == ("crashed", cause)
    if "error while loading" not in json_text(journal):
        assert result["exception"] is not None
        assert result["exception"]["type"]


def json_text(journal: Journal) -> str:
    return " ".join(str(entry["MESSAGE"]) for entry in journal.entries)
