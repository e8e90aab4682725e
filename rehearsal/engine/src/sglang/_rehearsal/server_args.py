"""From parsed options to the configuration in effect: defaults, rules and refusals of the imitated release."""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

from . import config_file, model, options, releases

# These backends make expert parallelism span all ranks, whatever --ep-size says.
SPANNING_A2A = frozenset(
    ("megamoe", "deepep", "deepep_v2", "mooncake", "nixl", "ascend_fuseep", "flashinfer", "flashinfer_megamoe", "mori",
     "pplx")
)  # fmt: skip

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")


class Refused(Exception):
    """Resolution refuses; `error` is the exception real SGLang raises, `frames` where it raises it."""

    def __init__(self, error: Exception, frames: tuple[str, ...] = ()) -> None:
        super().__init__(str(error))
        self.error = error
        self.frames = frames


class ServerArgs:
    """The record that the log prints: attributes in the parser's order."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        # An option that this release does not have reads as unset.
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __repr__(self) -> str:
        # Keys are printed too: no release hides them, and the redacting formatter has to.
        if releases.has("args_as_dict"):
            return repr(self.__dict__)
        return "ServerArgs(" + ", ".join(f"{k}={v!r}" for k, v in self.__dict__.items()) + ")"


class Plan:
    """Everything the processes need to know, resolved once in the main process."""

    def __init__(self, args: ServerArgs, launch_command: str) -> None:
        self.args = args
        self.launch_command = launch_command
        self.messages: list[tuple[str, str]] = []  # (level, text) logged while resolving
        self.target = model.Target()
        self.drafter: model.Drafter | None = None
        self.decode_graphs = True
        self.prefill_graphs = False
        self.draft_useless = False  # the drafter does not fit: accept length falls to 1

    # Sizes ------------------------------------------------------------------------------------------------------
    @property
    def tp(self) -> int:
        return int(self.args.tp_size or 1)

    @property
    def pp(self) -> int:
        return int(self.args.pp_size or 1)

    @property
    def ep(self) -> int:
        return int(self.args.ep_size or 1)

    @property
    def dp(self) -> int:
        # Attention data parallelism shares the ranks of tp; whole replicas have ranks of their own.
        return 1 if self.args.enable_dp_attention else int(self.args.dp_size or 1)

    @property
    def ranks(self) -> list[tuple[int, int, int, int]]:
        """(dp, pp, tp, ep) of each scheduler process, in launch order."""
        group = max(1, self.tp // self.ep)
        return [
            (d, p, t, t // group if self.ep > 1 else 0)
            for d in range(self.dp)
            for p in range(self.pp)
            for t in range(self.tp)
        ]

    def prefix(self, rank: int) -> str:
        """The rank as the log prints it: only dimensions larger than one appear."""
        d, p, t, e = self.ranks[rank]
        text = f" DP{d}" if self.dp > 1 else ""
        text += f" PP{p}" if self.pp > 1 else ""
        text += f" TP{t}" if self.tp > 1 else ""
        return text + (f" EP{e}" if self.ep > 1 else "")

    @property
    def speculative(self) -> bool:
        return self.drafter is not None

    @property
    def block(self) -> int:
        return int(self.args.speculative_num_draft_tokens or 16) if self.speculative else 1

    @property
    def capture_sizes(self) -> list[int]:
        """Batch sizes to capture, small first."""
        top = int(self.args.max_running_requests or 160)
        asked = self.args.cuda_graph_max_bs_decode or self.args.cuda_graph_max_bs
        top = min(top, int(asked)) if asked else top
        listed = self.args.cuda_graph_bs_decode or self.args.cuda_graph_bs
        steps = listed or [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, 513, 16)]
        return [int(size) for size in steps if int(size) <= top] or [1]

    @property
    def runs_overlapped(self) -> bool:
        """Whether the overlap scheduler runs: with DFLASH only since 0.5.14, never with pipeline parallelism."""
        if self.args.disable_overlap_schedule or self.pp > 1:
            return False
        return not self.speculative or releases.has("overlap_drafter")


def parse(argv: list[str]) -> tuple[ServerArgs, list[str]]:
    """The command line with its --config; argparse ends the process with status 2, the merger raises ValueError."""
    parser = options.build()
    merged = config_file.merge(list(argv), options.rows())
    found: argparse.Namespace = parser.parse_args(merged)
    values = {options.FIELD_OF_DEST.get(name, name): value for name, value in vars(found).items()}
    values.pop("config", None)
    return ServerArgs(values), merged


def resolve(args: ServerArgs, merged: list[str]) -> Plan:
    """Applies the rules; raises Refused where real SGLang would."""
    plan = Plan(args, " ".join(merged))
    say = plan.messages
    args.tokenizer_path = args.tokenizer_path or args.model_path
    args.device = args.device or "cuda"
    if args.random_seed is None:
        args.random_seed = random.SystemRandom().randrange(1 << 30)
    try:
        plan.target = model.target(args.model_path)
    except (OSError, ValueError) as error:
        raise Refused(error, ("cfg.get",))
    args.served_model_name = args.served_model_name or args.model_path
    if ":" in str(args.served_model_name) and releases.key(releases.RELEASE) >= releases.key("0.5.14"):
        raise Refused(ValueError(f"served_model_name cannot contain a colon (':'): {args.served_model_name!r}"))
    if not args.attention_backend:
        args.attention_backend = "triton"
        say.append(("info", "Attention backend not specified. Use triton backend by default."))
    _parallel(plan)
    _speculation(plan)
    _graphs(plan)
    args.chunked_prefill_size = args.chunked_prefill_size or 8192
    if args.mem_fraction_static is None:
        args.mem_fraction_static = 0.88
    if args.max_running_requests is None:
        args.max_running_requests = 160
    args.context_length = args.context_length or None
    return plan


def _parallel(plan: Plan) -> None:
    args = plan.args
    backend = args.moe_a2a_backend
    if backend in SPANNING_A2A and args.ep_size != args.tp_size:
        plan.messages.append(
            (
                "info",
                f"{backend} MoE is enabled. The expert parallel size is adjusted from {args.ep_size} to the tensor "
                f"parallel size [{args.tp_size}].",
            )
        )
        args.ep_size = args.tp_size
    if plan.tp % plan.ep != 0:
        raise Refused(ValueError(f"tp_size {plan.tp} must be divisible by ep_size {plan.ep}"), ("moe.ep",))
    nodes = int(args.nnodes or 1)
    if (plan.tp * plan.pp) % nodes != 0:
        raise Refused(AssertionError("tp_size must be divisible by number of nodes"))
    if plan.pp > 1 and not args.disable_overlap_schedule:
        args.disable_overlap_schedule = True
        plan.messages.append(("warning", "Pipeline parallelism is incompatible with overlap schedule."))


def _speculation(plan: Plan) -> None:
    args, say = plan.args, plan.messages
    name = args.speculative_algorithm
    if not name:
        return
    if str(name).upper() not in ALGORITHMS:
        raise Refused(ValueError(f"Unknown speculative algorithm name: {name}"))
    name = args.speculative_algorithm = str(name).upper()
    if name == "DFLASH":
        if args.enable_dp_attention and releases.key(releases.RELEASE) < releases.key("0.5.20"):
            raise Refused(ValueError("Currently DFLASH speculative decoding does not support dp attention."))
        if plan.pp != 1:
            raise Refused(
                ValueError("Currently DFLASH speculative decoding only supports pp_size == 1."), ("dflash.resolve_pp",)
            )
        if not args.speculative_draft_model_path:
            raise Refused(
                ValueError("DFLASH speculative decoding requires setting --speculative-draft-model-path."),
                ("dflash.resolve_path",),
            )
        _dflash_block(plan)
    if name in ("NGRAM",) or not args.speculative_draft_model_path:
        return
    try:
        plan.drafter = model.drafter(args.speculative_draft_model_path)
    except (OSError, ValueError) as error:
        raise Refused(error, ("cfg.get",))
    if name == "DFLASH" and args.speculative_num_draft_tokens is None:
        args.speculative_num_draft_tokens = plan.drafter.block or 16
        if not plan.drafter.block:
            say.append(("warning", "speculative_num_draft_tokens is not set; defaulting to 16 for DFLASH."))
    window = args.speculative_draft_window_size or args.speculative_dflash_draft_window_size
    if name == "DFLASH" and window is not None and int(window) < plan.block:
        raise Refused(
            ValueError(
                "--speculative-draft-window-size must be >= --speculative-num-draft-tokens (block_size). "
                f"window_size={window}, block_size={plan.block}."
            )
        )
    if args.max_running_requests is None:
        args.max_running_requests = 48
        say.append(
            (
                "warning",
                "Max running requests is reset to 48 for speculative decoding. You can override this by explicitly "
                "setting --max-running-requests.",
            )
        )


def _dflash_block(plan: Plan) -> None:
    args = plan.args
    for field in ("speculative_num_steps", "speculative_eagle_topk"):
        value = getattr(args, field)
        if value is not None and int(value) != 1:
            plan.messages.append(("warning", f"DFLASH only supports {field} == 1; overriding {field}={value} to 1."))
        setattr(args, field, 1)
    block = args.speculative_dflash_block_size
    if block is None:
        return
    if int(block) <= 0:
        raise Refused(ValueError(f"DFLASH requires --speculative-dflash-block-size to be positive, got {block}."))
    tokens = args.speculative_num_draft_tokens
    if tokens is not None and int(tokens) != int(block):
        raise Refused(
            ValueError(
                "Both --speculative-num-draft-tokens and --speculative-dflash-block-size are set but they differ. "
                f"For DFLASH they must match. speculative_num_draft_tokens={tokens}, "
                f"speculative_dflash_block_size={block}."
            ),
            ("dflash.resolve_block",),
        )
    args.speculative_num_draft_tokens = int(block)


def _graphs(plan: Plan) -> None:
    """Which graphs are captured; later options go before earlier ones, as in the real precedence."""
    args = plan.args
    # Prefill graphs stay off for the incident's model, which is not on the list of architectures they are made for.
    decode, prefill = True, False
    if args.disable_cuda_graph:
        decode = prefill = False
    if args.disable_decode_cuda_graph or args.cuda_graph_backend_decode == "disabled":
        decode = False
    if args.disable_prefill_cuda_graph or args.cuda_graph_backend_prefill == "disabled":
        prefill = False
    config = args.cuda_graph_config
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            raise Refused(ValueError(f"cuda_graph_config is not JSON: {config!r}"))
    if isinstance(config, dict):
        backend = (config.get("decode") or {}).get("backend")
        decode = backend != "disabled" if backend else decode
    plan.decode_graphs, plan.prefill_graphs = decode, prefill
