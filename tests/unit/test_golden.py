"""tests/golden shows what each release would be started with; UPDATE_GOLDEN=1 writes the files anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import configurations
import pytest
from dflash_fleet import profiles

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def shown(request: dict[str, Any], common: list[str]) -> list[str]:
    """One configuration as a reader wants it: the lines that are not common to all, the environment, the remarks."""
    try:
        result = profiles.resolve(request)
    except profiles.ConfigError as error:
        return [f"  refused: {error.message}"]
    lines = [f"  {line}" for line in result["lines"] if line not in common]
    missing = [line for line in common if line not in result["lines"]]
    lines += [f"  (without {line})" for line in missing]
    usual = {"HF_HUB_OFFLINE", "PYTHONUNBUFFERED"}
    lines += [f"  {name}={value}" for name, value in result["environment"].items() if name not in usual]
    graphs = result["cuda_graph"]
    if graphs["effective"] != graphs["requested"] and (graphs["requested"], graphs["effective"]) != ("auto", "enabled"):
        lines.append(f"  # CUDA graphs {graphs['effective']}: {graphs['reason']}")
    for issue in result["known_issues"]:
        mark = "avoided" if issue["applied"] else "KNOWN TO FAIL" if issue["action"] == "avoid" else "note"
        if issue["id"] not in ("dflash_block_size_guessed", "speculative_default_48_requests", "clean_stop_is_sigkill"):
            lines.append(f"  # {mark}: {issue['id']}")
    return lines


def heading(titles: list[str]) -> str:
    """`ep8, drafter dflash, graphs auto or enabled` for those two titles."""
    graphs: dict[str, list[str]] = {}
    for title in titles:
        shared, state = title.rsplit(", graphs ", 1)
        graphs.setdefault(shared, []).append(state)
    every = len(configurations.GRAPHS)
    return "; ".join(
        f"{shared}, any graphs" if len(states) == every else f"{shared}, graphs {' or '.join(states)}"
        for shared, states in graphs.items()
    )


def page(version: str) -> str:
    """The golden file of a release: each configuration once, those that come out equal under one heading."""
    base = profiles.resolve({**configurations.BASE, "version": version, "profile": "single"})
    common = [line for line in base["lines"] if not line.startswith("--tp-size")]
    out = [
        f"# What SGLang {version} is started with, by profile, drafter and sglang_cuda_graph.",
        "# Written by tests/unit/test_golden.py (UPDATE_GOLDEN=1). Notes that apply to nearly all are left out:",
        "# dflash_block_size_guessed, speculative_default_48_requests, clean_stop_is_sigkill.",
        "",
        "common to all:",
        *[f"  {line}" for line in common],
    ]
    groups: dict[str, list[str]] = {}
    for title, request in configurations.matrix(version):
        body = "\n".join(shown(request, common))
        groups.setdefault(body, []).append(title)
    for body, titles in groups.items():
        out += ["", f"{heading(titles)}:", body]
    out += ["", "# --- overlays on tp8 with the dflash drafter ---"]
    tp8 = profiles.resolve({**configurations.BASE, "version": version, "profile": "tp8", "drafter": "dflash"})["lines"]
    for title, request in configurations.overlays(version):
        out += ["", f"{title}:", *shown(request, tp8)]
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("version", configurations.RELEASES)
def test_golden(version: str) -> None:
    path = GOLDEN / f"sglang-{version}.txt"
    text = page(version)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "look at the difference, then UPDATE_GOLDEN=1 pytest this file"
