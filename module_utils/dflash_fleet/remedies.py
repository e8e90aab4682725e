"""The one table of remedies: what to set, what it costs, where that is known from, and for which releases it is right.

`automatic` remedies can be taken by the fallback ladder (variable `sglang_fallbacks`) without a person; they change one
setting and cost speed at most. Everything that installs, upgrades or touches hardware waits for a person.

Figures: 8x RTX PRO 6000 (PCIe), Kimi K2.6 with a DFlash drafter, expert parallelism 8, CUDA graphs off: 86 tok/s with one
stream and 1146 at peak; tensor parallelism 8 with graphs: 97.9 with one stream; expert parallelism with graphs: 1493 at peak.
"""

# ruff: noqa: E501  (a row of the table is read in one piece)
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import releases

UPGRADE_TO = "0.5.20"


@dataclass(frozen=True)
class Remedy:
    """One thing to do. `set` uses the project's variables; values of the form `{name}` are filled from the run."""

    id: str
    summary: str
    set: Mapping[str, Any] = field(default_factory=dict)
    cost: str = ""
    source: str = ""
    automatic: bool = False
    since: str = ""  # first release it is right for
    before: str = ""  # first release it is no longer right for


def _remedy(identity: str, summary: str, settings: Mapping[str, Any] | None = None, cost: str = "", source: str = "", **more: Any) -> Remedy:
    return Remedy(identity, summary, settings or {}, cost, source, **more)


def _extra(**options: Any) -> dict[str, Any]:
    return {"sglang_extra_args": {name.replace("_", "-"): value for name, value in options.items()}}


def _environment(**values: str) -> dict[str, Any]:
    return {"sglang_environment": values}


