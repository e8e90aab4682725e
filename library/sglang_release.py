#!/usr/bin/python
# Copyright: dflash-fleet contributors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Switch an instance to a release, and record the one that serves."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_release
short_description: Switch an SGLang instance to a release, or record the one that serves
version_added: "0.1.0"
description:
  - A release is a directory C(releases/<id>/) below the instance's directory, holding the systemd unit and
    C(release.json). Its id is the hash of both, so the same wish has the same id and is not written twice.
  - With I(state=current) the release is staged, its unit is checked with C(systemd-analyze verify), other units of
    the instance are stopped and removed (each stays in its own release), C(current) is moved to it with one rename,
    the unit is copied to C(/etc/systemd/system), and the start is queued without waiting for the load
    (C(--no-block)).
  - Units of further profiles, O(standby), are staged and installed with the switch, stopped and not enabled. All other
    units of the instance go. A switch by I(release_id) leaves those installed that the switch before did.
  - Before a new release is staged, the engine that is installed for it is asked whether its own parser takes
    I(arguments); a refusal ends the module and leaves alone what runs. In check mode too, where the environment is.
  - With I(state=staged) the release is checked and written, and nothing is switched to it.
  - With I(state=good) the release that just passed its gate is recorded as the last good one, its unit is enabled for
    boot, and a fallback in effect is remembered together with what it was needed for.
  - With I(state=failed) a start that did not pass is added to the history of starts; nothing else changes.
  - With I(trial) the switch is one for a while. What ran before is noted in C(state/trial.json) first, keeps its unit
    and its place at boot, and is what C(sglang_state) calls C(previous_good) from then on; no release is pruned. The
    next I(state=good) ends the trial and removes the releases that it made.
options:
  root:
    description: Directory of environments, models and instances.
    type: path
    default: /var/lib/sglang
  instance:
    description: Name of the instance.
    type: str
    required: true
  unit:
    description: Name of its systemd unit for this release.
    type: str
    required: true
  unit_text:
    description: Whole text of the unit. With O(release), the new release.
    type: str
  release:
    description: What C(release.json) holds (environment, revisions, profile, address).
    type: dict
  release_id:
    description: Switch to this existing release instead of a new one.
    type: str
  standby:
    description: With O(unit_text), further profiles of the instance whose units stay installed beside it.
    type: list
    elements: dict
    default: []
    suboptions:
      unit:
        description: Name of its systemd unit. The one that is switched to is passed over.
        type: str
        required: true
      unit_text:
        description: Whole text of the unit.
        type: str
        required: true
      release:
        description: What its C(release.json) holds.
        type: dict
        required: true
      arguments:
        description: As O(arguments).
        type: list
        elements: str
        default: []
      environment:
        description: As O(environment).
        type: dict
        default: {}
  arguments:
    description: The engine's arguments as the unit has them, to be tried on its parser; empty to try nothing.
    type: list
    elements: str
    default: []
  environment:
    description: Variables of the engine's environment for that try.
    type: dict
    default: {}
  user:
    description: User that the engine runs as, and its parser too.
    type: str
    default: sglang
  state:
    description: Switch to the release, only check and write it, record it as good, or record that its start failed.
    type: str
    choices: [current, staged, good, failed]
    default: current
  gate:
    description: With I(state=good) and I(state=failed), what the gate found.
    type: dict
  rung:
    description: With I(state=good), the fallback in effect, as C(rungs.json) keeps it.
    type: dict
  group:
    description: Group that may read the instance's directory.
    type: str
    default: sglang
  keep:
    description: Releases kept, the current and the last good one among them.
    type: int
    default: 5
  restart_on_unit_change:
    description:
      - Whether a release that runs the very same engine under a changed unit (limits, sandboxing, a newer supervisor)
        restarts it. If not, the unit is installed and taken at the next start, whoever causes it.
    type: bool
    default: true
  trial:
    description: With I(state=current), switch for a while only.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Predicts the change and shows the unit's lines that would change.
  diff_mode:
    support: full
  platform:
    platforms: Linux with systemd
