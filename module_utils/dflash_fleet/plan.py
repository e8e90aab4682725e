"""Plans and tables as text for people; pure functions over what `profiles.resolve` returns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import sizes as estimates
from . import words


def duration(seconds: Any) -> str:
    """Seconds as `3:30` or `1:02:03`; `-` for nothing or nonsense."""
    if isinstance(seconds, bool) or seconds is None or seconds == "":
        return "-"
    try:
        total = round(float(seconds))
    except (TypeError, ValueError, OverflowError):
        return "-"
    if total < 0:
        return "-"
    return words.clock(total)


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    return " ".join(str(value).split())


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Any]) -> str:
    """Rows as an aligned text table; a column is a key, or [key, title]. Numbers stand to the right."""
    keys = [column if isinstance(column, str) else column[0] for column in columns]
    titles = [column if isinstance(column, str) else column[1] for column in columns]
    cells = [[_cell(row.get(key)) for key in keys] for row in rows]
    widths = [max(len(line[index]) for line in [titles, *cells]) for index in range(len(keys))]
    numeric = [
        bool(rows)
        and all(isinstance(row.get(key), (int, float)) and not isinstance(row.get(key), bool) for row in rows)
        for key in keys
    ]
    lines = []
    for line in [titles, *cells]:
        padded = [
            text.rjust(width) if right else text.ljust(width) for text, width, right in zip(line, widths, numeric)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def assignment(values: Mapping[str, Any]) -> str:
    """`sglang_profile: tp8` as an inventory would write it."""
    return ", ".join(
        f"{name}: {json.dumps(value) if isinstance(value, Mapping) else value}" for name, value in values.items()
    )


def host_range(names: Sequence[str], limit: int = 6) -> str:
    """Names of equal hosts: all of a few, the first and last of many."""
    if len(names) <= limit:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)} hosts)"


_OWN_ADDRESS = "\0own-address\0"
_TOOK = "\0took {}\0"


def _now(host: Mapping[str, Any], instance: str) -> str:
    """What runs there now, in a line."""
    if not host.get("asked"):
        return f"not asked ({host['why']})" if host.get("why") else "not asked"
    found = (host.get("state") or {}).get(instance) or {}
    condition = found.get("condition") or "absent"
    if condition == "absent":
        return "nothing"
    by_hand = found.get("by_hand")
    release = (by_hand or found).get("release") or {}
    unit = found.get("unit") or release.get("unit") or "no unit"
    version = (release.get("engine") or {}).get("version")
    marks = [f"SGLang {version}"] if version else []
    return ", ".join([unit, *marks, condition, *(["started by hand"] if by_hand else [])])


def changes(result: Mapping[str, Any], release: Mapping[str, Any]) -> list[str]:
    """What differs between a configuration and the release record of what runs, as `what: now -> then`."""
    pairs = (
        ("release", ("engine", "version")),
        ("build", ("engine", "build")),
        ("profile", ("profile",)),
        ("drafter", ("drafter", "name")),
        ("drafter revision", ("drafter", "revision")),
        ("block size", ("drafter", "block_size")),
        ("CUDA graphs", ("cuda_graph", "effective")),
        ("model", ("model", "name")),
        ("model revision", ("model", "revision")),
        ("served name", ("served_model_name",)),
        ("address", ("host",)),
        ("port", ("port",)),
    )
    found = []
    for what, path in pairs:
        now: Any = release
        then: Any = result
        for key in path:
            now = now.get(key) if isinstance(now, Mapping) else None
            then = then.get(key) if isinstance(then, Mapping) else None
        if now != then:
            found.append(f"{what}: {_cell(now)} -> {_cell(then)}")
    return found


def _took(found: Mapping[str, Any]) -> Any:
    """Seconds that the last good start took, or None."""
    return (found.get("ready") or {}).get("seconds")


def forecast(result: Mapping[str, Any], found: Mapping[str, Any], took: str = "") -> list[str]:
    """What switching an instance means: what differs, that a restart follows and how long, which rungs are recorded."""
    if not found.get("release"):
        return ["first deployment of this instance: fetches what is missing, then starts"]
    took = took or duration(_took(found))
    last = f" (the last good start took {took})" if took != "-" else ""
    lines = changes(result, (found.get("by_hand") or found)["release"])
    if lines:
        lines.append(f"a restart follows{last}")
    else:
        lines.append("none in release, profile, drafter, graphs, model and address")
    for rung in found.get("rungs") or []:
        settings = assignment(rung.get("set") or {})
        lines.append(f"recorded fallback {rung.get('remedy')} ({settings}) for {rung.get('cause')}")
    return lines


def _change(host: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Whether a deployment would change what runs, and how long the load took last time."""
    if not host.get("asked"):
        return []
    name = result["instance"]
    found = (host.get("state") or {}).get(name) or {}
    # Hosts that differ only in how long their loads took are equal.
    return forecast(result, found, "" if _took(found) is None else _TOOK.format(name))


def _gone(host: Mapping[str, Any]) -> list[str]:
    """Instances that a deployment would remove, as `sglang_plan_hosts` found them."""
    state = host.get("state") or {}
    return [
        f"  {name}: not in the inventory, would be removed with its state ({_now(host, name)})"
        for name in host.get("gone") or []
        if name in state
    ]


def _issue(issue: Mapping[str, Any]) -> list[str]:
    indent = " " * 21
    if issue["applied"]:
        mark, then = "avoided", issue["done"]
    elif issue["action"] == "avoid":
        mark, then = "KNOWN TO FAIL", "nothing, as asked; see the better choices"
    else:
        mark = "note"
        then = "; ".join(f"{assignment(choice['set'])} ({choice['summary']})" for choice in issue["choices"][:1])
    lines = [f"      {mark:<13}  {issue['summary']} [{issue['id']}]", f"{indent}effect: {issue['effect']}"]
    if then:
        lines.append(f"{indent}{'done' if issue['applied'] else 'set' if mark == 'note' else 'done'}: {then}")
    lines.append(f"{indent}releases: {issue['releases']}; source: {issue['source']}")
    return lines


