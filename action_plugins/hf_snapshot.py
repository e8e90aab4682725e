"""Controller half of hf_snapshot: looks at a long fetch in slices and shows on the terminal how far each host is."""

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

from ansible.module_utils.dflash_fleet import slices, snapshot, words

display = Display()


class ActionModule(ActionBase):
    """Watch in slices; the result is the module's own."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        self._supports_async = True
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        args = dict(self._task.args)
        if self._task.async_val or args.get("slice"):
            result.update(
                self._execute_module(module_args=args, task_vars=task_vars, wrap_async=bool(self._task.async_val))
            )
            return result
        mode = str(self._templar.template(task_vars.get("model_weights_progress", "auto")))
        shown = slices.wanted(mode, "model_weights_progress", display.warning)
        name = str(task_vars.get("inventory_hostname") or "")
        host = f"{name:<{slices.width(name, task_vars)}}"

        def step(_resume: Any, seconds: float) -> dict[str, Any]:
            return self._execute_module(module_args={**args, "slice": seconds}, task_vars=task_vars)

        def line(answer: dict[str, Any]) -> tuple[Any, str]:
            shot = answer["progress"]
            left = "" if shot["remaining"] is None else f"  about {words.clock(shot['remaining'])} left"
            text = f"{host}  {words.clock(shot['seconds']):>4}  {snapshot.progress_text(shot)}{left}"
            return (shot["repo"], shot["step"]), text

        show = display.display if shown else None
        answer = slices.follow(step, None, AnsibleConnectionFailure, self._connection, host, line, show)
        answer.pop("finished", None)
        result.update(answer)
        return result
