"""Revisions of models that nothing on the host names any more, and what killed runs left beside them.

Of every repository the newest `keep` of them stay. A folder without our manifest was not made by us (somebody may be
filling it by hand) and is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from . import references
from .snapshot import REVISION, folder_size, read_manifest

PARTIAL = ".partial"
DOOMED = ".doomed"  # a revision that is being removed: half of one must not look like one
# A fetch that was begun for the rollout of next week, say: until then somebody may come back for it.
ABANDONED_DAYS = 7


def plan(
    models: Path, wanted: Collection[str], keep: int, units: Iterable[Path] | None = None, proc: str = "/proc"
) -> dict[str, list[dict[str, Any]]]:
    """{remove, spare, waiting}, each a list of {path, bytes, reason}; nothing is changed.

    `wanted` are the folders that the inventory asks for. `spare` stays although nothing names it; `waiting` are
    unfinished fetches of revisions that nobody asks for, too young to be given up.
    """
    folders = [folder for home in _folders(models) for folder in _folders(home)]
    names = {folder.name.partition(".")[0] for folder in folders}
    used = references.mentioned({name for name in names if REVISION.fullmatch(name)}, models.parent, units, proc)
    found: dict[str, list[dict[str, Any]]] = {"remove": [], "spare": [], "waiting": []}
    for home in _folders(models):
        spare: list[tuple[str, Path]] = []
        for folder in _folders(home):
            revision, _, ending = folder.name.partition(".")
            if not REVISION.fullmatch(revision):
                continue
            unwanted = str(home / revision) not in wanted and revision not in used
            if "." + ending == DOOMED:
                found["remove"].append(_entry(folder, "a removal that was interrupted"))
            elif "." + ending == PARTIAL and unwanted:
                days = (time.time() - _last_change(folder)) / 86400
                if days < ABANDONED_DAYS:
                    found["waiting"].append(_entry(folder, f"unfinished, last changed {days:.0f} days ago"))
                else:
                    found["remove"].append(_entry(folder, f"unfinished, and nobody came back for {days:.0f} days"))
            elif not ending and unwanted:
                manifest = read_manifest(str(folder))
                if manifest is not None:
                    spare.append((str(manifest.get("written_at", "")), folder))
        spare.sort(reverse=True)
        found["spare"] += [_entry(folder, "nothing names it") for _, folder in spare[:keep]]
        found["remove"] += [_entry(folder, "nothing names it") for _, folder in spare[keep:]]
    return found


def remove(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove what `plan` says; what could not be, since a fetch of that repository is going on, is returned."""
    busy = []
    for entry in entries:
        folder = Path(entry["path"])
        with _nobody_fetches(folder.parent) as alone:
            if not alone:
                busy.append(entry)
                continue
            doomed = folder.with_suffix(DOOMED)
            if folder != doomed:
                if doomed.exists():
                    shutil.rmtree(doomed)
                os.rename(folder, doomed)
            shutil.rmtree(doomed)
    return busy


@contextlib.contextmanager
def _nobody_fetches(home: Path) -> Iterator[bool]:
    """The lock of a fetch (snapshot.Lock) without waiting for it."""
    descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        except OSError:
            yield True  # a network filesystem without locks
        else:
            yield True
    finally:
        os.close(descriptor)


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []


def _entry(folder: Path, reason: str) -> dict[str, Any]:
    return {"path": str(folder), "bytes": folder_size(str(folder)), "reason": reason}


def _last_change(folder: Path) -> float:
    """Of anything in it: a file that grows does not change the time of its folder."""
    newest = 0.0
    for base, _folders_there, files in os.walk(folder):
        for path in [base, *(os.path.join(base, name) for name in files)]:
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.lstat(path).st_mtime)
    return newest
