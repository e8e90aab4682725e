"""From a request (profile, overlays, release) to the engine's command line and environment: one pure function.

`resolve` raises ConfigError at the first invalid value, `validate` returns every one of them. Neither reads anything
but its argument, so a plan needs no host, and the same request always gives the same unit.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import known_issues, profile_checks, profile_table, releases
from .profile_checks import (
    BUILDS,
    CUDA_GRAPH,
    DEFAULTS,
    DRAFTERS,
    KNOWN_ISSUES,
    ConfigError,
    Problems,
    Value,
    arguments,
    boolean,
    check_environment,
    check_gpus,
    check_host,
    check_models,
    check_nodes,
    check_numa_nodes,
    check_numbers,
    check_profile,
    check_version,
    check_words,
    cuda_graph_value,
    integer,
    key_of,
    known_profiles,
    model_directory,
    suggestion,
    unset,
    variable_of,
)

__all__ = [
    "ConfigError", "conflicting_units", "known_profiles", "overlaps", "resolve", "suggestion", "validate",
    "variable_of",
]  # fmt: skip

ENTRY_POINT = ("-m", "sglang.launch_server")


@dataclasses.dataclass
class _Plan:
    """A checked request on its way to a result."""

    request: dict[str, Any]
    version: releases.Version
    profile: str
    row: dict[str, Any]
    tp: int
    pp: int
    ep: int
    dp: int
    dp_attention: bool
    extra: dict[str, Value]
    dropped: list[str]
    profile_options: dict[str, Value]
    environment: dict[str, str]
    effective: str
    reason: str
    issues: list[dict[str, Any]]
    choices: list[dict[str, Any]]
    warnings: list[str]
    nodes: int = 1
    alarms: list[str] = dataclasses.field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * (1 if self.dp_attention else self.dp)


def _with_defaults(request: Mapping[str, Any]) -> dict[str, Any]:
    full = {**DEFAULTS, **{key: value for key, value in request.items() if value is not None}}
    full["cuda_graph"] = cuda_graph_value(full["cuda_graph"])
    if full["drafter"] is False:  # `sglang_drafter: no` is a boolean to YAML
        full["drafter"] = "none"
    return full


def _apply_overrides(request: dict[str, Any], problems: Problems) -> tuple[dict[str, Any], list[str]]:
    """The request as its recorded fallback changes it, and that said in words."""
    changed = dict(request)
    notes: list[str] = []
    if not isinstance(request["overrides"], Mapping):
        problems.add("sglang_overrides", "sglang_overrides is not a mapping; leave it to the host's record")
        return changed, notes
    for variable, value in request["overrides"].items():
        key = key_of(variable)
        if variable.startswith("sglang_wait_"):  # of the wait, not of the engine
            continue
        if key is None:
            problems.add(
                variable,
                f"{variable}: a recorded fallback sets it, but no engine setting has that name; remove the record",
            )
            continue
        value = cuda_graph_value(value) if key == "cuda_graph" else value
        before = changed[key]
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = {**before, **value}
        if value != before:
            changed[key] = value
            shown = before if not unset(before) else "unset"
            notes.append(f"degraded: {variable} is {value} instead of {shown}, by a recorded fallback")
    return changed, notes


def _prepare(raw: Mapping[str, Any], problems: Problems) -> _Plan | None:
    """Check everything; a plan where nothing stands in the way."""
    asked = _with_defaults(raw)
    unknown = [key for key in asked if key not in DEFAULTS]
    for key in unknown:
        problems.add(variable_of(key), f"{variable_of(key)}: no such setting{suggestion(key, DEFAULTS)}")
    for variable, message in asked["errors"]:
        problems.add(variable, message)
    request, notes = _apply_overrides(asked, problems)
    check_words(request, problems)
    check_numbers(request, problems)
    version = check_version(request, problems)
    check_models(request, problems)
    check_host(request, problems)
    check_numa_nodes(request, problems)
    profile = check_profile(request, problems)
    environment = check_environment("sglang_environment", request["environment"], problems)
    if version is None or profile is None or request["build"] not in BUILDS or request["drafter"] not in DRAFTERS:
        return None
    name, row, sizes = profile
    extra, dropped = arguments("sglang_extra_args", request["extra_args"], version, request["drafter"], problems)
    options, _ = arguments("sglang_profiles", row.get("options"), version, request["drafter"], problems)
    environment = {**check_environment("sglang_profiles", row.get("environment"), problems), **environment}
    merged = {**options, **extra}
    attention_dp = merged.get("attn-dp-size")
    plan = _Plan(
        request=request,
        version=version,
        profile=name,
        row=row,
        tp=sizes["tp"],
        pp=sizes["pp"],
        ep=sizes["ep"],
        dp=sizes["dp"],
        dp_attention="enable-dp-attention" in merged or attention_dp not in (None, "1"),
        extra=extra,
        dropped=dropped,
        profile_options=options,
        environment=environment,
        effective="enabled",
        reason="",
        issues=[],
        choices=[],
        warnings=notes,
    )
    plan.nodes = check_nodes(request, name, plan.tp * plan.pp, problems)
    _check_standby(asked, problems)
    check_gpus(request, plan.ranks // plan.nodes, problems)
    if request["cuda_graph"] in CUDA_GRAPH and request["known_issues"] in KNOWN_ISSUES:
        _weigh(plan, asked, problems)
    _remark(plan, asked)
    return plan


def _check_standby(asked: Mapping[str, Any], problems: Problems) -> None:
    """The profiles that a host may run besides: each a request of its own. What is wrong with all is said once."""
    variable = variable_of("standby")
    if not isinstance(asked["standby"], (list, tuple)):
        problems.add(variable, f"{variable} is not a list; write e.g. [tp8, ep4]")
        return
    seen: set[str] = set()
    for request in asked["standby"]:
        if not isinstance(request, Mapping):
            problems.add(variable, f"{variable}: {request!r} names no profile; write e.g. [tp8, ep4]")
            continue
        profile = str(request.get("profile"))
        if profile in seen:
            problems.add(variable, f"{variable}: {profile} is listed twice; a profile is one unit of an instance")
        seen.add(profile)
        for _, message in validate(request):
            if message not in (known for _, known in problems.found):
                problems.add(variable, f"{variable}: {profile}: {message}")


def _setup(plan: _Plan, graphs: str) -> known_issues.Setup:
    options = {name: True if value is None else value for name, value in {**plan.profile_options, **plan.extra}.items()}
    return known_issues.Setup(
        version=plan.version,
        build=plan.request["build"],
        tp=plan.tp,
        pp=plan.pp,
        ep=plan.ep,
        dp=plan.dp,
        drafter=plan.request["drafter"],
        graphs=graphs,
        a2a=str(options.get("moe-a2a-backend", "none")),
        dp_attention=plan.dp_attention,
        gpu_architecture=str(plan.request["gpu_architecture"] or ""),
        attention_backend=str(plan.request["attention_backend"] or ""),
        max_running_requests=integer(plan.request["max_running_requests"]),
        options=options,
        environment=plan.environment,
    )


def _weigh(plan: _Plan, asked: Mapping[str, Any], problems: Problems) -> None:
    """Decide about CUDA graphs and apply the table of known issues."""
    request = plan.request
    mode = request["known_issues"]
    explicit = request["cuda_graph"] != "auto"
    plan.effective = request["cuda_graph"] if explicit else "enabled"
    if request["cuda_graph"] != asked["cuda_graph"]:
        plan.reason = "a recorded fallback"
    elif explicit:
        plan.reason = "asked for"
    else:
        plan.reason = "no known issue stands against it"
    if request["build"] == "cpu":
        if explicit and plan.effective != "disabled":
            plan.warnings.append(f"sglang_cuda_graph: {plan.effective} has no effect, the cpu build has no CUDA graphs")
        plan.effective, plan.reason = "disabled", "the cpu build has no CUDA graphs"
    for issue in known_issues.ISSUES:
        if not issue.applies(_setup(plan, plan.effective)):
            continue
        choices = [choice._asdict() for choice in issue.choices]
        if issue.action == "refuse":
            better = (
                "; ".join(f"{_assignment(choice['set'])} ({choice['summary']})" for choice in choices)
                or "leave the option out"
            )
            problems.add(issue.variable, f"{issue.variable}: {issue.summary} ({issue.effect}). Write instead: {better}")
            continue
        applied = _avoid(plan, issue, mode, explicit)
        plan.issues.append(
            {
                "id": issue.id,
                "summary": issue.summary,
                "releases": issue.releases,
                "effect": issue.effect,
                "source": issue.source,
                "action": issue.action,
                "applied": applied,
                "done": issue.done if applied else "",
                "choices": choices,
            }
        )
        if issue.action == "avoid":
            in_effect = _in_effect(plan)
            plan.choices += [c for c in choices if c not in plan.choices and not _holds(c["set"], in_effect)]
        if not applied and mode != "ignore":
            loud = issue.action == "avoid"
            text = f"{issue.summary}: {issue.effect}"
            if loud:
                obeyed = explicit and "graphs" in issue.avoid and mode == "avoid"
                why = f"sglang_cuda_graph is {request['cuda_graph']}" if obeyed else f"sglang_known_issues is {mode}"
                better = "; ".join(_assignment(choice["set"]) for choice in choices)
                text = f"KNOWN TO FAIL, and done because {why}: {text}. Better: {better}"
                plan.alarms.append(text)
            plan.warnings.append(text)


def _in_effect(plan: _Plan) -> dict[str, Any]:
    return {
        "sglang_version": str(plan.version),
        "sglang_profile": plan.profile,
        "sglang_drafter": plan.request["drafter"],
        "sglang_cuda_graph": plan.effective,
        "sglang_environment": plan.environment,
        "sglang_extra_args": plan.extra,
    }


def _holds(wanted: Mapping[str, Any], in_effect: Mapping[str, Any]) -> bool:
    """Whether a choice's settings are what runs anyway."""
    for name, value in wanted.items():
        now = in_effect.get(name)
        same = value.items() <= now.items() if isinstance(value, dict) and isinstance(now, dict) else value == now
        if not same:
            return False
    return True


