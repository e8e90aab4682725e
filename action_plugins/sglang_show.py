"""Print a text as it stands: tables and JSON that people and programs read, without Ansible's wrapping."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


class ActionModule(ActionBase):
    """Needs no connection to the host."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Print the argument `text`."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        _, arguments = self.validate_argument_spec({"text": {"type": "str", "required": True}})
        display.display(arguments["text"])
        return {**result, "changed": False}
