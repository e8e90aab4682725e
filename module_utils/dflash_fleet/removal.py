"""What belongs to an instance on a host, and what may go with it.

An instance owns its units, its directory (releases, state, credentials), its link in /etc/sglang and its caches.
Environments and weights are shared and cost hours to fetch: they go only when asked for, and only those that no
remaining instance's releases name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import state

CACHE = Path("/var/cache/sglang")


def units_of(layout: state.Layout, name: str, known: Iterable[str], running: Iterable[str] = ()) -> list[str]:
    """Units of an instance, whatever their profile: installed, wanted at boot, or `running`, though their file is gone.

    `known` are all instances, since the name of one may begin with another's.
    """
    everyone = {*known, name}
    pattern = f"sglang-{name}-*.service"
    installed = {path.name for folder in (layout.units, layout.boot_links()) for path in folder.glob(pattern)}
    return sorted(unit for unit in installed.union(running) if state.instance_of_unit(unit, everyone) == name)


def instances_with_units(layout: state.Layout) -> set[str]:
    """Instances whose directory is gone but whose unit is still installed (profiles hold no dash)."""
    return {
        name
        for path in layout.units.glob(state.UNIT_GLOB)
        for name in [path.name[len("sglang-") : -len(".service")].rpartition("-")[0]]
        if state.INSTANCE_NAME.match(name) and name not in state.RESERVED and _is_ours(path)
    }


def _is_ours(unit: Path) -> bool:
    try:
        text = unit.read_text(encoding="utf-8")
        return text.startswith("# Managed by dflash-fleet") and "-m sglang.launch_server" in text
    except (OSError, UnicodeDecodeError):
        return False


def present(layout: state.Layout) -> list[str]:
    """Every instance of which something is on the host."""
    return sorted({*state.list_instances(layout), *instances_with_units(layout)})


def in_use(layout: state.Layout, names: Iterable[str]) -> set[Path]:
    """Environments and weights that the releases of these instances name."""
    used: set[Path] = set()
    for name in names:
        for identity in state.list_dirs(layout.releases(name)):
            release: dict[str, Any] = state.read_json(layout.release_json(name, identity)) or {}
            paths = [release.get("venv"), *((release.get(part) or {}).get("path") for part in ("model", "drafter"))]
            used.update(Path(path) for path in paths if path)
    return used


def data_paths(layout: state.Layout, remaining: Iterable[str]) -> list[Path]:
    """Environments and weights that no remaining instance names; all, with caches and marks, when none remains."""
    left = list(remaining)
    if not left:
        everything = (layout.venvs(), layout.models(), layout.root / "cache", layout.root / "state")
        return [path for path in everything if _there(path)]
    used = in_use(layout, left)
    found = [layout.venv(name) for name in state.list_dirs(layout.venvs())]
    for repository in state.list_dirs(layout.models()):
        folder = layout.models() / repository
        found += [folder / revision for revision in state.list_dirs(folder)]
    # The hub client is no engine: no release names it, and the next fetch needs it.
    return [path for path in found if path not in used and not _is_client(path)]


def unwanted(
    instances: Iterable[str], wanted: Iterable[Mapping[str, Any]], listed: Iterable[Mapping[str, Any]], unlisted: bool
) -> list[str]:
    """Instances on a host that are to go: those marked absent, and all that the inventory does not name if `unlisted`.

    `wanted` are requests or resolved configurations, `listed` is sglang_instances.
    """
    absent = {item.get("name", "main") for item in listed if item.get("state") == "absent"}
    kept = {item["instance"] for item in wanted}
    return sorted(name for name in instances if name not in kept and (unlisted or name in absent))


def _is_client(path: Path) -> bool:
    mark = state.read_json(path / ".complete")
    return mark is not None and not mark.get("engine")


def _there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def plan(
    layout: state.Layout, names: Iterable[str], data: bool, cache: Path = CACHE, running: Iterable[str] = ()
) -> dict[str, Any]:
    """{instances, units, paths}: all that would go; names of instances that are not there count for nothing."""
    everyone = present(layout)
    gone = [name for name in dict.fromkeys(names) if name in everyone]
    units = [unit for name in gone for unit in units_of(layout, name, everyone, running)]
    files = [file for unit in units for file in (layout.unit_file(unit), layout.boot_link(unit))]
    paths = [path for path in files if _there(path)]
    paths += [
        path
        for name in gone
        for path in (layout.etc_link(name), layout.instance(name), cache / name)
        if _there(path)
    ]
    if data:
        paths += data_paths(layout, [name for name in everyone if name not in gone])
    return {"instances": gone, "units": units, "paths": [str(path) for path in paths]}