def _assignment(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}: {json.dumps(value) if isinstance(value, Mapping) else value}" for name, value in values.items()
    )


def _avoid(plan: _Plan, issue: known_issues.Issue, mode: str, explicit: bool) -> bool:
    """Carry out what a row says, where it may be; whether the issue is avoided now."""
    if issue.action != "avoid":
        return False
    if not issue.avoid:  # avoided by the way every command line is written
        return True
    if mode != "avoid":
        return False
    for name, value in issue.avoid.get("environment", {}).items():
        plan.environment.setdefault(name, value)
    if "graphs" in issue.avoid:
        if explicit:
            return False
        plan.effective, plan.reason = issue.avoid["graphs"], issue.summary
    return True


def _remark(plan: _Plan, asked: Mapping[str, Any]) -> None:
    """Warnings that are no known issue of SGLang's."""
    request, warn = plan.request, plan.warnings.append
    if not releases.is_known(str(plan.version)):
        warn(
            f"SGLang {plan.version} is not a release this project knows; its options are taken to be those of "
            f"{releases.nearest(str(plan.version))}"
        )
    port = integer(request["port"])
    if port is not None and 0 < port < 1024:
        warn(f"sglang_port: {port} is below 1024, which an unprivileged service cannot bind; write 1024 or more")
    if request["build"] == "cpu" and plan.version != releases.parse_version("0.5.23"):
        warn(f"the cpu build is tried with SGLang 0.5.23 only, not with {plan.version}")
    if asked["profile"] == "auto":
        warn(f"sglang_profile: auto is {plan.profile}, the one profile of the {request['build']} build")
    elif request["measured"]:
        warn(f"sglang_profile: auto is {request['measured']}")


