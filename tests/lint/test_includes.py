"""Hosts of a batch work side by side: nothing that differs by host is looped over with an include.

Ansible runs an included file once for each distinct item (and label), with the hosts that have that item, one item
after the other (ansible-core, IncludedFile.__eq__). Where items are the hosts' own, a batch loads one host at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = [*sorted((ROOT / "roles").glob("*/*/*.yml")), *sorted((ROOT / "playbooks").rglob("*.yml"))]
FILES += [ROOT / "deploy-dflash.yml"]
# What may be looped over: names, numbers, and engines, which are the same on hosts that are deployed the same.
SAME_ON_EVERY_HOST = {
    "sglang_resolved | map(attribute='instance')",
    "__sglang_service_returns | map(attribute='instance')",
    "__sglang_service_joins.state.instances | dict2items | selectattr('value.release', 'mapping')"
    " | map(attribute='key') | sort",
    "__sglang_service_leaves.state.instances | sort if __sglang_service_rotates else []",
    "__sglang_service_staying if __sglang_service_rotates else []",
    "__sglang_service_gone if __sglang_service_rotates else []",
    "range(__sglang_benchmark_plan | length) | list",
    "range(sglang_rollout_soak | sglang_soak_looks) | list",
    "__sglang_venv_engines",
}


def tasks(content: Any) -> Iterator[dict[str, Any]]:
    """Every task of a file, however deep it stands."""
    for entry in content if isinstance(content, list) else []:
        if isinstance(entry, dict):
            yield entry
            for key in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks", "handlers"):
                yield from tasks(entry.get(key))


def looped_includes() -> list[tuple[str, str]]:
    """(file and task, loop) of each include that is repeated."""
    found = []
    for path in FILES:
        for task in tasks(yaml.safe_load(path.read_text())):
            kinds = {key.rpartition(".")[2] for key in task}
            repeated = [key for key in task if key == "loop" or key.startswith("with_")]
            if kinds & {"include_tasks", "include_role"} and repeated:
                loop = " ".join(str(task[repeated[0]]).split()).removeprefix("{{ ").removesuffix(" }}")
                found.append((f"{path.relative_to(ROOT)}: {task.get('name')}", loop))
    return found


def test_there_are_some() -> None:
    assert len(looped_includes()) >= 8
    assert {loop for _, loop in looped_includes()} == SAME_ON_EVERY_HOST, "the table names what is there"


@pytest.mark.parametrize(("task", "loop"), looped_includes())
def test_hosts_do_not_take_turns(task: str, loop: str) -> None:
    assert loop in SAME_ON_EVERY_HOST, f"{task} would run one host after the other: loop over names instead"
