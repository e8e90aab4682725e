"""What the last whole deployment left on a host, so that the next one sees at one look that it has nothing to do.

`state/deployed.json` holds {schema, digest, at, instances: {name: unit}, entries: {path: mark}}. `digest` stands for
everything that was wished (computed on the controller), an entry's mark for one file, link or fact as it was left. A
host is unchanged when the wish has the same digest, every mark is the same, no watched path has come or gone, and every
instance serves from the unit that was left, enabled. Anything else is looked at by the roles, as if this file did not
exist. Marks are size and time, mode and owner: a file touched without a change costs one whole look, never a wrong
answer; contents are not read.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any

from . import state

# Beyond what lies below the root: everything that a role writes, and what tells of a driver or kernel that was changed.
WATCHED = (
    "/etc/apt/apt.conf.d/*",
    "/etc/apt/preferences.d/*",
    "/etc/apt/sources.list.d/*",
    "/etc/default/grub.d/*",
    "/etc/modprobe.d/*",
    "/etc/needrestart/conf.d/*",
    "/etc/systemd/journald.conf.d/*",
    "/etc/systemd/system/dflash-fleet-*",
    "/etc/systemd/system/multi-user.target.d/*",
    "/sys/module/nvidia/version",
    "/usr/local/share/ca-certificates/*",
    "/usr/share/keyrings/dflash-fleet-*",
    "/var/lib/dpkg/status",
)
BELOW_ROOT = (
    "*",
    "*/releases",
    "*/current",
    "*/credentials",
    "*/credentials/*",
    "*/releases/*",
    "*/releases/*/*",
    "*/state/trial.json",
    "venvs/*",
    "venvs/*/.complete",
    "venvs/*/bin/python",
    "models/*/*",
)


def mark(path: str) -> str | None:
    """One file, link or directory as it is now; None where it is gone. A directory's own times are left out."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    kind = stat.S_IFMT(found.st_mode)
    owner = f"{stat.S_IMODE(found.st_mode):o} {found.st_uid}:{found.st_gid}"
    if kind == stat.S_IFLNK:
        return f"-> {os.readlink(path)}"
    if kind == stat.S_IFREG and not path.startswith("/sys/"):
        return f"{owner} {found.st_size} {found.st_mtime_ns}"
    if kind == stat.S_IFREG:  # sysfs knows no size, and its times begin with the boot
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(200).strip()
    return f"directory {owner}"


def entries(layout: state.Layout) -> dict[str, str]:
    """Every watched path with its mark, and the kernel."""
    patterns = [
        *WATCHED,
        str(layout.root),
        *(str(layout.root / pattern) for pattern in BELOW_ROOT),
        *(str(layout.programs / pattern) for pattern in ("*", "*/*.py", "*/*/*.py")),
        str(layout.etc / "*"),
        str(layout.units / "sglang-*.service"),
        str(layout.units / "sglang-*.service.d" / "*"),
        str(layout.boot_link("sglang-*.service")),
    ]
    paths = {path for pattern in patterns for path in glob.iglob(pattern)}
    paths |= {path for folder in glob.iglob(str(layout.models() / "*" / "*")) for path in _files(folder)}
    found = {path: value for path in paths if (value := mark(path)) is not None}
    return {**found, "kernel": os.uname().release}


def _files(folder: str) -> Iterable[str]:
    """Every file of a published revision."""
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in names)


def serves(instances: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    """By instance the unit that serves and comes back at boot, or None; `instances` is of sglang_state."""
    units: dict[str, str | None] = {}
    for name, facts in instances.items():
        unit = state.main_unit(facts)
        good = unit is not None and facts["serving"] and unit["enabled"] == "enabled" and not unit["need_daemon_reload"]
        alone = [entry["name"] for entry in facts["units"] if entry["active_state"] not in ("inactive", "failed")]
        units[name] = str(unit["name"]) if unit and good and alone == [unit["name"]] else None
    return units


def record(layout: state.Layout, digest: str, instances: Mapping[str, Mapping[str, Any]]) -> bool:
    """Write down what a whole deployment of the wish `digest` has left; not where an instance does not serve."""
    units = serves(instances)
    if not units or None in units.values():
        return False
    data = {"digest": digest, "at": state.now_utc(), "instances": units, "entries": entries(layout)}
    state.write_state(layout.deployed(), data, mode=0o600)
    return True


def differences(layout: state.Layout, digest: str, instances: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs from how the wish `digest` left the host: paths, instances, or the wish; empty where nothing."""
    try:
        known = state.read_state(layout.deployed())
    except state.StateError:
        known = None
    if known is None:
        return ["no whole deployment is on record"]
    if not digest or known["digest"] != digest:
        return ["the wish"]
    units, now = serves(instances), entries(layout)
    then = known["entries"]
    return [
        *sorted(name for name in {*units, *known["instances"]} if units.get(name) != known["instances"].get(name, "")),
        *sorted(path for path in {*now, *then} if now.get(path) != then.get(path)),
    ]
