"""Causes as data: which cause follows from which evidence.

A row says what it looks at (`scope`), what it must find there, and what must hold beside it. Rows are tried in order and the
first that fits wins, so the special stands before the general and the inner error before what wraps it. Rows of scope
`exception` look at every link of the chain of the process that failed first; rows of scope `line` are tried only when no
exception row fits, on the lines of that process and its parent around the failure.

Users add their own rows with the variable `sglang_crash_causes`; those are tried first.
"""

# ruff: noqa: E501  (a row of the table is read in one piece)
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ANY_PHASE: tuple[str, ...] = ()
LOADING = ("launch", "dist_init", "weights", "kv_cache")
RUNNING = ("warmup", "serving", "stopping")


@dataclass(frozen=True)
class Row:
    """One rule. Every condition that is set must hold; patterns are searched, not matched from the start."""

    id: str
    cause: str
    scope: str = "exception"  # exception, line, native
    pattern: str = ""  # exception: "Type: message"; line: the line; native: "SIGNAL frames modules lines"
    type: str = ""  # exception: its type alone
    frames: str = ""  # exception: `file:function` of any frame of the chain
    raised_in: str = ""  # exception: `file:function` of the innermost frame of that link
    unless: str = ""  # does not apply when this is found where `pattern` is searched
    unless_frames: str = ""
    phases: tuple[str, ...] = ANY_PHASE
    when: Mapping[str, Any] = field(default_factory=dict)  # facts of the run: drafter, graphs, ep, ranks_reporting_at_least, ...
    why: str = ""  # how the program comes to print this


@dataclass(frozen=True)
class Cause:
    """What a person reads about a cause."""

    id: str
    summary: str
    meaning: str
    kind: str  # graphs, memory, gpu, driver, native, nccl, packages, drafter, weights, arguments, host, liveness, other
    heals: bool = True  # another start of the same unit may work; false: systemd would only load in vain


# Causes that lie in the unit's own text or files. What depends on other processes, the hardware's mood or the network heals;
# so may what a first request brings about, since it need not come again.
_STAYS = frozenset(
    (
        "cuda_home_invalid", "cuda_toolkit_missing", "cuda_toolkit_too_old", "driver_too_old",
        "driver_library_mismatch", "unsupported_gpu_architecture", "gpu_oom_weights", "kv_pool_too_small",
        "hicache_host_memory", "triton_ptxas_mismatch", "missing_system_library", "package_mismatch",
        "speculative_unsupported_model", "speculative_version_mismatch", "speculative_missing_draft_path",
        "speculative_disaggregation_unsupported", "drafter_mismatch", "weights_corrupt", "missing_model_file",
        "trust_remote_code_required", "hf_auth_gated", "hf_not_found", "unknown_argument", "unsupported_flag_combination",
        "executable_missing", "permission_denied",
    )
)  # fmt: skip


def _table(*rows: tuple[str, str, str, str]) -> dict[str, Cause]:
    return {name: Cause(name, summary, meaning, kind, name not in _STAYS) for kind, name, summary, meaning in rows}


