#!/usr/bin/env python3
"""Write the small models of demo and tests as repositories that `rehearsal/hub.py` serves.

Nothing is downloaded: weights, tokenizer and configuration are made here, byte for byte the same on every machine
and every Python (integer arithmetic on SHAKE-256 output, no libm), so a revision can be pinned in an inventory.

A tiny Llama target and a tiny DFlash drafter run in the real SGLang on a CPU. The *constant* target always answers the
same word, whatever it is asked, and its drafter always proposes it: accept length 8.0 with block size 8. The *varied*
target has random weights and a random drafter: accept length 1.02, which is what a useless drafter looks like.

Layout: OUT/<org>/<name>/<revision>/<files>, and OUT/index.json saying which revision `main` is.
"""

from __future__ import annotations

import argparse
import array
import hashlib
import json
import os
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TARGET = "dflash-fleet/tiny-llama-target"
DRAFTER = "dflash-fleet/tiny-dflash-drafter"
VARIED_TARGET = "dflash-fleet/tiny-llama-varied"
RANDOM_DRAFTER = "dflash-fleet/tiny-dflash-drafter-random"
KIMI_TARGET = "moonshotai/Kimi-K2.6"
KIMI_DRAFTER = "SubSir/Kimi-K2.6-DFlash-tmp-long"
BAD_PREFIX = "dflash-fleet/tiny-dflash-bad-"

VOCAB = 512
HIDDEN = 64
INTERMEDIATE = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
CONTEXT = 2048
TARGET_LAYERS = 4
DRAFT_LAYERS = 2
BLOCK = 8
MASK_TOKEN = VOCAB - 1
TARGET_LAYER_IDS = (0, 1, 2)

BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
CONSTANT_WORD = "\u0120ready"  # byte-level BPE writes a leading space as U+0120

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What the merges of the tokenizer are learned from.
CORPUS = """
The fleet is ready when every host is ready, and a host is ready when its engine has answered a question. The first
host loads the weights, the second host waits, then both hosts are ready and the router sends them requests. A
drafter guesses the next words and the target checks the guess; when the guess was right the answer comes sooner,
when the guess was wrong the target says its own word and nothing is lost. One unit runs one engine, one engine
holds one model, one model is one revision, and a revision never changes. The graph of the decode step is captured
before the engine is ready. If a rank stops, the engine stops, the journal says why, and the next start is slower
but ready. Count to eight: one two three four five six seven eight. Tokens per second, seconds per token, batch
after batch, block after block. Please write a short line about the sea, the weather, the mountain, the garden, the
city at night or the train in the morning. What is a good name for a small blue boat? Who keeps the list of servers,
and where does the system user store the assistant key?
"""


# ---------------------------------------------------------------------------------------------------------------------
# bfloat16 tensors and the safetensors format


class Noise:
    """A reproducible stream of roughly normal numbers (sum of four uniform 16-bit integers)."""

    # Standard deviation of the sum of four uniform integers of 0..65535.
    _SIGMA = 37837.22

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._used = 0

    def take(self, count: int, std: float) -> list[float]:
        self._used += 1
        raw = array.array("H")
        raw.frombytes(hashlib.shake_256(b"dflash-fleet %d %d" % (self._seed, self._used)).digest(count * 8))
        if sys.byteorder == "big":
            raw.byteswap()
        scale = std / self._SIGMA
        return [(raw[i] + raw[i + 1] + raw[i + 2] + raw[i + 3] - 131070) * scale for i in range(0, count * 4, 4)]


def bfloat16(values: Iterable[float]) -> bytes:
    """Values as little-endian bfloat16, rounded to nearest even."""
    floats = array.array("f", values)
    bits = array.array("I")
    bits.frombytes(floats.tobytes())
    out = array.array("H", [((b + 0x7FFF + ((b >> 16) & 1)) >> 16) & 0xFFFF for b in bits])
    if sys.byteorder == "big":
        out.byteswap()
    return out.tobytes()


class Tensors:
    """Named bfloat16 tensors in file order."""

    def __init__(self, noise: Noise) -> None:
        self.noise = noise
        self.items: dict[str, tuple[list[int], list[float]]] = {}

    def random(self, name: str, shape: list[int], std: float) -> None:
        count = 1
        for size in shape:
            count *= size
        self.items[name] = (shape, self.noise.take(count, std))

    def ones(self, name: str, size: int) -> None:
        self.items[name] = ([size], [1.0] * size)

    def encode(self, metadata: Mapping[str, str] | None = None) -> bytes:
        return safetensors({k: (s, bfloat16(v)) for k, (s, v) in self.items.items()}, metadata)


