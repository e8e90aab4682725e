"""Virtual environments by lock: naming, checking and building one in the directory it will be used in.

An environment's directory is named by what is in it: the pinned requirements and the interpreter's minor version. So
a changed lock is another directory, and the one that serves is never touched. A file written last says that it is
complete; a directory without it was interrupted and is built again. (Building elsewhere and renaming is not possible:
scripts of a virtual environment hold its absolute path.)

The first half is used on the controller as well; the second half, from `Interpreter` on, works on the host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import references

MARK = ".complete"
#: Folder of an environment that is laid out as a CUDA toolkit.
TOOLKIT = "cuda"
SCHEMA = 1
#: Files of an environment beyond the wheels' own bytes: compiled bytecode is about as large as its source, and 5 % is
#: for directories, scripts and file system blocks (measured on the CPU set: 1.79 GB of files, 2.1 GB installed).
OVERHEAD = 1.05
#: Files that no engine imports: tests, SGLang's image generators, and what transformers generates its models from. A
#: fifth of the CPU set's source, and none of the 6,387 modules that a served request had loaded.
UNCOMPILED = r"/(tests|multimodal_gen|pip|setuptools|sglang/test)/|/transformers/models/.*/(modular|convert)_"
#: Wheels of an installation that never finished are dropped after this many seconds (one day).
STALE_WHEELS = 24 * 3600


class VenvError(Exception):
    """What went wrong, in words for the person who runs the play."""


@dataclass(frozen=True)
class Requirement:
    """One line of a lock: the exact release and the SHA-256 of each file that may be installed for it."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def line(self) -> str:
        return f"{self.name}=={self.version}" + "".join(f" \\\n    --hash=sha256:{value}" for value in self.hashes)


def normalize(name: str) -> str:
    """A project's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_requirements(text: str) -> list[Requirement]:
    """The requirements of a lock, in order. Anything that is not pinned and hashed is an error."""
    found = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = line.split(" #")[0].strip()
        if not line or line.startswith("#"):
            continue
        match = re.match(r"([A-Za-z0-9._-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)$", line)
        if not match:
            raise VenvError(f"not a pinned and hashed requirement: {line}")
        hashes = tuple(re.findall(r"sha256:([0-9a-f]{64})", match[3]))
        found.append(Requirement(normalize(match[1]), match[2], hashes))
    if not found:
        raise VenvError("the requirements are empty")
    return found


def venv_id(requirements: str, python: str) -> str:
    """The directory name: 16 hex digits over the pinned requirements and the interpreter's X.Y.

    Order, comments and line breaks of the file do not matter, so that a remade lock with the same pins is the same.
    """
    lines = sorted(
        f"{one.name}=={one.version} {' '.join(sorted(one.hashes))}" for one in parse_requirements(requirements)
    )
    minor = ".".join(python.split(".")[:2])
    return hashlib.sha256("\n".join([f"python {minor}", *lines]).encode()).hexdigest()[:16]


def suits(wheel: str, python: str) -> bool:
    """Whether a wheel's file name admits this CPython ("3.11"): its own tag, an older stable ABI, or pure Python."""
    major, minor = (int(part) for part in python.split(".")[:2])
    python_tags, abi_tags = (tags.split(".") for tags in wheel[: -len(".whl")].split("-")[-3:-1])
    for tag in python_tags:
        match = re.match(r"(py|cp)(\d)(\d*)$", tag)
        if not match or int(match[2]) != major:
            continue
        older = not match[3] or int(match[3]) <= minor
        if match[1] == "py" and "none" in abi_tags and older:
            return True
        if match[1] == "cp" and (("abi3" in abi_tags and older) or match[3] == str(minor)):
            return True
    return False


def choose_wheels(
    requirements: Sequence[Requirement], wheels: Iterable[str], python: str
) -> tuple[list[str], list[str]]:
    """(file names to install on this Python, what is missing as name==version)."""
    by_project: dict[tuple[str, str], list[str]] = {}
    for wheel in wheels:
        name, version = wheel.split("-")[:2]
        by_project.setdefault((normalize(name), version), []).append(wheel)
    chosen, missing = [], []
    for requirement in requirements:
        fitting = [
            wheel for wheel in by_project.get((requirement.name, requirement.version), []) if suits(wheel, python)
        ]
        if fitting:
            chosen.append(sorted(fitting)[0])
        else:
            missing.append(f"{requirement.name}=={requirement.version}")
    return chosen, missing


