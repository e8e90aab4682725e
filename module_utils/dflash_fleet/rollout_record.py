"""The events of a rollout, from what Ansible says of tasks and their results; rollout_report knows what they mean.

No Ansible in here: the callback plugin hands over plain names and results. Events are kept in memory until the rollout
has a name and a folder (the fact `sglang_rollout` of playbooks/tasks/begin.yml), and from then on each is appended to
`events.jsonl` in it, so that a controller that dies leaves what it knew. Only named fields of results are kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import ladder, rollout_report, state

EVENTS = "events.jsonl"
NAME = "rollout.json"


class Recorder:
    """What this run of Ansible does, event by event."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self.clock = clock
        # The wall clock is read once: durations come from the monotonic one.
        self.anchor = wall() - clock()
        self.playbook = ""
        self.plan: dict[str, Any] = {}
        self.name = ""
        self.folder: Path | None = None
        self.continues: list[str] = []
        self.earlier: list[dict[str, Any]] = []  # events of the rollouts that this one continues
        self.events: list[dict[str, Any]] = []
        self.written = 0
        self.batch = 0
        # By host: the phase it is in, the end of its last task, whether any task of it was not skipped.
        self.phases: dict[str, tuple[str, str, bool]] = {}
        self.instances: dict[str, str] = {}  # host: the instance that it works on
        self.addresses: dict[str, str] = {}
        self.stopped = False  # a turn ended badly: no batch begins after its own
        self.known: set[str] = set()  # hosts of which it is known how they were before

    # -- what Ansible says

    def turn_begins(self) -> int:
        """A batch begins; its number, or 0 where none does: outside a rollout, and after a failure."""
        if not self.plan or self.stopped:
            return 0
        sizes = self.plan["batches"]
        begin = sum(sizes[: self.batch])
        self.batch += 1
        hosts = self.plan["hosts"][begin : begin + sizes[self.batch - 1]] if self.batch <= len(sizes) else []
        self._add("batch", number=self.batch, of=len(sizes), hosts=hosts)
        return self.batch

    def task_begins(self, host: str, action: str, role: str, task: str) -> None:
        """A task begins on a host."""
        phase = rollout_report.phase_of(action, role, task)
        if not self.batch or phase is None:
            return
        now = self._now()
        if host in self.phases:
            if self.phases[host][0] == phase:
                return
            self._leave(host)
        self.phases[host] = (phase, now, False)
        self._add("enter", at=now, host=host, phase=phase)

    def task_ends(self, host: str, action: str, result: Mapping[str, Any]) -> None:
        """A task has ended well on a host, or so that it was not ignored."""
        if host in self.phases:
            self.phases[host] = (self.phases[host][0], self._now(), True)
        short = action.rpartition(".")[2]
        if short == "sglang_state" and host not in self.known and "state" in result:
            self.known.add(host)
            self._add("before", host=host, instances=before(result["state"]))
        # A forecast of a switch, or a release that is only staged, names no start.
        elif short == "sglang_release" and "previous" in result and "invocation_id" in result:
            release = result.get("release") or {}
            self._add("switch", host=host, instance=self._instance(host), release=result["id"],
                      restarted=result.get("restarted"), **made_of(release))  # fmt: skip
        elif short == "sglang_wait" and result.get("outcome"):
            self._add("attempt", host=host, instance=self._instance(host), **attempt(result))
        elif short == "set_fact":
            self._facts(host, result.get("ansible_facts") or {})

    def unreachable(self, host: str, address: str, message: str) -> None:
        """A host did not answer."""
        self.addresses[host] = address
        self._leave(host)
        self._add("unreachable", host=host, address=address, message=first_line(message))

    def ends(
        self,
        lines: Mapping[str, Mapping[str, Any]],
        rerun: Callable[[list[str]], str],
        failed: Mapping[str, str] | None = None,
    ) -> None:
        """The run is over; `lines` are the lines of the final table, `rerun` names the command for hosts.

        `failed` are hosts that ended as failed, with the reason: also those that never came to their turn.
        """
        for host in list(self.phases):
            self._leave(host)
        told = {event["host"] for event in self.events if event["event"] == "failure"}
        for host, reason in sorted((failed or {}).items()):
            if host not in told:
                self._add("failure", host=host, task=None, message=first_line(reason))
        for host, instances in sorted((host, found) for host, found in lines.items() if found):
            self._add("line", host=host, instances={name: dict(line) for name, line in instances.items()})
        unfinished = rollout_report.hosts_with(self.report(), rollout_report.UNFINISHED)
        self._add("end", outcome="ended", rerun=rerun(unfinished) if unfinished else None)

    # -- what becomes of it

    def report(self) -> dict[str, Any]:
        """All that is known until now."""
        return rollout_report.build([*self.earlier, *self.events])

    def flush(self) -> None:
        """Append to the file what is not in it yet. OSError as it is."""
        if self.folder is None or self.written == len(self.events):
            return
        append(self.folder, self.events[self.written :])
        self.written = len(self.events)

    def end_earlier(self) -> list[Path]:
        """Give the rollouts that this one continues their end; the folders where it was missing."""
        found = []
        for name in self.continues:
            folder = (self.folder or Path()).parent / name
            events = read(folder)
            if events and events[-1]["event"] != "end":
                append(folder, [{**self._event("end"), "outcome": "interrupted", "continued_by": self.name}])
                found.append(folder)
        return found

    # -- inside

    def _now(self) -> str:
        return state.now_utc(self.anchor + self.clock())

    def _event(self, event: str, at: str = "") -> dict[str, Any]:
        return {"schema": rollout_report.SCHEMA, "event": event, "at": at or self._now()}

    def _add(self, event: str, at: str = "", **more: Any) -> None:
        self.events.append({**self._event(event, at), **more})

    def _instance(self, host: str) -> str:
        return self.instances.get(host, "main")

    def _leave(self, host: str) -> None:
        if host in self.phases:
            phase, end, worked = self.phases.pop(host)
            self._add("leave", at=end, host=host, phase=phase, worked=worked)

    def _facts(self, host: str, facts: Mapping[str, Any]) -> None:
        """What the playbooks and roles remember."""
        if "sglang_rollout" in facts and not self.plan:
            self._begin(facts["sglang_rollout"])
        if "__sglang_service_name" in facts:
            self.instances[host] = str(facts["__sglang_service_name"])
        if facts.get("__sglang_service_attempts"):
            last = facts["__sglang_service_attempts"][-1]
            if last.get("overrides"):
                self._add("settings", host=host, settings=dict(last["overrides"]))
        if "sglang_failure" in facts:
            failure = facts["sglang_failure"]
            self.stopped = True
            message = failure.get("message")
            text = "\n".join(map(str, message)) if isinstance(message, (list, tuple)) else str(message)
            self._add("failure", host=host, task=failure.get("task"), message=first_line(text))
        if facts.get("sglang_had_turn"):
            self._leave(host)
            self._add("turn", host=host)

    def _begin(self, plan: Mapping[str, Any]) -> None:
        """The rollout has a name. Earlier events of this run were waiting for it."""
        self.plan = {"hosts": list(plan["hosts"]), "batches": list(plan["batches"])}
        self.folder = Path(plan["folder"])
        self.name, self.continues = str(plan["id"]), [str(name) for name in plan.get("continues") or []]
        waiting, self.events = self.events, []
        self._add("begin", at=waiting[0]["at"] if waiting else "", rollout=plan["id"], playbook=self.playbook,
                  user=plan.get("user"), controller=plan.get("controller"),
                  continues=self.continues, **self.plan)  # fmt: skip
        self.events += waiting
        # The same name again goes on in its own folder; another one's events come from where it left them.
        self.earlier = read(self.folder)
        for name in self.continues:
            self.earlier = [*read(self.folder.parent / name), *self.earlier]


