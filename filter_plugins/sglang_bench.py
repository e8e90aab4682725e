"""Filters of role sglang_benchmark: names for pure functions, nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ansible.module_utils as _module_utils
from ansible.errors import AnsibleFilterError

_OURS = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "module_utils"))
if _OURS not in _module_utils.__path__:
    _module_utils.__path__.append(_OURS)

from ansible.module_utils.dflash_fleet import bench, profiles
from ansible.module_utils.dflash_fleet import state as states


def candidates(
    requests: Sequence[Mapping[str, Any]],
    wanted: Sequence[Mapping[str, Any]],
    instance: str,
    host: str,
    run: str,
    facts: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Each candidate with its configuration and what a record says of it, {resolved, context}.

    Everything that cannot work is said at once, before anything is touched.
    """
    request = next((dict(item) for item in requests if item["instance"] == instance), None)
    if request is None:
        names = ", ".join(str(item["instance"]) for item in requests)
        raise AnsibleFilterError(f"sglang_benchmark_instance: {instance} is not deployed here; write one of {names}")
    found, problems, names = [], [], set()
    for order, overlay in enumerate(wanted):
        title = overlay.get("name") or overlay.get("profile") or f"number {order + 1}"
        try:
            tried = bench.overlaid(request, overlay)
            wrong = [message for _, message in profiles.validate(tried)]
        except ValueError as problem:
            wrong = [str(problem)]
        if wrong:
            problems += [f"{title}: {message}" for message in wrong]
            continue
        resolved = profiles.resolve(tried)
        context = bench.context(host, run, resolved, overlay, order, facts)
        if context["candidate"] in names:
            problems.append(f"{title}: two candidates are called {context['candidate']}; give them names")
        names.add(context["candidate"])
        found.append({"resolved": resolved, "context": context})
    if not wanted:
        problems.append("the list is empty; write e.g. [{profile: tp8}, {profile: ep4}]")
    if problems:
        raise AnsibleFilterError("sglang_benchmark_candidates: " + "; ".join(problems))
    return found


def missing(found: Sequence[Mapping[str, Any]], state: Mapping[str, Any], instance: str) -> list[str]:
    """What a host lacks for its candidates; `state` is what sglang_state says."""
    facts = (state.get("instances") or {}).get(instance)
    if facts is None:
        return [f"instance {instance} is not on the host: deploy it first, it is what the host returns to"]
    release = facts.get("release") or {}
    if not facts.get("serving") and not facts.get("trial"):
        return [f"{instance} is {facts.get('condition')}: deploy it first, the host has to serve what it returns to"]
    lacks = []
    engine = found[0]["resolved"]["engine"]
    runs = release.get("engine") or {}
    if (runs.get("version"), runs.get("build")) != (engine["version"], engine["build"]):
        lacks.append(f"the host runs SGLang {runs.get('version')}, the inventory asks for {engine['version']}: deploy")
    for item in found:
        resolved = item["resolved"]
        weights = [(resolved["model"]["name"], resolved["model"]["revision"])]
        if resolved["drafter"]["algorithm"]:
            weights.append((resolved["drafter"]["model"], resolved["drafter"]["revision"]))
        for name, revision in weights:
            folder = (state.get("models") or {}).get(states.model_dirname(str(name))) or {}
            if not (folder.get(revision) or {}).get("complete"):
                lacks.append(f"{name} {str(revision)[:12]} is not on the host whole: run playbooks/fetch-weights.yml")
    return list(dict.fromkeys(lacks))


class FilterModule:
    """Ansible's way to find filters."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {
            "sglang_bench_candidates": candidates,
            "sglang_bench_missing": missing,
            "sglang_bench_order": bench.in_order,
            "sglang_bench_prompts": bench.prompts_of,
            "sglang_bench_prompts_mark": bench.prompts_mark,
            "sglang_bench_requests": bench.requests_at,
        }