author:
  - dflash-fleet contributors
"""

EXAMPLES = r"""
- name: Switch the instance to what the inventory asks for
  sglang_release:
    instance: main
    unit: sglang-main-ep8.service
    unit_text: "{{ lookup('ansible.builtin.template', 'unit.service.j2') }}"
    release: {profile: ep8, venv: /var/lib/sglang/venvs/3f2a9c0d1b7e4a55}
  register: switch

- name: Go back to a release that is still on the host
  sglang_release:
    instance: main
    unit: sglang-main-tp8.service
    release_id: 0a1b2c3d4e5f
"""

RETURN = r"""
id:
  description: Id of the release.
  type: str
  returned: always
  sample: 0a1b2c3d4e5f
previous:
  description: Id of the release that was current before.
  type: str
  returned: with state=current
changes:
  description:
    - Paths that were (or would be) written, moved or removed, and units that were (or would be) started or stopped.
      State files are not among them, since what a gate finds cannot be known before.
  type: list
  elements: str
  returned: with state=current and state=staged
restarted:
  description: Whether a start was queued (or would be, in check mode).
  type: bool
  returned: with state=current
recorded:
  description: Whether the start that runs, or another one of this release, is on record as good.
  type: bool
  returned: with state=current
pending:
  description: Whether the new unit waits for the next start, since only the unit changed.
  type: bool
  returned: with state=current
refused:
  description: Last line of what the installed engine's parser says.
  type: str
  returned: when it refuses the arguments
release:
  description: What release.json holds.
  type: dict
  returned: always
invocation_id:
  description: systemd's id of the start that was queued, or of the running one.
  type: str
  returned: outside check mode
ready:
  description: What was written to ready.json.
  type: dict
  returned: with state=good
