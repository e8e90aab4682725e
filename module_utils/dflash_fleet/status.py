"""One line per host and instance, from what `sglang_state` says: the screen of playbooks/status.yml.

Pure. Rows are data (times ISO 8601, seconds as numbers); `text` makes the screen of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import ladder, plan, preflight, state

COLUMNS = (
    ("host", "host"),
    ("engine", "release"),
    ("instance", "instance"),
    ("profile", "profile"),
    ("state", "state"),
    ("since", "since (UTC)"),
    ("ready_in", "ready in"),
    ("tokens_per_second", "tok/s"),
    ("accept_length", "accept"),
    ("restarts", "restarts"),
    ("last_cause", "last cause"),
    ("drift", "drift"),
    ("note", "note"),
)
# Phases that every rank ends for itself.
RANKED = ("dist_init", "weights", "kv_cache", "graph_capture")
# Left out of the screen where no row has anything to say in them.
OPTIONAL = ("last_cause", "drift", "note")


def rows_of_host(host: str, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of one host; `answer` is the registered result of sglang_state, also where there is none."""
    if answer.get("unreachable"):
        return [row(host, state="unreachable", note=preflight.first_line(answer.get("msg")))]
    if "state" not in answer:
        return [row(host, state="unknown", note=preflight.first_line(answer.get("msg") or "no answer from the probe"))]
    found = answer["state"]
    strangers = [unit["name"] for unit in found.get("other_units") or [] if unit["active_state"] == "active"]
    extra = f"also runs {', '.join(strangers)}" if strangers else ""
    if found.get("systemd_error"):
        return [row(host, state="unknown", note=f"systemd does not answer: {found['systemd_error']}")]
    if not found["instances"]:
        return [row(host, state="absent", note=extra)]
    rows = [instance_row(host, name, facts) for name, facts in sorted(found["instances"].items())]
    rows[0]["note"] = "; ".join(part for part in (rows[0]["note"], extra) if part)
    return [{**entry, "drift": answer.get("changes")} for entry in rows]


def row(host: str, **values: Any) -> dict[str, Any]:
    """A row with every key; what is not known is None."""
    return {**{key: None for key, _ in COLUMNS}, "phase": None, "unit": None, "requests": None, "host": host, **values}


