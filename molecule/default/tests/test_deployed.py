"""A deployed host: unit, configuration, environment, weights, port, user, modes."""

from __future__ import annotations

import re

import engine
import pytest

UNIT = "sglang-main-ep8.service"


def test_unit_serves_and_starts_at_boot(host):
    service = host.service(UNIT)
    assert service.is_running
    assert service.is_enabled
    assert engine.show(host, UNIT, "NRestarts") == "0"


def test_units_main_process_is_the_engine(host):
    pid = engine.show(host, UNIT, "MainPID")
    command = engine.sudo(host, f"tr '\\0' ' ' < /proc/{pid}/cmdline")
    assert "-m sglang.launch_server" in command
    assert engine.sudo(host, f"stat -c %U /proc/{pid}").strip() == "sglang"


def test_unit_shows_one_option_a_line(host):
    lines = [line.strip().rstrip(" \\") for line in engine.sudo(host, f"cat /etc/systemd/system/{UNIT}").splitlines()]
    assert "--tp-size 8" in lines
    assert "--ep-size 8" in lines
    assert "--speculative-algorithm DFLASH" in lines
    assert "--port 30000" in lines


def test_port_belongs_to_the_unit(host):
    assert host.socket("tcp://127.0.0.1:30000").is_listening
    assert not host.socket("tcp://0.0.0.0:30000").is_listening
    group = engine.show(host, UNIT, "ControlGroup")
    # `users:(("python",pid=123,fd=8))`
    owner = re.search(r"pid=(\d+)", engine.sudo(host, "ss -Hltnp sport = :30000"))
    assert owner
    assert group in engine.sudo(host, f"cat /proc/{owner[1]}/cgroup")


def test_model_answers_under_its_name(host):
    status, models = engine.request(host, "/v1/models")
    assert status == 200
    assert [model["id"] for model in models["data"]] == ["kimi-k2.6"]
    status, answer = engine.request(
        host, "/v1/chat/completions",
        {"model": "kimi-k2.6", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 16},
    )
    assert status == 200
    assert answer["usage"]["completion_tokens"] > 0
    assert "rehears" in answer["choices"][0]["message"]["content"].lower()


def test_drafter_drafts(host):
    meta = engine.generate(host, "Speculate.", 64)["meta_info"]
    assert meta["completion_tokens"] == 64
    assert meta["spec_accept_length"] > 1.1


def test_release_links(host):
    current = engine.sudo(host, "readlink /var/lib/sglang/main/current").strip()
    assert re.fullmatch(r"releases/[0-9a-f]{12}", current)
    assert engine.sudo(host, "readlink -f /etc/sglang/main").strip() == f"/var/lib/sglang/main/{current}"
    installed = engine.sudo(host, f"cat /etc/systemd/system/{UNIT}")
    assert installed == engine.sudo(host, f"cat /var/lib/sglang/main/current/{UNIT}")
    release = engine.release(host)
    assert release["schema"] == 1
    assert release["unit"] == UNIT
    assert release["overrides"] == {}
    assert release["cuda_graph"]["effective"] == "enabled"
    assert release["venv"] in installed


def test_state_says_what_serves(host):
    ready = engine.state(host, "ready.json")
    assert ready["invocation_id"] == engine.show(host, UNIT, "InvocationID")
    assert ready["accept_length"] > 1.1
    assert ready["degraded"] is False
    last_good = engine.state(host, "last_good.json")
    assert engine.sudo(host, "readlink /var/lib/sglang/main/current").strip() == f"releases/{last_good['release_id']}"


def test_environment_is_complete_and_not_the_engines_to_change(host):
    venv = engine.release(host)["venv"]
    mark = engine.read_json(host, f"{venv}/.complete")
    assert mark["version"] == "0.5.20+rehearsal"
    assert engine.sudo(host, f"stat -c %U {venv}").strip() == "root"
    version = engine.sudo(host, f"{venv}/bin/python -c 'import sglang; print(sglang.__version__)'").strip()
    assert version == "0.5.20+rehearsal"
    assert engine.as_root(host, f"runuser -u sglang -- touch {venv}/x").rc != 0


def test_weights_are_published_and_verified(host):
    for name, revision in (
        ("moonshotai--Kimi-K2.6", "d9d42a52c7b44902e850e1f90625de1c4fa51d9e"),
        ("SubSir--Kimi-K2.6-DFlash-tmp-long", "ce0a7a61a68b6fac390e9388b8b7cb101dae127d"),
    ):
        folder = f"/var/lib/sglang/models/{name}/{revision}"
        manifest = engine.read_json(host, f"{folder}/.dflash-fleet.json")
        assert manifest["revision"] == revision
        for entry in manifest["files"]:
            if "sha256" in entry:
                found = engine.sudo(host, f"sha256sum {folder}/{entry['path']}").split()[0]
                assert found == entry["sha256"]
        left = engine.sudo(host, f"ls /var/lib/sglang/models/{name}").split()
        assert left == [revision]


@pytest.mark.parametrize(
    ("path", "mode", "owner", "group"),
    [
        ("/var/lib/sglang/main", "0750", "root", "sglang"),
        ("/var/lib/sglang/main/credentials", "0700", "root", "root"),
        ("/var/lib/sglang/main/releases", "0750", "root", "sglang"),
        ("/var/lib/sglang/main/state", "0750", "root", "sglang"),
        (f"/etc/systemd/system/{UNIT}", "0644", "root", "root"),
        ("/var/cache/sglang/main", "0750", "sglang", "sglang"),
    ],
)
def test_modes(host, path, mode, owner, group):
    found = engine.sudo(host, f"stat -c '%a %U %G' {path}").split()
    assert found == [mode.lstrip("0"), owner, group]


def test_sandbox_is_enforced_not_only_written_down(host):
    pid = engine.show(host, UNIT, "MainPID")
    denied = engine.as_root(host, f"nsenter -t {pid} -m touch /usr/written")
    allowed = engine.as_root(host, f"nsenter -t {pid} -m touch /var/cache/sglang/main/written")
    assert denied.rc != 0
    assert "Read-only file system" in denied.stderr
    assert allowed.rc == 0
    status = engine.sudo(host, f"cat /proc/{pid}/status")
    assert re.search(r"^NoNewPrivs:\t1$", status, re.M)
    assert re.search(r"^CapBnd:\t0+$", status, re.M)
    assert re.search(r"^Seccomp:\t2$", status, re.M)


def test_systemd_takes_the_unit_and_calls_it_hardened(host):
    path = f"/etc/systemd/system/{UNIT}"
    assert engine.sudo(host, f"systemd-analyze verify --man=no {path} 2>&1") == ""
    # Ends with an error where the exposure is over 2.0.
    report = engine.sudo(host, f"systemd-analyze security --offline=true --threshold=20 --no-pager {path}")
    assert re.search(r"Overall exposure level for \S+: [01]\.\d", report), report


def test_host_is_reached_as_its_inventory_says(host):
    name = host.ansible.get_variables()["inventory_hostname"]
    user = host.run("id -un").stdout.strip()
    assert user == {"rehearsal-01": "root", "rehearsal-02": "ops"}[name]
