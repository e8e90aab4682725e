"""What Prometheus and Grafana need to know of a fleet: scrape targets, alert rules, a dashboard. Pure, all of it data.

Names of SGLang's metrics are those of releases 0.5.11 to 0.5.23; where one came later, ALERTS and ROWS say so. Names
that begin with dflash_fleet_ are our own (modules `reports` and `measures`), smg_ are the router's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import words
from .profile_checks import reach_of

ENGINES = "dflash-fleet-engine"
ROUTERS = "dflash-fleet-router"
HOSTS = "dflash-fleet-host"
JOBS = (ENGINES, ROUTERS, HOSTS)

# ---------------------------------------------------------------------------------------------------------------------
# Targets


def _option(resolved: Mapping[str, Any], name: str) -> bool:
    return any(flag == name for flag, _ in resolved["options"])


def engine_targets(
    hosts: Mapping[str, Mapping[str, Any]], watcher: str = ""
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Targets for file_sd, and what cannot be one, with the reason.

    `hosts` is {inventory name: {address, resolved}}; `watcher` is the host that Prometheus runs on, which alone reaches
    its own loopback.
    """
    found: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    for host, facts in hosts.items():
        for resolved in facts["resolved"]:
            why = ""
            address = str(resolved["host"])
            if not _option(resolved, "--enable-metrics"):
                why = "sglang_enable_metrics is false"
            elif reach_of(address) == "loopback" and host != watcher:
                why = f"listens on {address} only; give sglang_host an address that Prometheus reaches (and a key)"
            if why:
                left_out.append({"host": host, "instance": resolved["instance"], "why": why})
                continue
            if reach_of(address) == "every interface":
                address = str(facts["address"])
            place = words.endpoint(address, resolved["port"])
            found.append(
                {
                    "targets": [place],
                    "labels": {
                        "host": host,
                        "instance_name": resolved["instance"],
                        "profile": resolved["profile"],
                        "drafter": resolved["drafter"]["name"],
                        # What the inventory asks for: whoever serves without graphs in its place has fallen back.
                        "cuda_graph": resolved["cuda_graph"]["effective"],
                        "build": resolved["engine"]["build"],
                        # The router's name for it.
                        "worker": f"http://{place}",
                    },
                }
            )
    return found, left_out


def host_targets(hosts: Mapping[str, Mapping[str, Any]], port: int) -> list[dict[str, Any]]:
    """node_exporter of every host."""
    return [
        {"targets": [words.endpoint(str(facts["address"]), port)], "labels": {"host": host}}
        for host, facts in hosts.items()
    ]


