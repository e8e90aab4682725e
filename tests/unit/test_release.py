"""Releases: their identity, what may go, what the diff shows."""

from __future__ import annotations

import json

import pytest
from dflash_fleet import release

UNIT = "[Service]\nExecStart=/bin/true\n"


def test_the_id_follows_from_everything_a_release_holds():
    identity = release.release_id(UNIT, {"profile": "ep8", "overrides": {"a": 1, "b": 2}})
    assert identity == release.release_id(UNIT, {"overrides": {"b": 2, "a": 1}, "profile": "ep8"})
    assert identity != release.release_id(UNIT + "\n", {"profile": "ep8", "overrides": {"a": 1, "b": 2}})
    assert identity != release.release_id(UNIT, {"profile": "ep4", "overrides": {"a": 1, "b": 2}})
    assert len(identity) == 12


def test_release_text_has_its_schema():
    assert json.loads(release.release_text({"profile": "ep8"})) == {"schema": 1, "profile": "ep8"}


def test_key_digest_changes_with_the_key_and_does_not_show_it():
    assert release.key_digest("") is None
    assert release.key_digest("secret-1") != release.key_digest("secret-2")
    assert len(release.key_digest("secret-1")) == 8


@pytest.mark.parametrize(
    ("existing", "protected", "keep", "gone"),
    [
        ([("a", 1), ("b", 2), ("c", 3)], ["c"], 2, ["a"]),
        ([("a", 1), ("b", 2), ("c", 3)], ["c", "a"], 2, ["b"]),
        ([("a", 1), ("b", 2), ("c", 3)], ["c", None], 5, []),
        ([("a", 1), ("b", 2), ("c", 3)], ["a"], 1, ["b", "c"]),
        ([("a", 1), ("b", 2)], ["a", "b"], 1, []),
    ],
)
def test_prunable(existing, protected, keep, gone):
    assert release.prunable(existing, protected, keep) == gone


def test_diff_names_the_units_and_the_restart():
    shown = release.diff("old\n", "sglang-main-ep8.service", "new\n", "sglang-main-tp8.service", True)
    assert shown["before_header"] == "sglang-main-ep8.service"
    assert shown["after_header"] == "sglang-main-tp8.service  (restart: sglang-main-tp8.service)"
    assert release.diff("", "", "new\n", "u", True)["before_header"] == "nothing deployed"
