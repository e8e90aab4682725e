"""The supervisor's word about a start, as a file: `gate.json` in the unit's RuntimeDirectory.

The prober beside the engine writes it, and everybody else reads it: `sglang_wait` instead of gating a second time,
`sglang_state` to know that a start which nobody watched (a reboot, a restart at night) has passed its gate, and the
reporter for what no log shows. It is good for the invocation it names and for no other; systemd removes it with the
unit's RuntimeDirectory.

{schema, unit, invocation_id, pid, at, phase, outcome: null | ready | crashed | hung | port_taken, reason, seconds,
 ready_monotonic, smoke, phases, cuda_graph, crash}: the names of `sglang_wait`'s result; `pid` is the prober's.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import state

NAME = "gate.json"
_MAX_BYTES = 512 * 1024
RUNTIME = "/run"


def path_of(instance: str, runtime: str = RUNTIME) -> Path:
    """Where the prober of an instance's units writes (RuntimeDirectory=sglang-<instance>)."""
    return Path(runtime, f"sglang-{instance}", NAME)


def write(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Replace the file whole. Readable for the group, as the directory is."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({"schema": state.SCHEMA, **document}, out, sort_keys=True)
            os.fchmod(out.fileno(), 0o640)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read(path: str | os.PathLike[str], invocation: str | None = None) -> dict[str, Any] | None:
    """The verdict about `invocation` (None: any), or None. Never raises: it is the engine's user who writes it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as stream:
            document = json.loads(stream.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or document.get("schema") != state.SCHEMA:
        return None
    if invocation is not None and document.get("invocation_id") != invocation:
        return None
    return document


def ready_record(document: Mapping[str, Any] | None, invocation: str) -> dict[str, Any] | None:
    """The verdict in the shape of ready.json, where it says that this invocation serves."""
    if not document or document.get("outcome") != "ready" or document.get("invocation_id") != invocation:
        return None
    smoke = document.get("smoke") or {}
    return {
        "schema": state.SCHEMA,
        "unit": document.get("unit"),
        "invocation_id": invocation,
        "ready_at": document.get("at"),
        "seconds": document.get("seconds"),
        "accept_length": smoke.get("accept_length"),
        "tokens_per_second": smoke.get("tokens_per_second"),
        "phases": document.get("phases") or [],
        "by": "supervisor",
    }
