"""What a request may hold: its keys, their defaults, the inventory's names for them, and one check per concern.

Every check adds to a list of problems, each naming the inventory's variable and what to write instead, so that a person
gets all of them at once. `profiles.py` turns a request without problems into a configuration.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Union

from . import profile_table, releases, state

Value = Union[None, str, list[str]]

CUDA_GRAPH = ("auto", "enabled", "disabled", "decode_only", "prefill_disabled")
KNOWN_ISSUES = ("avoid", "warn", "ignore")
BUILDS = tuple(profile_table.BUILDS)
DRAFTERS = tuple(profile_table.DRAFTERS)
DEFAULT_ROOT = "/var/lib/sglang"

#: What each key of a request is called in the inventory, where it is not `sglang_<key>`.
_VARIABLES = {
    "instance": "sglang_instances",
    "gpus": "sglang_instances",
    "numa_nodes": "sglang_instances",
    "nnodes": "sglang_nodes",
    "node_rank": "sglang_nodes",
    "dist_init_addr": "sglang_nodes",
    "standby": "sglang_standby_profiles",
    "block_size": "sglang_drafter_block_size",
    "model_path": "sglang_model",
    "drafter_path": "sglang_drafter_model",
    "api_key_error": "sglang_api_key",
    "router": "sglang_behind_router",
}

# Keys that no variable of their own sets.
_NO_VARIABLE = (
    "gpus", "numa_nodes", "nnodes", "node_rank", "dist_init_addr", "instance", "model_path", "drafter_path",
    "api_key_error", "standby",
)  # fmt: skip

DEFAULTS: dict[str, Any] = {
    "instance": "main",
    "version": releases.NEWEST,
    "build": "cuda",
    "profile": "tp8",
    "profiles": {},
    "drafter": "none",
    "cuda_graph": "auto",
    "known_issues": "avoid",
    "host": "127.0.0.1",
    "port": 30000,
    "model_path": "",
    "model": "",
    "model_revision": "",
    "drafter_path": "",
    "drafter_model": "",
    "drafter_revision": "",
    "block_size": 8,
    "served_model_name": "",
    "mem_fraction_static": None,
    "context_length": None,
    "max_running_requests": None,
    "trust_remote_code": False,
    "reasoning_parser": "",
    "tool_call_parser": "",
    "attention_backend": "",
    "enable_metrics": True,
    "extra_args": {},
    "environment": {},
    "api_key_set": False,
    "api_key_error": "",
    "router": False,
    "gpus": [],
    "numa_nodes": [],
    "nnodes": 1,
    "node_rank": 0,
    "dist_init_addr": "",
    "standby": [],
    "gpu_architecture": "",
    "measured": "",  # of `profile: auto`: what the benchmark says, or why it says nothing
    "root": DEFAULT_ROOT,
    "overrides": {},
    "errors": [],
}

#: Options that a variable stands for: extra arguments and profiles may not set them behind its back.
OWNED: dict[str, str] = {
    "model-path": "sglang_model",
    "model": "sglang_model",
    "revision": "sglang_model_revision",
    "served-model-name": "sglang_served_model_name",
    "host": "sglang_host",
    "port": "sglang_port",
    "device": "sglang_build",
    "tp-size": "sglang_profile",
    "tensor-parallel-size": "sglang_profile",
    "pp-size": "sglang_profile",
    "pipeline-parallel-size": "sglang_profile",
    "ep-size": "sglang_profile",
    "expert-parallel-size": "sglang_profile",
    "ep": "sglang_profile",
    "dp-size": "sglang_profile",
    "nnodes": "sglang_nodes",
    "node-rank": "sglang_nodes",
    "dist-init-addr": "sglang_nodes",
    "nccl-init-addr": "sglang_nodes",
    "data-parallel-size": "sglang_profile",
    "speculative-algorithm": "sglang_drafter",
    "speculative-draft-model-path": "sglang_drafter_model",
    "speculative-draft-model": "sglang_drafter_model",
    "speculative-draft-model-revision": "sglang_drafter_revision",
    "speculative-dflash-block-size": "sglang_drafter_block_size",
    "disable-cuda-graph": "sglang_cuda_graph",
    "disable-piecewise-cuda-graph": "sglang_cuda_graph",
    "disable-decode-cuda-graph": "sglang_cuda_graph",
    "disable-prefill-cuda-graph": "sglang_cuda_graph",
    "cuda-graph-backend-decode": "sglang_cuda_graph",
    "cuda-graph-backend-prefill": "sglang_cuda_graph",
    "cuda-graph-config": "sglang_cuda_graph",
    "mem-fraction-static": "sglang_mem_fraction_static",
    "context-length": "sglang_context_length",
    "max-running-requests": "sglang_max_running_requests",
    "trust-remote-code": "sglang_trust_remote_code",
    "reasoning-parser": "sglang_reasoning_parser",
    "tool-call-parser": "sglang_tool_call_parser",
    "attention-backend": "sglang_attention_backend",
    "enable-metrics": "sglang_enable_metrics",
    "api-key": "sglang_api_key",
}

#: Where an option comes from that no variable stands for.
FREE = "sglang_extra_args (or the options of a profile in sglang_profiles)"

#: Options that no inventory may set, with the reason.
_FORBIDDEN = {
    "config": "the engine's arguments stand in the unit; its one configuration file is written by the supervisor",
    "admin-api-key": "it would stand in the process list and the journal for everyone to read",
    "skip-server-warmup": "a server that never generated would call itself ready",
}

#: Variables of the engine's environment that this project sets by other means.
_OWNED_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "it is always 1: the weights role fetches, the engine never does",
    "PYTHONUNBUFFERED": "it is always 1: the journal must see a line when it is written",
    "SGLANG_USE_CPU_ENGINE": "set sglang_build: cpu instead",
    "CUDA_VISIBLE_DEVICES": "set gpus of the instance in sglang_instances instead",
    "SGLANG_LOGGING_CONFIG_PATH": "the supervisor sets it, to keep keys out of the journal",
}

_INSTANCE = re.compile(r"^[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?$")
_PROFILE = re.compile(r"^[a-z0-9][a-z0-9_]{0,30}$")
_REPOSITORY = re.compile(r"^(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*$")
_REVISION = re.compile(r"^[0-9a-f]{40}$")
_WORD = re.compile(r"^[A-Za-z0-9][\w.-]*$")
_OPTION = re.compile(r"^[a-z0-9][a-z0-9-]*$")
_ENVIRONMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_ADDRESS = re.compile(r"^(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-fA-F:]+\]):[0-9]{1,5}$")
_ARCHITECTURE = re.compile(r"^(?:sm_)?\d{2,3}a?$|^\d{1,2}\.\d$")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NUMBER = re.compile(r"^-\d+(?:\.\d+)?$")


class ConfigError(ValueError):
    """A value that cannot work: the inventory's variable, and a message that names it and says what to write."""

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(message)
        self.variable = variable
        self.message = message


