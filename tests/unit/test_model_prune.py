"""Which revisions of models may go: never one that anything names."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import subprocess
import sys
import time

import pytest
from dflash_fleet import model_prune, snapshot

# Names that no other process of the machine has in its arguments: pruning spares what a running one mentions.
A, B, C, D = sorted(secrets.token_hex(20) for _ in range(4))
REPO, OTHER = "org--model", "org--drafter"


@pytest.fixture
def models(tmp_path):
    root = tmp_path / "sglang" / "models"
    root.mkdir(parents=True)
    return root


def revision(models, name, at="2026-11-01T00:00:00.000000Z", repo=REPO, size=1000):
    """A published revision, as far as its manifest goes."""
    folder = models / repo / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * size)
    manifest = {"schema": 1, "written_at": at, "files": []}
    (folder / snapshot.MANIFEST).write_text(json.dumps(manifest))
    return folder


def leftover(models, name, days, repo=REPO):
    """Something with an old file in it, changed so many days ago."""
    folder = models / repo / name
    (folder / ".cache").mkdir(parents=True)
    (folder / ".cache" / "x.part").write_bytes(b"x" * 500)
    then = time.time() - days * 86400
    for path in (folder / ".cache" / "x.part", folder / ".cache", folder):
        os.utime(path, (then, then))
    return folder


def plan(models, wanted=(), keep=0, units=()):
    found = model_prune.plan(models, [str(path) for path in wanted], keep, units)
    return {kind: [os.path.relpath(entry["path"], models) for entry in entries] for kind, entries in found.items()}


def test_the_newest_unused_ones_of_each_repository_stay(models):
    wanted = revision(models, A, "2026-11-01")
    for name, at in ((B, "2026-11-04"), (C, "2026-11-03"), (D, "2026-11-02")):
        revision(models, name, at)
    revision(models, B, "2026-10-01", OTHER)
    assert plan(models, [wanted], keep=1)["remove"] == [f"{REPO}/{C}", f"{REPO}/{D}"]
    assert plan(models, [wanted], keep=1)["spare"] == [f"{OTHER}/{B}", f"{REPO}/{B}"]
    assert plan(models, [wanted], keep=2)["remove"] == [f"{REPO}/{D}"]
    assert plan(models, [wanted], keep=9)["remove"] == []
    assert plan(models, [wanted])["remove"] == [f"{OTHER}/{B}", f"{REPO}/{B}", f"{REPO}/{C}", f"{REPO}/{D}"]


@pytest.mark.parametrize("where", ["unit", "release", "state", "argument", "open", "mapped"])
def test_what_anything_names_stays(models, tmp_path, where):
    named, spare = revision(models, A), revision(models, B)
    unit = tmp_path / "sglang-main-tp8.service"
    unit.write_text(f"ExecStart=/v/bin/python --model-path={named}\n" if where == "unit" else "")
    path = {"release": "main/releases/7/release.json", "state": "main/state/last_good.json"}.get(where)
    if path:
        file = models.parent / path
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"model": {"path": str(named)}}))
    code = {
        "argument": "pass",
        "open": "f = open(sys.stdin.readline().strip())",
        "mapped": "f = open(sys.stdin.readline().strip()); m = mmap.mmap(f.fileno(), 0, prot=1); f.close()",
    }.get(where)
    process = None
    if code is not None:
        code = f"import mmap, sys, time; {code}; print('there', flush=True); time.sleep(60)"
        command = [sys.executable, "-c", code]
        command += [str(named)] if where == "argument" else []
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process.stdin.write(f"{named}/model.safetensors\n")
        process.stdin.flush()
        process.stdout.readline()
    try:
        assert plan(models, units=[unit])["remove"] == [os.path.relpath(spare, models)]
    finally:
        if process:
            process.kill()
            process.communicate()


def test_leftovers(models):
    wanted = models / REPO / A
    leftover(models, f"{A}.partial", 30)  # of a revision that is wanted: the fetch goes on from there
    leftover(models, f"{B}.partial", 1)
    leftover(models, f"{C}.partial", 8)
    leftover(models, f"{D}.doomed", 0)
    found = model_prune.plan(models, [str(wanted)], 1, [])
    assert [(os.path.basename(e["path"]), e["bytes"]) for e in found["remove"]] == [
        (f"{C}.partial", 500), (f"{D}.doomed", 500),
    ]  # fmt: skip
    assert [os.path.basename(e["path"]) for e in found["waiting"]] == [f"{B}.partial"]
    assert model_prune.remove(found["remove"]) == []
    assert sorted(os.listdir(models / REPO)) == [f"{A}.partial", f"{B}.partial"]


def test_a_file_that_still_grows_is_no_leftover(models):
    folder = leftover(models, f"{B}.partial", 30)
    (folder / ".cache" / "x.part").write_bytes(b"more")
    assert plan(models)["remove"] == []


def test_what_is_not_ours_stays(models):
    by_hand = models / REPO / A  # being filled by rsync: no manifest yet
    by_hand.mkdir(parents=True)
    (models / REPO / "notes").mkdir()
    (models / REPO / "main").mkdir()
    elsewhere = revision(models.parent, B, repo="elsewhere")
    (models / REPO / B).symlink_to(elsewhere)
    assert plan(models) == {"remove": [], "spare": [], "waiting": []}


def test_nothing_there(tmp_path):
    assert plan(tmp_path / "sglang" / "models")["remove"] == []


def test_not_while_the_repository_is_fetched(models):
    folder = revision(models, A)
    entries = model_prune.plan(models, [], 0, [])["remove"]
    with locked(models / REPO):
        assert model_prune.remove(entries) == entries
        assert folder.is_dir()
    assert model_prune.remove(entries) == []
    assert os.listdir(models / REPO) == []


@contextlib.contextmanager
def locked(folder):
    """As snapshot.Lock has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_killed_in_the_middle_of_a_removal(models, monkeypatch):
    """From its first moment on the revision is none, and the next run removes the rest."""
    revision(models, A)
    entries = model_prune.plan(models, [], 0, [])["remove"]

    def killed(_folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(model_prune.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            model_prune.remove(entries)
    assert os.listdir(models / REPO) == [f"{A}.doomed"]
    revision(models, A)  # and meanwhile it has been fetched again
    (again,) = model_prune.plan(models, [str(models / REPO / A)], 0, [])["remove"]
    assert again["path"].endswith(".doomed")
    model_prune.remove([again])
    assert os.listdir(models / REPO) == [A]
