"""A fleet and the Prometheus that watches it: what is scraped, what fires, and that nothing of it holds a secret."""

from __future__ import annotations

import json

import controller
import engine
import pytest
import starts
from controller import until

ENGINES = ("rehearsal-01", "rehearsal-02")
SETTINGS = f"@{controller.ROOT}/molecule/monitoring/vars/settings.yml"
TEXTFILE = "/var/lib/prometheus/node-exporter"
DROP_IN = f"/etc/systemd/system/{starts.UNIT}.d"
# Asked on the Prometheus host itself: prints the data of one call of its API.
ASK = """
import json, sys, urllib.parse, urllib.request
path, arguments = json.load(sys.stdin)
url = "http://127.0.0.1:9090/api/v1/" + path + "?" + urllib.parse.urlencode(arguments)
print(json.dumps(json.load(urllib.request.urlopen(url, timeout=10))["data"]))
"""


def prometheus(path, **arguments):
    host = controller.scenario_host(__file__, "monitor-01")
    asked = json.dumps([path, arguments]).replace("'", "'\\''")
    program = ASK.replace("'", "'\\''")
    run = host.run(f"printf %s '{asked}' | python3 -c '{program}'")
    assert run.rc == 0, run.stderr
    return json.loads(run.stdout)


def query(expression):
    """By host the value of an expression."""
    found = prometheus("query", query=expression)["result"]
    return {item["metric"].get("host"): float(item["value"][1]) for item in found}


def firing():
    return [alert for alert in prometheus("alerts")["alerts"] if alert["state"] == "firing"]


@pytest.fixture(params=ENGINES)
def fleet_host(request):
    return controller.scenario_host(__file__, request.param)


def test_everything_is_scraped():
    assert until(lambda: query('up{job="dflash-fleet-engine"}') == dict.fromkeys(ENGINES, 1.0)), prometheus("targets")
    assert until(lambda: query('up{job="dflash-fleet-host"}') == dict.fromkeys(ENGINES, 1.0)), prometheus("targets")
    assert until(lambda: query('dflash_fleet_instance_state{state="serving"}') == dict.fromkeys(ENGINES, 1.0))
    # Its gate has generated tokens, and its labels come from the inventory.
    labels = '{profile="ep8",drafter="dflash",cuda_graph="enabled"}'
    assert set(query(f"sglang:generation_tokens_total{labels} > 0")) == set(ENGINES)
    assert query("dflash_fleet_drift_paths") in ({}, dict.fromkeys(ENGINES, 0.0))
    assert firing() == []


def test_a_host_measures_itself_quietly_in_its_sandbox(fleet_host):
    assert fleet_host.service("dflash-metrics.timer").is_running
    assert fleet_host.service("dflash-metrics.timer").is_enabled
    assert engine.show(fleet_host, "dflash-metrics.service", "Result") == "success"
    before = engine.sudo(fleet_host, f"stat -c %Y {TEXTFILE}/dflash-fleet.prom")
    assert until(lambda: engine.sudo(fleet_host, f"stat -c %Y {TEXTFILE}/dflash-fleet.prom") != before, 15)
    assert engine.sudo(fleet_host, f"stat -c %a {TEXTFILE}/dflash-fleet.prom").strip() == "644"
    # A start and an end every two seconds leave nothing in the journal.
    lines = engine.sudo(fleet_host, "journalctl -q -o cat --since=-20s -u dflash-metrics.service").splitlines()
    assert lines == []
    exposure = engine.sudo(fleet_host, "systemd-analyze security --no-pager dflash-metrics.service | tail -n 1")
    assert float(exposure.split("level for dflash-metrics.service:")[1].split()[0]) <= 4.0, exposure


def test_nothing_that_is_scraped_or_written_holds_the_key(fleet_host):
    text = engine.sudo(fleet_host, f"cat {TEXTFILE}/*.prom /etc/systemd/system/dflash-metrics.*")
    answer = fleet_host.run("python3 -c 'import urllib.request; "
                            'print(urllib.request.urlopen("http://127.0.0.1:30000/metrics").read().decode())\'')
    assert "sglang:" in answer.stdout
    assert "canary" not in text + answer.stdout
    monitor = controller.scenario_host(__file__, "monitor-01")
    assert "canary" not in engine.sudo(monitor, "cat /etc/prometheus/prometheus.yml /etc/prometheus/dflash-fleet/*.yml "
                                                "/etc/prometheus/dflash-fleet/*.json /etc/prometheus/dflash-fleet/*/*")


