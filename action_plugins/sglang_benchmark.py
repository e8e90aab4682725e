"""Controller half of sglang_benchmark: keeps each run as a line of JSON at once, and says how it went."""

from __future__ import annotations

import os
import statistics
from typing import Any

import ansible.module_utils as _module_utils
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module_utils")
if _PACKAGE not in _module_utils.__path__:
    _module_utils.__path__.append(_PACKAGE)

from ansible.module_utils.dflash_fleet import bench, state

display = Display()


class ActionModule(ActionBase):
    """The result is the module's own."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        arguments = dict(self._task.args)
        context = dict(arguments.get("context") or {})
        results = arguments.get("results")
        result.update(self._execute_module(module_args=arguments, task_vars=task_vars))
        runs = result.get("runs") or []
        if not runs:
            return result
        if results:
            bench.append(
                results,
                [
                    {
                        **context,
                        "kind": "measured",
                        "at": state.now_utc(),
                        "repeat": number,
                        "engine_log": result.get("engine_log") or {},
                        **run,
                    }
                    for number, run in enumerate(runs)
                ],
            )
        rate = statistics.fmean(run["output_throughput"] or 0.0 for run in runs)
        errors = sum(run["errors"] for run in runs)
        host, name = task_vars.get("inventory_hostname") or "", context.get("candidate") or arguments["model"]
        failed = f", {errors} of {sum(run['requests'] for run in runs)} requests failed" if errors else ""
        mark = " [rehearsal]" if context.get("rehearsal") else ""
        display.display(f"{host}  {name}  C={arguments['concurrency']:<4} {rate:9.1f} tok/s{failed}{mark}")
        return result