def router_targets(
    routers: Mapping[str, Mapping[str, Any]], more: Iterable[str] = (), watcher: str = ""
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The same for routers, by the address of their own metrics; `more` are routers that the inventory does not know.

    `routers` is {inventory name: {address, host, port}}.
    """
    found: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    for name, facts in routers.items():
        address = str(facts["host"])
        if reach_of(address) == "loopback" and name != watcher:
            why = f"its metrics are at {address} only; give sglang_router_metrics_host an address of the host"
            left_out.append({"host": name, "instance": "router", "why": why})
            continue
        reached = str(facts["address"]) if reach_of(address) == "every interface" else address
        place = words.endpoint(reached, facts["port"])
        found.append({"targets": [place], "labels": {"host": name}})
    return found + [{"targets": [str(place)], "labels": {}} for place in more], left_out


def scrape_configs(folder: str, interval: int) -> list[dict[str, Any]]:
    """Prometheus' jobs, one a file of targets."""
    return [
        {
            "job_name": job,
            "scrape_interval": f"{interval}s",
            "file_sd_configs": [{"files": [f"{folder}/targets/{job}.json"]}],
        }
        for job in JOBS
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Alerts

BY = "by (host, instance_name)"

#: What an inventory may set otherwise, by sglang_monitoring_thresholds.
THRESHOLDS: dict[str, float] = {
    "accept_length": 1.1,  # below it a drafter costs more than it brings; as sglang_wait_min_accept_length
    "accept_share": 0.75,  # of its own mean of a day
    "without_graphs": 0.5,  # share of decode steps
    "restarts": 2,  # by systemd in an hour
    "pool": 0.95,  # share of the KV pool in use
    "free_share": 0.05,  # of the file system with weights and engines
}

DIAGNOSE = "ansible-playbook playbooks/diagnose.yml -l {{ $labels.host }}"
STATUS = "ansible-playbook playbooks/status.yml -l {{ $labels.host }}"
CHECK = "ansible-playbook deploy-dflash.yml -l {{ $labels.host }} --check --diff"

#: name, expr (with %(threshold)s), for, severity (critical: somebody gets up), summary, command. In the order in which
#: the page of a role and the dashboard show them.
ALERTS: tuple[dict[str, str], ...] = (
    {
        "name": "EngineCrashed",
        # The time of the last one, since a counter that begins with 1 has no increase.
        "expr": 'time() - dflash_fleet_engine_last_crash_timestamp_seconds{verdict!~"hung|running_but_dead"} < 900',
        "for": "0m",
        "severity": "warning",
        "summary": "{{ $labels.instance_name }} on {{ $labels.host }} crashed: {{ $labels.cause }}",
        "command": DIAGNOSE,
    },
    {
        "name": "EngineHung",
        "expr": 'time() - dflash_fleet_engine_last_crash_timestamp_seconds{verdict=~"hung|running_but_dead"} < 900',
        "for": "0m",
        "severity": "warning",
        "summary": "{{ $labels.instance_name }} on {{ $labels.host }} hung and was ended: {{ $labels.cause }}",
        "command": DIAGNOSE,
    },
    {
        "name": "EngineStandsStill",
        # Its own word, before the host's watchdog has acted: requests are running, and no forward pass is counted.
        "expr": f"sum {BY} (sglang:num_running_reqs) > 0 unless sum {BY} "
        "(increase(sglang:cuda_graph_passes_total[5m])) > 0",
        "for": "5m",
        "severity": "critical",
        "summary": "{{ $labels.instance_name }} on {{ $labels.host }} has requests and computes nothing",
        "command": DIAGNOSE,
    },
    {
        "name": "EngineFailed",
        "expr": 'dflash_fleet_instance_state{state="failed"} == 1',
        "for": "1m",
        "severity": "critical",
        "summary": "{{ $labels.instance_name }} on {{ $labels.host }} is down and is not started again",
        "command": DIAGNOSE,
    },
    {
        "name": "EngineUnreachable",
        # Longer than a load takes: an engine binds its port at the end of it.
        "expr": f'up{{job="{ENGINES}"}} == 0',
        "for": "15m",
        "severity": "critical",
        "summary": "{{ $labels.instance_name }} on {{ $labels.host }} has not answered for 15 minutes",
        "command": STATUS,
    },
    {
        "name": "EngineRestarts",
        "expr": "increase(dflash_fleet_instance_restarts_total[1h]) >= %(restarts)s",
        "for": "0m",
        "severity": "warning",
        "summary": "systemd has restarted {{ $labels.instance_name }} on {{ $labels.host }} "
        "{{ $value | humanize }} times in an hour",
        "command": DIAGNOSE,
    },
    {
        "name": "EngineDegraded",
        "expr": 'dflash_fleet_instance_state{state="degraded"} == 1',
        "for": "5m",
        "severity": "info",
        "summary": "{{ $labels.instance_name }} on {{ $labels.host }} serves with a fallback in effect",
        "command": STATUS,
    },
    {
        "name": "GraphsFellBack",
        "expr": f'sum {BY} (rate(sglang:cuda_graph_passes_total{{cuda_graph=~"enabled|decode_only",mode="decode_none"}}'
        f"[10m])) / sum {BY} (rate(sglang:cuda_graph_passes_total"
        '{cuda_graph=~"enabled|decode_only",mode=~"decode_.*"}[10m])) > %(without_graphs)s',
        "for": "10m",
        "severity": "warning",
        "summary": "{{ $labels.instance_name }} on {{ $labels.host }} decodes {{ $value | humanizePercentage }} of its "
        "steps without CUDA graphs",
        "command": STATUS,
    },
    {
        "name": "DrafterUseless",
        # An idle engine shows 0.
        "expr": f"avg {BY} (avg_over_time((sglang:spec_accept_length > 0)[15m:])) < %(accept_length)s",
        "for": "5m",
        "severity": "warning",
        "summary": "the drafter of {{ $labels.instance_name }} on {{ $labels.host }} brings nothing: accept length "
        '{{ $value | printf "%%.2f" }}',
        "command": STATUS,
    },
    {
        "name": "AcceptLengthFell",
        "expr": f"avg {BY} (avg_over_time((sglang:spec_accept_length > 0)[15m:])) < %(accept_share)s * "
        f"avg {BY} (avg_over_time((sglang:spec_accept_length > 0)[1d:5m] offset 15m))",
        "for": "10m",
        "severity": "warning",
        "summary": "the accept length of {{ $labels.instance_name }} on {{ $labels.host }} fell to "
        '{{ $value | printf "%%.2f" }}, much below its mean of a day',
        "command": STATUS,
    },
    {
        "name": "KvPoolFull",
        "expr": f"max {BY} (avg_over_time(sglang:token_usage[5m])) > %(pool)s and max {BY} "
        "(min_over_time(sglang:num_queue_reqs[5m])) > 0",
        "for": "5m",
        "severity": "warning",
        "summary": "the KV pool of {{ $labels.instance_name }} on {{ $labels.host }} is full and requests wait",
        "command": STATUS,
    },
    {
        "name": "HostOutOfRouter",
        # Where a router is scraped at all: an engine that answers, and that no router thinks healthy.
        "expr": f'(up{{job="{ENGINES}"}} == 1 unless on (worker) (smg_worker_health == 1)) '
        f'and on () (count(up{{job="{ROUTERS}"}} == 1) > 0)',
        "for": "10m",
        "severity": "warning",
        "summary": "{{ $labels.instance_name }} on {{ $labels.host }} serves, and no router sends it requests",
        "command": "ansible-playbook playbooks/status.yml",
    },
    {
        "name": "RouterUnreachable",
        "expr": f'up{{job="{ROUTERS}"}} == 0',
        "for": "2m",
        "severity": "critical",
        "summary": "the router at {{ $labels.instance }} does not answer",
        "command": "ansible-playbook playbooks/status.yml",
    },
    {
        "name": "HostDrifted",
        "expr": "dflash_fleet_drift_paths > 0",
        # A deployment that is under way looks like drift.
        "for": "1h",
        "severity": "info",
        "summary": "{{ $value }} files of {{ $labels.host }} are not as the last deployment left them",
        "command": CHECK,
    },
    {
        "name": "DiskFull",
        "expr": "dflash_fleet_free_bytes / dflash_fleet_size_bytes < %(free_share)s",
        "for": "10m",
        "severity": "warning",
        "summary": "{{ $labels.path }} on {{ $labels.host }} has {{ $value | humanizePercentage }} left",
        "command": "ansible-playbook playbooks/preflight.yml -l {{ $labels.host }}",
    },
    {
        "name": "HostSilent",
        "expr": f'time() - dflash_fleet_measured_timestamp_seconds > 600 or up{{job="{HOSTS}"}} == 0',
        "for": "10m",
        "severity": "warning",
        "summary": "{{ $labels.host }} has said nothing of itself for 10 minutes; other alerts of it mean nothing",
        "command": "ansible {{ $labels.host }} -b -m command -a 'systemctl status dflash-metrics.service'",
    },
)


def unknown(thresholds: Mapping[str, Any], without: Iterable[str]) -> list[str]:
    """What is wrong with an inventory's wishes about alerts, each in a sentence."""
    names = [row["name"] for row in ALERTS]
    return [
        *(
            f"sglang_monitoring_thresholds: {name!r} is unknown; write one of {', '.join(THRESHOLDS)}"
            for name in sorted(set(thresholds) - set(THRESHOLDS))
        ),
        *(
            f"sglang_monitoring_without: there is no alert {name!r}; the alerts are {', '.join(names)}"
            for name in sorted(set(without) - set(names))
        ),
    ]


def rules(
    thresholds: Mapping[str, Any] | None = None, without: Sequence[str] = (), labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The file of rules for Prometheus."""
    values = {name: f"{float(value):g}" for name, value in {**THRESHOLDS, **(thresholds or {})}.items()}
    return {
        "groups": [
            {
                "name": "dflash-fleet",
                "rules": [
                    {
                        "alert": row["name"],
                        "expr": row["expr"] % values,
                        "for": row["for"],
                        "labels": {"severity": row["severity"], **(labels or {})},
                        "annotations": {"summary": row["summary"].replace("%%", "%"), "command": row["command"]},
                    }
                    for row in ALERTS
                    if row["name"] not in without
                ],
            }
        ]
    }


# ---------------------------------------------------------------------------------------------------------------------
# Dashboard

HERE = 'host=~"$host",instance_name=~"$instance"'
ON_HOST = 'host=~"$host"'


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate(sglang:{metric}_bucket{{{HERE}}}[$__rate_interval])))"


def _latency(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(share, metric), f"p{round(share * 100)}") for share in (0.5, 0.9, 0.99))


def _passes(mode: str) -> str:
    return f"sum {BY} (rate(sglang:cuda_graph_passes_total{{{HERE},{mode}}}[$__rate_interval]))"


#: Rows of panels: title, [(title, kind, unit, help, [(query, legend)])]. A kind is a plugin of Grafana's own.
ROWS: tuple[tuple[str, tuple[tuple[str, str, str, str, tuple[tuple[str, str], ...]], ...]], ...] = (
    (
        "Fleet",
        (
            (
                "Instances by state", "stat", "none", "What the hosts say of their instances.",
                (("sum by (state) (dflash_fleet_instance_state) > 0", "{{state}}"),),
            ),
            (
                "Alerts", "table", "none", "Firing now; the annotation `command` says what to run.",
                (('ALERTS{alertstate="firing",alertname=~"Engine.*|Host.*|Router.*|Graphs.*|Drafter.*|Accept.*|Kv.*|Disk.*"}',
                  ""),),
            ),
            (
                "Tokens per second", "timeseries", "none", "Generated by all engines, and by each.",
                (
                    ("sum(sglang:gen_throughput)", "fleet"),
                    (f"sum {BY} (sglang:gen_throughput)", "{{host}} {{instance_name}}"),
                ),
            ),
            (
                "Requests", "timeseries", "none", "Running and waiting, all engines.",
                (("sum(sglang:num_running_reqs)", "running"), ("sum(sglang:num_queue_reqs)", "waiting")),
            ),
            (
                "Crashes of a day", "table", "none", "By cause; the host's report says more.",
                (("sum by (host, instance_name, verdict, cause, rank) (increase(dflash_fleet_engine_crashes_total[1d]))"
                  " > 0 or time() - dflash_fleet_engine_last_crash_timestamp_seconds < 86400", ""),),
            ),
            (
                "In the router", "timeseries", "none", "1 where a router sends requests.",
                (("smg_worker_health", "{{worker}}"),),
            ),
        ),
    ),
    (
        "Host",
        (
            (
                "Time to first token", "timeseries", "s", "",
                _latency("time_to_first_token_seconds"),
            ),
            (
                "Between tokens", "timeseries", "s", "",
                _latency("inter_token_latency_seconds"),
            ),
            (
                "Whole request", "timeseries", "s", "",
                _latency("e2e_request_latency_seconds"),
            ),
            (
                "KV pool in use", "timeseries", "percentunit", "Full with requests waiting is KvPoolFull.",
                ((f"sglang:token_usage{{{HERE}}}", "{{host}} {{instance_name}}"),),
            ),
            (
                "Restarts", "timeseries", "none", "By systemd, in an hour.",
                ((f"increase(dflash_fleet_instance_restarts_total{{{HERE}}}[1h])", "{{host}} {{instance_name}}"),),
            ),
            (
                "Last start", "timeseries", "s", "Seconds until the gate had passed.",
                ((f"dflash_fleet_instance_ready_seconds{{{HERE}}}", "{{host}} {{instance_name}}"),),
            ),
            (
                "Free space", "timeseries", "percentunit", "",
                ((f"dflash_fleet_free_bytes{{{ON_HOST}}} / dflash_fleet_size_bytes{{{ON_HOST}}}", "{{host}}"),),
            ),
            (
                "Drift", "timeseries", "none", "Files that are not as the last deployment left them.",
                ((f"dflash_fleet_drift_paths{{{ON_HOST}}}", "{{host}}"),),
            ),
        ),
    ),
    (
        "Speculation",
        (
            (
                "Accept length", "timeseries", "none", "Tokens a step, the target's own included; 0 while idle.",
                (
                    (f"sglang:spec_accept_length{{{HERE}}} > 0", "{{host}} {{instance_name}}"),
                    (f"dflash_fleet_instance_gate_accept_length{{{HERE}}}", "{{host}} {{instance_name}} at the gate"),
                ),
            ),
            (
                "Accept rate", "timeseries", "percentunit", "Share of the drafted tokens that the target took.",
                ((f"sglang:spec_accept_rate{{{HERE}}}", "{{host}} {{instance_name}}"),),
            ),
            (
                "Decode steps with CUDA graphs", "timeseries", "percentunit", "",
                ((_passes('mode="decode_cuda_graph"') + " / " + _passes('mode=~"decode_.*"'),
                  "{{host}} {{instance_name}}"),),
            ),
            (
                "Verified steps a second", "timeseries", "none", "SGLang 0.5.13 and later.",
                ((f"sum {BY} (rate(sglang:spec_verify_calls_total{{{HERE}}}[$__rate_interval]))",
                  "{{host}} {{instance_name}}"),),
            ),
        ),
    ),
)  # fmt: skip

WIDTH = 8  # of 24 columns
HEIGHT = 8


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "refresh": 2,
        "sort": 1,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it. Its data source is chosen on the page."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels: list[dict[str, Any]] = []
    top = 0
    for row, entries in ROWS:
        panels.append(_panel(len(panels) + 1, row, "row", {"h": 1, "w": 24, "x": 0, "y": top}))
        top += 1
        for place, (title, kind, unit, text, queries) in enumerate(entries):
            where = {"h": HEIGHT, "w": WIDTH, "x": place * WIDTH % 24, "y": top + place * WIDTH // 24 * HEIGHT}
            panel = _panel(len(panels) + 1, title, kind, where)
            panel["datasource"] = source
            panel["fieldConfig"] = {"defaults": {"unit": unit, "min": 0}, "overrides": []}
            if text:
                panel["description"] = text
            panel["targets"] = [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": source,
                    "expr": query,
                    "legendFormat": legend,
                    **({"instant": True, "format": "table"} if kind == "table" else {"range": True}),
                }
                for index, (query, legend) in enumerate(queries)
            ]
            panels.append(panel)
        top += -(-len(entries) * WIDTH // 24) * HEIGHT
    return {
        "title": "dflash-fleet",
        "uid": "dflash-fleet",
        "tags": ["sglang", "dflash"],
        "timezone": "utc",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data", "type": "datasource", "query": "prometheus", "refresh": 1},
                _variable("host", "Host", f'label_values(up{{job="{HOSTS}"}}, host)'),
                _variable("instance", "Instance", f'label_values(up{{job="{ENGINES}"}}, instance_name)'),
            ]
        },
        "panels": panels,
    }


def _panel(number: int, title: str, kind: str, where: Mapping[str, int]) -> dict[str, Any]:
    panel: dict[str, Any] = {"id": number, "title": title, "type": kind, "gridPos": dict(where)}
    if kind == "row":
        panel.update({"collapsed": False, "panels": []})
    return panel


def queries() -> list[str]:
    """Every query of the dashboard."""
    return [query for _, entries in ROWS for *_, asked in entries for query, _ in asked]
