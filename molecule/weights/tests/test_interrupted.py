"""Weights on a host where everything goes wrong: what is there stays, and the next run ends as a clean one."""

from __future__ import annotations

import json

import faults
import mirror
import pytest
from mirror import A, B, C

SMALL = "/mnt/small"


@pytest.mark.parametrize("moment", ["begun", "one shard is there"])
def test_killed_fetch_ends_as_a_clean_one(host, hub, moment):
    mirror.killed_and_again(host, hub, moment)


def clients(host):
    return faults.sh(host, "sh -c \"pgrep -f 'hub_fetc[h]' || true\"").split()


def test_a_play_that_was_killed_goes_on_watching_the_same_fetch(host, hub):
    mirror.forget(host)
    hub.slow(1_500_000)
    run = mirror.start(host, hub)
    mirror.until(host, f"ls {mirror.home()}/{A}.partial/.cache/dflash-fleet/*.part 2>/dev/null")
    mirror.kill_controller(run)
    before = clients(host)
    assert len(before) == 1
    second = mirror.start(host, hub)
    mirror.until(host, "[ $(pgrep -fc '/usr/bin/python3$') -ge 2 ]")  # the new run looks
    assert clients(host) == before
    output = mirror.ended(second)
    assert second.returncode == 0, output
    assert mirror.changed(output) == 1
    assert hub.server.stats["bytes"] == hub.bytes
    assert clients(host) == []


def test_the_host_loses_everything_but_the_play_goes_on(host, hub):
    """The fetch and the SSH session that watches it die on the host: the task starts it anew."""
    mirror.forget(host)
    hub.slow(4_000_000)
    run = mirror.start(host, hub)
    mirror.until(host, f"ls {mirror.home()}/{A}.partial/.cache/dflash-fleet/*.part 2>/dev/null")
    faults.sh(host, "pkill -9 -f 'python3( |$)|hub_fetc[h]'")
    output = mirror.ended(run)
    assert run.returncode == 0, output
    assert mirror.changed(output) == 1
    assert faults.sh(host, f"ls {mirror.home()}").split() == [A]


@pytest.fixture
def small(host):
    """A filesystem that holds one revision and not two, with the first on it and a process that reads it."""
    reader = "reader-canary"
    faults.sh(host, f"mkdir -p {SMALL} && mount -t tmpfs -o size=120m,mode=0755 tmpfs {SMALL}")
    yield reader
    with host.sudo():
        host.run(f"systemctl stop {reader} filler")
    faults.sh(host, f"umount -l {SMALL}")


def test_disk_that_is_too_small_is_told_beforehand(host, hub, small):
    mirror.fetch(host, hub, A, sglang_root=SMALL)
    before = mirror.tree(host, A, SMALL)
    hub.wrong()
    output = mirror.fetch(host, hub, B, rc=2, sglang_root=SMALL)
    assert "weights/big needs 72 MB more" in output
    assert "sglang_root" in output
    assert hub.server.stats["get"] == 0
    assert mirror.tree(host, A, SMALL) == before
    # Predicting says the same.
    assert "needs 72 MB more" in mirror.fetch(host, hub, B, "--check", rc=2, sglang_root=SMALL)
    # A revision that nothing names makes room, and check mode knows it.
    predicted = mirror.fetch(host, hub, B, "--check", sglang_root=SMALL, model_weights_keep=0)
    assert mirror.changed(predicted) == 2
    assert mirror.tree(host, A, SMALL) == before
    assert mirror.changed(mirror.fetch(host, hub, B, sglang_root=SMALL, model_weights_keep=0)) == 2
    assert faults.sh(host, f"ls {mirror.home(SMALL)}").split() == [B]


def test_disk_that_fills_up_in_between_leaves_what_runs(host, hub, small):
    faults.sh(host, f"mount -o remount,size=200m {SMALL}")
    mirror.fetch(host, hub, A, sglang_root=SMALL)
    before = mirror.tree(host, A, SMALL)
    shard = f"{mirror.home(SMALL)}/{A}/{mirror.SHARDS[0]}"
    faults.sh(host, f"systemd-run --unit={small} --collect sh -c 'exec 3<{shard}; sleep 600'")
    pid = faults.sh(host, f"systemctl show -P MainPID {small}")
    # As soon as the second revision is begun, somebody else takes the rest of the disk.
    begun = f"test -d {mirror.home(SMALL)}/{B}.partial"
    faults.background(host, "filler", f"while ! {begun}; do sleep 0.01; done\ncat /dev/zero > {SMALL}/filler\n")
    hub.slow(8_000_000)
    output = mirror.fetch(host, hub, B, rc=2, sglang_root=SMALL)
    assert "ran full while weights/big was fetched" in output
    assert mirror.tree(host, A, SMALL) == before
    assert faults.sh(host, f"systemctl show -P MainPID {small}") == pid
    assert not host.file(f"{mirror.home(SMALL)}/{B}").exists
    faults.sh(host, f"rm {SMALL}/filler")
    hub.wrong()
    # A is in use by the process alone: it stays though no revision is to be kept.
    assert mirror.changed(mirror.fetch(host, hub, B, sglang_root=SMALL, model_weights_keep=0)) == 1
    assert faults.sh(host, f"ls {mirror.home(SMALL)}").split() == [A, B]
    assert mirror.tree(host, A, SMALL) == before