"""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_fleet import parser_check, small_files
from ansible.module_utils.dflash_fleet import release as releases
from ansible.module_utils.dflash_fleet import state as states

# Seconds for the engine before to leave; its own limit (TimeoutStopSec=) is far below.
START_LIMIT = 900
PROPERTIES = ("ActiveState", "SubState", "InvocationID", "UnitFileState", "LoadState", "Job")


@dataclass
class Candidate:
    """A release that the instance is to have: its unit and what it is made of."""

    unit: str
    text: str
    release: dict[str, Any]
    identity: str
    new: bool

    def written(self, host: Switch) -> list[str]:
        """The directory that staging it makes."""
        return [str(host.layout.release_dir(host.name, self.identity))] if self.new else []


class Switch:
    """The host's side of one instance."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.name = module.params["instance"]
        self.unit = module.params["unit"]
        self.layout = states.Layout(module.params["root"])
        self.current = states.read_current(self.layout, self.name)

    # -- systemd
    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """Run systemctl and return what it printed; a failure ends the module with its own words."""
        code, out, err = self.module.run_command(["systemctl", *arguments])
        if check and code != 0:
            self.module.fail_json(msg=f"systemctl {' '.join(arguments)}: {(err or out).strip()}")
        return out

    def show(self, unit: str) -> dict[str, str]:
        """The unit's properties that matter here."""
        out = self.systemctl("show", unit, "--property=" + ",".join(PROPERTIES))
        return dict(line.split("=", 1) for line in out.splitlines() if "=" in line)

    def other_units(self) -> list[str]:
        """Units of this instance under another profile: installed, or wanted at boot or running without a file."""
        known = [*states.list_instances(self.layout), self.name]
        pattern = f"sglang-{self.name}-*.service"
        folders = (self.layout.units, self.layout.boot_links())
        installed = {path.name for folder in folders for path in folder.glob(pattern)}
        return sorted(
            name
            for name in installed | self.running(pattern)
            if name != self.unit and states.instance_of_unit(name, known) == self.name
        )

    def running(self, pattern: str) -> set[str]:
        """Units that are up, or on their way up or down."""
        alive = "--state=active,activating,reloading,deactivating"
        out = self.systemctl("list-units", "--plain", "--no-legend", alive, pattern)
        return {line.split()[0] for line in out.splitlines() if line.strip()}

    # -- files
    def files_of(self, unit: str) -> list[Path]:
        """The unit's file, and its link for boot, as far as they are there."""
        file, link = self.layout.unit_file(unit), self.layout.boot_link(unit)
        return [*([file] if file.exists() else []), *([link] if link.is_symlink() else [])]

    def make_directory(self, path: Path, mode: int) -> None:
        """A directory that the instance's group may read."""
        path.mkdir(parents=True, exist_ok=True)
        self.module.set_mode_if_different(str(path), mode, False)
        self.module.set_owner_if_different(str(path), "root", False)
        self.module.set_group_if_different(str(path), self.module.params["group"], False)

    def candidate(self, given: Mapping[str, Any]) -> Candidate:
        """The release of a unit's text, tried on its engine where it is new to the host."""
        text = given["unit_text"].rstrip("\n") + "\n"
        identity = releases.release_id(text, given["release"])
        new = not self.layout.release_json(self.name, identity).exists()
        if new:
            self.try_arguments(given)
        return Candidate(given["unit"], text, given["release"], identity, new)

    def kept(self, unit: str, identity: str) -> Candidate:
        """A release that is on the host."""
        release = states.read_state(self.layout.release_json(self.name, identity))
        if release is None:
            self.module.fail_json(msg=f"release {identity} of instance {self.name} is not on this host any more")
        text = self.layout.release_unit(self.name, identity, unit).read_text(encoding="utf-8")
        return Candidate(unit, text, release, identity, False)

    def stage(self, wanted: Candidate) -> None:
        """Write releases/<id>/ whole or not at all; nothing is written where it exists."""
        target = self.layout.release_dir(self.name, wanted.identity)
        if not wanted.new:
            return
        self.make_directory(self.layout.instance(self.name), 0o750)
        self.make_directory(self.layout.releases(self.name), 0o750)
        with tempfile.TemporaryDirectory(prefix=".staging-", dir=self.layout.releases(self.name)) as folder:
            built = Path(folder, wanted.identity)
            self.make_directory(built, 0o750)
            for name, text in ((wanted.unit, wanted.text), ("release.json", releases.release_text(wanted.release))):
                path = built / name
                path.write_text(text, encoding="utf-8")
                self.module.set_mode_if_different(str(path), 0o640, False)
                self.module.set_group_if_different(str(path), self.module.params["group"], False)
            self.verify(built / wanted.unit)
            if target.exists():  # left without its release.json by a run that was killed
                shutil.rmtree(target)
            os.rename(built, target)

    def verify(self, path: Path) -> None:
        """Refuse a unit that systemd would not load; what runs is untouched."""
        code, out, err = self.module.run_command(["systemd-analyze", "verify", "--man=no", str(path)])
        if code != 0:
            self.module.fail_json(msg=f"{path.name} is refused by systemd-analyze verify: {(err or out).strip()}")

    def try_arguments(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments that the installed engine's own parser refuses; what runs is untouched."""
        arguments, venv = given["arguments"], str(given["release"].get("venv") or "")
        # Predicting on a host where the environment is still to be built, there is nobody to ask.
        if not arguments or (self.module.check_mode and not Path(venv, ".complete").exists()):
            return
        engine = given["release"].get("engine") or {}
        said = parser_check.ask(
            f"{venv}/bin/python",
            arguments,
            given["environment"],
            user=self.module.params["user"],
            resolve=engine.get("build") in ("cpu", "rehearsal"),
        )
        if said:
            self.module.fail_json(msg=parser_check.refusal(said, engine, arguments), refused=said)

    def reads(self, link: Path) -> str:
        """Where a link points, or nothing."""
        try:
            return os.readlink(link)
        except OSError:
            return ""

    def links(self, identity: str) -> list[tuple[Path, str]]:
        """The links of the instance that point elsewhere now, with where they have to point."""
        wanted = [
            (self.layout.current(self.name), self.layout.current_target(identity)),
            (self.layout.etc_link(self.name), str(self.layout.current(self.name))),
        ]
        return [(link, target) for link, target in wanted if self.reads(link) != target]

    def point(self, link: Path, target: str) -> None:
        """Move a symbolic link with one rename."""
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary = link.with_name(f".{link.name}.new")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, link)

    def install_units(self, wanted: list[Candidate]) -> bool:
        """Copy the releases' units to where systemd reads them, each replaced whole; whether one was another."""
        stale = [one for one in wanted if self.installed_text(one.unit) != one.text]
        for one in stale:
            small_files.put(self.layout.unit_file(one.unit), one.text, 0o644)
        return bool(stale)

    def clear(self, others: list[str], standby: set[str]) -> bool:
        """Take units off the boot, and their files too unless they are on standby; whether anything was there."""
        found = [path for unit in others for path in self.files_in_the_way(unit, standby)]
        for path in found:
            path.unlink()
        return bool(found)

    def files_in_the_way(self, unit: str, standby: set[str]) -> list[Path]:
        """Of another unit: its link for boot, and its file unless it is on standby."""
        return [path for path in self.files_of(unit) if unit not in standby or path != self.layout.unit_file(unit)]

    # -- profiles on standby
    def wanted_standby(self) -> list[Candidate]:
        """As asked for, but for the unit that is switched to."""
        return [self.candidate(given) for given in self.module.params["standby"] if given["unit"] != self.unit]

    def recorded_standby(self) -> list[Candidate]:
        """As the last switch to a new wish left them: what a trial or a person made of them since is put right."""
        return [
            self.kept(unit, identity)
            for unit, identity in sorted(states.read_standby(self.layout, self.name).items())
            if unit != self.unit and self.layout.release_json(self.name, identity).exists()
        ]

    def record_standby(self, standby: list[Candidate]) -> None:
        """Remember them, for those who find one of them running."""
        units = {one.unit: one.identity for one in standby}
        if units != states.read_standby(self.layout, self.name):
            self.make_directory(self.layout.state(self.name), 0o750)
            states.write_state(self.layout.standby(self.name), {"units": units})

    # -- the switch
    def installed_text(self, unit: str) -> str:
        """The unit as installed, or nothing."""
        try:
            return self.layout.unit_file(unit).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def same_engine(self, release: dict, installed: str) -> bool:
        """Whether the current release runs this very engine, and nobody has changed its unit on the host meanwhile."""
        if self.current is None:
            return False
        now = states.read_state(self.layout.release_json(self.name, self.current))
        try:
            text = self.layout.release_unit(self.name, self.current, self.unit).read_text(encoding="utf-8")
        except FileNotFoundError:
            return False
        return now == {"schema": 1, **release} and installed == text

    def recorded(self, identity: str, invocation: str) -> bool:
        """Whether the start that runs, or another one of this release, is on record as good."""
        ready = states.read_state(self.layout.ready(self.name)) or {}
        last_good = states.read_state(self.layout.last_good(self.name)) or {}
        return last_good.get("release_id") == identity or bool(invocation and ready.get("invocation_id") == invocation)

    def begin_trial(self) -> None:
        """Note what runs before the first switch of a trial; a trial that was cut short goes on with the same note."""
        if self.current is None:
            self.module.fail_json(msg=f"instance {self.name} has no current release that a trial could return to")
        if states.read_state(self.layout.trial(self.name)) is not None:
            return
        unit = states.release_unit(self.layout, self.name, self.current)
        if unit is None:
            self.module.fail_json(msg=f"release {self.current} of instance {self.name} has lost its unit")
        known = [name for name in states.list_dirs(self.layout.releases(self.name)) if name[0] != "."]
        self.make_directory(self.layout.state(self.name), 0o750)
        states.write_state(
            self.layout.trial(self.name),
            {"release_id": self.current, "unit": unit, "releases": known, "begun_at": states.now_utc()},
        )

    def end_trial(self) -> bool:
        """What serves now is on record: nothing is left to return to, and what only the trial needed goes."""
        trial = states.read_state(self.layout.trial(self.name))
        if trial is None:
            return False
        if not self.module.check_mode:
            kept = {*trial["releases"], self.current, *states.read_standby(self.layout, self.name).values()}
            for name in states.list_dirs(self.layout.releases(self.name)):
                if name[0] != "." and name not in kept:
                    shutil.rmtree(self.layout.release_dir(self.name, name))
            self.layout.trial(self.name).unlink()
        return True

    def to(self, wanted: Candidate, standby: list[Candidate], on_standby: set[str]) -> None:
        """Stop what runs and move `current`."""
        others = self.other_units()
        for other in others:
            # Its evidence is in the journal and its text in its release.
            self.systemctl("stop", other, check=False)
        if not self.module.params["trial"]:  # what ran before is what a boot in the middle of a trial should bring back
            self.clear(others, on_standby)
        self.install_units([wanted, *standby])
        for link, target in self.links(wanted.identity):
            self.point(link, target)
        self.systemctl("daemon-reload")
        self.forget(others)

    def forget(self, units: list[str]) -> None:
        """Units that ended by a signal, as older engines do at every stop, would read as failed from now on."""
        for unit in units:
            self.systemctl("reset-failed", unit, check=False)

    def start(self) -> str:
        """Queue a fresh start and return its invocation."""
        before = self.show(self.unit)["InvocationID"]
        self.systemctl("reset-failed", self.unit, check=False)
        self.systemctl("restart", "--no-block", self.unit)
        # systemd names the new invocation once the old engine has left, and the unit limits how long that may take.
        deadline = time.monotonic() + START_LIMIT
        again = 3
        while time.monotonic() < deadline:
            now = self.show(self.unit)
            if now["InvocationID"] not in ("", before) and not self.is_leaving():
                return now["InvocationID"]
            # An engine that ends by a signal is failed for a moment; our start's job still waits then.
            if now["ActiveState"] == "failed" and now.get("Job", "0") in ("", "0"):
                if not again:
                    return now["InvocationID"]
                # The host's reporter may have ended the restarts of the crash before, a moment after ours was queued.
                again -= 1
                self.systemctl("restart", "--no-block", self.unit)
            time.sleep(0.05)
        self.module.fail_json(
            msg=f"{self.unit} was not started within {START_LIMIT} s: the engine before it does not leave "
            "(systemctl list-jobs shows what is waited for)"
        )

    def is_leaving(self) -> bool:
        """A start by Restart= that came a moment before ours is stopped by it first."""
        jobs = self.systemctl("list-jobs", "--no-legend", "--no-pager", self.unit, check=False)
        return any(word in ("stop", "restart") for word in jobs.split())

    def prunable(self, identity: str, standby: list[str]) -> list[Path]:
        """The oldest releases beyond the number kept; those on standby are not counted."""
        if self.module.params["trial"]:
            return []
        last_good = states.read_state(self.layout.last_good(self.name)) or {}
        folder = self.layout.releases(self.name)
        existing = [(name, (folder / name).stat().st_mtime) for name in states.list_dirs(folder) if name[0] != "."]
        protected = [identity, self.current, last_good.get("release_id")]
        counted = [item for item in existing if item[0] not in standby or item[0] in protected]
        return [folder / name for name in releases.prunable(counted, protected, self.module.params["keep"])]


