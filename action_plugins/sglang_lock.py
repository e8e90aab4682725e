"""Controller half of sglang_lock: says who takes a host, and takes over from rollouts that died on this controller."""

from __future__ import annotations

import datetime
import getpass
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

# What `ps -o lstart=` may differ by between two looks at one process: it adds ticks to a boot time that it estimates.
_JITTER = datetime.timedelta(seconds=2)


def _started(pid: int) -> str:
    """When a process of this machine began, in ps' words and UTC; empty for one that is gone."""
    words = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    ask = ["ps", "-o", "lstart=", "-p", str(pid)]
    run = subprocess.run(ask, capture_output=True, text=True, env=words, check=False)
    return " ".join(run.stdout.split())


def _moment(started: str) -> datetime.datetime:
    return datetime.datetime.strptime(started, "%a %b %d %H:%M:%S %Y")


# The main process loads this file and tasks run in its forks, so that all hosts of a run see one name.
_LOADED_BY = os.getpid()
_LOADED_AT = datetime.datetime.now(datetime.timezone.utc)
_LOADED_STARTED = _started(_LOADED_BY)


def _controller() -> str:
    """Name of this machine; containers share names, so its machine-id is in it where there is one."""
    try:
        identity = Path("/etc/machine-id").read_text(encoding="ascii").strip()[:8]
    except OSError:
        identity = ""
    return platform.node() + (f"/{identity}" if identity else "")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's nameless user
        return str(os.getuid())


def holder_of_this_run(rollout: str = "") -> dict[str, Any]:
    """Who we are, the same on every host of this run."""
    identity = rollout or f"{_LOADED_AT:%Y%m%dT%H%M%SZ}-{_LOADED_BY}"
    whose = {"user": _user(), "controller": _controller()}
    return {"id": identity, **whose, "pid": _LOADED_BY, "started": _LOADED_STARTED}


def is_dead(found: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether a holder ran on this controller and has ended; of other controllers nobody here can tell."""
    if found.get("controller") != mine["controller"]:
        return False
    pid, then = found.get("pid"), str(found.get("started") or "")
    now = _started(pid) if isinstance(pid, int) else ""
    # A number is given away again, a start is not.
    return not now or not then or abs(_moment(now) - _moment(then)) > _JITTER


class ActionModule(ActionBase):
    """Run the module, once more where the holder is dead."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        arguments = dict(self._task.args)
        mine = holder_of_this_run(str(arguments.get("rollout") or ""))
        arguments["holder"] = mine
        answer = self._execute_module(module_args=arguments, task_vars=task_vars)
        found = answer.get("held_by")
        if found and is_dead(found, mine):
            host = (task_vars or {}).get("inventory_hostname")
            display.display(f"{host}: continues rollout {found['id']}, which has ended without giving the host back")
            answer = self._execute_module(module_args={**arguments, "takeover": found["id"]}, task_vars=task_vars)
        result.update(answer, user=mine["user"], controller=mine["controller"])
        return result
