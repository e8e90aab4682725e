"""Alert rules and dashboard against real metrics.

promtool fires each alert and keeps it silent, Prometheus answers each query, Grafana's own types know every field.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dflash_fleet import measures, monitoring, textfile
from plugins import load as load_plugin

ROOT = Path(__file__).resolve().parents[2]
METRICS = ROOT / "tests" / "fixtures" / "metrics"
sys.path.insert(0, str(ROOT / "tests"))

import prometheus  # noqa: E402 - found by the line above
from prometheus_client import parser  # noqa: E402

MINUTES = 60
#: What a series is: its name and labels.
Key = tuple[str, tuple[tuple[str, str], ...]]
#: By series, promtool's own notation of its values, one a minute.
World = dict[Key, str]

CPU = {
    "host": "cpu-01", "instance_name": "main", "profile": "single", "drafter": "dflash", "cuda_graph": "disabled",
    "build": "cpu", "worker": "http://127.0.0.1:32712", "job": monitoring.ENGINES, "instance": "10.0.0.1:30000",
}  # fmt: skip
GPU = {
    **CPU, "host": "gpu-01", "profile": "ep8", "cuda_graph": "enabled", "build": "rehearsal",
    "worker": "http://127.0.0.1:32711", "instance": "10.0.0.2:30000",
}  # fmt: skip
ROUTER = {"job": monitoring.ROUTERS, "instance": "10.0.0.9:29000"}


def exporter(host: str) -> dict[str, str]:
    return {"host": host, "job": monitoring.HOSTS, "instance": f"{host}:9100"}


def key(name: str, **labels: str) -> Key:
    return name, tuple(sorted(labels.items()))


def samples(text: str, target: dict[str, str]) -> dict[Key, float]:
    """Every sample of an exposition, with its target's labels, as Prometheus stores them."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser adds these for counters of other formats.
            if not sample.name.endswith("_created"):
                found[key(sample.name, **{**sample.labels, **target})] = float(sample.value)
    return found


def recorded(name: str, target: dict[str, str]) -> dict[Key, float]:
    return samples((METRICS / f"{name}.prom").read_text(encoding="utf-8"), target)


def between(first: dict[Key, float], second: dict[Key, float], minutes: int = MINUTES) -> World:
    """A counter grows as it did between two scrapes, a gauge goes from one value to the other."""
    world = {}
    for series in {**first, **second}:
        begin, end = first.get(series, 0.0), second.get(series, first.get(series, 0.0))
        if not math.isnan(begin) and not math.isnan(end):
            world[series] = f"{begin:.9f}{(end - begin) / minutes:+.9f}x{minutes}"
    return world


def steady(values: dict[Key, float], minutes: int = MINUTES) -> World:
    return {series: f"{value:.9f}+0x{minutes}" for series, value in values.items() if not math.isnan(value)}


UNIT = {"name": "sglang-main-ep8.service", "active_state": "active", "n_restarts": 0}
FACTS = {
    "condition": "serving", "serving": True, "current": "0a1b2c3d4e5f", "units": [UNIT],
    "release": {"unit": "sglang-main-ep8.service", "engine": {"version": "0.5.20"}},
    "ready": {"seconds": 131.5, "accept_length": 3.4},
}  # fmt: skip


def measured(host: str, **change: Any) -> World:
    """What a host says of itself, all hour."""
    drift, space = change.pop("drift", []), change.pop("space", ("/var/lib/sglang", 400, 1000))
    text = textfile.render(measures.families({"main": {**FACTS, **change}}, drift, space, 1.0))
    world = steady(samples(text, exporter(host)))
    world[key("dflash_fleet_measured_timestamp_seconds", **exporter(host))] = f"0+60x{MINUTES}"
    return world


def healthy() -> World:
    """An hour of a real and a rehearsed engine under load, a router, and hosts that say that all is well."""
    world = between(recorded("real-0.5.23-cpu-busy-1", CPU), recorded("real-0.5.23-cpu-busy-2", CPU))
    world |= between(recorded("rehearsal-0.5.20-graphs-1", GPU), recorded("rehearsal-0.5.20-graphs-2", GPU))
    world |= steady(recorded("router-0.3.2-both", ROUTER))
    for target in (CPU, GPU, ROUTER, exporter("cpu-01"), exporter("gpu-01")):
        world[key("up", **target)] = f"1+0x{MINUTES}"
    return world | measured("cpu-01") | measured("gpu-01")


