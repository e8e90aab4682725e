"""The last lines of a deployment: a short table, what is unreachable, and the command that finishes it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: sglang_summary
type: aggregate
short_description: Table of hosts at the end of a deployment, and the report of a rollout
version_added: "0.1.0"
description:
  - Prints one line per host and instance from the statistic C(sglang_summary) that role C(sglang_service) sets, then
    the hosts that failed before they had a line or were unreachable, with their address and the command that
    finishes them. Silent where no host set the statistic and none is missing.
  - Keeps what a rollout does in the folder that playbooks/tasks/begin.yml names - C(events.jsonl) as it happens, and
    C(rollout.json), C(rollout.md) and C(rollout.html) of it, written anew after each batch, so that a rollout that is
    killed leaves them too. The rollout that continues it tells of both.
requirements: []
"""

import json
import os
from pathlib import Path
from typing import Any

import ansible.module_utils as _module_utils
import jinja2
from ansible import context
from ansible.plugins.callback import CallbackBase

_OURS = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "module_utils"))
if _OURS not in _module_utils.__path__:
    _module_utils.__path__.append(_OURS)

from ansible.module_utils.dflash_fleet import plan, rollout, rollout_record, rollout_report, words

COLUMNS = ("host", "instance", "engine", "profile", "state", "ready in", "accept", "what happened")


