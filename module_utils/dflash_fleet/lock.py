"""Who works on a host: one file that keeps two rollouts apart and says who holds the host since when.

The file `state/rollout.json` below the root is a JSON object:
{schema, id, user, controller, pid, started, since, continues}. `id` names the rollout, `pid` and `started` the process
on the controller (its start in the words of `ps -o lstart=`), so that this controller can tell a dead rollout from a
living one; `since` is ISO 8601 UTC; `continues` names the dead rollouts that it took the host over from, newest first.
The file outlives a reboot of the host, as the rollout does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from typing import Any

from . import state

# Names of dead rollouts that a lock remembers; their reports become one.
KEPT = 10


def holder(layout: state.Layout) -> dict[str, Any] | None:
    """Who holds the host, or None. StateError for a file that this version cannot read."""
    return state.read_state(layout.rollout_lock())


def blocks(found: Mapping[str, Any] | None, mine: Mapping[str, Any], takeover: str = "") -> bool:
    """Whether what is found keeps `mine` away: another rollout that nobody said to take over."""
    return found is not None and found.get("id") not in (mine["id"], takeover or mine["id"])


@contextlib.contextmanager
def _alone(layout: state.Layout) -> Iterator[None]:
    """No other process of this host looks at the lock or changes it meanwhile."""
    layout.host_state().mkdir(mode=0o755, parents=True, exist_ok=True)
    handle = os.open(layout.host_state(), os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def holds(layout: state.Layout, mine: Mapping[str, Any]) -> bool:
    """Whether the host is ours."""
    return (holder(layout) or {}).get("id") == mine["id"]


def take(layout: state.Layout, mine: Mapping[str, Any], takeover: str = "") -> dict[str, Any] | None:
    """Take the host for `mine`; returns who holds it instead, or None where it is ours now."""
    with _alone(layout):
        found = holder(layout)
        if blocks(found, mine, takeover):
            return found
        if found is None or found.get("id") != mine["id"]:
            dead = [found["id"], *(found.get("continues") or [])][:KEPT] if found else []
            record = {**mine, "since": state.now_utc(), "continues": dead}
            state.write_state(layout.rollout_lock(), record, mode=0o644)
        # From here on the host need not be what the last deployment left behind.
        layout.deployed().unlink(missing_ok=True)
        return None


def release(layout: state.Layout, mine: Mapping[str, Any]) -> bool:
    """Give the host back; False where it was not ours (another rollout has taken it over, or nobody has it)."""
    if not layout.rollout_lock().exists():
        return False
    with _alone(layout):
        found = holder(layout)
        if found is None or found.get("id") != mine["id"]:
            return False
        layout.rollout_lock().unlink()
        return True


def refusal(found: Mapping[str, Any]) -> str:
    """What a person reads on a host that another rollout holds."""
    return (
        f"held by rollout {found.get('id')} of {found.get('user')} on {found.get('controller')} since "
        f"{str(found.get('since'))[:19]}Z. Wait for it; if it is dead, its own controller continues it with a plain "
        f"rerun, and any other with -e rollout_takeover={found.get('id')}. Nothing was touched."
    )
