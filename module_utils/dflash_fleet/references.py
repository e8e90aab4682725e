"""What on a host is still named by something: asked before an environment or weights are removed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

UNITS = Path("/etc/systemd/system")


def mentioned(names: Iterable[str], root: Path, units: Iterable[Path] | None = None, proc: str = "/proc") -> set[str]:
    """Those of `names` that something may start from or runs in: every one that a unit, a release kept for going back,
    an instance's state, or a running process (its arguments, what it has mapped or open) mentions.

    Texts are searched instead of read, so that a file of another version keeps what it names as well. `root` is the
    product's directory on the host.
    """
    left, used = set(names), set()
    files = [
        *(UNITS.glob("*.service") if units is None else units),
        *root.glob("*/releases/*/*"),
        *root.glob("*/state/*.json"),
    ]
    for text in itertools.chain(_contents(files), _processes(Path(proc))):
        found = {name for name in left if name in text}
        used |= found
        left -= found
        if not left:
            break
    return used


def _contents(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        try:
            yield path.read_bytes().decode("utf-8", "replace")
        except OSError:
            continue  # gone in between, or not ours to see


def _processes(proc: Path) -> Iterator[str]:
    for process in proc.glob("[0-9]*"):
        yield from _contents([process / "cmdline", process / "maps"])
        try:
            opened = list((process / "fd").iterdir())
        except OSError:
            continue  # it has ended
        for descriptor in opened:
            try:
                yield os.readlink(descriptor)
            except OSError:
                continue
