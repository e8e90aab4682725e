"""The driver's packages, repository and refusals on each system, worked out by role gpu_host from its os-release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import hostfacts, preflight

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "gpu_host"
RECORDED = ROOT / "tests" / "fixtures" / "os-release"
NVIDIA = "https://developer.download.nvidia.com/compute/cuda/repos"
DEBIAN_HEADERS = ["linux-headers-{kernel}", "linux-headers-amd64"]
UBUNTU_HEADERS = ["linux-headers-{kernel}", "linux-headers-generic"]
UBUNTU_OWN = ["nvidia-headless-580-server-open", "nvidia-utils-580-server", *UBUNTU_HEADERS]
OLD_KEY, NEW_KEY = "3bf863cc.pub", "8793F200.pub"
#: system, source: packages, repository, key.
OFFERED = {
    ("debian-12", "nvidia"): (["nvidia-open", *DEBIAN_HEADERS], f"{NVIDIA}/debian12/x86_64/", OLD_KEY),
    ("debian-13", "nvidia"): (["nvidia-open", *DEBIAN_HEADERS], f"{NVIDIA}/debian13/x86_64/", NEW_KEY),
    ("ubuntu-22.04", "nvidia"): (["nvidia-open", *UBUNTU_HEADERS], f"{NVIDIA}/ubuntu2204/x86_64/", OLD_KEY),
    ("ubuntu-24.04", "nvidia"): (["nvidia-open", *UBUNTU_HEADERS], f"{NVIDIA}/ubuntu2404/x86_64/", OLD_KEY),
    ("ubuntu-26.04", "nvidia"): (["nvidia-open", *UBUNTU_HEADERS], f"{NVIDIA}/ubuntu2604/x86_64/", NEW_KEY),
    ("ubuntu-22.04", "distribution"): (UBUNTU_OWN, None, None),
    ("ubuntu-24.04", "distribution"): (UBUNTU_OWN, None, None),
    ("ubuntu-26.04", "distribution"): (UBUNTU_OWN, None, None),
}
NAMED = "name the packages in gpu_host_driver_packages and their repository in gpu_host_driver_repository"
REFUSED = {
    ("debian-12", "distribution"): f"on debian-12: set it to nvidia, or {NAMED}",
    ("debian-13", "distribution"): f"on debian-13: set it to nvidia, or {NAMED}",
    ("debian-11", "nvidia"): f"gpu_host_driver_source nvidia has no driver for CUDA 13 on debian-11: {NAMED}",
    ("ubuntu-20.04", "nvidia"): f"gpu_host_driver_source nvidia has no driver for CUDA 13 on ubuntu-20.04: {NAMED}",
    ("ubuntu-25.10", "distribution"): f"on ubuntu-25.10: {NAMED}",
}
PLAY = """
- hosts: localhost
  gather_facts: false
  vars_files: [{role}/defaults/main.yml, {role}/vars/main.yml, {sglang}/defaults/main.yml, {sglang}/vars/main.yml]
  tasks:
    - ansible.builtin.set_fact:
        answers: "{{{{ answers | default([]) + [answer] }}}}"
      loop: "{{{{ systems | product(['nvidia', 'distribution']) }}}}"
      vars:
        gpu_host_driver_source: "{{{{ item.1 }}}}"
        __gpu_host_result: {{facts: {{os_release: "{{{{ item.0 }}}}", kernel_command_line: ""}}}}
        answer:
          system: "{{{{ __gpu_host_system }}}}"
          source: "{{{{ item.1 }}}}"
          refusal: "{{{{ __gpu_host_driver_refusal }}}}"
          packages: "{{{{ __gpu_host_driver_packages }}}}"
          key: "{{{{ __gpu_host_driver.key | default(none) }}}}"
          files: "{{{{ __gpu_host_driver_files }}}}"
    - ansible.builtin.copy: {{dest: "{out}/answers.json", content: "{{{{ answers | to_json }}}}"}}
"""


def recorded(system: str) -> dict[str, str]:
    """The os-release of a system as hosts report it."""
    text = (RECORDED / system).read_text()
    return {key: hostfacts.parse_os_release(text).get(key, "") for key in ("id", "version_id", "pretty_name")}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What the role's own variables say for every system and source, by Ansible itself."""
    folder = tmp_path_factory.mktemp("systems")
    (folder / "templates").symlink_to(ROLE / "templates")
    (folder / "play.yml").write_text(PLAY.format(role=ROLE, sglang=ROOT / "roles" / "sglang", out=folder))
    systems = [recorded(path.name) for path in sorted(RECORDED.iterdir())]
    asked = {"systems": systems, "ansible_python_interpreter": sys.executable}
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", "localhost,", "-c", "local", "play.yml",
         "-e", json.dumps(asked)],
        cwd=folder, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = json.loads((folder / "answers.json").read_text())
    return {(entry["system"], entry["source"]): entry for entry in found}


@pytest.mark.parametrize(("system", "source"), OFFERED)
def test_what_is_installed_from_where(
    answers: dict[tuple[str, str], dict[str, Any]], system: str, source: str
) -> None:
    packages, repository, key = OFFERED[system, source]
    answer = answers[system, source]
    assert answer["refusal"] == ""
    assert (answer["packages"], answer["key"]) == (packages, key)
    files = {entry["path"]: entry["content"] for entry in answer["files"]}
    sources = files["/etc/apt/sources.list.d/dflash-fleet-nvidia.sources"]
    if repository is None:
        assert sources is None  # and goes where it stood
    else:
        lines = [line for line in sources.splitlines() if not line.startswith("#")]
        assert lines == [
            "Types: deb",
            f"URIs: {repository}",
            "Suites: ./",
            "Signed-By: /usr/share/keyrings/dflash-fleet-nvidia.gpg",
        ]
    pin = files["/etc/apt/preferences.d/50-dflash-fleet-nvidia"]
    assert "Pin: version 580.*\n" in pin
    assert "Pin: version *:580.*\n" in pin
    assert preflight.check_system({"os_release": recorded(system), "architecture": "x86_64"})[0]["status"] == "pass"


@pytest.mark.parametrize(("system", "source"), REFUSED)
def test_what_is_refused(answers: dict[tuple[str, str], dict[str, Any]], system: str, source: str) -> None:
    assert answers[system, source]["refusal"].endswith(REFUSED[system, source])


@pytest.mark.parametrize(("system", "name"), [("rhel-9.6", "Red Hat Enterprise Linux 9.6"), ("sles-15.7", "SUSE")])
def test_other_families_are_refused_in_one_sentence(system: str, name: str) -> None:
    (entry, *_rest) = preflight.check_system({"os_release": recorded(system), "architecture": "x86_64"})
    assert entry["status"] == "fail"
    assert "supports Debian and Ubuntu on x86_64, and this is " + name in entry["remedy"]


def test_another_architecture_is_refused_in_one_sentence() -> None:
    _system, entry, *_rest = preflight.check_system({"os_release": recorded("ubuntu-24.04"), "architecture": "aarch64"})
    assert entry["status"] == "fail"
    assert "supports Debian and Ubuntu on x86_64, and this is aarch64" in entry["remedy"]