def installed_size(wheels: Iterable[Path]) -> tuple[int, int]:
    """(bytes, files) that these wheels take once installed and compiled, read from their tables of contents."""
    size = files = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                compiled = entry.filename.endswith(".py")
                size += entry.file_size * (2 if compiled else 1)
                files += 2 if compiled else 1
    return int(size * OVERHEAD), files


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def bundle(wheels: Iterable[Path], target: Path) -> None:
    """Small wheels as one file, since each transfer of its own costs a round trip. Wheels are compressed already."""
    with tarfile.open(target, "w") as archive:
        for wheel in wheels:
            archive.add(wheel, arcname=wheel.name)


def unbundle(folder: Path) -> None:
    """Lay the wheels of each bundle in `folder` beside it; nothing but plain files, under their bare names."""
    for packed in sorted(folder.glob("*.tar")):
        with tarfile.open(packed) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                name = os.path.basename(member.name)
                if content is None or not name.endswith(".whl"):
                    raise VenvError(f"{packed.name} holds {member.name}, which is no wheel")
                with (folder / name).open("wb") as stream:
                    shutil.copyfileobj(content, stream, 1 << 20)
        packed.unlink()


# --- on the host -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interpreter:
    """The host's Python that an environment is made from."""

    path: str
    version: str  # for example 3.11.2

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


def find_interpreter(python: str) -> Interpreter:
    """Ask an interpreter for its version and whether it can make environments."""
    code = "import sys, venv; print('%d.%d.%d' % sys.version_info[:3])"
    try:
        asked = subprocess.run(
            [python, "-c", code], text=True, capture_output=True, check=False, env=clean_environment()
        )
    except OSError as error:
        raise VenvError(f"sglang_venv_python: {python} cannot be run on this host ({error.strerror})")
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no output"])[-1]
        hint = " (on Debian: install python3-venv)" if "No module named" in last else ""
        raise VenvError(f"sglang_venv_python: {python} on this host: {last}{hint}")
    return Interpreter(python, asked.stdout.strip())


#: Interpreters that were brought stand among the environments, hidden, since these hold links to them.
BROUGHT = ".python-"


def brought_interpreter(root: Path, digest: str) -> Path:
    """Where the interpreter of an archive with this SHA-256 is, or will be."""
    return root / (BROUGHT + digest[:16]) / "bin" / "python3"


def unpack_interpreter(archive: Path, root: Path, digest: str) -> Path:
    """Lay an interpreter's archive out in its place, whole or not at all; returns the interpreter.

    The archive holds a folder with bin/python3 in it, as relocatable builds of CPython do, or bin/ itself.
    """
    if sha256(archive) != digest:
        raise VenvError(f"{archive.name} is not the archive that sglang_venv_python_sha256 names")
    target = brought_interpreter(root, digest).parents[1]
    partial = target.with_name(target.name + ".partial")
    make_directory(root)
    old_mask = os.umask(0o022)
    try:
        with only_one(root):
            if target.is_dir():
                return target / "bin" / "python3"
            remove_tree(partial)
            partial.mkdir(mode=0o755)
            unpack(archive, partial)
            found = [partial, *sorted(path for path in partial.iterdir() if path.is_dir())]
            home = next((path for path in found if os.access(path / "bin" / "python3", os.X_OK)), None)
            if home is None:
                raise VenvError(f"{archive.name} holds no bin/python3 that can be run")
            find_interpreter(str(home / "bin" / "python3"))
            os.sync()
            os.replace(home, target)
            remove_tree(partial)
            return target / "bin" / "python3"
    finally:
        os.umask(old_mask)


def unpack(archive: Path, target: Path) -> None:
    """Files, directories and links of an archive, all within `target`, owned by us and writable by nobody else."""
    inside = os.path.realpath(target)

    def within(path: str) -> bool:
        return os.path.realpath(path) == inside or os.path.realpath(path).startswith(inside + os.sep)

    with tarfile.open(archive) as packed:
        for member in packed:
            place = os.path.join(inside, member.name)
            link = os.path.join(inside if member.islnk() else os.path.dirname(place), member.linkname)
            if not within(place) or ((member.issym() or member.islnk()) and not within(link)):
                raise VenvError(f"{archive.name} leads out of its folder: {member.name}")
            if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
                raise VenvError(f"{archive.name} holds {member.name}, which is no file")
            member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
            member.mode = (member.mode & 0o755) | (0o755 if member.isdir() else 0o644)
            packed.extract(member, inside)


