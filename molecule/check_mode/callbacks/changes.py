"""Writes what every task changed, or would change, to CHANGES_FILE: a JSON object a line, for the test."""

from __future__ import annotations

import json
import os
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: changes
type: notification
short_description: What each task changed, one JSON object a line
description: For tests of check mode. Writes to the file that CHANGES_FILE names.
"""


class CallbackModule(CallbackBase):
    """Notes every result that says it changed something."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "changes"

    def _note(self, result: Any) -> None:
        answer = json.loads(self._dump_results(result._result))
        task = result._task
        for item in answer.get("results") or [answer]:
            if item.get("changed"):
                line = {
                    "host": result._host.get_name(),
                    "task": task.get_name(),
                    "action": task.action,
                    "delegated": bool(task.delegate_to),
                    "result": item,
                }
                with open(os.environ["CHANGES_FILE"], "a", encoding="utf-8") as out:
                    out.write(json.dumps(line) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        """A task that ended well."""
        self._note(result)
