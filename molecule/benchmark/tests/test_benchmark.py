"""A sweep measures, concludes and returns the host, wherever it is interrupted. Paces are the incident's.

Tests stand in the order of a host's life; each leaves it serving what it served before. BEGINNING=1 runs the first few.
"""

from __future__ import annotations

import json
import os
import re
import shutil

import controller
import engine
import pytest
from rollouts import kill_when

NAME = "rehearsal-01"
UNIT = "sglang-main-ep8.service"
KEY = "k-of-the-benchmark-scenario"
FOLDER = controller.ROOT / ".cache" / "scenarios" / "benchmark"
RESULTS = FOLDER / f"{NAME}.jsonl"
TP8 = {"profile": "tp8", "drafter": "none"}
EP8 = {"profile": "ep8", "drafter": "none"}
EP4 = {"profile": "ep4", "drafter": "none"}
INCIDENT = {"profile": "ep8", "drafter": "dflash", "cuda_graph": "disabled"}
BEGINNING = bool(os.environ.get("BEGINNING"))


def host():
    return controller.scenario_host(__file__, NAME)


def arguments(**variables):
    """Short runs at two concurrencies."""
    return ["-e", json.dumps({
        "sglang_api_key": KEY, "sglang_benchmark_dir": str(FOLDER), "sglang_benchmark_concurrency": [1, 64],
        "sglang_benchmark_max_tokens": 48, "sglang_benchmark_least_requests": 4, "sglang_benchmark_warmup": 2,
        **variables,
    })]  # fmt: skip


def sweep(*candidates, rc=0, **variables):
    wish = arguments(sglang_benchmark_candidates=list(candidates), **variables)
    return controller.play(__file__, "playbooks/benchmark.yml", *wish, rc=rc)


def records():
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def set_pace(*failures, throughput=None):
    content = {"pace": 0.02, "failures": list(failures), **({"throughput": throughput} if throughput else {})}
    engine.sudo(host(), f"printf %s '{json.dumps(content)}' > /etc/dflash-fleet/rehearsal.json")


def what_serves():
    """Everything that has to be as before: the release, the unit and its text, its place at boot, the releases kept."""
    on = host()
    ready = engine.state(on, "ready.json")
    assert ready["invocation_id"] == engine.show(on, UNIT, "InvocationID")
    assert engine.show(on, UNIT, "ActiveState") == "active"
    status, models = engine.request(on, "/v1/models", key=KEY)
    assert status == 200, models
    assert not on.file(f"{engine.ROOT}/main/state/trial.json").exists
    assert not on.file(f"{engine.ROOT}/state/rollout.json").exists
    return {
        "current": engine.sudo(on, f"readlink {engine.ROOT}/main/current"),
        "unit": engine.sudo(on, f"cat /etc/systemd/system/{UNIT}"),
        "units": engine.sudo(on, "ls /etc/systemd/system/ | grep ^sglang-"),
        "boot": engine.sudo(on, "ls /etc/systemd/system/multi-user.target.wants/ | grep ^sglang-"),
        "releases": engine.sudo(on, f"ls {engine.ROOT}/main/releases"),
        "last good": engine.state(on, "last_good.json")["release_id"],
    }