def put(world: World, name: str, values: str, **where: str) -> None:
    """Other values for the series of a name that carry these labels."""
    hits = [series for series in world if series[0] == name and set(where.items()) <= set(series[1])]
    assert hits, (name, where)
    for series in hits:
        world[series] = values


def drop(world: World, name: str) -> None:
    hits = [series for series in world if series[0] == name]
    assert hits, name
    for series in hits:
        del world[series]


def crash(world: World, verdict: str, cause: str, minute: float) -> None:
    labels = {"instance_name": "main", "unit": "sglang-main-ep8.service", "cause": cause, "rank": "TP3 EP3"}
    name = "dflash_fleet_engine_last_crash_timestamp_seconds"
    world[key(name, verdict=verdict, **labels, **exporter("gpu-01"))] = f"{minute * 60}+0x{MINUTES}"


def useless(world: World) -> None:
    """Drafts nothing, and has not for a day: there is nothing that it could have fallen from."""
    put(world, "sglang:spec_accept_length", f"1.02+0x{MINUTES}", host="cpu-01")


def fell(world: World) -> None:
    put(world, "sglang:spec_accept_length", f"3.4+0x{MINUTES - 25} 2+0x25", host="gpu-01")


def without_graphs(world: World) -> None:
    for series in [series for series in world if dict(series[1]).get("job") == monitoring.ENGINES]:
        if dict(series[1])["host"] == "gpu-01" and series[0] != "up":
            del world[series]
    world |= between(recorded("rehearsal-0.5.20-no-graphs-1", GPU), recorded("rehearsal-0.5.20-no-graphs-2", GPU))


def still(world: World) -> None:
    put(world, "sglang:cuda_graph_passes_total", f"210+0x{MINUTES}", host="cpu-01")


def full(world: World) -> None:
    put(world, "sglang:token_usage", f"0.99+0x{MINUTES}", host="cpu-01")
    put(world, "sglang:num_queue_reqs", f"7+0x{MINUTES}", host="cpu-01")


def one_dead(world: World) -> None:
    for series in [series for series in world if series[0].startswith("smg_")]:
        del world[series]
    world |= steady(recorded("router-0.3.2-one-dead", ROUTER))


def of_host(name: str, **change: Any) -> Callable[[World], None]:
    return lambda world: world.update(measured(name, **change))


def down(target: dict[str, str]) -> Callable[[World], None]:
    return lambda world: world.update({key("up", **target): f"0+0x{MINUTES}"})


def silent(world: World) -> None:
    world[key("dflash_fleet_measured_timestamp_seconds", **exporter("gpu-01"))] = f"600+0x{MINUTES}"


DIAGNOSE = "ansible-playbook playbooks/diagnose.yml -l gpu-01"
STATUS = "ansible-playbook playbooks/status.yml -l "
MAIN = {"host": "gpu-01", "instance_name": "main"}
ON_CPU = {"host": "cpu-01", "instance_name": "main"}
CRASH = {**exporter("gpu-01"), "instance_name": "main", "unit": "sglang-main-ep8.service", "rank": "TP3 EP3"}
STATE = {**exporter("gpu-01"), "instance_name": "main"}