def safetensors(tensors: Mapping[str, tuple[list[int], bytes]], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file: eight bytes of header length, a JSON header padded to eight, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _shape, data in tensors.values())


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer: byte-level BPE


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte value, as every byte-level BPE tokenizer writes it.

    Bytes that print are themselves; the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, spare = [], 0x100
    for value in range(256):
        if value in printable:
            alphabet.append(chr(value))
        else:
            alphabet.append(chr(spare))
            spare += 1
    return alphabet


def learn_merges(text: str, count: int) -> list[tuple[str, str]]:
    """The most frequent pair first, ties by spelling: the same list everywhere."""
    alphabet = byte_alphabet()
    words: dict[tuple[str, ...], int] = {}
    for piece in re.findall(r" ?[A-Za-z]+| ?[^\sA-Za-z]+", " ".join(text.split())):
        word = tuple(alphabet[b] for b in piece.encode())
        words[word] = words.get(word, 0) + 1
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: dict[tuple[str, str], int] = {}
        for word, times in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] = pairs.get(pair, 0) + times
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        merged: dict[tuple[str, ...], int] = {}
        for word, times in words.items():
            new: list[str] = []
            i = 0
            while i < len(word):
                if word[i : i + 2] == best:
                    new.append(word[i] + word[i + 1])
                    i += 2
                else:
                    new.append(word[i])
                    i += 1
            merged[tuple(new)] = merged.get(tuple(new), 0) + times
        words = merged
    return merges


def tokenizer_files() -> tuple[dict[str, bytes], dict[str, int]]:
    """tokenizer.json, tokenizer_config.json, and the vocabulary.

    The last id (511) has no token: it is the drafter's mask, which the engine adds by id.
    """
    vocab: dict[str, int] = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    for char in sorted(byte_alphabet()):
        vocab[char] = len(vocab)
    merges = learn_merges(CORPUS, VOCAB - 1 - len(vocab))
    for left, right in merges:
        vocab[left + right] = len(vocab)
    plain = {"lstrip": False, "rstrip": False}
    added = [
        {"id": i, "content": token, "single_word": False, **plain, "normalized": False, "special": True}
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config)}, vocab


# ---------------------------------------------------------------------------------------------------------------------
# The tiny models