_ALL = (
    # ---- graphs
    _remedy("upgrade_sglang", f"upgrade SGLang to {UPGRADE_TO} or later: CUDA graphs stay on", {"sglang_version": UPGRADE_TO},
            "a new environment and one restart; nothing at run time", "the draft batch is complete and the graph tolerates a missing source from 0.5.20 on (read in the releases' source)", before=UPGRADE_TO),
    _remedy("use_tp8", "tensor parallelism alone: CUDA graphs stay on", {"sglang_profile": "tp8"},
            "97.9 tok/s for one stream; the higher peak of expert parallelism (1493) is given up", "with ep 1 the unset field is never copied (read in 0.5.11)", automatic=True),
    _remedy("disable_cuda_graph", "CUDA graphs off", {"sglang_cuda_graph": "disabled"},
            "slower at low concurrency: 86 tok/s for one stream against 97.9, peak 1146 against 1493", "eager mode guards the missing field; started by hand this way in 210 s", automatic=True),
    _remedy("disable_prefill_cuda_graph", "only the graphs for prefill off, those for decode stay", {"sglang_cuda_graph": "prefill_disabled"},
            "a longer time to the first token", "sgl-project/sglang#35437", automatic=True),
    _remedy("decode_graphs_only", "only decode graphs", {"sglang_cuda_graph": "decode_only"}, "a longer time to the first token", "sgl-project/sglang#35437", automatic=True),
    _remedy("smaller_graphs_legacy", "capture graphs for smaller batches only", _extra(cuda_graph_max_bs=16), "batches above 16 run without graphs", "sgl-project/sglang#5285", automatic=True, before="0.5.14"),
    _remedy("smaller_graphs", "capture graphs for smaller batches only", _extra(cuda_graph_max_bs_decode=16), "batches above 16 run without graphs", "sgl-project/sglang#5285", automatic=True, since="0.5.14"),
    _remedy("disable_custom_all_reduce", "leave the all-reduce to NCCL", _extra(disable_custom_all_reduce=True),
            "on PCIe next to nothing: the custom one serves more than two GPUs only with NVLink", "sgl-project/sglang#9706", automatic=True),
    _remedy("drop_torch_compile", "do not use torch.compile", _extra(enable_torch_compile=False), "what torch.compile gained", "sgl-project/sglang#4489, #7918"),
    # ---- memory
    _remedy("lower_mem_fraction", "leave more GPU memory to activations and graphs", {"sglang_mem_fraction_static": "{mem_fraction_lower}"},
            "a smaller KV pool: fewer or shorter concurrent requests", "SGLang's own advice for running out at run time", automatic=True),
    _remedy("raise_mem_fraction", "give more GPU memory to the KV pool", {"sglang_mem_fraction_static": "{mem_fraction_higher}"},
            "less room for activations: watch for running out at run time", "SGLang's own message for a pool that is too small", automatic=True),
    _remedy("fewer_running_requests", "fewer requests at the same time", {"sglang_max_running_requests": 16}, "lower peak throughput", "general", automatic=True),
    _remedy("shorter_context", "a shorter context", {"sglang_context_length": 32768}, "longer requests are refused", "general"),
    _remedy("drop_drafter", "serve without the drafter", {"sglang_drafter": "none"}, "no speculation: about 26 to 98 tok/s for one stream, by profile", "frees the drafter's weights and pool", automatic=True),
    _remedy("more_gpus", "spread the weights over more GPUs, or take a smaller quantisation", cost="hardware, or quality", source="sgl-project/sglang#465"),
    _remedy("free_gpu", "end the other processes on the GPUs (nvidia-smi lists them), then start again", cost="whatever those processes did", source="sgl-project/sglang#4233"),
    _remedy("smaller_hicache", "a smaller hierarchical cache: its size counts once per rank", _extra(hicache_size=16), "fewer prefixes kept in host memory", "sgl-project/sglang#8102, #14282"),
    _remedy("raise_memlock", "LimitMEMLOCK=infinity for the unit", cost="none", source="sgl-project/sglang#7666"),
    _remedy("more_host_memory", "give the host more memory, or run less on it; swap does not help pinned memory", cost="hardware", source="sgl-project/sglang#15235"),
    _remedy("raise_unit_memory", "raise MemoryMax= of the unit or the slice above it", cost="less protection for the rest of the host", source="systemd.resource-control(5)"),
    _remedy("leave_host_room", "leave room to the host: a lower memory fraction on machines with one memory for CPU and GPU", {"sglang_mem_fraction_static": "{mem_fraction_lower}"},
            "a smaller KV pool", "NVIDIA/dgx-spark-playbooks#97", automatic=True),
    _remedy("free_disk", "free space on the file system that the message names", cost="none", source="errno 28"),
    # ---- GPU, driver, hardware
    _remedy("disable_graphs_to_isolate", "CUDA graphs off, to see the fault where it happens", {"sglang_cuda_graph": "disabled"}, "slower while searching", "z-lab/dflash#146; sgl-project/sglang#8336", automatic=True),
    _remedy("disable_overlap", "no overlap between scheduling and forward", _extra(disable_overlap_schedule=True), "a few per cent of throughput", "z-lab/dflash#38", automatic=True, since="0.5.14"),
    _remedy("launch_blocking", "CUDA_LAUNCH_BLOCKING=1 for one run, so that the frames show the true place", _environment(CUDA_LAUNCH_BLOCKING="1"), "very slow; for diagnosis only", "CUDA's own message"),
    _remedy("other_attention_backend", "another attention backend", {"sglang_attention_backend": "{other_attention_backend}"}, "speed differs by model and GPU", "sgl-project/sglang#1751, #6309", automatic=True),
    _remedy("check_gpu_hardware", "drain the host; reset the GPU or reboot, then run the vendor's diagnostics (dcgmi diag)", cost="the host is out of service", source="NVIDIA's Xid catalogue"),
    _remedy("reseat_gpu", "power, cooling, seating and PCIe settings of the GPU; reboot", cost="the host is out of service", source="NVIDIA/open-gpu-kernel-modules#507"),
    _remedy("upgrade_driver", "install a newer NVIDIA driver", cost="a reboot", source="CUDA compatibility"),
    _remedy("reboot_host", "reboot, so that kernel module and libraries are of one version", cost="a reboot", source="NVML's own message"),
    _remedy("load_driver", "load the driver, see nvidia-smi; where there is a fabric manager, start it", cost="none", source="CUDA errors 100, 802"),
    _remedy("matching_wheels", "wheels built for this GPU and driver", cost="a new environment", source="sgl-project/sglang#748"),
    _remedy("backend_for_architecture", "a backend that has kernels for this GPU", {"sglang_attention_backend": "{other_attention_backend}"}, "speed differs", "sgl-project/sglang#40558", automatic=True),
    # ---- packages and compilers
    _remedy("rebuild_venv", "build the environment anew from its lock", cost="minutes; the old one stays until the new one is complete", source="sgl-project/sglang#7033, #18203"),
    _remedy("install_library", "install the system package that holds the library", cost="none", source="the loader names the file"),
    _remedy("install_cuda_toolkit", "install the CUDA toolkit and set CUDA_HOME for the unit", _environment(CUDA_HOME="/usr/local/cuda"), "disk space", "flashinfer-ai/flashinfer#1919"),
    _remedy("fix_cuda_home", "set CUDA_HOME to the toolkit's folder, without a leading colon", _environment(CUDA_HOME="/usr/local/cuda"), "none", "vllm-project/vllm#36077"),
    _remedy("newer_cuda_toolkit", "install a newer CUDA toolkit and point CUDA_HOME to it", cost="disk space", source="vllm-project/vllm#49051"),
    _remedy("use_system_ptxas", "let Triton use the toolkit's ptxas", _environment(TRITON_PTXAS_PATH="/usr/local/cuda/bin/ptxas"), "none", "sgl-project/sglang#8879", automatic=True),
    _remedy("clear_jit_cache", "remove the compiled kernels' cache, then start again", cost="kernels are compiled once more", source="general"),
    _remedy("disable_deep_gemm", "do not compile DeepGEMM kernels", _environment(SGLANG_ENABLE_JIT_DEEPGEMM="0"), "slower FP8 matrix products where the GPU supports DeepGEMM", "sgl-project/sglang#7387", automatic=True),
    # ---- NCCL
    _remedy("nccl_debug", "NCCL_DEBUG=WARN for one run, to read NCCL's own reason", _environment(NCCL_DEBUG="WARN"), "more log lines", "vllm-project/vllm#14537"),
    _remedy("nccl_p2p_disable", "no peer-to-peer transfers between the GPUs", _environment(NCCL_P2P_DISABLE="1"), "slower communication", "sgl-project/sglang#3451", automatic=True),
    _remedy("check_topology", "IOMMU and ACS of the host: translated PCIe traffic makes NCCL hang", cost="kernel command line or BIOS, a reboot", source="the rtx6kpro community's measurements"),
    _remedy("bigger_shm", "enlarge /dev/shm (size= of its mount, or --shm-size of the container)", cost="none", source="sgl-project/sglang#5096"),
    _remedy("raise_dist_timeout", "a longer time-out for collectives", _extra(dist_timeout=3600), "a real hang is noticed later", "sgl-project/sglang#1693"),
    # ---- native
    _remedy("inspect_core", "coredumpctl info PID shows the stack of the dead process", cost="none", source="systemd-coredump"),
    # ---- drafter
    _remedy("upgrade_for_speculation", "upgrade SGLang: speculation is repaired from release to release", {"sglang_version": UPGRADE_TO}, "a new environment and one restart", "sgl-project/sglang#26476, #28528", before=UPGRADE_TO),
    _remedy("disable_radix_cache", "no prefix cache", _extra(disable_radix_cache=True), "common prefixes are computed again", "sgl-project/sglang#28528", automatic=True),
    _remedy("matching_drafter", "a drafter made for this target, at a pinned revision", {}, "none", "the drafter's contract as the engine checks it"),
    _remedy("set_drafter", "name the drafter", {}, "none", "sgl-project/sglang#36528"),
    _remedy("align_versions", "tool and engine of the same release", cost="none", source="sgl-project/SpecForge#658"),
    # ---- weights
    _remedy("fetch_again", "fetch and verify the weights again: playbooks/fetch-weights.yml", cost="the download", source="QwenLM/Qwen3-VL#264"),
    _remedy("allow_remote_code", "allow the model's own code", {"sglang_trust_remote_code": True}, "code from the repository runs on the host: pin the revision", "vllm-project/recipes#116"),
    _remedy("hub_token", "request access on the hub and set the token", cost="none", source="sgl-project/sglang#22803"),
    _remedy("check_repository", "the name and revision of the repository", cost="none", source="the hub answers 404"),
    _remedy("check_network", "the network, proxy and name service of the host; fetch the weights beforehand", cost="none", source="HTTP client's message"),
    # ---- arguments
    _remedy("drop_argument", "remove or rename the option for this release", cost="none", source="sgl-project/sglang#4116"),
    _remedy("change_combination", "give up one of the options that exclude each other", cost="depends on the option", source="the engine's own message"),
    # ---- host
    _remedy("other_port", "another port, or end what holds it", {"sglang_port": "{other_port}"}, "clients must know the new port", "sgl-project/sglang#17402"),
    _remedy("fix_permissions", "owner, mode or the unit's sandboxing of the path that the message names", cost="none", source="errno 13"),
    _remedy("install_venv", "build the environment: the unit's program is missing", cost="minutes", source="systemd's status 203"),
    # ---- liveness
    _remedy("eager_module_loading", "load CUDA modules at the start", _environment(CUDA_MODULE_LOADING="EAGER"), "a slower start and more memory", "sgl-project/sglang#33642", automatic=True),
    _remedy("raise_watchdog", "a longer watchdog", _extra(watchdog_timeout=900), "a real hang is noticed later", "sgl-project/sglang#7553", automatic=True),
    _remedy("restart_unit", "restart the unit, and probe by generating, not by /health", cost="the running requests", source="sgl-project/sglang#6624"),
    _remedy("raise_health_timeout", "a longer time-out for the engine's own health check", _environment(SGLANG_HEALTH_CHECK_TIMEOUT="60"), "a dead engine is noticed later", "sgl-project/sglang#22511", automatic=True),
    _remedy("slower_probes", "probe /health less often than every 20 s, or do not let it generate", _environment(SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION="false"), "health then says less", "sgl-project/sglang#35884", automatic=True),
    _remedy("no_proxy", "no proxy for the engine's own address", _environment(no_proxy="127.0.0.1,localhost,::1"), "none", "sgl-project/sglang#2468", automatic=True),
    _remedy("longer_start", "a longer start time-out of the unit", {"sglang_wait_timeout": 3600}, "a hang at the start is noticed later", "systemd.service(5)", automatic=True),
    _remedy("read_first_worker", "the first traceback of an EngineCore or worker process, above this one", cost="none", source="community-scripts/ProxmoxVED#2047"),
)  # fmt: skip

