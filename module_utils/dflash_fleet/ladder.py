"""The fallback ladder and what is told about it: which rung comes next, what is remembered, what a person reads.

An attempt is one start of one configuration with its end. The list of attempts of a run, oldest first, is all that the
functions here need; the ladder itself is `sglang_fallbacks`, a list of remedy ids of the one remedy table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import release, remedies, state

Attempt = dict[str, Any]


def attempt(gate: Mapping[str, Any], resolved: Mapping[str, Any], taken: Sequence[str]) -> Attempt:
    """One start and its end: the gate's result with the configuration that was tried (resolved, or a release.json)."""
    return {
        "unit": resolved["unit"],
        "profile": resolved["profile"],
        "engine": dict(resolved["engine"]),
        "drafter": resolved["drafter"]["name"],
        "remedies": list(taken),
        "overrides": dict(resolved["overrides"]),
        "ready": bool(gate.get("ready")),
        "outcome": gate.get("outcome"),
        "seconds": gate.get("seconds"),
        "phase": gate.get("phase"),
        "phases": gate.get("phases") or [],
        "smoke": gate.get("smoke") or {},
        "crash": gate.get("crash") or {},
        "invocation_id": gate.get("invocation_id"),
        "reason": gate.get("reason"),
    }


def key_of(request: Mapping[str, Any], driver: str | None) -> dict[str, str]:
    """What a rung is remembered for: the wish as the inventory states it, the engine release and the driver."""
    return state.rung_key(
        engine_version=str(request["version"]),
        driver=driver,
        drafter_revision=request.get("drafter_revision"),
        profile=str(request["profile"]),
        drafter=request.get("drafter"),
        cuda_graph_requested=str(request.get("cuda_graph") or ""),
        model_revision=request.get("model_revision"),
    )


def remembered_rung(
    before: Mapping[str, Any], request: Mapping[str, Any], fallbacks: Sequence[str], driver: str | None
) -> dict[str, Any]:
    """The recorded rung to begin with, or {}. One that the inventory no longer lists is not taken."""
    rung = state.matching_rung(before.get("rungs"), key_of(request, driver))
    return rung if rung and rung["remedy"] in fallbacks else {}


def next_rung(attempts: Sequence[Attempt], fallbacks: Sequence[str], limit: int) -> dict[str, Any]:
    """The rung to take after the last attempt, or {}.

    A rung is taken only where the diagnosed cause has it among its remedies, a machine may take it, the inventory lists
    it, and it was not in effect already; its settings come on top of those in effect.
    """
    last = attempts[-1]
    if last["ready"] or len(last["remedies"]) >= limit:
        return {}
    offered = {remedy["id"]: remedy for remedy in last["crash"].get("remedies") or [] if remedy.get("automatic", True)}
    for identity in fallbacks:
        remedy = offered.get(identity)
        if not remedy or not remedy.get("set") or identity in last["remedies"]:
            continue
        # Whatever a table of own causes says: what needs an installation first is no rung.
        if not remedies.INSTALLED & remedy["set"].keys():
            return {
                "id": identity,
                "set": {**last["overrides"], **remedy["set"]},
                "remedies": [*last["remedies"], identity],
                "summary": remedy.get("summary"),
                "cost": remedy.get("cost"),
                "number": len(last["remedies"]) + 1,
                "of": limit,
            }
    return {}


def rung_record(attempts: Sequence[Attempt], request: Mapping[str, Any], driver: str | None) -> dict[str, Any] | None:
    """What rungs.json keeps after a start that holds, or None: only a rung that this run had to take is news."""
    if len(attempts) < 2 or not attempts[-1]["ready"]:
        return None
    last = attempts[-1]
    return {
        "key": key_of(request, driver),
        "remedy": last["remedies"][-1],
        "set": last["overrides"],
        "cause": attempts[-2]["crash"].get("cause") or "unknown",
    }