def test_without_a_hub(host, hub):
    """An offline host: what is there is enough, and what is not is said at once."""
    mirror.fetch(host, hub, A)
    nobody = {"model_weights_endpoint": "http://127.0.0.1:9"}
    before = mirror.tree(host)
    assert mirror.changed(mirror.fetch(host, hub, A, **nobody)) == 0
    assert mirror.changed(mirror.fetch(host, hub, A, model_weights_verify="full", **nobody)) == 0
    faults.sh(host, f"mkdir -p {mirror.home()}/{C}.partial && touch {mirror.home()}/{C}.partial/stray")
    output = mirror.fetch(host, hub, C, rc=2, **nobody)
    assert "http://127.0.0.1:9 cannot be reached" in output
    assert "model_weights_endpoint" in output
    assert not host.file(f"{mirror.home()}/{C}").exists
    faults.sh(host, f"rm -r {mirror.home()}/{C}.partial")
    assert mirror.tree(host) == before
    # Another host's copy, with its manifest and its times; and without the times, which are then read anew.
    for copy, changes in (("cp -a", 0), ("cp -r", 1)):
        faults.sh(host, f"rm -rf /mnt/copy && mkdir -p /mnt/copy && {copy} {mirror.ROOT}/models /mnt/copy")
        faults.sh(host, "chown -R root:sglang /mnt/copy && chmod -R u=rwX,g=rX,o= /mnt/copy")
        assert mirror.changed(mirror.fetch(host, hub, A, sglang_root="/mnt/copy", **nobody)) == changes
        assert mirror.tree(host, A, "/mnt/copy") == before
    faults.sh(host, "rm -rf /mnt/copy")


def test_files_that_came_by_hand_are_adopted(host, hub):
    mirror.fetch(host, hub, A)
    clean = mirror.tree(host)
    faults.sh(host, f"rm {mirror.home()}/{A}/.dflash-fleet.json && chown -R nobody {mirror.home()}/{A}")
    hub.wrong()
    assert mirror.changed(mirror.fetch(host, hub, A)) == 1
    assert hub.server.stats["get"] == 0
    assert mirror.tree(host) == clean


def test_a_flipped_bit_is_found_and_mended(host, hub):
    mirror.fetch(host, hub, A)
    clean = mirror.tree(host)
    shard = f"{mirror.home()}/{A}/{mirror.SHARDS[1]}"
    faults.python(
        host,
        "import os, sys; p = sys.argv[1]; s = os.stat(p); f = open(p, 'r+b'); f.seek(9000000); b = f.read(1);"
        " f.seek(9000000); f.write(bytes([b[0] ^ 1])); f.close(); os.utime(p, ns=(s.st_atime_ns, s.st_mtime_ns))",
        shard,
    )
    assert mirror.changed(mirror.fetch(host, hub, A)) == 0  # what sizes and times cannot show
    inode = faults.sh(host, f"stat -c %i {shard}")
    hub.wrong()
    assert mirror.changed(mirror.fetch(host, hub, A, model_weights_verify="full")) == 1
    assert hub.server.stats["bytes"] == mirror.SHARD
    assert faults.sh(host, f"stat -c %i {shard}") != inode  # an engine that has the old one open keeps it
    assert mirror.tree(host) == clean


def test_revisions_that_nothing_names_go(host, hub):
    for revision in (A, B, C):
        mirror.fetch(host, hub, revision, model_weights_keep=5)
    release = f"{mirror.ROOT}/main/releases/1/release.json"
    content = json.dumps({"model": {"path": f"{mirror.home()}/{A}"}})
    faults.sh(host, f"mkdir -p $(dirname {release}) && echo '{content}' > {release}")
    old = f"{mirror.home()}/{'d' * 40}.partial"
    faults.sh(host, f"mkdir {old} && touch -d '9 days ago' {old}/config.json {old}")
    try:
        # A is kept for going back, B by the number, and C is what is asked for.
        predicted = mirror.fetch(host, hub, C, "--check", "--diff")
        assert mirror.changed(predicted) == 1
        assert f"{old}  0 B  (unfinished, and nobody came back for 9 days)" in predicted
        predicted = mirror.fetch(host, hub, C, "--check", "--diff", model_weights_keep=0)
        assert f"{mirror.home()}/{B}  72 MB  (nothing names it)" in predicted
        assert faults.sh(host, f"ls {mirror.home()}").split() == [A, B, C, f"{'d' * 40}.partial"]
        assert mirror.changed(mirror.fetch(host, hub, C, model_weights_keep=0)) == 1
        assert faults.sh(host, f"ls {mirror.home()}").split() == [A, C]
        # Other models that nothing names have gone as well.
        assert faults.sh(host, f"ls {mirror.ROOT}/models/SubSir--Kimi-K2.6-DFlash-tmp-long") == ""
        assert mirror.changed(mirror.fetch(host, hub, C, model_weights_keep=0)) == 0
    finally:
        faults.sh(host, f"rm -rf {mirror.ROOT}/main")
