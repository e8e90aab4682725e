"""The screen of playbooks/status.yml."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dflash_fleet import state, status

UNIT = "sglang-main-ep8.service"


def unit(**changes: Any) -> dict[str, Any]:
    return {
        "name": UNIT,
        "load_state": "loaded",
        "active_state": "active",
        "sub_state": "running",
        "result": "success",
        "n_restarts": 0,
        "invocation_id": "a" * 32,
        "enabled": "enabled",
        "since": "2026-11-30T00:03:51.123456Z",
        "stop_asked": False,
        "need_daemon_reload": False,
        **changes,
    }


def answer(*units: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What sglang_state returns for a host with the instance main."""
    facts: dict[str, Any] = {
        "current": "r1",
        "release": {
            "unit": UNIT,
            "profile": "ep8",
            "engine": {"name": "sglang", "version": "0.5.11", "build": "rehearsal"},
            "drafter": {"name": "dflash"},
            "overrides": {},
        },
        "units": list(units or [unit()]),
        "ready": {"invocation_id": "a" * 32, "seconds": 211.4, "accept_length": 3.4, "note": ""},
        "last_starts": [],
        "rungs": [],
        "last_report": None,
        **changes,
    }
    facts.update(state.condition(facts))
    return {"changed": False, "state": {"instances": {"main": facts}, "other_units": [], "systemd_error": None}}


def one(found: dict[str, Any]) -> dict[str, Any]:
    rows = status.rows_of_host("gpu-01", found)
    assert len(rows) == 1
    return rows[0]


def test_a_host_that_serves() -> None:
    row = one(answer())
    assert {key: row[key] for key in ("engine", "instance", "profile", "state", "ready_in", "accept_length")} == {
        "engine": "sglang 0.5.11 rehearsal",
        "instance": "main",
        "profile": "ep8+dflash",
        "state": "serving",
        "ready_in": 211.4,
        "accept_length": 3.4,
    }


def test_a_profile_that_was_started_by_hand_is_shown_as_what_it_is() -> None:
    other = "sglang-main-tp8.service"
    found = answer(
        unit(active_state="inactive", sub_state="dead", invocation_id=""), unit(name=other, enabled="disabled"),
        by_hand={"unit": other, "release_id": "r0", "release": {"profile": "tp8", "drafter": {"name": "none"}}},
    )  # fmt: skip
    row = one(found)
    assert (row["state"], row["profile"], row["unit"]) == ("serving", "tp8", other)
    assert row["note"] == f"started by hand; a deployment and the next boot start {UNIT}"


def test_a_host_that_a_benchmark_has_left_says_how_to_return() -> None:
    row = one(answer(trial={"release_id": "r0", "unit": UNIT, "begun_at": "2026-11-30T10:00:00.000000Z"}))
    assert "on trial since 2026-11-30T10:00:00Z" in row["note"]
    assert "playbooks/rollback.yml" in row["note"]


def test_a_degraded_host_says_why() -> None:
    row = one(
        answer(
            ready={"invocation_id": "a" * 32, "degraded": True},
            release={"unit": UNIT, "profile": "ep8", "overrides": {"sglang_cuda_graph": "disabled"}},
            rungs=[{"cause": "cuda_graph_replay_failure"}],
        )
    )
    assert (row["state"], row["note"]) == ("degraded", "sglang_cuda_graph: disabled")
    assert row["last_cause"] == "cuda_graph_replay_failure"


