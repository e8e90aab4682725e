"""Packages for hosts without a route out, in a flat repository.

They are downloaded here, from the mirror that this machine's apt uses, with all that they need beyond what a host has.

    debian_packages.py FLEET HOST DEBIAN PACKAGE...    makes <cache>/<FLEET>-packages/<DEBIAN>.tar
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "rehearsal"))
import fleet  # noqa: E402 - found by the line above


def run(*words: str, **options: object) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        sys.exit(f"{' '.join(words[:6])} failed:\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def index(folder: Path, home: Path | None = None) -> None:
    """Packages, Release and, with a key, InRelease of a flat repository."""
    listing = run("dpkg-scanpackages", "--multiversion", ".", cwd=folder)
    (folder / "Packages").write_text(listing)
    digest = hashlib.sha256(listing.encode()).hexdigest()
    release = f"Origin: NVIDIA\nLabel: NVIDIA\nSuite: {folder.name}\nArchitectures: amd64\n"
    release += f"Date: {formatdate(usegmt=True)}\n"
    (folder / "Release").write_text(f"{release}SHA256:\n {digest} {len(listing.encode())} Packages\n")
    if home:
        gpg = ["gpg", "--homedir", str(home), "--batch", "--yes"]
        run(*gpg, "--clearsign", "--output", "InRelease", "Release", cwd=folder)


def source(folder: Path, debian: str) -> str:
    """The line for sources.list of the mirror that this machine's apt uses."""
    mirror = fleet.choose_mirror(fleet.read_apt_sources(Path("/etc/apt")), debian)
    keyring = fleet.keyring_for(mirror, folder)
    trust = f"signed-by={keyring}" if keyring else "trusted=yes"
    return f"deb [{trust}] {mirror.uri} {debian} main\n"


def apt_of_its_own(folder: Path, sources: str, status: str = "") -> list[str]:
    """apt-get with these sources and these packages installed, whatever the machine has: to download and simulate."""
    (folder / "sources.list").write_text(sources)
    (folder / "status").write_text(status)
    (folder / "lists/partial").mkdir(parents=True)
    (folder / "cache/archives/partial").mkdir(parents=True)
    os.chmod(folder, 0o755)
    return [
        "apt-get", "-q", "-y", f"-oDir::Etc::sourcelist={folder}/sources.list", "-oDir::Etc::sourceparts=-",
        "-oDir::Etc::preferences=-", "-oDir::Etc::preferencesparts=-", f"-oDir::State::status={folder}/status",
        f"-oDir::State::lists={folder}/lists", f"-oDir::Cache={folder}/cache", "-oAPT::Sandbox::User=root",
        "-oDebug::NoLocking=true",
    ]


def from_debian(target: Path, debian: str, names: Sequence[str], status: str, kept: Path) -> None:
    """Real packages, and what they need beyond `status`, a host's /var/lib/dpkg/status; `kept` for the next run."""
    key = hashlib.sha256((" ".join(names) + status).encode()).hexdigest()
    note = kept / "key"
    if not note.is_file() or note.read_text() != key:
        shutil.rmtree(kept, ignore_errors=True)
        (kept / "archives/partial").mkdir(parents=True)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            apt = [*apt_of_its_own(folder, source(folder, debian), status), f"-oDir::Cache={kept}"]
            run(*apt, "update")
            run(*apt, "install", "--download-only", "--no-install-recommends", *names)
        note.write_text(key)
    target.mkdir(parents=True)
    for deb in (kept / "archives").glob("*.deb"):
        shutil.copy(deb, target)


def host_status(name: str, host: str) -> str:
    """What is installed on a host of a fleet."""
    tool = str(ROOT / "rehearsal/fleet.py")
    return run(sys.executable, tool, "exec", name, host, "--", "cat", "/var/lib/dpkg/status")


def main(name: str, host: str, debian: str, *packages: str) -> None:
    """One archive with a repository."""
    output = fleet.cache_dir() / f"{name}-packages"
    with tempfile.TemporaryDirectory() as folder:
        flat = Path(folder, "apt")
        from_debian(flat, debian, packages, host_status(name, host), output / "debs" / debian)
        index(flat)
        with tarfile.open(output / f"{debian}.tar", "w") as archive:
            archive.add(flat, arcname=".")


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
