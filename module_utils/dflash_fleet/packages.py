"""Distribution packages of a host, by apt and dpkg themselves: needs neither python3-apt nor anything else that a small
host may lack.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


class PackageError(Exception):
    """What went wrong, in words for the person who runs the play."""


@dataclass(frozen=True)
class Package:
    """A package as dpkg knows it."""

    name: str
    version: str
    installed: bool
    held: bool


def parse_dpkg(text: str) -> dict[str, Package]:
    """`dpkg-query -W -f '${Package}\\t${Version}\\t${db:Status-Abbrev}\\n'` by name (the first architecture's)."""
    found: dict[str, Package] = {}
    for line in text.splitlines():
        words = line.split("\t")
        if len(words) == 3 and words[0] not in found:
            name, version, status = words
            # Two letters: what is wanted (h: held) and how it is (i: installed).
            found[name] = Package(name, version, status[1:2] == "i", status[:1] == "h")
    return found


def lacking(names: Iterable[str], known: Mapping[str, Package]) -> list[str]:
    """Those of these packages that are not installed, in order. `a|b` is met by either; the first is installed."""
    missing = []
    for name in names:
        choices = name.split("|")
        if not any(choice in known and known[choice].installed for choice in choices):
            missing.append(choices[0])
    return missing


def parse_simulation(text: str) -> dict[str, str]:
    """{package: version} of what `apt-get --simulate install` would put in."""
    return dict(re.findall(r"^Inst (\S+?)(?::\w+)? (?:\[[^]]*\] )?\((\S+)", text, re.M))


class Apt:
    """apt and dpkg of the host."""

    #: Where apt waits for another apt (unattended-upgrades at boot, for example).
    LOCK_SECONDS = 300

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = {
            **os.environ,
            **(environment or {}),
            "LC_ALL": "C.UTF-8",
            "DEBIAN_FRONTEND": "noninteractive",
            # needrestart would restart services, engines among them, at the end of each apt run.
            "NEEDRESTART_SUSPEND": "1",
        }

    def run(self, words: Sequence[str], doing: str) -> str:
        try:
            done = subprocess.run(
                list(words), capture_output=True, text=True, check=False, env=self.environment, stdin=subprocess.DEVNULL
            )
        except OSError as problem:
            raise PackageError(f"{words[0]} cannot be run: {problem.strerror}")
        if done.returncode != 0:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise PackageError(f"{doing} failed (exit status {done.returncode}):\n" + "\n".join(lines[-12:]))
        return done.stdout

    def packages(self) -> dict[str, Package]:
        """Every package that dpkg knows."""
        form = "${Package}\\t${Version}\\t${db:Status-Abbrev}\\n"
        return parse_dpkg(self.run(["dpkg-query", "--show", f"--showformat={form}"], "asking dpkg"))

    def get(self, *words: str, doing: str) -> str:
        lock = f"DPkg::Lock::Timeout={self.LOCK_SECONDS}"
        return self.run(["apt-get", "-q", "-y", "-o", lock, *words], doing)

    def update(self) -> None:
        self.get("update", doing="apt-get update")

    def install(self, names: Sequence[str], simulate: bool = False) -> str:
        """Install or change packages; local configuration files stay as they are."""
        options = [
            *(["--simulate"] if simulate else []),
            "--no-install-recommends",
            "--allow-change-held-packages",
            "--allow-downgrades",
            "-o",
            "Dpkg::Options::=--force-confdef",
            "-o",
            "Dpkg::Options::=--force-confold",
        ]
        return self.get(*options, "install", *names, doing=f"apt-get install {' '.join(names)}")

    def hold(self, names: Sequence[str]) -> None:
        self.run(["apt-mark", "hold", *names], "apt-mark hold")
