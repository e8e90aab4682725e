"""The drafter contract, value by value."""

from __future__ import annotations

import copy
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import drafter

ROOT = Path(__file__).resolve().parents[2]

TARGET: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 6, "vocab_size": 100}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 8,
    "dflash_config": {"mask_token_id": 99, "target_layer_ids": [1, 3]},
    "num_target_layers": 6,
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 100,
    "layer_types": ["full_attention", "full_attention"],
}


def headers_for(config: dict[str, Any], features: int = 2) -> dict[str, dict[str, Any]]:
    shapes = drafter.expected_tensors(config, config["hidden_size"], features)
    return {name: {"dtype": "BF16", "shape": shape} for name, shape in shapes.items()}


def change(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value set (or, for ..., removed); `a.b` is nested."""
    copied = copy.deepcopy(config)
    *parents, last = path.split(".")
    inner = copied
    for parent in parents:
        inner = inner[parent]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return copied


def ids(problems: list[dict[str, str]]) -> list[str]:
    return [p["id"] for p in problems]


def run(
    target: dict[str, Any] = TARGET,
    config: dict[str, Any] = DRAFTER,
    headers: dict[str, Any] | None = None,
    block_size: int = 8,
    version: str = "0.5.20",
    tokens: dict[str, int] | None = None,
) -> list[dict[str, str]]:
    return drafter.check(
        target, config, headers_for(DRAFTER) if headers is None else headers, block_size, version, tokens
    )


def test_what_fits() -> None:
    assert run() == []
    assert run(target={"text_config": TARGET, "hidden_size": 1}) == []
    assert run(tokens={"<|MASK|>": 99, "<|other|>": 98}) == []


@pytest.mark.parametrize(
    ("path", "value", "problem", "says"),
    [
        ("architectures", ["LlamaForCausalLM"], "architecture", "LlamaForCausalLM"),
        ("architectures", ..., "architecture", "not given"),
        ("block_size", 4, "block_size", "configuration says 4"),
        ("block_size", ..., "block_size", "so 16"),
        ("block_size", 0, "block_size", "0"),
        ("block_size", "8", "block_size", "'8'"),
        ("dflash_config.block_size", 16, "block_size", "configuration says 16"),
        ("num_target_layers", 61, "num_target_layers", "61 layers, this one has 6"),
        ("dflash_config.num_target_layers", 5, "num_target_layers", "5 layers, this one has 6"),
        ("num_hidden_layers", None, "num_hidden_layers", "None"),
        ("dflash_config.target_layer_ids", [1, 6], "target_layer_ids", "layer 6 (target_layer_ids [1, 6])"),
        ("dflash_config.target_layer_ids", [-1, 2], "target_layer_ids", "-1"),
        ("dflash_config.target_layer_ids", [], "target_layer_ids", "[]"),
        ("dflash_config.target_layer_ids", "1,3", "target_layer_ids", "'1,3'"),
        ("dflash_config.target_layer_ids", [1.0, 3], "target_layer_ids", "1.0"),
        ("dflash_config.target_layer_ids", [1, 2, 3], "fc_shape", "[8, 16], but 3 target layers"),
        ("vocab_size", 64, "vocab_size", "64 tokens, the target's 100"),
        ("dflash_config.mask_token_id", 100, "mask_token", "vocabulary of 100"),
        ("dflash_config.mask_token_id", -1, "mask_token", "-1"),
        ("dflash_config.mask_token_id", True, "mask_token", "True"),
        ("dflash_config.mask_token", "", "mask_token", "''"),
        ("layer_types", ["full_attention"], "layer_types", "1 layer_types for 2 layers"),
        ("layer_types", ["full_attention", "sliding_attention"], "sliding_window", "None"),
        ("dflash_config.conv_kernel_size", 3, "pair", "conv_group_size 0"),
        ("dflash_config.selector_top_k", 3, "pair", "selector_rank 0"),
        ("hidden_size", None, "hidden_size", "None"),
        ("intermediate_size", 32, "tensor_shape", "[16, 8], the drafter's configuration needs [32, 8]"),
    ],
)
def test_configuration(path: str, value: Any, problem: str, says: str) -> None:
    problems = run(config=change(DRAFTER, path, value))
    assert problem in ids(problems)
    assert any(says in p["message"] for p in problems if p["id"] == problem)
    assert {p["severity"] for p in problems} == {"error"}


def test_block_size_of_the_command_line() -> None:
    (problem,) = run(block_size=4)
    assert problem["id"] == "block_size"
    assert "sglang_drafter_block_size is 4" in problem["message"]
    assert run(config=change(DRAFTER, "block_size", ...), block_size=16) == []


def test_tokenizer_disagrees() -> None:
    (problem,) = run(tokens={"<|MASK|>": 7})
    assert problem["id"] == "mask_token"
    assert "99" in problem["message"]
    assert "7" in problem["message"]


def test_release_without_dflash() -> None:
    assert ids(run(version="0.5.10")) == ["release"]
    assert run(version="0.5.11+rehearsal") == []


@pytest.mark.parametrize(
    ("layers", "draft", "expected"),
    [(61, 6, [1, 12, 24, 35, 47, 58]), (36, 1, [18]), (4, 2, [1, 1]), (36, 5, [1, 9, 17, 25, 33])],
)
def test_derived_layer_ids(layers: int, draft: int, expected: list[int]) -> None:
    assert drafter.derived_layer_ids(layers, draft) == expected


def test_layer_ids_that_are_derived() -> None:
    config = change(DRAFTER, "dflash_config.target_layer_ids", ...)
    assert run(config=config) == []
    assert ids(run(target={**TARGET, "num_hidden_layers": 3}, config=change(config, "num_target_layers", 3))) == [
        "target_layer_ids"
    ]


class TestTensors:
    def test_fc_missing(self) -> None:
        headers = headers_for(DRAFTER)
        del headers["fc.weight"]
        assert ids(run(headers=headers)) == ["fc_missing"]

    def test_a_layer_missing(self) -> None:
        headers = {n: h for n, h in headers_for(DRAFTER).items() if not n.startswith("layers.1.")}
        (problem,) = run(headers=headers)
        assert problem["id"] == "tensors_missing"
        assert problem["message"].startswith("11 of 25 tensors")

    def test_other_spellings(self) -> None:
        headers = {f"model.{n}": h for n, h in headers_for(DRAFTER).items()}
        headers["encoder.fc.weight"] = headers.pop("model.fc.weight")
        assert run(headers=headers) == []

    def test_joined_projections(self) -> None:
        headers = headers_for(DRAFTER)
        for layer in range(2):
            for part in "qkv":
                del headers[f"layers.{layer}.self_attn.{part}_proj.weight"]
            for part in ("gate", "up"):
                del headers[f"layers.{layer}.mlp.{part}_proj.weight"]
            headers[f"layers.{layer}.self_attn.qkv_proj.weight"] = {"dtype": "BF16", "shape": [16, 8]}
            headers[f"layers.{layer}.mlp.gate_up_proj.weight"] = {"dtype": "BF16", "shape": [32, 8]}
        assert run(headers=headers) == []

    @pytest.mark.parametrize(
        ("path", "value"), [("architectures", ["DFlash2DraftModel"]), ("quantization_config", {"quant_method": "fp8"})]
    )
    def test_not_looked_at_where_names_are_others(self, path: str, value: Any) -> None:
        assert run(config=change(DRAFTER, path, value), headers={"fc.qweight": {"dtype": "I32", "shape": [1]}}) == []


# -- files


def write_file(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


GOOD = {"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}, "__metadata__": {"format": "pt"}}


def test_read_header(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file, GOOD, b"1234")
    tensors, metadata = drafter.read_header(str(file))
    assert tensors == {"a": {"dtype": "BF16", "shape": [2]}}
    assert metadata == {"format": "pt"}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (GOOD, b"123", "its header speaks of"),
        (GOOD, b"12345", "its header speaks of"),
        (b"not json", b"1234", "no readable"),
        ({"a": {"dtype": "BF16"}}, b"1234", "no readable"),
        ([], b"1234", "no readable"),
    ],
)
def test_damaged_files(tmp_path: Path, header: Any, data: bytes, says: str) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file, header, data)
    with pytest.raises(drafter.HeaderError, match=says):
        drafter.read_header(str(file))


@pytest.mark.parametrize("content", [b"", b"1234", struct.pack("<Q", 1 << 60) + b"{}"])
def test_cut_off_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(drafter.HeaderError, match="cut off"):
        drafter.read_header(str(file))


def folder(path: Path, config: Any, files: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, header in files.items():
        size = max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
        write_file(path / name, header, b"\0" * size)
    return path


def drafter_folder(path: Path) -> Path:
    """Two shards, as large drafters have."""
    shards: list[dict[str, Any]] = [{}, {}]
    offsets = [0, 0]
    for number, (name, header) in enumerate(headers_for(DRAFTER).items()):
        size = 2
        for count in header["shape"]:
            size *= count
        which = number % 2
        shards[which][name] = {**header, "data_offsets": [offsets[which], offsets[which] + size]}
        offsets[which] += size
    return folder(path, DRAFTER, {f"model-{n}.safetensors": shard for n, shard in enumerate(shards)})


def test_folders(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", TARGET, {})
    draft = drafter_folder(tmp_path / "drafter")
    assert drafter.check_folders(str(target), str(draft), 8, "0.5.20") == ([], False)
    (target / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"5": {"content": "<|MASK|>"}}}))
    assert ids(drafter.check_folders(str(target), str(draft), 8, "0.5.20")[0]) == ["mask_token"]
    (target / "tokenizer.json").write_text("[")
    (draft / "config.json").write_text("[]")
    assert ids(drafter.check_folders(str(target), str(draft), 8, "0.5.20")[0]) == ["drafter_config"]
    (target / "config.json").unlink()
    for shard in draft.glob("*.safetensors"):
        shard.unlink()
    assert ids(drafter.check_folders(str(target), str(draft), 8, "0.5.20")[0]) == [
        "target_config",
        "drafter_config",
        "drafter_weights",
    ]


# -- the module


def module_run(arguments: dict[str, Any], check: bool = False) -> dict[str, Any]:
    code = (
        "import sys, runpy, ansible.module_utils as m; m.__path__.append(sys.argv[1]);"
        "import ansible.module_utils.basic as b; b._ANSIBLE_PROFILE = 'legacy';"
        "b._ANSIBLE_ARGS = sys.stdin.buffer.read();"
        "runpy.run_path(sys.argv[2], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "module_utils"), str(ROOT / "library" / "drafter_check.py")],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": {**arguments, "_ansible_check_mode": check}}).encode(),
        capture_output=True,
        check=False,
    )
    return json.loads(done.stdout)


def test_module(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", TARGET, {})
    draft = drafter_folder(tmp_path / "drafter")
    arguments = {"target": str(target), "drafter": str(draft), "block_size": 8, "version": "0.5.20", "instance": "main"}
    assert module_run(arguments)["problems"] == []
    failed = module_run({**arguments, "block_size": 4})
    assert failed["failed"]
    assert not failed["changed"]
    assert "sglang_drafter_block_size is 4" in failed["msg"]
    assert "instance main" in failed["msg"]
    warned = module_run({**arguments, "block_size": 4, "mode": "warn"})
    assert not warned.get("failed")
    assert ids(warned["problems"]) == ["block_size"]
    assert not module_run({**arguments, "target": str(tmp_path / "later")}, check=True)["checked"]
