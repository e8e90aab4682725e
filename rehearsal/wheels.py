#!/usr/bin/env python3
"""Builds wheelhouses: folders with a pinned, hashed requirements.txt and every wheel it names, made once on the
controller, from which hosts install without a route out.

    python rehearsal/wheels.py cpu                 the real SGLang 0.5.23 on the CPU, with its DFLASH platform plugin
    python rehearsal/wheels.py rehearsal 0.5.11    the rehearsal engine that stands in for this release
    python rehearsal/wheels.py cuda 0.5.20         a release for GPUs, about 6 GB
    python rehearsal/wheels.py hf-client           the Hugging Face client of role model_weights
    python rehearsal/wheels.py sglang-router       SGLang's router, of role sglang_router
    python rehearsal/wheels.py lock cuda 0.5.20    remake a lock file (needs an index, not the wheels)

The last line of standard output is the wheelhouse's path; progress goes to standard error. A wheelhouse that is
current is left alone. They stand in ${DFLASH_FLEET_CACHE:-~/.cache/dflash-fleet}/wheelhouses/, and each wheel once, by
its hash, in wheels/ beside them (hard links).

Wheels are chosen for the host's Python and glibc, whatever runs here. Where they come from is pip's own configuration
(PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf): the CPU build of torch, for one, is on no default index.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "module_utils"))

from dflash_fleet import words  # noqa: E402 - found by the line above
from dflash_fleet.venvs import (  # noqa: E402
    Requirement,
    VenvError,
    normalize,
    parse_requirements,
    sha256,
    suits,
)

LOCKS = ROOT / "roles" / "sglang_venv" / "files" / "locks"
MARK = ".complete"
# Hosts have glibc 2.34 at the least (Debian 12 has 2.36, Ubuntu 22.04 has 2.35); SGLang's own wheels need that much.
GLIBC_MINOR = 34
CPU_RELEASE = "0.5.23"
# Sets without an engine: one lock for every Python that a host may have.
ANY_PYTHON = ("hf-client", "sglang-router", "pip")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Zip files cannot be older than 1980; any fixed day makes the same source give the same wheel, and so the same lock.
SOURCE_DATE_EPOCH = "1577836800"


class WheelError(Exception):
    """Said to the person as it is, without a traceback."""


@dataclass(frozen=True)
class Wheelhouse:
    """What one wheelhouse is made of."""

    name: str
    lock: Path
    pythons: tuple[str, ...]
    projects: tuple[Path, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def say(message: str) -> None:
    print(f"wheels: {message}", file=sys.stderr, flush=True)


def cache_dir() -> Path:
    return Path(os.environ.get("DFLASH_FLEET_CACHE") or "~/.cache/dflash-fleet").expanduser()


def tree_hash(folder: Path) -> str:
    """One hash over a project's files, names and contents, without what building leaves behind."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part in {"__pycache__", "dist", ".mypy_cache", ".ruff_cache"} for part in parts):
            content = path.read_bytes()
            digest.update(f"{'/'.join(parts)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def platform_options(python: str) -> list[str]:
    """pip's options for a host's interpreter and glibc. pip takes --platform by the letter, so each glibc is named."""
    options = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for abi in ("cp" + python.replace(".", ""), "abi3", "none"):
        options += ["--abi", abi]
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR, 4, -1)]
    for tag in [*tags, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]:
        options += ["--platform", tag]
    return options


def run(command: Sequence[str], cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """Run to the end and return standard output; a failure carries the end of what the command said."""
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, text=True, capture_output=True, check=False
    )
    if result.returncode != 0:
        said = [
            line for line in (result.stdout + result.stderr).splitlines() if not line.startswith("WARNING: Location")
        ]
        raise WheelError(f"{' '.join(command[:5])} ... failed (exit {result.returncode}):\n" + "\n".join(said[-15:]))
    return result.stdout


def pip(*arguments: str) -> str:
    return run([sys.executable, "-m", "pip", "--quiet", *arguments], environment={"PIP_DISABLE_PIP_VERSION_CHECK": "1"})


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One builder at a time; a second one waits and then finds the work done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def pool_file(digest: str) -> Path | None:
    """The wheel with this hash, if an earlier run brought it."""
    folder = cache_dir() / "wheels" / digest
    return next(iter(sorted(folder.glob("*.whl"))), None) if folder.is_dir() else None


def add_to_pool(wheel: Path, digest: str) -> Path:
    target = cache_dir() / "wheels" / digest / wheel.name
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(wheel, target)
    return target


