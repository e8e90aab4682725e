"""The last lines of a deployment: a short table, what is unreachable, and the command that finishes it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: sglang_summary
type: aggregate
short_description: Table of hosts at the end of a deployment
version_added: "0.1.0"
description:
  - Prints one line per host and instance from the statistic C(sglang_summary) that role C(sglang_service) sets, then
    the hosts that failed before they had a line or were unreachable, with their address and the command that
    finishes them. Silent where no host set the statistic and none is missing.
requirements: []
"""

import os
import shlex
import sys
from typing import Any

import ansible.module_utils as _module_utils
from ansible import context
from ansible.plugins.callback import CallbackBase

_OURS = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "module_utils"))
if _OURS not in _module_utils.__path__:
    _module_utils.__path__.append(_OURS)

from ansible.module_utils.dflash_fleet import plan

COLUMNS = ("host", "instance", "engine", "profile", "state", "ready in", "accept", "what happened")


class CallbackModule(CallbackBase):
    """Collects what the hosts say, prints it once."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "sglang_summary"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.playbook = ""
        self.addresses: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Remember which playbook a rerun must name."""
        self.playbook = os.path.relpath(playbook._file_name)

    def _failed_task(self, result: Any, word: str) -> None:
        host = result.host if hasattr(result, "host") else result._host
        name = host.get_name()
        outcome = result.result if hasattr(result, "result") else result._result
        self.addresses[name] = str(host.vars.get("ansible_host", name))
        lines = str(outcome.get("msg") or "").strip().splitlines()
        self.reasons[name] = f"{word}: {lines[0]}" if lines else word

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Keep the address and the reason."""
        self._failed_task(result, "unreachable")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Keep the reason of a host that ends here."""
        if not ignore_errors:
            self._failed_task(result, "failed")

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Print the table."""
        rows = []
        ended = sorted(set(stats.dark) | set(stats.failures) | self.waiting(stats))
        for host in sorted(stats.processed):
            lines = (stats.custom.get(host) or {}).get("sglang_summary") or {}
            for instance, line in sorted(lines.items()):
                seconds, accept = line.get("seconds"), line.get("accept_length")
                ready = "" if seconds is None else plan.duration(seconds)
                rows.append((
                    host, instance, line["engine"], line["profile"], line["state"],
                    ready, "" if accept is None else f"{accept:.1f}", line.get("note") or "",
                ))
            if not lines and host in ended:
                word = "unreachable" if host in stats.dark else "failed"
                rows.append((host, "", "", "", word, "", "", self.reasons.get(host, "").split(": ", 1)[-1][:100]))
        if not rows:
            return
        widths = [max(len(str(row[index])) for row in [COLUMNS, *rows]) for index in range(len(COLUMNS))]
        self._display.banner("SGLANG")
        for row in [COLUMNS, *rows]:
            self._display.display("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip())
        for host in sorted(stats.dark):
            self._display.display(f"\n{host} ({self.addresses.get(host, host)}) was not reached.", color="red")
        if ended:
            self._display.display(f"\nWhen it is mended, this finishes the rest:\n  {self.rerun(ended)}")

    @staticmethod
    def waiting(stats: Any) -> set[str]:
        """Hosts whose turn in the rollout did not come."""
        lines = {host: (stats.custom.get(host) or {}).get("sglang_summary") or {} for host in stats.processed}
        return {host for host, found in lines.items() if any(line["state"] == "waiting" for line in found.values())}

    def rerun(self, hosts: list[str]) -> str:
        """The command of this run for the hosts that did not end well."""
        # The command `dflash-fleet` says how it was called.
        words = os.environ.get("DFLASH_FLEET_COMMAND", "").split() or ["ansible-playbook", self.playbook]
        for source in context.CLIARGS.get("inventory") or ():
            default = os.path.realpath(source) == os.path.realpath(os.path.join("inventory", "demo"))
            words += [] if default else ["-i", os.path.relpath(source) if os.path.exists(source) else source]
        words += ["-l", ",".join(hosts)]
        arguments = sys.argv[1:]
        for position, word in enumerate(arguments):
            # Variables of the command line belong to the wish; one that may hold a secret is left to the person.
            if word in ("-e", "--extra-vars") and position + 1 < len(arguments):
                value = arguments[position + 1]
                secret = any(part in value.lower() for part in ("key", "token", "password"))
                words += ["-e", "..." if secret else value]
        return shlex.join(words)
