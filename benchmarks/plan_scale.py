"""How long the plans of a whole fleet take: 500 hosts resolved and rendered, each with facts of its own.

The last line is one JSON object. `seconds` is what a person waits for `playbooks/plan.yml` offline, with the same hosts
as an inventory; `seconds_filters` is the share of resolving and rendering; `baseline` is what the same play takes for
one host, and what the filters take for the hosts one by one, in the same run.

    python benchmarks/plan_scale.py [--hosts 500] [--limit 60]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PROFILES = ("tp8", "ep8", "ep4", "pp8")
RELEASES = ("0.5.11", "0.5.14", "0.5.20", "0.5.23")


def filters() -> Any:
    """The project's filter plugin, as Ansible loads it."""
    spec = importlib.util.spec_from_file_location("sglang_filters", ROOT / "filter_plugins" / "sglang.py")
    if spec is None or spec.loader is None:
        raise RuntimeError("filter_plugins/sglang.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sglang_filters"] = module
    spec.loader.exec_module(module)
    return module


def defaults() -> dict[str, Any]:
    """The roles' defaults, as plan.yml reads them."""
    found: dict[str, Any] = {}
    for role in ("gpu_host", "sglang"):
        found.update(yaml.safe_load((ROOT / "roles" / role / "defaults" / "main.yml").read_text(encoding="utf-8")))
    return found


def fleet(count: int) -> dict[str, dict[str, Any]]:
    """Variables and answers of as many hosts, in sixteen sorts, no two with the same address or load time."""
    hosts = {}
    for number in range(count):
        profile = PROFILES[number % len(PROFILES)]
        unit = f"sglang-main-{profile}.service"
        release = {"unit": unit, "profile": profile, "engine": {"version": "0.5.11", "build": "cuda"}}
        hosts[f"gpu-{number:03d}"] = {
            "sglang_model": "moonshotai/Kimi-K2.6",
            "sglang_model_revision": "a" * 40,
            "sglang_drafter": "none" if profile == "pp8" else "dflash",
            "sglang_drafter_model": "SubSir/Kimi-K2.6-DFlash-tmp-long",
            "sglang_drafter_revision": "b" * 40,
            "sglang_profile": profile,
            "sglang_version": RELEASES[number // 4 % len(RELEASES)],
            "sglang_host": f"10.0.{number // 250}.{number % 250 + 1}",
            "sglang_api_key": "key-of-the-benchmark",
            "sglang_gpu_architecture": "sm_120",
            "sglang_plan_state": {
                "state": {
                    "instances": {
                        "main": {
                            "condition": "serving", "unit": unit, "release": release,
                            "ready": {"seconds": 200.0 + number / 7}, "rungs": [],
                        }
                    },
                    "filesystems": {"/var/lib/sglang": {"free_bytes": 10**12}},
                }
            },
        }  # fmt: skip
    return hosts


def play(hosts: dict[str, dict[str, Any]]) -> float:
    """Seconds of `playbooks/plan.yml -e plan_offline=true` for these hosts."""
    with tempfile.TemporaryDirectory(prefix="plan-scale-") as folder:
        inventory = Path(folder, "hosts.json")
        variables = {
            name: {key: value for key, value in facts.items() if key != "sglang_plan_state"}
            for name, facts in hosts.items()
        }
        inventory.write_text(json.dumps({"all": {"hosts": variables}}), encoding="utf-8")
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory), "playbooks/plan.yml"]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "-e", "plan_offline=true"], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "sglang.launch_server" in done.stdout
    return seconds


def main() -> int:
    """Measure, print, compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=500)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds; more is a failure (exit 1)")
    args = parser.parse_args()
    plugin, given, hosts = filters(), defaults(), fleet(args.hosts)
    plugin.sglang_plan(plugin.sglang_plan_hosts(list(hosts)[:1], hosts, given))  # imports are not the subject

    started = time.perf_counter()
    for name in list(hosts)[:8]:
        plugin.sglang_plan(plugin.sglang_plan_hosts([name], hosts, given))
    one = (time.perf_counter() - started) / 8

    started = time.perf_counter()
    planned = plugin.sglang_plan_hosts(list(hosts), hosts, given)
    resolved = time.perf_counter()
    text = plugin.sglang_plan(planned)
    ended = time.perf_counter()
    alone, whole = play(dict(list(hosts.items())[:1])), play(hosts)
    print(f"{args.hosts} hosts in {text.count('sglang.launch_server')} blocks, {len(text.splitlines())} lines")
    figures = {
        "benchmark": "plan_scale",
        "hosts": args.hosts,
        "blocks": text.count("python -m sglang.launch_server"),
        "seconds": round(whole, 1),
        "seconds_filters": round(ended - started, 3),
        "seconds_resolve": round(resolved - started, 3),
        "seconds_render": round(ended - resolved, 3),
        "baseline": {"seconds_one_host": round(alone, 1), "seconds_filters_one_by_one": round(one * args.hosts, 3)},
        "limit_seconds": args.limit,
        "within_limit": whole <= args.limit,
    }
    print(json.dumps(figures))
    return 0 if figures["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