def download(requirements: Sequence[Requirement], python: str, lock: Path) -> list[Path]:
    """The wheels of a lock that suit this Python: from the pool, the rest by pip, each checked against its hash."""
    staging = cache_dir() / "wheels" / ".incoming"
    staging.mkdir(parents=True, exist_ok=True)
    wanted = {digest for requirement in requirements for digest in requirement.hashes}
    for left in staging.glob("*.whl"):  # of a run that was killed between download and filing
        digest = sha256(left)
        if digest in wanted:
            add_to_pool(left, digest)
        else:
            left.unlink()
    found, missing = [], []
    for requirement in requirements:
        have = [wheel for wheel in map(pool_file, requirement.hashes) if wheel and suits(wheel.name, python)]
        found += have[:1]
        if not have:
            missing.append(requirement)
    if missing:
        say(f"{lock.name}: {len(found)} of {len(requirements)} wheels at hand, downloading {len(missing)}")
        started = time.monotonic()
        wanted_file = staging / "requirements.txt"
        wanted_file.write_text("".join(requirement.line() + "\n" for requirement in missing))
        try:
            pip(
                "download",
                "--no-deps",
                "--require-hashes",
                *platform_options(python),
                "-r",
                str(wanted_file),
                "-d",
                str(staging),
            )
        except WheelError as error:
            raise WheelError(f"{error}\n{hint(missing)}")
        size = 0
        for wheel in sorted(staging.glob("*.whl")):
            size += wheel.stat().st_size
            found.append(add_to_pool(wheel, sha256(wheel)))
        wanted_file.unlink()
        say(f"{len(missing)} wheels, {size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s")
    return found


def hint(missing: Sequence[Requirement]) -> str:
    local = [f"{requirement.name}=={requirement.version}" for requirement in missing if "+" in requirement.version]
    if not local:
        return "Is an index or a mirror reachable with pip's configuration (PIP_INDEX_URL, PIP_CERT, https_proxy)?"
    return (
        f"{', '.join(local)} is on no default index: name a folder that holds the wheel in PIP_FIND_LINKS, "
        "or an index that has it in PIP_EXTRA_INDEX_URL."
    )