def variable_of(key: str) -> str:
    """The inventory's name for a key of a request."""
    return _VARIABLES.get(key, "sglang_" + key)


def key_of(variable: str) -> str | None:
    """The key of a request that an inventory variable sets; None for one that no request has."""
    for key, name in _VARIABLES.items():
        if name == variable and key not in _NO_VARIABLE:
            return key
    key = variable[len("sglang_") :] if variable.startswith("sglang_") else ""
    return key if key in DEFAULTS and key not in _VARIABLES else None


def owner_of(option: str, drafter: str) -> str | None:
    """The variable that stands for an option, or None; of EAGLE3 the number of tokens is only a default."""
    if option == "speculative-num-draft-tokens" and drafter == "dflash":
        return "sglang_drafter_block_size"
    return OWNED.get(option)


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def model_directory(root: str, model: str, revision: str) -> str:
    """Where a repository's revision lies on a host; an engine names the revision, so a new fetch cannot change it."""
    return f"{root}/models/{model.replace('/', '--')}/{revision}"


def cuda_graph_value(value: Any) -> Any:
    """`sglang_cuda_graph` as one of its words: YAML's booleans (also as text, from -e) are enabled and disabled."""
    if isinstance(value, bool):
        return "enabled" if value else "disabled"
    return {"true": "enabled", "false": "disabled"}.get(str(value).lower(), value)


def boolean(value: Any) -> bool | None:
    """A YAML boolean, or its text as `-e name=value` gives it; None for anything else."""
    if isinstance(value, bool):
        return value
    return {"true": True, "yes": True, "false": False, "no": False}.get(str(value).lower())