# --- from plan to result -------------------------------------------------------------------------------------------


def _options(plan: _Plan) -> list[tuple[str, Value]]:
    """The command line: model, name, address, parallelism, drafter, graphs, memory, the rest. Long full names only."""
    request, version = plan.request, str(plan.version)
    build = profile_table.BUILDS[request["build"]]["options"]
    drafter = profile_table.DRAFTERS[request["drafter"]]
    options: dict[str, Value] = {}
    soft: dict[str, Value] = {}

    def own(name: str, value: Any) -> None:
        """An option of a variable: nothing else may change it."""
        options[name] = None if value is None else str(value)

    def default(name: str, value: Any) -> None:
        """An option a person may replace or leave out, where the release has it."""
        if releases.has_option(version, name):
            soft[name] = options[name] = value

    own("model-path", model_path(request))
    own("served-model-name", served_model_name(request))
    if boolean(request["trust_remote_code"]):
        own("trust-remote-code", None)
    own("host", request["host"])
    own("port", integer(request["port"]))
    if "device" in build:
        own("device", build["device"])

    own("tp-size", plan.tp)
    for name, size in (("pp-size", plan.pp), ("ep-size", plan.ep), ("dp-size", plan.dp)):
        if size > 1:
            own(name, size)
    if plan.nodes > 1:
        own("nnodes", plan.nodes)
        own("node-rank", integer(request["node_rank"]))
        own("dist-init-addr", request["dist_init_addr"])
    for name, value in plan.profile_options.items():
        soft[name] = options[name] = value

    if drafter["algorithm"]:
        own("speculative-algorithm", drafter["algorithm"])
        own("speculative-draft-model-path", drafter_path(request))
        for name, value in drafter["options"].items():
            default(name, value)
        if request["drafter"] == "dflash":
            own("speculative-num-draft-tokens", integer(request["block_size"]))

    if request["build"] != "cpu":
        for flag, value in releases.graph_options(version, plan.effective):
            own(flag[2:], value)

    backend = request["attention_backend"] or build.get("attention-backend")
    if backend:
        own("attention-backend", backend)
    if not unset(request["mem_fraction_static"]):
        own("mem-fraction-static", request["mem_fraction_static"])
    if not unset(request["context_length"]):
        own("context-length", integer(request["context_length"]))
    running = (
        request["max_running_requests"]
        if not unset(request["max_running_requests"])
        else build.get("max-running-requests")
    )
    if running:
        own("max-running-requests", integer(running))
    for name, value in build.items():
        if name not in profile_checks.OWNED:
            default(name, None if value is True else value)

    for name, key in (("reasoning-parser", "reasoning_parser"), ("tool-call-parser", "tool_call_parser")):
        if not unset(request[key]):
            own(name, request[key])
    if boolean(request["enable_metrics"]):
        own("enable-metrics", None)
    for name, value in profile_table.OPTIONS.items():
        default(name, value)

    for name in plan.dropped:
        if name in soft:
            del options[name]
    options.update(plan.extra)
    return [("--" + name, value) for name, value in options.items()]


