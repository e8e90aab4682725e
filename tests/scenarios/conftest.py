"""Which of the long scenarios run where time is short: FROM=N rotates them, MINUTES=N begins no more after."""

from __future__ import annotations

import os
import time

import pytest

STARTED = time.monotonic()
NOT_REACHED: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of the long matrices."""
    config.addinivalue_line("markers", "faults: long matrices, run by `make test-faults`")
    config.addinivalue_line("markers", "readme: commands of the README on the demo fleet, run by `make test-readme`")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with another one each time."""
    first = int(os.environ.get("FROM") or 0) % max(1, len(items))
    if os.environ.get("FROM"):
        items[:] = items[first:] + items[:first]


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """A scenario for which there is no time left is not run and not counted; it is named at the end."""
    minutes = os.environ.get("MINUTES")
    if minutes and time.monotonic() - STARTED > float(minutes) * 60:
        NOT_REACHED.append(item.name)
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what did not run."""
    if NOT_REACHED:
        terminalreporter.line(f"no time left for: {', '.join(NOT_REACHED)}")