CAUSES: dict[str, Cause] = _table(
    ("graphs", "cuda_graph_capture_failed", "CUDA graph capture failed",
     "The engine could not record its CUDA graphs. The text that wraps the error suggests memory, which is right only for an out-of-memory error."),
    ("graphs", "cuda_graph_capture_oom", "the GPU ran out of memory while CUDA graphs were captured",
     "Weights and KV pool left too little for the graphs."),
    ("graphs", "cuda_graph_custom_allreduce", "the custom all-reduce could not register its buffers during graph capture",
     "SGLang's own all-reduce shares buffers between GPUs; capture fails where the driver or topology refuses that."),
    ("graphs", "cuda_graph_replay_failure", "a captured CUDA graph could not be replayed",
     "Capture worked, the first batch that used the graph did not: its inputs were not what the graph was recorded with."),
    ("gpu", "cuda_illegal_memory_access", "a GPU kernel touched memory that is not its own",
     "CUDA reports such errors late: the frames show where it was noticed, not where it happened."),
    ("gpu", "cuda_device_side_assert", "an assertion inside a GPU kernel failed",
     "Mostly an index out of range; every later CUDA call then fails. The frames show where it was noticed."),
    ("driver", "cuda_init_failed", "CUDA could not be initialised", "No usable GPU, driver not loaded, or fabric not ready."),
    ("packages", "cuda_home_invalid", "CUDA_HOME points to a place that holds no toolkit", "Kernels compiled at run time need nvcc below CUDA_HOME."),
    ("packages", "cuda_toolkit_missing", "no CUDA toolkit (nvcc) was found", "Kernels compiled at run time need nvcc."),
    ("packages", "cuda_toolkit_too_old", "the CUDA toolkit is too old for this GPU or release", "nvcc does not know the architecture or option."),
    ("driver", "driver_too_old", "the NVIDIA driver is too old for the CUDA runtime of the installed wheels", "The driver must be as new as the runtime."),
    ("driver", "driver_library_mismatch", "the loaded NVIDIA kernel module and the user-space libraries differ in version", "Typical after an upgrade without a reboot."),
    ("gpu", "unsupported_gpu_architecture", "a kernel has no code for this GPU", "The wheel or the chosen backend was not built for this architecture."),
    ("gpu", "gpu_xid_hardware", "the driver reported a hardware or driver fault of a GPU (Xid)", "The kernel's evidence; what the engine printed is the consequence."),
    ("gpu", "gpu_xid_application_fault", "the driver reported that the program made an illegal GPU access (Xid)", "A program fault, not a hardware one."),
    ("gpu", "gpu_fallen_off_bus", "a GPU fell off the bus (Xid 79)", "Hardware, power, heat or PCIe; the engine is a victim."),
    ("memory", "gpu_oom", "the GPU ran out of memory", "At run time: static pools left too little for activations."),
    ("memory", "gpu_oom_weights", "the weights do not fit on the GPUs", "Memory ran out while weights were created or loaded."),
    ("memory", "gpu_memory_busy", "another process holds GPU memory", "The GPUs were not empty when the engine started."),
    ("memory", "kv_pool_too_small", "after the weights too little is left for the KV pool", "The opposite of a run-time out-of-memory: the fraction must go UP, or something must shrink."),
    ("host", "host_oom_killer", "the kernel's OOM killer ended a process of the engine", "The host ran out of memory."),
    ("host", "host_memory_limit", "the unit's own memory limit was reached", "The cgroup's limit, not the host's memory, ran out."),
    ("host", "hicache_host_memory", "the host memory for the hierarchical cache cannot be had", "Size is per rank: it is multiplied by the number of GPUs."),
    ("host", "unified_memory_exhausted", "CPU and GPU share one memory and it is exhausted", "The host freezes before the OOM killer acts."),
    ("host", "disk_full", "a file system is full", "Nothing can be written any more."),
    ("nccl", "nccl_collective_timeout", "a collective operation between the GPUs timed out", "One rank did not arrive; the first to complain is not always the one that is late."),
    ("nccl", "nccl_error", "NCCL reported an error", "Its line `Last error` says more than the wrapper."),
    ("nccl", "nccl_shm_too_small", "/dev/shm is too small for NCCL", "Shared memory segments could not be created."),
    ("native", "native_segfault", "a process died by a segmentation fault", "In native code: no Python exception exists."),
    ("native", "native_segfault_nccl", "a process died by a segmentation fault inside NCCL", "In native code of the communication library."),
    ("native", "native_abort", "native code aborted the process", "A C++ exception nobody caught, a failed check, or a damaged heap."),
    ("packages", "jit_compile_failed", "a kernel could not be compiled at run time", "The compiler's own output, above the exception, says why."),
    ("packages", "triton_ptxas_mismatch", "Triton's ptxas does not know this GPU", "Triton ships its own assembler, older than the GPU."),
    ("packages", "missing_system_library", "a system library is missing", "The loader names the file."),
    ("packages", "package_mismatch", "installed packages do not fit one another", "Built against different versions."),
    ("drafter", "speculative_worker_bug", "the speculative worker failed on a batch", "A program error in the drafting code of this release."),
    ("drafter", "speculative_unsupported_model", "this release cannot speculate with this target model", "The model has no hook for the drafter."),
    ("drafter", "speculative_version_mismatch", "drafting code and engine are of different releases", "An interface changed between them."),
    ("drafter", "speculative_missing_draft_path", "speculation was asked for without a drafter", "The draft model's path is not set."),
    ("drafter", "speculative_disaggregation_unsupported", "speculation and disaggregation do not work together in this release", "Refused by the engine."),
    ("drafter", "speculative_grammar_incompatible", "speculation and constrained output do not work together in this release", "Refused by the engine."),
    ("drafter", "drafter_mismatch", "the drafter does not fit the target model", "Its configuration or tensors were made for another model."),
    ("weights", "weights_corrupt", "a weights file is damaged or incomplete", "Cut download or damaged disk."),
    ("weights", "missing_model_file", "a file of the model is missing", "The folder is not there, or the snapshot is incomplete."),
    ("weights", "trust_remote_code_required", "the model brings its own code and was not allowed to run it", "Needs consent."),
    ("weights", "hf_auth_gated", "the model is gated and the token missing or not accepted", "Access must be granted first."),
    ("weights", "hf_not_found", "the repository or revision does not exist on the hub", "Or it is private and no token was given."),
    ("weights", "network_transfer_failed", "a network transfer failed", "Hub, peer or fabric not reachable."),
    ("arguments", "unknown_argument", "the engine does not accept its command line", "An option is unknown to this release, ambiguous, or its value is not allowed."),
    ("arguments", "unsupported_flag_combination", "the engine refuses this combination of options", "Each is valid, together they are not."),
    ("host", "port_in_use", "the port is taken by another process", "SGLang may even print its readiness line: its warm-up asks the other server."),
    ("host", "permission_denied", "access to a file or device was denied", "User, mode or sandboxing of the unit."),
    ("host", "executable_missing", "the unit's program does not exist", "systemd could not execute it."),
    ("liveness", "scheduler_watchdog_timeout", "a scheduler made no progress and SGLang's watchdog ended it", "A hang, not an exception."),
    ("liveness", "scheduler_hang", "the scheduler no longer answers", "Alive but stuck; the process that complains is a victim."),
    ("liveness", "running_but_dead", "the server answers but cannot generate any more", "Its parent outlived the processes that do the work."),
    ("liveness", "health_check_false_negative", "a health check failed although the engine was working", "A long prefill delays the probe."),
    ("liveness", "health_probe_overload", "health probes piled up until the engine failed", "Each probe generates a token; too many at too short a distance."),
    ("liveness", "warmup_failed_proxy", "the engine's own warm-up request went to a proxy", "http_proxy is set for the unit."),
    ("liveness", "start_timeout", "loading takes longer than the unit's TimeoutStartSec", "systemd ended a start that was still going on."),
    ("other", "engine_core_failed", "vLLM's engine core failed and the log does not say why", "Only the consequence was printed."),
    ("other", "none", "nothing failed", ""),
    ("other", "unknown", "the cause is not known", "No rule fits; the whole exception stands in the report."),
)  # fmt: skip

_GRAPH_FILE = r"(?:cuda_?graph|graph_runner)[^\n:/]{0,80}"
_CAPTURE_FRAMES = (
    _GRAPH_FILE + r":(?:_?capture\w*|run_once|_end_current_segment|_?warmup_and_capture\w*|init_device_graphs)"
    r"|:(?:init_cuda_graphs?|init_device_graphs?|capture_model|capture_one_batch_size|_capture_cudagraphs?|capture_graph|init_decode_cuda_graph\w*|_dummy_run_capture)\b"
)
_REPLAY_FRAMES = _GRAPH_FILE + r":(?:replay\w*|_?replay_prepare|populate\w*|_grouped_foreach_copy_|fill_from\w*|post_fill\w*|load_batch\w*|copy_from\w*|execute\w*)"
_WEIGHT_FRAMES = (
    r":(?:create_weights|load_model|load_weights\w*|_?initialize_model|process_weights_after_loading|_load_weights|weight_loader\w*|load_and_\w+)\b"
    r"|model_loader/|weight_utils\.py"
)
_SPEC_FILES = r"(?:speculative/|spec_decode/|dflash_|eagle_|dspark_|multi_layer_eagle|ngram_worker|spec_utils|dflash\.py|eagle\.py|spec_info)"
_SPEC_FRAMES = _SPEC_FILES
_DRAFT_FRAMES = (
    r"(?:dflash_worker|eagle_worker|dspark_worker|draft_worker|multi_layer_eagle_worker|spec_worker|/speculative/|spec_decode/|models/dflash|_eagle3?\.py|_nextn\.py)"
    r"|:(?:init_draft\w*|load_draft\w*|_?build_draft\w*|maybe_init_draft_worker|init_model_worker_draft)\b"
)
_OOM = (
    r"CUDA out of memory|HIP out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"
    r"|[Cc]uda failure (?:\d+ )?'out of memory'|hipErrorOutOfMemory|torch\.(?:cuda\.)?OutOfMemoryError|^OutOfMemoryError|XPU out of memory"
    r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED"
)
_BUG_TYPES = (
    r"^(?:builtins\.)?(?:AttributeError|TypeError|IndexError|KeyError|AssertionError|UnboundLocalError|NameError|ZeroDivisionError|NotImplementedError"
    r"|ValueError|RuntimeError|torch\._dynamo\.\S+)$"
)

