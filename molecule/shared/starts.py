"""Starts of a unit without Ansible, as systemd sees them. Functions take Testinfra's `host`."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import controller
import engine

UNIT = "sglang-main-ep8.service"
# A fresh start, queued as a person would, without Ansible; a unit that never failed has nothing to reset.
RESTART = (f"systemctl reset-failed {UNIT} || true", f"systemctl restart --no-block {UNIT}")
ACTIVE = {"ActiveState": "active"}
FAILED = {"ActiveState": "failed"}
REPORTS = f"{engine.ROOT}/main/state/reports"

# Watches on the host itself, so that nothing between two looks over SSH is missed. Prints one JSON object per change.
WATCHER = """
import json, subprocess, sys, time
unit, before, until, seconds, after = json.load(sys.stdin)
NAMES = ("ActiveState", "SubState", "Result", "NRestarts", "StatusText", "InvocationID", "MainPID")
def look():
    shown = subprocess.run(["systemctl", "show", unit, "--property=" + ",".join(NAMES)], capture_output=True, text=True)
    return dict(line.split("=", 1) for line in shown.stdout.splitlines())
old = look()["InvocationID"]
for command in before:
    subprocess.run(command, shell=True, check=True)
end, last = time.monotonic() + seconds, None
while time.monotonic() < end:
    row = look()
    if row != last:
        print(json.dumps({**row, "new": row["InvocationID"] != old, "at": time.monotonic()}), flush=True)
        last = row
    if row["InvocationID"] != old and row["Result"] != "success":
        for command in after:
            subprocess.run(command, shell=True, check=True)
        after = ()
    if row["InvocationID"] != old and any(all(row[name] == value for name, value in one.items()) for one in until):
        break
    time.sleep(0.1)
"""


def name_of(host: Any) -> str:
    """Its name in the inventory."""
    return str(host.ansible.get_variables()["inventory_hostname"])


def together(test: Callable[..., None]) -> Callable[..., None]:
    """A test that mostly waits: when its first host's turn comes it runs on all hosts of the scenario at once.

    Each host's own turn then only brings its outcome.
    """
    outcomes: dict[str, dict[str, Future[None]]] = {}
    test_file = test.__code__.co_filename

    @functools.wraps(test)
    def run(host: Any, **parameters: Any) -> None:
        case = json.dumps(parameters, sort_keys=True)
        if case not in outcomes:
            hosts = {name: controller.scenario_host(test_file, name) for name in controller.host_names(test_file)}
            with ThreadPoolExecutor(len(hosts)) as pool:
                outcomes[case] = {name: pool.submit(test, each, **parameters) for name, each in hosts.items()}
        outcomes[case][name_of(host)].result()

    return run


def pace_command(*failures: dict[str, Any], pace: float = 0.03) -> str:
    """The command that sets what goes wrong from the next start on, and how fast everything goes."""
    text = json.dumps({"pace": pace, "failures": list(failures)})
    return f"printf %s {shlex.quote(text)} > /etc/dflash-fleet/rehearsal.json"


def set_pace(host: Any, *failures: dict[str, Any], pace: float = 0.03) -> None:
    """Set it now."""
    engine.sudo(host, pace_command(*failures, pace=pace))


def watch(
    host: Any,
    *until: dict[str, str],
    before: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    seconds: float = 90,
    unit: str = UNIT,
) -> list[dict[str, Any]]:
    """Run commands as root, then follow the unit until a new invocation shows one of `until`; its changes in order.

    `after` are commands for the moment of its first failure.
    """
    told = json.dumps([unit, list(before), list(until), seconds, list(after)])
    text = engine.sudo(host, f"printf %s {shlex.quote(told)} | python3 -c {shlex.quote(WATCHER)}")
    rows = [json.loads(line) for line in text.splitlines()]
    last = rows[-1]
    assert any(all(last[name] == value for name, value in one.items()) for one in until), rows
    return [row for row in rows if row["new"]]


def restart(host: Any, *until: dict[str, str], seconds: float = 90) -> list[dict[str, Any]]:
    """A fresh start, queued as a person would, without Ansible."""
    return watch(host, *until, before=RESTART, seconds=seconds)


def reports(host: Any) -> list[str]:
    """Names of the crash reports on the host, oldest first."""
    return engine.sudo(host, f"ls -1 {REPORTS} 2>/dev/null || true").split()


def newest_report(host: Any, known: list[str]) -> dict[str, Any]:
    """The one report that has come to those known."""
    added = [name for name in reports(host) if name not in known]
    assert len(added) == 1, (known, added)
    return engine.read_json(host, f"{REPORTS}/{added[0]}/report.json")


def failed_once(
    host: Any, *failures: dict[str, Any], seconds: float = 90
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A start that fails, and the one by which systemd mends it; (rows, report)."""
    known = reports(host)
    set_pace(host, *failures)
    # The rehearsal engine's own `once` is forgotten here: RemoveIPC= clears the user's /dev/shm after each run.
    mended = (pace_command(),)
    rows = watch(host, {**ACTIVE, "NRestarts": "1"}, FAILED, before=RESTART, after=mended, seconds=seconds)
    assert rows[-1]["ActiveState"] == "active", rows
    return rows, newest_report(host, known)


def first_start(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was seen before systemd tried again."""
    return [row for row in rows if row["NRestarts"] == "0"]


def states(rows: list[dict[str, Any]]) -> set[str]:
    """Every ActiveState that was seen."""
    return {row["ActiveState"] for row in rows}