#: By alert: what happens, the labels of the alert, its summary and command.
FIRING: dict[str, tuple[Callable[[World], None], dict[str, str], str, str]] = {
    "EngineCrashed": (
        lambda world: crash(world, "crashed", "gpu_oom", 50),
        {**CRASH, "verdict": "crashed", "cause": "gpu_oom"},
        "main on gpu-01 crashed: gpu_oom", DIAGNOSE,
    ),
    "EngineHung": (
        lambda world: crash(world, "hung", "scheduler_watchdog_timeout", 50),
        {**CRASH, "verdict": "hung", "cause": "scheduler_watchdog_timeout"},
        "main on gpu-01 hung and was ended: scheduler_watchdog_timeout", DIAGNOSE,
    ),
    "EngineStandsStill": (
        still, ON_CPU, "main on cpu-01 has requests and computes nothing",
        "ansible-playbook playbooks/diagnose.yml -l cpu-01",
    ),
    "EngineFailed": (
        of_host("gpu-01", condition="failed", serving=False), {**STATE, "state": "failed"},
        "main on gpu-01 is down and is not started again", DIAGNOSE,
    ),
    "EngineUnreachable": (down(GPU), GPU, "main on gpu-01 has not answered for 15 minutes", STATUS + "gpu-01"),
    "EngineRestarts": (
        lambda world: put(world, "dflash_fleet_instance_restarts_total", "0+0x20 1+0x20 2+0x20", host="gpu-01"),
        STATE, "systemd has restarted main on gpu-01 2 times in an hour", DIAGNOSE,
    ),
    "EngineDegraded": (
        of_host("gpu-01", condition="degraded"), {**STATE, "state": "degraded"},
        "main on gpu-01 serves with a fallback in effect", STATUS + "gpu-01",
    ),
    "GraphsFellBack": (
        without_graphs, MAIN, "main on gpu-01 decodes 100% of its steps without CUDA graphs", STATUS + "gpu-01",
    ),
    "DrafterUseless": (
        useless, ON_CPU, "the drafter of main on cpu-01 brings nothing: accept length 1.02", STATUS + "cpu-01",
    ),
    "AcceptLengthFell": (
        fell, MAIN, "the accept length of main on gpu-01 fell to 2.00, much below its mean of a day", STATUS + "gpu-01",
    ),
    "KvPoolFull": (full, ON_CPU, "the KV pool of main on cpu-01 is full and requests wait", STATUS + "cpu-01"),
    "HostOutOfRouter": (
        one_dead, CPU, "main on cpu-01 serves, and no router sends it requests",
        "ansible-playbook playbooks/status.yml",
    ),
    "RouterUnreachable": (
        down(ROUTER), ROUTER, "the router at 10.0.0.9:29000 does not answer", "ansible-playbook playbooks/status.yml",
    ),
    "HostDrifted": (
        of_host("gpu-01", drift=["/etc/systemd/system/sglang-main-ep8.service"]), exporter("gpu-01"),
        "1 files of gpu-01 are not as the last deployment left them",
        "ansible-playbook deploy-dflash.yml -l gpu-01 --check --diff",
    ),
    "DiskFull": (
        of_host("gpu-01", space=("/var/lib/sglang", 40, 1000)), {"path": "/var/lib/sglang", **exporter("gpu-01")},
        "/var/lib/sglang on gpu-01 has 4% left", "ansible-playbook playbooks/preflight.yml -l gpu-01",
    ),
    "HostSilent": (
        silent, exporter("gpu-01"), "gpu-01 has said nothing of itself for 10 minutes; other alerts of it mean nothing",
        "ansible gpu-01 -b -m command -a 'systemctl status dflash-metrics.service'",
    ),
}  # fmt: skip


def idle(world: World) -> None:
    """The real engine some time after its last answer: gauges are 0, counters stand."""
    world |= steady(recorded("real-0.5.23-cpu-after", CPU))


def no_router(world: World) -> None:
    for series in [series for series in world if dict(series[1]).get("job") == monitoring.ROUTERS]:
        del world[series]


#: What must not wake anybody, beside the healthy hour.
SILENT: dict[str, Callable[[World], None]] = {
    "healthy": lambda world: None,
    "idle": idle,
    "an old crash": lambda world: crash(world, "crashed", "gpu_oom", 40),
    "no router": no_router,
    "a full pool without a queue": lambda world: put(
        world, "sglang:token_usage", f"0.99+0x{MINUTES}", host="gpu-01"
    ),
    "one restart": lambda world: put(
        world, "dflash_fleet_instance_restarts_total", "3+0x30 4+0x30", host="gpu-01"
    ),
    "a deployment of 20 minutes": lambda world: put(
        world, "dflash_fleet_drift_paths", "0+0x40 3+0x20", host="gpu-01"
    ),
    "a load of ten minutes": lambda world: world.update({key("up", **GPU): "1+0x50 0+0x10"}),
    "stopped by hand": of_host("gpu-01", condition="stopped", serving=False),
    "never deployed as a whole": lambda world: drop(world, "dflash_fleet_drift_paths"),
}  # fmt: skip


def notation(series: Key) -> str:
    name, labels = series
    return name + "{" + ",".join(f"{label}={json.dumps(value)}" for label, value in labels) + "}"