# The rule for a compiler's answer: names of compilers and of what starts them.
_COMPILER = (
    r"ninja: build stopped|Ninja build failed|Error building extension|[Nn]inja is required|nvcc error|nvcc fatal|error: command '\S{0,200}(?:nvcc|gcc|g\+\+|cc|ninja)\S*' failed"
    r"|\['ninja'|\[\"ninja|ninja -v|returned non-zero exit status.{0,80}(?:nvcc|ninja|gcc|cc1)|(?:nvcc|ninja|gcc|clang|tvm_ffi)\S{0,200}['\",].{0,2000}returned non-zero exit status"
    r"|NVRTC_ERROR_COMPILATION|NVRTC (?:error|compilation)|nvrtc: error|Failed to (?:JIT )?compile|[Cc]ompilation (?:failed|error)|CompilationError"
    r"|fatal error: \S+: No such file or directory|Failed to find C compiler|Assertion error \([^)]{0,300}/jit/[^)]{0,200}\)|CUDA_ERROR_INVALID_IMAGE|\bcicc\b"
    r"|CUDA_ERROR_INVALID_PTX|DeepGEMM.{0,80}compile|identifier \"[^\"]{1,100}\" is undefined|InductorError|BackendCompilerFailed"
)

ROWS: tuple[Row, ...] = (
    # ---- the command line and its combinations
    Row("config_key_refused", "unknown_argument", pattern=r"Unsupported config option|--model-path is required|unrecognized arguments|^SystemExit: .{0,60}error:",
        why="The merger of --config raises ValueError for keys that this release refuses."),
    # ---- packages and libraries
    Row("undefined_symbol", "package_mismatch", pattern=r"undefined symbol|symbol lookup error",
        why="A compiled extension was built against another torch or CUDA."),
    Row("sgl_kernel_other_cuda", "package_mismatch",
        pattern=r"common_ops(?s:.{0,6000})lib(?:cudart|cublas|cublasLt|nvrtc|torch\w*|c10\w*)\.so[.\d]*: cannot open shared object file",
        why="The kernels were built for another CUDA major version than the installed runtime."),
    Row("torch_library", "package_mismatch", pattern=r"lib(?:torch\w*|c10\w*)\.so[.\d]*: cannot open shared object file",
        why="torch brings these itself: the extension belongs to another torch."),
    Row("shared_object_missing", "missing_system_library",
        pattern=r"lib[\w.+-]+\.so[.\d]*: cannot open shared object file|(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found|Could not find shared object file|libnvidia-ml\.so",
        why="The dynamic loader names the file it did not find."),
    Row("common_ops", "package_mismatch", pattern=r"Could not load any common_ops library|Could not run '(?:sgl_kernel|flashinfer|torchvision|_C)\S*::"
        r"|_OpNamespace' '\w+' object has no attribute|operator \S+::\S+ does not exist",
        why="The kernel package has no build for this CUDA, torch or GPU: the operator is not registered."),
    Row("package_versions", "package_mismatch",
        pattern=r"is installed with version \S+, which is less than|less than the minimum required version|PackageNotFoundError|DistributionNotFound|VersionConflict"
        r"|does not recognize this architecture|version mismatch.{0,80}(?:flashinfer|sgl|kernel|cubin|torch)|(?:flashinfer|sgl.kernel|torch)\S* .{0,60}version.{0,40}(?:mismatch|does not match)"
        r"|A module that was compiled using NumPy|numpy\.dtype size changed",
        why="A package checks the version of another one."),
    Row("cannot_import", "package_mismatch", type=r"^(?:ImportError|ModuleNotFoundError)$", pattern=r"cannot import name|No module named|partially initialized module",
        why="The interface or module is not in the installed version."),
    Row("module_attribute", "package_mismatch", type=r"^AttributeError$", pattern=r"module '[\w.]+' has no attribute", phases=("launch", "dist_init"),
        why="At import: an interface that the installed version lacks."),
    # ---- driver and initialisation
    Row("driver_old", "driver_too_old",
        pattern=r"NVIDIA driver on your system is too old|driver version is insufficient|cudaErrorInsufficientDriver|CUDA_ERROR_UNSUPPORTED_PTX_VERSION|cudaErrorUnsupportedPtxVersion"
        r"|PTX was compiled with an unsupported toolchain|driver version .{0,40}(?:too old|is older|minimum)",
        why="The runtime asks the driver for its CUDA version."),
    Row("driver_mismatch", "driver_library_mismatch",
        pattern=r"[Dd]river/library version mismatch|LibRmVersionMismatch|NVML/RM version mismatch|unsupported display driver / cuda driver combination|cudaErrorSystemDriverMismatch|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        r"|forward compatibility was attempted on non supported HW|cudaErrorCompatNotSupportedOnDevice",
        why="NVML and CUDA compare kernel module and library."),
    Row("cuda_init", "cuda_init_failed",
        pattern=r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device|Error 80[12]: |system not yet initialized|CUDA unknown error|CUDA driver initialization failed"
        r"|CUDA error: (?:initialization error|invalid device ordinal|system not yet initialized|no CUDA-capable)|cudaErrorInitializationError|CUDA_ERROR_(?:NO_DEVICE|NOT_INITIALIZED|SYSTEM_NOT_READY)"
        r"|cudaGetDeviceCount|Cannot re-initialize CUDA in forked|Torch not compiled with CUDA enabled|No accelerator \(|device_count\(\) > 0|NVMLError_(?:DriverNotLoaded|LibraryNotFound|Uninitialized)",
        why="torch and NVML report that no device can be used."),
    # ---- compilers
    Row("ptxas", "triton_ptxas_mismatch", pattern=r"PTXASError|ptxas (?:fatal|error)|Internal Triton PTX codegen error|`ptxas` (?:failed|stderr)",
        why="Triton runs its own ptxas; it refuses names of GPUs it does not know."),
    Row("toolkit_old", "cuda_toolkit_too_old",
        pattern=r"NVCC version should be >=|nvcc fatal\s*: ?(?:Unsupported gpu architecture|Unknown option|Value '\S+' is not defined)|requires? (?:nvcc|NVCC|CUDA (?:toolkit )?version) ?(?:>=|at least|of)"
        r"|CUDA (?:toolkit|compiler|version) .{0,60}(?:too old|or (?:newer|later|higher) is required|is not supported)|unsupported (?:CUDA|nvcc) version|requires? CUDA (?:toolkit )?(?:>=|1\d\.\d or)",
        why="nvcc or its caller states the version it needs."),
    Row("cuda_home", "cuda_home_invalid",
        pattern=r"(?:[\s'\"=(]|^):/\S{0,300}/(?:bin/)?nvcc\b|: :/\S+: (?:not found|No such file)|CUDA_HOME\S* (?:=|is|points to|directory|path)? ?.{0,120}(?:does not exist|is not a directory|invalid)"
        r"|No such file or directory: '?/\S{0,300}/bin/nvcc|/bin/sh: (?:\d+|line \d+): /\S{0,300}/bin/nvcc: (?:not found|No such file)|^/\S{0,300}/bin/nvcc: (?:not found|No such file)",
        why="The full path of nvcc is built from CUDA_HOME; a leading colon or a wrong folder shows in it."),
    Row("toolkit_missing", "cuda_toolkit_missing",
        pattern=r"CUDA_HOME environment variable is not set|[Cc]ould not find (?:nvcc|CUDA|the CUDA|cuda)|Cannot find (?:nvcc|CUDA)|\bnvcc: (?:command )?not found|No such file or directory: '?nvcc|Unable to find (?:nvcc|CUDA)"
        r"|nvcc (?:was )?not found|CUDA (?:toolkit|installation) (?:was )?not found|Failed to find nvcc|nvcc is (?:required|not (?:available|installed))",
        why="Callers look for nvcc on PATH and in CUDA_HOME."),
    # ---- memory: where it ran out decides
    Row("hicache_refused", "hicache_host_memory", pattern=r"Not enough host memory available|host memory for hierarchical",
        why="The host pool compares its size with what is free, less a reserve."),
    Row("hicache_pin", "hicache_host_memory", frames=r"memory_pool_host|hicache|hiradix_cache|hi_radix",
        pattern=r"CUDA error|out of memory|cudaHost|pin|Cannot allocate|can't allocate|MemoryError|mmap|invalid argument",
        unless=r"illegal memory access|device-side assert triggered", why="Pinned host memory is refused by the driver or by the memlock limit."),
    Row("kv_pool", "kv_pool_too_small",
        pattern=r"[Nn]ot enough memory.{0,40}[Pp]lease try to increase --?mem.fraction|No available memory for the cache blocks|larger than the maximum number of tokens that can be stored in (?:the )?KV cache"
        r"|KV cache is needed, which is larger than the available KV cache memory|max_total_num_tokens.{0,40}(?:<= ?0|is (?:negative|zero|too small))",
        why="What is left of the fraction after the weights is not enough for one request."),
    Row("gpu_busy", "gpu_memory_busy",
        pattern=r"memory capacity is unbalanced|Free memory on device.{0,80}less than desired|GPUs may be occupied by other processes|Error in memory profiling.{0,200}other processes",
        why="The engine compares free memory between GPUs or with what it wants."),
    Row("capture_oom", "cuda_graph_capture_oom", pattern=r"Capture cuda graph failed:(?s:.{0,300}?)(?:" + _OOM + ")", why="The wrapper quotes the inner error."),
    Row("capture_oom_frames", "cuda_graph_capture_oom", pattern=_OOM, frames=_CAPTURE_FRAMES, why="Out of memory below the capture."),
    Row("oom_other_process", "gpu_memory_busy", pattern=_OOM, when={"others_hold_most": True}, why="torch lists the other processes on the GPU with their memory."),
    Row("oom_weights_frames", "gpu_oom_weights", pattern=_OOM, frames=_WEIGHT_FRAMES, unless_frames=r":(?:run_batch|forward_batch_generation|forward_extend|event_loop\w*)\b",
        why="Out of memory while layers are created or filled."),
    Row("oom_weights_phase", "gpu_oom_weights", pattern=_OOM, phases=("weights",), unless_frames=r":(?:run_batch|event_loop\w*)\b", why="The same without telling frames."),
    Row("oom", "gpu_oom", pattern=_OOM, why="Every other place."),
    Row("host_alloc", "host_memory_limit", pattern=r"DefaultCPUAllocator: (?:can't|not enough)|^MemoryError|Cannot allocate memory|std::bad_alloc", why="malloc or mmap was refused without the OOM killer."),
    # ---- disks and ports
    Row("shm", "nccl_shm_too_small",
        pattern=r"creating shared memory segment|/dev/shm.{0,240}(?:No space left|truncat|ENOSPC|too small)|No space left.{0,200}/dev/shm|insufficient shared memory|unable to (?:write to|mmap|allocate shared memory).{0,80}(?:/torch_|shm)",
        why="NCCL and torch create segments in /dev/shm and name them."),
    Row("disk", "disk_full", pattern=r"No space left on device|\bENOSPC\b|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]|Not enough free disk space", why="Errors 28 and 122."),
    Row("port", "port_in_use", pattern=r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]|[Pp]ort \d+ (?:is )?(?:already )?(?:in use|occupied|not available)|failed to listen on any local network address",
        why="bind() says so, for HTTP, ZMQ and the process group alike."),
    # ---- graphs, where the inner error is not one of the above
    Row("custom_ar_frames", "cuda_graph_custom_allreduce", frames=r"custom_all_?reduce\w*\.py:|:register_graph_buffers|quick_all_reduce\w*\.py:", pattern=r"invalid argument|CUDA error|RuntimeError|cuda",
        unless=r"illegal memory access|device-side assert triggered|no kernel image|unspecified launch", phases=("graph_capture", "kv_cache", "dist_init", "weights", "launch", "warmup"),
        why="The custom all-reduce opens IPC handles of the other GPUs' buffers."),
    # ---- GPU architecture and faults
    Row("no_kernel_image", "unsupported_gpu_architecture",
        pattern=r"no kernel image is available|cudaErrorNoKernelImageForDevice|CUDA_ERROR_NO_BINARY_FOR_GPU|[Uu]nsupported (?:GPU |gpu |CUDA |SM )?arch|is not compatible with the current PyTorch installation"
        r"|(?:not (?:supported|compatible)|unsupported) (?:on|with|for) (?:this GPU|SM ?_?\d+|sm_\d+|compute capability|device capability)|(?:requires?|only supports?|only supported on).{0,60}(?:[Cc]ompute [Cc]apability|SM ?[<>=]{0,2} ?\d{2,3}|sm_?\d{2,3}|Hopper|Blackwell GPUs)"
        r"|out of resource: shared memory|OutOfResources|cudaErrorInvalidDeviceFunction|invalid device function",
        why="The loader finds no code for this architecture, a backend asks for another one, or a kernel needs more shared memory than this GPU has."),
    Row("ecc", "gpu_xid_hardware", pattern=r"uncorrectable ECC error|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE|cudaErrorHardwareStackError|uncorrectable NVLink error", why="CUDA hands the GPU's own fault on."),
    Row("gpu_lost", "gpu_fallen_off_bus", pattern=r"GPU is lost|NVMLError_GpuIsLost|CUDA_ERROR_DEVICE_UNAVAILABLE|Unable to determine the device handle for", why="NVML cannot reach the GPU any more."),
    Row("device_assert", "cuda_device_side_assert", pattern=r"device-side assert triggered|cudaErrorAssert|CUDA_ERROR_ASSERT|Assertion `?[^\n]{1,200}`? failed\.?$", unless=r"INTERNAL ASSERT|^AssertionError",
        why="The device reports the assert to the next call."),
    Row("illegal_access", "cuda_illegal_memory_access",
        pattern=r"illegal memory access|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|misaligned address|cudaErrorMisalignedAddress|an illegal instruction was encountered|hipErrorIllegalAddress|Warp Illegal Address|invalid program counter",
        why="The device reports the fault to the next call."),
    # ---- jit, general
    Row("jit", "jit_compile_failed", pattern=_COMPILER, unless=r"Could not find|^torch\._dynamo\.exc\.Unsupported", why="A compiler ran and refused."),
    # ---- communication
    Row("collective_timeout", "nccl_collective_timeout",
        pattern=r"collective operation timeout|failure detected by watchdog|Watchdog caught|watchdog.{0,80}(?:got stuck|stuck for)|HeartbeatMonitor|checkTimeout|Timed out waiting \d+ ?ms for (?:recv|send)|NCCL.{0,80}[Tt]imeout|Timeout at NCCL",
        why="torch's watchdog ends the process when one rank does not arrive."),
    Row("transfer_backend", "network_transfer_failed", pattern=r"\bBAD_STATUS\b|\bNIXL|nixl\w*Error|transfer_?engine.{0,200}(?:fail|error)|IBV_WC_\w+|ibv_\w+ failed|\bUCX (?:ERROR|error)",
        why="Transfer libraries for KV caches and their fabric."),
    Row("nccl", "nccl_error", pattern=r"NCCL (?:[Ee]rror|failure)|nccl(?:System|UnhandledCuda|Internal|InvalidUsage|InvalidArgument|Remote)Error|unhandled (?:system|cuda) error|DistBackendError|NCCLError",
        why="The binding raises with NCCL's code."),
    # ---- graphs
    Row("capture_wrapper", "cuda_graph_capture_failed", pattern=r"Capture cuda graph failed|when stream is capturing|cudaErrorStreamCapture|CUDA_ERROR_STREAM_CAPTURE|previous error during capture|num_active_captures_|captures_underway",
        why="The capture wraps any RuntimeError; the stream refuses calls that cannot be recorded."),
    Row("capture_frames", "cuda_graph_capture_failed", frames=_CAPTURE_FRAMES, unless_frames=_REPLAY_FRAMES, when={"has_exception": True},
        unless=r"^KeyboardInterrupt|^SystemExit", why="Any other error below the capture."),
    Row("replay_raised", "cuda_graph_replay_failure", raised_in=_GRAPH_FILE + r":", unless_frames=_CAPTURE_FRAMES, why="Raised by the code that fills and launches a captured graph."),
    Row("replay_frames", "cuda_graph_replay_failure", frames=_REPLAY_FRAMES, unless_frames=_CAPTURE_FRAMES, type=_BUG_TYPES, why="Below a replay."),
    Row("replay_not_permitted", "cuda_graph_replay_failure", pattern=r"CUDA error: operation not permitted|cudaErrorNotPermitted", unless=r"when stream is capturing", phases=RUNNING, when={"graphs_off": False},
        why="After capture this error means a call that a graph does not allow."),
    Row("replay_none_with_ep", "cuda_graph_replay_failure", pattern=r"'NoneType' object has no attribute '(?:dtype|shape|data_ptr|numel)'", raised_in=r"dflash_worker\w*\.py:", phases=RUNNING,
        when={"drafter": True, "ep_above": 1, "graphs": True}, why="DFLASH leaves num_token_non_padded unset with expert parallelism; only a replay reads it (0.5.11-0.5.12)."),
    # ---- speculation
    Row("spec_no_path", "speculative_missing_draft_path",
        pattern=r"(?:requires?|[Mm]ust (?:set|specify|provide)|[Mm]issing|without).{0,60}speculative.draft.model|speculative.draft.model.path.{0,60}(?:required|must|is None|not set|missing)",
        why="The resolver wants the path."),
    Row("spec_target_as_draft", "speculative_missing_draft_path", type=r"^AttributeError$", pattern=r"no attribute '(?:set_embed\w*|hot_token_id|get_embed_and_head|set_embed_and_head)'",
        why="Without a path the target is loaded as its own drafter and lacks the drafter's methods."),
    Row("spec_disaggregation", "speculative_disaggregation_unsupported", pattern=r"(?:speculative|EAGLE|DFLASH|DSPARK|MTP)(?s:.{0,120})disaggregat|disaggregat(?s:.{0,120})(?:speculative|EAGLE|DFLASH|DSPARK)",
        why="Refused in words."),
    Row("spec_grammar", "speculative_grammar_incompatible", pattern=r"(?i)(?:speculative|EAGLE|DFLASH|spec.?v2)(?s:.{0,160})(?:grammar|structured output|constrained|json_schema|guided)|(?:grammar|structured output|constrained decoding)(?s:.{0,160})(?:speculative|EAGLE|DFLASH)",
        why="Refused in words."),
    Row("spec_model_hook", "speculative_unsupported_model",
        pattern=r"set_\w*layers_to_capture|does not (?:support|implement) (?:EAGLE3?|DFLASH|DFlash|DSPARK|speculative|MTP)(?! on device)|(?:EAGLE3?|DFLASH|DSPARK) is (?:not|only) supported (?:for|by) .{0,40}model",
        unless=r"AttentionBackend|backend", why="The target model lacks the hook that the drafter reads from."),
    Row("spec_kv_pages", "speculative_unsupported_model", frames=r":unify_kv_cache_spec_page_size|:unify_hybrid_kv_cache_specs|:_get_kv_cache_groups\w*", why="A hybrid model's KV pages cannot be unified with the drafter's."),
    Row("spec_backend", "unsupported_flag_combination", pattern=r"(?:does not|doesn't) support speculative|[Ss]peculative decoding is (?:currently )?not supported with|not supported by \w+ on device", why="Refused in words."),
    Row("drafter_dimensions", "drafter_mismatch", pattern=r"(?:DFLASH|DSPARK|EAGLE3?) (?:target_hidden|fc\.weight|target_layer_ids|mask_token\w*)", why="The drafter's contract, in the engine's own words."),
    Row("drafter_config", "drafter_mismatch", phases=(*LOADING, "graph_capture", "warmup"),
        pattern=r"(?:DFLASH|DFlash|DSPARK|EAGLE3?|[Dd]raft(?:er)?)\b(?s:.{0,160})(?:mismatch|out.of.range|outside the target|does not match|do not match|not match|must (?:equal|match)|requires? draft|must be (?:a list|non-empty|positive|>=|an int)|invalid)",
        unless=r"pp_size|pipeline|dp.attention|page_size|disaggregat|--speculative-draft-model-path|attention.backend", type=r"^(?:ValueError|RuntimeError|AssertionError|TypeError|KeyError)$",
        why="The drafter's contract is checked when it is loaded, and once more when the first hidden states arrive."),
    Row("drafter_config_raised", "drafter_mismatch", type=r"^(?:ValueError|KeyError|TypeError)$", raised_in=r"dflash_utils\.py:(?:parse_\w*config|_\w*config\w*|build_target_layer_ids|_?get_\w+|_?resolve\w*)", why="Raised while the drafter's config is read."),
    Row("drafter_arch", "drafter_mismatch", pattern=r"Cannot find model module|[Mm]odel architectures? .{0,200}(?:not supported|is not a registered)|is not a registered model", frames=_DRAFT_FRAMES, why="The drafter's architecture is unknown to this release."),
    Row("drafter_weights_shape", "drafter_mismatch", type=r"^(?:AssertionError|RuntimeError|ValueError|KeyError)$", frames=r"(?s)" + _DRAFT_FRAMES,
        raised_in=r":(?:weight_loader\w*|default_weight_loader|load_weights\w*|_?load_\w*weight\w*)$", why="A tensor of the drafter has another shape than its config says."),
    Row("target_arch", "package_mismatch", pattern=r"Cannot find model module|[Mm]odel architectures? .{0,200}not supported|is not a registered model", why="The release does not know the target's architecture."),
    # ---- the engine's own warm-up
    Row("warmup_timeout", "scheduler_hang", pattern=r"Read timed out|ReadTimeout|TimeoutError", when={"warmup_error": True}, why="The warm-up's own request was never answered."),
    Row("warmup_proxy", "warmup_failed_proxy", pattern=r"ProxyError|[Pp]roxy|<Response \[50[2347]\]>|<Response \[40[37]\]>", when={"warmup_error": True}, why="The warm-up asks its own address; a 502 or 503 comes from something in between."),
    # ---- weights and the hub
    Row("trust", "trust_remote_code_required", pattern=r"trust_remote_code|execute the (?:configuration|model(?:ing)?|tokenizer) file|Do you wish to run the custom code|contains custom code which must be executed",
        unless=r"unexpected keyword argument", why="transformers asks, and a unit has nobody to answer."),
    Row("gated", "hf_auth_gated", pattern=r"access(?:ing)? (?:a )?gated repo|GatedRepoError|restricted and you are not in the authorized list|awaiting a review|token (?:is invalid|has expired)|Invalid (?:user )?token|Access to model .{1,200} is restricted",
        why="The hub answers 401 or 403 and says so."),
    Row("hub_404", "hf_not_found", pattern=r"Repository ?Not ?Found|RevisionNotFound|(?<!Local)EntryNotFoundError|404 Client Error|is not a valid git identifier|not a valid model identifier|Revision Not Found", why="The hub answers 404, or 401 to those without a token."),
    Row("hub_401", "hf_auth_gated", pattern=r"40[13] Client Error(?s:.{0,300})(?:huggingface|hf\.co)|Invalid credentials in Authorization", why="A refusal without further words."),
    Row("corrupt", "weights_corrupt",
        pattern=r"Safetensor(?:s?)Error|MetadataIncompleteBuffer|InvalidHeader\w*|HeaderToo(?:Large|Small)|incomplete metadata|invalid (?:load key|header)|PytorchStreamReader|UnpicklingError|[Cc]hecksum (?:mismatch|verification|does not match)|sha256.{0,60}(?:mismatch|does not match)|Consistency check failed|file is (?:corrupt|truncated)|not a ZIP archive",
        why="The reader of the file refuses it."),
    Row("path_missing", "missing_model_file",
        pattern=r"does not appear to have (?:a file|files) named|Repo id must be in the form|Unrecognized model in |Cannot find any (?:model )?weights|[Nn]o (?:safetensors|model) (?:weights|files) (?:found|were)|Can't load (?:tokenizer|the model|the configuration|image processor|feature extractor)|Incorrect path_or_model_id"
        r"|(?:No such file or directory|FileNotFoundError|does not exist).{0,300}(?:\.safetensors|\.json|\.model|\.bin|/models?/|\.gguf|tokenizer)|couldn't find (?:any files|it in the cached)",
        unless=r"couldn't connect|Connection|nvcc", why="transformers and the loader name what they miss."),
    Row("hub_network", "network_transfer_failed",
        pattern=r"LocalEntryNotFoundError|couldn't connect to|Max retries exceeded|(?:Connect|Read)Timeout(?:Error)?|IncompleteRead|ChunkedEncodingError|Name or service not known|Temporary failure in name resolution|NameResolutionError|Network is unreachable|outgoing traffic has been disabled|5\d\d Server Error",
        unless=r"gloo|TCPStore|ProcessGroup|127\.0\.0\.1|localhost|0\.0\.0\.0", why="HTTP clients name the failure."),
    # ---- permissions
    Row("permission", "permission_denied", pattern=r"PermissionError|Permission denied|\[Errno 13\]|\[Errno 1\] Operation not permitted|Read-only file system|\[Errno 30\]|[Ii]nsufficient [Pp]ermissions", why="Errors 1, 13 and 30."),
    # ---- refusals by the argument resolver
    Row("refused_in_resolver", "unsupported_flag_combination", type=r"^(?:ValueError|AssertionError|NotImplementedError|RuntimeError)$",
        raised_in=r"/(?:server_args\w{0,40}|arg_groups/\S{1,80}|\w{1,60}_hook|overrides|model_override\w{0,40}|validation\w{0,40}|arg_utils|config/\S{1,80}|config)\.py:", why="Raised by the code that checks options against each other."),
    Row("refused_in_words", "unsupported_flag_combination", type=r"^(?:ValueError|AssertionError|NotImplementedError)$",
        pattern=r"(?:not (?:supported|compatible|allowed)|incompatible|cannot be (?:used|enabled|combined)|mutually exclusive|only (?:supported|works|compatible)) (?:with|when|together|in combination|for|if)|must be divisible|does not support .{0,60}(?:backend|page|overlap|attention|parallel)|requires? (?:page_size|topk|--)",
        phases=(*LOADING, "graph_capture"), why="Refused in words while starting."),
    # ---- versions of drafting code
    Row("spec_foreign_tool", "speculative_version_mismatch", type=r"^(?:AttributeError|TypeError|ImportError)$", frames=r"(?i)specforge|spec_forge",
        why="A training tool calls the engine's inner interfaces."),
    Row("spec_pool_missing", "speculative_version_mismatch", type=r"^AttributeError$", pattern=r"'NoneType' object has no attribute 'device'", frames=r"schedule_batch\.py:init_new", why="The caller did not allocate the pools that this release expects."),
    # ---- a program error in the drafting code
    Row("spec_bug_nearest", "speculative_worker_bug", type=_BUG_TYPES, when={"nearest_engine_frame": _SPEC_FILES}, why="The innermost frame of the engine is drafting code."),
    Row("spec_bug_attention", "speculative_worker_bug", type=r"^(?:AssertionError|IndexError|KeyError|AttributeError|TypeError|ValueError|RuntimeError)$", frames=_SPEC_FRAMES,
        when={"nearest_engine_frame": r"(?:attention/|attn|_backend\.py|schedule_batch|memory_pool|allocator|radix_cache|hisparse)"}, phases=RUNNING,
        why="Called by drafting code with a batch that the attention backend or the cache does not accept."),
)  # fmt: skip