def model_path(request: Mapping[str, Any]) -> str:
    """The target's directory on the host."""
    return str(
        request["model_path"] or model_directory(request["root"], str(request["model"]), str(request["model_revision"]))
    )


def drafter_path(request: Mapping[str, Any]) -> str:
    """The drafter's directory on the host."""
    return str(
        request["drafter_path"]
        or model_directory(request["root"], str(request["drafter_model"]), str(request["drafter_revision"]))
    )


def served_model_name(request: Mapping[str, Any]) -> str:
    """The name clients ask for: the repository's, unless one is given."""
    return str(
        request["served_model_name"] or request["model"] or str(request["model_path"]).rstrip("/").rsplit("/", 1)[-1]
    )


def words(value: Value) -> list[str]:
    """An option's value as words of a command line."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def systemd_word(word: str) -> str:
    """One argument as it must stand in ExecStart= (systemd.service(5): specifiers, variables, quotes, escapes)."""
    text = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if re.search(r"[\s\"';]", text) or not text:
        return '"' + text.replace('"', '\\"') + '"'
    return text


def systemd_lines(options: Sequence[tuple[str, Value]]) -> list[str]:
    """The command line one option a line, quoted for a unit."""
    return [" ".join([flag, *map(systemd_word, words(value))]) for flag, value in options]


def unit_name(instance: str, profile: str) -> str:
    """The unit of an instance's profile. Instances may hold dashes, profiles not: the name stays unambiguous."""
    return f"sglang-{instance}-{profile}.service"