def build(project: Path, environment: dict[str, str]) -> Path:
    """A wheel of ours: the same bytes from the same source, so it is built once for each state of the source."""
    key = f"{SOURCE_DATE_EPOCH} {metadata.version('hatchling')} {sorted(environment.items())} {tree_hash(project)}"
    note = cache_dir() / "wheels" / "built" / hashlib.sha256(key.encode()).hexdigest()
    known = pool_file(note.read_text().strip()) if note.is_file() else None
    if known:
        return known
    say(f"building {project.name}")
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
            cwd=project,
            environment={"SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        )
        wheels = sorted(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise WheelError(f"{project.name}: expected one wheel, got {[wheel.name for wheel in wheels]}")
        wheel = add_to_pool(wheels[0], sha256(wheels[0]))
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(wheel.parent.name + "\n")
    return wheel


def requirement_of(wheel: Path) -> Requirement:
    """The pin of a wheel of ours, whose folder in the pool is its hash."""
    name, version = wheel.name.split("-")[:2]
    return Requirement(normalize(name), version, (wheel.parent.name,))


def locked_requirements(house: Wheelhouse) -> list[Requirement]:
    if not house.lock.is_file():
        raise WheelError(
            f"there is no lock file {house.lock.name}. Make it with: "
            f"python rehearsal/wheels.py lock {lock_arguments(house.lock.name)}"
        )
    return parse_requirements(house.lock.read_text())


def own_wheels(house: Wheelhouse) -> list[Path]:
    with locked(cache_dir() / "wheelhouses" / ".lock"):
        return [build(project, house.environment) for project in house.projects]


def requirements_text(house: Wheelhouse) -> str:
    """The wheelhouse's requirements.txt, known before anything is downloaded: the lock, and our own wheels."""
    found = locked_requirements(house) + [requirement_of(wheel) for wheel in own_wheels(house)]
    body = "".join(requirement.line() + "\n" for requirement in sorted(found, key=lambda one: one.name))
    return f"# {house.name}, made by rehearsal/wheels.py\n{body}"


def current(folder: Path, text: str) -> bool:
    try:
        wheels = json.loads((folder / MARK).read_text())["wheels"]
        return (folder / "requirements.txt").read_text() == text and all((folder / name).is_file() for name in wheels)
    except (OSError, ValueError, KeyError):
        return False


def make(house: Wheelhouse) -> Path:
    """Build or find a wheelhouse and return its folder."""
    text = requirements_text(house)
    target = cache_dir() / "wheelhouses" / house.name
    if current(target, text):
        return target
    with locked(cache_dir() / "wheelhouses" / ".lock"):
        if current(target, text):  # by another builder, while this one waited
            return target
        requirements = locked_requirements(house)
        wheels = {wheel.name: wheel for python in house.pythons for wheel in download(requirements, python, house.lock)}
        for project in house.projects:
            wheel = build(project, house.environment)
            wheels[wheel.name] = wheel
        publish(target, text, list(wheels.values()))
    return target


def bootstrap(house: Wheelhouse) -> list[Path]:
    """What a host needs from here even when it installs from an index itself: pip, and the wheels of ours."""
    only_pip = [requirement for requirement in locked_requirements(house) if requirement.name == "pip"]
    with locked(cache_dir() / "wheelhouses" / ".lock"):
        return download(only_pip, house.pythons[0], house.lock) + [
            build(project, house.environment) for project in house.projects
        ]


def publish(target: Path, text: str, wheels: list[Path]) -> None:
    """Lay the folder out beside its place and put it there in one step, so that nobody reads half of it."""
    partial = target.with_name(f".{target.name}.partial")
    old = target.with_name(f".{target.name}.old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    for wheel in wheels:
        try:
            os.link(wheel, partial / wheel.name)
        except OSError:  # a file system without hard links
            shutil.copyfile(wheel, partial / wheel.name)
    (partial / "requirements.txt").write_text(text)
    mark = {"schema": 1, "wheels": sorted(wheel.name for wheel in wheels)}
    (partial / MARK).write_text(json.dumps(mark, indent=1) + "\n")
    if target.exists():
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)
    say(f"{target.name}: {len(wheels)} wheels, {words.size(sum(wheel.stat().st_size for wheel in wheels))}")


# --- lock files ------------------------------------------------------------------------------------------------------


def lock_name(kind: str, release: str, python: str) -> str:
    if kind in ANY_PYTHON:
        return f"{kind}-py3.txt"
    return f"sglang-{release}-{kind}-cp{python.replace('.', '')}.txt"


def lock_arguments(name: str) -> str:
    """The arguments of `lock` that make the file of this name."""
    match = re.match(r"sglang-(.+)-(cpu|cuda)-cp(\d)(\d+)\.txt$", name)
    if not match:
        return name.rsplit("-", 1)[0]
    return f"{match[2]} {match[1]} --python {match[3]}.{match[4]}"


def pip_configuration() -> dict[str, list[str]]:
    """Indexes and folders of pip's configuration, environment included, by option name."""
    found: dict[str, list[str]] = {}
    for line in run([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        key, _, value = line.partition("=")
        found.setdefault(key.rpartition(".")[2], []).extend(ast.literal_eval(value).split())
    return found


def resolve(lines: Sequence[str], overrides: Sequence[str], python: str, no_deps: bool, folder: Path) -> list[str]:
    """Exact pins on this Python, by uv: pip takes environment markers from the interpreter that runs it."""
    if not lines:
        return []
    uv = folder / "uv"
    if not uv.exists():
        pip("install", "--target", str(uv), "uv")
    (folder / "in.txt").write_text("\n".join(lines) + "\n")
    (folder / "override.txt").write_text("\n".join(overrides) + "\n")
    command = [
        str(uv / "bin" / "uv"),
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--only-binary",
        ":all:",
        "--python-version",
        python,
        "--python-platform",
        f"x86_64-manylinux_2_{GLIBC_MINOR}",
        "--override",
        str(folder / "override.txt"),
        str(folder / "in.txt"),
    ]
    if no_deps:
        command.append("--no-deps")
    options = {"index-url": "--default-index", "constraint": "--constraints"}
    if any("+" in line for line in lines):
        # Only where a local build is asked for by name (torch+cpu): elsewhere it would win over the index's.
        options["find-links"] = "--find-links"
    configured = pip_configuration()
    for option, target in options.items():
        for value in dict.fromkeys(configured.get(option, [])):
            command += [target, value]
    pins = run(command, environment={"UV_EXTRA_INDEX_URL": ""})
    return [line for line in pins.splitlines() if line and not line.startswith("#")]


def chosen_files(pins: Sequence[str], python: str, folder: Path) -> list[Requirement]:
    """The file that pip would install for each pin on such a host, with its hash as the index states it."""
    listing, report = folder / "pins.txt", folder / "report.json"
    # Three equal signs: == would take a local build (2.13.0+cpu) for the release of the index.
    listing.write_text("".join(re.sub("={2,3}", "===", pin, count=1) + "\n" for pin in pins))
    pip(
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--target",
        str(folder / "nowhere"),
        "--report",
        str(report),
        *platform_options(python),
        "-r",
        str(listing),
    )
    found = []
    for item in json.loads(report.read_text())["install"]:
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        found.append(Requirement(normalize(item["metadata"]["name"]), item["metadata"]["version"], (digest,)))
    return found


def merge(sets: Sequence[Sequence[Requirement]]) -> list[Requirement]:
    """One list for several Pythons: the same releases, and the files of each."""
    merged: dict[str, Requirement] = {}
    for one in sets:
        for requirement in one:
            known = merged.get(requirement.name, Requirement(requirement.name, requirement.version, ()))
            if known.version != requirement.version:
                raise WheelError(f"{known.name}: {known.version} on one Python, {requirement.version} on another")
            hashes = tuple(dict.fromkeys(known.hashes + requirement.hashes))
            merged[requirement.name] = Requirement(known.name, known.version, hashes)
    return sorted(merged.values(), key=lambda requirement: requirement.name)


def write_lock(kind: str, release: str, pythons: Sequence[str]) -> Path:
    """Remake one lock file from its .in file."""
    source = LOCKS / (f"{kind}.in" if kind in ANY_PYTHON else f"sglang-{release}-{kind}.in")
    if not source.is_file():
        if kind != "cuda":
            raise WheelError(f"no {source.relative_to(ROOT)} to lock")
        source.write_text(f"# SGLang {release} for NVIDIA GPUs, as its own metadata asks.\nsglang=={release}\npip\n")
    wanted: dict[str, list[str]] = {"": [], "no-deps": [], "override": []}
    for line in source.read_text().splitlines():
        match = re.match(r"(?:# (no-deps|override): )?([A-Za-z0-9].*)$", line)
        if match:
            wanted[match[1] or ""].append(match[2].strip())
    target = LOCKS / lock_name(kind, release, pythons[0])
    sets = []
    for python in pythons:
        say(f"{target.name}: resolving for Python {python}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                pins = resolve(wanted[""], wanted["override"], python, False, folder)
                pins += resolve(wanted["no-deps"], [], python, True, folder)
            except WheelError as error:
                raise WheelError(
                    f"{error}\nA pin that the index no longer has can be replaced: add a line "
                    f"'# override: NAME==VERSION' to {source.relative_to(ROOT)}."
                )
            sets.append(chosen_files(pins, python, folder))
    requirements = merge(sets)
    command = f"python rehearsal/wheels.py lock {lock_arguments(target.name)}"
    header = (
        f"# Python {', '.join(pythons)} on x86_64, glibc >= 2.{GLIBC_MINOR}. Made from {source.name} by: {command}\n"
    )
    target.write_text(header + "".join(requirement.line() + "\n" for requirement in requirements))
    say(f"{target.name}: {len(requirements)} packages")
    return target


# --- command line ----------------------------------------------------------------------------------------------------


def wheelhouse(kind: str, release: str, python: str) -> Wheelhouse:
    """The wheelhouse that a subcommand asks for."""
    if kind in ("hf-client", "sglang-router"):
        return Wheelhouse(kind, LOCKS / lock_name(kind, "", ""), PYTHONS)
    if kind == "rehearsal":
        # The engine is pure Python without dependencies; what is locked is pip, which installs it.
        return Wheelhouse(
            f"sglang-{release}-rehearsal",
            LOCKS / lock_name("pip", "", ""),
            ("3.11",),
            (HERE / "engine",),
            {"REHEARSAL_RELEASE": release},
        )
    name = f"sglang-{release}-{kind}" + ("" if python == "3.11" else f"-cp{python.replace('.', '')}")
    projects = (HERE / "cpu_platform",) if kind == "cpu" else ()
    return Wheelhouse(name, LOCKS / lock_name(kind, release, python), (python,), projects)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    names = ("cpu", "cuda", "rehearsal", "hf-client", "sglang-router", "lock")
    commands = result.add_subparsers(dest="command", required=True, metavar="{" + ",".join(names) + "}")
    for name in names:
        command = commands.add_parser(name)
        if name == "lock":
            command.add_argument("kind", choices=["cpu", "cuda", *ANY_PYTHON])
        if name in ("cuda", "rehearsal"):
            command.add_argument("release", help="SGLang release, for example 0.5.20")
        if name in ("cpu", "lock"):
            command.add_argument("release", nargs="?", default=CPU_RELEASE)
        if name in ("cpu", "cuda", "lock"):
            command.add_argument(
                "--python", default="3.11", help="the host's Python (default: %(default)s, Debian 12's)"
            )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    release, python = getattr(options, "release", ""), getattr(options, "python", "3.11")
    try:
        if options.command == "lock":
            print(write_lock(options.kind, release, PYTHONS if options.kind in ANY_PYTHON else (python,)))
        else:
            house = wheelhouse(options.command, release, python)
            folder = make(house)
            say(f"{house.name} is ready")
            print(folder)
    except (WheelError, VenvError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