LINE_ROWS: tuple[Row, ...] = (
    Row("argparse", "unknown_argument", "line", r"(?:^|: )error: (?:unrecognized arguments|ambiguous option|argument \S.{0,200}(?:invalid|expected)|the following arguments are required|.{0,80}invalid choice|too few arguments|invalid)",
        why="argparse prints usage and ends with status 2."),
    Row("loader", "missing_system_library", "line", r"error while loading shared libraries: ", why="ld.so, status 127."),
    Row("no_module", "package_mismatch", "line", r"^\S*python[\d.]*: (?:No module named|Error while finding module specification)", phases=("launch",), why="python -m does not find the engine in this environment."),
    Row("bind", "port_in_use", "line", r"error while attempting to bind on address|[Aa]ddress already in use|EADDRINUSE", why="uvicorn prints it as a log line and goes on to shut down."),
    Row("shm_line", "nccl_shm_too_small", "line", r"creating shared memory segment|/dev/shm.{0,120}(?:No space|too small)", why="NCCL's own warning."),
    Row("device_assert_line", "cuda_device_side_assert", "line", r"(?:block: \[|thread: \[).{0,200}Assertion.{0,300}failed|Assertion `?index out of bounds|device-side assert triggered", why="The device prints the assert itself."),
    Row("rocm_all", "cuda_graph_replay_failure", "line", r"^Memory access fault by GPU", phases=("warmup", "serving"), when={"faulting_processes_above": 1, "graphs": True, "served_nothing_yet": True},
        why="The same fault on every GPU at once, on the first batch after the capture."),
    Row("rocm", "cuda_illegal_memory_access", "line", r"^Memory access fault by GPU", why="The ROCm runtime ends the process."),
    Row("illegal_line", "cuda_illegal_memory_access", "line", r"illegal memory access|cudaErrorIllegalAddress", why="C++ text without a Python exception."),
    Row("collective_line", "nccl_collective_timeout", "line", r"collective operation timeout|failure detected by watchdog|watchdog.{0,80}got stuck|HeartbeatMonitor", why="torch's watchdog."),
    Row("oom_line", "gpu_oom", "line", r"(?:CUDA|HIP) out of memory\. Tried", why="Printed without a traceback."),
    Row("nccl_line", "nccl_error", "line", r"NCCL (?:error|WARN .{0,80}(?:failed|error))|ncclSystemError|ncclUnhandledCudaError", why="NCCL's own text."),
    Row("topk_length", "speculative_worker_bug", "line", r"length of new_indices: \d+ != length of topk_p", why="The only hint before the batch state is inconsistent."),
    Row("disk_line", "disk_full", "line", r"No space left on device", why="Printed by whoever could not write."),
    Row("driver_line", "driver_library_mismatch", "line", r"[Dd]river/library version mismatch", why="NVML."),
    Row("hicache_last", "hicache_host_memory", "line", r"Allocating [\d.]+ ?G[iB]+ host memory for hierarchical", when={"last_of_process": True}, why="The last thing the rank did."),
    Row("engine_core_line", "engine_core_failed", "line", r"Engine core proc \S+ died unexpectedly|Engine core initialization failed", why="The consequence, printed by the API server."),
    Row("corrupt_line", "weights_corrupt", "line", r"Safetensor(?:s?)Error|MetadataIncompleteBuffer", why="Printed without a traceback."),
)  # fmt: skip