def append(folder: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Add events to a rollout's file."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / EVENTS
    with open(path, "a", encoding="utf-8") as stream:
        # A kill can have left half a line: begin on a fresh one.
        whole = state.ends_with_newline(path, stream.tell())
        lines = [json.dumps(event, sort_keys=True, default=str) + "\n" for event in events]
        stream.write("".join(["" if whole else "\n", *lines]))


def read(folder: Path) -> list[dict[str, Any]]:
    """Events that an earlier run left; a line that its end cut off is passed over, and so is another schema."""
    found = []
    try:
        lines = (folder / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not there, or another person's: this rollout has a report of its own
        return []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("schema") == rollout_report.SCHEMA:
            found.append(event)
    return found


def first_line(text: Any) -> str:
    """What stands in a table."""
    lines = str(text or "").strip().splitlines()
    return lines[0][:300] if lines else ""


def made_of(release: Mapping[str, Any]) -> dict[str, Any]:
    """Engine and profile of a release.json, as tables show them."""
    return {
        "engine": ladder.engine_text(release["engine"]) if release.get("engine") else None,
        "profile": ladder.profile_text(release) or None,
    }


def before(found: Mapping[str, Any]) -> dict[str, Any]:
    """The instances of a host as sglang_state saw them."""
    return {
        name: {"release": facts.get("current"), "state": facts.get("condition"), **made_of(facts.get("release") or {})}
        for name, facts in (found.get("instances") or {}).items()
        if facts.get("current")
    }


def attempt(gate: Mapping[str, Any]) -> dict[str, Any]:
    """One start and its end, of a result of sglang_wait."""
    crash, smoke = gate.get("crash") or {}, gate.get("smoke") or {}
    return {
        "unit": gate.get("unit"),
        "outcome": gate.get("outcome"),
        "phase": gate.get("phase"),
        "seconds": gate.get("seconds"),
        "cause": crash.get("cause"),
        "summary": first_line(crash.get("summary")),
        "phases": [{"name": one.get("name"), "seconds": one.get("seconds")} for one in gate.get("phases") or []],
        "accept_length": smoke.get("accept_length"),
        "tokens_per_second": smoke.get("tokens_per_second"),
    }
