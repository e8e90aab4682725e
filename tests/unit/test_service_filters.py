"""The filters of role sglang_service that have a text of their own."""

from __future__ import annotations

from typing import Any

import pytest
from dflash_fleet import ladder
from plugins import load

filters = load("filter_plugins/sglang_service.py")


def attempt(**gate: Any) -> dict[str, Any]:
    resolved = {
        "unit": "sglang-main-tp8.service",
        "profile": "tp8",
        "engine": {"version": "0.5.23"},
        "drafter": {"name": "none"},
        "overrides": {},
    }
    return ladder.attempt({"ready": False, "seconds": 3.0, "crash": None, **gate}, resolved, [])


MISMATCH = {"verdict": "running", "cause": "drafter_mismatch"}
CRASH = {"verdict": "crashed", "unit": "sglang-main-tp8.service", "cause": "gpu_oom", "summary": "no memory was left"}


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (
            {"outcome": "port_taken", "reason": "port 30000 is held by process 17 (nginx)"},
            ["gpu-01: sglang-main-tp8.service is not ready: port 30000 is held by process 17 (nginx)"],
        ),
        ({"outcome": "stopped"}, ["gpu-01: sglang-main-tp8.service is not ready: stopped"]),
        (
            {"outcome": "no_speculation", "reason": "accept length 1.02 is below 1.1", "crash": MISMATCH},
            ["gpu-01: sglang-main-tp8.service: accept length 1.02 is below 1.1", "  cause     drafter_mismatch"],
        ),
    ],
)
def test_headline_says_what_the_gate_saw(gate: dict[str, Any], expected: list[str]) -> None:
    assert filters.headline([attempt(**gate)], "gpu-01") == expected


def test_headline_names_report_and_next_step() -> None:
    rung = {"number": 1, "of": 2, "set": {"sglang_profile": "tp8"}, "cost": "slower"}
    lines = filters.headline([attempt(outcome="crashed", crash=CRASH)], "gpu-01", "reports/gpu-01", rung)
    assert lines[0].startswith("gpu-01: sglang-main-tp8.service died")
    assert lines[-2:] == ["  report    reports/gpu-01", "  now       rung 1 of 2: sglang_profile: tp8 (slower)"]


def test_headline_says_what_came_of_the_return() -> None:
    failed = [attempt(outcome="crashed", crash=CRASH)]
    assert filters.headline(failed, "gpu-01", back=[])[-1].startswith("  cause")
    back = [attempt(ready=True, outcome="ready")]
    assert filters.headline(failed, "gpu-01", back=back)[-1] == "  now       its last good release serves again"
    back = [attempt(outcome="stalled", reason="no progress for 300 s")]
    assert filters.headline(failed, "gpu-01", back=back)[-2:] == [
        "  now       its last good release did not come back:",
        "    gpu-01: sglang-main-tp8.service is not ready: no progress for 300 s",
    ]
