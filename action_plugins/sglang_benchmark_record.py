"""Keep that a candidate did not come to serve, as a line among the results on the controller."""

from __future__ import annotations

import os
from typing import Any

import ansible.module_utils as _module_utils
from ansible.plugins.action import ActionBase

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module_utils")
if _PACKAGE not in _module_utils.__path__:
    _module_utils.__path__.append(_PACKAGE)

from ansible.module_utils.dflash_fleet import bench, state


class ActionModule(ActionBase):
    """Needs no connection to the host."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        _, arguments = self.validate_argument_spec({
            "results": {"type": "path", "required": True},
            "context": {"type": "dict", "required": True},
            "cause": {"type": "str", "default": ""},
            "summary": {"type": "str", "default": ""},
        })
        if not self._task.check_mode:
            told = {name: arguments[name] or None for name in ("cause", "summary")}
            record = {**arguments["context"], "kind": "failed", "at": state.now_utc(), **told}
            bench.append(arguments["results"], [record])
        return {**result, "changed": False}
