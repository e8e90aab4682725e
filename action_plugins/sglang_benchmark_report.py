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
        records, others = bench.comparable(r for r in records if not hosts or r["host"] in hosts)
        if not records:
            return {**result, "failed": True, "msg": f"{folder} holds no results of these hosts"}
        lines = [bench_report.text(records, wanted)]
        if others:
            lines.append(f"  ({others} older results of other releases or models are left out)")
        written, problem = self._write(folder, records, wanted)
        lines.append(f"  page: {written}" + (f" ({problem})" if problem else ""))
        display.display("\n" + "\n".join(lines) + "\n")
        return {
            **result,
            "changed": False,
            "answer": choice.choose(records, wanted),
            "speculation": choice.speculation(records),
            "page": written,
        }

    @staticmethod
    def _write(folder: str, records: list[dict[str, Any]], wanted: Any) -> tuple[str, str]:
        """The page, and its images by themselves for tickets."""
        problem = ""
        try:
            images = bench_page.plots(records, ("svg", "png"))
        except ImportError:
            images, problem = {}, "without plots: pip install matplotlib"
        for name, kinds in images.items():
            for kind, content in kinds.items():
                with open(os.path.join(folder, f"{name}.{kind}"), "wb") as image:
                    image.write(content)
        path = os.path.join(folder, "index.html")
        with open(path, "w", encoding="utf-8") as page:
            page.write(bench_page.page(records, wanted, images))
        return path, problem