def test_rules_that_prometheus_refuses_are_put_back():
    """A label that is none: promtool says so before Prometheus reads it."""
    monitor = controller.scenario_host(__file__, "monitor-01")
    before = engine.sudo(monitor, "cat /etc/prometheus/dflash-fleet/rules.yml")
    wrong = json.dumps({"sglang_monitoring_labels": {"not-a-label": "x"}})
    output = controller.play(
        __file__, "playbooks/monitoring.yml", "-e", SETTINGS, "-e", wrong, "-l", "monitor-01,rehearsal-01",
        "--tags", "sglang_monitoring_configure", rc=2,
    )
    assert "promtool check" in " ".join(output.split()), output
    assert "not-a-label" in output
    assert engine.sudo(monitor, "cat /etc/prometheus/dflash-fleet/rules.yml") == before
    assert monitor.service("prometheus").is_running


def test_a_prometheus_of_somebody_else_is_left_alone():
    monitor = controller.scenario_host(__file__, "monitor-01")
    path = "/etc/prometheus/prometheus.yml"
    engine.sudo(monitor, f"cp {path} /root/ours && printf 'global: {{}}\\n' > {path}")
    output = controller.play(__file__, "playbooks/monitoring.yml", "-e", SETTINGS, "-l", "monitor-01", rc=2)
    assert "set sglang_monitoring_install to false" in " ".join(output.split())
    assert engine.sudo(monitor, f"cat {path}") == "global: {}\n"
    edited = "# Sample config for Prometheus.\\nglobal: {}\\n"
    engine.sudo(monitor, f"printf '{edited}' > {path}")
    controller.play(__file__, "playbooks/monitoring.yml", "-e", SETTINGS, "-l", "monitor-01", rc=2)
    assert engine.sudo(monitor, f"cat {path}").splitlines()[1] == "global: {}"
    engine.sudo(monitor, f"mv /root/ours {path}")


def test_a_unit_changed_by_hand_is_drift():
    host = controller.scenario_host(__file__, "rehearsal-02")
    # Only what a whole deployment has left can be drifted from, and the packages of monitoring came after it.
    controller.deploy(__file__, "-e", SETTINGS, "-l", "rehearsal-02")
    assert until(lambda: query("dflash_fleet_drift_paths").get("rehearsal-02") == 0)
    engine.sudo(host, f"mkdir -p {DROP_IN} && printf '[Service]\\nNice=1\\n' > {DROP_IN}/mine.conf")
    assert until(lambda: query("dflash_fleet_drift_paths").get("rehearsal-02") == 1)
    engine.sudo(host, f"rm -r {DROP_IN}")
    assert until(lambda: query("dflash_fleet_drift_paths").get("rehearsal-02") == 0)


def test_a_crash_fires_with_its_cause_and_what_to_run():
    host = controller.scenario_host(__file__, "rehearsal-01")
    starts.set_pace(host, {"kind": "weights_corrupt"})
    engine.as_root(host, f"systemctl restart {starts.UNIT}")
    (alert,) = until(lambda: [alert for alert in firing() if alert["labels"]["alertname"] == "EngineCrashed"]) or [{}]
    labels = alert["labels"]
    assert (labels["host"], labels["cause"], labels["verdict"]) == ("rehearsal-01", "weights_corrupt", "crashed")
    assert alert["annotations"]["summary"] == "main on rehearsal-01 crashed: weights_corrupt"
    assert alert["annotations"]["command"] == "ansible-playbook playbooks/diagnose.yml -l rehearsal-01"
    # It does not heal, so it stays down; the host says so although the engine's own metrics are gone.
    assert until(lambda: query('dflash_fleet_instance_state{state="failed"}').get("rehearsal-01") == 1)
    assert query('up{job="dflash-fleet-engine"}')["rehearsal-01"] == 0