def integer(value: Any) -> int | None:
    """A whole number, or its text as `-e name=value` gives it; None for anything else (booleans too)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value) else None


def unset(value: Any) -> bool:
    return value is None or value == ""


class Problems:
    """Collects (variable, message) in the order of finding, each pair once."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def add(self, variable: str, message: str) -> None:
        text = message if variable in message else f"{variable}: {message}"
        if (variable, text) not in self.found:
            self.found.append((variable, text))


def check_words(request: Mapping[str, Any], problems: Problems) -> None:
    """Values that are one of a few words, or a name of restricted letters."""
    if not (isinstance(request["instance"], str) and _INSTANCE.match(request["instance"])):
        problems.add(
            "sglang_instances",
            f"instance name {request['instance']!r} does not fit a unit's name: write 1 to 32 of a-z, 0-9 and -, "
            "no - at either end",
        )
    elif request["instance"] in state.RESERVED:
        problems.add("sglang_instances", f"an instance may not be called {request['instance']}; write e.g. main")
    for key, words in (("build", BUILDS), ("drafter", DRAFTERS), ("known_issues", KNOWN_ISSUES)):
        if request[key] not in words:
            hint = suggestion(str(request[key]), words)
            problems.add(
                variable_of(key),
                f"{variable_of(key)}: {request[key]!r} is unknown{hint}; write one of {', '.join(words)}",
            )
    if request["cuda_graph"] not in CUDA_GRAPH:
        hint = suggestion(str(request["cuda_graph"]), CUDA_GRAPH)
        problems.add(
            "sglang_cuda_graph",
            f"sglang_cuda_graph: {request['cuda_graph']!r} is unknown{hint}; write one of {', '.join(CUDA_GRAPH)} "
            "(true and false are taken as enabled and disabled)",
        )
    for key in ("reasoning_parser", "tool_call_parser", "attention_backend"):
        if not unset(request[key]) and not _WORD.match(str(request[key])):
            problems.add(
                variable_of(key),
                f"{request[key]!r} is not a name SGLang could know; write one word, e.g. kimi_k2 or triton",
            )
    for key in ("trust_remote_code", "enable_metrics"):
        if boolean(request[key]) is None:
            problems.add(variable_of(key), f"{request[key]!r} is neither true nor false")
    root = request["root"]
    if not isinstance(root, str) or not root.startswith("/") or CONTROL.search(root):
        problems.add("sglang_root", f"{root!r} is not an absolute path; write e.g. {DEFAULT_ROOT}")
    if not unset(request["gpu_architecture"]) and not _ARCHITECTURE.match(str(request["gpu_architecture"])):
        problems.add(
            "sglang_gpu_architecture", f"{request['gpu_architecture']!r} is no GPU architecture; write e.g. sm_120"
        )


def check_numbers(request: Mapping[str, Any], problems: Problems) -> None:
    port = integer(request["port"])
    if port is None or not 1 <= port <= 65535:
        problems.add(
            "sglang_port", f"sglang_port: {request['port']!r} is not a port; write a number from 1 to 65535, e.g. 30000"
        )
    for key, least, example in (("context_length", 1, 131072), ("max_running_requests", 1, 48)):
        number = integer(request[key])
        if not unset(request[key]) and (number is None or number < least):
            problems.add(
                variable_of(key), f"{request[key]!r} is not a whole number of at least {least}; write e.g. {example}"
            )
    block = integer(request["block_size"])
    if request["drafter"] == "dflash" and (block is None or not 2 <= block <= 1024):
        problems.add(
            "sglang_drafter_block_size",
            f"{request['block_size']!r} is not a block size; write the drafter's own block_size "
            "(2 to 1024; 8 for the Kimi K2 drafters)",
        )
    fraction = request["mem_fraction_static"]
    if not unset(fraction):
        try:
            good = not isinstance(fraction, bool) and 0 < float(fraction) < 1
        except (TypeError, ValueError):
            good = False
        if not good:
            problems.add(
                "sglang_mem_fraction_static", f"{fraction!r} is not a share of the GPU's memory; write e.g. 0.9"
            )


