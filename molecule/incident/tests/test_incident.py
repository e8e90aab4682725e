"""The incident: the crash was noticed and understood, graphs are off, and the host remembers why."""

from __future__ import annotations

import engine

UNIT = "sglang-main-ep8.service"


def test_it_serves_degraded(host):
    assert host.service(UNIT).is_running
    ready = engine.state(host, "ready.json")
    assert ready["degraded"] is True
    assert ready["fallbacks"] == ["disable_cuda_graph"]
    assert ready["invocation_id"] == engine.show(host, UNIT, "InvocationID")
    assert "--disable-cuda-graph" in engine.sudo(host, f"cat /etc/systemd/system/{UNIT}")


def test_the_rung_is_remembered_with_what_it_was_needed_for(host):
    rungs = engine.state(host, "rungs.json")["rungs"]
    assert len(rungs) == 1
    assert rungs[0]["remedy"] == "disable_cuda_graph"
    assert rungs[0]["set"] == {"sglang_cuda_graph": "disabled"}
    assert rungs[0]["cause"] == "cuda_graph_replay_failure"
    assert rungs[0]["key"]["engine_version"] == "0.5.11"
    assert rungs[0]["key"]["drafter_revision"] == "ce0a7a61a68b6fac390e9388b8b7cb101dae127d"


def test_the_crash_happened_once(host):
    """The second and third run of the sequence (idempotence) started nothing: they remembered."""
    text = engine.journal(host, UNIT)
    assert text.count("Scheduler hit an exception") == 8
    assert text.count("'NoneType' object has no attribute 'dtype'") >= 8
    assert engine.show(host, UNIT, "NRestarts") == "0"


def test_the_engine_says_that_it_is_a_rehearsal(host):
    assert "rehearsal" in engine.journal(host, UNIT).lower()
    _, info = engine.request(host, "/server_info")
    assert info["version"] == "0.5.11+rehearsal"
