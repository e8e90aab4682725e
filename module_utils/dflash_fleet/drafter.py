"""Does a DFlash drafter fit its target and the engine? Answered from two config.json and the drafter's tensor headers.

The engine asks part of this only after the target's weights are loaded, part of it in its warm-up, with the port bound,
and some of it never: it serves with a drafter made for another target, with another block size, or without `fc.weight`,
and every guess is thrown away. Each problem names both values. Rules as in SGLang 0.5.23
(speculative/dflash_utils.py, dflash_worker_v2.py, models/dflash.py).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

from . import releases

ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlashLagunaForCausalLM",
    "MuseGlimmerAssistantModel",
    "DFlash2DraftModel",
    "DFlash2BeamDraftModel",
    "MiniMaxDFlash2DraftModel",
)
#: The architecture whose tensors are known one by one; its alias has the same.
PLAIN = ("DFlashDraftModel", "MuseGlimmerAssistantModel")
DEFAULT_BLOCK_SIZE = 16
DEFAULT_MASK_TOKEN = "<|MASK|>"
#: Names under which some checkpoints store a tensor.
ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
#: A safetensors header is JSON of names and shapes; anything larger is no header.
HEADER_LIMIT = 100 << 20
#: Metadata of the stand-ins of rehearsal/models.py: the shapes that the real file has.
STAND_IN_SHAPES = "dflash_fleet.shapes"

Headers = dict[str, dict[str, Any]]


class HeaderError(ValueError):
    """A file that is not a whole safetensors file."""


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_header(path: str) -> tuple[Headers, dict[str, str]]:
    """Tensors (name -> dtype, shape) and metadata of a safetensors file, whose length is checked too."""
    size = os.path.getsize(path)
    name = os.path.basename(path)
    with open(path, "rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise HeaderError(f"{name} is cut off: {size} bytes are not even a header's length")
        (length,) = struct.unpack("<Q", start)
        if length > min(HEADER_LIMIT, size - 8):
            raise HeaderError(
                f"{name} is cut off or no safetensors file: its header has {length} bytes, the file {size}"
            )
        try:
            header = json.loads(stream.read(length))
            metadata = header.pop("__metadata__", {})
            tensors = {
                key: {"dtype": value["dtype"], "shape": list(value["shape"]), "end": value["data_offsets"][1]}
                for key, value in header.items()
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise HeaderError(f"{name} has no readable safetensors header")
    end = 8 + length + max((tensor.pop("end") for tensor in tensors.values()), default=0)
    if end != size:
        raise HeaderError(f"{name} is damaged: its header speaks of {end} bytes, the file has {size}")
    return tensors, metadata


def read_headers(folder: str) -> tuple[Headers, bool]:
    """All tensors of a model folder; true where they are a stand-in's, whose shapes are only declared."""
    files = sorted(f for f in os.listdir(folder) if f.endswith(".safetensors"))
    if not files:
        raise HeaderError(f"there is no .safetensors file in {folder}")
    found: Headers = {}
    stand_in = False
    for file in files:
        tensors, metadata = read_header(os.path.join(folder, file))
        if STAND_IN_SHAPES in metadata:
            stand_in = True
            declared = json.loads(metadata[STAND_IN_SHAPES])
            tensors = {name: {"dtype": "BF16", "shape": shape} for name, shape in declared.items()}
        found.update(tensors)
    return found, stand_in