def check_version(request: Mapping[str, Any], problems: Problems) -> releases.Version | None:
    try:
        version = releases.parse_version(str(request["version"]))
    except ValueError as error:
        problems.add("sglang_version", f"sglang_version: {error}")
        return None
    if version < releases.parse_version(releases.OLDEST):
        problems.add(
            "sglang_version",
            f"sglang_version: {version} is older than {releases.OLDEST}, the first release with DFLASH; "
            f"write {releases.OLDEST} to {releases.NEWEST}",
        )
        return None
    return version


def check_models(request: Mapping[str, Any], problems: Problems) -> None:
    """Repositories and revisions, of the target and, where one is asked for, of the drafter."""
    wanted = [("model", "model_revision", "model_path", "moonshotai/Kimi-K2.6")]
    if request["drafter"] in ("dflash", "eagle3"):
        wanted.append(("drafter_model", "drafter_revision", "drafter_path", "SubSir/Kimi-K2.6-DFlash-tmp-long"))
    for key, revision_key, path_key, example in wanted:
        name, path = request[key], request[path_key]
        variable = variable_of(key)
        if unset(name) and unset(path):
            why = (
                f" (sglang_drafter is {request['drafter']}; write sglang_drafter: none to serve without)"
                if key != "model"
                else ""
            )
            problems.add(variable, f"{variable} is not set; write a repository, e.g. {example}{why}")
            continue
        if not unset(name) and not _REPOSITORY.match(str(name)):
            problems.add(variable, f"{variable}: {name!r} is not a repository; write owner/name, e.g. {example}")
        if not unset(path) and (not str(path).startswith("/") or CONTROL.search(str(path))):
            problems.add(variable, f"{variable}: its path {path!r} is not absolute")
        revision = request[revision_key]
        if not unset(name) and (not unset(revision) or unset(path)) and not _REVISION.match(str(revision)):
            shown = f"{revision!r} is not a commit hash" if not unset(revision) else "is not set"
            problems.add(
                variable_of(revision_key),
                f"{variable_of(revision_key)}: {shown}; write the 40 hexadecimal digits of a commit of {name} "
                "(a branch or tag can move)",
            )
    served = request["served_model_name"]
    if not unset(served) and (
        not isinstance(served, str) or re.search(r"[:\s\x00-\x1f]", served) or served.startswith("-")
    ):
        problems.add(
            "sglang_served_model_name",
            f"sglang_served_model_name: {served!r} holds a colon, blank or leading dash (SGLang takes a colon for "
            "a LoRA adapter); write e.g. kimi-k2.6",
        )


def reach_of(host: str) -> str:
    """Who can reach something that listens on `host`: loopback, private, every interface, a public address; empty where
    it is no address."""
    if host == "localhost":
        return "loopback"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if address.is_loopback:
        return "loopback"
    if address.is_unspecified:
        return "every interface"
    return "private" if address.is_private and not address.is_link_local else "a public address"


def check_host(request: Mapping[str, Any], problems: Problems) -> None:
    """Where an engine may listen: without a key loopback, or one private address where a router stands in front."""
    if not unset(request["api_key_error"]):
        problems.add("sglang_api_key", f"sglang_api_key: {request['api_key_error']}")
    host = str(request["host"])
    reach = reach_of(host)
    if not reach:
        problems.add(
            "sglang_host", f"sglang_host: {host!r} is not an IP address; write e.g. 127.0.0.1 or the host's own address"
        )
    if reach in ("", "loopback") or boolean(request["api_key_set"]):
        return
    if reach == "private":
        if not boolean(request["router"]):
            problems.add(
                "sglang_host",
                f"sglang_host: {host} is open to its network and no sglang_api_key is set; set a key, "
                "write 127.0.0.1, or set sglang_behind_router: true where a router is the only one to reach it",
            )
        return
    problems.add(
        "sglang_host",
        f"sglang_host: {host} is {reach} and no sglang_api_key is set; set a key (from a vault), or write 127.0.0.1",
    )


