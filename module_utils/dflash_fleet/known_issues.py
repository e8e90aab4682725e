"""What is known to fail, by release and configuration, before a load of minutes finds it out.

A row is data plus one condition over a `Setup`. `action` says what is done about it where `sglang_known_issues` is
`avoid`: avoid (the configuration is changed, unless a person asked for it in so many words), warn, or refuse (the
engine itself would refuse; always an error). Choices are what a person can set instead, cheapest first.

Figures in costs: 8x RTX PRO 6000 (PCIe), Kimi K2.6 with a DFlash drafter; tokens per second of one stream and at peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple

from .releases import Version, parse_version


@dataclass(frozen=True)
class Setup:
    """What conditions look at: the configuration as it would run, before any avoidance."""

    version: Version
    build: str = "cuda"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    drafter: str = "none"
    graphs: str = "enabled"
    a2a: str = "none"
    dp_attention: bool = False
    gpu_architecture: str = ""
    attention_backend: str = ""
    max_running_requests: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def dflash(self) -> bool:
        """A DFlash drafter on the GPU kernels (the CPU engine has none of their problems)."""
        return self.drafter == "dflash" and self.build != "cpu"

    @property
    def decode_graphs(self) -> bool:
        return self.build != "cpu" and self.graphs != "disabled"

    @property
    def prefill_graphs(self) -> bool:
        return self.build != "cpu" and self.graphs == "enabled"

    @property
    def sm120(self) -> bool:
        """RTX PRO 6000 Blackwell and its kin: no NVLink, about 100 KB of shared memory per SM."""
        return self.gpu_architecture.replace(".", "").replace("sm_", "").replace("a", "") == "120"

    def before(self, release: str) -> bool:
        return self.version < parse_version(release)

    def since(self, release: str) -> bool:
        return self.version >= parse_version(release)


class Choice(NamedTuple):
    """Another setting that is not affected."""

    set: dict[str, Any]
    summary: str
    cost: str


class Issue(NamedTuple):
    """One row of the table."""

    id: str
    summary: str
    releases: str
    effect: str
    source: str
    action: str  # avoid, warn, refuse
    applies: Callable[[Setup], bool]
    #: What avoiding means: {graphs: state}, {environment: {...}}
    avoid: dict[str, Any] = {}
    #: In words, what was done about it when it was avoided.
    done: str = ""
    choices: tuple[Choice, ...] = ()
    #: The variable a refusal names.
    variable: str = "sglang_profile"


_UPGRADE = Choice(
    {"sglang_version": "0.5.20"},
    "upgrade SGLang to 0.5.20, CUDA graphs stay on",
    "a new environment and one restart; nothing at run time",
)
_TP8 = Choice(
    {"sglang_profile": "tp8"},
    "tensor parallelism alone, CUDA graphs stay on",
    "97.9 tok/s for one stream; the peak of expert parallelism (1493) is given up",
)
_GRAPHS_OFF = Choice(
    {"sglang_cuda_graph": "disabled"},
    "CUDA graphs off",
    "slower at low concurrency: 86 tok/s for one stream against 97.9 of tp8 with graphs, peak 1146 against 1493",
)

_TRTLLM_MLA = ("trtllm_mla", "cutlass_mla", "flashmla", "cutedsl_mla", "tokenspeed_mla")


def _gathered(setup: Setup) -> bool:
    return (setup.ep > 1 and setup.a2a != "none") or setup.dp_attention


def _fp8_kv(setup: Setup) -> bool:
    return str(setup.options.get("kv-cache-dtype", "")).startswith("fp8")


ISSUES: tuple[Issue, ...] = (
    Issue(
        id="pipeline_with_drafter",
        summary="a pipeline cannot run with a drafter",
        releases="all",
        effect="SGLang ends at once: speculative decoding only supports pp_size == 1",
        source="sglang 0.5.11 server_args.py:3327, 0.5.23 arg_groups/speculative_hook.py:319",
        action="refuse",
        applies=lambda s: s.pp > 1 and s.drafter != "none",
        choices=(
            Choice({"sglang_drafter": "none"}, "this profile without a drafter", "no speculation"),
            Choice({"sglang_profile": "tp8"}, "tensor parallelism with the drafter", "more traffic between GPUs"),
        ),
    ),
    Issue(
        id="a2a_backend_forces_ep",
        summary="an all-to-all backend silently sets the expert parallel size to the tensor parallel size",
        releases="all",
        effect="the engine would run ep = tp, not what the profile says",
        source="sglang 0.5.23 arg_groups/overrides.py:1578-1614",
        action="refuse",
        applies=lambda s: s.a2a != "none" and s.ep != s.tp,
        choices=(Choice({"sglang_profile": "ep4"}, "the profile with moe-a2a-backend none", "none on PCIe"),),
    ),
    Issue(
        id="flashinfer_moe_needs_whole_ep",
        summary="the flashinfer_cutlass and flashinfer_cutedsl MoE runners take ep 1 or ep = tp only",
        releases="all",
        effect="an assertion at start",
        source="sglang 0.5.23 arg_groups/moe_hook.py:86-107",
        action="refuse",
        applies=lambda s: (
            s.options.get("moe-runner-backend") in ("flashinfer_cutlass", "flashinfer_cutedsl")
            and s.ep not in (1, s.tp)
        ),
        variable="sglang_extra_args",
    ),
    Issue(
        id="dflash_dp_attention",
        summary="DFLASH does not run with attention data parallelism",
        releases="0.5.11 to 0.5.22",
        effect="SGLang ends at once: DFLASH speculative decoding does not support dp attention",
        source="sglang 0.5.11 server_args.py:3321, 0.5.22 arg_groups/speculative_hook.py:295",
        action="refuse",
        applies=lambda s: s.dflash and s.dp_attention and s.before("0.5.23"),
        choices=(
            Choice({"sglang_version": "0.5.23"}, "upgrade SGLang to 0.5.23", "a new environment and one restart"),
        ),
        variable="sglang_extra_args",
    ),
    Issue(
        id="dflash_dp_attention_lm_head",
        summary="DFLASH with attention data parallelism needs enable-dp-lm-head",
        releases="0.5.23 and later",
        effect="SGLang ends at once",
        source="sglang 0.5.23 arg_groups/speculative_hook.py:307",
        action="refuse",
        applies=lambda s: (
            s.dflash and s.dp_attention and s.since("0.5.23") and not s.options.get("enable-dp-lm-head", False)
        ),
        choices=(Choice({"sglang_extra_args": {"enable-dp-lm-head": True}}, "add the option", "none"),),
        variable="sglang_extra_args",
    ),
    Issue(
        id="dflash_ep_cuda_graph_replay",
        summary="SGLang before 0.5.13 cannot replay CUDA graphs for DFLASH with expert parallelism",
        releases="0.5.11 to 0.5.12.post1",
        effect=(
            "every rank dies on the first decode step, after the whole load: "
            "AttributeError: 'NoneType' object has no attribute 'dtype'"
        ),
        source=(
            "sglang 0.5.11 model_executor/cuda_graph_runner.py:124, :348-359, speculative/dflash_worker.py:641-658; "
            "0.5.13 skips the missing tensor (cuda_graph_buffer_registry.py:425)"
        ),
        action="avoid",
        applies=lambda s: s.dflash and s.ep > 1 and s.decode_graphs and not _gathered(s) and s.before("0.5.13"),
        avoid={"graphs": "disabled"},
        done="CUDA graphs are turned off",
        choices=(_UPGRADE, _TP8, _GRAPHS_OFF),
    ),
    Issue(
        id="dflash_gathered_buffer_cuda_graph",
        summary="SGLang before 0.5.20 cannot replay DFLASH's CUDA graphs with an all-to-all backend",
        releases="0.5.11 to 0.5.19",
        effect="a TypeError on the first decode step (read in the source, not seen)",
        source="sglang 0.5.14 cuda_graph_buffer_registry.py:646-655, 0.5.19 :650-659; fixed in 0.5.20 (:657-663)",
        action="avoid",
        applies=lambda s: s.dflash and s.decode_graphs and _gathered(s) and s.before("0.5.20"),
        avoid={"graphs": "disabled"},
        done="CUDA graphs are turned off",
        choices=(
            _UPGRADE,
            Choice({"sglang_extra_args": {"moe-a2a-backend": "none"}}, "no all-to-all backend", "none on PCIe"),
            _GRAPHS_OFF,
        ),
    ),
    Issue(
        id="dflash_prefill_graph_sm120",
        summary="prefill CUDA graphs with DFLASH fail to capture on sm_120",
        releases="0.5.17 and later (open)",
        effect="RuntimeError in the breakable graph's capture at start",
        source="https://github.com/sgl-project/sglang/issues/35437",
        action="avoid",
        applies=lambda s: s.dflash and s.sm120 and s.prefill_graphs and s.since("0.5.17"),
        avoid={"graphs": "prefill_disabled"},
        done="prefill graphs are turned off, decode graphs stay on",
        choices=(Choice({"sglang_cuda_graph": "prefill_disabled"}, "prefill graphs off", "slightly slower prefill"),),
    ),
    Issue(
        id="deepgemm_sm120",
        summary="DeepGEMM does not support sm_120",
        releases="all",
        effect="kernels fail to compile or to launch",
        source="rtx6kpro community notes (models/kimi-k25.md)",
        action="avoid",
        applies=lambda s: s.sm120 and s.build != "cpu" and "SGLANG_ENABLE_JIT_DEEPGEMM" not in s.environment,
        avoid={"environment": {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}},
        done="SGLANG_ENABLE_JIT_DEEPGEMM=0 is set",
        choices=(
            Choice({"sglang_environment": {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}}, "DeepGEMM off", "none on sm_120"),
        ),
    ),
    Issue(
        id="dflash_block_size_guessed",
        summary="an unreadable drafter configuration silently becomes a block size of 16",
        releases="all",
        effect="the drafter proposes what it was not trained for: almost nothing is accepted",
        source="sglang 0.5.11 server_args.py:3390-3420, 0.5.23 arg_groups/speculative_hook.py:388-427",
        action="avoid",
        applies=lambda s: s.drafter == "dflash",
        done="the block size is always written out",
    ),
    Issue(
        id="speculative_default_48_requests",
        summary="with a drafter SGLang serves at most 48 requests at once unless told otherwise",
        releases="all",
        effect="the 49th request waits; CUDA graphs are captured up to batch 48",
        source="sglang 0.5.11 server_args.py:3430, 0.5.23 arg_groups/speculative_hook.py:444-452",
        action="warn",
        applies=lambda s: s.drafter != "none" and s.max_running_requests is None and s.build != "cpu",
        choices=(
            Choice({"sglang_max_running_requests": 48}, "say the number", "KV memory and graph capture grow with it"),
        ),
    ),
    Issue(
        id="dflash_logprobs_refused",
        summary="DFLASH refuses requests for log probabilities",
        releases="0.5.11 to 0.5.17",
        effect="requests with logprobs fail: DFLASH speculative decoding does not support return_logprob yet",
        source="sglang 0.5.11 speculative/dflash_utils.py:306, 0.5.17 :844; gone in 0.5.18",
        action="warn",
        applies=lambda s: s.drafter == "dflash" and s.before("0.5.18"),
        choices=(
            Choice({"sglang_version": "0.5.20"}, "upgrade SGLang to 0.5.20", "a new environment and one restart"),
        ),
    ),
    Issue(
        id="fp8_kv_sm120",
        summary="an FP8 KV cache under the INT4 checkpoint is very slow on sm_120",
        releases="all",
        effect="16 tok/s measured",
        source="rtx6kpro community notes (models/kimi-k25.md)",
        action="warn",
        applies=lambda s: s.sm120 and _fp8_kv(s),
        choices=(
            Choice({"sglang_extra_args": {"kv-cache-dtype": "auto"}}, "keep BF16", "twice the KV memory per token"),
        ),
    ),
    Issue(
        id="mla_backend_sm120",
        summary="this attention backend has no kernels for sm_120",
        releases="all",
        effect="the engine fails or falls back at start",
        source="sglang 0.5.23 model_override_base.py:331-352; https://github.com/vllm-project/vllm/issues/42426",
        action="warn",
        applies=lambda s: s.sm120 and s.attention_backend in _TRTLLM_MLA,
        choices=(Choice({"sglang_attention_backend": "triton"}, "SGLang's own default on sm_120", "none"),),
    ),
    Issue(
        id="a2a_backend_pcie",
        summary="DeepEP and its kin need NVLink or RDMA between GPUs",
        releases="all",
        effect="slow or hanging exchange on PCIe",
        source="sglang 0.5.23 arg_groups/fields/parallel.py (moe_a2a_backend)",
        action="warn",
        applies=lambda s: s.sm120 and s.a2a != "none",
        choices=(Choice({"sglang_extra_args": {"moe-a2a-backend": "none"}}, "no all-to-all backend", "none on PCIe"),),
    ),
    Issue(
        id="custom_all_reduce_pcie",
        summary="SGLang's own all-reduce does not serve more than two GPUs without NVLink",
        releases="0.5.11 to 0.5.20",
        effect="all-reduce falls back to NCCL: about 200 us instead of 5 us for a small message",
        source="sglang 0.5.23 distributed/device_communicators/custom_all_reduce.py:269-279",
        action="warn",
        applies=lambda s: s.sm120 and s.build != "cpu" and s.tp > 2 and s.before("0.5.21"),
        choices=(
            Choice(
                {"sglang_version": "0.5.21", "sglang_environment": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}},
                "the PCIe all-reduce of 0.5.21",
                "a new environment and one restart; measure it on your hosts",
            ),
        ),
    ),
    Issue(
        id="pcie_ipc_all_reduce_off",
        summary="the all-reduce made for PCIe is off by default",
        releases="0.5.21 and later",
        effect="21.1 instead of 13.6 ms per token (TP 8, 8k context, two NUMA nodes; upstream's figures)",
        source="sglang 0.5.23 distributed/device_communicators/pcie_ipc_ar.py, environ.py:1539",
        action="warn",
        applies=lambda s: (
            s.sm120
            and s.build != "cpu"
            and s.tp > 2
            and s.since("0.5.21")
            and s.environment.get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE") != "1"
        ),
        choices=(
            Choice(
                {"sglang_environment": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}},
                "turn it on and measure",
                "falls back by itself where it cannot be set up",
            ),
        ),
    ),
    Issue(
        id="expandable_segments_ipc",
        summary="expandable CUDA memory segments do not work with the IPC all-reduce",
        releases="0.5.21 and later",
        effect="the all-reduce cannot share its buffers and falls back",
        source="rtx6kpro community notes; sglang 0.5.23 pcie_ipc_ar.py",
        action="warn",
        applies=lambda s: (
            "expandable_segments:True" in s.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
            and s.environment.get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE") == "1"
        ),
    ),
    Issue(
        id="mixed_chunk_with_drafter",
        summary="mixed chunked prefill does not go with a drafter",
        releases="all",
        effect="turned off by SGLang (0.5.11), or a RuntimeError on a mixed batch",
        source="https://github.com/sgl-project/sglang/pull/26476; sglang 0.5.11 server_args.py (DFLASH)",
        action="warn",
        applies=lambda s: s.drafter != "none" and bool(s.options.get("enable-mixed-chunk", False)),
    ),
    Issue(
        id="clean_stop_is_sigkill",
        summary="a clean stop of this release ends in SIGKILL by its own hand",
        releases="0.5.11 to 0.5.18",
        effect="a stopped unit reads `failed (signal)` in systemctl; status and diagnosis say stopped",
        source="sglang 0.5.11 managers/tokenizer_manager.py:2339, 0.5.18 :3157; exit 0 from 0.5.19 on",
        action="warn",
        applies=lambda s: s.before("0.5.19"),
        choices=(
            Choice({"sglang_version": "0.5.20"}, "upgrade SGLang to 0.5.20", "a new environment and one restart"),
        ),
    ),
)


def matching(setup: Setup) -> list[Issue]:
    """Rows whose condition holds, in the order of the table."""
    return [issue for issue in ISSUES if issue.applies(setup)]
