"""Small configuration files of a host, several in one step, each with the command that makes it count.

A file whose command fails is put back as it was, so that the next run tries again instead of finding nothing to do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class FileError(Exception):
    """What went wrong, in words for the person who runs the play."""


def differences(files: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The files that are not as wanted, with their text before (None: absent); a wanted None means absent."""
    found = []
    for entry in files:
        path = Path(entry["path"])
        try:
            before: str | None = path.read_text(encoding="utf-8", errors="surrogateescape")
            mode = path.stat().st_mode & 0o7777
        except (FileNotFoundError, NotADirectoryError):
            before, mode = None, 0
        wanted = entry.get("content")
        if before != wanted or (wanted is not None and mode != mode_of(entry)):
            found.append({**entry, "before": before, "before_mode": mode})
    return found


def mode_of(entry: Mapping[str, Any]) -> int:
    """A file's mode; readable by all unless it says otherwise."""
    return int(str(entry.get("mode") or "0644"), 8)


def put(path: Path, content: str | None, mode: int) -> None:
    """Write a file whole or not at all; None removes it."""
    if content is None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def run(words: Sequence[str]) -> None:
    """Run one command; one that is not on this host has nothing to do here (no initramfs, no boot loader)."""
    program = shutil.which(words[0], path=PROGRAMS)
    if program is None:
        return
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "PATH": PROGRAMS}
    done = subprocess.run(
        [program, *words[1:]], capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-6:]
        raise FileError(f"`{' '.join(words)}` failed (exit status {done.returncode}): " + "; ".join(said))


def apply(
    changed: Sequence[Mapping[str, Any]], execute: Callable[[Sequence[str]], None] = run
) -> list[list[str]]:
    """Bring the files into their state, then run their commands, each once; returns the commands that ran."""
    done: list[Mapping[str, Any]] = []
    try:
        for entry in changed:
            put(Path(entry["path"]), entry.get("content"), mode_of(entry))
            done.append(entry)
        commands: list[list[str]] = []
        for entry in changed:
            command = [str(word) for word in entry.get("then") or []]
            if command and command not in commands:
                execute(command)
                commands.append(command)
        return commands
    except BaseException:
        for entry in reversed(done):
            put(Path(entry["path"]), entry["before"], entry["before_mode"] or mode_of(entry))
        raise
