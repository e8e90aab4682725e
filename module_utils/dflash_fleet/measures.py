"""What a host says of its instances to Prometheus, by node_exporter's textfile collector.

The engine's own /metrics is silent while it loads and after it has died, and knows nothing of fallbacks, restarts and
files changed by hand. A timer of role sglang_monitoring runs this twice a minute (`supervisor.py measure`), and it
writes dflash-fleet.prom. Crashes are counted by the reporter (module `reports`), in a file for each instance.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import deployed, hostfacts, ladder, state, textfile

FILE = "dflash-fleet.prom"
CONDITIONS = ("serving", "degraded", "starting", "restarting", "stopping", "failed", "stopped", "absent")
_CRASH_FILE = re.compile(r"^dflash-fleet-(?P<instance>.+)\.prom$")


def drifted(changes: Iterable[str], layout: state.Layout) -> list[str]:
    """Of everything that differs from the last whole deployment, the files and links that somebody has changed.

    Left out: packages and kernels, which a host renews by itself; weights, which are fetched ahead of a rollout; and
    whether an instance serves, which has measures of its own.
    """
    ours = (str(layout.root), str(layout.etc), str(layout.units), str(layout.programs), "/etc/")
    weights = str(layout.models()) + "/"
    return [path for path in changes if path.startswith(ours) and not path.startswith(weights)]


def families(
    instances: Mapping[str, Mapping[str, Any]],
    drift: list[str] | None,
    filesystem: tuple[str, int, int],
    at: float,
) -> list[textfile.Family]:
    """Every measure; `drift` is None where no whole deployment is on record, `filesystem` is (path, free, size)."""
    info: list[Any] = []
    states: list[Any] = []
    restarts: list[Any] = []
    ready: list[Any] = []
    accept: list[Any] = []
    for name, facts in sorted(instances.items()):
        label = {"instance_name": name}
        unit = state.main_unit(facts)
        release = facts.get("release") or {}
        engine = release.get("engine") or {}
        info.append((
            {
                **label,
                "unit": (unit or {}).get("name") or release.get("unit") or "",
                "profile": ladder.profile_text(release) or "",
                "engine_version": engine.get("version") or "",
                "release_id": facts.get("current") or "",
            },
            1,
        ))  # fmt: skip
        states += [({**label, "state": word}, int(facts["condition"] == word)) for word in CONDITIONS]
        if unit:
            restarts.append((label, int(unit["n_restarts"] or 0)))
        passed = facts.get("ready") or {}
        if facts.get("serving") and passed.get("seconds") is not None:
            ready.append((label, float(passed["seconds"])))
        length = state.gate_accept_length(passed)
        if facts.get("serving") and length is not None:
            accept.append((label, float(length)))
    path, free, size = filesystem
    place = {"path": path}
    prefix = "dflash_fleet_"
    rows: list[textfile.Family] = [
        (f"{prefix}instance_info", "gauge", "What an instance is.", info),
        (f"{prefix}instance_state", "gauge", "1 for the state that an instance is in.", states),
        (f"{prefix}instance_restarts_total", "counter", "Starts by systemd after a death, since its unit was loaded.",
         restarts),
        (f"{prefix}instance_ready_seconds", "gauge", "Seconds that the running start took to pass its gate.",
         ready),
        (f"{prefix}instance_gate_accept_length", "gauge", "Accept length that its gate saw.", accept),
        (f"{prefix}free_bytes", "gauge", "Free space where engines and weights are.", [(place, free)]),
        (f"{prefix}size_bytes", "gauge", "Size of that file system.", [(place, size)]),
        (f"{prefix}measured_timestamp_seconds", "gauge", "When this was written.", [({}, at)]),
    ]  # fmt: skip
    if drift is not None:
        text = "Files and links that are not as the last whole deployment left them."
        rows.append((f"{prefix}drift_paths", "gauge", text, [({}, len(drift))]))
    return rows


def recorded_digest(layout: state.Layout) -> str | None:
    """The wish of the last whole deployment; None where there was none."""
    known = state.read_state(layout.deployed())
    return None if known is None else str(known["digest"])


def look(layout: state.Layout) -> list[textfile.Family]:
    """The host as it is now."""
    names = state.list_instances(layout)
    units, problem = hostfacts.show_units()
    if problem:
        raise state.StateError(f"systemd does not answer: {problem}")
    owned, _ = hostfacts.by_owner(units, names)
    instances = {name: state.read_instance(layout, name, owned.get(name, [])) for name in names}
    digest = recorded_digest(layout)
    drift = None
    if digest is not None:
        drift = drifted(deployed.differences(layout, digest, instances), layout)
    space = os.statvfs(layout.root)
    sizes = (str(layout.root), space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize)
    return families(instances, drift, sizes, time.time())


def forget(folder: Path, instances: Iterable[str]) -> None:
    """Remove the crash counters of instances that are gone."""
    kept = set(instances)
    for path in folder.glob("dflash-fleet-*.prom"):
        found = _CRASH_FILE.match(path.name)
        if found and found["instance"] not in kept:
            path.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """Write the file. Where the host cannot be read the old one stands, and its time says how old it is."""
    options = dict(zip(arguments[::2], arguments[1::2]))
    layout = state.Layout(options.get("--root", "/var/lib/sglang"))
    folder = Path(options["--textfile"])
    try:
        textfile.write(folder, FILE, textfile.render(look(layout)))
        forget(folder, state.list_instances(layout))
    except (OSError, state.StateError) as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    return 0
