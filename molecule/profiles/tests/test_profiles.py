"""Profiles of one host: each a unit of its own, one at a time, every switch gated, and none left behind."""

from __future__ import annotations

import json

import controller
import engine
import pytest

HOST = "rehearsal-01"
TP8, EP8, EP4 = (f"sglang-main-{name}.service" for name in ("tp8", "ep8", "ep4"))
TWO = {
    "sglang_profiles": {"tp4": {"tp": 4}},
    "sglang_instances": [
        {"name": "a", "profile": "tp4", "gpus": [0, 1, 2, 3], "port": 30000, "numa_nodes": [0]},
        {"name": "b", "profile": "tp4", "gpus": [4, 5, 6, 7], "port": 30001},
    ],
}


@pytest.fixture
def on():
    return controller.scenario_host(__file__, HOST)


def deploy(*arguments, rc=0, **variables):
    return controller.deploy(__file__, "-e", json.dumps(variables), *arguments, rc=rc)


def installed(on):
    return engine.sudo(on, "ls /etc/systemd/system | grep ^sglang- || true").split()


def enabled(on):
    listed = engine.sudo(on, "systemctl list-unit-files --no-legend --state=enabled 'sglang-*'")
    return [line.split()[0] for line in listed.splitlines()]


def wait_for_ranks(on, count=8):
    """Until the engine has all its processes; the brackets keep pgrep from finding the shell that runs it."""
    counted = f"[ $(pgrep -fc 'sglang::[s]cheduler') = {count} ]"
    engine.sudo(on, f"for i in $(seq 600); do {counted} && exit; sleep 0.1; done; exit 1")


def moment(on, unit, name):
    """Microseconds since boot at which something happened to a unit."""
    return int(engine.show(on, unit, name + "Monotonic"))


PP8 = "sglang-main-pp8.service"
# What this host may run besides; that the drafter is laid over each of them is why a pipeline says it wants none.
STANDBY = {"sglang_standby_profiles": ["tp8", "ep8", {"profile": "pp8", "drafter": "none"}]}
SWITCHES = [
    pytest.param(TP8, {"sglang_profile": "tp8", "sglang_drafter": "none"}, [], id="tp8"),
    pytest.param(EP8, {"sglang_profile": "ep8"}, ["--ep-size 8", "--moe-a2a-backend none"], id="ep8+dflash"),
    pytest.param(EP4, {"sglang_profile": "ep4"}, ["--tp-size 8", "--ep-size 4"], id="ep4"),
]


@pytest.mark.parametrize(("unit", "wanted", "options"), SWITCHES)
def test_switching_is_one_variable_and_gated(on, unit, wanted, options):
    output = deploy(**STANDBY, **wanted)
    assert "serving" in output
    assert on.service(unit).is_running
    assert engine.state(on, "ready.json")["invocation_id"] == engine.show(on, unit, "InvocationID")
    assert engine.state(on, "ready.json")["unit"] == unit
    # Each profile that the host may run has its unit; one runs and is enabled. Any other's text stays in its release.
    assert installed(on) == sorted({unit, TP8, EP8, PP8})
    assert enabled(on) == [unit]
    assert engine.sudo(on, "systemctl list-units --no-legend --state=active 'sglang-*'").split()[0] == unit
    text = engine.sudo(on, f"systemctl cat {unit}")
    assert all(option in text for option in options)


def test_a_second_run_has_nothing_to_do_and_leaves_the_others_be(on):
    assert "changed=0" in deploy("--check", **STANDBY, sglang_profile="ep4")
    assert "changed=0" in deploy("-e", "sglang_skip_unchanged=false", **STANDBY, sglang_profile="ep4")
    assert enabled(on) == [EP4]


def test_one_after_per_pair_in_one_direction(on):
    """Every pair conflicts, and of each pair exactly one waits for the other."""
    units = installed(on)
    for one in units:
        for other in units:
            if one != other:
                assert other in engine.show(on, one, "Conflicts").split()
                waits = {unit: set(engine.show(on, unit, "After").split()) for unit in (one, other)}
                assert (other in waits[one]) != (one in waits[other]), (one, other)


