"""The roles' package names, asked of the real archives of each supported system by apt itself; nothing is installed.

What of a driver can be shown without a host of that system: that apt resolves the packages, that they are of the
branch, and that the open kernel modules come by DKMS. Ubuntu's signature is not checked, since only names are read.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "module_utils"))
sys.path.insert(0, str(ROOT / "molecule/shared"))

import debian_packages  # noqa: E402 - found by the lines above
from dflash_fleet import driver, packages  # noqa: E402

UBUNTU = "http://archive.ubuntu.com/ubuntu"
# Suite, and the interpreter that sglang_venv_python names there.
SYSTEMS = {
    "debian-12": ("bookworm", "python3"),
    "debian-13": ("trixie", "python3"),
    "ubuntu-22.04": ("jammy", "python3"),
    "ubuntu-24.04": ("noble", "python3.12"),
    "ubuntu-26.04": ("resolute", "python3"),
}
BRANCH = "580"

pytestmark = pytest.mark.faults


def role(name: str, part: str) -> dict[str, Any]:
    """A role's defaults or vars."""
    return dict(yaml.safe_load((ROOT / "roles" / name / part / "main.yml").read_text()))


def run(words: list[str]) -> str:
    """A program that must succeed; what it printed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module", params=SYSTEMS)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """Each supported one, and an apt that knows its archive and has nothing installed."""
    name = str(request.param)
    folder, suite = tmp_path_factory.mktemp(name), SYSTEMS[name][0]
    if name.startswith("debian"):
        sources = debian_packages.source(folder, suite)
    else:
        sources = "".join(
            f"deb [trusted=yes arch=amd64] {UBUNTU} {suite}{pocket} main restricted universe\n"
            for pocket in ("", "-updates", "-security")
        )
    apt = debian_packages.apt_of_its_own(folder, sources)
    run([*apt, "update"])
    return name, apt


def resolved(apt: list[str], names: list[str]) -> dict[str, str]:
    """{package: version} that apt would install."""
    return packages.parse_simulation(run([*apt, "install", "--simulate", "--no-install-recommends", *names]))


def test_every_system_has_what_kernels_are_compiled_with(system: tuple[str, list[str]]) -> None:
    name, apt = system
    python = SYSTEMS[name][1]
    asked = role("sglang_venv", "defaults")["sglang_venv_packages"]["cuda"]
    names = [name.replace("{python}", python) for name in asked]
    found = resolved(apt, names)
    assert set(names) <= set(found)
    # Triton compiles against the interpreter's own headers.
    assert any(name.startswith("libpython3") and name.endswith("-dev") for name in found)


def test_ubuntus_own_driver_is_of_the_branch_and_open(system: tuple[str, list[str]]) -> None:
    name, apt = system
    sources = role("gpu_host", "vars")["__gpu_host_driver_sources"]["distribution"]
    if name not in sources:
        assert name.startswith("debian")  # whose own packages are too old, and refused
        return
    names = [each.replace("{branch}", BRANCH) for each in sources[name]["packages"]] + ["linux-headers-generic"]
    assert "linux-headers-generic" in sources[name]["headers"]
    found = resolved(apt, names)
    assert set(names) <= set(found)
    wanted = driver.Wanted(BRANCH, "", tuple(names), tuple(role("gpu_host", "vars")["__gpu_host_driver_belonging"]))
    for each in names[:-1]:
        assert wanted.fits(driver.upstream(found[each])), (each, found[each])
    assert f"nvidia-dkms-{BRANCH}-server-open" in found
    assert f"nvidia-kernel-source-{BRANCH}-server-open" in found
    assert "dkms" in found