def llama_target(title: str, constant: bool) -> dict[str, bytes]:
    """A Llama of four layers. Constant: one direction of the residual dominates and one row of the head reads it."""
    files, vocab = tokenizer_files()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
    }
    tensors = Tensors(Noise(0))
    tensors.random("model.embed_tokens.weight", [VOCAB, HIDDEN], 0.02)
    for layer in range(TARGET_LAYERS):
        _decoder_layer(tensors, f"model.layers.{layer}.", HIDDEN, 0.02, qk_norm=False)
    tensors.ones("model.norm.weight", HIDDEN)
    tensors.random("lm_head.weight", [VOCAB, HIDDEN], 0.02)
    if constant:
        embedding = tensors.items["model.embed_tokens.weight"][1]
        for row in range(VOCAB):
            embedding[row * HIDDEN] += 0.5
        word = vocab[CONSTANT_WORD] * HIDDEN
        tensors.items["lm_head.weight"][1][word : word + HIDDEN] = [0.5] + [0.0] * (HIDDEN - 1)
    files["config.json"] = _json(config)
    files["generation_config.json"] = _json(
        {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    )
    files["model.safetensors"] = tensors.encode()
    what = "It answers the same word to everything." if constant else "Random weights: it answers varied nonsense."
    files["README.md"] = f"# {title}\n\nA made-up model of dflash-fleet for tests and demo. {what}\n".encode()
    return files


def _decoder_layer(tensors: Tensors, prefix: str, hidden: int, std: float, qk_norm: bool) -> None:
    tensors.ones(prefix + "input_layernorm.weight", hidden)
    for name, rows, columns in (
        ("q_proj", HEADS * HEAD_DIM, hidden),
        ("k_proj", KV_HEADS * HEAD_DIM, hidden),
        ("v_proj", KV_HEADS * HEAD_DIM, hidden),
        ("o_proj", hidden, HEADS * HEAD_DIM),
    ):
        tensors.random(f"{prefix}self_attn.{name}.weight", [rows, columns], std)
    if qk_norm:
        tensors.ones(prefix + "self_attn.q_norm.weight", HEAD_DIM)
        tensors.ones(prefix + "self_attn.k_norm.weight", HEAD_DIM)
    tensors.ones(prefix + "post_attention_layernorm.weight", hidden)
    tensors.random(prefix + "mlp.gate_proj.weight", [INTERMEDIATE, hidden], std)
    tensors.random(prefix + "mlp.up_proj.weight", [INTERMEDIATE, hidden], std)
    tensors.random(prefix + "mlp.down_proj.weight", [hidden, INTERMEDIATE], std)


def dflash_drafter(
    title: str,
    std: float,
    *,
    hidden: int = HIDDEN,
    layer_ids: tuple[int, ...] = TARGET_LAYER_IDS,
    fc_inputs: int | None = None,
    mask_token: int = MASK_TOKEN,
    target_layers: int = TARGET_LAYERS,
    block: int = BLOCK,
    with_fc: bool = True,
    architecture: str = "DFlashDraftModel",
    note: str = "",
) -> dict[str, bytes]:
    """A DFlash drafter of two layers. It has no tokenizer, embedding or head: it uses the target's."""
    config = {
        "architectures": [architecture],
        "model_type": "qwen3",
        "block_size": block,
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": list(layer_ids)},
        "num_target_layers": target_layers,
        "num_hidden_layers": DRAFT_LAYERS,
        "hidden_size": hidden,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "dtype": "bfloat16",
    }
    tensors = Tensors(Noise(1))
    if with_fc:
        tensors.random("fc.weight", [hidden, (fc_inputs or len(layer_ids)) * hidden], std)
    tensors.ones("hidden_norm.weight", hidden)
    for layer in range(DRAFT_LAYERS):
        _decoder_layer(tensors, f"layers.{layer}.", hidden, std, qk_norm=True)
    tensors.ones("norm.weight", hidden)
    readme = f"# {title}\n\nA made-up DFlash drafter of dflash-fleet for tests and demo.{' ' + note if note else ''}\n"
    return {"README.md": readme.encode(), "config.json": _json(config), "model.safetensors": tensors.encode()}


# Drafters that a check has to refuse: what is wrong -> how it is made. SGLang accepts three of them without an error.
BAD_DRAFTERS: dict[str, dict[str, Any]] = {
    "hidden-size": {"hidden": 32, "note": "Broken on purpose: hidden size 32, the target has 64."},
    "layer-id": {"layer_ids": (0, 1, 9), "note": "Broken on purpose: reads layer 9, the target has 4."},
    "k-mismatch": {"fc_inputs": 2, "note": "Broken on purpose: three target layers, but fc.weight is made for two."},
    "mask-token": {"mask_token": VOCAB, "note": "Broken on purpose: the mask token is outside the vocabulary."},
    "num-target-layers": {"target_layers": 36, "note": "Broken on purpose: made for a target of 36 layers."},
    "block-size": {"block": 4, "note": "Broken on purpose where block size 8 is set: it is made for 4."},
    "fc-missing": {"with_fc": False, "note": "Broken on purpose: fc.weight is not in the file."},
    "architecture": {"architecture": "NoSuchDraftModel", "note": "Broken on purpose: an unknown architecture."},
}


# ---------------------------------------------------------------------------------------------------------------------
# Stand-ins for rehearsals: the true names and configurations, hardly any bytes

STAND_IN = (
    "**This is a rehearsal stand-in made by dflash-fleet, not the published model:** the configuration has the real\n"
    "dimensions, the weight files hold a few meaningless bytes.\n"
)

KIMI_TEXT_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}

# One tensor of each shard; enough for an index that names several files.
KIMI_SHARDS = (
    ("language_model.model.embed_tokens.weight", "language_model.model.layers.0.input_layernorm.weight"),
    ("language_model.model.layers.30.input_layernorm.weight", "language_model.model.layers.60.input_layernorm.weight"),
    ("language_model.model.norm.weight", "language_model.lm_head.weight"),
)


def kimi_target() -> dict[str, bytes]:
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": KIMI_TEXT_CONFIG,
    }
    noise = Noise(2)
    files = {"README.md": f"# Kimi-K2.6\n\n{STAND_IN}".encode(), "config.json": _json(config)}
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(KIMI_SHARDS, start=1):
        file = f"model-{number:05d}-of-{len(KIMI_SHARDS):05d}.safetensors"
        data = {name: ([32768], bfloat16(noise.take(32768, 0.02))) for name in names}
        weight_map.update(dict.fromkeys(names, file))
        total += sum(len(raw) for _shape, raw in data.values())
        files[file] = safetensors(data, {"dflash_fleet.stand_in": "true"})
    files["model.safetensors.index.json"] = _json({"metadata": {"total_size": total}, "weight_map": weight_map})
    return files


