"""A package repository for the scenario gpu_host: small packages in the place of NVIDIA's, and real ones beside them.

    repository.py make            -> <cache>/driver-repository/{repository.tar, key.asc, fingerprint}

Laid out as NVIDIA's: a flat folder per system, signed, every branch in it. The packages carry no driver. Their module
is an ELF file with nothing but the fields that modinfo prints, their nvidia-smi prints recorded output, and where a
kernel would show a loaded module under /proc/driver, a script that modprobe's own `install` line names writes it there.
What the hosts need of Debian (unattended-upgrades, needrestart, kmod) is downloaded from the mirror that this machine's
apt uses, with what it depends on.
"""

from __future__ import annotations

import os
import platform
import shutil
import struct
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "rehearsal"))
sys.path.insert(0, str(ROOT / "molecule/shared"))
import debian_packages  # noqa: E402 - found by the lines above
import fleet  # noqa: E402
from debian_packages import index, run  # noqa: E402

FIXTURES = ROOT / "tests/fixtures/nvidia-smi"
SYSTEMS = {"debian-12": ("bookworm", "gpu-12"), "debian-13": ("trixie", "gpu-13")}
KEYS = {"debian-12": "3bf863cc.pub", "debian-13": "8793F200.pub"}
KERNEL = platform.release()
FROM_DEBIAN = ("kmod", "needrestart", "unattended-upgrades")
# Releases on offer from the start; `late` ones are published in the course of the tests.
RELEASES = ("570.211.01", "580.65.06", "580.105.08", "595.84")
LATE = ("580.173.02",)

LOAD = """#!/bin/sh
# In the kernel's place: shows the installed module as loaded.
set -e
version=$(modinfo -F version nvidia)
mountpoint -q /proc/driver || mount -t tmpfs -o mode=0755 tmpfs /proc/driver
mkdir -p /proc/driver/nvidia
line="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  $version  Release Build  (recorded)"
echo "$line" > /proc/driver/nvidia/version
"""
LOAD_UNIT = """[Unit]
Description=What the kernel does at boot: load the driver
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/libexec/rehearsal-load-nvidia
[Install]
WantedBy=multi-user.target
"""
POSTINST = """#!/bin/sh
set -e
mkdir -p /lib/modules/$(uname -r)/updates/dkms
cp /usr/share/rehearsal-driver/nvidia.ko /lib/modules/$(uname -r)/updates/dkms/nvidia.ko
touch /lib/modules/$(uname -r)/modules.order /lib/modules/$(uname -r)/modules.builtin
depmod
systemctl daemon-reload
"""
SMI = """#!/bin/sh
# Recorded output of a host with eight RTX PRO 6000.
loaded=$(sed -n 's/.*x86_64  \\([0-9.]*\\) .*/\\1/p' /proc/driver/nvidia/version 2>/dev/null)
if [ -z "$loaded" ]; then
    echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    exit 9
elif [ "$loaded" != "RELEASE" ]; then
    echo "Failed to initialize NVML: Driver/library version mismatch"
    exit 18
fi
folder=/usr/share/rehearsal-driver
case "$*" in
    *--query-gpu*) cat $folder/gpus.csv ;;
    *-p2p*) cat $folder/p2p.txt ;;
    *) cat $folder/gpus.xml ;;
esac
"""
PERSISTENCED = """[Unit]
Description=NVIDIA Persistence Daemon (rehearsal)
[Service]
ExecStart=/bin/sleep infinity
[Install]
WantedBy=multi-user.target
"""


def module(version: str) -> bytes:
    """A kernel module with nothing in it but what modinfo prints."""
    info = b"".join(
        f"{line}\0".encode()
        for line in ("license=Dual MIT/GPL", f"version={version}", "name=nvidia", f"vermagic={KERNEL} SMP mod_unload")
    )
    names = b"\0.modinfo\0.shstrtab\0.symtab\0.strtab\0"
    body = info + names + bytes(24) + b"\0"
    start = 64
    sections = [
        (0, 0, 0, 0, 0, 0, 0),
        (1, 1, start, len(info), 0, 0, 0),
        (10, 3, start + len(info), len(names), 0, 0, 0),
        (20, 2, start + len(info) + len(names), 24, 4, 1, 24),
        (28, 3, start + len(info) + len(names) + 24, 1, 0, 0, 0),
    ]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, 2 if kind == 1 else 0, 0, offset, size, link, inf, 1, entry)
        for name, kind, offset, size, link, inf, entry in sections
    )
    place = start + len(body) + (-(start + len(body)) % 8)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, place, 0, 64, 0, 0, 64, len(sections), 2)
    return header + body + bytes(place - start - len(body)) + table


Files = dict[str, tuple[bytes | str, int]]  # content and mode by path


