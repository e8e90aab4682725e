"""Secrets leave no text that is returned."""


from __future__ import annotations

import pytest
from dflash_fleet.redact import MASK, redact, redact_all
from growth import is_linear

CANARY = "S3CRET-c4nary"


@pytest.mark.parametrize(
    "text",
    [
        f"server_args=ServerArgs(model_path='/m', api_key='{CANARY}', port=30000)",
        f'server_args={{"api_key": "{CANARY}", "port": 30000}}',
        f"{{'api_key': '{CANARY}', 'admin_api_key': '{CANARY}'}}",
        f"launch_command=python -m sglang.launch_server --api-key {CANARY} --tp-size 8",
        f"['--api-key', '{CANARY}', '--tp-size', '8']",
        f"--api-key={CANARY} --admin-api-key={CANARY}",
        f"--admin-api-key '{CANARY}'",
        f"headers={{'Authorization': 'Bearer {CANARY}'}}",
        f"authorization: Basic {CANARY}",
        f"HF_TOKEN={CANARY} HUGGING_FACE_HUB_TOKEN={CANARY}",
        f"environ({{'MY_SERVICE_SECRET': '{CANARY}', 'AWS_SECRET_ACCESS_KEY': '{CANARY}'}})",
        f"hf_token='{CANARY}'",
        f"token='{CANARY}'",
        f"https://user:{CANARY}@mirror.example/simple",
        f"GET https://cdn.example/f?x=1&X-Amz-Signature={CANARY}&y=2",
        f"password={CANARY}",
        "hf_abcdefghijklmnopqrstuvwx",
        "sk-abcdefghijklmnopqrstuvwx",
    ],
)
def test_secret_goes(text: str) -> None:
    clean = redact(text)
    assert CANARY not in clean
    assert "abcdefghijklmnop" not in clean
    assert MASK in clean
    assert redact(clean) == clean  # nothing is redacted twice


@pytest.mark.parametrize(
    "text",
    [
        "mask_token='<|MASK|>', mask_token_id=511, eos_token_id=2",
        "Prefill batch, #new-token: 812, #cached-token: 0, token usage: 0.01",
        "max_total_tokens=131072 is larger than the profiled value -561981",
        "tokenizer_path='/models/k', tokenizer_mode='auto'",
        "api_key=None, admin_api_key=None",
        "KeyError: 'model_type'",
        "--served-model-name k --port 30000",
        "http://127.0.0.1:30000/health",
        "a key is missing: 'lm_head.weight'",
        "gen throughput (token/s): 171.20",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


def test_known_values_and_structures() -> None:
    value = {"a": ["x plain-value y", {"b": "plain-value"}], "n": 3, "none": None}
    assert redact_all(value, ["plain-value"]) == {"a": [f"x {MASK} y", {"b": MASK}], "n": 3, "none": None}


def test_long_text_takes_linear_time() -> None:
    assert is_linear(lambda size: redact("api_key='" + "a-b_" * size + "key" * size), 2000, times=32)
