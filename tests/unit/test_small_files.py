"""Small files of a host: only differences are written, and a command that fails leaves everything as it was."""

from __future__ import annotations

import pytest
from dflash_fleet import small_files


def test_only_differences_are_written_and_each_command_runs_once(tmp_path):
    same, other, gone, new = (tmp_path / name for name in ("same", "other", "gone", "deep/new"))
    same.write_text("a\n")
    same.chmod(0o644)
    other.write_text("a\n")
    gone.write_text("x")
    files = [
        {"path": str(same), "content": "a\n", "then": ["never"]},
        {"path": str(other), "content": "b\n", "then": ["reload"]},
        {"path": str(gone), "content": None, "then": ["reload"]},
        {"path": str(new), "content": "c\n", "mode": "0600"},
        {"path": str(tmp_path / "absent"), "content": None, "then": ["never"]},
    ]
    ran = []
    changed = small_files.differences(files)
    assert [entry["path"] for entry in changed] == [str(other), str(gone), str(new)]
    assert small_files.apply(changed, ran.append) == [["reload"]]
    assert ran == [["reload"]]
    assert (other.read_text(), gone.exists(), new.read_text()) == ("b\n", False, "c\n")
    assert new.stat().st_mode & 0o777 == 0o600
    assert small_files.differences(files) == []


def test_a_command_that_fails_leaves_all_as_it_was(tmp_path):
    old, new, gone = tmp_path / "old", tmp_path / "new", tmp_path / "gone"
    old.write_text("before\n")
    old.chmod(0o640)
    gone.write_text("there\n")
    files = [
        {"path": str(old), "content": "after\n"},
        {"path": str(gone), "content": None},
        {"path": str(new), "content": "new\n", "then": ["sh", "-c", "echo broken >&2; exit 3"]},
    ]
    with pytest.raises(small_files.FileError, match=r"exit status 3\): broken"):
        small_files.apply(small_files.differences(files))
    assert (old.read_text(), old.stat().st_mode & 0o777) == ("before\n", 0o640)
    assert not new.exists()
    assert gone.read_text() == "there\n"
    assert len(small_files.differences(files)) == 3  # the next run tries again


def test_a_program_that_the_host_lacks_is_left_out(tmp_path):
    new = tmp_path / "new"
    files = [{"path": str(new), "content": "new\n", "then": ["no-such-program-here", "-u"]}]
    small_files.apply(small_files.differences(files))
    assert new.read_text() == "new\n", "it is put back only where a command fails"