#: What a deployment installs before it switches. A rung comes after the switch, on a host where only the environment and
#: the weights of the inventory's wish lie: one that changes these could not start.
INSTALLED = frozenset(
    {"sglang_version", "sglang_build", "sglang_model", "sglang_model_revision", "sglang_drafter_model", "sglang_drafter_revision"}
)

REMEDIES: dict[str, Remedy] = {remedy.id: remedy for remedy in _ALL}

_GRAPHS = ("smaller_graphs", "smaller_graphs_legacy")
# Best first.
FOR_CAUSE: dict[str, tuple[str, ...]] = {
    "cuda_graph_capture_failed": ("drop_torch_compile", "disable_prefill_cuda_graph", *_GRAPHS, "other_attention_backend", "disable_cuda_graph"),
    "cuda_graph_capture_oom": (*_GRAPHS, "lower_mem_fraction", "disable_prefill_cuda_graph", "disable_cuda_graph"),
    "cuda_graph_custom_allreduce": ("disable_custom_all_reduce", "disable_cuda_graph"),
    "cuda_graph_replay_failure": ("upgrade_sglang", "use_tp8", "disable_cuda_graph"),
    "cuda_illegal_memory_access": ("upgrade_for_speculation", "disable_graphs_to_isolate", "disable_overlap", "other_attention_backend", "launch_blocking", "drop_drafter"),
    "cuda_device_side_assert": ("upgrade_for_speculation", "disable_overlap", "shorter_context", "launch_blocking", "drop_drafter"),
    "cuda_init_failed": ("load_driver", "reboot_host"),
    "cuda_home_invalid": ("fix_cuda_home",),
    "cuda_toolkit_missing": ("install_cuda_toolkit",),
    "cuda_toolkit_too_old": ("newer_cuda_toolkit",),
    "driver_too_old": ("upgrade_driver", "matching_wheels"),
    "driver_library_mismatch": ("reboot_host",),
    "unsupported_gpu_architecture": ("backend_for_architecture", "matching_wheels"),
    "gpu_xid_hardware": ("check_gpu_hardware",),
    "gpu_xid_application_fault": ("disable_graphs_to_isolate", "launch_blocking", "upgrade_for_speculation"),
    "gpu_fallen_off_bus": ("reseat_gpu", "check_gpu_hardware"),
    "gpu_oom": ("lower_mem_fraction", "fewer_running_requests", "shorter_context", "drop_drafter", "free_gpu"),
    "gpu_oom_weights": ("more_gpus", "drop_drafter", "free_gpu"),
    "gpu_memory_busy": ("free_gpu", "lower_mem_fraction"),
    "kv_pool_too_small": ("raise_mem_fraction", "shorter_context", "fewer_running_requests", "drop_drafter", "more_gpus"),
    "host_oom_killer": ("more_host_memory", "smaller_hicache"),
    "host_memory_limit": ("raise_unit_memory", "more_host_memory"),
    "hicache_host_memory": ("smaller_hicache", "raise_memlock"),
    "unified_memory_exhausted": ("leave_host_room", "shorter_context"),
    "disk_full": ("free_disk",),
    "nccl_collective_timeout": ("check_topology", "nccl_debug", "nccl_p2p_disable", "raise_dist_timeout"),
    "nccl_error": ("nccl_debug", "nccl_p2p_disable", "check_topology"),
    "nccl_shm_too_small": ("bigger_shm",),
    "native_segfault": ("inspect_core", "rebuild_venv"),
    "native_segfault_nccl": ("nccl_p2p_disable", "inspect_core", "rebuild_venv"),
    "native_abort": ("inspect_core",),
    "jit_compile_failed": ("install_cuda_toolkit", "disable_deep_gemm", "clear_jit_cache", "newer_cuda_toolkit"),
    "triton_ptxas_mismatch": ("use_system_ptxas",),
    "missing_system_library": ("install_library",),
    "package_mismatch": ("rebuild_venv", "matching_wheels"),
    "speculative_worker_bug": ("upgrade_for_speculation", "disable_radix_cache", "disable_overlap", "drop_drafter"),
    "speculative_unsupported_model": ("upgrade_for_speculation", "drop_drafter"),
    "speculative_version_mismatch": ("align_versions", "drop_drafter"),
    "speculative_missing_draft_path": ("set_drafter", "drop_drafter"),
    "speculative_disaggregation_unsupported": ("drop_drafter",),
    "speculative_grammar_incompatible": ("upgrade_for_speculation", "drop_drafter"),
    "drafter_mismatch": ("matching_drafter", "drop_drafter"),
    "weights_corrupt": ("fetch_again",),
    "missing_model_file": ("fetch_again", "check_repository"),
    "trust_remote_code_required": ("allow_remote_code",),
    "hf_auth_gated": ("hub_token",),
    "hf_not_found": ("check_repository", "hub_token"),
    "network_transfer_failed": ("check_network",),
    "unknown_argument": ("drop_argument",),
    "unsupported_flag_combination": ("change_combination",),
    "port_in_use": ("other_port",),
    "permission_denied": ("fix_permissions",),
    "executable_missing": ("install_venv",),
    "scheduler_watchdog_timeout": ("eager_module_loading", "raise_watchdog", "check_topology"),
    "scheduler_hang": ("restart_unit", "check_topology", "disable_overlap"),
    "running_but_dead": ("restart_unit",),
    "health_check_false_negative": ("raise_health_timeout",),
    "health_probe_overload": ("slower_probes",),
    "warmup_failed_proxy": ("no_proxy",),
    "start_timeout": ("longer_start",),
    "engine_core_failed": ("read_first_worker",),
    "none": (),
    "unknown": (),
}  # fmt: skip