def switch(module: AnsibleModule, host: Switch) -> None:
    """state=current and state=staged."""
    params = module.params
    wanted = host.kept(host.unit, params["release_id"]) if params["release_id"] else host.candidate(params)
    if params["state"] == "staged":
        if not module.check_mode:
            host.stage(wanted)
        module.exit_json(
            changed=wanted.new, id=wanted.identity, previous=host.current, changes=wanted.written(host),
            release={"schema": 1, **wanted.release},
        )  # fmt: skip
    standby = host.recorded_standby() if params["release_id"] else host.wanted_standby()
    on_standby = {one.unit for one in standby}
    before = host.show(host.unit)
    others = host.other_units()
    busy = host.running(f"sglang-{host.name}-*.service").intersection(others) if others else set()
    gone = [path for unit in others for path in host.files_in_the_way(unit, on_standby) if not params["trial"]]
    installed = host.installed_text(host.unit)
    stale = [one for one in standby if host.installed_text(one.unit) != one.text]
    in_place = host.current == wanted.identity and installed == wanted.text and not busy
    runs = before["ActiveState"] in ("active", "activating", "reloading") and before["SubState"] != "auto-restart"
    waits = not params["restart_on_unit_change"] and not busy
    pending = runs and waits and host.same_engine(wanted.release, installed)
    restart = not (in_place and runs) and not pending
    links = host.links(wanted.identity)
    boot = not host.layout.boot_link(host.unit).is_symlink()  # made when a start has passed its gate
    outdated = host.prunable(wanted.identity, [one.identity for one in standby])
    shown = host.unit if installed else next((unit for unit in others if unit in busy), (others or [""])[0])
    result: dict[str, Any] = {
        "id": wanted.identity,
        "previous": host.current,
        "restarted": restart,
        "pending": pending and not in_place,
        "recorded": host.recorded(wanted.identity, before["InvocationID"]),
        "release": {"schema": 1, **wanted.release},
        "changes": [
            *(path for one in (wanted, *standby) for path in one.written(host)),
            *map(str, gone),
            *sorted(busy),
            *(str(host.layout.unit_file(one.unit)) for one in stale),
            *([str(host.layout.unit_file(host.unit))] if installed != wanted.text else []),
            *(str(link) for link, _ in links),
            *([str(host.layout.boot_link(host.unit))] if boot else []),
            *([host.unit, *map(str, outdated)] if restart else []),
        ],
    }
    result["changed"] = bool(result["changes"])
    if result["changed"]:
        now = host.installed_text(shown) if shown else ""
        shown_change = releases.diff(now, shown, wanted.text, host.unit, restart, result["pending"])
        beside = [releases.diff(host.installed_text(one.unit), "", one.text, one.unit, False) for one in stale]
        result["diff"] = [shown_change, *beside] if beside else shown_change
    if module.check_mode:
        module.exit_json(**result)
    if params["trial"]:
        host.begin_trial()
    for one in (wanted, *standby):
        host.stage(one)
    if not params["release_id"] and not params["trial"]:
        host.record_standby(standby)
    if restart:
        host.to(wanted, standby, on_standby)
        result["invocation_id"] = host.start()
        for folder in outdated:
            shutil.rmtree(folder)
    else:
        cleared = not params["trial"] and host.clear(others, on_standby)
        for link, target in links:
            host.point(link, target)
        if host.install_units([wanted, *standby]) or cleared:
            host.systemctl("daemon-reload")
        if cleared:
            host.forget(others)
        result["invocation_id"] = before["InvocationID"]
        ready = states.read_state(host.layout.ready(host.name)) or {}
        # A start that has passed its gate is not gated again for a lost link; one that has not is enabled when it has.
        if boot and before["InvocationID"] and ready.get("invocation_id") == before["InvocationID"]:
            host.systemctl("enable", host.unit)
    module.exit_json(**result)


