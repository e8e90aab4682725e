"""What every change must pass: weights come whole and in secret, are upgraded, gone back to, resumed after a kill."""

from __future__ import annotations

import hashlib
import json
import re

import engine
import faults
import mirror
from mirror import A, B


def test_published_from_the_hub_of_the_fleet(host):
    """By the converge, whose second run changed nothing."""
    cache = json.loads(faults.sh(host, f"cat {mirror.ROOT}/models/SubSir--*/*/.dflash-fleet.json"))
    assert cache["repo"].startswith("SubSir/")
    folders = faults.sh(host, f"ls -d {mirror.ROOT}/models/*/*").split()
    assert len(folders) == 2
    assert all(re.search(r"/[0-9a-f]{40}$", folder) for folder in folders)
    for file in cache["files"]:
        folder = f"{mirror.ROOT}/models/SubSir--Kimi-K2.6-DFlash-tmp-long/{cache['revision']}"
        found = faults.sh(host, f"sha256sum {folder}/{file['path']}").split()[0]
        assert found == file["sha256"]
    owners = set(faults.sh(host, f"find {mirror.ROOT}/models -printf '%u:%g:%m:%y\\n'").split())
    assert owners == {"root:sglang:750:d", "root:sglang:640:f"}
    assert faults.sh(host, "sh -c 'ls /etc/systemd/system | grep ^sglang- || true'") == ""


def test_upgrade_and_back(host, hub):
    predicted = mirror.fetch(host, hub, A, "--check", "--diff")
    assert mirror.changed(predicted) == 1
    assert mirror.SHARDS[0] in predicted
    assert mirror.changed(mirror.fetch(host, hub, A)) == 1
    first = mirror.tree(host, A)
    assert set(first) == {".dflash-fleet.json", "config.json", *mirror.SHARDS}
    assert mirror.changed(mirror.fetch(host, hub, B)) == 1
    assert mirror.tree(host, A) == first
    second = mirror.tree(host, B)
    assert second["config.json"] != first["config.json"]
    # Back: it is kept, and the hub is not even asked.
    hub.wrong()
    assert mirror.changed(mirror.fetch(host, hub, A)) == 0
    assert hub.server.stats["requests"] == 0
    assert mirror.tree(host, B) == second


def test_killed_fetch_ends_as_a_clean_one(host, hub):
    mirror.killed_and_again(host, hub, "in the shards")


def test_the_token_is_nowhere_to_be_found(host, hub):
    """While a fetch goes on, and after it; in what the loudest run prints, too."""
    mirror.forget(host)
    hub.slow(2_000_000)
    run = mirror.start(host, hub, A, "-vvv", "--diff", model_weights_progress="always")
    try:
        mirror.until(host, f"ls {mirror.home()}/{A}.partial/.cache/dflash-fleet/*.part 2>/dev/null")
        assert engine.grep(host, mirror.TOKEN, "grep -laF -f $P /proc/[0-9]*/cmdline /proc/[0-9]*/environ") == []
        places = "/etc /home /opt /root /run /srv /tmp /usr/local /var /dev/shm"
        look = f"grep -rlaF -f $P {places} --exclude-dir=journal --exclude-dir=venvs --exclude=pattern"
        assert engine.grep(host, mirror.TOKEN, look) == []
    finally:
        output = mirror.ended(run)
    assert run.returncode == 0, output
    assert mirror.TOKEN not in output
    line = rf"^{mirror.HOST}  0:\d\d  weights/big  [ \d]\d %  [\d.]+ [kM]?B of 72 MB  \d"
    assert re.search(line, output, re.M), output
    assert hub.server.stats["authorized"] > 0
    assert engine.grep(host, mirror.TOKEN, look) == []
    assert engine.grep(host, mirror.TOKEN, "journalctl --no-pager --all -o export | grep -acF -f $P") == ["0"]


def test_without_the_token(host, hub):
    mirror.forget(host)
    output = mirror.fetch(host, hub, A, rc=2, model_weights_token="")
    assert "weights/big is gated on" in output
    assert "model_weights_token" in output
    assert faults.sh(host, f"find {mirror.ROOT}/models/weights--big -type f") == ""


def test_hashes_are_the_hubs(host, hub):
    mirror.fetch(host, hub, A)
    served = hub.faults.parent / "repos" / mirror.REPO / A
    for shard in mirror.SHARDS:
        found = faults.sh(host, f"sha256sum {mirror.home()}/{A}/{shard}").split()[0]
        assert found == hashlib.sha256((served / shard).read_bytes()).hexdigest()
