"""What differs between SGLang releases: versions, and options that appeared, moved or vanished.

The hand-kept part is small: the options this project writes itself and that changed their spelling. Which option exists
in which release at all stands in release_options.py, read from the released packages (tests/parsers/option_table.py).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from . import release_options

#: Releases this project knows, oldest first. DFLASH exists from 0.5.11 on (0.5.10.post1 has no dflash files).
KNOWN: tuple[str, ...] = tuple(release_options.RELEASES)
OLDEST = KNOWN[0]
NEWEST = KNOWN[-1]

_VERSION = re.compile(r"^(\d+)\.(\d+)\.(\d+)(?:\.?(rc|post)(\d+))?(?:\+[a-z0-9.]+)?$")


class Version(NamedTuple):
    """A release that compares as people expect: 0.5.12rc1 < 0.5.12 < 0.5.12.post1 < 0.5.13."""

    major: int
    minor: int
    patch: int
    stage: int  # -1 release candidate, 0 release, 1 post-release
    number: int

    def __str__(self) -> str:
        tail = {-1: f"rc{self.number}", 0: "", 1: f".post{self.number}"}[self.stage]
        return f"{self.major}.{self.minor}.{self.patch}{tail}"


def parse_version(text: str) -> Version:
    """Parse a release; a local label such as `+rehearsal` does not count. ValueError for anything else."""
    match = _VERSION.match(str(text).strip())
    if not match:
        raise ValueError(f"{text!r} is not an SGLang release (expected e.g. {NEWEST} or 0.5.12.post1)")
    major, minor, patch, stage, number = match.groups()
    return Version(int(major), int(minor), int(patch), {None: 0, "rc": -1, "post": 1}[stage], int(number or 0))


def is_known(version: str) -> bool:
    """Whether the release is one whose options this project has read."""
    return str(parse_version(version)) in KNOWN


def nearest(version: str) -> str:
    """The known release whose option table applies: the newest known one that is not newer than `version`."""
    wanted = parse_version(version)
    older = [known for known in KNOWN if parse_version(known) <= wanted]
    return older[-1] if older else OLDEST


class UnsupportedOption(ValueError):
    """An option that a release does not have, with the releases that have it."""

    def __init__(self, name: str, version: str, available: str) -> None:
        super().__init__(f"SGLang {version} has no --{name}; {available}")
        self.name = name
        self.version = version
        self.available = available


#: Spellings of one and the same setting, oldest first: (first release, last release or None, option).
#: The later spelling wins where two releases overlap, since the earlier one is deprecated from there on.
MOVED: dict[str, list[tuple[str, str | None, str]]] = {
    "cuda-graph-max-bs-decode": [
        ("0.5.11", "0.5.13", "cuda-graph-max-bs"),
        ("0.5.14", None, "cuda-graph-max-bs-decode"),
    ],
    "cuda-graph-bs-decode": [("0.5.11", "0.5.13", "cuda-graph-bs"), ("0.5.14", None, "cuda-graph-bs-decode")],
    "speculative-draft-window-size": [
        ("0.5.11", "0.5.11", "speculative-dflash-draft-window-size"),
        ("0.5.12", None, "speculative-draft-window-size"),
    ],
    "disable-prefill-cuda-graph": [
        ("0.5.11", "0.5.13", "disable-piecewise-cuda-graph"),
        ("0.5.14", None, "disable-prefill-cuda-graph"),
    ],
}

#: Any spelling -> the key of MOVED, so that an inventory written for one release works on the others.
_CANONICAL: dict[str, str] = {option: key for key, rows in MOVED.items() for _, _, option in rows}


def _within(version: Version, first: str, last: str | None) -> bool:
    if version < parse_version(first):
        return False
    return last is None or version <= parse_version(last)


def available_in(name: str) -> str:
    """In words, which known releases have the option: `it exists in 0.5.14 and later`."""
    spans = release_options.OPTIONS.get(name)
    if not spans:
        return "no release from " + OLDEST + " to " + NEWEST + " has it"
    words = []
    for first, last in spans:
        if first == last:
            words.append(first)
        elif last == NEWEST:
            words.append(f"{first} and later")
        else:
            words.append(f"{first} to {last}")
    return "it exists in " + ", ".join(words)


def has_option(version: str, name: str) -> bool:
    """Whether the release's command line takes exactly `--name` (newer releases than known: as the newest known)."""
    release = parse_version(nearest(version))
    return any(_within(release, first, last) for first, last in release_options.OPTIONS.get(name, ()))


def option_for(version: str, name: str) -> str:
    """The spelling, with its dashes, under which a release takes the setting `name` (any release's spelling of it).

    Raises UnsupportedOption where the release has no such setting at all.
    """
    name = name.lstrip("-")
    release = parse_version(nearest(version))
    for first, last, option in MOVED.get(_CANONICAL.get(name, name), ()):
        if _within(release, first, last):
            return "--" + option
    if has_option(version, name):
        return "--" + name
    raise UnsupportedOption(name, version, available_in(name))


def same_setting(name: str, other: str) -> bool:
    """Whether two options, each in any release's spelling, are one setting."""
    return _CANONICAL.get(name, name) == _CANONICAL.get(other, other)


def takes_value(name: str) -> bool:
    """False for a bare switch (store_true and its kin) in the releases that have the option."""
    return name not in release_options.SWITCHES


def graph_options(version: str, effective: str) -> list[tuple[str, str | None]]:
    """The options that bring CUDA graphs into the state `effective` (enabled: none, graphs are SGLang's default).

    Up to 0.5.13 `--disable-cuda-graph` leaves the piecewise prefill graph alone, so "disabled" takes both switches
    there (0.5.11 model_runner.py:2761, :2805). From 0.5.14 on it is deprecated in favour of one backend per phase.
    """
    by_phase = parse_version(nearest(version)) >= parse_version("0.5.14")
    if effective == "enabled":
        return []
    if effective == "disabled":
        if by_phase:
            return [("--cuda-graph-backend-decode", "disabled"), ("--cuda-graph-backend-prefill", "disabled")]
        return [("--disable-cuda-graph", None), ("--disable-piecewise-cuda-graph", None)]
    if effective == "decode_only":
        if by_phase:
            return [("--cuda-graph-backend-decode", "full"), ("--cuda-graph-backend-prefill", "disabled")]
        return [("--disable-piecewise-cuda-graph", None)]
    if effective == "prefill_disabled":
        return [(option_for(version, "disable-prefill-cuda-graph"), None)]
    raise ValueError(f"unknown state of CUDA graphs: {effective}")
