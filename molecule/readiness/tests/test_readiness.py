"""What the host knows without Ansible: systemd's own view of loads, serving, a crash and a boot."""

from __future__ import annotations

import json
import re

import controller
import engine
import starts

UNIT = starts.UNIT
SETTINGS = f"@{controller.ROOT}/molecule/readiness/vars/settings.yml"


def name_of(host):
    return host.ansible.get_variables()["inventory_hostname"]


def fleet_status(name):
    """The row of a host on the screen of playbooks/status.yml, as data."""
    output = controller.play(__file__, "playbooks/status.yml", "-l", name, "-e", "format=json")
    text = re.search(r"^\{$.*?^\}$", output, re.M | re.S)
    assert text, output
    return json.loads(text[0])["instances"][0]


def gate(host):
    return engine.read_json(host, "/run/sglang-main/gate.json")


def test_the_unit_is_ready_because_its_prober_says_so(host):
    assert engine.show(host, UNIT, "Type") == "notify"
    assert host.service(UNIT).is_running
    assert engine.show(host, UNIT, "StatusText").startswith("serving: ready in ")
    command = engine.sudo(host, f"tr '\\0' ' ' < /proc/{engine.show(host, UNIT, 'MainPID')}/cmdline")
    assert "-m sglang.launch_server" in command
    found = gate(host)
    assert found["outcome"] == "ready"
    assert found["invocation_id"] == engine.show(host, UNIT, "InvocationID")
    assert found["smoke"]["accept_length"] > 1.1
    # The deployment took this verdict: it did not generate a second time.
    assert engine.state(host, "ready.json")["accept_length"] == found["smoke"]["accept_length"]
    prober = engine.sudo(host, f"tr '\\0' ' ' < /proc/{found['pid']}/cmdline")
    assert "supervisor.py probe" in prober
    assert engine.sudo(host, f"stat -c %U /proc/{found['pid']}").strip() == "sglang"


def test_a_slow_load_is_activating_with_progress_and_a_blocking_start_ends_at_the_gate(host):
    starts.set_pace(host, {"kind": "slow", "at": "weights", "factor": 2}, pace=0.05)
    rows = starts.restart(host, {"ActiveState": "active"})
    loading = [row for row in rows if row["ActiveState"] == "activating"]
    assert {row["SubState"] for row in loading} == {"start"}
    texts = [row["StatusText"] for row in loading]
    assert any(re.match(r"weights: \d/8 ranks", text) for text in texts), texts
    assert any(re.search(r"\d %", text) for text in texts), texts
    assert rows[-1]["StatusText"].startswith("serving: ready in")
    assert rows[-1]["NRestarts"] == "0"
    # Nobody but the supervisor gated this start, and the fleet's screen knows it.
    assert engine.state(host, "ready.json")["invocation_id"] != rows[-1]["InvocationID"]
    row = fleet_status(name_of(host))
    assert row["state"] == "serving"
    assert row["accept_length"] > 1.1
    starts.set_pace(host)
    engine.sudo(host, f"systemctl stop {UNIT}")
    engine.sudo(host, f"systemctl reset-failed {UNIT} || true; systemctl start {UNIT}")
    assert engine.sudo(host, f"systemctl is-active {UNIT}").strip() == "active"


def test_a_second_deployment_believes_the_verdict(host):
    before = engine.show(host, UNIT, "InvocationID")
    output = controller.deploy(__file__, "-l", name_of(host), "-e", SETTINGS)
    assert engine.show(host, UNIT, "InvocationID") == before
    assert re.search(rf"^{name_of(host)}\s+: .*\bchanged=0\b", output, re.M), output


def test_a_stop_leaves_no_report(host):
    known = starts.reports(host)
    engine.sudo(host, f"systemctl stop {UNIT}")
    assert engine.show(host, UNIT, "Result") == "success"
    assert engine.as_root(host, f"systemctl is-active {UNIT}").stdout.strip() == "inactive"
    assert starts.reports(host) == known


def test_a_crash_that_stays_is_reported_and_not_tried_again(host):
    engine.sudo(host, "mkdir -p /var/lib/textfile")
    known = starts.reports(host)
    starts.set_pace(host, {"kind": "weights_corrupt"})
    # Starts are limited, and each test above has made some.
    engine.sudo(host, f"systemctl stop {UNIT}; systemctl reset-failed {UNIT} || true")
    begun = engine.as_root(host, f"systemctl start {UNIT}")
    assert begun.rc != 0
    engine.sudo(host, f"timeout 30 sh -c 'until systemctl is-failed -q {UNIT}; do sleep 0.2; done'")
    assert engine.show(host, UNIT, "NRestarts") == "0"
    result = engine.show(host, UNIT, "Result")
    assert result in ("signal", "exit-code")
    report = starts.newest_report(host, known)
    assert report["crash"]["cause"] == "weights_corrupt"
    assert report["crash"]["phase"] == "weights"
    assert report["restarts_ended"] is True
    assert report["systemd"]["SERVICE_RESULT"] == result
    assert report["invocation_id"] == engine.show(host, UNIT, "InvocationID")
    metric = engine.sudo(host, "cat /var/lib/textfile/dflash-fleet-main.prom")
    row = r'^dflash_fleet_engine_crashes_total\{cause="weights_corrupt",.*rank="TP\d EP\d".*\} [1-9]\d*$'
    assert re.search(row, metric, re.M), metric
    entry = json.loads(
        engine.sudo(host, "journalctl MESSAGE_ID=5c1e2f0f6a0b4f1d9c7e8a52d3b4960e -n 1 -o json").splitlines()[-1]
    )
    assert entry["DFLASH_FLEET_CAUSE"] == "weights_corrupt"
    assert entry["PRIORITY"] == "3"
    row = fleet_status(name_of(host))
    assert (row["state"], row["last_cause"]) == ("failed", "weights_corrupt")
    assert starts.REPORTS in row["note"]


def test_after_a_boot_it_serves_and_is_gated_without_ansible(host):
    starts.set_pace(host)
    engine.sudo(host, f"systemctl reset-failed {UNIT} || true")
    name = name_of(host)
    controller.fleet(__file__, "reboot", name)
    again = controller.scenario_host(__file__, name)
    engine.sudo(again, f"timeout 90 sh -c 'until systemctl is-active -q {UNIT}; do sleep 0.3; done'")
    assert gate(again)["invocation_id"] == engine.show(again, UNIT, "InvocationID")
    assert fleet_status(name)["state"] == "serving"
