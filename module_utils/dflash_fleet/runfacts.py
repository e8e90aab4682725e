"""Facts of a run that stand on its host, not in its journal: the installed release, the unit's limits."""

# ruff: noqa: E501  (patterns and table rows are read in one piece)
from __future__ import annotations

import glob
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

from . import journal

_VENV_PYTHON = re.compile(r"(?P<venv>/\S{1,300}?)/bin/python[\d.]*(?=\s|$)")
_SITE = re.compile(r'File "(?P<site>/[^"]{1,300}?/site-packages)/(?P<package>sglang|vllm)/')
_DIST = re.compile(r"/(?:sglang|vllm)-(?P<version>\d+\.\d+[\w.]*?)(?:\+[\w.]+)?\.dist-info$")


def installed_version(entries: Iterable[Mapping[str, Any]]) -> str | None:
    """The release of the environment that this run used, by its frames' paths or its command line; None where it is gone."""
    tried: set[str] = set()
    for entry in entries:
        plain = dict(entry)
        folders = []
        match = _SITE.search(journal.first(plain, "MESSAGE")[:2000])
        if match:
            folders.append(match.group("site"))
        match = _VENV_PYTHON.search(journal.first(plain, "_CMDLINE")[:4000])
        if match:
            folders += glob.glob(glob.escape(match.group("venv")) + "/lib/python3*/site-packages")
        for folder in folders:
            if folder in tried:
                continue
            tried.add(folder)
            version = _in(folder)
            if version:
                return version
        if len(tried) > 8:
            break
    return None


def _in(folder: str) -> str | None:
    for name in ("sglang", "vllm"):
        for path in glob.glob(os.path.join(glob.escape(folder), f"{name}-*.dist-info")):
            match = _DIST.search(path)
            if match:
                return match.group("version")
    return None


def unit_limits(unit: str) -> dict[str, Any]:
    """The unit's own memory limit: it tells an out-of-memory kill by the limit from one by the host."""
    if not unit:
        return {}
    try:
        done = subprocess.run(
            ["systemctl", "show", "--property=MemoryMax", "--", unit],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    value = done.stdout.strip().partition("=")[2]
    return {"__memory_max": value} if value and value != "infinity" else {}