def instance_row(host: str, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one instance."""
    unit = state.main_unit(facts)
    release = (facts.get("by_hand") or {}).get("release") or facts.get("release") or {}
    ready = facts.get("ready") or {}
    serving = facts["condition"] in ("serving", "degraded")
    progress = facts.get("progress") or {}
    live = (facts.get("live") or {}) if serving else {}
    gated = state.gate_accept_length(ready)
    return row(
        host,
        instance=name,
        engine=ladder.engine_text(release["engine"]) if release.get("engine") else None,
        profile=ladder.profile_text(release) or None,
        state=facts["condition"],
        phase=progress.get("phase") if facts["condition"] == "starting" else None,
        progress={key: progress.get(key) for key in ("percent", "ranks_done", "ranks")} if progress else None,
        unit=unit["name"] if unit else None,
        since=facts.get("since"),
        ready_in=ready.get("seconds") if serving else None,
        tokens_per_second=live.get("tokens_per_second"),
        accept_length=(live.get("accept_length") or gated) if serving else None,
        requests={key: live.get(key) for key in ("running", "queued")} if "running" in live else None,
        restarts=unit["n_restarts"] if unit else None,
        last_cause=last_cause(facts),
        note=note(facts, unit),
    )


def last_cause(facts: Mapping[str, Any]) -> str | None:
    """Why the newest start that failed did so; a rung remembers it longer than the last three starts."""
    starts = facts.get("last_starts") or []
    report = facts.get("report") or {}
    newest = max((str(start.get("ended_at") or "") for start in starts), default="")
    if report.get("cause") and str(report.get("at") or "") >= newest:
        return str(report["cause"])  # the host's own reporter saw what no deployment watched
    for start in reversed(facts.get("last_starts") or []):
        if start.get("cause") and start["cause"] != "none":
            return str(start["cause"])
    rungs = facts.get("rungs") or []
    return str(rungs[-1]["cause"]) if rungs and facts.get("degraded") else None


def note(facts: Mapping[str, Any], unit: Mapping[str, Any] | None) -> str:
    """What a person should know beyond the columns."""
    parts = []
    condition = facts["condition"]
    if condition in ("serving", "degraded"):
        parts.append(str((facts.get("ready") or {}).get("note") or ""))
        if condition == "degraded" and not parts[0]:
            parts.append(ladder.settings((facts.get("release") or {}).get("overrides") or {}))
        if ladder.pending(facts):
            parts.append("a newer unit is installed, taken at the next start")
    elif condition == "starting" and (facts.get("progress") or {}).get("phase") == "serving":
        parts.append("answers, but this start has not passed a gate: run deploy-dflash.yml")
    elif condition == "failed" and unit:
        parts.append(state.unit_text(unit))
        if facts.get("last_report"):
            parts.append(f"see {facts['last_report']}")
        else:
            parts.append("run playbooks/diagnose.yml")
        if (facts.get("report") or {}).get("restarts_ended"):
            parts.append("not started again: this does not heal by itself")
    elif condition == "restarting":
        parts.append(f"systemd starts it again after a crash: see {facts['last_report']}" if facts.get("last_report")
                     else "systemd starts it again after a crash: run playbooks/diagnose.yml")
    elif condition == "stopped" and unit and unit["enabled"] == "enabled":
        parts.append("starts at the next boot")
    if facts.get("trial"):
        parts.append(
            f"on trial since {str(facts['trial']['begun_at'])[:19]}Z; a benchmark that was cut short: run it again, or "
            "playbooks/rollback.yml on this host"
        )
    if facts.get("by_hand"):
        wanted = (facts.get("release") or {}).get("unit")
        parts.append(f"started by hand; a deployment and the next boot start {wanted}")
    if unit and unit["need_daemon_reload"]:
        parts.append("its unit was changed on disk")
    for other in facts.get("units") or []:
        if unit and other["name"] != unit["name"] and other["active_state"] == "active":
            parts.append(f"{other['name']} runs too")
    return "; ".join(part for part in parts if part)


def rows(answers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of all hosts, in the order in which they are given."""
    return [entry for host, answer in answers.items() for entry in rows_of_host(host, answer)]


def document(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The whole as data, for -e format=json."""
    return {"schema": 1, "at": state.now_utc(), "instances": rows(answers)}


def text(answers: Mapping[str, Mapping[str, Any]]) -> str:
    """The screen: the table, and how many are how."""
    found = rows(answers)
    shown = [screen_row(entry) for entry in found]
    columns = [[key, title] for key, title in COLUMNS if key not in OPTIONAL or any(entry[key] for entry in shown)]
    return "\n".join([plan.table(shown, columns), "", tally(found)])


def screen_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a person reads it."""
    word = str(entry["state"])
    if entry["phase"]:
        progress = entry.get("progress") or {}
        word = f"starting: {entry['phase']}"
        if (progress.get("ranks") or 0) > 1 and entry["phase"] in RANKED:
            word += f" {progress.get('ranks_done') or 0}/{progress['ranks']}"
        if progress.get("percent") is not None:
            word += f" {round(progress['percent'])} %"
    since = str(entry["since"] or "")
    accept, speed = entry["accept_length"], entry["tokens_per_second"]
    return {
        **entry,
        "state": word,
        "since": since[:19].replace("T", " "),
        "ready_in": plan.duration(entry["ready_in"]),
        "tokens_per_second": "" if speed is None else f"{float(speed):.0f}",
        "drift": drift_text(entry["drift"]),
        "accept_length": "" if accept is None else f"{float(accept):.2f}",
    }


def drift_text(changes: Sequence[str] | None) -> str:
    """What a deployment would look at, in a few words: `none`, the one thing, or the first of several."""
    if changes is None:
        return ""
    if not changes:
        return "none"
    return changes[0] + (f" and {len(changes) - 1} more" if len(changes) > 1 else "")


def tally(found: Iterable[Mapping[str, Any]]) -> str:
    """`3 instances on 2 hosts: 2 serving, 1 degraded`."""
    found = list(found)
    counts: dict[str, int] = {}
    for entry in found:
        counts[str(entry["state"])] = counts.get(str(entry["state"]), 0) + 1
    order = ["serving", "degraded", "starting", "restarting", "stopping", "failed", "stopped", "absent"]
    ordered = sorted(counts, key=lambda word: (order.index(word) if word in order else len(order), word))
    hosts = len({entry["host"] for entry in found})
    instances = sum(1 for entry in found if entry["instance"])
    return (
        f"{instances} instance{'' if instances == 1 else 's'} on {hosts} host{'' if hosts == 1 else 's'}: "
        + ", ".join(f"{counts[word]} {word}" for word in ordered)
    )
