"""What a rollout did, from its events: one document, as data, as Markdown, and as the geometry of its timeline. Pure.

Events are what rollout_record writes, one JSON object each, oldest first: {schema, event, at, ...}. `at` is ISO 8601
UTC; `host` is there where the event is about one.

begin        rollout, playbook, user, controller, continues (ids), hosts in their order, batches (sizes)
batch        number, of, hosts
enter, leave host, phase: its work in a phase of PHASES began, ended; worked is false where every task was skipped
before       host, instances: {name: {release, engine, profile, state}}
switch       host, instance, release, engine, profile, restarted
attempt      host, instance, unit, outcome, phase, seconds, cause, summary, phases, accept_length, tokens_per_second
settings     host, settings: what a fallback set for the attempt before this event
turn         host: it had its turn
failure      host, task, message
unreachable  host, address, message
line         host, instances: the lines of the final table
end          outcome (ended, interrupted), rerun: the command that finishes the rest, or null; continued_by
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import plan

SCHEMA = 1

# Phases of a host's turn in their order: title and colour. The colours keep apart for eyes that see no red or green.
PHASES = {
    "drain": ("drain", "#9d7660"),
    "host": ("host", "#79706e"),
    "environment": ("environment", "#4e79a7"),
    "weights": ("weights", "#76b7b2"),
    "switch": ("switch", "#59626b"),
    "load": ("load and gate", "#f28e2b"),
    "join": ("join", "#499894"),
    "soak": ("soak", "#edc948"),
    "return": ("return to the release before", "#b6539d"),
}
_ROLES = {
    "gpu_host": "host",
    "sglang_venv": "environment",
    "model_weights": "weights",
    "sglang_service": "switch",
    "sglang_router": "join",
}
_ACTIONS = {"sglang_wait": "load", "sglang_drain": "drain"}
NAMED = 8  # hosts of a batch that are named one by one
# Files of tasks whose tasks are a phase, whatever they do, by the first word of their names (return_failed: return).
_FILES = {
    "give": "return",
    "return": "return",
    "rollback": "return",
    "soak": "soak",
    "leave": "drain",
    "join": "join",
    "stay": "join",
}
# Ends of a host's turn, the worst first.
UNFINISHED = ("failed", "rolled back", "unreachable", "cut short", "at work", "waiting")
OUTCOMES = (*UNFINISHED, "degraded", "done", "as it was")


def phase_of(action: str, role: str, task: str) -> str | None:
    """Which phase a task belongs to; None for what is no work on a host."""
    prefix = task.rpartition(" : ")[2].partition(" | ")[0]
    return _FILES.get(prefix.partition("_")[0]) or _ACTIONS.get(action.rpartition(".")[2]) or _ROLES.get(role)


def moment(text: str) -> float:
    """Seconds since 1970 of an event."""
    return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%f%z").timestamp()


def build(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report of one rollout. Times are seconds since its first event, and never run backwards."""
    begins = [event for event in events if event["event"] == "begin"]
    first = begins[0] if begins else {}
    last_begin = begins[-1] if begins else {}
    origin = moment(str(events[0]["at"])) if events else 0.0
    hosts: dict[str, dict[str, Any]] = {}
    batches: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    end: Mapping[str, Any] = {}
    now = shift = 0.0
    for event in events:
        when = round(moment(str(event["at"])) - origin, 3)
        kind = event["event"]
        if kind == "begin":
            # Within a run times come from one monotonic clock; between two the wall clock may have been set back.
            shift = max(0.0, now - when)
            _close(hosts, runs[-1]["end"] if runs else now, cut=True)
            runs.append({"rollout": event["rollout"], "begin": when + shift, "end": now, "outcome": "interrupted"})
            for name in event["hosts"]:
                # It takes a turn, again maybe: how an earlier one ended is history.
                hosts.setdefault(name, _host(name)).update(failure=None, unreachable=None, had_turn=False)
            end = {}
        # The end of a host's work is told when its next task begins, which may be after others' events.
        when = max(0.0, round(when + shift, 3))
        now = max(now, when)
        if kind == "batch":
            batches.append({"number": event["number"], "of": event["of"], "hosts": list(event["hosts"]), "begin": when,
                            "run": len(runs) - 1})  # fmt: skip
        elif kind == "end":
            end = event
        if "host" in event:
            _tell(hosts.setdefault(str(event["host"]), _host(str(event["host"]))), event, when, batches)
        if runs:
            runs[-1]["end"] = now
            runs[-1]["outcome"] = "interrupted" if kind != "end" else event["outcome"]
    if runs and not end:
        runs[-1]["outcome"] = "running"
    _close(hosts, now, cut=bool(end))
    for host in hosts.values():
        _judge(host, bool(end))
    found = list(hosts.values())
    counts = {word: sum(1 for host in found if host["outcome"] == word) for word in OUTCOMES}
    return {
        "schema": SCHEMA,
        "rollout": last_begin.get("rollout"),
        "continues": last_begin.get("continues"),
        "playbook": first.get("playbook"),
        "user": last_begin.get("user"),
        "controller": last_begin.get("controller"),
        "began_at": first.get("at"),
        "ended_at": end.get("at"),
        "seconds": now,
        "outcome": _outcome(end, counts),
        "counts": {word: count for word, count in counts.items() if count},
        "runs": runs,
        "batches": batches,
        "hosts": found,
        "rerun": end.get("rerun"),
        "continued_by": end.get("continued_by"),
    }