def known_profiles(request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The table's profiles and the inventory's own; an own one may replace a built-in one."""
    own = request["profiles"] if isinstance(request["profiles"], Mapping) else {}
    return {**profile_table.PROFILES, **{str(name): dict(row) for name, row in own.items() if isinstance(row, Mapping)}}


def check_profile(request: Mapping[str, Any], problems: Problems) -> tuple[str, dict[str, Any], dict[str, int]] | None:
    """The profile's row and sizes."""
    if not isinstance(request["profiles"], Mapping):
        problems.add("sglang_profiles", "sglang_profiles is not a mapping; write NAME: {tp: 8, ep: 2}")
    table = known_profiles(request)
    name = str(request["profile"])
    if name == "auto" and request["build"] == "cpu":
        name = "single"  # the only one that the cpu build has
    if name == "auto":
        why = request["measured"] or "no benchmark is recorded; run playbooks/benchmark.yml, or name a profile"
        problems.add("sglang_profile", f"sglang_profile: auto has no answer: {why}")
        return None
    if name not in table:
        problems.add(
            "sglang_profile",
            f"sglang_profile: {name!r} is unknown{suggestion(str(name), table)}; "
            f"write one of {', '.join([*table, 'auto'])}, or describe it in sglang_profiles",
        )
        return None
    row = table[name]
    where = "sglang_profile" if row is profile_table.PROFILES.get(name) else "sglang_profiles"
    if not _PROFILE.match(str(name)):
        problems.add(where, f"{where}: {name!r} does not fit a unit's name; write 1 to 31 of a-z, 0-9 and _")
    for key in row:
        if key not in profile_table.KEYS:
            problems.add(
                where,
                f"{where}: {name} has an unknown key {key!r}{suggestion(str(key), profile_table.KEYS)}; it may have "
                f"{', '.join(profile_table.KEYS)}",
            )
    sizes = {}
    for key in ("tp", "pp", "ep", "dp"):
        size = integer(row.get(key, 1))
        if size is None or size < 1:
            problems.add(where, f"{where}: {name} has {key}: {row.get(key)!r}; write a whole number of at least 1")
            size = 1
        sizes[key] = size
    if sizes["tp"] % sizes["ep"]:
        problems.add(
            where,
            f"{where}: {name} has ep {sizes['ep']}, which does not divide tp {sizes['tp']}; write one that does",
        )
    if request["build"] == "cpu" and (sizes["pp"] > 1 or sizes["ep"] > 1 or sizes["dp"] > 1):
        problems.add(
            "sglang_profile",
            f"sglang_profile: {name} needs a pipeline, experts or replicas, which the cpu build has not; "
            "write single, or a profile with tp alone",
        )
    if request["build"] == "cpu" and request["drafter"] == "eagle3":
        problems.add("sglang_drafter", "sglang_drafter: eagle3 does not run on the cpu build; write dflash or none")
    return str(name), row, sizes


def check_numa_nodes(request: Mapping[str, Any], problems: Problems) -> None:
    """Nodes that an instance's CPUs' memory is bound to; none leaves that to the kernel."""
    nodes = request["numa_nodes"]
    if not isinstance(nodes, (list, tuple)) or any(integer(node) is None for node in nodes):
        problems.add(
            "sglang_instances",
            f"numa_nodes {nodes!r} of {request['instance']} is not a list of NUMA node numbers; write e.g. [0]",
        )


def check_nodes(request: Mapping[str, Any], profile: str, sharded: int, problems: Problems) -> int:
    """How many hosts one engine spans; `sharded` is tp x pp, which SGLang divides among them evenly."""
    count, rank = integer(request["nnodes"]), integer(request["node_rank"])
    if count is None or count < 1 or rank is None or rank >= count:
        problems.add(
            "sglang_nodes",
            f"sglang_nodes: node {request['node_rank']!r} of {request['nnodes']!r} makes no sense; write the inventory "
            "names of the engine's hosts, this one among them, each once",
        )
        return 1
    if sharded % count:
        problems.add(
            "sglang_nodes",
            f"sglang_nodes: profile {profile} has {sharded} ranks, which {count} hosts cannot share evenly; write a "
            f"profile whose tp x pp is a multiple of {count}, e.g. {{tp: {8 * count}}}",
        )
    if count > 1 and not _ADDRESS.match(str(request["dist_init_addr"])):
        problems.add(
            "sglang_nodes",
            f"sglang_nodes: {request['dist_init_addr']!r} is not the address of the first host; set its ansible_host "
            "to a name or address that the others reach",
        )
    return count


def check_gpus(request: Mapping[str, Any], needed: int, problems: Problems) -> None:
    gpus = request["gpus"]
    if gpus is None or gpus == []:
        return
    if (
        not isinstance(gpus, (list, tuple))
        or any(integer(gpu) is None for gpu in gpus)
        or len(set(map(str, gpus))) != len(gpus)
    ):
        problems.add(
            "sglang_instances",
            f"gpus {gpus!r} of {request['instance']} is not a list of distinct GPU numbers; write e.g. [0, 1]",
        )
    elif request["build"] == "cpu":
        problems.add("sglang_instances", f"gpus of {request['instance']}: the cpu build uses none; leave them out")
    elif len(gpus) != needed:
        problems.add(
            "sglang_instances",
            f"gpus of {request['instance']}: {len(gpus)} given, profile {request['profile']} needs {needed}; "
            f"list {needed}",
        )


def arguments(
    where: str, given: Any, version: releases.Version, drafter: str, problems: Problems
) -> tuple[dict[str, Value], list[str]]:
    """`{option: value}` as a person writes it -> what to set (spelled for the release), and what to leave out."""
    if not given:
        return {}, []
    if not isinstance(given, Mapping):
        problems.add(where, f"{where} is not a mapping; write {{option: value}}, true for a bare switch")
        return {}, []
    wanted: dict[str, Value] = {}
    dropped: list[str] = []
    for raw, value in given.items():
        name = str(raw)[2:] if str(raw).startswith("--") else str(raw)
        owner = owner_of(name, drafter)
        if not _OPTION.match(name):
            problems.add(
                where, f"{where}: {raw!r} is not an option's name; write it as SGLang does, e.g. kv-cache-dtype"
            )
            continue
        if owner:
            problems.add(where, f"{where}: {name} is what {owner} sets; set {owner} and leave it out here")
            continue
        if name in _FORBIDDEN:
            problems.add(where, f"{where}: {name} may not be set: {_FORBIDDEN[name]}; leave it out")
            continue
        try:
            flag = releases.option_for(str(version), name)
        except releases.UnsupportedOption as error:
            hint = "" if "it exists in" in error.available else suggestion(name, releases.release_options.OPTIONS)
            problems.add(where, f"{where}: {error}{hint}")
            continue
        option = flag[2:]
        switch = not releases.takes_value(option)
        if value is None or value is False:
            dropped.append(option)
        elif switch and value is not True:
            problems.add(where, f"{where}: {name} is a switch without a value; write {name}: true")
        elif value is True and not switch:
            problems.add(where, f"{where}: {name} takes a value; write {name}: VALUE")
        elif value is True:
            wanted[option] = None
        else:
            text = _option_value(value)
            if text is None:
                problems.add(
                    where,
                    f"{where}: the value of {name} is empty, has a line break or control character, "
                    "or starts with a dash, which SGLang takes for another option",
                )
            else:
                wanted[option] = text
    return wanted, dropped


def _option_value(value: Any) -> Value:
    """An option's value as text, a list as several words; None where it cannot stand on a command line."""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    words = [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)]
    for word in words:
        if not word or CONTROL.search(word) or (word.startswith("-") and not _NUMBER.match(word)):
            return None
    if not words:
        return None
    return words if isinstance(value, (list, tuple)) else words[0]


def check_environment(where: str, given: Any, problems: Problems) -> dict[str, str]:
    if not given:
        return {}
    if not isinstance(given, Mapping):
        problems.add(where, f"{where} is not a mapping; write {{NAME: value}}")
        return {}
    checked = {}
    for name, value in given.items():
        if not _ENVIRONMENT.match(str(name)):
            problems.add(where, f"{where}: {name!r} is not a variable's name; write e.g. NCCL_P2P_LEVEL")
        elif name in _OWNED_ENVIRONMENT:
            problems.add(where, f"{where}: {name} may not be set: {_OWNED_ENVIRONMENT[name]}")
        elif value is None or isinstance(value, (Mapping, list, tuple)) or CONTROL.search(str(value)):
            problems.add(where, f"{where}: {name} is {value!r}; write one line of text")
        else:
            checked[str(name)] = {True: "1", False: "0"}[value] if isinstance(value, bool) else str(value)
    return checked
