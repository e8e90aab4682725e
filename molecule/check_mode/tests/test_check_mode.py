"""Check mode is faithful: what it predicts is what the run then changes, and afterwards it predicts nothing.

Every round gives each host of the scenario an inventory and a drift, both drawn from a seed, and runs the deployment
three times: --check, for real, --check. A case is one host of one round. What a run changed is not taken from Ansible
but from the hosts: a listing of every file of ours with its content's hash, mode and owner, and the units' invocations.

State files are left out on both sides, since what a gate finds cannot be known before; so is what the engine itself
writes (caches). SEED=N draws others.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import subprocess
from pathlib import Path

import controller
import pytest

HOSTS = [f"drift-{number:02d}" for number in range(1, 6)]
ROUNDS = 5
# ROUNDS=1 in the tests of every change, the others in turns: each round is five cases and stands for itself.
CHOSEN = [int(number) for number in (os.environ.get("ROUNDS") or "1,2,3,4,5").split(",")]
SEED = int(os.environ.get("SEED") or 20261130)
CASES = ROUNDS * len(HOSTS)
assert CASES >= 25

# Every file of ours: path, kind, mode, owner, and a hash of its content or where it points.
LISTING = r"""
import hashlib, json, os, stat, subprocess
ROOT = "/var/lib/sglang"
IGNORED = (ROOT + "/cache",)
found = {}
def look(path):
    try:
        s = os.lstat(path)
    except FileNotFoundError:
        return
    if path.startswith(IGNORED) or path.endswith("/state") or "/__pycache__" in path:
        return
    kind = stat.S_IFMT(s.st_mode)
    value = [kind, stat.S_IMODE(s.st_mode) if kind != stat.S_IFLNK else 0, s.st_uid, s.st_gid]
    if kind == stat.S_IFLNK:
        value.append(os.readlink(path))
    elif kind == stat.S_IFREG:
        # Environments and weights are compared by size: their content is their own roles' to verify.
        big = path.startswith((ROOT + "/venvs/", ROOT + "/models/"))
        value.append(s.st_size if big else hashlib.sha256(open(path, "rb").read()).hexdigest())
    found[path] = value
    if kind == stat.S_IFDIR:
        for name in sorted(os.listdir(path)):
            look(path + "/" + name)
look(ROOT)
look("/etc/sglang")
look("/usr/local/lib/dflash-fleet")
for folder in ("/etc/systemd/system", "/etc/systemd/system/multi-user.target.wants"):
    for name in os.listdir(folder):
        if name.startswith("sglang-"):
            look(folder + "/" + name)
show = subprocess.run(["systemctl", "show", "sglang-*.service", "--property=Id,InvocationID,ActiveState"],
                      capture_output=True, text=True).stdout
units = {}
for block in show.split("\n\n"):
    words = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
    if words.get("ActiveState") in ("active", "activating"):
        units[words["Id"]] = words["InvocationID"]