def add_start(host: Switch, identity: str | None, gate: dict, outcome: str) -> None:
    """One line of starts.jsonl."""
    host.make_directory(host.layout.state(host.name), 0o750)
    states.append_start(
        host.layout.starts(host.name),
        {
            "unit": host.unit,
            "release_id": identity,
            "ended_at": states.now_utc(),
            "outcome": outcome,
            "remedy": (gate.get("fallbacks") or [None])[-1],
            **{name: gate.get(name) for name in ("invocation_id", "seconds", "phase", "cause", "summary")},
        },
    )


def record_failure(module: AnsibleModule, host: Switch) -> None:
    """state=failed."""
    gate = module.params["gate"] or {}
    if not module.check_mode:
        add_start(host, host.current, gate, str(gate.get("outcome")))
    module.exit_json(changed=True, id=host.current)


def record(module: AnsibleModule, host: Switch) -> None:
    """state=good."""
    gate = module.params["gate"] or {}
    identity = host.current
    if identity is None:
        module.fail_json(msg=f"instance {host.name} has no current release to record")
    release = states.read_state(host.layout.release_json(host.name, identity)) or {}
    known = states.read_state(host.layout.ready(host.name)) or {}
    enabled = host.show(host.unit)["UnitFileState"] == "enabled"
    same = known.get("invocation_id") == gate.get("invocation_id") and known.get("release_id") == identity
    trial = host.end_trial()
    changed = not (same and enabled) or trial
    overrides = release.get("overrides") or {}
    now = states.now_utc()
    ready = {
        "unit": host.unit,
        "release_id": identity,
        "ready_at": now,
        "degraded": bool(overrides),
        **gate,
    }
    result = {"changed": changed, "id": identity, "release": release, "ready": ready}
    if module.check_mode or not changed:
        module.exit_json(**result)
    host.make_directory(host.layout.state(host.name), 0o750)
    if not same:
        states.write_state(host.layout.ready(host.name), ready)
        states.write_state(
            host.layout.last_good(host.name),
            {"release_id": identity, "unit": host.unit, "recorded_at": now, "phases": gate.get("phases", [])},
        )
        add_start(host, identity, gate, "ready")
    if module.params["rung"]:
        rung = dict(module.params["rung"])
        known_rungs = states.read_state(host.layout.rungs(host.name))
        states.write_state(
            host.layout.rungs(host.name),
            states.record_rung(
                known_rungs,
                rung["key"],
                remedy=rung["remedy"],
                set=rung["set"],
                cause=rung["cause"],
                unit=host.unit,
                seconds_to_ready=gate.get("seconds"),
            ),
        )
    host.systemctl("enable", host.unit)
    module.exit_json(**result)


