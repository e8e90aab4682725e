"""The real router in front of three hosts: it is deployed, hosts leave it and come back, and no request is lost."""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
import urllib.request

import engine
import pytest
import traffic
from controller import until
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


HOOK = """
- name: Tell another load balancer
  ansible.builtin.shell: >-
    echo "{word} {{{{ sglang_hook_host }}}} {{{{ sglang_hook_instance }}}} {{{{ sglang_hook_url }}}}" >> {log}
  delegate_to: localhost
"""


def hooks(folder):
    """Two files of tasks that write down what they are told, as arguments; and where."""
    log, told = folder / "log", {}
    for name, word in (("sglang_drain_hook", "out"), ("sglang_join_hook", "in")):
        (folder / f"{word}.yml").write_text(HOOK.format(word=word, log=log))
        told[name] = str(folder / f"{word}.yml")
    return ["-e", json.dumps(told)], log


def test_a_host_is_drained_and_joins_without_a_lost_request(tmp_path):
    others, log = hooks(tmp_path)
    with Traffic(__file__) as users:
        FLEET.play("playbooks/drain.yml", "-l", SECOND, *others)
        assert FLEET.rotation() == [FIRST, THIRD]
        status, loads = engine.request(FLEET.host(SECOND), "/v1/loads", address=traffic.address(__file__, SECOND))
        assert (status, [load["num_running_reqs"] for load in loads["loads"]]) == (200, [0])
        assert engine.show(FLEET.host(SECOND), "sglang-main-ep8.service", "ActiveState") == "active"
        FLEET.play("playbooks/join.yml", "-l", SECOND, *others)
        assert FLEET.rotation() == HOSTS
    what = f"{SECOND} main {traffic.worker(__file__, SECOND)}"
    assert log.read_text().splitlines() == [f"out {what}", f"in {what}"]
    assert users.lost() == {}
    assert users.result["ok"] > 100


def test_what_a_person_has_drained_stays_out_through_restarts_and_deployments():
    FLEET.play("playbooks/drain.yml", "-l", FIRST)
    engine.sudo(router(), f"systemctl restart {ROUTER_UNIT}")
    engine.sudo(router(), f"timeout 30 sh -c 'until ss -Hltn sport = :{traffic.PORT} | grep -q .; do sleep 0.2; done'")
    assert until(lambda: FLEET.rotation() == [SECOND, THIRD], 15), FLEET.rotation()
    with Traffic(__file__) as users:
        output = FLEET.deploy(*wish(sglang_rollout_batches=[1], sglang_context_length=4096), *LIMIT)
    assert users.lost() == {}
    assert f"{FIRST} main stays out of rotation, as a person wished" in output
    assert "serving" in row(output, FIRST)
    assert {FLEET.length(name) for name in HOSTS} == {4096}
    assert FLEET.rotation() == [SECOND, THIRD]
    FLEET.play("playbooks/join.yml", "-l", FIRST)
    assert FLEET.rotation() == HOSTS


def test_two_variables_make_it_speak_tls(tmp_path):
    address, only = traffic.address(__file__, ROUTER), ("-l", ROUTER)
    files = {"sglang_router_tls_certificate": tmp_path / "cert.pem", "sglang_router_tls_key": tmp_path / "key.pem"}
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=router"]
    command += ["-addext", f"subjectAltName=IP:{address}", "-out", *map(str, files.values())]
    command.insert(-1, "-keyout")
    subprocess.run(command, check=True, capture_output=True)
    FLEET.deploy(*wish(), *only, "-e", json.dumps({name: str(path) for name, path in files.items()}))
    trust = ssl.create_default_context(cafile=files["sglang_router_tls_certificate"])
    with urllib.request.urlopen(f"https://{address}:{traffic.PORT}/v1/models", context=trust, timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(http.client.BadStatusLine):
        urllib.request.urlopen(f"http://{address}:{traffic.PORT}/v1/models", timeout=10)
    FLEET.deploy(*wish(), *only)
    assert FLEET.rotation() == HOSTS


def test_drain_wants_to_know_which_hosts():
    output = FLEET.play("playbooks/drain.yml", rc=2)
    assert "Say which hosts" in output
    assert FLEET.rotation() == HOSTS