def _host(name: str) -> dict[str, Any]:
    return {
        "host": name, "outcome": None, "batch": None, "begin": None, "end": None, "seconds": None, "bars": [],
        "instances": {}, "attempts": [], "causes": [], "fallback": None, "failure": None, "unreachable": None,
        "had_turn": False,
    }  # fmt: skip


def _instance(host: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = host["instances"].setdefault(name, _nothing())
    return found


def _nothing() -> dict[str, Any]:
    return {"before": None, "after": None, "line": None}


def _tell(host: dict[str, Any], event: Mapping[str, Any], now: float, batches: Sequence[Mapping[str, Any]]) -> None:
    """Add one event to what is known of its host."""
    kind = event["event"]
    if kind == "enter":
        host["begin"] = now if host["begin"] is None else host["begin"]
        host["batch"] = next((one["number"] for one in reversed(batches) if host["host"] in one["hosts"]), None)
        host["bars"].append({"phase": event["phase"], "begin": now, "end": None, "cut": False})
    elif kind == "leave":
        for bar in host["bars"]:
            if bar["end"] is None:
                bar["end"] = now
        if event.get("worked", True):
            host["end"] = now
        else:
            host["bars"] = host["bars"][:-1]
    elif kind == "before":
        for name, facts in event["instances"].items():
            instance = _instance(host, name)
            instance["before"] = instance["before"] or dict(facts)
    elif kind == "switch":
        _instance(host, event["instance"])["after"] = {
            key: event.get(key) for key in ("release", "engine", "profile")
        }
    elif kind == "attempt":
        kept = ("instance", "unit", "outcome", "phase", "seconds", "cause", "summary", "phases", "accept_length",
                "tokens_per_second")  # fmt: skip
        host["attempts"].append({**{key: event.get(key) for key in kept}, "settings": {}, "at": now})
    elif kind == "settings" and host["attempts"]:
        host["attempts"][-1]["settings"] = dict(event["settings"])
    elif kind == "turn":
        host["had_turn"] = True
    elif kind == "failure":
        host["failure"] = {"task": event.get("task"), "message": event.get("message")}
    elif kind == "unreachable":
        host["unreachable"] = {"address": event.get("address"), "message": event.get("message")}
    elif kind == "line":
        for name, line in event["instances"].items():
            _instance(host, name)["line"] = dict(line)


def _close(hosts: Mapping[str, dict[str, Any]], now: float, cut: bool) -> None:
    """No more is known of bars that are open: they were `cut` short, or still go on."""
    for host in hosts.values():
        for bar in host["bars"]:
            if bar["end"] is None:
                bar.update(end=now, cut=cut)
                host["end"] = now


def _judge(host: dict[str, Any], over: bool) -> None:
    """One word for how the host's turn ended or stands, and the sums that stand beside it."""
    words = {str((instance["line"] or {}).get("state")) for instance in host["instances"].values()}
    # What did not last after its gate went back as well, and serves again.
    went_back = any(bar["phase"] == "return" for bar in host["bars"]) and host["attempts"][-1:]
    if host["unreachable"]:
        word = "unreachable"
    elif "rolled back" in words or (host["failure"] and went_back and went_back[0]["outcome"] == "ready"):
        word = "rolled back"
    elif host["failure"] or "failed" in words:
        word = "failed"
    elif host["had_turn"]:
        word = "degraded" if "degraded" in words else "done"
    elif host["bars"]:
        word = "cut short" if over or host["bars"][-1]["cut"] else "at work"
    elif words - {"None", "waiting"}:
        word = "as it was"
    else:
        word = "waiting"
    host["outcome"] = word
    if host["begin"] is not None and host["end"] is not None:
        host["seconds"] = round(host["end"] - host["begin"], 3)
    causes = [item["cause"] for item in host["attempts"] if item["cause"] and item["outcome"] != "ready"]
    host["causes"] = list(dict.fromkeys(causes))
    served = [item["settings"] for item in host["attempts"] if item["outcome"] == "ready"]
    settings = served[-1] if served else {}
    host["fallback"] = ", ".join(f"{name}: {value}" for name, value in sorted(settings.items())) or None


def _outcome(end: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """running (or killed: its events simply end), interrupted (another run continues it), failed, or done."""
    if not end:
        return "running"
    if end["outcome"] != "ended":
        return str(end["outcome"])
    return "failed" if any(counts[word] for word in UNFINISHED) else "done"


# ---------------------------------------------------------------------------------------------------------------------
# What a person reads


def tally(report: Mapping[str, Any]) -> str:
    """`5 hosts: 1 rolled back, 3 waiting, 1 done`."""
    count = len(report["hosts"])
    counts = ", ".join(f"{number} {word}" for word, number in report["counts"].items())
    return f"{count} host{'' if count == 1 else 's'}: {counts or 'none'}"


def batch_line(report: Mapping[str, Any]) -> str:
    """`rollout  batch 2 of 3: gpu-02, gpu-03  (1 done, 2 waiting after it)`, when a batch begins."""
    batch = report["batches"][-1]
    names = batch["hosts"]
    who = ", ".join(names) if len(names) <= NAMED else f"{len(names)} hosts, {names[0]} to {names[-1]}"
    rest = {host["host"]: host["outcome"] for host in report["hosts"] if host["host"] not in names}
    counts = [f"{list(rest.values()).count(word)} {word}" for word in OUTCOMES if word in rest.values()]
    return f"rollout  batch {batch['number']} of {batch['of']}: {who}" + (f"  ({', '.join(counts)})" if counts else "")


def release_text(facts: Mapping[str, Any] | None) -> str:
    """`sglang 0.5.20, ep8+dflash, 0a1b2c3d4e5f`."""
    parts = [str(facts[key]) for key in ("engine", "profile", "release") if facts.get(key)] if facts else []
    return ", ".join(parts)


def attempt_text(attempt: Mapping[str, Any]) -> str:
    """`crashed in warmup after 2:03: cuda_graph_replay_failure`, `ready after 3:30 (sglang_cuda_graph: disabled)`."""
    text = str(attempt["outcome"] or "no answer")
    if attempt["outcome"] != "ready" and attempt["phase"]:
        text += f" in {attempt['phase']}"
    text += f" after {plan.duration(attempt['seconds'])}" if attempt["seconds"] is not None else ""
    text += f": {attempt['cause']}" if attempt["cause"] and attempt["outcome"] != "ready" else ""
    settings = ", ".join(f"{name}: {value}" for name, value in sorted(attempt["settings"].items()))
    return text + (f" ({settings})" if settings else "")


def rows(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """The table of hosts and instances, in words; Markdown and HTML show the same one."""
    found = []
    for host in report["hosts"]:
        notes = [host["failure"]["message"]] if host["failure"] else []
        if host["unreachable"]:
            notes.append(f"{host['unreachable']['address']}: {host['unreachable']['message']}")
        for name, instance in sorted((host["instances"] or {"": _nothing()}).items()):
            line = instance["line"] or {}
            attempts = [item for item in host["attempts"] if item["instance"] in (name, None)]
            found.append({
                "host": host["host"],
                "instance": name,
                "outcome": host["outcome"],
                "before": release_text(instance["before"]),
                "after": release_text(instance["after"]) or "unchanged",
                "took": plan.duration(host["seconds"]) if host["seconds"] is not None else "",
                "attempts": "; ".join(attempt_text(item) for item in attempts),
                "fallback": host["fallback"] or "",
                "note": "; ".join(str(part) for part in [*notes, line.get("note")] if part),
            })
            notes = []
    return found


COLUMNS = (
    ("host", "host"), ("instance", "instance"), ("outcome", "outcome"), ("before", "before"), ("after", "after"),
    ("took", "took"), ("attempts", "attempts"), ("fallback", "fallback"), ("note", "note"),
)  # fmt: skip


def cell(text: Any) -> str:
    """A text inside a Markdown table: one line, and nothing of it is markup."""
    line = " ".join(str(text).split())
    for character in "\\`*_[]<>|#&~":
        line = line.replace(character, "\\" + character)
    return line


def markdown(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        f"# Rollout {cell(report['rollout'])}",
        "",
        f"{cell(report['outcome'])}: {tally(report)}",
        "",
        f"- playbook {cell(report['playbook'])}, by {cell(report['user'])} on {cell(report['controller'])}",
        f"- {report['began_at']} to {report['ended_at'] or 'no end yet'}, {plan.duration(report['seconds'])}",
    ]
    for run in report["runs"][:-1]:
        lines.append(f"- continues {cell(run['rollout'])}, which ended without giving its hosts back")
    lines += [
        "",
        "| " + " | ".join(title for _, title in COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(cell(row[key]) for key, _ in COLUMNS) + " |" for row in rows(report)),
    ]
    if report["batches"]:
        lines += ["", "| batch | begin | hosts |", "|---|---|---|"]
        lines += [
            f"| {one['number']} of {one['of']} | {plan.duration(one['begin'])} | {cell(', '.join(one['hosts']))} |"
            for one in report["batches"]
        ]
    if report["rerun"]:
        lines += ["", "This finishes the rest:", "", "    " + " ".join(str(report["rerun"]).split())]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# The timeline

WIDTH, LABEL, ROW, TOP = 1000, 170, 22, 26


def picture(report: Mapping[str, Any]) -> dict[str, Any]:
    """Where everything of the timeline stands, in units of its SVG: hosts as rows, phases as bars."""
    span = max(float(report["seconds"]), 1.0)
    scale = (WIDTH - LABEL - 10) / span
    place = {host["host"]: index for index, host in enumerate(report["hosts"])}

    def x(seconds: float) -> float:
        return round(LABEL + seconds * scale, 1)

    bars = [
        {
            "x": x(bar["begin"]), "y": TOP + place[host["host"]] * ROW + 4,
            "width": max(1.0, round((bar["end"] - bar["begin"]) * scale, 1)), "height": ROW - 8,
            "colour": PHASES[bar["phase"]][1], "cut": bar["cut"],
            "title": f"{host['host']}: {PHASES[bar['phase']][0]}, {bar['end'] - bar['begin']:.1f} s"
                     + (", cut short" if bar["cut"] else ""),
        }
        for host in report["hosts"] for bar in host["bars"]
    ]  # fmt: skip
    step = next((size for size in _STEPS if span / size <= 10), _STEPS[-1])
    ticks = [{"x": x(second), "text": plan.duration(second)} for second in range(0, int(span) + 1, step)]
    used = {bar["phase"] for host in report["hosts"] for bar in host["bars"]}
    return {
        "width": WIDTH,
        "height": TOP + len(report["hosts"]) * ROW + 8,
        "top": TOP,
        "rows": [
            {"y": TOP + index * ROW, "name": host["host"], "outcome": host["outcome"]}
            for index, host in enumerate(report["hosts"])
        ],
        "row": ROW,
        "bars": bars,
        "ticks": ticks,
        # A run after the first begins where another one was cut off.
        "breaks": [x(run["begin"]) for run in report["runs"][1:]],
        "legend": [{"title": title, "colour": colour} for key, (title, colour) in PHASES.items() if key in used],
    }


_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)


def hosts_with(report: Mapping[str, Any], outcomes: Iterable[str]) -> list[str]:
    """Hosts whose turn ended so."""
    wanted = set(outcomes)
    return [host["host"] for host in report["hosts"] if host["outcome"] in wanted]