NATIVE_ROWS: tuple[Row, ...] = (
    Row("native_timeout", "nccl_collective_timeout", "native", r"collective operation timeout|failure detected by watchdog|Watchdog caught|HeartbeatMonitor|watchdog.{0,80}got stuck", why="torch's watchdog ends the process by abort."),
    Row("native_illegal", "cuda_illegal_memory_access", "native", r"illegal memory access|cudaErrorIllegalAddress", why="An asynchronous CUDA error, noticed in a C++ thread."),
    Row("native_assert", "cuda_device_side_assert", "native", r"device-side assert triggered|cudaErrorAssert", why="The same."),
    Row("native_oom", "gpu_oom", "native", r"CUDA out of memory|CUDA error: out of memory", why="The same."),
    Row("native_shm", "nccl_shm_too_small", "native", r"creating shared memory segment|/dev/shm.{0,80}No space", why="NCCL's own text."),
    Row("native_nccl_error", "nccl_error", "native", r"SIGABRT(?s:.{0,4000})(?:DistBackendError|NCCL error)", why="A C++ NCCL error nobody caught."),
    Row("native_rocm_all", "cuda_graph_replay_failure", "native", r"Memory access fault by GPU", phases=("warmup", "serving"), when={"faulting_processes_above": 1, "graphs": True, "served_nothing_yet": True},
        why="The same fault on every GPU at once, on the first batch after the capture: the graph's inputs, not one GPU."),
    Row("native_rocm", "cuda_illegal_memory_access", "native", r"Memory access fault by GPU", why="The ROCm runtime aborts."),
    Row("native_bad_alloc", "host_memory_limit", "native", r"std::bad_alloc", why="operator new was refused."),
    Row("native_nccl", "native_segfault_nccl", "native", r"(?:SIGSEGV|SIGBUS)(?s:.{0,8000})(?:libnccl|pynccl|nccl[A-Z]\w+|\bnccl_?\w*\.py|ncclProxy)", why="A frame or the faulting library is NCCL's."),
    Row("native_segv", "native_segfault", "native", r"SIGSEGV|SIGBUS", why="The signal."),
    Row("native_abrt", "native_abort", "native", r"SIGABRT|SIGILL|SIGFPE|SIGTRAP|SIGSYS", why="The signal."),
)  # fmt: skip