def unused(root: Path, keep: int, protected: Iterable[str], units: Iterable[Path] | None = None) -> list[str]:
    """Environments that nothing refers to: interrupted ones, and complete ones but for the newest `keep`.

    Interpreters that were brought go with the last environment made from them. Returns the names, and changes nothing.
    """
    if not root.is_dir():
        return []
    names = [path.name for path in root.iterdir() if path.is_dir()]
    kept = {*protected, *references.mentioned(names, root.parent, units)}
    marks = {name: read_mark(root / name) for name in names if re.fullmatch(r"[0-9a-f]{16}", name)}
    spare = [name for name, mark in marks.items() if mark and name not in kept]
    spare.sort(key=lambda name: str((marks[name] or {}).get("completed_at", "")), reverse=True)
    gone = [name for name, mark in marks.items() if not mark and name not in kept] + spare[keep:]
    used = {str((mark or {}).get("interpreter", "")) for name, mark in marks.items() if name not in gone}
    for path in root.glob(BROUGHT + "*"):
        if path.name not in kept and not any(f"/{path.name}/" in interpreter for interpreter in used):
            gone.append(path.name)
    return sorted(gone)


def prune(root: Path, keep: int, protected: Iterable[str], units: Iterable[Path] | None = None) -> list[str]:
    """Remove what is `unused`; returns the names."""
    if not root.is_dir():
        return []
    with only_one(root):
        gone = unused(root, keep, protected, units)
        for name in gone:
            with contextlib.suppress(FileNotFoundError):
                (root / name / MARK).unlink()  # first: half of an environment must not look like one
            remove_tree(root / name)
    return gone


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for pip and for checks: nothing that leads Python elsewhere than into the environment."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "CONDA"))
    }
    return {**kept, "PYTHONNOUSERSITE": "1", "LC_ALL": "C.UTF-8", **(extra or {})}