def used(expression: str) -> set[str]:
    """Names of metrics in an expression."""
    return set(re.findall(r"\b(?:sglang:|dflash_fleet_|smg_)\w+|\bup\b", expression))


ALERTS = [row["name"] for row in monitoring.ALERTS]
NEEDED = {name for row in monitoring.ALERTS for name in used(row["expr"])}


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "rules.yml"
    path.write_text(yaml.safe_dump(monitoring.rules(), sort_keys=False, width=1000), encoding="utf-8")
    return path


def case(world: World, expected: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [
            {"series": notation(series), "values": values} for series, values in world.items() if series[0] in NEEDED
        ],
        "alert_rule_test": [
            {"eval_time": f"{MINUTES}m", "alertname": name, "exp_alerts": alerts} for name, alerts in expected.items()
        ],
    }


def check(rules: Path, cases: dict[str, Any]) -> None:
    """promtool says nothing but SUCCESS."""
    file = rules.parent / "test.yml"
    document = {"rule_files": [rules.name], "evaluation_interval": "1m", "tests": list(cases.values())}
    file.write_text(yaml.safe_dump(document, sort_keys=False, width=10000), encoding="utf-8")
    done = prometheus.promtool("test", "rules", file.name, cwd=rules.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_promtool_takes_the_rules(rules: Path) -> None:
    done = prometheus.promtool("check", "rules", str(rules))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_there_is_a_firing_case_for_each_alert() -> None:
    assert list(FIRING) == ALERTS


@pytest.mark.parametrize("name", ALERTS)
def test_alert_fires_with_what_to_run(rules: Path, name: str) -> None:
    """It alone, but for those that mean the same event from another side."""
    happens, labels, summary, command = FIRING[name]
    world = healthy()
    happens(world)
    severity = next(row["severity"] for row in monitoring.ALERTS if row["name"] == name)
    alert = {
        "exp_labels": {**labels, "severity": severity},
        "exp_annotations": {"summary": summary, "command": command},
    }
    others = {other: [] for other in ALERTS if other != name}
    check(rules, {name: case(world, {name: [alert], **others})})


@pytest.mark.parametrize("name", SILENT)
def test_nobody_is_woken(rules: Path, name: str) -> None:
    world = healthy()
    SILENT[name](world)
    check(rules, {name: case(world, {alert: [] for alert in ALERTS})})


def test_thresholds_labels_and_left_out_alerts() -> None:
    found = monitoring.rules({"free_share": 0.2}, ["HostDrifted"], {"team": "llm"})["groups"][0]["rules"]
    by_name = {rule["alert"]: rule for rule in found}
    assert "HostDrifted" not in by_name
    assert by_name["DiskFull"]["expr"].endswith("< 0.2")
    assert by_name["DiskFull"]["labels"] == {"severity": "warning", "team": "llm"}
    assert monitoring.unknown({"free_share": 1}, ["DiskFull"]) == []
    wrong = monitoring.unknown({"free_chare": 1}, ["Disc"])
    assert len(wrong) == 2
    assert "free_share" in wrong[0]
    assert "DiskFull" in wrong[1]


def test_every_release_has_the_metrics_that_alerts_read() -> None:
    since = json.loads((METRICS / "names.json").read_text(encoding="utf-8"))
    for row in monitoring.ALERTS:
        for name in used(row["expr"]):
            assert not name.startswith("sglang:") or since[name] == "0.5.11", (row["name"], name)


def page() -> str:
    """docs/alerts.md."""
    out = [
        "# Alerts",
        "",
        "Made from the table in `module_utils/dflash_fleet/monitoring.py`, by",
        "`UPDATE_DOCS=1 pytest tests/unit/test_monitoring.py`. [monitoring](monitoring.md) says how they get to a",
        "Prometheus.",
        "",
    ]
    defaults = {name: f"{value:g}" for name, value in monitoring.THRESHOLDS.items()}
    for row in monitoring.ALERTS:
        summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"<\1>", row["summary"])
        summary = re.sub(r"\{\{ \$value[^}]*\}\}", "<value>", summary)
        command = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"<\1>", row["command"])
        out += [
            f"## {row['name']}",
            "",
            f"*{row['severity']}*, after {row['for']}: `{summary}`",
            "",
            "```",
            row["expr"] % defaults,
            "```",
            "",
            f"Run `{command}`.",
            "",
        ]
    out += ["## Thresholds", "", "| `sglang_monitoring_thresholds` | default |", "|---|---|"]
    out += [f"| `{name}` | {value} |" for name, value in defaults.items()]
    return "\n".join(out) + "\n"