#: Changes that raise the risk of the failure they follow: never offered when the opposite failed just before.
_OPPOSITE = {
    "lower_mem_fraction": frozenset({"kv_pool_too_small"}),
    "raise_mem_fraction": frozenset({"gpu_oom", "cuda_graph_capture_oom"}),
}
_MEM_FRACTION_STEP = 0.04
_MEM_FRACTION_DEFAULT = 0.88


def parse_version(version: str | None) -> Any:
    """A comparable version, None when it is unknown or not one."""
    if not version:
        return None
    try:
        return releases.parse_version(str(version))
    except ValueError:
        return None


def _holds(wanted: Any, current: Any) -> bool:
    """Is a setting in effect already? Dicts count when each of their items does."""
    if isinstance(wanted, Mapping):
        return isinstance(current, Mapping) and all(_holds(value, current.get(name)) for name, value in wanted.items())
    if isinstance(wanted, bool) or isinstance(current, bool):
        return str(wanted).lower() == str(current).lower()
    return current is not None and str(wanted) == str(current)


_GRAPH_OFF = {"disabled", "false", "off", "no"}


def _in_effect(remedy: Remedy, settings: Mapping[str, Any], effect: Mapping[str, Any], version: Any) -> bool:
    graphs = str(effect.get("sglang_cuda_graph", "")).lower()
    wanted = settings.get("sglang_cuda_graph")
    if wanted and graphs in _GRAPH_OFF:
        return True  # all of them are off: a smaller step is no remedy any more
    if wanted in ("prefill_disabled", "decode_only") and graphs in ("prefill_disabled", "decode_only"):
        return True
    if remedy.id in ("smaller_graphs", "smaller_graphs_legacy") and graphs in _GRAPH_OFF:
        return True
    if remedy.id == "drop_torch_compile":
        return not _option(effect, "enable-torch-compile")
    if "sglang_drafter" in settings and str(effect.get("sglang_drafter", "")).lower() in ("none", "false"):
        return True
    target = settings.get("sglang_version")
    if target and version is not None:
        return bool(version >= parse_version(target))
    if "sglang_profile" in settings and effect.get("sglang_ep_size") in (1, "1"):
        return True  # the run had no expert parallelism: changing to tp8 is no change
    present = {name: value for name, value in settings.items() if value not in (None, "")}
    return bool(present) and all(_holds(value, effect.get(name)) for name, value in present.items())