# Xid numbers (NVIDIA's catalogue): who is to blame.
XID_FALLEN_OFF = frozenset({79})
XID_HARDWARE = frozenset({38, 46, 48, 54, 56, 57, 58, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 73, 74, 76, 77, 78, 80, 81, 82, 92, 94, 95, 110, 119, 120, 121, 122, 123, 136, 140, 143, 145, 149, 150, 154, 155, 156, 157, 158, 160, 162})
XID_APPLICATION = frozenset({6, 8, 11, 13, 24, 25, 31, 32, 37, 39, 43, 44, 59, 68, 69, 70, 71, 72})
XID_CLEANUP = frozenset({45, 109, 137})


def xid_kind(code: int) -> str:
    """fallen_off, hardware, application, cleanup or other."""
    if code in XID_FALLEN_OFF:
        return "fallen_off"
    if code in XID_CLEANUP:
        return "cleanup"
    if code in XID_APPLICATION:
        return "application"
    return "hardware" if code in XID_HARDWARE else "other"


class CauseError(ValueError):
    """A row added by the user is not usable; the message names it."""


_COMPILED: dict[str, re.Pattern[str]] = {}


def search(pattern: str, text: str) -> bool:
    compiled = _COMPILED.get(pattern)
    if compiled is None:
        compiled = _COMPILED[pattern] = re.compile(pattern, re.MULTILINE)
    return bool(compiled.search(text))


