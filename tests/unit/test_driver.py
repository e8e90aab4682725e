"""The driver's packages: what is missing or of another release, what is held, and whether a key is the expected one."""

from __future__ import annotations

import subprocess

import pytest
from dflash_fleet import driver, packages

WANTED = driver.Wanted("580", "", ("nvidia-open", "linux-headers-6.1"), ("*nvidia*", "libcuda*"))
DPKG = """\
nvidia-open\t580.105.08-1\thi\x20
libcuda1\t580.105.08-1\tii\x20
libcuda1\t580.105.08-1\tii\x20
nvidia-container-toolkit\t1.17.8-1\tii\x20
nvidia-old\t570.1.2-1\trc\x20
linux-headers-6.1\t6.1.5-1\tii\x20
"""


def known(text=DPKG):
    return packages.parse_dpkg(text)


def test_dpkg_states():
    found = known()
    assert (found["nvidia-open"].held, found["nvidia-open"].installed) == (True, True)
    assert (found["libcuda1"].held, found["nvidia-old"].installed) == (False, False)


@pytest.mark.parametrize(
    ("version", "release", "is_driver"),
    [
        ("580.105.08-1", "580.105.08", True),
        ("1:580.65.06-0ubuntu0.24.04.1", "580.65.06", True),
        ("580.173.02-0ubuntu0.22.04.1", "580.173.02", True),
        ("1.17.8-1", "1.17.8", False),
        ("13.0.3-1", "13.0.3", False),
        ("580", "580", False),
    ],
)
def test_releases_of_package_versions(version, release, is_driver):
    assert (driver.upstream(version), driver.is_release(version)) == (release, is_driver)


def test_only_what_is_missing_of_another_release_or_not_held_is_to_do():
    todo = driver.plan(known(), WANTED)
    assert (todo.missing, todo.other, todo.unheld, todo.install) == ([], [], ["libcuda1"], False)
    todo = driver.plan(known(), driver.Wanted("580", "580.65.06", WANTED.packages, WANTED.belonging))
    assert todo.other == ["libcuda1", "nvidia-open"]
    todo = driver.plan(known(DPKG.replace("580.105.08", "5801.1.1")), WANTED)
    assert todo.unheld == []  # no driver's release: four digits
    todo = driver.plan({}, WANTED)
    assert todo.missing == ["nvidia-open", "linux-headers-6.1"]


@pytest.mark.parametrize(
    ("module", "reboot", "problem"),
    [
        ({"loaded": "580.1.1", "installed": "580.1.1"}, "", ""),
        ({"loaded": "580.1", "installed": "580.2"}, "580.1 is loaded, 580.2 is installed", "has to be rebooted"),
        ({"loaded": None, "installed": "580.2.2", "nouveau": True}, "nouveau is loaded", "is installed and not loaded"),
        ({"loaded": None, "installed": None}, "", "dkms status"),
        ({"loaded": "570.1.1", "installed": "570.1.1"}, "", "wanted is branch 580"),
    ],
)
def test_reboot_and_what_runs(module, reboot, problem):
    assert driver.reboot_reason(module) == reboot
    found = driver.not_running(module, WANTED)
    assert problem in found
    assert bool(problem) == bool(found)


def test_simulation_is_read():
    text = "Inst nvidia-open [580.65.06-1] (580.105.08-1 NVIDIA:x [amd64])\nInst libcuda1:amd64 (580.105.08-1 x)\n"
    assert packages.parse_simulation(text) == {"nvidia-open": "580.105.08-1", "libcuda1": "580.105.08-1"}


def test_alternatives_count_and_the_first_is_installed():
    assert packages.lacking(["mawk|libcuda1", "g++|clang", "nvidia-open"], known()) == ["g++"]


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    """(armored key, fingerprint as gpg says it)."""
    home = tmp_path_factory.mktemp("gnupg")
    home.chmod(0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--passphrase", ""]
    subprocess.run([*gpg, "--quick-gen-key", "t@example.invalid", "rsa2048", "sign"], check=True, capture_output=True)
    listed = subprocess.run([*gpg, "--list-keys", "--with-colons"], check=True, capture_output=True, text=True).stdout
    armored = subprocess.run([*gpg, "--armor", "--export"], check=True, capture_output=True).stdout
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
    return armored, next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr"))


def test_key_is_taken_by_its_fingerprint_only(key):
    armored, fingerprint = key
    binary = driver.check_key(armored, [fingerprint.lower()])
    assert not binary.startswith(b"-")
    assert driver.fingerprints(binary) == [fingerprint]
    assert driver.check_key(binary, ["0" * 40, fingerprint]) == binary
    with pytest.raises(driver.DriverError, match="gpu_host_driver_fingerprints"):
        driver.check_key(armored, ["0" * 40])
    with pytest.raises(driver.DriverError, match="no PGP key"):
        driver.check_key(b"<html>", [fingerprint])
