"""What config.json says about target and drafter; without files, the incident's model is assumed."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any

DRAFT_ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlashLagunaForCausalLM",
    "MuseGlimmerAssistantModel",
    "DFlash2DraftModel",
    "DFlash2BeamDraftModel",
    "MiniMaxDFlash2DraftModel",
)


@dataclass
class Target:
    """The facts of the target model that the log and the rules need."""

    architecture: str = "KimiK25ForConditionalGeneration"
    model_type: str = "kimi_k25"
    layers: int = 61
    hidden: int = 7168
    vocab: int = 163840
    context: int = 262144
    quantization: str = "compressed-tensors"
    shards: int = 64

    @property
    def sees_images(self) -> bool:
        return "ConditionalGeneration" in self.architecture


@dataclass
class Drafter:
    """The facts of the drafter; see the drafter contract in the docs."""

    architecture: str = "DFlashDraftModel"
    hidden: int | None = 7168
    block: int | None = 8
    target_layers: int | None = 61
    layer_ids: list[int] | None = None
    layers: int = 6
    mask_token: str = "<|MASK|>"
    mask_token_id: int = 163838


def _config(path: str) -> dict[str, Any] | None:
    """config.json of a local folder; None for a hub name."""
    if not os.path.isdir(path):
        if path.count("/") == 1 and re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            return None
        # The words of huggingface_hub, which takes a missing folder for a repository name.
        raise OSError(
            f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'."
            " Use `repo_type` argument if needed."
        )
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as stream:
            data = json.load(stream)
    except FileNotFoundError:
        raise ValueError(f"Unrecognized model in {path}. Should have a `model_type` key in its config.json.")
    if not isinstance(data, dict) or not (data.get("architectures") or data.get("model_type")):
        raise ValueError(f"Unrecognized model in {path}. Should have a `model_type` key in its config.json.")
    return data


def target(path: str) -> Target:
    """Reads the target; the error is what real SGLang raises."""
    data = _config(path)
    if data is None:
        return Target()
    text = data.get("text_config") or data
    found = Target(
        architecture=(data.get("architectures") or ["LlamaForCausalLM"])[0],
        model_type=str(data.get("model_type", "")),
        layers=int(text.get("num_hidden_layers", 61)),
        hidden=int(text.get("hidden_size", 7168)),
        vocab=int(text.get("vocab_size", 163840)),
        context=int(text.get("max_position_embeddings", 262144)),
    )
    quantization = data.get("quantization_config") or text.get("quantization_config") or {}
    found.quantization = str(quantization.get("quant_method", "")) if quantization else ""
    found.shards = max(1, sum(name.endswith(".safetensors") for name in os.listdir(path)))
    return found


def drafter(path: str) -> Drafter:
    """Reads the drafter; values in dflash_config go before those at the top."""
    data = _config(path)
    if data is None:
        return Drafter()
    inner = data.get("dflash_config") or {}

    def pick(name: str) -> Any:
        return inner.get(name, data.get(name))

    block, mask = pick("block_size"), pick("mask_token_id")
    return Drafter(
        architecture=(data.get("architectures") or ["DFlashDraftModel"])[0],
        hidden=data.get("hidden_size"),
        block=int(block) if block else None,
        target_layers=data.get("num_target_layers"),
        layer_ids=pick("target_layer_ids"),
        layers=int(data.get("num_hidden_layers") or 1),
        mask_token=str(pick("mask_token") or "<|MASK|>"),
        mask_token_id=int(mask) if mask is not None else 163838,
    )
