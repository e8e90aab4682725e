"""The order of a rollout: who takes a turn when, and what stops it. Pure; `facts` is what Ansible knows of hosts."""

from __future__ import annotations

import functools
import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .canary import limits_of
from .state import main_unit

# One host first, then a tenth, a quarter, and all that are left.
BATCHES = (1, "10%", "25%", "100%")


class BatchError(ValueError):
    """`sglang_rollout_batches` cannot be read; the message says how it is written."""


def batches(hosts: Sequence[str], facts: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Sizes of batches for Ansible's `serial`: the first host's `sglang_rollout_batches`, checked."""
    wanted = facts.get(hosts[0], {}).get("sglang_rollout_batches") if hosts else None
    return check(BATCHES if wanted is None else wanted)


def check(wanted: Any) -> list[Any]:
    """The list as Ansible's `serial` takes it. BatchError for anything else, and for a share of nothing."""
    sizes = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
    for size in sizes:
        number = str(size).strip().removesuffix("%") if not isinstance(size, bool) else ""
        if not number.isdigit() or int(number) < 1 or (str(size).endswith("%") and int(number) > 100):
            raise BatchError(
                f"sglang_rollout_batches: {size!r} is no batch. Write a list of numbers of hosts and shares, such as "
                f"{list(BATCHES)}; the last one repeats until every host had its turn."
            )
    if not sizes:
        raise BatchError(f"sglang_rollout_batches is empty. Write a list such as {list(BATCHES)}.")
    return sizes


def failures(hosts: Iterable[str], facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Hosts whose turn ended badly."""
    return [host for host in hosts if facts[host].get("sglang_failure")]


def sizes(hosts: int, wanted: Sequence[Any]) -> list[int]:
    """How many hosts each batch has, as Ansible's `serial` counts: shares are of all hosts, the last one repeats."""
    steps = [max(1, hosts * int(size[:-1]) // 100) if str(size).endswith("%") else int(size) for size in wanted]
    left = hosts
    found: list[int] = []
    while left > 0:
        step = steps[min(len(found), len(steps) - 1)]
        found.append(min(step, left))
        left -= found[-1]
    return found


def sizes_of(hosts: Sequence[str], facts: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """How many hosts each batch has."""
    return sizes(len(hosts), batches(hosts, facts))


def plan_text(hosts: Sequence[str], facts: Mapping[str, Mapping[str, Any]]) -> str:
    """`12 hosts in 4 batches of 1, 1, 3, 7; a batch with a failure is the last`."""
    # Read after the first batch only, when it would be late to find a mistake.
    limits_of(facts[hosts[0]].get("sglang_rollout_soak_limits") if hosts else None)
    found = sizes_of(hosts, facts)
    if len(found) < 2:
        return f"{len(hosts)} host{'' if len(hosts) == 1 else 's'} at once"
    counts = ", ".join(map(str, found))
    return f"{len(hosts)} hosts in {len(found)} batches of {counts}; a batch with a failure is the last"


def failure_text(failure: Mapping[str, Any]) -> str:
    """What the end of the run repeats of a failure that was told in full where it happened."""
    message = failure.get("message")
    lines = [str(line) for line in message] if isinstance(message, (list, tuple)) else str(message).splitlines()
    first = lines[0] if lines else f"{failure.get('task')} failed"
    return first + (" (in full above)" if len(lines) > 1 else "")


def soaks(hosts: Sequence[str], batch: Sequence[str]) -> bool:
    """Whether a batch is watched for a while after its gate: the first one, where others follow."""
    return bool(batch) and hosts[0] in batch and len(batch) < len(hosts)


def lost(state: Mapping[str, Any], worse: Mapping[str, Sequence[str]] | None = None) -> list[dict[str, Any]]:
    """Instances that no longer serve by the start that passed its gate, or do `worse` than hosts that were not touched,
    [{instance, why, previous}].

    `state` is what sglang_state says; `previous` is what to return to, {instance, release_id, unit}, or null.
    """
    found = []
    for name, facts in sorted(state["instances"].items()):
        unit = main_unit(facts)
        again = int(unit["n_restarts"] or 0) if unit else 0
        reasons = (worse or {}).get(name) or []
        if facts["serving"] and not again and not reasons:
            continue
        cause = None
        if facts["serving"] and not again:
            how = "does worse than hosts that were not touched: " + ", ".join(reasons)
        else:
            cause = (facts.get("report") or {}).get("cause")
            how = "crashed after its gate and was started again" if again else f"is {facts['condition']} after its gate"
        previous = facts.get("previous_good")
        found.append({
            "instance": name,
            "why": f"{name} {how}" + (f": {cause}" if cause else ""),
            "previous": {"instance": name, **previous} if previous else None,
        })
    return found


def rerun(
    command: Sequence[str], inventories: Sequence[str], variables: Sequence[str], hosts: Sequence[str]
) -> str:
    """The command that finishes `hosts`; `variables` are those of the command line of the run that did not."""
    words = list(command)
    for source in inventories:
        words += ["-i", source]
    words += ["-l", ",".join(hosts)]
    for value in variables:
        # They belong to the wish; one that may hold a secret is left to the person.
        secret = any(part in value.lower() for part in ("key", "token", "password", "secret", "webhook"))
        words += ["-e", "..." if secret else value]
    return shlex.join(words)


# ---------------------------------------------------------------------------------------------------------------------
# The quick second run

# Variables that a deployment reads begin so.
PREFIXES = ("sglang_", "gpu_host_", "model_weights_", "rehearsal_")
# Of these, what says how a run goes about it and not what a host comes to.
OF_THE_RUN = ("sglang_rollout_", "sglang_skip_unchanged", "sglang_reports_dir")
# Code and tables that decide what a wish comes to.
CODE = ("roles", "library", "module_utils", "action_plugins", "filter_plugins", "playbooks")
LARGEST_FILE = 4 * 1024 * 1024  # bytes of a file that a variable names; a larger one stands for itself by size and time


@functools.lru_cache(maxsize=1)
def code_digest(root: Path) -> str:
    """Of the project itself: a newer dflash-fleet is another wish."""
    total = hashlib.sha256()
    for folder in CODE:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return total.hexdigest()


def wish_digest(variables: Mapping[str, Any], root: Path) -> str:
    """Of everything that a deployment reads of a host's inventory, the files that it names included.

    Empty where a variable cannot be known before the host was asked; the host is then looked at as a whole. Variables
    may be secret: only this digest leaves the controller.
    """
    total = hashlib.sha256(code_digest(root).encode())
    for name in sorted(variables):
        if not str(name).startswith(PREFIXES) or str(name).startswith(OF_THE_RUN):
            continue
        try:
            text = json.dumps(variables[name], sort_keys=True, default=str)
            total.update(f"{name}\0{text}\0".encode())
        except Exception:  # templating fails in as many ways as there are filters
            return ""
        total.update(_file_mark(variables[name]).encode())
    return total.hexdigest()


def _file_mark(value: Any) -> str:
    """What a file of the controller holds that a variable names, or nothing."""
    if not isinstance(value, str) or not value or len(value) > 1000 or "\0" in value:
        return ""
    path = Path(value)
    try:
        if not path.is_absolute() or not path.is_file():
            return ""
        found = path.stat()
        if found.st_size > LARGEST_FILE:
            return f"{found.st_size} {found.st_mtime_ns}"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------------------------------
# Going back


def rollback_plan(state: Mapping[str, Any], instances: Sequence[str] = (), release: str = "") -> list[dict[str, Any]]:
    """What returns to what on a host, [{instance, release_id, unit}]; `state` is what sglang_state says.

    Without names it is what a benchmark has left on trial, or else every instance.
    """
    plan = []
    wanted = instances or [name for name, facts in state["instances"].items() if facts.get("trial")]
    for name, facts in sorted(state["instances"].items()):
        if wanted and name not in wanted:
            continue
        target = facts.get("previous_good")
        if release:
            target = {"release_id": release, "unit": (facts.get("release_units") or {}).get(release)}
        if target and target.get("unit"):
            plan.append({"instance": name, **target})
    return plan


def rollback_problem(state: Mapping[str, Any], instances: Sequence[str] = (), release: str = "") -> str:
    """Why a host cannot go back as asked, or nothing. Nothing is touched where there is a reason."""
    present = state["instances"]
    unknown = [name for name in instances if name not in present]
    if unknown:
        return f"has no instance {', '.join(unknown)}; it has {', '.join(sorted(present)) or 'none'}"
    chosen = sorted(instances or [name for name, facts in present.items() if facts.get("trial")] or present)
    if not chosen:
        return "has no instance that could go back"
    if release and len(chosen) > 1:
        return f"say which instance goes back to {release}: -e instance=<one of {', '.join(chosen)}>"
    found = [item["instance"] for item in rollback_plan(state, instances, release)]
    for name in chosen:
        if name not in found:
            kept = ", ".join(present[name].get("releases") or []) or "none"
            wanted = f"release {release} is not kept" if release else "no other release that served is kept"
            return f"{name} stays as it is: {wanted} (kept: {kept})"
    return ""


def restored(before: Mapping[str, Any], now: Mapping[str, Any], gone: Sequence[str]) -> list[dict[str, Any]]:
    """What returns where the replacement of `gone` instances failed, [{instance, release_id, unit}].

    Those that were stopped for it, and those that had been switched to something else since; what was not to start at
    boot either stays as it is. A run before may have stopped them already, so that they ran does not count.
    """
    return [
        {"instance": name, "release_id": facts["last_good"]["release_id"], "unit": facts["last_good"]["unit"]}
        for name, facts in sorted(before["instances"].items())
        if facts.get("last_good") and any(unit["enabled"] == "enabled" for unit in facts["units"])
        if name in gone or (now["instances"].get(name) or {}).get("current") != facts["current"]
    ]


def in_the_way(before: Mapping[str, Any], now: Mapping[str, Any], gone: Sequence[str]) -> list[str]:
    """Units that have to stop before those return: of instances that never served before, or on their GPUs or port."""
    back = [before["instances"][item["instance"]].get("release") for item in restored(before, now, gone)]
    return [
        unit["name"]
        for name, facts in sorted(now["instances"].items())
        if name not in gone
        if not (before["instances"].get(name) or {}).get("last_good")
        or any(_collide(facts.get("release"), other) for other in back)
        for unit in facts["units"]
        if unit["active_state"] not in ("inactive", "failed") or unit["enabled"] == "enabled"
    ]


def _collide(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two releases cannot run at once: one port, or GPUs in common; without a list a release takes all."""
    if not one or not other:
        return False
    if one["port"] == other["port"]:
        return True
    if "cpu" in (one["engine"]["build"], other["engine"]["build"]):
        return False
    lists = set(one["gpu_ids"]), set(other["gpu_ids"])
    return not all(lists) or bool(lists[0] & lists[1])