def validate(request: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every invalid value of a request as (variable, message); empty where it can be resolved."""
    problems = Problems()
    _prepare(request, problems)
    return problems.found


def resolve(request: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's configuration for a request; ConfigError for the first value that cannot work."""
    problems = Problems()
    plan = _prepare(request, problems)
    if problems.found or plan is None:
        variable, message = problems.found[0]
        raise ConfigError(variable, message)
    asked = plan.request
    if asked["overrides"]:  # a fallback is no reason to forget what would be better than it
        wished = _prepare({**request, "overrides": {}}, Problems())
        in_effect = _in_effect(plan)
        plan.choices += [c for c in (wished.choices if wished else []) if not _holds(c["set"], in_effect)]
    options = _options(plan)
    build = profile_table.BUILDS[asked["build"]]
    environment = {**profile_table.ENVIRONMENT, **build["environment"], **plan.environment}
    if asked["gpus"]:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in asked["gpus"])
    if asked["build"] == "cpu" and plan.tp > 1:
        # Without it the CPU engine cannot tell which cores belong to which rank, and ends with an AssertionError.
        environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(core) for core in range(plan.tp)))
    argv = list(ENTRY_POINT)
    for flag, value in options:
        argv += [flag, *words(value)]
    dflash = asked["drafter"] == "dflash"
    unit = unit_name(asked["instance"], plan.profile)
    standby = [resolve(other) for other in asked["standby"]]
    return {
        "instance": asked["instance"],
        "profile": plan.profile,
        "profile_summary": str(plan.row.get("summary", "")),
        "unit": unit,
        "standby": [other for other in standby if other["unit"] != unit],
        "engine": {"name": "sglang", "version": str(plan.version), "build": asked["build"]},
        "options": [[flag, value] for flag, value in options],
        "lines": systemd_lines(options),
        "argv": argv,
        "environment": {name: environment[name] for name in sorted(environment)},
        "parallel": {"tp": plan.tp, "pp": plan.pp, "ep": plan.ep, "dp": plan.dp, "ranks": plan.ranks},
        "drafter": {
            "name": asked["drafter"],
            "algorithm": profile_table.DRAFTERS[asked["drafter"]]["algorithm"],
            "block_size": integer(asked["block_size"]) if dflash else None,
            "model": asked["drafter_model"] if asked["drafter"] != "none" else "",
            "revision": asked["drafter_revision"] if asked["drafter"] != "none" else "",
            "path": drafter_path(asked) if asked["drafter"] != "none" else "",
        },
        "model": {"name": asked["model"], "revision": asked["model_revision"], "path": model_path(asked)},
        "cuda_graph": {
            "requested": _with_defaults(request)["cuda_graph"],
            "effective": plan.effective,
            "reason": plan.reason,
        },
        "host": str(asked["host"]),
        "port": integer(asked["port"]),
        "served_model_name": served_model_name(asked),
        "known_issues": plan.issues,
        "choices": plan.choices,
        "warnings": plan.warnings,
        "alarms": plan.alarms,
        "overrides": dict(asked["overrides"] or {}),
        "degraded": any(note.startswith("degraded: ") for note in plan.warnings),
        "nodes": {"count": plan.nodes, "rank": integer(asked["node_rank"]), "address": str(asked["dist_init_addr"])},
        "gpus": 0 if asked["build"] == "cpu" else plan.ranks // plan.nodes,
        "gpu_ids": [integer(gpu) for gpu in asked["gpus"] or []],
        "numa_nodes": [integer(node) for node in asked["numa_nodes"] or []],
    }


def conflicting_units(
    resolved: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]], profiles: Iterable[str]
) -> list[str]:
    """Units that may not run beside this one: those of its own instance, and others' that use one of its GPUs.

    `everyone` are the host's configurations, each with its `standby`; `profiles` are names that the instance can have.
    """
    own = {unit_name(resolved["instance"], name) for name in {*profiles, resolved["profile"]}}
    others = [other for one in everyone for other in (one, *one["standby"])]
    shared = {other["unit"] for other in others if _gpu_set(other) & _gpu_set(resolved)}
    return sorted((own | shared) - {resolved["unit"]})


def _gpu_set(resolved: Mapping[str, Any]) -> set[int]:
    """The GPUs of a configuration; without a list of them it takes the first ones."""
    return set(resolved["gpu_ids"] or range(resolved["gpus"]))


def overlaps(requests: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What several instances of one host may not share: names, ports, GPUs, and NUMA nodes where they are named."""
    problems = Problems()
    names: dict[str, int] = {}
    ports: dict[int, str] = {}
    owners: dict[int, str] = {}
    nodes: dict[int, str] = {}
    for raw in requests:
        request = _with_defaults(raw)
        name = str(request["instance"])
        names[name] = names.get(name, 0) + 1
        if names[name] == 2:
            problems.add(
                "sglang_instances", f"sglang_instances: two instances are called {name}; give each a name of its own"
            )
        port = integer(request["port"])
        if port is not None and ports.setdefault(port, name) != name:
            problems.add(
                "sglang_instances",
                f"sglang_instances: {ports[port]} and {name} both listen on port {port}; give {name} another port",
            )
        if len(requests) > 1 and request["build"] not in ("cpu",) and not request["gpus"]:
            problems.add(
                "sglang_instances",
                f"sglang_instances: {name} has no gpus; say which of the host's GPUs it uses, e.g. gpus: [0, 1, 2, 3]",
            )
        for gpu in request["gpus"] if isinstance(request["gpus"], (list, tuple)) else []:
            number = integer(gpu)
            if number is not None and owners.setdefault(number, name) != name:
                problems.add(
                    "sglang_instances",
                    f"sglang_instances: {owners[number]} and {name} both use GPU {number}; give each its own",
                )
        for node in request["numa_nodes"] if isinstance(request["numa_nodes"], (list, tuple)) else []:
            number = integer(node)
            if number is not None and nodes.setdefault(number, name) != name:
                problems.add(
                    "sglang_instances",
                    f"sglang_instances: {nodes[number]} and {name} are both bound to NUMA node {number}; give each its "
                    "own, or leave numa_nodes out and the kernel places them",
                )
    return problems.found