@pytest.fixture(scope="module")
def before():
    """What the host is deployed with: EP8 with its drafter."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    set_pace()
    controller.deploy(__file__, *arguments())
    return what_serves()


def test_the_incidents_conclusions(before):
    # On a busy machine what differs by a few per cent is a tie, of which the first is taken: EP4 before EP8, which it
    # beats by 2.5 % at its peak, and TP8 before EP4 where there is no EP8.
    few = [TP8, EP4] if BEGINNING else [EP4, EP8, TP8, INCIDENT]
    output = sweep(*few, sglang_benchmark_repeats=3)
    assert what_serves() == before
    assert "REHEARSAL: these figures were played" in output
    # With its drafter EP8 wanders most; the figures themselves are compared in unit tests.
    assert re.search(r"a single stream: tp8, \d\d\.\d tok/s at 1(, .* over ep|; a tie with ep)", output), output
    assert re.search(r"peak throughput: ep4, \d+ tok/s at 64(, .* over (ep8|tp8)|; a tie with ep8)", output), output
    found = records()
    assert len(found) == len(few) * 2 * 3
    assert {record["errors"] for record in found} == {0}
    assert all(record["output_tokens"] == record["requests"] * 48 for record in found), "the server's own count"
    single = [r["output_throughput"] for r in found if r["candidate"] == "tp8" and r["concurrency"] == 1]
    # 97.9 tokens a second, and 0.08 s to the first of 48.
    assert all(70 < rate < 98 for rate in single), single
    page = (FOLDER / "index.html").read_text()
    assert page.count("<svg") >= 5
    assert KEY not in page + RESULTS.read_text() + output
    if not BEGINNING:
        assert re.search(r"dflash with ep8 hurts .*64", output), output
        played = [record for record in found if record["drafter"] == "dflash"]
        # Drawn around 3.4 by the rehearsal; a mean of some hundred answers is near it.
        assert all(2.8 < record["accept_length"] < 4.2 for record in played if record["concurrency"] > 1), played
        assert all(record["engine_log"]["eager"] > 0 == record["engine_log"]["graphs"] for record in played)
        assert all(r["engine_log"]["graphs"] > 0 for r in found if r["drafter"] == "none" and r["concurrency"] == 64)


def test_the_recorded_answer_is_what_auto_takes(before):
    offline = ["-e", "plan_offline=true", "-e", "sglang_profile=auto"]
    best = controller.play(__file__, "playbooks/plan.yml", *arguments(sglang_objective="latency"), *offline)
    assert re.search(r"sglang_profile: auto is tp8, measured on rehearsal-01", best), best
    assert "--ep-size" not in best
    best = controller.play(__file__, "playbooks/plan.yml", *arguments(), *offline)
    assert re.search(r"sglang_profile: auto is ep4, measured on rehearsal-01", best), best
    assert "--ep-size 4" in best
    nothing = arguments(sglang_benchmark_dir="/nowhere")
    refused = controller.deploy(__file__, *nothing, "-e", "sglang_profile=auto", rc=2)
    assert "no benchmark of SGLang 0.5.20 (rehearsal)" in refused
    assert "run playbooks/benchmark.yml, or name a profile" in refused
    assert what_serves() == before


if not BEGINNING:

    def test_other_paces_flip_the_choice(before):
        set_pace(throughput=[
            {"when": {"ep_size": 4}, "single": 180, "peak": 700, "ttft": 0.02},
            {"single": 60, "peak": 1400, "ttft": 0.02},
        ])  # fmt: skip
        # In a folder of its own: what was measured at other paces stays comparable, and EP8 would still be best.
        output = sweep(TP8, EP4, sglang_benchmark_repeats=2, sglang_benchmark_dir=str(FOLDER / "flipped"))
        assert "a single stream: ep4, " in output
        assert "peak throughput: tp8, " in output
        set_pace()
        assert what_serves() == before

    def test_a_candidate_that_does_not_serve_is_a_result(before):
        set_pace({"kind": "gpu_oom", "at": "weights", "when": {"ep_size": 4}})
        output = sweep(EP4, TP8, sglang_benchmark_concurrency=[4], sglang_benchmark_repeats=1)
        set_pace()
        assert re.search(r"^ep4 .*gpu_oom_weights", output, re.M), output
        assert records()[-2]["kind"] == "failed"
        assert what_serves() == before

    def test_one_that_dies_while_it_is_measured_is_a_result_too(before):
        # After its gate, which settles for 5 s, and before five runs of more than 2 s each have ended.
        set_pace({"kind": "gpu_oom", "at": "serving", "after": 12, "when": {"ep_size": 4}})
        output = sweep(EP4, sglang_benchmark_concurrency=[1], sglang_benchmark_repeats=5)
        set_pace()
        assert re.search(r"ep4 .*requests failed", output), output
        assert what_serves() == before

    def test_what_cannot_work_is_said_before_anything_is_touched(before):
        output = sweep({"profile": "tp9"}, {"profil": "tp8"}, rc=2)
        assert "'tp9' is unknown" in output
        assert "the key 'profil'" in output
        assert what_serves() == before

    ROLLBACK = ("playbooks/rollback.yml", {})
    AGAIN = ("playbooks/benchmark.yml", {"sglang_benchmark_candidates": [TP8], "sglang_benchmark_concurrency": [4]})
    DEPLOY = ("deploy-dflash.yml", {})

    @pytest.mark.parametrize(
        ("marker", "nth", "way_back"),
        [
            pytest.param("start | Wait until it serves", 1, ROLLBACK, id="while the first loads"),
            pytest.param("candidate | Measure at each", 2, AGAIN, id="while the second is measured"),
            pytest.param("start | Wait until it serves", 2, DEPLOY, id="while the second loads"),
            pytest.param("gate_release | Wait until it serves", 1, ROLLBACK, id="on the way back"),
        ],
    )
    def test_a_sweep_that_was_killed_leaves_a_way_back(before, marker, nth, way_back):
        wish = arguments(sglang_benchmark_candidates=[TP8, EP4], sglang_benchmark_concurrency=[4, 8])
        kill_when(controller.start(__file__, "playbooks/benchmark.yml", *wish, own_group=True), marker, nth)
        on = host()
        assert on.file(f"{engine.ROOT}/main/state/trial.json").exists
        boot = engine.sudo(on, "ls /etc/systemd/system/multi-user.target.wants/ | grep ^sglang-")
        assert boot == before["boot"], "a boot now would bring back what served before"
        playbook, variables = way_back
        controller.play(__file__, playbook, *arguments(**{"sglang_benchmark_repeats": 1, **variables}))
        assert what_serves() == before

    def test_an_engine_that_was_asked_for_nothing_is_not_touched(before):
        invocation = engine.show(host(), UNIT, "InvocationID")
        controller.play(__file__, "playbooks/benchmark.yml", *arguments(), "--check")
        report = controller.play(__file__, "playbooks/benchmark.yml", *arguments(), "-e", "benchmark_report_only=true")
        assert "peak throughput: " in report
        assert engine.show(host(), UNIT, "InvocationID") == invocation
        assert what_serves() == before
