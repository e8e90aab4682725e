"""One task of an action plugin that works in slices, on one host, with the module's answers given."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Run:
    """`calls`: what the module was asked; `lines`: what was shown; `clock`: s that have passed.

    An answer is a result or an error, or one of these with the seconds that it took. With `stays` the last one is given
    again and again; else a call too many fails.
    """

    def __init__(
        self,
        plugin: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        answers: Iterable[Any],
        args: dict[str, Any],
        terminal: bool = True,
        check_mode: bool = False,
        async_val: int = 0,
        stays: bool = False,
        **task_vars: Any,
    ) -> None:
        self.answers, self.stays = list(answers), stays
        self.calls: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.resets, self.clock = 0, 0.0
        monkeypatch.setattr(plugin.slices, "ON_TERMINAL", terminal)
        monkeypatch.setattr(plugin.slices.time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(plugin.slices.time, "sleep", self.tick)
        monkeypatch.setattr(plugin.display, "display", lambda text, **_more: self.lines.append(text))
        monkeypatch.setattr(plugin.ActionBase, "run", lambda *_args, **_more: {})
        self.action = plugin.ActionModule.__new__(plugin.ActionModule)
        self.action._task = SimpleNamespace(args=args, check_mode=check_mode, async_val=async_val)
        self.action._templar = SimpleNamespace(template=lambda value: value)
        self.action._connection = SimpleNamespace(reset=self.reset)
        self.action._execute_module = self.execute
        self.vars = {"inventory_hostname": "gpu-1", "ansible_play_hosts_all": ["gpu-1", "gpu-100"], **task_vars}

    def tick(self, seconds: float) -> None:
        self.clock += seconds

    def reset(self) -> None:
        self.resets += 1

    def execute(self, module_args: dict[str, Any], task_vars: dict[str, Any], wrap_async: bool = False) -> Any:
        self.calls.append({**module_args, "_async": wrap_async})
        answer = self.answers[0] if self.stays and len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, tuple):
            answer, took = answer
            self.clock += took
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    def go(self) -> Any:
        return self.action.run(task_vars=self.vars)
