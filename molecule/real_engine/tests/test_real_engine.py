"""The real SGLang with a real DFLASH drafter under systemd: from its text and accept lengths to its deaths.

The tests build on one another in this order; each leaves the engine serving.
"""

from __future__ import annotations

import re
import sys

import controller
import engine
import starts

sys.path.insert(0, str(controller.ROOT / "rehearsal"))
import models

BAD_DRAFTER = models.BAD_PREFIX + "hidden-size"
BAD_REVISION = models.revision_of(models.build(bad=True)[BAD_DRAFTER])
UNIT = "sglang-main-single.service"
PROMPTS = ("The capital city of France is", "One, two, three,", "systemd starts", "Once upon a time")
# The varied target's drafter is random, so nearly nothing of it is accepted; its text must be right all the same.
VARIED = (
    "-e", "sglang_model=dflash-fleet/tiny-llama-varied",
    "-e", "sglang_model_revision=9c4180c01df6066db59559d2c56b2bcdb7fff065",
    "-e", "sglang_drafter_model=dflash-fleet/tiny-dflash-drafter-random",
    "-e", "sglang_drafter_revision=df615c9e5acbc435ace3c1c3c6de83853240a4b7",
)
NEAR_TIE = 0.01  # in log probability; bfloat16 makes equal tokens trade places


def test_accept_length_is_the_one_the_pair_was_made_for(host):
    meta = engine.generate(host, PROMPTS[0], 64)["meta_info"]
    assert meta["completion_tokens"] == 64
    assert meta["spec_accept_length"] == 8.0
    assert engine.state(host, "ready.json")["accept_length"] == 8.0


def test_chat_answers_with_text_and_usage(host):
    status, answer = engine.request(
        host, "/v1/chat/completions",
        {"model": "tiny-llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
    )
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 8


def test_it_is_the_real_engine(host):
    _, info = engine.request(host, "/server_info")
    assert info["version"] == "0.5.23"
    assert "DFLASH draft runner ready" in engine.journal(host, UNIT)
    assert "rehearsal" not in engine.sudo(host, f"cat /etc/systemd/system/{UNIT}")


def gated(host):
    """The unit is active because its prober has seen this start generate."""
    verdict = engine.read_json(host, "/run/sglang-main/gate.json")
    assert engine.show(host, UNIT, "ActiveState") == "active"
    assert verdict["invocation_id"] == engine.show(host, UNIT, "InvocationID")
    assert verdict["outcome"] == "ready"
    assert verdict["smoke"]["accept_length"] == 8.0
    assert engine.show(host, UNIT, "StatusText").startswith("serving: ready in ")


def test_it_passes_through_the_same_unit_and_gate(host):
    assert engine.show(host, UNIT, "Type") == "notify"
    gated(host)


def test_what_its_own_parser_or_resolution_refuses_leaves_it_serving(host):
    """The first value is no choice of the parser's; the second parses, and is longer than the model's own context."""
    serving = engine.show(host, UNIT, "InvocationID")
    for setting, said in (
        ("sglang_attention_backend=warp9", "invalid choice: 'warp9'"),
        ("sglang_context_length=131072", "greater than the derived context_length"),
    ):
        output = controller.deploy(__file__, "-e", setting, rc=2)
        assert f"{setting.split('=')[0]}: SGLang 0.5.23 (cpu) on this host refuses" in output
        assert said in output
        assert engine.show(host, UNIT, "InvocationID") == serving


def test_it_survives_a_restart(host):
    before = engine.show(host, UNIT, "InvocationID")
    # Returns when the gate has passed.
    engine.sudo(host, f"systemctl restart {UNIT}")
    assert engine.show(host, UNIT, "InvocationID") != before
    gated(host)
    assert engine.generate(host, PROMPTS[0], 64)["meta_info"]["spec_accept_length"] == 8.0


def test_a_killed_scheduler_is_reported_and_mended_by_systemd(host):
    before = engine.show(host, UNIT, "InvocationID")
    engine.sudo(host, f"pkill -KILL -f '^sglang::scheduler' --cgroup $(systemctl show {UNIT} -p ControlGroup --value)")
    again = f"[ $(systemctl show {UNIT} -p InvocationID --value) != {before} ] && systemctl is-active -q {UNIT}"
    engine.sudo(host, f"timeout 150 sh -c 'until {again}; do sleep 0.5; done'")
    gated(host)
    assert engine.show(host, UNIT, "NRestarts") == "1"
    (newest,) = [name for name in starts.reports(host) if name.endswith(before[:8])]
    report = engine.read_json(host, f"{starts.REPORTS}/{newest}/report.json")
    # SGLang takes five seconds to end itself; the prober does not wait for so long.
    assert report["crash"]["verdict"] in ("crashed", "running_but_dead")
    assert report["crash"]["phase"] == "serving"
    assert report["restarts_ended"] is False


def test_it_stops_cleanly_with_exit_0(host):
    engine.sudo(host, f"systemctl stop {UNIT}")
    assert engine.show(host, UNIT, "ActiveState") == "inactive"
    assert engine.show(host, UNIT, "Result") == "success"
    assert engine.show(host, UNIT, "ExecMainStatus") == "0"


def test_text_is_the_same_with_and_without_the_drafter(host):
    """Speculation may only be faster, never different, but for tokens that are as likely as one another."""
    controller.deploy(__file__, *VARIED, "-e", "sglang_wait_min_accept_length=1.0")
    drafted = [engine.generate(host, prompt, 48) for prompt in PROMPTS]
    assert all(answer["meta_info"]["spec_accept_length"] < 1.2 for answer in drafted)

    controller.deploy(__file__, *VARIED, "-e", "sglang_drafter=none")
    plain = [engine.generate(host, prompt, 48, return_logprob=True, top_logprobs_num=2) for prompt in PROMPTS]
    assert all("spec_accept_length" not in answer["meta_info"] for answer in plain)

    texts = {answer["text"] for answer in plain}
    assert len(texts) > 1, "a target that always says the same proves nothing"
    for with_drafter, without in zip(drafted, plain):
        ours, theirs = with_drafter["output_ids"], without["output_ids"]
        parting = next((index for index, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
        if parting is not None:
            best, second = without["meta_info"]["output_top_logprobs"][parting][:2]
            assert best[0] - second[0] <= NEAR_TIE, (parting, best, second)


def test_a_drafter_of_the_wrong_hidden_size_is_diagnosed_and_the_last_good_release_returns(host):
    """It loads, binds the port and dies in its own warm-up: log lines and port alone would call it ready."""
    good = engine.state(host, "last_good.json")["release_id"]
    output = controller.deploy(
        __file__, *VARIED, "-e", "sglang_drafter=dflash", "-e", "model_weights_drafter_check=false",
        "-e", f"sglang_drafter_model={BAD_DRAFTER}", "-e", f"sglang_drafter_revision={BAD_REVISION}", rc=2,
    )
    print(output)  # says why the last good release did not return, should it not
    assert "drafter_mismatch" in output
    assert re.search(r"ValueError: DFLASH .*(mismatch|dim)", output)
    assert engine.state(host, "last_good.json")["release_id"] == good
    assert engine.sudo(host, "readlink /var/lib/sglang/main/current").strip() == f"releases/{good}"
    assert host.service(UNIT).is_running
    assert engine.generate(host, PROMPTS[0], 8)["meta_info"]["completion_tokens"] == 8