def test_page_of_alerts_is_current() -> None:
    path = ROOT / "docs" / "alerts.md"
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(page(), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == page()


# The dashboard ----------------------------------------------------------------------------------------------------
def test_grafana_knows_every_field_of_the_dashboard() -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models import dashboard as types

    register_default_plugins()
    ours = monitoring.dashboard()
    theirs = json.loads(JSONEncoder().encode(types.Dashboard.from_json(json.loads(json.dumps(ours)))))
    assert lost(ours, theirs) == []


def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """What Grafana's types did not take over: fields that it does not have, values that it read otherwise."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [gone for name in ours for gone in lost(ours[name], theirs.get(name), f"{path}.{name}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [gone for index, item in enumerate(ours) for gone in lost(item, theirs[index], f"{path}[{index}]")]
    return [] if ours == theirs else [f"{path}: {ours!r} is read as {theirs!r}"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    identities = set()
    for panel in monitoring.dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        identities.add(panel["id"])
    assert len(identities) == len(monitoring.dashboard()["panels"])


START = 1_700_000_000  # of the hour that Prometheus is given


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real Prometheus that holds the healthy hour and a crash."""
    folder = tmp_path_factory.mktemp("prometheus")
    world = healthy()
    labels = {"instance_name": "main", "unit": "u", "cause": "gpu_oom", "rank": "TP3 EP3", "verdict": "crashed"}
    crashes = "dflash_fleet_engine_crashes_total"
    world[key(crashes, **labels, **exporter("gpu-01"))] = f"1+0.1x{MINUTES}"
    last = "dflash_fleet_engine_last_crash_timestamp_seconds"
    world[key(last, **labels, **exporter("gpu-01"))] = f"{START}+0x{MINUTES}"
    lines = []
    for series, values in world.items():
        begin, step = re.fullmatch(r"([\d.]+)([+-][\d.]+)x\d+", values).groups()
        lines += [
            f"{notation(series)} {float(begin) + float(step) * minute} {START + 60 * minute}"
            for minute in range(MINUTES + 1)
        ]
    (folder / "hour.om").write_text("\n".join([*lines, "# EOF", ""]), encoding="utf-8")
    done = prometheus.promtool("tsdb", "create-blocks-from", "openmetrics", "hour.om", "data", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    with prometheus.serving(folder, "{}", folder / "data") as server:
        yield server


#: Queries that the healthy hour answers with nothing, each with its reason.
EMPTY = {"ALERTS": "no alert is firing"}


@pytest.mark.parametrize("query", monitoring.queries())
def test_every_query_finds_something(loaded: prometheus.Server, query: str) -> None:
    filled = query.replace("$__rate_interval", "5m").replace("$host", ".*").replace("$instance", ".*")
    assert "$" not in filled
    found = loaded.query(filled, START + 60 * (MINUTES - 1))
    if any(query.startswith(name) for name in EMPTY):
        return
    assert found, query
    assert all(not math.isnan(float(item["value"][1])) for item in found), found


def test_variables_of_the_page_have_values(loaded: prometheus.Server) -> None:
    for variable in monitoring.dashboard()["templating"]["list"][1:]:
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
        window = {"start": str(START), "end": str(START + 3600)}
        assert loaded.get(f"label/{label}/values", **{"match[]": selector, **window}), variable["name"]


# Targets and files ------------------------------------------------------------------------------------------------
INVENTORY = """
all:
  children:
    gpu:
      hosts:
        gpu-01: {ansible_host: 192.0.2.11}
        gpu-02: {ansible_host: "2001:db8::2", sglang_host: "::"}
        gpu-03: {ansible_host: 192.0.2.13, sglang_host: 127.0.0.1}
        gpu-04: {ansible_host: 192.0.2.14, sglang_enable_metrics: false}
        gpu-05:
          ansible_host: 192.0.2.15
          sglang_version: "0.5.11"
          sglang_instances:
            - {name: a, profile: single, gpus: [0], port: 30000, drafter: none}
            - {name: b, profile: single, gpus: [1], port: 30001, drafter: none}
    sglang_router:
      hosts:
        door-01: {ansible_host: 192.0.2.8, sglang_router_metrics_host: 0.0.0.0}
        door-02: {ansible_host: 192.0.2.7}
    sglang_monitoring:
      hosts:
        eyes-01: {ansible_host: 192.0.2.6}
  vars:
    sglang_model: moonshotai/Kimi-K2.6
    sglang_model_revision: "0000000000000000000000000000000000000000"
    sglang_drafter_model: SubSir/Kimi-K2.6-DFlash-tmp-long
    sglang_drafter_revision: "0000000000000000000000000000000000000000"
    sglang_profile: ep8
    sglang_host: "{{ ansible_host }}"
    sglang_api_key: "canary-key-5150"
"""
PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: sglang_monitoring}
      vars:
        sglang_monitoring_install: false
        sglang_monitoring_reload: []
        sglang_monitoring_routers: ["192.0.2.9:29000"]
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The role's files, written by the role."""
    folder = tmp_path_factory.mktemp("role")
    (folder / "hosts.yml").write_text(INVENTORY, encoding="utf-8")
    (folder / "play.yml").write_text(PLAY, encoding="utf-8")
    command = [
        str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(folder / "hosts.yml"),
        str(folder / "play.yml"), "-e", f"sglang_monitoring_destination={folder}/out",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out", done.stdout


def test_targets_come_from_the_inventory(written: tuple[Path, str]) -> None:
    folder, output = written
    engines = json.loads((folder / "targets" / f"{monitoring.ENGINES}.json").read_text())
    places = [group["targets"][0] for group in engines]
    assert places == ["192.0.2.11:30000", "[2001:db8::2]:30000", "192.0.2.15:30000", "192.0.2.15:30001"]
    assert engines[0]["labels"] == {
        "host": "gpu-01", "instance_name": "main", "profile": "ep8", "drafter": "dflash", "cuda_graph": "enabled",
        "build": "cuda", "worker": "http://192.0.2.11:30000",
    }  # fmt: skip
    assert [group["labels"]["instance_name"] for group in engines[2:]] == ["a", "b"]
    hosts = json.loads((folder / "targets" / f"{monitoring.HOSTS}.json").read_text())
    assert hosts[1] == {"targets": ["[2001:db8::2]:9100"], "labels": {"host": "gpu-02"}}
    routers = json.loads((folder / "targets" / f"{monitoring.ROUTERS}.json").read_text())
    assert routers == [
        {"targets": ["192.0.2.8:29000"], "labels": {"host": "door-01"}},
        {"targets": ["192.0.2.9:29000"], "labels": {}},
    ]
    # Those that cannot be watched are named.
    assert "gpu-03 main: listens on 127.0.0.1 only" in output
    assert "gpu-04 main: sglang_enable_metrics is false" in output
    assert "door-02 router: its metrics are at 127.0.0.1 only" in output


def test_no_secret_in_the_files(written: tuple[Path, str]) -> None:
    folder, output = written
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert len(texts) == 6
    assert not [text for text in [*texts, output] if "canary" in text]


def test_prometheus_takes_jobs_targets_and_rules(written: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = written
    jobs = (folder / "jobs.yml").read_text().replace("/etc/prometheus/dflash-fleet", str(folder))
    (tmp_path / "whole.yml").write_text(f"rule_files: ['{folder}/rules.yml']\n{jobs}")
    done = prometheus.promtool("check", "config", str(tmp_path / "whole.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    with prometheus.serving(tmp_path, (tmp_path / "whole.yml").read_text()) as server:
        deadline = time.monotonic() + 30  # files of targets are read within some seconds
        while len(active := server.get("targets")["activeTargets"]) < 11 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert {target["labels"]["job"] for target in active} == set(monitoring.JOBS)
        assert len(active) == 4 + 5 + 2
        assert len(server.get("rules")["groups"][0]["rules"]) == len(ALERTS)


def test_the_dashboard_is_written_as_it_is(written: tuple[Path, str]) -> None:
    assert json.loads((written[0] / "dashboard.json").read_text()) == monitoring.dashboard()


def test_filters_are_loaded() -> None:
    filters = load_plugin("filter_plugins/sglang_monitoring.py").FilterModule().filters()
    assert filters["sglang_dashboard"]("")["uid"] == "dflash-fleet"
