"""Releases of an instance: what identifies one, what a switch to it changes, and which old ones may go.

A release is a directory `releases/<id>/` with the unit and `release.json`, never changed after it is written. Its id is
the hash of both, so that the same wish always has the same name and a second run has nothing to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def release_text(release: Mapping[str, Any]) -> str:
    """release.json as it is written: one spelling for one content."""
    return json.dumps({"schema": 1, **release}, indent=2, sort_keys=True) + "\n"


def release_id(unit_text: str, release: Mapping[str, Any]) -> str:
    """The first 12 hex digits of the hash of everything a release holds."""
    return hashlib.sha256((unit_text + "\0" + release_text(release)).encode()).hexdigest()[:12]


def key_digest(key: str) -> str | None:
    """Eight hex digits that change when the API key does, so that a new key is a new release; None without a key."""
    return hashlib.sha256(("dflash-fleet api key\0" + key).encode()).hexdigest()[:8] if key else None


def prunable(existing: Iterable[tuple[str, float]], protected: Iterable[str | None], keep: int) -> list[str]:
    """Ids that may be removed, oldest first: `existing` is (id, modification time); protected ones always stay."""
    safe = {name for name in protected if name}
    newest_first = sorted(existing, key=lambda item: item[1], reverse=True)
    room = max(0, keep - len(safe))
    removable = [name for name, _ in newest_first if name not in safe][room:]
    return removable[::-1]


def diff(
    before_unit: str, before_name: str, after_unit: str, after_name: str, restart: bool, pending: bool = False
) -> dict[str, str]:
    """What Ansible's --diff shows: the unit that runs against the unit that would, and whether a restart follows."""
    note = f"  (restart: {after_name})" if restart else "  (taken at the next start)" if pending else ""
    return {
        "before_header": before_name or "nothing deployed",
        "after_header": after_name + note,
        "before": before_unit,
        "after": after_unit,
    }