def _option(effect: Mapping[str, Any], name: str) -> Any:
    extra = effect.get("sglang_extra_args")
    return extra.get(name) if isinstance(extra, Mapping) else None


def _fill(settings: Mapping[str, Any], effect: Mapping[str, Any], context: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `{name}` values by what follows from the run."""
    current = effect.get("sglang_mem_fraction_static")
    try:
        fraction = float(current) if current not in (None, "") else _MEM_FRACTION_DEFAULT
    except (TypeError, ValueError):
        fraction = _MEM_FRACTION_DEFAULT
    backend = str(effect.get("sglang_attention_backend") or context.get("attention_backend") or "")
    port = effect.get("sglang_port") or context.get("port") or 30000
    values: dict[str, Any] = {
        "mem_fraction_lower": round(max(0.3, fraction - _MEM_FRACTION_STEP), 3),
        "mem_fraction_higher": round(min(0.96, fraction + _MEM_FRACTION_STEP), 3),
        "other_attention_backend": "flashinfer" if backend == "triton" else "triton",
        "other_port": int(port) + 1 if str(port).isdigit() else 30001,
    }
    out: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, str) and value.startswith("{") and value.endswith("}"):
            out[name] = values[value[1:-1]]
        elif isinstance(value, Mapping):
            out[name] = dict(value)
        else:
            out[name] = value
    return out


def _right_for(remedy: Remedy, version: Any) -> bool:
    if version is None:
        return True
    if remedy.since and version < parse_version(remedy.since):
        return False
    return not (remedy.before and version >= parse_version(remedy.before))


def remedies_for(
    cause: str,
    version: str | None = None,
    in_effect: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Remedies for a cause, best first, right for the release, without what the failed run had in effect.

    `in_effect` uses the project's variables; `context` holds facts of the run: ep, drafter, earlier_causes, phase, also
    user remedies under `extra` ({cause: [remedy, ...]}).
    """
    effect = dict(in_effect or {})
    facts = dict(context or {})
    parsed = parse_version(version or effect.get("sglang_version"))
    if parsed is None and version is None:
        parsed = parse_version(str(effect.get("sglang_version") or ""))
    earlier = set(facts.get("earlier_causes") or ())
    no_drafter = facts.get("drafter") is False
    out: list[dict[str, Any]] = []
    seen: set[str] = set()
    for identity in FOR_CAUSE.get(cause, ()):
        remedy = REMEDIES[identity]
        if not _right_for(remedy, parsed) or _OPPOSITE.get(identity, frozenset()) & earlier:
            continue
        if no_drafter and (identity == "drop_drafter" or (identity == "upgrade_for_speculation")):
            continue
        if facts.get("disaggregated_graphs") is False and identity in _GRAPHS:
            continue
        # With the release unknown only one spelling of an option can be right: name the newer.
        if parsed is None and remedy.before and identity.endswith("_legacy"):
            continue
        settings = _fill(remedy.set, effect, facts)
        if _in_effect(remedy, settings, effect, parsed) or identity in seen:
            continue
        seen.add(identity)
        out.append(as_dict(remedy, settings))
    for row in (facts.get("extra") or {}).get(cause, ()):
        settings = dict(row.get("set") or {})
        if settings and all(_holds(value, effect.get(name)) for name, value in settings.items()):
            continue
        out.append({"id": str(row.get("id", "custom")), "summary": str(row.get("summary", "")), "set": settings, "cost": str(row.get("cost", "")),
                    "source": str(row.get("source", "inventory")), "automatic": bool(row.get("automatic", False))})  # fmt: skip
    return out


def as_dict(remedy: Remedy, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A remedy as the modules return it."""
    return {
        "id": remedy.id,
        "summary": remedy.summary,
        "set": dict(remedy.set if settings is None else settings),
        "cost": remedy.cost,
        "source": remedy.source,
        "automatic": remedy.automatic and bool(remedy.set),
    }


def ids() -> list[str]:
    """Every remedy id that `sglang_fallbacks` may name."""
    return sorted(remedy.id for remedy in REMEDIES.values() if remedy.automatic)


def check_ids(names: Iterable[str]) -> list[str]:
    """Names that are no automatic remedy."""
    return [name for name in names if name not in REMEDIES or not REMEDIES[name].automatic]


def why_not(name: str) -> str:
    """Why the ladder never takes a remedy of this name."""
    remedy = REMEDIES.get(name)
    if remedy is None:
        return "is no remedy"
    needed = sorted(INSTALLED & remedy.set.keys())
    if needed:
        assigned = ", ".join(f"{variable}: {remedy.set[variable]}" for variable in needed)
        return f"needs an installation that no fallback makes; write {assigned} yourself, which installs it before the switch"
    return "waits for a person"