print(json.dumps({"paths": found, "units": units}))
"""


def on_hosts(scripts):
    """Run a shell script on each host at once: {host: what it printed}."""

    def run(name):
        return controller.fleet(__file__, "exec", name, "--", "sh", "-ec", scripts[name])

    with concurrent.futures.ThreadPoolExecutor(len(scripts)) as pool:
        return dict(zip(scripts, pool.map(run, scripts)))


def listings(names):
    """What of ours is on each host, and what runs."""
    printed = on_hosts(dict.fromkeys(names, f"python3 - <<'END'\n{LISTING}\nEND"))
    return {name: json.loads(text) for name, text in printed.items()}


# ---------------------------------------------------------------------------------------------------------------------
# What a case is


def wish(draw):
    """An inventory: variables of one host. Small profiles, so that five hosts load at once on two cores."""
    wanted = {
        "sglang_version": draw.choice(["0.5.20", "0.5.20", "0.5.23"]),
        "sglang_profiles": {"tp2": {"tp": 2}, "ep2": {"tp": 2, "ep": 2}},
        "sglang_profile": draw.choice(["single", "tp2", "ep2"]),
        "sglang_drafter": draw.choice(["dflash", "none"]),
        "sglang_cuda_graph": draw.choice(["auto", "enabled", "disabled"]),
        "sglang_wait_settle": 0,
        "sglang_wait_requests": 2,
    }
    if draw.random() < 0.3:
        wanted["sglang_port"] = draw.choice([30000, 30007])
    if draw.random() < 0.3:
        wanted["sglang_extra_args"] = {"page-size": draw.choice([1, 16])}
    if draw.random() < 0.3:
        wanted["sglang_api_key"] = draw.choice(["key-one", "key-two"])
    if draw.random() < 0.3:
        wanted["sglang_standby_profiles"] = draw.choice([["tp2"], ["single", "ep2"]])
    if draw.random() < 0.25:
        wanted["sglang_instances"] = draw.choice(
            [
                [{"name": "renamed"}],
                [
                    {"name": "main", "gpus": [0, 1], "profile": "tp2"},
                    {"name": "b", "gpus": [2, 3], "port": 30009, "profile": "tp2"},
                ],
            ]
        )
    return wanted


UNITS = "/etc/systemd/system"
KEY = "credentials/api_key"
STALE = "# Managed by dflash-fleet.\\n[Service]\\nExecStart=/bin/sleep 9 -m sglang.launch_server\\n"
DRIFTS = {
    "nothing": "true",
    "unit edited": f"for u in {UNITS}/sglang-*.service; do echo '# edited' >> $u; done",
    "unit removed": f"rm -f {UNITS}/sglang-*.service; systemctl daemon-reload",
    "unit of another profile": f"printf '{STALE}' > {UNITS}/sglang-main-tp8.service; systemctl daemon-reload",
    "not started at boot": "for u in $(ls /etc/systemd/system | grep ^sglang-); do systemctl disable -q $u; done",
    "stopped": "for u in $(ls /etc/systemd/system | grep ^sglang-); do systemctl stop $u; done",
    "current removed": "rm -f /var/lib/sglang/*/current",
    "link in etc elsewhere": "for l in /etc/sglang/*; do [ -L $l ] && ln -sfn /nowhere $l; done; true",
    "release removed": "rm -rf /var/lib/sglang/*/releases/*/release.json",
    "supervisor edited": "for f in /usr/local/lib/dflash-fleet/*/supervisor.py; do echo '# x' >> $f; done",
    "supervisor removed": "rm -rf /usr/local/lib/dflash-fleet",
    "environment unfinished": "rm -f /var/lib/sglang/venvs/*/.complete",
    "weights cut": "f=$(ls /var/lib/sglang/models/*/*/*.safetensors | head -1); truncate -s 10 $f",
    "weights gone": "rm -rf /var/lib/sglang/models/moonshotai--Kimi-K2.6",
    "credentials open": "chmod 755 /var/lib/sglang/*/credentials",
    "key left over": "for d in /var/lib/sglang/*/credentials; do echo old > $d/api_key; done",
    "everything gone": (
        "for u in $(ls /etc/systemd/system | grep ^sglang-); do systemctl disable -q --now $u; "
        "rm /etc/systemd/system/$u; done; systemctl daemon-reload; rm -rf /var/lib/sglang /etc/sglang"
    ),
}


def cases():
    """{host: (variables, drifts)} of every round after what the first one finds; each drift occurs at least once."""
    draw = random.Random(SEED)
    names = [name for name in DRIFTS if name != "nothing"]
    draw.shuffle(names)
    pending = [*names, *(draw.choice(list(DRIFTS)) for _ in range(CASES - len(names)))]
    last = {name: wish(draw) for name in HOSTS}
    rounds = [{name: (last[name], []) for name in HOSTS}]
    for _ in range(ROUNDS):
        chosen = {}
        for name in HOSTS:
            # Half of the cases drift alone, so that a drift is not hidden by the restart that a new wish brings.
            last[name] = last[name] if draw.random() < 0.5 else wish(draw)
            drifts = [pending.pop(), *([draw.choice(list(DRIFTS))] if draw.random() < 0.3 else [])]
            chosen[name] = (last[name], drifts)
        rounds.append(chosen)
    return rounds


# ---------------------------------------------------------------------------------------------------------------------
# Running and comparing


def deploy(tmp_path, number, wishes, *arguments):
    """The deployment of one round; returns what its tasks say they changed, by host."""
    changes = tmp_path / f"changes-{number}-{len(list(tmp_path.iterdir()))}.jsonl"
    changes.touch()
    variables = tmp_path / f"wishes-{number}.json"
    variables.write_text(json.dumps({"drift_wishes": wishes}))
    inventory = Path(__file__).resolve().parents[1] / "inventory"
    environment = {
        **controller.environment(),
        "CHANGES_FILE": str(changes),
        "ANSIBLE_CALLBACK_PLUGINS": str(Path(__file__).resolve().parents[1] / "callbacks"),
        "ANSIBLE_CALLBACKS_ENABLED": "changes",
    }
    layers = tmp_path / f"inventory-{number}"
    (layers / "host_vars").mkdir(parents=True, exist_ok=True)
    for name, wanted in wishes.items():
        (layers / "host_vars" / f"{name}.json").write_text(json.dumps(wanted))
    (layers / "hosts.yml").write_text("all: {hosts: {" + ", ".join(f"{name}: {{}}" for name in wishes) + "}}\n")
    command = [str(controller.BIN / "ansible-playbook"), "-i", str(inventory), "-i", str(layers), "deploy-dflash.yml"]
    run = subprocess.run(
        [*command, *arguments], cwd=controller.ROOT, env=environment, stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:]
    found = {name: [] for name in wishes}
    for line in changes.read_text().splitlines():
        entry = json.loads(line)
        if not entry["delegated"]:
            found[entry["host"]].append(entry)
    return found


def seen(path):
    """Whether a listing shows it: what the engine itself writes is not looked at."""
    return not path.startswith("/var/cache/")


def objects(entry):
    """Paths and units that a task says it changes."""
    result, action = entry["result"], entry["action"].rsplit(".", 1)[-1]
    if "censored" in result:  # no_log: the one task that writes a secret
        return [KEY]
    if action == "sglang_release":
        return result.get("changes") or []
    if action == "sglang_remove":
        # What was only stopped has no paths; what goes then has nothing left to stop.
        return list(filter(seen, result["paths"])) or result["units"]
    if action == "sglang_support":
        return result["written"]
    if action == "sglang_venv":
        return [result["path"], *(os.path.join(os.path.dirname(result["path"]), name) for name in result["pruned"])]
    if action in ("hf_snapshot", "file", "copy"):
        return [result.get("path") or result["dest"]]
    if action in ("user", "group"):
        return [f"{action} {result['name']}"]
    raise AssertionError(f"no rule for what {entry['action']} ({entry['task']}) changes: {result}")


def differing(before, after):
    """Paths and units that differ between two listings of a host."""
    paths = before["paths"].keys() | after["paths"].keys()
    found = {path for path in paths if before["paths"].get(path) != after["paths"].get(path)}
    units = {unit for unit, invocation in after["units"].items() if before["units"].get(unit) != invocation}
    return found | units | {unit for unit in before["units"] if unit not in after["units"]}


def within(path, other):
    return path == other or path.startswith(other + "/") or (other == KEY and path.endswith("/" + KEY))


def unexplained(predicted, changed):
    """(predicted but unchanged, changed but not predicted): both empty where the prediction was right."""
    # A directory on the way to something predicted is made with it.
    folders = {path for path in changed if path.startswith("/") and any(within(item, path) for item in predicted)}
    surprise = {item for item in changed - folders if not any(within(item, known) for known in predicted)}
    # A unit of ours that is stopped and taken away is one change.
    surprise = {item for item in surprise if f"{UNITS}/{item}" not in predicted}
    idle = {item for item in predicted if not any(within(path, item) for path in changed)}
    return idle, surprise


@pytest.mark.parametrize("number", CHOSEN)
def test_check_mode_predicts_what_the_run_changes(number, tmp_path):
    earlier, chosen = cases()[number - 1 : number + 1]
    if number - 1 not in CHOSEN:  # else that round has just left the hosts so
        deploy(tmp_path, number - 1, {name: wanted for name, (wanted, _) in earlier.items()})
    on_hosts({name: "\n".join(DRIFTS[drift] for drift in drifts) for name, (_, drifts) in chosen.items()})
    wishes = {name: wanted for name, (wanted, _) in chosen.items()}
    before = listings(chosen)
    checked = deploy(tmp_path, number, wishes, "--check")
    assert listings(chosen) == before, "check mode changed a host"
    deploy(tmp_path, number, wishes)
    after = listings(chosen)
    again = deploy(tmp_path, number, wishes, "--check")
    wrong = {}
    for name, (wanted, drifts) in chosen.items():
        predicted = {item for entry in checked[name] for item in objects(entry)}
        idle, surprise = unexplained(predicted, differing(before[name], after[name]))
        second = {item for entry in again[name] for item in objects(entry)}
        if idle or surprise or second:
            wrong[name] = {
                "drifts": drifts, "wish": wanted, "predicted, did not happen": sorted(idle),
                "happened, not predicted": sorted(surprise), "predicted by the second check": sorted(second),
            }  # fmt: skip
    assert not wrong, f"SEED={SEED} round {number}\n{json.dumps(wrong, indent=1)}"