@pytest.mark.parametrize(
    ("found", "word", "note"),
    [
        ({"unreachable": True, "msg": "Task failed: No route to host\nx"}, "unreachable", "No route to host"),
        ({"failed": False, "msg": "ready.json: schema 9 is not known"}, "unknown", "ready.json: schema 9 is not known"),
        ({}, "unknown", "no answer from the probe"),
        ({"state": {"instances": {}, "systemd_error": "Host is down"}}, "unknown", "Host is down"),
        ({"state": {"instances": {}, "other_units": [unit(name="sglang-k26-dflash.service")]}}, "absent", "k26-dflash"),
        (
            answer(unit(active_state="failed", result="exit-code")),
            "failed",
            "failed (exit-code); run playbooks/diagnose",
        ),
        (answer(unit(active_state="failed", result="signal"), last_report="/r"), "failed", "failed (signal); see /r"),
        (answer(unit(active_state="failed", result="signal", stop_asked=True)), "stopped", "starts at the next boot"),
        (answer(unit(active_state="activating", sub_state="auto-restart")), "restarting", "after a crash"),
        (answer(unit(need_daemon_reload=True)), "serving", "changed on disk"),
        (answer(unit(), unit(name="sglang-main-tp8.service")), "serving", "sglang-main-tp8.service runs too"),
        (
            answer(unit(invocation_id="b" * 32), progress={"phase": "serving"}),
            "starting",
            "this start has not passed a gate",
        ),
    ],
)
def test_what_else_a_host_can_be(found: dict[str, Any], word: str, note: str) -> None:
    row = one(found)
    assert row["state"] == word
    assert note in row["note"]
    assert row["ready_in"] is None or word == "serving"


def test_the_last_cause_is_that_of_the_newest_start_that_failed() -> None:
    starts = [{"cause": "gpu_oom"}, {"cause": "port_in_use"}, {"cause": None}]
    assert one(answer(last_starts=starts))["last_cause"] == "port_in_use"
    assert one(answer(rungs=[{"cause": "gpu_oom"}]))["last_cause"] is None  # it no longer matters


def test_the_screen() -> None:
    progress = {"phase": "weights", "percent": 31.4, "ranks_done": 3, "ranks": 8}
    text = status.text(
        {
            "gpu-01": {**answer(live={"tokens_per_second": 512.4, "accept_length": 3.37, "running": 4}), "changes": []},
            "gpu-02": answer(unit(invocation_id="b" * 32, n_restarts=2), progress=progress),
            "gpu-03": {"unreachable": True, "msg": "No route to host"},
            "gpu-04": {**answer(live={"error": "status 404"}), "changes": ["the wish", "/etc/x", "/etc/y"]},
        }
    )
    assert text.splitlines() == [
        "host    release                  instance  profile     state                       since (UTC)          "
        "ready in  tok/s  accept  restarts  drift                note",
        "gpu-01  sglang 0.5.11 rehearsal  main      ep8+dflash  serving                     2026-11-30 00:03:51  "
        "3:31      512    3.37    0         none                 -",
        "gpu-02  sglang 0.5.11 rehearsal  main      ep8+dflash  starting: weights 3/8 31 %  2026-11-30 00:03:51  "
        "-         -      -       2         -                    -",
        "gpu-03  -                        -         -           unreachable                 -                    "
        "-         -      -       -         -                    No route to host",
        "gpu-04  sglang 0.5.11 rehearsal  main      ep8+dflash  serving                     2026-11-30 00:03:51  "
        "3:31      -      3.40    0         the wish and 2 more  -",
        "",
        "3 instances on 4 hosts: 2 serving, 1 starting, 1 unreachable",
    ]


def test_the_screen_as_data() -> None:
    found = json.loads(json.dumps(status.document({"gpu-01": answer()})))
    assert found["schema"] == 1
    assert found["instances"][0]["since"] == "2026-11-30T00:03:51.123456Z"


def test_the_hosts_own_report_explains_what_no_deployment_watched() -> None:
    report = {"at": "2026-11-30T03:00:00.000000Z", "cause": "weights_corrupt", "restarts_ended": True}
    older = [{"cause": "gpu_oom", "ended_at": "2026-11-29T03:00:00.000000Z"}]
    failed = unit(active_state="failed", sub_state="failed", result="signal")
    row = one(answer(failed, report=report, last_report="/r/1", last_starts=older, ready=None))
    assert row["last_cause"] == "weights_corrupt"
    assert row["note"] == "failed (signal); see /r/1; not started again: this does not heal by itself"
    newer = [{"cause": "gpu_oom", "ended_at": "2026-11-30T04:00:00.000000Z"}]
    assert one(answer(report=report, last_starts=newer))["last_cause"] == "gpu_oom"