def test_the_old_engine_is_gone_before_the_new_one_starts(on):
    """By systemd alone, without the play: Conflicts= ends the other, After= waits for it, in both directions."""
    engine.sudo(on, f"systemctl start {TP8}")
    for old, new in ((TP8, EP8), (EP8, TP8)):
        assert on.service(old).is_running
        wait_for_ranks(on)
        engine.sudo(on, f"systemctl start {new}")
        assert not on.service(old).is_running
        left, began = moment(on, old, "InactiveEnterTimestamp"), moment(on, new, "ExecMainStartTimestamp")
        assert 0 < left <= began, (old, left, new, began)
        stopping = moment(on, old, "ActiveExitTimestamp")
        assert stopping < left


def test_a_switch_by_hand_is_seen_and_the_next_deployment_returns(on):
    """One command at night brought back tp8; its gate is the supervisor's, and the inventory has the last word."""
    screen = controller.play(__file__, "playbooks/status.yml")
    row = next(line for line in screen.splitlines() if line.startswith(HOST))
    assert "tp8+dflash" in row
    assert "serving" in row
    assert f"started by hand; a deployment and the next boot start {EP4}" in row
    output = deploy(**STANDBY, sglang_profile="ep4")
    assert "serving" in output
    assert on.service(EP4).is_running
    assert not on.service(TP8).is_running
    assert enabled(on) == [EP4]
    assert installed(on) == sorted([EP4, TP8, EP8, PP8])


def test_profiles_that_are_no_longer_wanted_leave_nothing(on):
    output = deploy(sglang_profile="tp8", sglang_drafter="none")
    assert "serving" in output
    assert installed(on) == [TP8]
    assert enabled(on) == [TP8]


def test_a_profile_on_standby_that_cannot_work_stops_before_anything_is_touched(on):
    serving = engine.show(on, TP8, "InvocationID")
    output = deploy(rc=2, sglang_profile="tp8", sglang_standby_profiles=["pp8"])
    assert "sglang_standby_profiles: pp8" in output
    assert engine.show(on, TP8, "InvocationID") == serving
    assert installed(on) == [TP8]


REFUSED = [
    pytest.param("sglang_attention_backend", {"sglang_attention_backend": "warp9"}, "invalid choice", id="choice"),
    pytest.param("sglang_extra_args", {"sglang_extra_args": {"page-size": "many"}}, "--page-size", id="number"),
]


@pytest.mark.parametrize("mode", [[], ["--check"]], ids=["run", "check"])
@pytest.mark.parametrize(("variable", "wanted", "said"), REFUSED)
def test_what_the_installed_engine_refuses_leaves_the_old_one_serving(on, variable, wanted, said, mode):
    serving = engine.show(on, TP8, "InvocationID")
    releases = engine.sudo(on, "ls /var/lib/sglang/main/releases")
    output = deploy(*mode, rc=2, sglang_profile="ep8", **wanted)
    assert variable in output
    assert said in output
    assert "what runs goes on running" in output
    assert on.service(TP8).is_running
    assert engine.show(on, TP8, "InvocationID") == serving
    assert engine.sudo(on, "ls /var/lib/sglang/main/releases") == releases
    assert installed(on) == [TP8]


def test_a_renamed_instance_that_fails_gives_way_to_the_one_before(on):
    """It needs the GPUs and the port of the old one, so that has to stop; when it dies, the old one serves again."""
    serving = engine.show(on, TP8, "InvocationID")
    output = deploy(
        rc=2, sglang_instances=[{"name": "renamed"}], sglang_version="0.5.11", sglang_profile="ep8",
        sglang_cuda_graph="enabled", sglang_fallbacks=[],
    )  # fmt: skip
    assert "cuda_graph_replay_failure" in output
    assert on.service(TP8).is_running
    assert engine.show(on, TP8, "InvocationID") not in ("", serving)
    assert engine.state(on, "ready.json")["invocation_id"] == engine.show(on, TP8, "InvocationID")
    assert enabled(on) == [TP8]
    assert not on.service("sglang-renamed-ep8.service").is_running
    status, _ = engine.request(on, "/v1/models")
    assert status == 200
    # The inventory as it was takes the failed one away, and has nothing else to do.
    serving = engine.show(on, TP8, "InvocationID")
    deploy(sglang_profile="tp8", sglang_drafter="none")
    assert installed(on) == [TP8]
    assert engine.show(on, TP8, "InvocationID") == serving


