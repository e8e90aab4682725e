"""The small models of demo and tests: the same bytes everywhere, and well-formed."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import drafter

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"rehearsal_{name}", ROOT / "rehearsal" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


models = load("models")

# Pinned in inventory/demo: a change here changes what the demo fetches.
REVISIONS = {
    "dflash-fleet/tiny-llama-target": "e4c5c326b1498edbb0016e7b2efd2fcce3f4018c",
    "dflash-fleet/tiny-dflash-drafter": "22d389c38bc3d5a12d5d47bfa95178f707ee506d",
    "dflash-fleet/tiny-llama-varied": "9c4180c01df6066db59559d2c56b2bcdb7fff065",
    "dflash-fleet/tiny-dflash-drafter-random": "df615c9e5acbc435ace3c1c3c6de83853240a4b7",
    "moonshotai/Kimi-K2.6": "d9d42a52c7b44902e850e1f90625de1c4fa51d9e",
    "SubSir/Kimi-K2.6-DFlash-tmp-long": "ce0a7a61a68b6fac390e9388b8b7cb101dae127d",
}


@pytest.fixture(scope="module")
def repos() -> dict[str, dict[str, bytes]]:
    return models.build(bad=True)


@pytest.fixture(scope="module")
def folders(repos: dict[str, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("repos")
    revisions = models.write(out, repos)
    return {name: out / name / revision for name, revision in revisions.items()}


def test_revisions_are_what_inventories_pin(repos: dict[str, dict[str, bytes]]) -> None:
    assert {name: models.revision_of(files) for name, files in repos.items() if name in REVISIONS} == REVISIONS


def test_another_python_writes_the_same(tmp_path: Path) -> None:
    """The oldest and newest interpreters at hand; here at least the one that runs the tests, in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-I", str(ROOT / "rehearsal" / "models.py"), "--list", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert dict(line.split() for line in done.stdout.splitlines()) == REVISIONS
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["schema"] == 1
    assert {name: repo["main"] for name, repo in index["repos"].items()} == REVISIONS
    assert all((tmp_path / name / revision / "config.json").is_file() for name, revision in REVISIONS.items())


def test_writing_again_changes_nothing(repos: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    some = {name: repos[name] for name in list(repos)[:2]}
    models.write(tmp_path, some)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    models.write(tmp_path, some)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")} == before
    assert not list(tmp_path.rglob(".new-*"))


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = [0.0, 1.0, -2.0, 0.5, 1.00390625, 1.01171875, 3.0e38]
    got = struct.unpack(f"<{len(values)}H", models.bfloat16(values))
    # 1.00390625 and 1.01171875 lie halfway between two neighbours.
    assert got[:6] == (0x0000, 0x3F80, 0xC000, 0x3F00, 0x3F80, 0x3F82)


def test_noise_is_centred() -> None:
    values = models.Noise(0).take(20000, 1.0)
    mean = sum(values) / len(values)
    variance = sum(v * v for v in values) / len(values)
    assert abs(mean) < 0.03
    assert abs(variance - 1) < 0.03


def test_tokenizer_covers_every_byte_and_round_trips() -> None:
    files, vocab = models.tokenizer_files()
    tokenizer = json.loads(files["tokenizer.json"])
    assert sorted(vocab.values()) == list(range(models.VOCAB - 1))
    assert set(models.byte_alphabet()) <= set(vocab)
    assert [vocab[t] for t in models.SPECIAL_TOKENS] == list(range(5))
    assert models.CONSTANT_WORD in vocab
    merged = {left + right for left, right in tokenizer["model"]["merges"]}
    assert merged <= set(vocab)
    assert len(merged) == len(tokenizer["model"]["merges"])
    assert models.MASK_TOKEN not in vocab.values()


def test_constant_target(repos: dict[str, dict[str, bytes]], folders: dict[str, Path]) -> None:
    """One row of the head reads the direction that every embedding has."""
    path = folders[models.TARGET] / "model.safetensors"
    tensors, _metadata = drafter.read_header(str(path))
    assert tensors["lm_head.weight"]["shape"] == [models.VOCAB, models.HIDDEN]
    assert len([n for n in tensors if n.startswith("model.layers.3.")]) == 9
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    begin = json.loads(data[8 : 8 + length])["lm_head.weight"]["data_offsets"][0] + 8 + length
    word = json.loads((path.parent / "tokenizer.json").read_text())["model"]["vocab"][models.CONSTANT_WORD]
    row = data[begin + word * models.HIDDEN * 2 : begin + (word + 1) * models.HIDDEN * 2]
    assert row == b"\x00\x3f" + b"\0" * (2 * models.HIDDEN - 2)


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (models.TARGET, models.DRAFTER),
        (models.VARIED_TARGET, models.RANDOM_DRAFTER),
        (models.KIMI_TARGET, models.KIMI_DRAFTER),
    ],
)
def test_good_pairs_pass_the_check(folders: dict[str, Path], target: str, draft: str) -> None:
    problems, stand_in = drafter.check_folders(str(folders[target]), str(folders[draft]), 8, "0.5.20")
    assert problems == []
    assert stand_in == (draft == models.KIMI_DRAFTER)


REFUSALS = {
    "hidden-size": ("hidden_size", "the drafter's hidden_size is 32, the target's 64:"),
    "layer-id": (
        "target_layer_ids",
        "the drafter reads the target's layer 9 (target_layer_ids [0, 1, 9]), but the target has 4 layers, 0 to 3",
    ),
    "k-mismatch": (
        "fc_shape",
        "fc.weight has the shape [64, 128], but 3 target layers of hidden size 64 need [64, 192]",
    ),
    "mask-token": ("mask_token", "the drafter's mask_token_id is 512, outside the target's vocabulary of 512"),
    "num-target-layers": (
        "num_target_layers",
        "the drafter was made for a target of 36 layers, this one has 4: SGLang starts with it",
    ),
    "block-size": (
        "block_size",
        "sglang_drafter_block_size is 8, but the drafter was made for another: its configuration says 4. SGLang starts",
    ),
    "fc-missing": ("fc_missing", "fc.weight (shape [64, 192]) is not in the drafter's 24 tensors: SGLang starts"),
    "architecture": (
        "architecture",
        "the drafter's architecture is NoSuchDraftModel, SGLang 0.5.23 runs DFlashDraftModel, DFlashLaguna",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_each_bad_drafter_is_refused_for_what_it_is(folders: dict[str, Path], what: str) -> None:
    """With both values; what SGLang itself does with each is scenario drafters'."""
    (problem,), _stand_in = drafter.check_folders(
        str(folders[models.TARGET]), str(folders[models.BAD_PREFIX + what]), 8, "0.5.23"
    )
    assert (problem["id"], problem["severity"]) == (REFUSALS[what][0], "error")
    assert problem["message"].startswith(REFUSALS[what][1])


def test_every_bad_drafter_has_a_row_above() -> None:
    assert set(REFUSALS) == set(models.BAD_DRAFTERS)
    assert len(REFUSALS) == 8


def test_stand_ins_say_so(repos: dict[str, dict[str, bytes]]) -> None:
    for name in (models.KIMI_TARGET, models.KIMI_DRAFTER):
        assert b"rehearsal stand-in" in repos[name]["README.md"]
    config = json.loads(repos[models.KIMI_TARGET]["config.json"])
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config["text_config"]["num_hidden_layers"] == 61
    index = json.loads(repos[models.KIMI_TARGET]["model.safetensors.index.json"])
    assert set(index["weight_map"].values()) == {n for n in repos[models.KIMI_TARGET] if n.endswith(".safetensors")}
