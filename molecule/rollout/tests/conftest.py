"""Prints the table of faults."""

from fault_table import pytest_collection_modifyitems, pytest_runtest_logreport, pytest_terminal_summary  # noqa: F401