def kimi_drafter() -> dict[str, bytes]:
    """Six layers, block 8. The file declares the shapes that the real tensors have, for the drafter check to read."""
    hidden, inter, heads, kv_heads, head_dim, layers = 7168, 18432, 64, 8, 128, 6
    layer_ids = [1, 12, 24, 35, 47, 58]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"mask_token_id": 163838, "target_layer_ids": layer_ids},
        "num_target_layers": 61,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * layers,
        "dtype": "bfloat16",
    }
    shapes: dict[str, list[int]] = {
        "fc.weight": [hidden, hidden * len(layer_ids)],
        "hidden_norm.weight": [hidden],
        "norm.weight": [hidden],
    }
    for n in range(layers):
        shapes.update(
            {
                f"layers.{n}.input_layernorm.weight": [hidden],
                f"layers.{n}.post_attention_layernorm.weight": [hidden],
                f"layers.{n}.self_attn.q_proj.weight": [heads * head_dim, hidden],
                f"layers.{n}.self_attn.k_proj.weight": [kv_heads * head_dim, hidden],
                f"layers.{n}.self_attn.v_proj.weight": [kv_heads * head_dim, hidden],
                f"layers.{n}.self_attn.o_proj.weight": [hidden, heads * head_dim],
                f"layers.{n}.self_attn.q_norm.weight": [head_dim],
                f"layers.{n}.self_attn.k_norm.weight": [head_dim],
                f"layers.{n}.mlp.gate_proj.weight": [inter, hidden],
                f"layers.{n}.mlp.up_proj.weight": [inter, hidden],
                f"layers.{n}.mlp.down_proj.weight": [hidden, inter],
            }
        )
    noise = Noise(3)
    data = {name: ([16], bfloat16(noise.take(16, 0.02))) for name in shapes}
    metadata = {"dflash_fleet.stand_in": "true", "dflash_fleet.shapes": json.dumps(shapes, separators=(",", ":"))}
    return {
        "README.md": f"# Kimi-K2.6-DFlash-tmp-long\n\n{STAND_IN}".encode(),
        "config.json": _json(config),
        "model.safetensors": safetensors(data, metadata),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Repositories


def build(bad: bool = False) -> dict[str, dict[str, bytes]]:
    """Every repository: name -> {path: content}."""
    repos = {
        TARGET: llama_target("tiny-llama-target", constant=True),
        DRAFTER: dflash_drafter("tiny-dflash-drafter", 0.002, note="For tiny-llama-target: every guess is right."),
        VARIED_TARGET: llama_target("tiny-llama-varied", constant=False),
        RANDOM_DRAFTER: dflash_drafter("tiny-dflash-drafter-random", 0.02, note="Hardly a guess is right."),
        KIMI_TARGET: kimi_target(),
        KIMI_DRAFTER: kimi_drafter(),
    }
    if bad:
        for what, change in BAD_DRAFTERS.items():
            repos[BAD_PREFIX + what] = dflash_drafter(f"tiny-dflash-bad-{what}", 0.002, **change)
    return repos


def revision_of(files: Mapping[str, bytes]) -> str:
    """A 40-hex name computed from paths and contents alone (not a git commit, but used like one)."""
    digest = hashlib.sha1(b"dflash-fleet repository\n", usedforsecurity=False)
    for path in sorted(files):
        blob = hashlib.sha256(files[path]).hexdigest()
        digest.update(f"{blob} {path}\n".encode())
    return digest.hexdigest()


def write(out: Path, repos: Mapping[str, Mapping[str, bytes]]) -> dict[str, str]:
    """Write repositories that are not there yet; return name -> revision. Safe to interrupt and to repeat."""
    out.mkdir(parents=True, exist_ok=True)
    index_file = out / "index.json"
    index: dict[str, Any] = {"schema": 1, "repos": {}}
    if index_file.exists():
        index = json.loads(index_file.read_text())
    revisions = {}
    for name, files in repos.items():
        revision = revisions[name] = revision_of(files)
        folder = out / name / revision
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
            partial.chmod(0o755)
            for path, data in files.items():
                (partial / path).parent.mkdir(parents=True, exist_ok=True)
                (partial / path).write_bytes(data)
            try:
                partial.rename(folder)
            except OSError:  # somebody else was quicker
                shutil.rmtree(partial)
        index["repos"][name] = {"main": revision}
    fresh = index_file.with_name(f"index.json.{os.getpid()}")
    fresh.write_bytes(_json(index))
    fresh.replace(index_file)
    return revisions


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to write the repositories under")
    parser.add_argument("--bad", action="store_true", help="also the drafters that are broken on purpose")
    parser.add_argument("--list", action="store_true", help="print `repository revision` lines")
    args = parser.parse_args(argv)
    if not args.out and not args.list:
        parser.error("give --out DIR, --list, or both")
    repos = build(bad=args.bad)
    revisions = write(args.out, repos) if args.out else {name: revision_of(files) for name, files in repos.items()}
    if args.list:
        for name, revision in revisions.items():
            print(name, revision)
    return 0


if __name__ == "__main__":
    sys.exit(main())
