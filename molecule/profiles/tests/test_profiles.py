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


SWITCHES = [
    pytest.param(TP8, {"sglang_profile": "tp8", "sglang_drafter": "none"}, [], id="tp8"),
    pytest.param(EP8, {"sglang_profile": "ep8"}, ["--ep-size 8", "--moe-a2a-backend none"], id="ep8+dflash"),
    pytest.param(EP4, {"sglang_profile": "ep4"}, ["--tp-size 8", "--ep-size 4"], id="ep4"),
    pytest.param(TP8, {"sglang_profile": "tp8", "sglang_drafter": "none"}, ["--tp-size 8"], id="back to tp8"),
]


@pytest.mark.parametrize(("unit", "wanted", "options"), SWITCHES)
def test_switching_is_one_variable_and_gated(on, unit, wanted, options):
    before = engine.show(on, "sglang-main-*", "Id").splitlines()
    output = deploy(**wanted)
    assert "serving" in output
    assert on.service(unit).is_running
    assert engine.state(on, "ready.json")["invocation_id"] == engine.show(on, unit, "InvocationID")
    assert engine.state(on, "ready.json")["unit"] == unit
    # The unit of the profile before is gone, from the boot too; its text stays in its release.
    assert installed(on) == [unit], before
    assert enabled(on) == [unit]
    text = engine.sudo(on, f"systemctl cat {unit}")
    assert all(option in text for option in options)


def test_the_old_engine_is_gone_before_the_new_one_starts(on):
    """By systemd alone, without the play: Conflicts= ends the other, After= waits for it, in both directions."""
    release = engine.sudo(on, f"ls -d /var/lib/sglang/main/releases/*/{EP8}").split()[0]
    engine.sudo(on, f"cp {release} /etc/systemd/system/ && systemctl daemon-reload")
    try:
        for old, new in ((TP8, EP8), (EP8, TP8)):
            assert on.service(old).is_running
            wait_for_ranks(on)
            engine.sudo(on, f"systemctl start {new}")
            assert not on.service(old).is_running
            left, began = moment(on, old, "InactiveEnterTimestamp"), moment(on, new, "ExecMainStartTimestamp")
            assert 0 < left <= began, (old, left, new, began)
            stopping = moment(on, old, "ActiveExitTimestamp")
            assert stopping < left
    finally:
        engine.sudo(on, f"systemctl stop {EP8}; rm -f /etc/systemd/system/{EP8}; systemctl daemon-reload")
        engine.sudo(on, f"systemctl start {TP8}")


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


def test_two_instances_share_a_host_and_the_one_before_is_gone(on):
    predicted = deploy("--check", **TWO)
    assert on.service(TP8).is_running
    assert "sglang-main-tp8.service" in predicted or "retire" in predicted
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
    assert engine.sudo(on, "ls /var/lib/sglang").split() == ["cache", "models", "venvs"]
    assert not on.file("/etc/sglang").exists
    assert "changed=0" in controller.play(__file__, play, "-e", "remove=a")
    controller.play(__file__, play, "-e", "remove=all", "-e", "remove_data=true")
    assert engine.sudo(on, "ls /var/lib/sglang").split() == []