def words() -> set[str]:
    """The words of the patterns: what programs print when they fail."""
    text = " ".join(row.pattern for row in all_rows())
    return set(re.findall(r"(?<![A-Za-z\\])[a-z]{2,20}(?![A-Za-z])", text.lower()))


def line_matters(text: str, user: Sequence[Row] = ()) -> bool:
    """One look for all rows of scope `line`."""
    return bool(_any_line().search(text)) or any(search(row.pattern, text) for row in user if row.scope == "line")


def _any_line() -> re.Pattern[str]:
    compiled = _COMPILED.get("\0lines")
    if compiled is None:
        compiled = _COMPILED["\0lines"] = re.compile("|".join(f"(?:{row.pattern})" for row in LINE_ROWS), re.MULTILINE)
    return compiled


def user_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows from group_vars: {id, cause, pattern, scope, type, frames, raised_in, unless, phases}."""
    allowed = {"id", "cause", "scope", "pattern", "type", "frames", "raised_in", "unless", "unless_frames", "phases", "why"}
    out = []
    for number, row in enumerate(rows):
        name = str(row.get("id") or f"row {number + 1}")
        unknown = sorted(set(row) - allowed)
        if unknown:
            raise CauseError(f"sglang_crash_causes: {name}: unknown key {unknown[0]} (known: {', '.join(sorted(allowed))})")
        if not row.get("cause") or not any(row.get(key) for key in ("pattern", "type", "frames", "raised_in")):
            raise CauseError(f"sglang_crash_causes: {name}: needs a cause and one of pattern, type, frames, raised_in")
        scope = str(row.get("scope", "exception"))
        if scope not in ("exception", "line", "native"):
            raise CauseError(f"sglang_crash_causes: {name}: scope must be exception, line or native")
        for key in ("pattern", "type", "frames", "raised_in", "unless", "unless_frames"):
            try:
                re.compile(str(row.get(key, "")))
            except re.error as error:
                raise CauseError(f"sglang_crash_causes: {name}: {key} is not a regular expression: {error}") from error
        values = {key: str(row[key]) for key in allowed - {"phases", "scope", "id"} if row.get(key)}
        out.append(Row(id=name, scope=scope, phases=tuple(str(phase) for phase in row.get("phases") or ()), **values))  # type: ignore[arg-type]
    return out


def all_rows() -> tuple[Row, ...]:
    return ROWS + NATIVE_ROWS + LINE_ROWS


def document() -> str:
    """docs/causes.md: what each cause means, what shows it, and what to do, from the tables themselves."""
    from . import remedies

    rows: dict[str, list[Row]] = {}
    for row in all_rows():
        rows.setdefault(row.cause, []).append(row)
    kinds = {
        "graphs": "CUDA graphs", "memory": "Memory of the GPUs", "gpu": "GPUs", "driver": "Driver and initialisation", "nccl": "Communication", "native": "Native code",
        "packages": "Packages and compilers", "drafter": "Drafter", "weights": "Weights and the hub", "arguments": "Command line", "host": "Host", "liveness": "Alive, but not well", "other": "The rest",
    }  # fmt: skip
    out = [
        "# Causes and remedies",
        "",
        "What `journal_crash` can find, and what then helps. This page is written from the tables: change",
        "`module_utils/dflash_fleet/causes.py` or `remedies.py`, then run",
        "",
        "    PYTHONPATH=module_utils python -m dflash_fleet.causes > docs/causes.md",
        "",
        "`unknown` is an answer too: the whole exception is in the report, and no row fits. It is better than a guess.",
        "Remedies are listed best first; those marked *automatic* may be named in `sglang_fallbacks`, the others wait for a",
        "person. One that was in effect in the failed run is not offered again, nor one that is wrong for its release.",
        "",
        "## Rows of your own",
        "",
        "Add rows to `sglang_crash_causes` in group_vars; they are tried before the built-in ones:",
        "",
        "    sglang_crash_causes:",
        "      - id: our_tokenizer",
        "        cause: tokenizer_of_last_year      # any name",
        "        type: UnicodeDecodeError           # regular expressions, all that are given must be found",
        "        frames: our_tokenizer\\.py          # in file:function of any frame",
        "",
        "Keys: `id`, `cause`, `scope` (exception, line, native), `pattern`, `type`, `frames`, `raised_in`, `unless`, `unless_frames`, `phases`, `why`.",
        "",
    ]
    for kind, title in kinds.items():
        chosen = [cause for cause in CAUSES.values() if cause.kind == kind and cause.id not in ("none", "unknown")]
        if not chosen:
            continue
        out += [f"## {title}", ""]
        for cause in chosen:
            out += [f"### {cause.id}", "", f"{cause.summary[:1].upper()}{cause.summary[1:]}. {cause.meaning}".strip(), ""]
            reasons = list(dict.fromkeys(row.why for row in rows.get(cause.id, []) if row.why))
            if reasons:
                out += ["Shown by: " + " ".join(reasons), ""]
            ids_here = remedies.FOR_CAUSE.get(cause.id, ())
            if ids_here:
                out += ["| remedy | set | cost | source |", "|---|---|---|---|"]
            for identity in ids_here:
                remedy = remedies.REMEDIES[identity]
                setting = ", ".join(f"`{name}: {_shown(value)}`" for name, value in remedy.set.items()) or "by hand"
                span = f" (from {remedy.since})" if remedy.since else f" (before {remedy.before})" if remedy.before else ""
                mark = ", *automatic*" if remedy.automatic else ""
                out.append(f"| {identity}{mark}: {remedy.summary}{span} | {setting} | {remedy.cost} | {remedy.source} |")
            out.append("")
    return "\n".join(out).rstrip() + "\n"


def _shown(value: Any) -> str:
    """A setting as it is written in YAML; values that follow from the run in words."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(item)}" for name, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    words_for = {
        "{mem_fraction_lower}": "0.04 less", "{mem_fraction_higher}": "0.04 more", "{other_attention_backend}": "another one", "{other_port}": "another one",
    }  # fmt: skip
    return words_for.get(str(value), str(value))


if __name__ == "__main__":
    print(document(), end="")
