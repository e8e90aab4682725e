"""How figures, addresses and failures are written: one way everywhere; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def size(count: float | None) -> str:
    """Bytes in decimal units, as disks are sold and `df -H` shows them: `610 GB`, `6.1 GB`; None is `not known`."""
    if count is None:
        return "not known"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def endpoint(address: str, port: Any) -> str:
    """`10.0.0.1:30000`, `[::1]:30000`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def clock(seconds: float) -> str:
    """Seconds as `m:ss`, or `h:mm:ss` from an hour on; nothing below zero."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def why(result: Mapping[str, Any], otherwise: str = "failed, see above") -> Any:
    """The message of a failed task's result, text or a list of lines as it is; of a loop, whose own message is only
    that some items failed, that of the first one."""
    items = [item for item in result.get("results") or () if isinstance(item, Mapping) and item.get("failed")]
    return (items[0] if items else result).get("msg") or otherwise