def gate_record(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """What the host keeps of the gate, whatever its answer was (ready.json, starts.jsonl)."""
    last = attempts[-1]
    return {
        "invocation_id": last["invocation_id"],
        "outcome": last["outcome"],
        "phase": last["phase"],
        "cause": last["crash"].get("cause"),
        "summary": last["crash"].get("summary"),
        "seconds": last["seconds"],
        "accept_length": last["smoke"].get("accept_length"),
        "tokens_per_second": last["smoke"].get("tokens_per_second"),
        "phases": last["phases"],
        "fallbacks": last["remedies"],
        "note": note(attempts),
    }


def release_record(resolved: Mapping[str, Any], venv: str, api_key: str) -> dict[str, Any]:
    """release.json: what the release is made of, so that it can be started and judged without the inventory."""
    kept = ("instance", "unit", "profile", "engine", "host", "port", "served_model_name", "model", "drafter",
            "parallel", "cuda_graph", "gpu_ids", "overrides")
    return {
        **{name: resolved[name] for name in kept},
        "arguments": list(resolved["argv"]),
        "environment": dict(resolved["environment"]),
        "venv": venv,
        "api_key_digest": release.key_digest(api_key),
    }


#: Options that remedies change in steps: what they were decides where the next step goes.
_IN_EFFECT = {
    "--mem-fraction-static": "sglang_mem_fraction_static",
    "--max-running-requests": "sglang_max_running_requests",
    "--context-length": "sglang_context_length",
    "--attention-backend": "sglang_attention_backend",
}


def in_effect(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a start by the project's variables, so that diagnosis does not offer what was tried.

    `resolved` is a configuration, or what a release.json keeps of one.
    """
    return {
        "sglang_version": resolved["engine"]["version"],
        "sglang_profile": resolved["profile"],
        "sglang_cuda_graph": resolved["cuda_graph"]["effective"],
        "sglang_drafter": resolved["drafter"]["name"],
        **{_IN_EFFECT[flag]: value for flag, value in _options(resolved) if flag in _IN_EFFECT},
    }


def _options(resolved: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Options with their values, also of a release.json, which keeps only the words of the command line."""
    if "options" in resolved:
        return [(flag, value) for flag, value in resolved["options"]]
    words = list(resolved["arguments"])
    return [
        (word, None if following.startswith("--") else following)
        for word, following in zip(words, [*words[1:], "--"])
        if word.startswith("--")
    ]


# ---------------------------------------------------------------------------------------------------------------------
# What a person reads


def settings(overrides: Mapping[str, Any]) -> str:
    """`sglang_cuda_graph: disabled`, as one writes it into an inventory."""
    return ", ".join(f"{name}: {value}" for name, value in sorted(overrides.items()))


def note(attempts: Sequence[Attempt]) -> str:
    """One clause on how the last attempt came about, for tables."""
    last = attempts[-1]
    crashed = [item for item in attempts if not item["ready"]]
    if last["ready"] and crashed:
        first = crashed[0]
        cause = first["crash"].get("cause") or first["outcome"] or "unknown"
        return f"{cause} in {first['phase'] or 'launch'}, now {settings(last['overrides'])}"
    if last["ready"]:
        return f"remembered: {settings(last['overrides'])}" if last["overrides"] else ""
    cause = last["crash"].get("cause")
    return f"{last['outcome']} in {last['phase'] or 'launch'}" + (f": {cause}" if cause else "")


def profile_text(attempt_or_release: Mapping[str, Any]) -> str:
    """ep8+dflash: profile and drafter in one word."""
    drafter = attempt_or_release.get("drafter") or "none"
    name = drafter["name"] if isinstance(drafter, Mapping) else drafter
    return str(attempt_or_release.get("profile") or "") + ("" if name == "none" else f"+{name}")


def engine_text(engine: Mapping[str, Any]) -> str:
    """sglang 0.5.11 rehearsal: what a person must know about the engine; a stand-in always says so."""
    build = engine.get("build")
    return f"{engine.get('name', 'sglang')} {engine.get('version')}" + ("" if build in (None, "cuda") else f" {build}")


def summary(attempts: Sequence[Attempt], back: Sequence[Attempt] = ()) -> dict[str, Any]:
    """The line of the final table for an instance that this run started; `back`: the return after it."""
    last = attempts[-1]
    if last["ready"]:
        word = "degraded" if last["overrides"] else "serving"
    else:
        word = "rolled back" if back and back[-1]["ready"] else "failed"
    lost = back and not back[-1]["ready"]
    return {
        "engine": engine_text(last["engine"]),
        "profile": profile_text(last),
        "state": word,
        "seconds": last["seconds"] if last["ready"] else None,
        "accept_length": last["smoke"].get("accept_length"),
        "note": note(attempts) + (f"; its last good release did not come back: {note(back)}" if lost else ""),
    }


def summary_unchanged(before: Mapping[str, Any], resolved: Mapping[str, Any], pending: bool = False) -> dict[str, Any]:
    """The line of the final table for an instance that served already; `pending`: its new unit waits for a start."""
    ready = before.get("ready") or {}
    return {
        "engine": engine_text(resolved["engine"]),
        "profile": profile_text(before.get("release") or {}),
        "state": "degraded" if before.get("degraded") else "serving",
        "seconds": ready.get("seconds"),
        "accept_length": ready.get("accept_length"),
        "note": "; ".join(
            part for part in (ready.get("note"), "new unit taken at the next start" if pending else "") if part
        ),
    }


def summary_as_is(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The lines of the final table for a host that was found as it should be; `state` is what sglang_state says."""
    return {
        name: summary_unchanged(facts, facts["release"], pending(facts))
        for name, facts in sorted(state["instances"].items())
    }


def pending(facts: Mapping[str, Any]) -> bool:
    """Whether the engine was started before the current release was installed (a change of the unit alone)."""
    if facts.get("by_hand"):
        return False
    started = (facts.get("ready") or {}).get("release_id")
    return bool(facts.get("serving") and started and facts.get("current") and started != facts["current"])


def summary_waiting(resolved: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The lines of the final table for a host whose turn did not come: nothing of it was touched."""
    return {
        item["instance"]: {
            "engine": engine_text(item["engine"]),
            "profile": profile_text(item),
            "state": "waiting",
            "seconds": None,
            "accept_length": None,
            "note": "had no turn, nothing was touched",
        }
        for item in resolved
    }


def degraded_text(attempts: Sequence[Attempt], host: str, remembered: Mapping[str, Any]) -> list[str]:
    """Loudly: what a degraded instance gives up, and what would give it back."""
    last = attempts[-1]
    known: list[dict[str, Any]] = next((item["crash"].get("remedies") or [] for item in attempts if item["crash"]), [])
    lines = [f"{host}: {last['unit']} serves DEGRADED with {settings(last['overrides'])}."]
    if not known and remembered:
        lines.append(f"The host remembers why: {remembered['cause']} ({remembered['recorded_at']}).")
        known = remedies.remedies_for(remembered["cause"], last["engine"]["version"])
    costs = [remedy["cost"] for remedy in known if remedy["id"] in last["remedies"] and remedy["cost"]]
    if costs:
        lines.append("What it costs: " + "; ".join(costs))
    better = [settings(remedy["set"]) for remedy in known if remedy["id"] not in last["remedies"] and remedy["set"]]
    if better:
        lines.append(
            f"Better: {', or '.join(better[:2])}. It is tried again when release, driver or drafter revision change."
        )
    return lines


def can_roll_back(before: Mapping[str, Any], failed_release: str, allowed: bool) -> bool:
    """Whether there is a last good release to return to that is not the one that failed."""
    last_good = before.get("last_good") or {}
    identity = last_good.get("release_id")
    return bool(allowed and identity and identity != failed_release and identity in (before.get("releases") or []))


def baseline(phases: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds per phase of the last good start, to estimate what is left of this one."""
    return {str(item["name"]): float(item["seconds"]) for item in phases if item.get("seconds") is not None}


def unit_quote(assignment: str) -> str:
    """One assignment of Environment= exactly as written (systemd.syntax(7)); `$` means nothing there."""
    text = assignment.replace("%", "%%")
    if not any(character in text for character in " \t\n\"'\\;"):
        return text
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f'"{text}"'


def watchdog_seconds(resolved: Mapping[str, Any], wanted: Any = "auto") -> int:
    """WatchdogSec= of a unit: longer than SGLang's own watchdog takes (up to 1.5 times its limit); 0 switches it off.

    SGLang's default limit is 300 s (server_args.py, `watchdog_timeout`).
    """
    word = str(wanted).strip().lower()
    if word in ("off", "false", "0"):
        return 0
    own = 300.0
    for flag, value in resolved.get("options") or []:
        if flag == "--watchdog-timeout":
            with contextlib.suppress(TypeError, ValueError):
                own = float(value[0] if isinstance(value, (list, tuple)) else value)
    least = int(1.5 * own) + max(5, int(own) // 5)
    if word in ("auto", ""):
        return least
    if not word.isdigit() or int(word) <= 1.5 * own:
        raise ValueError(
            f"sglang_service_watchdog_seconds is {wanted}; write auto, off, or more than {1.5 * own:g} seconds, so "
            f"that the engine's own watchdog (--watchdog-timeout {own:g}) can dump its stacks first"
        )
    return int(word)
