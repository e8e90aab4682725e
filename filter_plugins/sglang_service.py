"""Filters of role sglang_service: names for the ladder's pure functions, nothing else."""

from __future__ import annotations

import os
from typing import Any

import ansible.module_utils as _module_utils

_OURS = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "module_utils"))
if _OURS not in _module_utils.__path__:
    _module_utils.__path__.append(_OURS)

from ansible.module_utils.dflash_fleet import diagnosis, front_door, ladder, plan, profiles, removal, rollout


def conflicts(
    resolved: dict[str, Any], everyone: list[dict[str, Any]], own_profiles: dict[str, Any]
) -> list[str]:
    """Units that share a GPU with this one: one at a time holds it."""
    return profiles.conflicting_units(resolved, everyone, profiles.known_profiles({"profiles": own_profiles}))


def headline(
    attempts: list[dict[str, Any]],
    host: str,
    report: str = "",
    rung: dict[str, Any] | None = None,
    back: list[dict[str, Any]] | None = None,
) -> list[str]:
    """The person's text about the last attempt, line by line; `back`: the return to the last good release."""
    lines = diagnosis.answer_text(attempts[-1], host).splitlines()
    if report:
        lines.append(f"  report    {report}")
    if rung:
        step = f"rung {rung['number']} of {rung['of']}"
        lines.append(f"  now       {step}: {ladder.settings(rung['set'])} ({rung['cost']})")
    if back and back[-1]["ready"]:
        lines.append("  now       its last good release serves again")
    elif back:
        lines.append("  now       its last good release did not come back:")
        lines += [f"    {line}" for line in diagnosis.answer_text(back[-1], host).splitlines()]
    return lines


def standby(resolved: dict[str, Any], unit_text: str, venv: str, api_key: str) -> dict[str, Any]:
    """A profile on standby as sglang_release takes it."""
    return {
        "unit": resolved["unit"],
        "unit_text": unit_text,
        "release": ladder.release_record(resolved, venv, api_key),
        "arguments": resolved["argv"][2:],
        "environment": resolved["environment"],
    }


class FilterModule:
    """Ansible's way to find filters."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {
            "sglang_attempt": ladder.attempt,
            "sglang_baseline": ladder.baseline,
            "sglang_can_roll_back": ladder.can_roll_back,
            "sglang_conflicts": conflicts,
            "sglang_degraded_text": ladder.degraded_text,
            "sglang_forecast": plan.forecast,
            "sglang_gate_record": ladder.gate_record,
            "sglang_headline": headline,
            "sglang_in_effect": ladder.in_effect,
            "sglang_in_the_way": rollout.in_the_way,
            "sglang_own_address": front_door.own_address,
            "sglang_next_rung": ladder.next_rung,
            "sglang_release_record": ladder.release_record,
            "sglang_remembered_rung": ladder.remembered_rung,
            "sglang_restored": rollout.restored,
            "sglang_rollback_plan": rollout.rollback_plan,
            "sglang_rollback_problem": rollout.rollback_problem,
            "sglang_rung_record": ladder.rung_record,
            "sglang_standby": standby,
            "sglang_summary": ladder.summary,
            "sglang_summary_unchanged": ladder.summary_unchanged,
            "sglang_unwanted": removal.unwanted,
            "sglang_unit_quote": ladder.unit_quote,
            "sglang_unit_word": profiles.systemd_word,
            "sglang_watchdog": ladder.watchdog_seconds,
        }
