"""Weights go from host to host: one copy leaves the hub, nothing is left, and one that dies stops nobody else."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import controller
import engine
import pytest

UNIT = "dflash-fleet-weights-peer.service"
PORT = 18560
REPO, COMMIT = "org/fanout", "f" * 40
NAMES = controller.host_names(__file__)
# Everything of a folder but the manifests, whose times differ.
TREE = r"""
import grp, hashlib, json, os, pwd, stat, sys
root, out = sys.argv[1], {}
for folder, folders, files in os.walk(root):
    for name in folders + files:
        path = os.path.join(folder, name)
        about = os.lstat(path)
        text = hashlib.sha256(open(path, "rb").read()).hexdigest() if stat.S_ISREG(about.st_mode) else ""
        text = "" if name == ".dflash-fleet.json" else text
        owner = pwd.getpwuid(about.st_uid).pw_name + ":" + grp.getgrgid(about.st_gid).gr_name
        out[os.path.relpath(path, root)] = [stat.filemode(about.st_mode), owner, text, about.st_size if text else 0]
print(json.dumps(out))
"""
# The answer to one question from a host: a status, or that there is none.
ASK = r"""
import sys, urllib.error, urllib.request
url, token = sys.argv[1], sys.stdin.read().strip()
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token} if token else {})
try:
    print(urllib.request.urlopen(request, timeout=8).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def hosts():
    return {name: controller.scenario_host(__file__, name) for name in NAMES}


def address(host):
    return host.ansible.get_variables()["ansible_host"]


def tree(host, folder="/var/lib/sglang/models"):
    with host.sudo():
        done = host.run("python3 -c %s %s", TREE, folder)
    assert done.rc == 0, done.stderr
    return json.loads(done.stdout)


def size(found):
    return sum(about[3] for about in found.values())


def ask(host, url, token=""):
    """Status of a GET from `host`."""
    half = len(token) // 2
    with host.sudo():
        done = host.run("printf '%%s%%s' %s %s | python3 -c %s %s", token[:half], token[half:], ASK, url)
    return done.stdout.strip()


def nothing_left(host):
    assert engine.sudo(host, f"systemctl show -P LoadState {UNIT}").strip() == "not-found"
    assert engine.sudo(host, f"ss -Hltn 'sport = :{PORT}'") == ""
    assert not host.file("/run/dflash-fleet-peer").exists


def one_copy_everywhere(hosts, hub, root):
    """One copy has left the hub, every host has the same, and no server is left; what each of them has."""
    assert hub.bytes() == hub.size
    first = tree(hosts[NAMES[0]], f"{root}/models")
    assert size(first) == hub.size
    for host in hosts.values():
        assert tree(host, f"{root}/models") == first
        nothing_left(host)
    return first


class Hub:
    """A slow hub on the controller's side of the fleet's network, with one model of many files."""

    def __init__(self, folder, bind):
        files = folder / "repos" / REPO / COMMIT
        files.mkdir(parents=True)
        noise = random.Random(1)
        (files / "config.json").write_text('{"architectures": ["KimiK25ForConditionalGeneration"]}\n')
        for number in range(1, 33):
            (files / f"model-{number:05}-of-00032.safetensors").write_bytes(noise.randbytes(192 * 1024))
        self.size = sum(path.stat().st_size for path in files.iterdir())
        self.count = len(list(files.iterdir()))
        faults = folder / "faults.json"
        faults.write_text(json.dumps([{"path": "safetensors", "do": "slow", "rate": 48 * 1024}]))
        command = [sys.executable, str(controller.ROOT / "rehearsal/hub.py"), "--root", str(folder / "repos")]
        self.process = subprocess.Popen(
            [*command, "--bind", bind, "--port", "0", "--faults", str(faults)], stdout=subprocess.PIPE, text=True
        )
        self.url = self.process.stdout.readline().split()[-1]

    def bytes(self):
        with urllib.request.urlopen(f"{self.url}/__stats", timeout=10) as answer:
            return json.load(answer).get("bytes", 0)

    def reset(self):
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/__stats/reset", method="POST"), timeout=10).close()


@pytest.fixture(scope="module")
def hub(hosts, tmp_path_factory):
    it = Hub(tmp_path_factory.mktemp("hub"), address(hosts[NAMES[0]]).rsplit(".", 1)[0] + ".1")
    yield it
    it.process.terminate()
    it.process.wait()


def settings(hub, root, **more):
    wanted = {
        "sglang_root": root, "sglang_model": REPO, "sglang_model_revision": COMMIT, "sglang_drafter": "none",
        "model_weights_endpoint": hub.url, "model_weights_python": "/opt/hf-client/bin/python", **more,
    }
    return ["playbooks/fetch-weights.yml", "-e", json.dumps(wanted)]


def folder(root, partial=False):
    return f"{root}/models/org--fanout/{COMMIT}" + (".partial" if partial else "")


def shards(host, path):
    return int(engine.sudo(host, f"ls {path} 2>/dev/null | grep -c safetensors$ || true"))


class Play:
    """A playbook that goes on while the test looks on."""

    def __init__(self, *arguments):
        self.process = controller.start(__file__, *arguments)
        self.lines = []
        # At its loudest it prints more than a pipe holds.
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self.process.kill()
        self.process.wait()

    def midway(self, hosts, root, name):
        """Wait until a host has some files, while the first one is still fetching."""
        def some():
            assert self.process.poll() is None, "".join(self.lines)
            return shards(hosts[name], folder(root, partial=True))

        assert controller.until(some)
        assert shards(hosts[NAMES[0]], folder(root)) == 0, "the first host was done before the others had anything"

    def end(self, seconds=240):
        """(exit code, everything it printed)."""
        code = self.process.wait(seconds)
        self.reader.join()
        return code, "".join(self.lines)


# -- what converge left


def test_hub_sent_one_copy(hosts):
    endpoint = hosts[NAMES[0]].ansible.get_variables()["model_weights_endpoint"]
    with urllib.request.urlopen(f"{endpoint}/__stats", timeout=10) as answer:
        sent = json.load(answer)["bytes"]
    assert sent == size(tree(hosts[NAMES[0]])) > 0


def test_every_host_has_the_same(hosts):
    first = tree(hosts[NAMES[0]])
    assert len([path for path in first if path.endswith(".safetensors")]) > 1
    for name in NAMES[1:]:
        assert tree(hosts[name]) == first


def test_nothing_is_left(host):
    nothing_left(host)


# -- a slow fetch, looked at from all sides


def test_server_that_is_killed_midway_and_secrets(hosts, hub):
    root = "/var/lib/killed"
    hub.reset()
    with Play(*settings(hub, root), "-vvv") as play:
        play.midway(hosts, root, NAMES[2])
        second, last = hosts[NAMES[1]], hosts[NAMES[3]]
        token = engine.sudo(second, "cat /run/dflash-fleet-peer/token").strip()
        assert len(token) == 43
        url = f"http://{address(second)}:{PORT}"
        file = f"{url}/{REPO}/resolve/{COMMIT}/config.json"
        assert ask(last, file, token) == "200"
        assert ask(last, file) == "401"
        assert ask(last, file, token[:-1]) == "401"
        assert ask(last, f"{url}/moonshotai/Kimi-K2.6/resolve/{COMMIT}/config.json", token) == "404"
        assert ask(last, f"{url}/{REPO}/resolve/{COMMIT}/../../../../../../etc/passwd", token) == "404"
        # The controller is no host that fetches: systemd drops what it sends.
        with pytest.raises((urllib.error.URLError, TimeoutError)) as refused:
            urllib.request.urlopen(file, timeout=3)
        assert not isinstance(refused.value, urllib.error.HTTPError), refused.value
        # Not even the other models of the same host, nor anything that needs root.
        user = engine.sudo(second, f"ps -o user= -p $(systemctl show -P MainPID {UNIT})").strip()
        assert user not in ("root", "sglang")
        for name in NAMES[:3]:
            exposure = engine.sudo(hosts[name], f"systemd-analyze security --no-pager {UNIT} | tail -1")
            assert float(re.search(r": ([\d.]+) ", exposure)[1]) <= 2.0, exposure
        assert engine.sudo(last, f"systemctl show -P LoadState {UNIT}").strip() == "not-found"  # nobody asks it
        for host in hosts.values():
            shown = engine.grep(host, token, "grep -laF -f $P /proc/[0-9]*/cmdline /proc/[0-9]*/environ")
            assert shown == []
        engine.sudo(second, f"systemctl kill --signal=KILL {UNIT}")
        assert shards(hosts[NAMES[2]], folder(root, partial=True)) < 32, "killed too late to prove anything"
        code, output = play.end()
    assert code == 0, output
    assert f"going on with http://{address(hosts[NAMES[0]])}:{PORT}" in output
    one_copy_everywhere(hosts, hub, root)
    for host in hosts.values():
        assert engine.grep(host, token, "journalctl --no-pager --all -o export | grep -acF -f $P") == ["0"]
        places = "/etc /home /opt /root /run /srv /tmp /usr/local /var"
        assert engine.grep(host, token, f"grep -rlaF -f $P {places} --exclude-dir=journal --exclude-dir=venvs") == []
    assert token not in output


def test_host_that_loses_power_midway(hosts, hub):
    root = "/var/lib/power"
    hub.reset()
    with Play(*settings(hub, root)) as play:
        play.midway(hosts, root, NAMES[2])
        controller.fleet(__file__, "reboot", NAMES[1], "--hard")
        code, output = play.end()
    # Back in time, it went on from where it was; the one behind it had turned to the first host.
    assert code == 0, output
    assert f"going on with http://{address(hosts[NAMES[0]])}:{PORT}" in output
    first = one_copy_everywhere(hosts, hub, root)
    # One that lost everything: a host that has it helps, and the hub is not asked.
    engine.sudo(hosts[NAMES[2]], f"rm -r {root}")
    controller.play(__file__, *settings(hub, root, model_weights_hub_allowed=False))
    assert tree(hosts[NAMES[2]], f"{root}/models") == first
    assert hub.bytes() == hub.size
    for host in hosts.values():
        nothing_left(host)


def test_port_that_is_taken(hosts, hub):
    """A host that cannot pass anything on says so; the one behind it goes to the one before."""
    root = "/var/lib/taken"
    hub.reset()
    engine.sudo(hosts[NAMES[1]], f"systemd-run --unit=taken --collect python3 -m http.server {PORT} --directory /mnt")
    assert controller.until(lambda: engine.sudo(hosts[NAMES[1]], f"ss -Hltn 'sport = :{PORT}'"))
    try:
        output = controller.play(__file__, *settings(hub, root))
    finally:
        engine.sudo(hosts[NAMES[1]], "systemctl stop taken")
    assert re.search(r"passes no weights on with\s+model_weights_peer_address=\S+", output)
    assert hub.bytes() == hub.size
    for host in hosts.values():
        assert shards(host, folder(root)) == 32
        nothing_left(host)


def test_play_that_fails(hosts, hub):
    """Too little space everywhere: the servers were up by then, and are gone afterwards."""
    started = int(time.time())
    output = controller.play(__file__, *settings(hub, "/var/lib/failed", model_weights_min_free_gb=1000000), rc=2)
    assert "model_weights_min_free_gb" in output
    for name in NAMES:
        nothing_left(hosts[name])
    for name in NAMES[:3]:
        journal = engine.sudo(hosts[name], f"journalctl --no-pager -o cat -u {UNIT} --since @{started}")
        assert "Started" in journal
        assert "Stopped" in journal


def test_folder_instead_of_the_hub(hosts, hub):
    """A mounted folder of another host's models is copied and verified, and a flipped bit in it is found."""
    host = hosts[NAMES[0]]
    # There already, unless this test runs alone.
    controller.play(__file__, *settings(hub, "/var/lib/killed"), "-l", NAMES[0])
    hub.reset()
    engine.sudo(host, "mkdir -p /mnt/models && cp -a /var/lib/killed/models/. /mnt/models/")
    more = {"model_weights_source": "/mnt/models", "model_weights_hub_allowed": False}
    controller.play(__file__, *settings(hub, "/var/lib/copied", **more), "-l", NAMES[0])
    assert tree(host, "/var/lib/copied/models") == tree(host, "/var/lib/killed/models")
    shard = f"/mnt/models/org--fanout/{COMMIT}/model-00007-of-00032.safetensors"
    damage = f"printf X | dd of={shard} bs=1 seek=999 conv=notrunc"
    engine.sudo(host, f"touch -r {shard} /tmp/time; {damage}; touch -r /tmp/time {shard}")
    output = controller.play(__file__, *settings(hub, "/var/lib/flipped", **more), "-l", NAMES[0], rc=2)
    assert re.search(r"model-00007-of-00032.safetensors\s+of\s+org/fanout\s+twice", output), output
    assert not host.file(folder("/var/lib/flipped")).exists
    assert hub.bytes() == 0