def package(
    folder: Path, name: str, version: str, depends: str = "", files: Files | None = None, postinst: str = ""
) -> None:
    """One binary package."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary)
        (tree / "DEBIAN").mkdir(mode=0o755)
        os.chmod(tree, 0o755)
        control = f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: tests <t@example.invalid>\n"
        control += f"Depends: {depends}\n" if depends else ""
        (tree / "DEBIAN/control").write_text(control + "Description: stands for the real one in tests\n")
        if postinst:
            (tree / "DEBIAN/postinst").write_text(postinst)
            (tree / "DEBIAN/postinst").chmod(0o755)
        for path, (content, mode) in (files or {}).items():
            target = tree / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content if isinstance(content, bytes) else content.encode())
            target.chmod(mode)
        folder.mkdir(parents=True, exist_ok=True)
        run("dpkg-deb", "--root-owner-group", "-Zgzip", "--build", str(tree), str(folder))


def driver(folder: Path, release: str) -> None:
    """The packages of one release, named and depending on one another as in NVIDIA's repository."""
    version = f"{release}-1"
    csv = (FIXTURES / "rtx-pro-6000.csv").read_text().replace("580.105.08", release)
    xml = (FIXTURES / "rtx-pro-6000.xml").read_text().replace("580.105.08", release)
    package(folder, "nvidia-open", version, ", ".join(
        f"{name} (= {version})" for name in ("nvidia-kernel-open-dkms", "nvidia-driver-cuda", "nvidia-persistenced")
    ))
    package(folder, "nvidia-kernel-open-dkms", version, "kmod", {
        "/usr/share/rehearsal-driver/nvidia.ko": (module(release), 0o644),
        "/usr/libexec/rehearsal-load-nvidia": (LOAD, 0o755),
        "/etc/modprobe.d/rehearsal-driver.conf": ("install nvidia /usr/libexec/rehearsal-load-nvidia\n", 0o644),
        "/usr/lib/systemd/system/rehearsal-load-nvidia.service": (LOAD_UNIT, 0o644),
        "/usr/lib/systemd/system/multi-user.target.d/rehearsal-driver.conf": (
            "[Unit]\nWants=rehearsal-load-nvidia.service\n", 0o644),
    }, POSTINST)
    package(folder, "nvidia-driver-cuda", version, f"libcuda1 (= {version})", {
        "/usr/bin/nvidia-smi": (SMI.replace("RELEASE", release), 0o755),
        "/usr/share/rehearsal-driver/gpus.csv": (csv, 0o644),
        "/usr/share/rehearsal-driver/gpus.xml": (xml, 0o644),
        "/usr/share/rehearsal-driver/p2p.txt": ((FIXTURES / "p2p-ok.txt").read_bytes(), 0o644),
    })
    package(folder, "libcuda1", version)
    package(folder, "nvidia-persistenced", version, "", {
        "/usr/lib/systemd/system/nvidia-persistenced.service": (PERSISTENCED, 0o644),
    })


def make() -> None:
    output = fleet.cache_dir() / "driver-repository"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        folder, home = Path(name) / "apt", Path(name) / "gnupg"
        home.mkdir(mode=0o700)
        gpg = ["gpg", "--homedir", str(home), "--batch"]
        run(*gpg, "--passphrase", "", "--quick-gen-key", "tests <t@example.invalid>", "rsa3072", "sign", "never")
        listed = [line.split(":") for line in run(*gpg, "--list-keys", "--with-colons").splitlines()]
        (output / "fingerprint").write_text(next(fields[9] for fields in listed if fields[0] == "fpr"))
        (output / "key.asc").write_text(run(*gpg, "--armor", "--export"))
        shared, late = Path(name) / "shared", Path(name) / "late"
        for release in RELEASES:
            driver(shared, release)
        for release in LATE:
            driver(late, release)
        package(shared, "nvidia-container-toolkit", "1.17.8-1")
        package(late, "nvidia-container-toolkit", "1.18.0-1")
        for system, (debian, host) in SYSTEMS.items():
            flat = folder / system
            shutil.copytree(shared, flat)
            index(flat, home)
            newer = folder / f"{system}-late"
            shutil.copytree(shared, newer)
            shutil.copytree(late, newer, dirs_exist_ok=True)
            index(newer, home)
            for place in (flat, newer):
                shutil.copy(output / "key.asc", place / KEYS[system])
            status = debian_packages.host_status("molecule_gpu_host", host)
            kept = fleet.cache_dir() / "driver-repository-debs" / debian
            debian_packages.from_debian(flat / "system", debian, FROM_DEBIAN, status, kept)
            package(flat / "system", f"linux-headers-{KERNEL}", "1.0-1")
            package(flat / "system", "linux-headers-amd64", "1.0-1")
            index(flat / "system", None)
        run("gpgconf", "--homedir", str(home), "--kill", "all")
        with tarfile.open(output / "repository.tar", "w") as archive:
            archive.add(folder, arcname=".")


if __name__ == "__main__":
    if sys.argv[1:] != ["make"]:
        sys.exit(__doc__)
    make()
