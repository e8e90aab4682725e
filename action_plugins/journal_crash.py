"""Controller half of journal_crash: keep Ansible from taking the finding for a failure of the module.

ansible-core treats a result's key `exception` as a traceback of the module itself: it prints an error, and turns the
value into one of its own objects. The finding, its `exception` included, is in `crash` as well; the top-level key goes
no further.
"""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """Run the module and drop the key that Ansible misunderstands."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        result.update(self._execute_module(task_vars=task_vars))
        if not result.get("failed"):
            result.pop("exception", None)
        return result