def test_an_engine_on_several_hosts_is_planned_and_refused_before_anything_is_touched(on):
    serving = engine.show(on, TP8, "InvocationID")
    wanted = {"sglang_nodes": [HOST, "other"], "sglang_profile": "tp16", "sglang_profiles": {"tp16": {"tp": 16}}}
    output = deploy(rc=2, **wanted)
    assert "sglang_nodes: an engine on 2 hosts can be planned (playbooks/plan.yml), not deployed yet" in output
    assert "changed=0" in output
    assert engine.show(on, TP8, "InvocationID") == serving
    text = controller.play(__file__, "playbooks/plan.yml", "-e", json.dumps({**wanted, "plan_offline": True}))
    assert "--nnodes 2" in text
    assert "--node-rank 0" in text
    # By hand, what each host needs of it can be brought there all the same.
    alone = {**wanted, "sglang_nodes": [], "sglang_profile": "tp8"}
    assert "changed=0" in deploy("--tags", "sglang_venv,model_weights", **alone)


def test_two_instances_share_a_host_and_the_one_before_is_gone(on):
    predicted = deploy("--check", "--diff", **TWO)
    assert on.service(TP8).is_running
    assert "-/var/lib/sglang/main" in predicted.splitlines()
    deploy(**TWO)
    assert installed(on) == ["sglang-a-tp4.service", "sglang-b-tp4.service"]
    assert enabled(on) == installed(on)
    for name, port, gpus in (("a", 30000, "0,1,2,3"), ("b", 30001, "4,5,6,7")):
        status, _ = engine.request(on, "/v1/models", port=port)
        assert status == 200
        assert f"CUDA_VISIBLE_DEVICES={gpus}" in engine.show(on, f"sglang-{name}-tp4.service", "Environment")
        assert engine.state(on, "ready.json", name)["unit"] == f"sglang-{name}-tp4.service"
    assert engine.show(on, "sglang-a-tp4.service", "NUMAPolicy") == "bind"
    for unit in installed(on):
        path = f"/etc/systemd/system/{unit}"
        assert engine.sudo(on, f"systemd-analyze verify --man=no {path} 2>&1") == ""
        engine.sudo(on, f"systemd-analyze security --offline=true --threshold=20 --no-pager {path}")
    # No trace of the instance that the inventory no longer names.
    assert not on.file("/var/lib/sglang/main").exists
    assert not on.file("/etc/sglang/main").exists
    output = deploy(**TWO)
    assert "changed=0" in output


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("port", 30000, "listen on port 30000"), ("gpus", [3, 4, 5, 6], "use GPU 3"), ("numa_nodes", [0], "NUMA node 0")],
)
def test_instances_may_not_share_what_only_one_can_have(on, key, value, said):
    serving = engine.show(on, "sglang-b-tp4.service", "InvocationID")
    first, second = TWO["sglang_instances"]
    output = deploy(rc=2, **{**TWO, "sglang_instances": [first, {**second, key: value}]})
    assert said in output
    assert engine.show(on, "sglang-b-tp4.service", "InvocationID") == serving


def test_an_instance_marked_absent_goes_and_the_other_stays(on):
    serving = engine.show(on, "sglang-a-tp4.service", "InvocationID")
    first, second = TWO["sglang_instances"]
    deploy(**{**TWO, "sglang_instances": [first, {**second, "state": "absent"}]})
    assert installed(on) == ["sglang-a-tp4.service"]
    assert engine.show(on, "sglang-a-tp4.service", "InvocationID") == serving
    assert not on.file("/var/lib/sglang/b").exists


def test_removal_lists_then_removes(on):
    play = "playbooks/remove.yml"
    assert "Say which instance" in controller.play(__file__, play, rc=2)
    predicted = controller.play(__file__, play, "-e", "remove=a", "--check")
    assert "/var/lib/sglang/a" in predicted
    assert on.service("sglang-a-tp4.service").is_running
    controller.play(__file__, play, "-e", "remove=a")
    assert installed(on) == []
    assert engine.sudo(on, "ls /var/lib/sglang").split() == ["cache", "models", "state", "venvs"]
    assert not on.file("/etc/sglang").exists
    assert "changed=0" in controller.play(__file__, play, "-e", "remove=a")
    controller.play(__file__, play, "-e", "remove=all", "-e", "remove_data=true")
    assert engine.sudo(on, "ls /var/lib/sglang").split() == []
