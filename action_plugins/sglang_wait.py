"""Controller half of sglang_wait: runs the module in slices and shows on the terminal where each host's load stands."""

from __future__ import annotations

import os
from typing import Any

import ansible.module_utils as _module_utils
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module_utils")
if _PACKAGE not in _module_utils.__path__:
    _module_utils.__path__.append(_PACKAGE)

from ansible.module_utils.dflash_fleet import phases, slices

display = Display()


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
        width = slices.width(host, task_vars)

        def step(resume: Any, seconds: float) -> dict[str, Any]:
            return self._execute_module(module_args={**args, "slice": seconds, "resume": resume}, task_vars=task_vars)

        def line(answer: dict[str, Any]) -> tuple[Any, str]:
            shot = {"phase": answer["phase"], **answer["progress"]}
            left = answer["progress"]["remaining"]
            return answer["phase"], phases.progress_line(host, answer["seconds"] or 0.0, shot, left, width)

        answer = slices.follow(
            step,
            {"phase": "launch"},
            AnsibleConnectionFailure,
            self._connection,
            f"{host:<{width}}",
            line,
            self._show if shown else None,
        )
        if shown and answer.get("outcome"):
            self._show(self._last_line(host, width, answer))
        result.update(answer)
        return result

    @staticmethod
    def _show(line: str) -> None:
        display.display(line)

    @staticmethod
    def _last_line(host: str, width: int, answer: dict[str, Any]) -> str:
        took = phases.clock(answer.get("seconds") or 0.0)
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
