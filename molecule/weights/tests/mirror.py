"""The hub that things go wrong with, the plays that fetch from it, and what they leave on the host."""

from __future__ import annotations

import json
import os
import random
import signal
import sys

import controller
import faults
import yaml

sys.path.insert(0, str(controller.ROOT / "rehearsal"))
import hub as rehearsal_hub

HOST = "weights-01"
TOKEN = yaml.safe_load((controller.ROOT / "molecule/weights/canaries.yml").read_text())["model_weights_token"]
ROOT = "/var/lib/sglang"
REPO, A, B, C = "weights/big", "a" * 40, "b" * 40, "c" * 40
SHARD = 24_000_000
CHUNK = 10 << 20  # what the client writes at once, and so what a kill can lose of a file
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


class Mirror:
    """A gated hub with faults on request."""

    def __init__(self, folder, address):
        self.faults = folder / "faults.json"
        for number, revision in enumerate((A, B, C)):
            home = folder / "repos" / REPO / revision
            home.mkdir(parents=True)
            (home / "config.json").write_text(json.dumps({"revision": revision}))
            for shard in SHARDS:
                home.joinpath(shard).write_bytes(random.Random(f"{number} {shard}").randbytes(SHARD))
        self.server = rehearsal_hub.serve(
            folder / "repos", bind=address, tokens=frozenset([TOKEN]), faults=self.faults, gated=True
        )
        self.url = f"http://{address}:{self.server.server_address[1]}"
        self.bytes = 3 * SHARD + (folder / "repos" / REPO / A / "config.json").stat().st_size

    def wrong(self, *entries):
        """What goes wrong from now on, and with that what was sent counts from zero."""
        fresh = self.faults.with_suffix(".new")
        fresh.write_text(json.dumps(entries))
        fresh.replace(self.faults)
        self.server.stats.clear()

    def slow(self, rate, path="safetensors"):
        self.wrong({"path": path, "do": "slow", "rate": rate})


def client(host):
    """The Python of the hub client that the first play installed."""
    return faults.sh(host, f"ls -d {ROOT}/venvs/*/bin/python").split()[0]


def settings(host, hub, revision=A, **more):
    given = {
        "sglang_model": REPO, "sglang_model_revision": revision, "sglang_drafter": "none",
        "model_weights_endpoint": hub.url, "model_weights_python": client(host), "model_weights_min_free_gb": 0,
        "model_weights_token": TOKEN,
    }
    return json.dumps({**given, **more})


def fetch(host, hub, revision=A, *arguments, rc=0, **more):
    words = ("-e", settings(host, hub, revision, **more), *arguments)
    return controller.play(__file__, "playbooks/fetch-weights.yml", *words, rc=rc)


def start(host, hub, revision=A, *arguments, **more):
    """A fetch that the test goes on beside."""
    words = ("-e", settings(host, hub, revision, **more), *arguments)
    return controller.start(__file__, "playbooks/fetch-weights.yml", *words, own_group=True)


def changed(output):
    return faults.changed(output, HOST)


def home(root=ROOT):
    return f"{root}/models/weights--big"


def tree(host, revision=A, root=ROOT):
    """A published revision; its manifest holds times."""
    return faults.tree(host, f"{home(root)}/{revision}", r"^\.dflash-fleet\.json$")


def forget(host):
    """As if it had never been fetched."""
    faults.sh(host, f"rm -rf {home()}")


def until(host, command, seconds=60):
    """Wait on the host for a command to succeed; what it prints."""
    late = f"[ $(date +%s) -lt $(($begun + {seconds})) ] || exit 1"
    script = f"begun=$(date +%s); until {command}; do {late}; sleep 0.05; done"
    code = "import subprocess, sys; sys.exit(subprocess.run(['sh', '-c', sys.argv[1]]).returncode)"
    return faults.python(host, code, script)


def kill_on_host(host):
    """Everything that fetches there, at once: the module, the process that goes on, the client."""
    faults.sh(host, "pkill -9 -f 'python3$|hub_fetc[h]'")


def kill_controller(run):
    """ansible-playbook and its workers."""
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()


def killed_and_again(host, hub, moment):
    """Controller and host die in the middle of a fetch; the next run goes on from there and ends as a clean one."""
    forget(host)
    fetch(host, hub)
    clean = tree(host)
    forget(host)
    stage = f"{home()}/{A}.partial"
    hub.slow(5_000_000, "0000[23]-of" if moment == "one shard is there" else "safetensors")
    run = start(host, hub)
    until(host, {
        "begun": f"test -d {stage}",
        "in the shards": f"[ $(find {stage} -name '*.part' -size +9M 2>/dev/null | wc -l) -ge 2 ]",
        "one shard is there": f"test -e {stage}/{SHARDS[0]}",
    }[moment])
    kill_controller(run)
    kill_on_host(host)
    assert not host.file(f"{home()}/{A}").exists, "the kill came too late to prove anything"
    kept = int(faults.sh(host, f"find {stage} -type f -printf '%s\\n' | awk '{{ sum += $1 }} END {{ print sum + 0 }}'"))
    sent = hub.server.stats["bytes"]
    hub.wrong()
    assert changed(fetch(host, hub)) == 1
    # What is on the disk does not come again. What was sent and is not there: a chunk of each file, and the sockets.
    assert hub.server.stats["bytes"] <= hub.bytes - kept + 4096
    assert sent - kept <= 3 * (CHUNK + (8 << 20))
    if moment == "in the shards":
        assert hub.server.stats["ranges"] >= 1
    assert tree(host) == clean
    assert faults.sh(host, f"ls {home()}").split() == [A]
    assert faults.sh(host, "sh -c 'ls -d /tmp/dflash-fleet-fetch-* 2>/dev/null || true'") == ""


def ended(run, seconds=120):
    """The output of a play that a test started."""
    output, _ = run.communicate(timeout=seconds)
    return output