def main() -> None:
    """Read the arguments, do the one or the other."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/sglang"},
            "instance": {"type": "str", "required": True},
            "unit": {"type": "str", "required": True},
            "unit_text": {"type": "str"},
            "release": {"type": "dict"},
            "release_id": {"type": "str"},
            "standby": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "unit": {"type": "str", "required": True},
                    "unit_text": {"type": "str", "required": True},
                    "release": {"type": "dict", "required": True},
                    "arguments": {"type": "list", "elements": "str", "default": []},
                    "environment": {"type": "dict", "default": {}},
                },
            },
            "arguments": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "user": {"type": "str", "default": "sglang"},
            "state": {"type": "str", "choices": ["current", "staged", "good", "failed"], "default": "current"},
            "gate": {"type": "dict"},
            "rung": {"type": "dict"},
            "group": {"type": "str", "default": "sglang"},
            "keep": {"type": "int", "default": 5},
            "restart_on_unit_change": {"type": "bool", "default": True},
            "trial": {"type": "bool", "default": False},
        },
        required_together=[("unit_text", "release")],
        mutually_exclusive=[("release_id", "unit_text")],
        supports_check_mode=True,
    )
    wanted = module.params["release_id"] or module.params["unit_text"]
    if module.params["state"] in ("current", "staged") and not wanted:
        module.fail_json(msg=f"state={module.params['state']} needs unit_text and release, or release_id")
    try:
        host = Switch(module)
        if module.params["state"] == "good":
            record(module, host)
        elif module.params["state"] == "failed":
            record_failure(module, host)
        else:
            switch(module, host)
    except states.StateError as problem:
        module.fail_json(msg=str(problem))


if __name__ == "__main__":
    main()