def _field(name: str, lines: Sequence[str]) -> list[str]:
    return [f"    {name if index == 0 else '':<9} {line}" for index, line in enumerate(lines)]


def _graphs(graphs: Mapping[str, Any]) -> str:
    if graphs["requested"] == graphs["effective"]:
        return f"{graphs['effective']}, as asked"
    return f"{graphs['effective']}; asked for {graphs['requested']}: {graphs['reason']}"


def block(result: Mapping[str, Any], host: Mapping[str, Any]) -> str:
    """One instance's plan."""
    engine, parallel, drafter = (result[key] for key in ("engine", "parallel", "drafter"))
    sizes = " ".join(f"{key} {parallel[key]}" for key in ("tp", "pp", "ep", "dp") if parallel[key] > 1 or key == "tp")
    with_drafter = f" + {drafter['name']}" if drafter["algorithm"] else ""
    gpus = {0: "no GPU", 1: "1 GPU"}.get(result["gpus"], f"{result['gpus']} GPUs")
    ranks = f"{parallel['ranks']} rank{'s' if parallel['ranks'] != 1 else ''}"
    options = [line.replace(f"--host {result['host']}", f"--host {_shown(result['host'])}") for line in result["lines"]]
    command = ["python -m sglang.launch_server \\", *[f"    {line} \\" for line in options[:-1]], f"    {options[-1]}"]
    lines = [
        f"  {result['instance']}: {result['profile']}{with_drafter} on SGLang {engine['version']} ({engine['build']})",
        *_field("now", [_now(host, result["instance"])]),
        *_field("change", [line.replace(result["host"], _shown(result["host"])) for line in _change(host, result)]),
        *_field("unit", [result["unit"]]),
        *_field("standby", [_standby(other) for other in result["standby"]]),
        *_field("parallel", [f"{sizes}; {ranks}, {gpus}"]),
        *_field("graphs", [_graphs(result["cuda_graph"])]),
        *_field("memory", estimates.memory(result, host)),
        *_field("disk", estimates.disk(result, host)),
        *_field("command", command),
        *_field("env", [f"{name}={value}" for name, value in result["environment"].items()]),
    ]
    issues = [line for issue in result["known_issues"] for line in _issue(issue)]
    lines += ["    known issues", *issues] if issues else ["    known issues: none applies"]
    # Known issues stand above with more detail than their warnings have.
    told = [issue["effect"] for issue in result["known_issues"]]
    lines += _field("warning", [text for text in result["warnings"] if not any(effect in text for effect in told)])
    if result["choices"]:
        lines.append("    better choices, cheapest first")
        for number, choice in enumerate(result["choices"], 1):
            lines.append(f"      {number}. {assignment(choice['set']):<32}  {choice['summary']}")
            lines.append(f"         {'cost:':<32}  {choice['cost']}")
    return "\n".join(lines)


def _standby(result: Mapping[str, Any]) -> str:
    """A further profile whose unit is installed: what starts it, and what is known to fail about it."""
    bad = [issue["id"] for issue in result["known_issues"] if issue["action"] == "avoid" and not issue["applied"]]
    graphs = result["cuda_graph"]["effective"]
    with_drafter = f" + {result['drafter']['name']}" if result["drafter"]["algorithm"] else ""
    known = f"; KNOWN TO FAIL: {', '.join(bad)}" if bad else ""
    return f"{result['unit']}: {result['profile']}{with_drafter}, graphs {graphs}{known}"


def _shown(address: str) -> str:
    """Hosts that differ in nothing but their own address are equal."""
    return address if address == "localhost" or address.startswith("127.") or address == "::1" else _OWN_ADDRESS


def _span(hosts: Sequence[Mapping[str, Any]], instance: str) -> str:
    """How long the last good starts of equal hosts took: `3:28 to 3:35`."""
    found = [_took((host.get("state") or {}).get(instance) or {}) for host in hosts]
    texts = [duration(seconds) for seconds in sorted(float(seconds) for seconds in found if seconds is not None)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def render(hosts: Mapping[str, Mapping[str, Any]]) -> str:
    """The plan of many hosts, equal ones in one block.

    `hosts`: {name: {resolved: [...], problems: [...], asked: bool, state: instances of sglang_state, gone: [instances
    that would be removed], and what `sizes` reads: models, venvs, free_bytes, sizes, venv_sizes}}.
    """
    groups: dict[str, list[str]] = {}
    for name, host in hosts.items():
        problems = host.get("problems") or []
        results = host.get("resolved") or []
        if problems:
            text = "\n".join(["  cannot be deployed; nothing was touched", *[f"    {problem}" for problem in problems]])
        else:
            text = "\n".join([*[block(result, host) for result in results], *_gone(host)])
        groups.setdefault(text or "  no instances", []).append(name)
    blocks = []
    for text, names in groups.items():
        addresses = {result["host"] for name in names for result in hosts[name].get("resolved") or []}
        own = addresses.pop() if len(addresses) == 1 else "<each host's own address>"
        text = text.replace(_OWN_ADDRESS, own)
        for instance in {result["instance"] for name in names for result in hosts[name].get("resolved") or []}:
            mark = _TOOK.format(instance)
            if mark in text:
                text = text.replace(mark, _span([hosts[name] for name in names], instance))
        blocks.append(f"{host_range(names)}\n{text}")
    return "\n\n".join(blocks)