def render(report: dict[str, Any]) -> str:
    """The report as one HTML file that needs no other; Jinja escapes every text in it."""
    template = Path(__file__).with_name("rollout.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["duration"] = plan.duration
    return environment.from_string(template).render(
        report=report, picture=rollout_report.picture(report), tally=rollout_report.tally(report),
        columns=rollout_report.COLUMNS, rows=rollout_report.rows(report),
    )  # fmt: skip


def write(folder: Path, report: dict[str, Any]) -> None:
    """All three forms, each replaced whole."""
    for name, text in (
        (rollout_record.NAME, json.dumps(report, indent=2, sort_keys=True) + "\n"),
        ("rollout.md", rollout_report.markdown(report)),
        ("rollout.html", render(report)),
    ):
        fresh = folder / f".{name}.new"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(folder / name)


class CallbackModule(CallbackBase):
    """Collects what the hosts say, prints it once, keeps it for later."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "sglang_summary"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.playbook = ""
        self.reasons: dict[str, str] = {}
        self.recorder = rollout_record.Recorder()
        self.broken = False

    # -- the rollout as it goes

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Remember which playbook a rerun must name."""
        self.playbook = os.path.relpath(playbook._file_name)
        self.recorder.playbook = self.playbook

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Each batch is a play of its own."""
        number = self.recorder.turn_begins() if play.serial else 0
        if number:
            self._display.display(rollout_report.batch_line(self.recorder.report()), color="bright blue")
            self._keep()
        if number == 1:
            self._guarded(self._end_earlier)

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        """A task begins on a host."""
        role = task._role.get_name() if task._role else ""
        self.recorder.task_begins(host.get_name(), task.action, role, task.get_name())

    def v2_runner_on_ok(self, result: Any) -> None:
        """A task has ended well."""
        self._task_ends(result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Keep the address and the reason."""
        host, outcome = self._failed_task(result, "unreachable")
        address = str(host.vars.get("ansible_host", host.get_name()))
        self.recorder.unreachable(host.get_name(), address, str(outcome.get("msg") or ""))
        self._flush()

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Keep the reason of a host that ends here."""
        if not ignore_errors:
            self._failed_task(result, "failed")
        self._task_ends(result)

    def _task_ends(self, result: Any) -> None:
        action = str(getattr(result, "task", None) and result.task.action)
        self.recorder.task_ends(result.host.get_name(), action, result.result)
        self._flush()

    def _failed_task(self, result: Any, word: str) -> tuple[Any, Any]:
        said = words.why(result.result, "")
        lines = (said if isinstance(said, str) else "\n".join(map(str, said))).strip().splitlines()
        self.reasons[result.host.get_name()] = f"{word}: {lines[0]}" if lines else word
        return result.host, result.result

    def _flush(self) -> None:
        """What has happened is in the file at once: the next moment may be a kill."""
        self._guarded(self.recorder.flush)

    def _keep(self) -> None:
        """The report of what is known by now."""
        if self.recorder.folder:
            self._flush()
            folder = self.recorder.folder
            self._guarded(lambda: write(folder, self.recorder.report()))

    def _end_earlier(self) -> None:
        """Rollouts that this one continues have an end now, and their reports say so."""
        for folder in self.recorder.end_earlier():
            write(folder, rollout_report.build(rollout_record.read(folder)))

    def _guarded(self, step: Any) -> None:
        """No rollout ends because its report cannot be written; that is said once."""
        if self.broken:
            return
        try:
            step()
        except OSError as problem:
            self.broken = True
            self._display.warning(f"The report of this rollout cannot be written, it goes on without: {problem}")

    # -- the end

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Print the table, write the report."""
        lines = {host: (stats.custom.get(host) or {}).get("sglang_summary") or {} for host in stats.processed}
        self.recorder.ends(lines, self.rerun, {host: self.reasons.get(host, "failed") for host in stats.failures})
        waiting = {host for host, found in lines.items() if any(line["state"] == "waiting" for line in found.values())}
        if self.recorder.folder:
            # The last play, which says it, does not come where a batch was lost whole.
            left_out = set(rollout_report.hosts_with(self.recorder.report(), ["waiting"])) - waiting
            waiting |= left_out
        ended = sorted(set(stats.dark) | set(stats.failures) | waiting)
        rows = []
        for host in sorted({*stats.processed, *waiting}):
            for instance, line in sorted((lines.get(host) or {}).items()):
                seconds, accept = line.get("seconds"), line.get("accept_length")
                ready = "" if seconds is None else plan.duration(seconds)
                rows.append((
                    host, instance, line["engine"], line["profile"], line["state"],
                    ready, "" if accept is None else f"{accept:.1f}", line.get("note") or "",
                ))
            if not lines.get(host) and host in ended:
                word = "unreachable" if host in stats.dark else "failed" if host in stats.failures else "waiting"
                reason = self.reasons.get(host, "").split(": ", 1)[-1][:100] or "had no turn, nothing was touched"
                rows.append((host, "", "", "", word, "", "", reason))
        if rows:
            self._table(rows)
        for host in sorted(stats.dark):
            self._display.display(f"\n{host} ({self.recorder.addresses.get(host, host)}) was not reached.", color="red")
        if rows and ended:
            self._display.display(f"\nWhen it is mended, this finishes the rest:\n  {self.rerun(ended)}")
        if self.recorder.folder:
            self._keep()
            self._display.display(f"\nreport  {os.path.relpath(self.recorder.folder)}/rollout.html (.md, .json)")

    def _table(self, rows: list[tuple[str, ...]]) -> None:
        widths = [max(len(str(row[index])) for row in [COLUMNS, *rows]) for index in range(len(COLUMNS))]
        self._display.banner("SGLANG")
        for row in [COLUMNS, *rows]:
            self._display.display("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip())

    def rerun(self, hosts: list[str]) -> str:
        """The command of this run for the hosts that did not end well."""
        default = os.path.realpath(os.path.join("inventory", "demo"))
        sources = [source for source in context.CLIARGS.get("inventory") or () if os.path.realpath(source) != default]
        named = [os.path.relpath(source) if os.path.exists(source) else source for source in sources]
        # The command `dflash-fleet` says how it was called.
        command = os.environ.get("DFLASH_FLEET_COMMAND", "").split() or ["ansible-playbook", self.playbook]
        return rollout.rerun(command, named, context.CLIARGS.get("extra_vars") or (), hosts)