def read_mark(path: Path) -> dict[str, Any] | None:
    """What an environment is, or None where it is missing or was interrupted."""
    try:
        content = json.loads((path / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA else None


def probe(root: Path, requirements: str, interpreter: Interpreter) -> dict[str, Any]:
    """What stands on the host for these requirements; changes nothing."""
    identity = venv_id(requirements, interpreter.version)
    path = root / identity
    mark = read_mark(path)
    # The interpreter is a link into the host's Python: after a distribution upgrade it may lead nowhere.
    works = os.access(path / "bin" / "python", os.X_OK)
    found = "complete" if mark and works else "incomplete" if path.exists() else "absent"
    return {"path": str(path), "id": identity, "found": found, "python": interpreter.version, "mark": mark}


def free_space(path: Path) -> tuple[int, int]:
    """(bytes, inodes) free for root where `path` is or will be; inodes -1 where the file system does not count them."""
    while not path.exists():
        path = path.parent
    room = os.statvfs(path)
    return room.f_bfree * room.f_frsize, room.f_ffree if room.f_files else -1


def wheel_folder(cache: Path, identity: str) -> Path:
    return cache / identity


def adopt(source: Path, folder: Path, requirements: Sequence[Requirement]) -> list[str]:
    """Take over wheels that were just transferred, each only if a requirement names its hash."""
    known = {digest for requirement in requirements for digest in requirement.hashes}
    make_directory(folder)
    unbundle(source)
    taken = []
    for wheel in sorted(source.glob("*.whl")):
        if sha256(wheel) not in known:
            raise VenvError(f"{wheel.name} is not the file that the requirements name (changed or damaged on its way)")
        arriving = folder / ("." + wheel.name)
        with contextlib.suppress(FileNotFoundError):
            arriving.unlink()
        # The name appears only when the content is whole: a name in this folder is a promise. A move across file
        # systems is a copy.
        shutil.move(str(wheel), str(arriving))
        os.chown(arriving, os.geteuid(), os.getegid())
        os.chmod(arriving, 0o644)
        os.replace(arriving, folder / wheel.name)
        taken.append(wheel.name)
    return taken


def make_directory(path: Path) -> None:
    """A directory that the engine's user can read and only root can write."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o755, exist_ok=True)
        one.chmod(0o755)


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[None]:
    """One build at a time on a host: two plays at once would delete each other's half."""
    with (root / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def build(
    root: Path,
    requirements: str,
    interpreter: Interpreter,
    wheels: Path,
    *,
    name: str,
    engine: Mapping[str, str] | None = None,
    index: bool = False,
    check: Mapping[str, Any] | None = None,
    user: str = "",
    network: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the environment, check it, and mark it complete. Returns its mark."""
    old_mask = os.umask(0o022)
    try:
        make_directory(root)
        with only_one(root):
            now = probe(root, requirements, interpreter)
            if now["found"] == "complete":  # by another play, while this one waited
                return dict(now["mark"])
            path = Path(now["path"])
            remove_tree(path)
            seconds = install(path, requirements, interpreter, wheels, index, network)
            started = time.monotonic()
            verify(path, parse_requirements(requirements), check or {}, user)
            seconds["check"] = round(time.monotonic() - started, 1)
            mark = {
                "schema": SCHEMA,
                "id": now["id"],
                "name": name,
                **engine_of(parse_requirements(requirements), engine),
                "python": interpreter.version,
                "interpreter": interpreter.path,
                "cuda_toolkit": toolkit_of(parse_requirements(requirements)),
                "packages": len(parse_requirements(requirements)),
                "seconds": seconds,
                "completed_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            }
            # A machine that loses power must not find the mark and half of the files.
            os.sync()
            write_mark(path, mark)
        drop_wheels(wheels)
        return mark
    finally:
        os.umask(old_mask)


def engine_of(requirements: Sequence[Requirement], engine: Mapping[str, str] | None) -> dict[str, str | None]:
    """The mark's account of the engine: its release as installed, local label (+rehearsal) included."""
    if not engine:
        return {"engine": None, "version": None, "build": None}
    versions = {requirement.name: requirement.version for requirement in requirements}
    return {"engine": engine["name"], "version": versions.get(engine["name"]), "build": engine.get("build")}


def toolkit_of(requirements: Sequence[Requirement]) -> str | None:
    """Release of the compiler of CUDA kernels that the environment brings; None where it brings none."""
    return next((one.version for one in requirements if one.name == "nvidia-cuda-nvcc"), None)


def install(
    path: Path,
    requirements: str,
    interpreter: Interpreter,
    wheels: Path,
    index: bool,
    network: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Make the environment and put every pinned package into it; returns seconds per step."""
    started = time.monotonic()
    command([interpreter.path, "-m", "venv", "--without-pip", str(path)], "making the environment")
    listing = path / "requirements.txt"
    listing.write_text(requirements, encoding="utf-8")
    python = str(path / "bin" / "python")
    pip = [
        python,
        str(bootstrap_pip(parse_requirements(requirements), wheels) / "pip"),
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
        "--no-compile",
        "--no-input",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--find-links",
        str(wheels),
        "-r",
        str(listing),
    ]
    # From an index, pip obeys the host's own configuration (mirror, proxy, certificates); otherwise none of it.
    pip += [] if index else ["--isolated", "--no-index"]
    command(pip, "installing", {"PIP_ROOT_USER_ACTION": "ignore", **(network or {})})
    link_toolkit(path)
    seconds = {"install": round(time.monotonic() - started, 1)}
    started = time.monotonic()
    compile_all(path)
    seconds["compile"] = round(time.monotonic() - started, 1)
    return seconds


def link_toolkit(path: Path) -> Path | None:
    """`<environment>/cuda`, laid out as callers of nvcc expect a toolkit, where the wheels bring one; None otherwise.

    They take the folder above nvcc's for CUDA_HOME and link with `-L$CUDA_HOME/lib64 -lcudart`; the wheels name that
    folder `lib`, and have only libcudart.so.13 in it.
    """
    found = sorted(path.glob("lib/python3*/site-packages/nvidia/cu*/bin/nvcc"))
    if not found:
        return None
    brought = found[-1].parent.parent
    home = path / TOOLKIT
    (home / "lib64").mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (home / name).symlink_to(os.path.relpath(brought / name, home))
    for library in sorted((brought / "lib").glob("lib*")):
        (home / "lib64" / library.name).symlink_to(os.path.relpath(library, home / "lib64"))
        plain = home / "lib64" / (library.name.split(".so.")[0] + ".so")
        if ".so." in library.name and not plain.is_symlink():
            plain.symlink_to(library.name)
    return home


def compile_all(path: Path) -> None:
    """Compile once here, not at every start by a user who may not write here.

    A package may carry files that are templates or for another Python: those do not compile, and nobody imports them.
    """
    words = [str(path / "bin" / "python"), "-m", "compileall", "-qq", "-j", "0", "-x", UNCOMPILED, str(path / "lib")]
    subprocess.run(words, check=False, capture_output=True, env=clean_environment())


def bootstrap_pip(requirements: Sequence[Requirement], wheels: Path) -> Path:
    """pip's own wheel, which Python runs as it is; hosts need neither pip nor ensurepip. Checked before it runs."""
    wanted = [requirement for requirement in requirements if requirement.name == "pip"]
    found = sorted(wheels.glob("pip-*.whl"))
    for wheel in found:
        if wanted and sha256(wheel) in wanted[0].hashes:
            return wheel
    raise VenvError(f"no pip wheel in {wheels} that the requirements name")


def command(arguments: Sequence[str], doing: str, extra: Mapping[str, str] | None = None) -> None:
    """Run one step; a failure is an error with the end of its output."""
    done = subprocess.run(arguments, text=True, capture_output=True, check=False, env=clean_environment(extra))
    if done.returncode == 0:
        return
    output = done.stdout + done.stderr
    lines = [line for line in output.splitlines() if line.strip()]
    raise VenvError(f"{doing} failed (exit status {done.returncode}): {explain(output)}" + "\n".join(lines[-12:]))


def explain(output: str) -> str:
    """A sentence before the tool's own words where these hide what to do."""
    if os.strerror(errno.ENOSPC) in output:
        return "the disk is full.\n"
    if "connection broken" in output:
        return "the package index does not answer from this host.\n"
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in output:
        return "a file is not the one that the lock names.\n"
    if "No matching distribution found" in output or "is not a supported wheel on this platform" in output:
        return "a pinned package has no file for this host's Python and C library.\n"
    return "\n"


VERIFY = """
import importlib, importlib.metadata as metadata, json, sys
wanted = json.load(sys.stdin)
wrong = []
for name, version in wanted["versions"].items():
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        found = "nothing"
    if found != version:
        wrong.append("%s is %s, not %s" % (name, found, version))
if wrong:
    sys.exit("; ".join(wrong))
for name in wanted["imports"]:
    importlib.import_module(name)
"""


def verify(path: Path, requirements: Sequence[Requirement], check: Mapping[str, Any], user: str) -> None:
    """Use the environment as the engine's user will: versions, imports, and that its command line answers."""
    python = str(path / "bin" / "python")
    with tempfile.TemporaryDirectory(prefix="dflash-fleet-") as home:
        # Engines and their libraries write caches into HOME at import.
        environment = clean_environment(
            {
                "HOME": home,
                "TMPDIR": home,
                "XDG_CACHE_HOME": home,
                "PYTHONDONTWRITEBYTECODE": "1",
                **{str(name): str(value) for name, value in (check.get("environment") or {}).items()},
            }
        )
        who = run_as(user, home)
        wanted = {
            "versions": {requirement.name: requirement.version for requirement in requirements},
            "imports": list(check.get("imports") or []),
        }
        steps: list[tuple[str, list[str]]] = [("the packages", ["-c", VERIFY])]
        if check.get("command"):
            steps.append(("the command line", [str(word) for word in check["command"]]))
        for what, words in steps:
            try:
                done = subprocess.run(
                    [python, *words],
                    input=json.dumps(wanted),
                    text=True,
                    capture_output=True,
                    check=False,
                    env=environment,
                    cwd=home,
                    **who,
                )
            except PermissionError:
                # For example an interpreter in somebody's home directory.
                raise VenvError(f"the engine's user may not run {os.path.realpath(python)} or not read {path}")
            if done.returncode != 0 or (what == "the command line" and not done.stdout.strip()):
                lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
                raise VenvError(f"checking {what} failed (exit status {done.returncode}):\n" + "\n".join(lines[-12:]))


def run_as(user: str, home: str) -> dict[str, Any]:
    """subprocess arguments to run as `user` (nobody where there is no such user yet); as ourselves when not root."""
    if os.geteuid() != 0:
        return {}
    try:
        account = pwd.getpwnam(user or "nobody")
    except KeyError:
        account = pwd.getpwnam("nobody")
    os.chown(home, account.pw_uid, account.pw_gid)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def write_mark(path: Path, mark: Mapping[str, Any]) -> None:
    temporary = path / (MARK + ".new")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(mark, indent=1, sort_keys=True) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path / MARK)


def remove_tree(path: Path) -> None:
    """Remove an interrupted environment; never through a link."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def drop_wheels(wheels: Path) -> None:
    """The wheels have done their work; so have those of installations that never finished."""
    shutil.rmtree(wheels, ignore_errors=True)
    if not wheels.parent.is_dir():
        return
    for other in wheels.parent.iterdir():
        if other.is_dir() and time.time() - other.stat().st_mtime > STALE_WHEELS:
            shutil.rmtree(other, ignore_errors=True)
