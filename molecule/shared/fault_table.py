"""The table at the end of a scenario of faults: each fault, and whether the fleet survived it. For a conftest.py.

A fault is a test; its name in the table is the first line of its docstring, with the test's parameters filled in.
"""

from __future__ import annotations

from typing import Any

TITLES: dict[str, str] = {}
ROWS: dict[str, tuple[str, float]] = {}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Name the faults."""
    for item in items:
        title = (item.obj.__doc__ or "").strip().splitlines()
        if title:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            TITLES[item.nodeid] = title[0].format(**parameters).rstrip(".")


def pytest_runtest_logreport(report: Any) -> None:
    """Remember how a fault ended; what fails before or after the test itself counts as well."""
    if report.nodeid in TITLES and (report.when == "call" or report.failed):
        ROWS[report.nodeid] = ("survived" if report.passed else "NOT survived", report.duration)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table; a fault without a row was not tried."""
    rows = [(title, *ROWS.get(nodeid, ("not tried", 0.0))) for nodeid, title in TITLES.items()]
    width = max([len(title) for title, _, _ in rows] + [5])
    terminalreporter.section("fault matrix")
    for title, word, seconds in rows:
        terminalreporter.line(f"{title:<{width}}  {word:<12}  {seconds:5.0f} s")