def read_config(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as stream:
        config = json.load(stream)
    if not isinstance(config, dict):
        raise ValueError("config.json is not a mapping")
    return config


def read_tokens(folder: str) -> dict[str, int]:
    """Ids of the target's added tokens, as far as its tokenizer files tell."""
    tokens: dict[str, int] = {}
    for file in ("tokenizer.json", "tokenizer_config.json"):
        try:
            with open(os.path.join(folder, file), encoding="utf-8") as stream:
                content = json.load(stream)
            for token in content.get("added_tokens") or []:
                tokens[token["content"]] = int(token["id"])
            for number, token in (content.get("added_tokens_decoder") or {}).items():
                tokens[token["content"]] = int(number)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return tokens


# ---------------------------------------------------------------------------------------------------------------------
# Checking


def derived_layer_ids(target_layers: int, draft_layers: int) -> list[int]:
    """Which target layers a drafter reads when its configuration does not say: evenly from 1 to the last but two."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class _Check:
    def __init__(
        self,
        target: Mapping[str, Any],
        drafter: Mapping[str, Any],
        headers: Mapping[str, Mapping[str, Any]],
        block_size: int,
        version: str,
        tokens: Mapping[str, int],
    ) -> None:
        self.target = target.get("text_config") or target
        self.drafter = drafter
        self.own = drafter.get("text_config") or drafter
        self.dflash = drafter.get("dflash_config") or {}
        self.headers = {_plain_name(name): header for name, header in headers.items()}
        self.block_size = block_size
        self.version = version
        self.tokens = tokens
        self.problems: list[dict[str, str]] = []

    def say(self, problem: str, message: str, severity: str = "error") -> None:
        self.problems.append({"id": problem, "message": message, "severity": severity})

    def setting(self, key: str) -> Any:
        """`dflash_config` first, then the top level, as the engine reads it."""
        return self.dflash.get(key, self.drafter.get(key))

    def run(self) -> list[dict[str, str]]:
        self.release()
        self.architecture()
        self.block()
        layers = self.layers()
        self.vocabulary()
        self.attention()
        self.pairs()
        self.tensors(layers)
        return self.problems

    def release(self) -> None:
        try:
            version = releases.parse_version(self.version)
        except ValueError:
            return
        if version < releases.parse_version(releases.OLDEST):
            self.say(
                "release", f"SGLang {self.version} has no DFLASH; the first release that has it is {releases.OLDEST}"
            )

    def architecture(self) -> None:
        given = self.drafter.get("architectures") or []
        if not set(given) & set(ARCHITECTURES):
            self.say(
                "architecture",
                f"the drafter's architecture is {', '.join(map(str, given)) or 'not given'},"
                f" SGLang {self.version} runs {', '.join(ARCHITECTURES)}",
            )

    def block(self) -> None:
        given = self.setting("block_size")
        size = DEFAULT_BLOCK_SIZE if given is None else _whole(given)
        if size is None or size < 1:
            self.say("block_size", f"the drafter's block_size is {given!r}, which is not a positive whole number")
        elif size != self.block_size:
            source = f"its configuration says {size}" if given is not None else f"its configuration has none, so {size}"
            self.say(
                "block_size",
                f"sglang_drafter_block_size is {self.block_size}, but the drafter was made for another: {source}."
                " SGLang starts with it and almost no guess is accepted",
            )

    def layers(self) -> list[int]:
        """Checks what is read of the target; returns the layer ids, [] where they are not known."""
        target_layers = _whole(self.target.get("num_hidden_layers"))
        made_for = self.setting("num_target_layers")
        if made_for is not None and target_layers is not None and made_for != target_layers:
            self.say(
                "num_target_layers",
                f"the drafter was made for a target of {made_for} layers, this one has {target_layers}:"
                " SGLang starts with it and almost no guess is accepted",
            )
        draft_layers = _whole(self.own.get("num_hidden_layers"))
        if draft_layers is None or draft_layers < 1:
            given = self.own.get("num_hidden_layers")
            self.say("num_hidden_layers", f"the drafter's num_hidden_layers is {given!r}, which has to be 1 or more")
        ids = self.setting("target_layer_ids")
        if ids is None:
            if not draft_layers or target_layers is None:
                return []
            if target_layers < 4 and draft_layers > 1:
                self.say(
                    "target_layer_ids",
                    "the drafter has no target_layer_ids, and they can only be chosen for a target of 4 or more layers:"
                    f" this one has {target_layers}",
                )
                return []
            return derived_layer_ids(target_layers, draft_layers)
        if not isinstance(ids, list) or not ids or any(_whole(i) is None for i in ids):
            self.say("target_layer_ids", f"the drafter's target_layer_ids is {ids!r}, not a list of layer numbers")
            return []
        if target_layers is not None:
            outside = [i for i in ids if not 0 <= i < target_layers]
            if outside:
                self.say(
                    "target_layer_ids",
                    f"the drafter reads the target's layer {', '.join(map(str, outside))} (target_layer_ids {ids}),"
                    f" but the target has {target_layers} layers, 0 to {target_layers - 1}",
                )
        return ids

    def vocabulary(self) -> None:
        vocab = _whole(self.target.get("vocab_size"))
        own = _whole(self.own.get("vocab_size"))
        if vocab is not None and own is not None and vocab != own:
            self.say("vocab_size", f"the drafter's vocabulary has {own} tokens, the target's {vocab}")
        token = self.setting("mask_token")
        token = DEFAULT_MASK_TOKEN if token is None else token
        number = self.setting("mask_token_id")
        if not isinstance(token, str) or not token:
            self.say("mask_token", f"the drafter's mask_token is {token!r}, which is not a token")
            return
        known = self.tokens.get(token)
        if number is None:
            if known is not None and vocab is not None and known >= vocab:
                self.say(
                    "mask_token", f"the mask token {token} has id {known}, but the target's vocabulary ends at {vocab}"
                )
            return
        if _whole(number) is None or number < 0:
            self.say("mask_token", f"the drafter's mask_token_id is {number!r}, which is not a token's number")
        elif vocab is not None and number >= vocab:
            self.say(
                "mask_token", f"the drafter's mask_token_id is {number}, outside the target's vocabulary of {vocab}"
            )
        elif known is not None and known != number:
            self.say(
                "mask_token",
                f"the drafter's mask_token_id is {number}, but {token} is {known} in the target's tokenizer",
            )

    def attention(self) -> None:
        types = self.own.get("layer_types") or self.drafter.get("layer_types")
        if not isinstance(types, list):
            return
        layers = _whole(self.own.get("num_hidden_layers"))
        if layers and len(types) != layers:
            self.say("layer_types", f"the drafter lists {len(types)} layer_types for {layers} layers")
        window = self.own.get("sliding_window") or self.drafter.get("sliding_window")
        if "sliding_attention" in types and not window:
            self.say(
                "sliding_window", f"the drafter has sliding_attention layers, but its sliding_window is {window!r}"
            )

    def pairs(self) -> None:
        for left, right in (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")):
            a, b = self.dflash.get(left, 0), self.dflash.get(right, 0)
            if bool(a) != bool(b):
                self.say("pair", f"the drafter has {left} {a} and {right} {b}: either both are set or neither")

    def tensors(self, layer_ids: list[int]) -> None:
        hidden = _whole(self.own.get("hidden_size"))
        target_hidden = _whole(self.target.get("hidden_size"))
        if hidden is None:
            self.say("hidden_size", f"the drafter's hidden_size is {self.own.get('hidden_size')!r}")
            return
        if target_hidden is not None and hidden != target_hidden:
            self.say(
                "hidden_size",
                f"the drafter's hidden_size is {hidden}, the target's {target_hidden}:"
                " SGLang loads both, opens the port, and dies in its first batch",
            )
        if not set(self.drafter.get("architectures") or []) & set(PLAIN) or self.drafter.get("quantization_config"):
            return  # tensors of other kinds have other names and shapes
        expected = expected_tensors(self.own, hidden, len(layer_ids))
        missing, shapes = [], []
        for name, shape in expected.items():
            header = self.headers.get(name)
            if header is None:
                if not self._fused(name):
                    missing.append(name)
            elif shape is not None and list(header["shape"]) != shape:
                shapes.append((name, header["shape"], shape))
        for name, has, wants in shapes:
            if name == "fc.weight":
                self.say(
                    "fc_shape",
                    f"fc.weight has the shape {has}, but {len(layer_ids)} target layers of hidden size {hidden} need"
                    f" {wants}",
                )
            else:
                self.say("tensor_shape", f"{name} has the shape {has}, the drafter's configuration needs {wants}")
        if "fc.weight" in missing:
            missing.remove("fc.weight")
            self.say(
                "fc_missing",
                f"fc.weight (shape {expected['fc.weight']}) is not in the drafter's {len(self.headers)} tensors:"
                " SGLang starts with whatever is in memory and almost no guess is accepted",
            )
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            self.say(
                "tensors_missing",
                f"{len(missing)} of {len(expected)} tensors are not in the drafter's files: {', '.join(missing[:3])}"
                f"{more}. SGLang does not notice",
            )

    def _fused(self, name: str) -> bool:
        """Whether the file has the joined tensor that holds this one."""
        for part, whole in (
            (".q_proj.", ".qkv_proj."),
            (".k_proj.", ".qkv_proj."),
            (".v_proj.", ".qkv_proj."),
            (".gate_proj.", ".gate_up_proj."),
            (".up_proj.", ".gate_up_proj."),
        ):
            if part in name and name.replace(part, whole) in self.headers:
                return True
        return False


def _plain_name(name: str) -> str:
    if name.startswith("model."):
        name = name[len("model.") :]
    return ALIASES.get(name, name)


def expected_tensors(config: Mapping[str, Any], hidden: int, features: int) -> dict[str, list[int] | None]:
    """Tensors of a plain DFlash drafter; the shape is None where the configuration does not determine it."""
    heads = _whole(config.get("num_attention_heads"))
    kv_heads = _whole(config.get("num_key_value_heads")) or heads
    head_dim = _whole(config.get("head_dim")) or (hidden // heads if heads else None)
    inter = _whole(config.get("intermediate_size"))

    def shape(*sizes: int | None) -> list[int] | None:
        return [s for s in sizes if s is not None] if None not in sizes else None

    queries = heads * head_dim if heads and head_dim else None
    keys = kv_heads * head_dim if kv_heads and head_dim else None
    expected: dict[str, list[int] | None] = {
        "fc.weight": [hidden, hidden * features] if features else None,
        "hidden_norm.weight": [hidden],
        "norm.weight": [hidden],
    }
    for layer in range(_whole(config.get("num_hidden_layers")) or 0):
        prefix = f"layers.{layer}."
        expected.update(
            {
                prefix + "input_layernorm.weight": [hidden],
                prefix + "post_attention_layernorm.weight": [hidden],
                prefix + "self_attn.q_proj.weight": shape(queries, hidden),
                prefix + "self_attn.k_proj.weight": shape(keys, hidden),
                prefix + "self_attn.v_proj.weight": shape(keys, hidden),
                prefix + "self_attn.o_proj.weight": shape(hidden, queries),
                prefix + "self_attn.q_norm.weight": shape(head_dim),
                prefix + "self_attn.k_norm.weight": shape(head_dim),
                prefix + "mlp.gate_proj.weight": shape(inter, hidden),
                prefix + "mlp.up_proj.weight": shape(inter, hidden),
                prefix + "mlp.down_proj.weight": shape(hidden, inter),
            }
        )
    return expected


def check(
    target_config: Mapping[str, Any],
    drafter_config: Mapping[str, Any],
    drafter_headers: Mapping[str, Mapping[str, Any]],
    block_size: int,
    version: str,
    tokens: Mapping[str, int] | None = None,
) -> list[dict[str, str]]:
    """Every problem as {id, message, severity}; [] where drafter, target, block size and release fit together.

    `drafter_headers` maps each tensor to its dtype and shape, `tokens` the target's added tokens to their ids.
    """
    return _Check(target_config, drafter_config, drafter_headers, block_size, version, tokens or {}).run()


def check_folders(target: str, drafter: str, block_size: int, version: str) -> tuple[list[dict[str, str]], bool]:
    """(problems, whether the drafter is a rehearsal stand-in) of two model folders. Reads headers, no weights."""
    problems: list[dict[str, str]] = []
    configs = []
    for folder, what in ((target, "target"), (drafter, "drafter")):
        try:
            configs.append(read_config(folder))
        except (OSError, ValueError) as error:
            message = f"the {what}'s config.json in {folder} cannot be read: {error}"
            problems.append({"id": f"{what}_config", "message": message, "severity": "error"})
    try:
        headers, stand_in = read_headers(drafter)
    except (OSError, HeaderError) as error:
        message = f"the drafter's weights cannot be read: {error}"
        problems.append({"id": "drafter_weights", "message": message, "severity": "error"})
        return problems, False
    if problems:
        return problems, stand_in
    return check(configs[0], configs[1], headers, block_size, version, read_tokens(target)), stand_in
