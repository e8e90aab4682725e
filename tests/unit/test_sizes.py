"""Memory and disk of a configuration, from known sizes only."""

from __future__ import annotations

from typing import Any

import configurations
import pytest
from dflash_fleet import plan, profiles, sizes, state

KIMI, DRAFTER = configurations.BASE["model"], configurations.BASE["drafter_model"]
HOST: dict[str, Any] = {"asked": True, "sizes": {KIMI: 610, DRAFTER: 6.5}, "venv_sizes": {"cuda": 15}, "venvs": {}}


def resolved(**more: Any) -> dict[str, Any]:
    return profiles.resolve({**configurations.BASE, "version": "0.5.20", "drafter": "dflash", **more})


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"profile": "tp8"}, 70272 + 3072),  # one drafter head a rank
        ({"profile": "ep4"}, 70272 + 3072),
        ({"profile": "tp8", "drafter": "none"}, 70272),
        ({"profile": "pp8", "drafter": "none"}, 8 * 576 * 2),
        ({"profile": "tp8", "drafter": "none", "extra_args": {"kv-cache-dtype": "fp8_e4m3"}}, 35136),
        ({"profile": "tp8", "model": "meta-llama/Llama-3.1-8B"}, None),
    ],
)
def test_kv_bytes_per_token(request_: dict[str, Any], expected: int | None) -> None:
    assert sizes.kv_bytes_per_token(resolved(**request_)) == expected


def test_memory_of_a_gpu() -> None:
    line, fit = sizes.memory(resolved(context_length=131072, mem_fraction_static=0.9), HOST)
    assert fit == "memory of the GPUs: not asked"
    assert line == (
        "on each GPU: weights about 76 GB, drafter about 812 MB, KV pool 73344 bytes a token (9.6 GB for one context "
        "of 131072); weights and KV pool may take 90%"
    )


def test_nothing_is_guessed() -> None:
    line, _ = sizes.memory(resolved(model="a/b"), {})
    assert line == "on each GPU: weights not known, drafter not known, KV pool not known"


GROUPED = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
CACHES = [
    pytest.param(GROUPED, 32 * 1 * 256 * 2, id="grouped queries: one of eight heads on each of eight ranks"),
    pytest.param({**GROUPED, "num_key_value_heads": 2}, 32 * 256 * 2, id="fewer heads than ranks: each holds one"),
    pytest.param({**GROUPED, "num_key_value_heads": 12}, 32 * 2 * 256 * 2, id="the rank that holds most"),
    pytest.param(
        {**GROUPED, "num_key_value_heads": None}, 32 * 4 * 256 * 2, id="a head of its own for each query head"
    ),
    pytest.param({**GROUPED, "head_dim": 64}, 32 * 128 * 2, id="size of a head named"),
    pytest.param({"text_config": GROUPED}, 32 * 256 * 2, id="inside a multimodal model"),
    pytest.param({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 70272, id="MLA"),
    pytest.param({**GROUPED, "layer_types": ["full_attention", "linear_attention"] * 16}, 16 * 512, id="half attends"),
    pytest.param({"num_hidden_layers": 3}, None, id="says too little"),
    pytest.param({}, None, id="no config.json"),
]


@pytest.mark.parametrize(("config", "expected"), CACHES)
def test_cache_of_a_model_on_the_host(config: dict[str, Any], expected: int | None) -> None:
    models = {"a--b": {"a" * 40: {"complete": True, "bytes": 1, "cache": state.cache_shape(config)}}}
    assert sizes.kv_bytes_per_token(resolved(model="a/b", drafter="none"), models) == expected


FITS = [
    pytest.param(
        {"mem_fraction_static": 0.9}, [96 * sizes.GB] * 8, "GPUs of 96 GB: 9.3 GB left for the KV pool", id="fits"
    ),
    pytest.param({}, [96 * sizes.GB] * 8, "at most 19 GB left", id="share not set"),
    pytest.param({}, [48 * sizes.GB] * 8, "NOT ENOUGH: 77 GB of weights on GPUs of 48 GB", id="too small"),
    pytest.param({}, [96 * sizes.GB] * 4, "NOT ENOUGH: 4 GPUs on the host, 8 wanted", id="too few"),
    pytest.param(
        {"profile": "tp4", "profiles": {"tp4": {"tp": 4}}, "gpus": [4, 5, 6, 7]},
        [400 * sizes.GB] * 4 + [300 * sizes.GB] * 4,
        "GPUs of 300 GB",
        id="the instance's own",
    ),
]


@pytest.mark.parametrize(("request_", "gpus", "said"), FITS)
def test_memory_against_the_hosts_gpus(request_: dict[str, Any], gpus: list[int], said: str) -> None:
    assert said in sizes.memory(resolved(**request_), {**HOST, "gpu_bytes": gpus})[1]


def test_disk_says_what_is_missing_and_whether_it_fits() -> None:
    lines = sizes.disk(resolved(), {**HOST, "free_bytes": 100 * sizes.GB})
    assert lines[0].startswith(f"needs {KIMI} 610 GB, {DRAFTER} 6.5 GB, environment of SGLang 0.5.20 15 GB")
    assert lines[1] == "NOT ENOUGH: 100 GB free, 632 GB needed"


def test_what_is_there_is_not_fetched() -> None:
    there = {"complete": True, "bytes": 5 * sizes.GB}
    host = {
        **HOST,
        "models": {"moonshotai--Kimi-K2.6": {"a" * 40: there}, "SubSir--Kimi-K2.6-DFlash-tmp-long": {"b" * 40: there}},
        "venvs": {"x": {"complete": True, "version": "0.5.20+rehearsal", "build": "cuda"}},
    }
    assert sizes.disk(resolved(), host) == ["nothing to fetch"]
    # What lies on the host counts before what the inventory says.
    assert "weights about 625 MB" in sizes.memory(resolved(), host)[0]


def host(seconds: float) -> dict[str, Any]:
    result = resolved(profile="ep8")
    running = {**result, "engine": {**result["engine"], "version": "0.5.11"}}
    found = {"condition": "serving", "release": running, "ready": {"seconds": seconds}}
    instances = {"main": found, "old": found}
    return {"resolved": [result], "problems": [], "asked": True, "state": instances, "gone": ["old"]}


def test_hosts_that_differ_in_load_time_alone_are_one_block() -> None:
    text = plan.render({f"gpu-{number:02d}": host(200 + number) for number in range(20)})
    assert text.startswith("gpu-00, gpu-01, ... gpu-19 (20 hosts)")
    assert "a restart follows (the last good start took 3:20 to 3:39)" in text
    assert text.count("python -m sglang.launch_server") == 1
    assert "  old: not in the inventory, would be removed with its state" in text
    assert "(the last good start took 3:20)" in plan.render({"a": host(200)})
    assert "\0" not in text


def test_forecast_without_a_known_time() -> None:
    (first,) = plan.forecast(resolved(), {})
    assert first.startswith("first deployment")
    lines = plan.forecast(resolved(), {"release": {**resolved(), "port": 1}})
    assert lines == ["port: 1 -> 30000", "a restart follows"]
