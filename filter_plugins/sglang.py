"""Filters of the role `sglang`: from the inventory's variables to requests, to configurations, and to text.

Thin: the work is done by the package `dflash_fleet` in module_utils, which the hosts use too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ansible.module_utils
from ansible.errors import AnsibleFilterError

# A controller-side plugin does not get the project's module_utils the way modules do.
_MODULE_UTILS = str(Path(__file__).resolve().parents[1] / "module_utils")
if _MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_MODULE_UTILS)

from ansible.module_utils.dflash_fleet import (
    bench,
    bench_report,
    choice,
    ladder,
    plan,
    profiles,
    remedies,
    removal,
    words,
)

#: Keys of a request that an inventory gives as `sglang_<...>`, for the whole host or per instance.
PER_INSTANCE = (
    "profile",
    "drafter",
    "cuda_graph",
    "known_issues",
    "host",
    "port",
    "model",
    "model_revision",
    "drafter_model",
    "drafter_revision",
    "block_size",
    "served_model_name",
    "mem_fraction_static",
    "context_length",
    "max_running_requests",
    "trust_remote_code",
    "reasoning_parser",
    "tool_call_parser",
    "attention_backend",
    "enable_metrics",
    "extra_args",
    "environment",
)
PER_HOST = ("version", "build", "profiles", "router", "gpu_architecture", "root")

#: Keys that only an instance has: they have no variable of the whole host.
INSTANCE_ONLY = ("gpus", "numa_nodes")

#: What a profile on standby may not have of its own: it is the same instance with the same model at the same address.
NOT_OF_STANDBY = (
    "instance", "state", "standby_profiles", "host", "port", "model", "model_revision", "served_model_name",
)  # fmt: skip
STATES = ("present", "absent")

#: How an instance spells a key, where it differs from the request's.
_INSTANCE_KEYS = {"drafter_block_size": "block_size", "name": "instance"}


def _native(value: Any) -> Any:
    """Plain dicts, lists and strings: no lazy or tagged types of Ansible's reach the result."""
    if isinstance(value, Mapping):
        return {str(key): _native(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_native(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _api_key_error(key: Any) -> str:
    """What is wrong with a key, without saying what it is."""
    if not isinstance(key, str):
        return "is not text; write it in quotes, in a vault"
    if key.startswith("-"):
        return "starts with a dash, which SGLang takes for an option; write a key that starts with a letter or digit"
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        return "holds blanks or characters that an HTTP header cannot carry; write letters, digits and -_.~+/= only"
    return ""


def sglang_place(
    nodes: Sequence[str] | None, host: str, hostvars: Mapping[str, Mapping[str, Any]], port: Any
) -> dict[str, Any]:
    """Where a host stands among the hosts of an engine that spans several: `nnodes`, `node_rank`, `dist_init_addr`.

    `nodes` are inventory names; the first is the one that the others meet at, and that serves.
    """
    names = [str(name) for name in nodes or []]
    if not names:
        return {}
    known = hostvars[names[0]] if names[0] in hostvars else {}  # noqa: SIM401 - HostVars.get knows no default
    address = str(known.get("ansible_host") or names[0])
    rank = names.index(host) if host in names and len(set(names)) == len(names) else len(names)
    return {"nnodes": len(names), "node_rank": rank, "dist_init_addr": words.endpoint(address, port)}


def sglang_requests(
    variables: Mapping[str, Any],
    api_key_set: bool | None = None,
    place: Mapping[str, Any] | None = None,
    host: str = "",
) -> list[dict[str, Any]]:
    """One request per instance from a mapping of the product's variables (`sglang_*`).

    With no `sglang_instances` the scalars describe the instance `main`; one with `state: absent` is not asked for. An
    instance's own keys replace the scalars;
    its `extra_args` and `environment` are laid over them. The API key itself never gets into a request.
    """
    given = _native(variables)
    key = given.pop("sglang_api_key", "") or ""
    base: dict[str, Any] = {
        name: given[profiles.variable_of(name)]
        for name in PER_INSTANCE + PER_HOST
        if profiles.variable_of(name) in given
    }
    base["api_key_set"] = bool(key) if api_key_set is None else bool(api_key_set)
    base["api_key_error"] = _api_key_error(key) if key else ""
    base.update(_native(place or {}))
    base["errors"] = _fallback_errors(given.get("sglang_fallbacks") or [])
    base["standby_profiles"] = given.get("sglang_standby_profiles") or []
    instances = given.get("sglang_instances") or [{}]
    if not isinstance(instances, list) or not all(isinstance(item, dict) for item in instances):
        wrong = "sglang_instances is not a list of mappings; write - {name: a, profile: ..., port: ...}"
        instances, base["errors"] = [{}], [*base["errors"], ("sglang_instances", wrong)]
    requests = [_with_standby(_instance(base, item)) for item in instances if item.get("state") != "absent"]
    return [_measured(request, given, host) for request in requests]


def _measured(request: dict[str, Any], given: Mapping[str, Any], host: str) -> dict[str, Any]:
    """`profile: auto` as the recorded benchmark answers it: the configuration that was best, or why there is none."""
    if isinstance(request.get("standby"), list):
        request = {**request, "standby": [_measured(other, given, host) for other in request["standby"]]}
    if request.get("profile") != "auto" or request.get("build") == "cpu":
        return request
    folder, wanted = str(given.get("sglang_benchmark_dir") or ""), given.get("sglang_objective", "throughput")
    asked = {**profiles.DEFAULTS, **request}
    try:
        answer = choice.recorded(bench.read_folder(folder) if folder else [], asked, host, wanted)
    except choice.ObjectiveError as problem:
        return {**request, "errors": [*request["errors"], ("sglang_objective", str(problem))]}
    except (bench.ResultError, OSError) as problem:
        return {**request, "measured": str(problem)}
    if answer["best"] is None:
        return {**request, "measured": answer["why"]}
    said = f"{answer['best']}, measured on {', '.join(answer['hosts'])} ({bench_report.conclusion(answer)})"
    return {**bench.overlaid(request, {"profile": answer["profile"], **answer["overlay"]}), "measured": said}


def _fallback_errors(names: Any) -> list[tuple[str, str]]:
    """Fallbacks that the ladder could never take."""
    if not isinstance(names, list):
        return [("sglang_fallbacks", "sglang_fallbacks is not a list; write e.g. [disable_cuda_graph]")]
    known = remedies.ids()
    return [
        (
            "sglang_fallbacks",
            f"sglang_fallbacks: {name!r} {remedies.why_not(name)}{profiles.suggestion(name, known)}; "
            f"a fallback is one of {', '.join(known)}",
        )
        for name in remedies.check_ids([str(name) for name in names])
    ]


def _instance(base: Mapping[str, Any], item: Mapping[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {**base, "instance": "main", "gpus": [], "numa_nodes": [], "errors": list(base["errors"])}
    for spelled, value in item.items():
        name = _INSTANCE_KEYS.get(spelled, spelled)
        if name == "state":
            if value not in STATES:
                wrong = f"sglang_instances: state {value!r} is unknown; write one of {', '.join(STATES)}"
                request["errors"].append(("sglang_instances", wrong))
            continue
        known = {*PER_INSTANCE, *INSTANCE_ONLY, "instance", "standby_profiles"}
        if name not in known or (spelled == name and name in _INSTANCE_KEYS.values()):
            hint = profiles.suggestion(spelled, {*known, *_INSTANCE_KEYS} - set(_INSTANCE_KEYS.values()))
            wrong = f"sglang_instances: an instance has the unknown key {spelled!r}{hint}"
            request["errors"].append(("sglang_instances", wrong))
            continue
        if name in ("extra_args", "environment") and isinstance(value, dict):
            value = {**(base.get(name) or {}), **value}
        request[name] = value
    return request


def _with_standby(request: dict[str, Any]) -> dict[str, Any]:
    """The request with a request in `standby` for each profile that `standby_profiles` names: a name, or a mapping."""
    listed = request.pop("standby_profiles")
    if not isinstance(listed, list):
        return {**request, "standby": listed}
    shared = {key: request[key] for key in INSTANCE_ONLY}
    request["standby"] = []
    for item in listed:
        own = {"profile": item} if isinstance(item, str) else item
        wrong = ""
        if not isinstance(own, dict) or not own.get("profile"):
            wrong = f"sglang_standby_profiles: {item!r} names no profile; write tp8, or {{profile: pp8, drafter: none}}"
        else:
            refused = sorted(key for key in own if _INSTANCE_KEYS.get(key, key) in NOT_OF_STANDBY)
            if refused:
                wrong = f"sglang_standby_profiles: {own['profile']} may have no {', '.join(refused)} of its own"
        if wrong:
            request["errors"].append(("sglang_standby_profiles", wrong))
        else:
            standby = _instance(request, {**shared, **own})
            request["standby"].append({**standby, "instance": request["instance"], "standby": []})
    return request


def sglang_validate(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every invalid value of all requests of a host as `variable: message`, what instances may not share included."""
    found: list[str] = []
    for request in _native(requests):
        for variable, message in profiles.validate(request):
            text = message if message.startswith(variable) else f"{variable}: {message}"
            if len(requests) > 1:
                text = f"{text} (instance {request['instance']})"
            found.append(text)
    found += [message for _, message in profiles.overlaps(_native(requests))]
    return list(dict.fromkeys(found))


def sglang_problem_text(problems: Sequence[str]) -> str:
    """All problems as one message; its first line names the variables, for reports that show only that."""
    named = dict.fromkeys(re.split(r"[: ]", str(problem), maxsplit=1)[0] for problem in problems)
    first = f"Nothing was touched. To be corrected in the inventory: {', '.join(named)}"
    return "\n".join([first, *[f"  - {problem}" for problem in problems]])


def sglang_resolve(request: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The engine's configuration for one request; `overrides` are a recorded fallback's variables, applied last."""
    wanted = _native(request)
    if overrides:
        wanted["overrides"] = {**wanted.get("overrides", {}), **_native(overrides)}
    try:
        return profiles.resolve(wanted)
    except profiles.ConfigError as error:
        raise AnsibleFilterError(error.message) from error


def sglang_resolve_all(
    requests: Sequence[Mapping[str, Any]], overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The configurations of a host's requests; `overrides` are recorded fallbacks by instance."""
    return [sglang_resolve(request, (overrides or {}).get(request["instance"])) for request in requests]


def sglang_plan(hosts: Mapping[str, Mapping[str, Any]]) -> str:
    """The plan of many hosts as text, equal hosts in one block. `hosts`: {name: {resolved, problems, asked, state}}."""
    return plan.render(_native(hosts))


def _why(answer: Mapping[str, Any]) -> str:
    """Why a host has said nothing, in a few words."""
    if answer.get("unreachable"):
        return "does not answer"
    return "" if answer.get("skipped") else " ".join(str(answer.get("msg") or "").split())[:160]


def _recorded(request: Mapping[str, Any], instances: Mapping[str, Any], fallbacks: Sequence[str]) -> dict[str, Any]:
    """What a deployment would begin with: the settings of the rung that this host remembers for the same wish.

    The driver is part of that memory, but a plan does not ask for it: it is taken to be the one of the record.
    """
    found = instances.get(request["instance"]) or {}
    for rung in found.get("rungs") or []:
        driver = (rung.get("key") or {}).get("driver") or None
        if ladder.remembered_rung(found, request, fallbacks, driver) == rung:
            return dict(rung["set"])
    return {}


def _gone(requests: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Instances on a host that a deployment would remove."""
    listed = facts.get("sglang_instances") or []
    return removal.unwanted(found, requests, listed, bool(facts.get("sglang_service_remove_unlisted", True)))


def _gpu_bytes(answer: Mapping[str, Any] | None) -> list[int] | None:
    """Memory of each GPU of a host, by index; None where it was not asked or does not say."""
    listed = (((answer or {}).get("facts") or {}).get("gpus") or {}).get("list") or []
    sizes = [gpu.get("memory_total_bytes") for gpu in listed]
    return [int(size) for size in sizes] if sizes and all(sizes) else None


def sglang_plan_hosts(
    names: Sequence[str], hostvars: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """What `sglang_plan` needs of each host: its variables over the role's defaults, and what it said of itself.

    One call for all hosts: a task of its own per host costs 0.1 s each, which a plan of 500 hosts would feel.
    """
    hosts = {}
    for name in names:
        facts = hostvars[name]
        answer = facts.get("sglang_plan_state") or {}
        state = answer.get("state") or {}
        given = {key: facts.get(key, default) for key, default in defaults.items()}
        place = sglang_place(given.get("sglang_nodes"), str(name), hostvars, given.get("sglang_dist_init_port"))
        requests = sglang_requests(given, place=place, host=str(name))
        problems = sglang_validate(requests)
        instances = state.get("instances") or {}
        fallbacks = facts.get("sglang_fallbacks", defaults.get("sglang_fallbacks")) or []
        recorded = {} if problems else {item["instance"]: _recorded(item, instances, fallbacks) for item in requests}
        hosts[str(name)] = {
            "resolved": [] if problems else sglang_resolve_all(requests, recorded),
            "problems": problems,
            "gone": _gone(requests, facts, instances) if not problems else [],
            "models": state.get("models") or {},
            "venvs": state.get("venvs") or {},
            "gpu_bytes": _gpu_bytes(facts.get("sglang_plan_gpus")),
            "free_bytes": next((item.get("free_bytes") for item in (state.get("filesystems") or {}).values()), None),
            "sizes": facts.get("gpu_host_model_sizes_gb", defaults.get("gpu_host_model_sizes_gb")) or {},
            "venv_sizes": facts.get("gpu_host_venv_sizes_gb", defaults.get("gpu_host_venv_sizes_gb")) or {},
            "asked": bool(state),
            "why": _why(answer),
            "state": instances,
        }
    return hosts


def sglang_plan_problems(hosts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Hosts that cannot be deployed as the inventory stands."""
    return [name for name, host in hosts.items() if host["problems"]]


def sglang_reports(playbooks: str) -> str:
    """Folder for what a run leaves on the controller: as the command `dflash-fleet` says, else beside the playbooks."""
    return os.environ.get("DFLASH_FLEET_REPORTS") or f"{playbooks}/../reports"


def sglang_workers(
    names: Sequence[str], hostvars: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What a router in front of these hosts sends to, [{host, instance, url, key, model}]; from the inventory alone."""
    found = []
    for name in names:
        facts = hostvars[name]
        given = {key: facts.get(key, default) for key, default in defaults.items()}
        for request in sglang_requests(given):
            found.append({
                "host": str(name),
                "instance": request["instance"],
                "url": _worker_url(request, facts, name),
                "key": bool(request["api_key_set"]),
                "model": str(request.get("served_model_name") or request.get("model") or ""),
            })
    return found


def _worker_url(engine: Mapping[str, Any], facts: Mapping[str, Any], name: str) -> str:
    """How a router reaches an engine; `engine` is a request or a release.json, each with its `host` and `port`."""
    address = str(engine["host"])
    if address in ("0.0.0.0", "::"):
        address = str(facts.get("ansible_host") or name)
    return f"http://{words.endpoint(address, engine['port'])}"


def sglang_worker_url(
    name: str,
    hostvars: Mapping[str, Mapping[str, Any]],
    defaults: Mapping[str, Any],
    instance: str,
    release: Mapping[str, Any] | None = None,
) -> str:
    """How routers know an instance of the host `name`, or nothing.

    One that the inventory no longer names is known by the address of its `release`; its successor often has it too.
    """
    for worker in sglang_workers([name], hostvars, defaults):
        if worker["instance"] == instance:
            return str(worker["url"])
    return _worker_url(release, hostvars[name], name) if release else ""


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Any]:
        return {
            "sglang_reports": sglang_reports,
            "sglang_requests": sglang_requests,
            "sglang_place": sglang_place,
            "sglang_validate": sglang_validate,
            "sglang_problem_text": sglang_problem_text,
            "sglang_resolve": sglang_resolve,
            "sglang_resolve_all": sglang_resolve_all,
            "sglang_plan": sglang_plan,
            "sglang_plan_hosts": sglang_plan_hosts,
            "sglang_plan_problems": sglang_plan_problems,
            "sglang_worker_url": sglang_worker_url,
            "sglang_workers": sglang_workers,
        }
