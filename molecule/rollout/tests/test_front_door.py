"""The real router in front of three hosts: it is deployed, hosts leave it and come back, and no request is lost."""

from __future__ import annotations

import time

import engine
import pytest
import traffic
from rollouts import Fleet, recap, row, wish
from traffic import DIRECTORY, ROUTER, ROUTER_UNIT, Traffic

FLEET = Fleet(__file__)
FIRST, SECOND, THIRD = HOSTS = FLEET.names[:3]
LIMIT = ("-l", ",".join([ROUTER, *HOSTS]))
WISH = [*wish(sglang_rollout_batches=["100%"]), *LIMIT]
OTHERS = FLEET.names[3:]


@pytest.fixture(scope="module", autouse=True)
def pace():
    for name in FLEET.names:
        FLEET.fail_where(name)


def router():
    return FLEET.host(ROUTER)


def until(check, seconds=15):
    """What a check says once it says something that is true, or last."""
    end = time.monotonic() + seconds
    while not (found := check()) and time.monotonic() < end:
        time.sleep(0.3)
    return found


def test_engines_join_after_their_gate_and_not_before():
    output = FLEET.deploy(*WISH)
    assert f"{ROUTER} sends nothing yet to" in output, "no engine served when the router was deployed"
    assert FLEET.rotation() == HOSTS
    assert not [name for name in OTHERS if traffic.worker(__file__, name) in traffic.rotation(__file__)]


def test_the_unit_is_hardened_and_shows_no_key():
    score = engine.sudo(router(), f"systemd-analyze security --no-pager {ROUTER_UNIT} | tail -1")
    assert float(score.rpartition("level for")[2].split(":")[1].split()[0]) <= 2.0, score
    key = engine.read_json(router(), f"{DIRECTORY}/control.json")["key"]
    assert len(key) == 64
    pid = engine.show(router(), ROUTER_UNIT, "MainPID")
    files = f"/proc/{pid}/cmdline /proc/{pid}/environ /etc/systemd/system/{ROUTER_UNIT}"
    assert key not in engine.sudo(router(), f"cat {files}; journalctl -u {ROUTER_UNIT}")
    modes = engine.sudo(router(), f"stat -c %a {DIRECTORY}/control.json {DIRECTORY}/credentials/*").split()
    assert modes == ["600", "600"]


def test_only_the_control_key_moves_workers_and_metrics_are_on():
    place = {"port": traffic.PORT, "address": traffic.address(__file__, ROUTER)}
    assert engine.request(router(), "/workers", **place)[0] == 401
    assert engine.request(router(), "/v1/models", **place)[0] == 200
    status, text = engine.request(router(), "/metrics", port=29000)
    assert (status, "smg_worker_pool_size" in text) == (200, True)


def test_a_second_run_restarts_nothing_and_changes_nothing():
    before, engines = engine.show(router(), ROUTER_UNIT, "InvocationID"), FLEET.invocations(*HOSTS)
    output = FLEET.deploy(*WISH, "-e", "sglang_skip_unchanged=false")
    assert [recap(output, name)["changed"] for name in (ROUTER, *HOSTS)] == [0] * 4
    assert (engine.show(router(), ROUTER_UNIT, "InvocationID"), FLEET.invocations(*HOSTS)) == (before, engines)


def test_a_host_is_drained_and_joins_without_a_lost_request():
    with Traffic(__file__) as users:
        FLEET.play("playbooks/drain.yml", "-l", SECOND)
        assert FLEET.rotation() == [FIRST, THIRD]
        status, loads = engine.request(FLEET.host(SECOND), "/v1/loads", address=traffic.address(__file__, SECOND))
        assert (status, [load["num_running_reqs"] for load in loads["loads"]]) == (200, [0])
        assert engine.show(FLEET.host(SECOND), "sglang-main-ep8.service", "ActiveState") == "active"
        FLEET.play("playbooks/join.yml", "-l", SECOND)
        assert FLEET.rotation() == HOSTS
    assert users.lost() == {}
    assert users.result["ok"] > 100


def test_what_a_person_has_drained_stays_out_through_restarts_and_deployments():
    FLEET.play("playbooks/drain.yml", "-l", FIRST)
    engine.sudo(router(), f"systemctl restart {ROUTER_UNIT}")
    assert until(lambda: FLEET.rotation() == [SECOND, THIRD]), FLEET.rotation()
    with Traffic(__file__) as users:
        output = FLEET.deploy(*WISH, "-e", "sglang_context_length=4096")
    assert users.lost() == {}
    assert f"{FIRST} main stays out of rotation, as a person wished" in output
    assert "serving" in row(output, FIRST)
    assert {FLEET.length(name) for name in HOSTS} == {4096}
    assert FLEET.rotation() == [SECOND, THIRD]
    FLEET.play("playbooks/join.yml", "-l", FIRST)
    assert FLEET.rotation() == HOSTS


def test_drain_wants_to_know_which_hosts():
    output = FLEET.play("playbooks/drain.yml", rc=2)
    assert "Say which hosts" in output
    assert FLEET.rotation() == HOSTS
