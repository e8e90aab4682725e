"""Print what a benchmark says, and write its page. Runs on the controller, over the results of all its runs."""

from __future__ import annotations

import os
from typing import Any

import ansible.module_utils as _module_utils
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module_utils")
if _PACKAGE not in _module_utils.__path__:
    _module_utils.__path__.append(_PACKAGE)

from ansible.module_utils.dflash_fleet import bench, bench_page, bench_report, choice

display = Display()


class ActionModule(ActionBase):
    """Needs no connection to the host."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        del tmp
        _, arguments = self.validate_argument_spec({
            "folder": {"type": "path", "required": True},
            "hosts": {"type": "list", "elements": "str", "default": []},
            "objective": {"type": "raw", "default": "throughput"},
        })
        folder, hosts, wanted = os.path.abspath(arguments["folder"]), arguments["hosts"], arguments["objective"]
        try:
            records = bench.read_folder(folder)
            choice.objective(wanted)
        except (bench.ResultError, choice.ObjectiveError, OSError) as problem:
            return {**result, "failed": True, "msg": str(problem)}
        groups, others = bench.groups(record for record in records if not hosts or record["host"] in hosts)
        if not groups:
            return {**result, "failed": True, "msg": f"{folder} holds no results of these hosts"}
        lines = []
        for group in groups:
            lines += [", ".join(bench_page.facts(group)[:4]), bench_report.text(group, wanted), ""]
        if others:
            lines.append(f"  ({others} results of releases or models before are left out)")
        written, problem = self._write(folder, groups, wanted)
        lines.append(f"  page: {written}" + (f" ({problem})" if problem else ""))
        display.display("\n" + "\n".join(lines) + "\n")
        answers = [choice.choose(group, wanted) for group in groups]
        if not any(answer["best"] for answer in answers):
            return {**result, "failed": True, "msg": "; ".join(f"{one['for']}: {one['why']}" for one in answers)}
        return {
            **result,
            "changed": False,
            "answers": answers,
            "speculation": [choice.speculation(group) for group in groups],
            "page": written,
        }

    @staticmethod
    def _write(folder: str, groups: list[list[dict[str, Any]]], wanted: Any) -> tuple[str, str]:
        """The page, and its images by themselves for tickets."""
        problem, drawn = "", []
        try:
            for number, group in enumerate(groups):
                salt = f"{number}-" if number else ""
                drawn.append(bench_page.plots(group, ("svg", "png"), salt))
                for name, kinds in drawn[-1].items():
                    for kind, content in kinds.items():
                        with open(os.path.join(folder, f"{salt}{name}.{kind}"), "wb") as image:
                            image.write(content)
        except ImportError:
            drawn, problem = [{} for _ in groups], "without plots: pip install matplotlib"
        path = os.path.join(folder, "index.html")
        with open(path, "w", encoding="utf-8") as page:
            page.write(bench_page.page(groups, wanted, drawn))
        return path, problem
