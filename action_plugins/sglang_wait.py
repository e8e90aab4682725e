"""Controller half of sglang_wait: runs the module in slices and shows on the terminal where each host's load stands."""

from __future__ import annotations

import fcntl
import json
import os
import time
import urllib.parse
from pathlib import Path
from typing import Any

import ansible.module_utils as _module_utils
from ansible import constants
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module_utils")
if _PACKAGE not in _module_utils.__path__:
    _module_utils.__path__.append(_PACKAGE)

from ansible.module_utils.dflash_fleet import phases, rollout_progress, slices, words

display = Display()


class Fleet:
    """What the waits of one batch know of each other: they are processes of one run, and share its temporary folder."""

    def __init__(self, host: str, task_vars: dict[str, Any]) -> None:
        self.host = host
        self.hosts = list((task_vars.get("groups") or {}).get("__sglang_rollout") or [])
        self.batch = list(task_vars.get("ansible_play_batch") or [])
        # One host of a rollout of one has a line of its own already.
        self.is_one = len(self.hosts) > 1 and host in self.batch and self.batch[0] in self.hosts
        self.names_hosts = not self.is_one or len(self.batch) <= rollout_progress.NAMED
        self.folder = Path(constants.DEFAULT_LOCAL_TMP) / "sglang-progress"

    def tell(self, **shot: Any) -> None:
        """Let the others know where this host stands."""
        if self.is_one:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            path = self._path(self.host)
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(shot), encoding="utf-8")
            fresh.replace(path)

    def line(self) -> str | None:
        """The batch in one line, from whichever wait comes first when the last line is old enough."""
        if not self.is_one:
            return None
        with open(self.folder / "line", "a", encoding="utf-8") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            last = os.fstat(turn.fileno())
            if last.st_size and time.time() - last.st_mtime < slices.SLICE - 1:
                return None
            turn.write(".")
        shots = {host: json.loads(self._path(host).read_text(encoding="utf-8")) for host in self.batch
                 if self._path(host).exists()}  # fmt: skip
        return rollout_progress.line(self.hosts, self.batch, shots)

    def _path(self, host: str) -> Path:
        return self.folder / (urllib.parse.quote(host, safe="") + ".json")


class ActionModule(ActionBase):
    """Wait in slices; the result is the module's own."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        self._supports_async = True
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        host = str(task_vars.get("inventory_hostname") or "")
        args = {"label": host, **self._task.args}
        # One plain run where there is nothing to slice: once, check mode, in the background, or sliced by the caller.
        if (
            args.get("poll") == "once"
            or self._task.check_mode
            or self._task.async_val
            or args.get("slice")
            or args.get("resume")
        ):
            result.update(
                self._execute_module(module_args=args, task_vars=task_vars, wrap_async=bool(self._task.async_val))
            )
            return result
        mode = str(self._templar.template(task_vars.get("sglang_wait_progress", "auto")))
        shown = slices.wanted(mode, "sglang_wait_progress", display.warning)
        away = float(self._templar.template(task_vars.get("sglang_wait_away", slices.AWAY)))
        width = slices.width(host, task_vars)
        fleet = Fleet(host, task_vars)

        def step(resume: Any, seconds: float) -> dict[str, Any]:
            return self._execute_module(module_args={**args, "slice": seconds, "resume": resume}, task_vars=task_vars)

        def line(answer: dict[str, Any]) -> tuple[Any, str]:
            shot = {"phase": answer["phase"], **answer["progress"]}
            known = {name: shot.get(name) for name in ("phase", "percent", "remaining")}
            fleet.tell(state="loading", seconds=answer["seconds"], **known)
            together = fleet.line()
            if together:
                self._show(together)
            seconds = answer["seconds"] or 0.0
            text = phases.progress_line(host, seconds, shot, shot["remaining"], width) if fleet.names_hosts else ""
            return answer["phase"], text

        answer = slices.follow(
            step,
            {"phase": "launch"},
            AnsibleConnectionFailure,
            self._connection,
            f"{host:<{width}}",
            line,
            self._show if shown else None,
            away,
        )
        if shown and answer.get("outcome"):
            fleet.tell(state=answer["outcome"])
            # Failures have a line in batches of any size.
            if fleet.names_hosts or answer["outcome"] != "ready":
                self._show(self._last_line(host, width, answer))
        result.update(answer)
        return result

    @staticmethod
    def _show(line: str) -> None:
        display.display(line)

    @staticmethod
    def _last_line(host: str, width: int, answer: dict[str, Any]) -> str:
        took = words.clock(answer.get("seconds") or 0.0)
        outcome = answer["outcome"]
        if outcome == "ready":
            smoke = answer.get("smoke") or {}
            accept = smoke.get("accept_length")
            text = "ready" + (f", accept length {accept:.2f}" if isinstance(accept, (int, float)) else "")
        elif outcome in ("crashed", "hung", "timeout"):
            text = f"{outcome} in {answer.get('phase')}"
        else:
            text = str(outcome).replace("_", " ")
        return f"{host:<{width}}  {took:>4}  {text}"
