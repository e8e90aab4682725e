#!/usr/bin/env python3
"""Boots fleets of containers that are real enough to rehearse a deployment on: systemd, journald and sshd in each.

    fleet.py prerequisites --install
    fleet.py up demo --spec rehearsal/hosts/demo.yml --inventory inventory/demo
    fleet.py status demo
    fleet.py down demo

Images are built once from the package mirror that the machine's own apt uses, so no container registry is needed.
What a fleet is made of carries the label dflash-fleet=NAME, and `down` removes by that label alone.
How it works, and why: docs/testing-hosts.md.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import http.client
import ipaddress
import json
import os
import re
import resource
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HOST_FILES = HERE / "host"

IMAGE_NAME = "localhost/dflash-fleet-host"
DEBIANS = ("bookworm", "trixie")

LABEL = "dflash-fleet"
LABEL_HOST = "dflash-fleet.host"
LABEL_ROLE = "dflash-fleet.role"  # host or hub
LABEL_ADDRESS = "dflash-fleet.address"
LABEL_SHAPE = "dflash-fleet.shape"  # hash of what a container was made from, apart from its image
LABEL_DEBIAN = "dflash-fleet.debian"
LABEL_LAYER = "dflash-fleet.layer"
LABEL_BASE = "dflash-fleet.base"
LABEL_BAKED = "dflash-fleet.baked"

HUB = "hub"
HUB_PORT = 8080
HUB_ADDRESS = 2  # last number of its address; .1 is the controller's side of the network
FIRST_HOST_ADDRESS = 10

BOOT_SECONDS = 90  # a host is up in 1 to 3 s; the rest is for a machine that is busy
SSH_SECONDS = 30
HUB_SECONDS = 30

# What root may do on a server and a container's root may not, as far as engines and their units ask for it. SYS_ADMIN
# is what makes sandboxing work at all: without it systemd leaves ProtectSystem= and the like out and says nothing.
CAPABILITIES = {"SYS_ADMIN": 21, "NET_ADMIN": 12, "SYS_PTRACE": 19, "SYS_NICE": 23, "IPC_LOCK": 14}
CAP_SYS_RESOURCE = 24

# Podman asks for this many open files and processes for root's containers, whatever the machine allows.
PODMAN_DEFAULT_LIMIT = 1048576
# Debian's podman lowers its own limit of processes to this first, and cannot raise it again without the capability.
PODMAN_OWN_PROCESS_LIMIT = 32768

DEBIAN_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PREREQUISITES = {
    "dpkg-scanpackages": "dpkg-dev",
    "podman": "podman",
    "runc": "runc",
    "netavark": "netavark",
    "aardvark-dns": "aardvark-dns",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
# Helpers that live outside PATH.
LIBEXEC = ("/usr/lib/podman", "/usr/libexec/podman", "/usr/local/libexec/podman", "/usr/local/lib/podman")


class FleetError(Exception):
    """Something a person has to act on; the message says what."""


# --------------------------------------------------------------------------------------------------------------------
# Small things


def say(step: str, text: str) -> None:
    """One line of progress; on stderr, so that stdout stays for results."""
    print(f"{step:<9} {text}", file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """Where images' leftovers, keys and the like are kept between runs."""
    return Path(os.environ.get("DFLASH_FLEET_CACHE") or Path.home() / ".cache" / "dflash-fleet").expanduser().resolve()


def digest(*parts: str | bytes) -> str:
    """Twelve hex digits that change when any of the parts does."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(str(len(data)).encode() + b":" + data)
    return whole.hexdigest()[:12]


def write_private(path: Path, text: str, mode: int = 0o600) -> None:
    """Writes a file so that nobody ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(name: str, waiting_for: str) -> Iterator[None]:
    """One process at a time; the lock goes with its holder, however that ends."""
    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("wait", waiting_for)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def in_parallel(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Runs work on each item at once; the first error is raised after all have ended."""
    if not items:
        return []
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(16, len(items))) as pool:
        futures = [pool.submit(work, item) for item in items]
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]


def last_lines(text: str, count: int = 12) -> str:
    """The end of a program's output, for an error message."""
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-count:])


def require_root(what: str) -> None:
    """Containers that run systemd on a network that the controller reaches need root."""
    if os.geteuid() != 0:
        raise FleetError(f"{what} needs root: run it again with sudo")


# --------------------------------------------------------------------------------------------------------------------
# The package sources of the machine


@dataclasses.dataclass(frozen=True)
class AptSource:
    """One binary package source of apt, whichever of its two formats it was written in."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""  # as written: paths, fingerprints, or a key itself
    trusted: bool = False


def parse_one_line(text: str) -> list[AptSource]:
    """Reads the one-line format: deb [option=value ...] URI SUITE COMPONENT..."""
    found = []
    for raw in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^]]*)]\s*)?(\S+)\s+([^#]+)", raw)
        if not match:
            continue
        options = dict(part.split("=", 1) for part in (match[1] or "").split() if "=" in part)
        suite, *components = match[3].split()
        found.append(
            AptSource(
                uri=match[2],
                suites=(suite,),
                components=tuple(components),
                signed_by=options.get("signed-by", ""),
                trusted=options.get("trusted", "") == "yes",
            )
        )
    return found


def parse_deb822(text: str) -> list[AptSource]:
    """Reads the deb822 format: stanzas of fields, a comment inside a stanza does not end it."""
    found = []
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n[ \t]*\n", kept):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t"):
                if key:
                    fields[key] += "\n" + line.strip()
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        for uri in fields.get("uris", "").split():
            found.append(
                AptSource(
                    uri=uri,
                    suites=tuple(fields.get("suites", "").split()),
                    components=tuple(fields.get("components", "").split()),
                    signed_by=fields.get("signed-by", "").strip(),
                    trusted=fields.get("trusted", "").lower() == "yes",
                )
            )
    return found


def read_apt_sources(folder: Path) -> list[AptSource]:
    """All sources under /etc/apt (or a folder laid out like it), in the order apt reads them."""
    found: list[AptSource] = []
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    for path in files:
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += parse_deb822(text) if path.suffix == ".sources" else parse_one_line(text)
    return found


def choose_mirror(sources: Iterable[AptSource], debian: str) -> AptSource:
    """The source to install `debian` from: the one this machine's own Debian comes from.

    A mirror carries every release of today, so a source of another release will do. What is merely offered for Debian
    by somebody else (suite bookworm, component main) ranks behind what looks like the archive itself.
    """

    def rank(source: AptSource) -> tuple[bool, bool, bool]:
        return (
            "debian-archive" not in source.signed_by,
            not source.uri.rstrip("/").endswith("/debian"),
            debian not in source.suites,
        )

    releases = {*DEBIANS, "bullseye", "forky", "stable", "oldstable", "testing", "unstable", "sid"}
    usable = [
        source
        for source in sources
        if "main" in source.components
        and releases.intersection(source.suites)
        and re.match(r"(https?|file):", source.uri)
    ]
    if not usable:
        raise FleetError(
            f"apt on this machine has no Debian source to build the {debian} host image from. Set DFLASH_FLEET_MIRROR "
            "to the address of a Debian mirror, or DFLASH_FLEET_BASE_IMAGE to a Debian image that the container "
            "runtime can pull"
        )
    return min(usable, key=rank)


def dearmor(text: str) -> bytes:
    """The binary form of an ASCII-armored public key, which is all that gpgv reads."""
    body: list[str] = []
    inside = False
    for line in (raw.strip() for raw in text.splitlines()):
        if line.startswith("-----BEGIN"):
            inside = True
        elif line.startswith("-----END"):
            inside = False
        # Headers hold a colon, deb822 writes an empty line as a dot, and the checksum starts with "=".
        elif inside and line not in ("", ".") and ":" not in line and not line.startswith("="):
            body.append(line)
    return base64.b64decode("".join(body))


def keyring_for(source: AptSource, folder: Path) -> Path | None:
    """The keyring that apt checks this source with, as a file debootstrap can use; None where apt checks nothing."""
    if source.trusted:
        return None
    path = source.signed_by.split("\n")[0].split(",")[0].strip()
    if source.signed_by.lstrip().startswith("-----BEGIN"):
        made = folder / "keyring.gpg"
        made.write_bytes(dearmor(source.signed_by))
        return made
    if path.startswith("/") and Path(path).is_file():
        data = Path(path).read_bytes()
        if data.lstrip().startswith(b"-----BEGIN"):
            made = folder / "keyring.gpg"
            made.write_bytes(dearmor(data.decode("ascii", "replace")))
            return made
        return Path(path)
    return Path(DEBIAN_KEYRING)


def apt_proxy_environment() -> dict[str, str]:
    """The proxies apt is configured with, in the way that debootstrap's wget understands."""
    found: dict[str, str] = {}
    for scheme in ("http", "https"):
        answer = subprocess.run(
            ["apt-config", "shell", "PROXY", f"Acquire::{scheme}::Proxy"], capture_output=True, text=True, check=False
        )
        match = re.match(r"PROXY='([^']+)'", answer.stdout)
        if match and match[1] != "DIRECT" and f"{scheme}_proxy" not in os.environ:
            found[f"{scheme}_proxy"] = match[1]
    return found


# --------------------------------------------------------------------------------------------------------------------
# The container runtime


@dataclasses.dataclass(frozen=True)
class Machine:
    """What of this machine decides how a container has to be started."""

    hybrid_cgroups: bool
    file_limit: int  # hard limit of open files, -1 without one
    process_limit: int
    may_raise_limits: bool
    capabilities: int  # the bounding set, as a bit mask
    apparmor: bool
    selinux: bool


def look_at_machine() -> Machine:
    """Reads this machine's limits; nothing here is assumed from its name or release."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")

    def mask(field: str) -> int:
        match = re.search(rf"^{field}:\s*([0-9a-f]+)", status, re.M)
        return int(match[1], 16) if match else 0

    apparmor = Path("/sys/module/apparmor/parameters/enabled")
    return Machine(
        hybrid_cgroups=Path("/sys/fs/cgroup/unified/cgroup.procs").exists(),
        file_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        process_limit=resource.getrlimit(resource.RLIMIT_NPROC)[1],
        may_raise_limits=bool(mask("CapEff") >> CAP_SYS_RESOURCE & 1),
        capabilities=mask("CapBnd"),
        apparmor=apparmor.exists() and apparmor.read_text().strip() == "Y",
        selinux=Path("/sys/fs/selinux/enforce").exists(),
    )


def run_flags(runtime: str, machine: Machine) -> list[str]:
    """Flags of `run` that make a container boot systemd here, with its sandboxing enforced."""
    flags = ["--cgroupns=private", "--stop-signal=SIGRTMIN+3"]
    flags += [f"--cap-add={name}" for name, bit in CAPABILITIES.items() if machine.capabilities >> bit & 1]
    if runtime == "podman":
        flags += ["--systemd=always", "--no-hosts", "--dns=none"]
    else:
        flags += ["--tmpfs=/run", "--tmpfs=/run/lock", "--tmpfs=/tmp:exec", "--env=container=docker"]
    if machine.apparmor:
        flags.append("--security-opt=apparmor=unconfined")
    if machine.selinux:
        flags.append("--security-opt=label=disable")
    if not machine.may_raise_limits:
        for name, hard in (("nofile", machine.file_limit), ("nproc", machine.process_limit)):
            if 0 <= hard < PODMAN_DEFAULT_LIMIT:
                most = min(hard, PODMAN_OWN_PROCESS_LIMIT) if name == "nproc" else hard
                flags.append(f"--ulimit={name}={most}:{most}")
    return flags


class Runtime:
    """Podman or docker: the few commands of theirs that a fleet needs."""

    def __init__(self, command: Sequence[str], name: str, machine: Machine) -> None:
        self.command = tuple(command)
        self.name = name
        self.machine = machine

    def run(
        self, *args: str, stdin: str | None = None, check: bool = True, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs one command of the runtime; an error names it and shows the end of what it said."""
        done = subprocess.run(
            [*self.command, *args], input=stdin, capture_output=True, text=True, check=False, timeout=timeout
        )
        if check and done.returncode != 0:
            raise FleetError(f"{self.name} {args[0]} failed (status {done.returncode}):\n{last_lines(done.stderr)}")
        return done

    def inspect(self, kind: str, *names: str) -> list[dict[str, Any]]:
        """What the runtime knows of containers, images or networks; those that do not exist are left out."""
        found: list[dict[str, Any]] = []
        if names:
            answer = self.run(kind, "inspect", *names, check=False)
            if answer.returncode == 0:
                found = json.loads(answer.stdout)
            elif len(names) > 1:  # one of them is gone: ask for each
                for name in names:
                    found += self.inspect(kind, name)
        return found

    def image_exists(self, reference: str) -> bool:
        """Whether an image is in the local store."""
        return self.run("image", "inspect", "--format", "{{.Id}}", reference, check=False).returncode == 0

    def images(self, label: str) -> list[str]:
        """References of the images with a label, newest first."""
        answer = self.run("images", "--filter", f"label={label}", "--format", "{{.Repository}}:{{.Tag}}")
        return list(dict.fromkeys(line for line in answer.stdout.split() if line.startswith(IMAGE_NAME + ":")))

    def containers(self, fleet: str) -> list[Container]:
        """The containers of a fleet, hub included, running or not."""
        names = self.run("ps", "--all", "--filter", f"label={LABEL}={fleet}", "--format", "{{.Names}}").stdout.split()
        return [Container.from_inspect(entry) for entry in self.inspect("container", *names)]

    def remove(self, names: Sequence[str]) -> None:
        """Removes containers with the volumes made for them; those already gone are no error."""
        if names:
            # Not asked to stop first: nothing in them is kept, and an engine may take minutes over a clean stop.
            quick = ["--time=0"] if self.name == "podman" else []
            self.run("rm", "--force", "--volumes", *quick, *names)


@dataclasses.dataclass(frozen=True)
class Container:
    """One container of a fleet."""

    name: str
    host: str
    role: str
    running: bool
    state: str
    address: str
    shape: str
    image: str

    @staticmethod
    def from_inspect(entry: dict[str, Any]) -> Container:
        """From the runtime's own description, which podman and docker give alike as far as used here."""
        labels = entry["Config"].get("Labels") or {}
        return Container(
            name=entry["Name"].lstrip("/"),
            host=labels.get(LABEL_HOST, ""),
            role=labels.get(LABEL_ROLE, "host"),
            running=bool(entry["State"].get("Running")),
            state=str(entry["State"].get("Status", "unknown")),
            address=labels.get(LABEL_ADDRESS, ""),
            shape=labels.get(LABEL_SHAPE, ""),
            image=entry["Config"].get("Image") or entry.get("ImageName") or "",
        )


def find_runtime() -> Runtime:
    """The runtime to use: DFLASH_FLEET_RUNTIME, else podman, else docker; with runc where crun cannot work."""
    wanted = os.environ.get("DFLASH_FLEET_RUNTIME", "")
    command = wanted or next((name for name in ("podman", "docker") if shutil.which(name)), "")
    if not command or not shutil.which(command):
        raise FleetError(
            f"{wanted or 'podman (or docker)'} is not installed: run `rehearsal/fleet.py prerequisites --install`"
        )
    require_root("a fleet")
    machine = look_at_machine()
    if not machine.capabilities >> CAPABILITIES["SYS_ADMIN"] & 1:
        raise FleetError(
            "this machine cannot give CAP_SYS_ADMIN to a container, without which systemd leaves out the sandboxing "
            "of services: use a virtual machine or a privileged container"
        )
    name = "docker" if "docker" in Path(command).name else "podman"
    chosen = [command]
    if name == "podman":
        info = json.loads(Runtime(chosen, name, machine).run("info", "--format", "json").stdout)
        oci = info["host"]["ociRuntime"]["name"]
        if oci == "crun" and machine.hybrid_cgroups:
            if not shutil.which("runc"):
                raise FleetError(
                    "crun does not work with this machine's hybrid cgroups, and runc is not installed: "
                    "run `rehearsal/fleet.py prerequisites --install`"
                )
            oci = "runc"
        # Said each time, so that a change of podman's default does not part old hosts from new ones.
        chosen += ["--runtime", oci]
    return Runtime(chosen, name, machine)


# --------------------------------------------------------------------------------------------------------------------
# Images


def packages() -> list[str]:
    """The Debian packages of a host."""
    lines = (HOST_FILES / "packages.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def image_reference(debian: str) -> str:
    """Name of the host image, which changes with everything it is made from."""
    parts = [debian, *packages()]
    parts += [(HOST_FILES / name).read_text(encoding="utf-8") for name in ("setup.sh", "boot.sh")]
    parts.append(os.environ.get("DFLASH_FLEET_BASE_IMAGE", ""))
    return f"{IMAGE_NAME}:{debian}-{digest(*parts)}"


def ensure_image(runtime: Runtime, debian: str, from_registry: bool = False) -> str:
    """Finds or builds the host image of a Debian release and returns its reference."""
    reference = image_reference(debian)
    if runtime.image_exists(reference):
        return reference
    with locked(f"image-{debian}", f"another process is building the {debian} image"):
        if runtime.image_exists(reference):
            return reference
        began = time.monotonic()
        say("image", f"{debian}: building {reference} (about a minute, once)")
        if from_registry or os.environ.get("DFLASH_FLEET_BASE_IMAGE"):
            build_from_base_image(runtime, debian, reference)
        else:
            build_from_packages(runtime, debian, reference)
        size = runtime.inspect("image", reference)[0].get("Size", 0) / 1e6
        say("image", f"{debian}: built in {time.monotonic() - began:.0f} s, {size:.0f} MB")
    return reference


def build_from_base_image(runtime: Runtime, debian: str, reference: str) -> None:
    """Builds by the Containerfile, from an image that the runtime has or can pull."""
    base = (os.environ.get("DFLASH_FLEET_BASE_IMAGE") or "debian:{debian}-slim").replace("{debian}", debian)
    flags = [
        "--network=host",
        f"--build-arg=BASE_IMAGE={base}",
        f"--build-arg=DEBIAN={debian}",
        f"--label={LABEL_DEBIAN}={debian}",
        f"--tag={reference}",
    ]
    if runtime.name == "podman":
        flags.append("--layers=false")  # no image of each step is left behind
        # Build containers meet the same limits as hosts do, but know fewer flags.
        flags += [flag for flag in run_flags("podman", runtime.machine) if flag.startswith("--ulimit=")]
    runtime.run("build", *flags, f"--file={HERE / 'Containerfile'}", str(HOST_FILES))


def build_from_packages(runtime: Runtime, debian: str, reference: str) -> None:
    """Builds with debootstrap from the mirror that this machine's apt uses."""
    if not shutil.which("debootstrap"):
        raise FleetError("debootstrap is not installed: run `rehearsal/fleet.py prerequisites --install`")
    # Not under /tmp: that is often mounted without device files, or in memory.
    work = cache_dir() / "build"
    work.mkdir(parents=True, exist_ok=True)
    packages_cache = cache_dir() / "debs" / debian
    packages_cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work, prefix=f"{debian}-") as folder:
        tree = Path(folder) / "tree"
        mirror, trust = mirror_and_trust(debian, Path(folder))
        quick = tree / "etc/dpkg/dpkg.cfg.d/build"
        quick.parent.mkdir(parents=True)
        # A tree that is thrown away when the build fails need not survive a power cut.
        quick.write_text("force-unsafe-io\npath-exclude=/usr/share/man/*\npath-exclude=/usr/share/locale/*\n")
        log = cache_dir() / f"debootstrap-{debian}.log"
        with open(log, "w", encoding="utf-8") as out:
            done = subprocess.run(
                [
                    "debootstrap",
                    "--variant=minbase",
                    f"--include={','.join(packages())}",
                    f"--cache-dir={packages_cache}",
                    *trust,
                    debian,
                    str(tree),
                    mirror,
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **apt_proxy_environment()},
                check=False,
            )
        if done.returncode != 0:
            raise FleetError(
                f"debootstrap of {debian} from {without_password(mirror)} failed; the whole log is {log}, it ends\n"
                + last_lines(log.read_text(encoding="utf-8", errors="replace"))
            )
        quick.unlink()
        shutil.copy(HOST_FILES / "setup.sh", tree / "setup.sh")
        setup = subprocess.run(
            ["chroot", str(tree), "/bin/sh", "/setup.sh"], capture_output=True, text=True, check=False
        )
        if setup.returncode != 0:
            raise FleetError(f"rehearsal/host/setup.sh failed in the {debian} tree:\n{last_lines(setup.stderr)}")
        (tree / "setup.sh").unlink()
        boot = tree / "usr/local/sbin/dflash-fleet-boot"
        shutil.copy(HOST_FILES / "boot.sh", boot)
        boot.chmod(0o755)
        import_tree(runtime, tree, debian, reference)


def mirror_and_trust(debian: str, folder: Path) -> tuple[str, list[str]]:
    """Where to install from, and debootstrap's flags for how to check it."""
    if os.environ.get("DFLASH_FLEET_MIRROR"):
        keyring_given = os.environ.get("DFLASH_FLEET_KEYRING", "")
        source = AptSource(os.environ["DFLASH_FLEET_MIRROR"], (debian,), ("main",), keyring_given)
    else:
        source = choose_mirror(read_apt_sources(Path("/etc/apt")), debian)
    keyring = keyring_for(source, folder)
    if keyring is None:
        return source.uri, ["--no-check-gpg"]
    if str(keyring) == DEBIAN_KEYRING:
        keyrings = keyring.parent
        if not keyring.exists() or not list(keyrings.glob(f"debian-archive-{debian}-*")):
            say("keyring", f"debian-archive-keyring does not know {debian} yet: updating it")
            apt_install(["debian-archive-keyring"])
        if not keyring.exists():
            raise FleetError(f"no keyring to check the Debian archive with: {DEBIAN_KEYRING} is missing")
    return source.uri, [f"--keyring={keyring}"]


def without_password(uri: str) -> str:
    """An address as it may be shown."""
    return re.sub(r"//[^/@]*@", "//", uri)


def import_tree(runtime: Runtime, tree: Path, debian: str, reference: str) -> None:
    """Makes an image of a directory tree."""
    changes = ['CMD ["/usr/local/sbin/dflash-fleet-boot"]', f"LABEL {LABEL_DEBIAN}={debian}"]
    if runtime.name == "podman":
        changes.append("STOPSIGNAL SIGRTMIN+3")
    flags = [word for change in changes for word in ("--change", change)]
    with subprocess.Popen(["tar", "-C", str(tree), "--numeric-owner", "-c", "."], stdout=subprocess.PIPE) as tar:
        done = subprocess.run(
            [*runtime.command, "import", *flags, "-", reference],
            stdin=tar.stdout,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0 or tar.returncode != 0:
        runtime.run("rmi", reference, check=False)
        raise FleetError(f"importing the {debian} tree failed:\n{last_lines(done.stderr)}")


def find_layer(runtime: Runtime, tag: str, base: str) -> str:
    """The newest layer with this tag that `bake` made over this base image; empty where there is none."""
    for reference in runtime.images(f"{LABEL_LAYER}={tag}"):
        labels = runtime.inspect("image", reference)[0]["Config"].get("Labels") or {}
        if labels.get(LABEL_BASE) == base:
            return reference
    return ""


def remove_images(runtime: Runtime, keep: Iterable[str]) -> None:
    """Removes host images and layers, but not those named and not those a container runs from."""
    kept = set(keep)
    for reference in runtime.images(LABEL_DEBIAN):
        if reference in kept:
            continue
        gone = runtime.run("rmi", reference, check=False).returncode == 0
        say("image", f"{reference}: {'removed' if gone else 'in use, left'}")


# --------------------------------------------------------------------------------------------------------------------
# What a fleet is to be


@dataclasses.dataclass(frozen=True)
class HostSpec:
    """One host of a fleet's specification."""

    name: str
    image: str  # a Debian release, or the tag of a layer made by `bake`
    groups: tuple[str, ...]
    debian: str  # release under a layer
    user: str = "root"
    memory: str = ""
    tmpfs: tuple[tuple[str, str], ...] = ()
    vars: tuple[tuple[str, Any], ...] = ()
    sudo_password: str = ""
    sudo_password_env: str = ""
    sudo_password_file: str = ""

    def shape(self) -> str:
        """Changes when a running host no longer is what the specification asks for."""
        return digest(self.image, self.debian, self.user, self.memory, json.dumps(self.tmpfs))


@dataclasses.dataclass(frozen=True)
class FleetSpec:
    """A fleet's specification, checked."""

    hosts: tuple[HostSpec, ...]
    hub: bool = False
    hub_repos: str = ""  # folder to serve; empty: the repositories of rehearsal/models.py
    hub_token: str = ""  # every repository is gated, and this token opens it; empty: open to all
    vars: tuple[tuple[str, Any], ...] = ()


NAME = r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?"
HOST_KEYS = {"name", "image", "debian", "groups", "user", "memory", "tmpfs", "vars"}
PASSWORD_KEYS = ("sudo_password", "sudo_password_env", "sudo_password_file")


def check_fleet_name(name: str) -> str:
    """A fleet's name without a hyphen: FLEET-HOST then names one host of one fleet, whatever they are called."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,29}", name):
        raise FleetError(f"fleet name {name!r}: use up to 30 lower-case letters, digits and underscores, no hyphen")
    return name


def check_spec(data: Any, where: str = "spec") -> FleetSpec:
    """Checks a specification and fills in what it leaves out; errors name the host and the key."""

    def fail(text: str) -> FleetError:
        return FleetError(f"{where}: {text}")

    if not isinstance(data, dict):
        raise fail("expected a mapping with the key hosts")
    unknown = set(data) - {"hosts", "hub", "vars"}
    if unknown:
        raise fail(f"unknown key {sorted(unknown)[0]!r} (known: hosts, hub, vars)")
    if not isinstance(data.get("hosts"), list) or not data["hosts"]:
        raise fail("hosts has to be a list with at least one host")
    if not isinstance(data.get("vars", {}), dict):
        raise fail("vars has to be a mapping")
    hub = data.get("hub", False)
    if isinstance(hub, dict):
        unknown = set(hub) - {"repos", "token"}
        if unknown:
            raise fail(f"hub: unknown key {sorted(unknown)[0]!r} (known: repos, token)")
    elif not isinstance(hub, bool):
        raise fail("hub has to be true, false or a mapping with the keys repos and token")

    hosts: list[HostSpec] = []
    for number, entry in enumerate(data["hosts"], start=1):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise fail(f"host {number}: expected a mapping with a name")
        name = entry["name"]
        if not re.fullmatch(NAME, name) or name == HUB:
            raise fail(f"host {name!r}: a host's name is lower-case letters, digits and hyphens, and not {HUB!r}")
        if name in {host.name for host in hosts}:
            raise fail(f"host {name!r} is there twice")
        hosts.append(check_host(entry, f"{where}: host {name}"))
    options = hub if isinstance(hub, dict) else {}
    return FleetSpec(
        hosts=tuple(hosts),
        hub=bool(hub),
        hub_repos=str(options.get("repos", "")),
        hub_token=str(options.get("token", "")),
        vars=tuple(data.get("vars", {}).items()),
    )


def check_host(entry: dict[str, Any], where: str) -> HostSpec:
    """Checks one host of a specification."""

    def fail(text: str) -> FleetError:
        return FleetError(f"{where}: {text}")

    unknown = set(entry) - HOST_KEYS - set(PASSWORD_KEYS)
    if unknown:
        known = ", ".join([*sorted(HOST_KEYS), *PASSWORD_KEYS])
        raise fail(f"unknown key {sorted(unknown)[0]!r} (known: {known})")
    image = str(entry.get("image", DEBIANS[0]))
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.]{0,39}", image):
        raise fail(f"image {image!r}: use {' or '.join(DEBIANS)}, or the tag of a layer made by `fleet.py bake`")
    debian = str(entry.get("debian", image if image in DEBIANS else DEBIANS[0]))
    if debian not in DEBIANS or (image in DEBIANS and image != debian):
        raise fail(f"debian {debian!r}: use {' or '.join(DEBIANS)}, and the same as image where that names a release")
    groups = entry.get("groups", [])
    if not isinstance(groups, list) or not all(re.fullmatch(r"[A-Za-z_]\w*", str(group)) for group in groups):
        raise fail("groups has to be a list of group names (letters, digits and underscores)")
    user = str(entry.get("user", "root"))
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,30}", user):
        raise fail(f"user {user!r} is no name of a Linux user")
    memory = str(entry.get("memory", ""))
    if memory and not re.fullmatch(r"\d+[bkmg]?", memory):
        raise fail(f"memory {memory!r}: use a number with b, k, m or g, such as 4g")
    tmpfs = entry.get("tmpfs", {})
    if not isinstance(tmpfs, dict) or not all(
        str(path).startswith("/") and re.fullmatch(r"\d+[kmg]?", str(size)) for path, size in tmpfs.items()
    ):
        raise fail("tmpfs has to be a mapping of absolute paths to sizes, such as /var/lib/sglang: 64m")
    if not isinstance(entry.get("vars", {}), dict):
        raise fail("vars has to be a mapping")
    given = [key for key in PASSWORD_KEYS if entry.get(key)]
    if len(given) > 1 or (given and user == "root"):
        raise fail(f"give at most one of {', '.join(PASSWORD_KEYS)}, and only to a user other than root")
    return HostSpec(
        name=entry["name"],
        image=image,
        groups=tuple(str(group) for group in groups),
        debian=debian,
        user=user,
        memory=memory,
        tmpfs=tuple(sorted((str(path), str(size)) for path, size in tmpfs.items())),
        vars=tuple(entry.get("vars", {}).items()),
        **{key: str(entry[key]) for key in given},
    )


def load_spec(path: Path) -> FleetSpec:
    """Reads a specification: YAML, or JSON where PyYAML is missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FleetError(f"cannot read the fleet's specification: {error}") from error
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml_module().safe_load(text)
    except ValueError as error:
        raise FleetError(f"{path}: {error}") from error
    except Exception as error:  # yaml.YAMLError, whose module may not be there to name it
        if type(error).__module__.split(".")[0] != "yaml":
            raise
        raise FleetError(f"{path}: {error}") from error
    return check_spec(data, str(path))


def yaml_module() -> Any:
    """PyYAML, which only some commands need: `prerequisites` runs before anything is installed."""
    try:
        import yaml
    except ImportError as error:
        raise FleetError("PyYAML is missing: use the Python of the project's virtual environment") from error
    return yaml


# --------------------------------------------------------------------------------------------------------------------
# A fleet's own files


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A fleet's name and where its things are kept."""

    name: str

    @property
    def folder(self) -> Path:
        """Key, known hosts, generated passwords, and where its inventory was written."""
        return cache_dir() / "fleets" / self.name

    @property
    def network(self) -> str:
        """The container network of the fleet."""
        return f"dflash-fleet-{self.name}"

    @property
    def key(self) -> Path:
        """Private key that reaches every host of the fleet."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The hosts' real keys, read from the hosts themselves."""
        return self.folder / "known_hosts"

    @property
    def record(self) -> Path:
        """What `up` wrote outside of the folder."""
        return self.folder / "fleet.json"

    @property
    def sockets(self) -> Path:
        """Where shared SSH connections are kept: short, since a socket's path may hold 104 characters."""
        return Path(f"/tmp/dff-{os.geteuid()}") / digest(str(self.folder))[:8]

    def container(self, host: str) -> str:
        """Container of a host."""
        return f"{self.name}-{host}"

    def read_record(self) -> dict[str, Any]:
        """The record, empty for a fleet that is not there."""
        try:
            return dict(json.loads(self.record.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def ssh_options(self, shared: bool = True) -> list[str]:
        """Options of ssh: this fleet's key and host keys and no others, checked strictly."""
        options = [
            f"UserKnownHostsFile={ssh_word(self.known_hosts)}",
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
            "IdentitiesOnly=yes",
            f"ControlPath={self.sockets}/%C" if shared else "ControlPath=none",
            # A host that was cut off or restarted leaves its shared connection hanging: find out soon.
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
        ]
        return [word for option in options for word in ("-o", option)]

    def prepare_sockets(self) -> None:
        """Makes the sockets' folder; refuses one under /tmp that somebody else made first."""
        top = self.sockets.parent
        top.mkdir(mode=0o700, exist_ok=True)
        status = top.lstat()
        if top.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise FleetError(f"{top} belongs to another user or is open to others: remove it")
        self.sockets.mkdir(mode=0o700, exist_ok=True)

    def close_connections(self) -> None:
        """Ends shared SSH connections to hosts that are about to change or to go."""
        if not self.sockets.is_dir():
            return
        for socket in self.sockets.iterdir():
            # One whose host is gone does not answer; without its socket nobody will use it again.
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "fleet"],
                    capture_output=True,
                    check=False,
                    timeout=5,
                )
            socket.unlink(missing_ok=True)


def ssh_word(path: Path) -> str:
    """A path as a value of an ssh option, which splits at blanks unless quoted."""
    return f'"{path}"' if " " in str(path) else str(path)


def render_inventory(fleet: Fleet, spec: FleetSpec, addresses: dict[str, str], endpoint: str) -> str:
    """The Ansible inventory of a fleet that is up, as YAML."""
    options = shlex.join(fleet.ssh_options())
    hosts: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for host in spec.hosts:
        entry: dict[str, Any] = {
            "ansible_host": addresses[host.name],
            "ansible_user": host.user,
            "ansible_ssh_private_key_file": str(fleet.key),
            "ansible_ssh_common_args": options,
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        # No ansible_become: a task that needs root says so, and what works here works for every ordinary user.
        if host.user != "root" and not any((host.sudo_password, host.sudo_password_env, host.sudo_password_file)):
            kept = password_file(fleet, host)
            entry["ansible_become_password"] = f"{{{{ lookup('ansible.builtin.file', '{kept}') }}}}"
        entry.update(dict(host.vars))
        hosts[host.name] = entry
        for group in host.groups:
            groups.setdefault(group, {"hosts": {}})["hosts"][host.name] = {}
    everything: dict[str, Any] = {"hosts": hosts}
    shared = {**({"model_weights_endpoint": endpoint} if endpoint else {}), **dict(spec.vars)}
    if shared:
        everything["vars"] = shared
    if groups:
        everything["children"] = groups
    body = yaml_module().safe_dump({"all": everything}, sort_keys=False, explicit_start=True, width=120)
    return f"# {inventory_mark(fleet)}; changes are lost.\n{body}"


def inventory_mark(fleet: Fleet) -> str:
    """First line of an inventory that is ours to overwrite and to remove."""
    return f"Written by rehearsal/fleet.py for the fleet {fleet.name}"


def inventory_file(given: Path) -> Path:
    """The file to write: given as such, or as the folder to hold hosts.yml."""
    path = given.expanduser().resolve()
    return path if path.suffix in (".yml", ".yaml") else path / "hosts.yml"


def password_file(fleet: Fleet, host: HostSpec) -> Path:
    """Where a generated sudo password is kept, for the inventory to look it up."""
    return fleet.folder / f"{host.name}.sudo-password"


def sudo_password(fleet: Fleet, host: HostSpec) -> str:
    """The sudo password of an ordinary user: given by the specification in one of three ways, or generated once."""
    if host.sudo_password:
        return host.sudo_password
    if host.sudo_password_env:
        value = os.environ.get(host.sudo_password_env, "")
        if not value:
            raise FleetError(f"host {host.name}: sudo_password_env names {host.sudo_password_env}, which is not set")
        return value
    if host.sudo_password_file:
        path = Path(host.sudo_password_file).expanduser()
        try:
            return path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise FleetError(f"host {host.name}: sudo_password_file: {error}") from error
    path = password_file(fleet, host)
    if not path.exists():
        write_private(path, secrets.token_urlsafe(18) + "\n")
    return path.read_text(encoding="utf-8").strip()


# --------------------------------------------------------------------------------------------------------------------
# Boot


def ensure_network(runtime: Runtime, fleet: Fleet) -> ipaddress.IPv4Network:
    """The fleet's network; its subnet is fixed for its life, so that hosts keep their addresses over a reboot."""
    known = runtime.inspect("network", fleet.network)
    if known:
        return network_subnet(known[0])
    flags = [f"--label={LABEL}={fleet.name}"]
    if runtime.name == "podman":
        flags.append("--disable-dns")  # hosts know each other by address, like servers from an inventory
    failure = ""
    for subnet in free_subnets(fleet.name):
        done = runtime.run("network", "create", *flags, f"--subnet={subnet}", fleet.network, check=False)
        if done.returncode == 0:
            say("network", f"{fleet.network}: {subnet}")
            return subnet
        failure = done.stderr
        if not re.search(r"overlap|already (being )?used|conflict|in use", failure):
            break
    raise FleetError(f"could not make the network {fleet.network}:\n{last_lines(failure)}")


def network_subnet(entry: dict[str, Any]) -> ipaddress.IPv4Network:
    """Subnet of a network as podman or docker describes it."""
    subnets = entry.get("subnets") or [{"subnet": item["Subnet"]} for item in entry.get("IPAM", {}).get("Config", [])]
    return ipaddress.IPv4Network(subnets[0]["subnet"])


def free_subnets(name: str, routes: str | None = None) -> Iterator[ipaddress.IPv4Network]:
    """Subnets that no route of this machine leads to; which come first depends on the name, so that fleets differ."""
    text = Path("/proc/net/route").read_text(encoding="ascii") if routes is None else routes
    taken = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[7] != "00000000":  # the default route leads everywhere
            address, mask = (int.from_bytes(bytes.fromhex(fields[i]), "little") for i in (1, 7))
            taken.append(ipaddress.IPv4Network((address, mask.bit_count()), strict=False))
    first = int(digest(name), 16) % 256
    for step in range(256):
        subnet = ipaddress.IPv4Network(f"10.213.{(first + step) % 256}.0/24")
        if not any(subnet.overlaps(other) for other in taken):
            yield subnet


def assign_addresses(subnet: ipaddress.IPv4Network, hosts: Sequence[str], present: dict[str, str]) -> dict[str, str]:
    """An address for each host; those already up keep theirs."""
    base = int(subnet.network_address)
    used = set(present.values())
    free = (str(ipaddress.IPv4Address(base + last)) for last in range(FIRST_HOST_ADDRESS, subnet.num_addresses - 1))
    result = {}
    for host in hosts:
        result[host] = present.get(host) or next(address for address in free if address not in used)
    return result


def hardware_address(address: str) -> str:
    """A MAC address that stays with an IP address, as a server's does.

    With a new one after each reboot, the controller would go on sending to the old one for some ten seconds.
    """
    return "02:df:" + ":".join(f"{byte:02x}" for byte in ipaddress.IPv4Address(address).packed)


def start_host(runtime: Runtime, fleet: Fleet, host: HostSpec, image: str, address: str) -> None:
    """Starts the container of one host."""
    flags = run_flags(runtime.name, runtime.machine)
    if host.memory:
        flags += [f"--memory={host.memory}"]
    for path, size in host.tmpfs:
        flags.append(f"--tmpfs={path}:size={size},mode=0755")
    runtime.run(
        "run",
        "--detach",
        *flags,
        f"--name={fleet.container(host.name)}",
        f"--hostname={host.name}",
        f"--network={fleet.network}",
        f"--ip={address}",
        f"--mac-address={hardware_address(address)}",
        f"--label={LABEL}={fleet.name}",
        f"--label={LABEL_HOST}={host.name}",
        f"--label={LABEL_ROLE}=host",
        f"--label={LABEL_ADDRESS}={address}",
        f"--label={LABEL_SHAPE}={host.shape()}",
        "--env=DFLASH_FLEET_OFFLINE=1",
        # Some releases of podman put a memory file system here, and a reboot would lose the journal.
        "--volume=/var/log/journal",
        "--shm-size=2g",  # the default of 64 MB stops engines with several ranks; servers have half their memory
        "--pids-limit=16384",
        image,
        timeout=BOOT_SECONDS,
    )


SETUP_HOST = r"""
set -eu
say() { printf '%s\n' "$*"; }
tries=0
while :; do
    state=$(systemctl is-system-running 2>/dev/null) || true
    case "$state" in running | degraded) break ;; esac
    tries=$((tries + 1))
    [ "$tries" -lt "$BOOT_TRIES" ] || { say "still $state; jobs:" >&2; systemctl list-jobs >&2; exit 1; }
    sleep 0.2
done
systemctl --quiet is-active ssh.service || { systemctl status --no-pager ssh.service >&2; exit 1; }
# Written in place: these may be mounts.
printf '127.0.0.1\tlocalhost\n%s\t%s\n::1\tlocalhost ip6-localhost ip6-loopback\n' "$ADDRESS" "$HOST" > /etc/hosts
: > /etc/resolv.conf
home=/root
if [ "$LOGIN" != root ]; then
    id "$LOGIN" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$LOGIN"
    usermod --append --groups sudo "$LOGIN"
    printf '%s:%s\n' "$LOGIN" "$PASSWORD" | chpasswd
    home=/home/$LOGIN
fi
install -d -m 0700 -o "$LOGIN" -g "$(id -gn "$LOGIN")" "$home/.ssh"
printf '%s\n' "$PUBLIC_KEY" > "$home/.ssh/authorized_keys"
chown "$LOGIN:" "$home/.ssh/authorized_keys"
chmod 0600 "$home/.ssh/authorized_keys"
say "state $state"
cat /etc/ssh/ssh_host_*_key.pub
"""


def set_up_host(runtime: Runtime, fleet: Fleet, host: HostSpec, address: str) -> tuple[str, list[str]]:
    """Waits until systemd is up, lets the fleet's key in, and returns systemd's state and the host's public keys."""
    values = {
        "BOOT_TRIES": str(BOOT_SECONDS * 5),
        "ADDRESS": address,
        "HOST": host.name,
        "LOGIN": host.user,
        "PASSWORD": sudo_password(fleet, host) if host.user != "root" else "",
        "PUBLIC_KEY": fleet.key.with_suffix(".pub").read_text(encoding="ascii").strip(),
    }
    # On stdin, where no process list shows the password.
    script = "".join(f"{key}={shlex.quote(value)}\n" for key, value in values.items()) + SETUP_HOST
    container = fleet.container(host.name)
    try:
        done = runtime.run(
            "exec", "--interactive", container, "/bin/sh", "-s", stdin=script, check=False, timeout=BOOT_SECONDS + 10
        )
        failure = done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"no answer within {BOOT_SECONDS} s"
    if failure:
        console = runtime.run("logs", container, check=False)
        raise FleetError(
            f"host {host.name} did not come up ({container}):\n{last_lines(failure)}\n"
            f"  its console ends\n{last_lines(console.stdout + console.stderr)}"
        )
    state, *keys = done.stdout.strip().splitlines()
    return state.split()[1], [" ".join(key.split()[:2]) for key in keys]


def ensure_key(fleet: Fleet) -> None:
    """One key pair for the whole fleet, made once."""
    if fleet.key.exists() and fleet.key.with_suffix(".pub").exists():
        return
    fleet.key.unlink(missing_ok=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"dflash-fleet {fleet.name}", "-f", str(fleet.key)],
        check=True,
        capture_output=True,
    )


def wait_for_ssh(fleet: Fleet, host: HostSpec, address: str) -> None:
    """Logs in once, the way Ansible will, host key check included."""
    # Over a connection of its own: a shared one may lead to the host that was here before.
    command = ["ssh", *fleet.ssh_options(shared=False), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    deadline = time.monotonic() + SSH_SECONDS
    while True:
        done = subprocess.run(
            [*command, "-i", str(fleet.key), f"{host.user}@{address}", "true"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode == 0:
            return
        if time.monotonic() > deadline:
            raise FleetError(f"host {host.name}: no SSH login at {address}:\n{last_lines(done.stderr)}")
        time.sleep(0.3)


def hub_repositories(spec: FleetSpec) -> Path:
    """The folder that the hub serves; the project's own small models are made on the spot."""
    if spec.hub_repos:
        repos = Path(spec.hub_repos).expanduser().resolve()
        if not repos.is_dir():
            raise FleetError(f"hub: repos: {repos} is not a folder")
        return repos
    repos = cache_dir() / "repos"
    done = subprocess.run(
        [sys.executable, str(HERE / "models.py"), "--bad", "--out", str(repos)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise FleetError(f"rehearsal/models.py failed:\n{last_lines(done.stderr or done.stdout)}")
    return repos


def ensure_hub(
    runtime: Runtime,
    fleet: Fleet,
    spec: FleetSpec,
    image: str,
    subnet: ipaddress.IPv4Network,
    present: Container | None,
) -> str:
    """Starts the fleet's model hub, or a new one where its program or its folder changed; returns its address."""
    repos = hub_repositories(spec)
    address = str(subnet.network_address + HUB_ADDRESS)
    program = HERE / "hub.py"
    if not program.exists():
        raise FleetError(f"{program} is missing")
    shape = digest(program.read_bytes(), str(repos), str(HERE), spec.hub_token)
    gate: list[str] = []
    volumes = [f"--volume={HERE}:/rehearsal:ro", f"--volume={repos}:/repos:ro"]
    if spec.hub_token:
        tokens = fleet.folder / "hub-tokens"
        tokens.write_text(spec.hub_token + "\n")
        tokens.chmod(0o600)
        volumes.append(f"--volume={tokens}:/tokens:ro")
        gate = ["--gated", "--token-file", "/tokens"]
    name = fleet.container(HUB)
    if present and (present.shape != shape or not present.running):
        runtime.remove([name])
        present = None
    if not present:
        flags = ["--dns=none", "--no-hosts"] if runtime.name == "podman" else []
        needed = ("--ulimit", "--security-opt")
        flags += [flag for flag in run_flags(runtime.name, runtime.machine) if flag.startswith(needed)]
        runtime.run(
            "run",
            "--detach",
            *flags,
            "--stop-signal=SIGTERM",
            f"--name={name}",
            "--hostname=hub",
            f"--network={fleet.network}",
            f"--ip={address}",
            f"--mac-address={hardware_address(address)}",
            f"--label={LABEL}={fleet.name}",
            f"--label={LABEL_HOST}={HUB}",
            f"--label={LABEL_ROLE}=hub",
            f"--label={LABEL_ADDRESS}={address}",
            f"--label={LABEL_SHAPE}={shape}",
            "--env=PYTHONUNBUFFERED=1",
            "--env=PYTHONDONTWRITEBYTECODE=1",
            *volumes,
            image,
            "python3",
            "/rehearsal/hub.py",
            "--root",
            "/repos",
            "--bind",
            "0.0.0.0",
            "--port",
            str(HUB_PORT),
            *gate,
        )
    wait_for_hub(runtime, name, address)
    return f"http://{address}:{HUB_PORT}"


def wait_for_hub(runtime: Runtime, name: str, address: str) -> None:
    """Waits until the hub answers, whatever it answers."""
    deadline = time.monotonic() + HUB_SECONDS
    while True:
        connection = http.client.HTTPConnection(address, HUB_PORT, timeout=5)
        try:
            connection.request("GET", "/")
            connection.getresponse()
            return
        except (OSError, http.client.HTTPException) as error:
            state = [Container.from_inspect(entry) for entry in runtime.inspect("container", name)]
            if not state or not state[0].running or time.monotonic() > deadline:
                output = runtime.run("logs", name, check=False)
                raise FleetError(
                    f"the hub does not answer at {address}:{HUB_PORT} ({error}); its output ends\n"
                    + last_lines(output.stdout + output.stderr)
                ) from error
        finally:
            connection.close()
        time.sleep(0.1)


# --------------------------------------------------------------------------------------------------------------------
# Commands


def images_for(runtime: Runtime, spec: FleetSpec) -> dict[str, str]:
    """The image of each host, built where it is missing; a layer that nobody baked yet falls back to its base."""
    bases = {debian: ensure_image(runtime, debian) for debian in sorted({host.debian for host in spec.hosts})}
    chosen: dict[str, str] = {}
    for host in spec.hosts:
        base = bases[host.debian]
        layer = "" if host.image in DEBIANS else find_layer(runtime, host.image, base)
        chosen[host.name] = layer or base
        if host.image not in DEBIANS and not layer:
            say("image", f"{host.name}: no layer {host.image!r} baked yet, boots plain {host.debian}")
    return chosen


def command_up(options: argparse.Namespace) -> int:
    """Boots what is missing of a fleet and writes its inventory."""
    fleet = Fleet(check_fleet_name(options.name))
    spec = load_spec(options.spec)
    inventory = inventory_file(options.inventory)
    if inventory.exists() and inventory_mark(fleet) not in inventory.read_text(encoding="utf-8"):
        raise FleetError(f"{inventory} was not written for the fleet {fleet.name}: move it or give another folder")
    runtime = find_runtime()
    began = time.monotonic()
    with locked(f"fleet-{fleet.name}", f"another process works on the fleet {fleet.name}"):
        fleet.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for host in spec.hosts:
            if host.user != "root":
                sudo_password(fleet, host)  # a missing one is an error before anything boots
        images = images_for(runtime, spec)
        ensure_key(fleet)
        fleet.prepare_sockets()
        subnet = ensure_network(runtime, fleet)
        present = {container.host: container for container in runtime.containers(fleet.name)}

        wanted = {host.name: host for host in spec.hosts}
        gone = [
            container
            for container in present.values()
            if (container.role == "host" and (container.host not in wanted or options.fresh))
            or (container.role == "host" and container.shape != wanted[container.host].shape())
            or (container.role == HUB and not spec.hub)
        ]
        for container in gone:
            say("host", f"{container.host}: removed{'' if container.host not in wanted else ', boots anew'}")
            present.pop(container.host)
        runtime.remove([container.name for container in gone])
        addresses = assign_addresses(
            subnet, list(wanted), {name: present[name].address for name in wanted if name in present}
        )
        if gone or any(name not in present or not present[name].running for name in wanted):
            fleet.close_connections()

        def bring_up(host: HostSpec) -> list[str]:
            started = time.monotonic()
            known = present.get(host.name)
            if not known:
                try:
                    start_host(runtime, fleet, host, images[host.name], addresses[host.name])
                except (FleetError, subprocess.TimeoutExpired):
                    runtime.remove([fleet.container(host.name)])
                    raise
            elif not known.running:
                runtime.run("start", known.name)
            state, keys = set_up_host(runtime, fleet, host, addresses[host.name])
            how = "up already" if known and known.running else f"{time.monotonic() - started:.1f} s"
            image = (known.image if known else images[host.name]).removeprefix("localhost/")
            say("host", f"{host.name}: {state}, {addresses[host.name]}, {image} ({how})")
            if known and known.image != images[host.name]:
                say("host", f"{host.name}: there is a newer image, `up --fresh` boots it")
            return [f"{addresses[host.name]} {key}" for key in keys]

        keys = in_parallel(bring_up, spec.hosts)
        write_private(fleet.known_hosts, "".join(f"{line}\n" for lines in keys for line in lines))
        in_parallel(lambda host: wait_for_ssh(fleet, host, addresses[host.name]), spec.hosts)
        endpoint = ""
        if spec.hub:
            endpoint = ensure_hub(runtime, fleet, spec, image_reference(spec.hosts[0].debian), subnet, present.get(HUB))
            say("hub", endpoint)
        record = fleet.read_record()
        inventories = sorted({*record.get("inventories", []), str(inventory)})
        write_private(fleet.record, json.dumps({"schema": 1, "name": fleet.name, "inventories": inventories}) + "\n")
        write_private(inventory, render_inventory(fleet, spec, addresses, endpoint), mode=0o644)
    say("inventory", f"{inventory}: {len(spec.hosts)} hosts, {time.monotonic() - began:.1f} s in all")
    return 0


def command_down(options: argparse.Namespace) -> int:
    """Removes a fleet: containers, volumes, network, key, sockets, and the inventories that `up` wrote."""
    fleet = Fleet(check_fleet_name(options.name))
    with locked(f"fleet-{fleet.name}", f"another process works on the fleet {fleet.name}"):
        removed = []
        try:
            runtime: Runtime | None = find_runtime()
        except FleetError:
            if fleet.folder.exists():  # there is something to remove, and no way to do it
                raise
            runtime = None
        fleet.close_connections()
        if runtime:
            containers = runtime.containers(fleet.name)
            runtime.remove([container.name for container in containers])
            removed += [container.host for container in containers]
            for entry in runtime.inspect("network", fleet.network):
                if (entry.get("labels") or entry.get("Labels") or {}).get(LABEL) == fleet.name:
                    runtime.run("network", "rm", fleet.network)
        for name in fleet.read_record().get("inventories", []):
            path = Path(name)
            if path.is_file() and inventory_mark(fleet) in path.read_text(encoding="utf-8"):
                path.unlink()
        shutil.rmtree(fleet.sockets, ignore_errors=True)
        with contextlib.suppress(OSError):  # another fleet's are still there
            fleet.sockets.parent.rmdir()
        shutil.rmtree(fleet.folder, ignore_errors=True)
    say("down", f"{fleet.name}: removed {', '.join(sorted(removed)) or 'nothing, it was not up'}")
    return 0


def command_status(options: argparse.Namespace) -> int:
    """Shows each host of a fleet; status 0 when all are up, 3 when something is down or nothing is there."""
    fleet = Fleet(check_fleet_name(options.name))
    runtime = find_runtime()

    def look(container: Container) -> dict[str, Any]:
        state = container.state
        if container.running and container.role == "host":
            answer = runtime.run("exec", container.name, "systemctl", "is-system-running", check=False)
            state = answer.stdout.strip() or "unknown"
        return {
            "host": container.host,
            "state": state,
            "up": container.running and state in ("running", "degraded"),
            "address": container.address,
            "container": container.name,
            "image": container.image,
        }

    rows = sorted(in_parallel(look, runtime.containers(fleet.name)), key=lambda row: str(row["host"]))
    if options.json:
        print(json.dumps({"fleet": fleet.name, "hosts": rows}, indent=2))
    elif not rows:
        print(f"fleet {fleet.name}: nothing is up")
    for row in rows if not options.json else []:
        print(f"{row['host']:<20} {row['state']:<10} {row['address']:<15} {row['container']:<28} {row['image']}")
    return 0 if rows and all(row["up"] for row in rows) else 3


def command_image(options: argparse.Namespace) -> int:
    """Builds or finds host images; prints their references."""
    runtime = find_runtime()
    if options.remove or options.prune:
        bases = set() if options.remove else {image_reference(debian) for debian in DEBIANS}
        layers = set()
        if options.prune:
            for reference in runtime.images(LABEL_LAYER):
                labels = runtime.inspect("image", reference)[0]["Config"].get("Labels") or {}
                if labels.get(LABEL_BASE) in bases:
                    layers.add(reference)
        remove_images(runtime, bases | layers)
        return 0
    for debian in options.debian or DEBIANS[:1]:
        print(ensure_image(runtime, debian, options.from_registry))
    return 0


def find_host(runtime: Runtime, fleet: Fleet, host: str) -> Container:
    """A host of a fleet that is up; says which there are where it is not one of them."""
    containers = {container.host: container for container in runtime.containers(fleet.name)}
    if host not in containers:
        there = f"its hosts: {', '.join(sorted(containers))}" if containers else "the fleet is not up"
        raise FleetError(f"fleet {fleet.name} has no host {host} ({there})")
    return containers[host]


def command_bake(options: argparse.Namespace) -> int:
    """Makes an image of a host's base image and one folder of the running host."""
    fleet = Fleet(check_fleet_name(options.name))
    runtime = find_runtime()
    source = find_host(runtime, fleet, options.host)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.]{0,39}", options.tag) or options.tag in DEBIANS:
        raise FleetError(f"tag {options.tag!r}: lower-case letters, digits, _ and ., and no name of a Debian release")
    path = Path(os.path.normpath(options.path))
    if not path.is_absolute() or len(path.parts) < 2:
        raise FleetError(f"path {options.path!r}: give an absolute path below /")
    listing = runtime.run("exec", source.name, "ls", "-1A", str(path), check=False)
    names = sorted(listing.stdout.split("\n"))
    names = [name for name in names if name]
    if listing.returncode != 0 or not names:
        raise FleetError(f"host {options.host}: {path} is missing or empty, there is nothing to bake")
    entry = runtime.inspect("image", source.image)
    labels = (entry[0]["Config"].get("Labels") or {}) if entry else {}
    base = labels.get(LABEL_BASE) or source.image
    reference = f"{IMAGE_NAME}:{options.tag}-{digest(base, str(path), *names)}"
    with locked("bake", "another process is baking an image"):
        if runtime.image_exists(reference):
            say("bake", f"{reference}: there already")
        else:
            began = time.monotonic()
            say("bake", f"{reference}: {path} of {options.host} over {base}")
            bake_layer(runtime, source.name, path, base, reference, options.tag)
            size = runtime.inspect("image", reference)[0].get("Size", 0) / 1e6
            say("bake", f"{reference}: {size:.0f} MB in {time.monotonic() - began:.0f} s")
        # Hosts boot the newest; older ones over the same base only cost disk. Those in use stay.
        for older in runtime.images(f"{LABEL_LAYER}={options.tag}"):
            known = runtime.inspect("image", older)[0]["Config"].get("Labels") or {}
            if older != reference and known.get(LABEL_BASE) == base:
                runtime.run("rmi", older, check=False)
    print(reference)
    return 0


def bake_layer(runtime: Runtime, container: str, path: Path, base: str, reference: str, tag: str) -> None:
    """Copies a folder, with owners and modes, into a container of the base image that never runs, and commits that."""
    scratch = runtime.run("create", "--network=none", base).stdout.strip()
    try:
        # The folder's parents come along without what else is in them, for their owners and modes.
        inner = str(path.relative_to("/"))
        parents = [str(parent) for parent in reversed(Path(inner).parents) if str(parent) != "."]
        # The two mean the opposite by one flag; with podman's default, everything would belong to root.
        keep_owners = "--archive=false" if runtime.name == "podman" else "--archive"
        tar = [
            "tar",
            "-C",
            "/",
            "--numeric-owner",
            "--xattrs",
            "-cf",
            "-",
            "--no-recursion",
            *parents,
            "--recursion",
            inner,
        ]
        with subprocess.Popen([*runtime.command, "exec", container, *tar], stdout=subprocess.PIPE) as reader:
            copied = subprocess.run(
                [*runtime.command, "cp", keep_owners, "-", f"{scratch}:/"],
                stdin=reader.stdout,
                capture_output=True,
                text=True,
                check=False,
            )
        if copied.returncode != 0 or reader.returncode != 0:
            raise FleetError(f"copying {path} out of {container} failed:\n{last_lines(copied.stderr)}")
        changes = [f"LABEL {LABEL_LAYER}={tag}", f"LABEL {LABEL_BASE}={base}", f"LABEL {LABEL_BAKED}={path}"]
        runtime.run("commit", *(word for change in changes for word in ("--change", change)), scratch, reference)
    finally:
        runtime.run("rm", "--force", "--volumes", scratch, check=False)


def command_exec(options: argparse.Namespace) -> int:
    """Runs a command in a host, as root and without SSH."""
    fleet = Fleet(check_fleet_name(options.name))
    runtime = find_runtime()
    container = find_host(runtime, fleet, options.host)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise FleetError("give a command after --")
    terminal = ["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    sys.stdout.flush()
    return subprocess.run(
        [*runtime.command, "exec", "--interactive", *terminal, container.name, *command], check=False
    ).returncode


def command_off(options: argparse.Namespace) -> int:
    """Cuts a host's power; `reboot` brings it back."""
    fleet = Fleet(check_fleet_name(options.name))
    runtime = find_runtime()
    container = find_host(runtime, fleet, options.host)
    with locked(f"fleet-{fleet.name}", f"another process works on the fleet {fleet.name}"):
        cut_power(runtime, container)
    say("off", options.host)
    return 0


def cut_power(runtime: Runtime, container: Container) -> None:
    """Ends it at once, and waits until it is gone."""
    runtime.run("kill", container.name)
    runtime.run("wait", container.name, check=False)


def command_reboot(options: argparse.Namespace) -> int:
    """Reboots a host and waits until it is up again; --hard cuts its power first. Boots one that is off."""
    fleet = Fleet(check_fleet_name(options.name))
    runtime = find_runtime()
    container = find_host(runtime, fleet, options.host)
    began = time.monotonic()
    with locked(f"fleet-{fleet.name}", f"another process works on the fleet {fleet.name}"):
        if container.running:
            if options.hard:
                cut_power(runtime, container)
            else:
                runtime.run("stop", f"--time={options.timeout}", container.name)
        runtime.run("start", container.name)
    deadline = began + BOOT_SECONDS
    while True:
        answer = runtime.run("exec", container.name, "systemctl", "is-system-running", check=False)
        if answer.stdout.strip() in ("running", "degraded"):
            break
        if time.monotonic() > deadline:
            raise FleetError(f"host {options.host}: {answer.stdout.strip()} {BOOT_SECONDS} s after its reboot")
        time.sleep(0.2)
    say("reboot", f"{options.host}: {answer.stdout.strip()} after {time.monotonic() - began:.1f} s")
    return 0


PROBE = "/usr/.dflash-fleet-probe"
READ_ONLY = os.strerror(errno.EROFS)


def check_sandbox(run: Callable[..., subprocess.CompletedProcess[str]], secret: str) -> list[dict[str, Any]]:
    """Proves, by trying, that a host enforces what a hardened unit asks for.

    `run(*command, stdin=None)` runs a command in the host as root. Systemd leaves out what it may not do and says
    nothing, so reading a unit's settings (or its exposure score) shows only what was asked for.
    """
    source = "/run/dflash-fleet-probe"
    unit = f"dflash-fleet-probe-{digest(secret)}"

    def in_unit(properties: Sequence[str], script: str) -> subprocess.CompletedProcess[str]:
        flags = [f"--property={value}" for value in properties]
        return run("systemd-run", "--quiet", "--wait", "--pipe", "--collect", *flags, "/bin/sh", "-c", script)

    def hidden(done: subprocess.CompletedProcess[str]) -> bool:
        return done.returncode != 0 and secret not in done.stdout

    write = f"touch {PROBE} && rm {PROBE}"
    hardened = ["ProtectSystem=strict", "ProtectHome=yes", "PrivateTmp=yes", "NoNewPrivileges=yes"]
    results: list[dict[str, Any]] = []

    def record(name: str, ok: bool, done: subprocess.CompletedProcess[str]) -> None:
        detail = (done.stderr.strip() or done.stdout.strip()).splitlines()
        results.append({"check": name, "ok": ok, "detail": "" if ok else (detail[-1] if detail else "no output")})

    # As root, so that it is the sandbox that refuses and not the file's mode.
    done = in_unit([], write)
    record("a plain unit can write to /usr (else the next line proves nothing)", done.returncode == 0, done)
    done = in_unit(hardened, write)
    refused = done.returncode != 0 and READ_ONLY in done.stderr
    record("ProtectSystem=strict: /usr is read-only to root", refused, done)
    run("/bin/sh", "-c", f"umask 077; cat > {source}", stdin=secret)
    try:
        user = [*hardened, "User=daemon", f"LoadCredential=probe:{source}"]
        done = in_unit(user, 'id -un; cat "$CREDENTIALS_DIRECTORY/probe"')
        record("LoadCredential: readable by the unit's user", done.stdout.split() == ["daemon", secret], done)
        done = in_unit(user, f"cat {source}")
        record("User: the credential's source is not readable by it", hidden(done), done)
        flags = [f"--property={value}" for value in user]
        run("systemd-run", "--quiet", "--collect", f"--unit={unit}", *flags, "sleep", "60")
        held = f"/run/credentials/{unit}.service/probe"
        done = run("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "cat", held)
        record("LoadCredential: not readable by another user", hidden(done), done)
        run("systemctl", "stop", f"{unit}.service")
    finally:
        run("rm", "-f", source)
    done = in_unit(["PrivateNetwork=yes"], "ip -brief link | grep -v '^lo ' && exit 1; exit 0")
    record("PrivateNetwork: only the loopback is left", done.returncode == 0, done)
    done = in_unit(["SystemCallFilter=~@mount", "SystemCallErrorNumber=EPERM"], "mount -t tmpfs none /mnt")
    record("SystemCallFilter: a filtered call is refused", done.returncode != 0, done)
    return results


def command_check_sandbox(options: argparse.Namespace) -> int:
    """Proves that sandboxing of services is enforced in a host."""
    fleet = Fleet(check_fleet_name(options.name))
    runtime = find_runtime()
    container = find_host(runtime, fleet, options.host)

    def run(*command: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return runtime.run(
            "exec", "--interactive", container.name, *command, stdin=stdin or "", check=False, timeout=60
        )

    results = check_sandbox(run, secrets.token_hex(8))
    if options.json:
        enforced = all(row["ok"] for row in results)
        print(json.dumps({"host": options.host, "enforced": enforced, "checks": results}, indent=2))
    else:
        for row in results:
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['check']}{': ' + row['detail'] if row['detail'] else ''}")
    return 0 if all(row["ok"] for row in results) else 1


def apt_install(names: Sequence[str]) -> None:
    """Installs Debian packages on this machine."""
    require_root("installing packages")
    if not shutil.which("apt-get"):
        raise FleetError(f"this machine has no apt: install {' '.join(names)} by its own means")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    common = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-q", "-y"]
    install = [*common, "install", "--no-install-recommends", *names]
    if any(Path("/var/lib/apt/lists").glob("*_Packages*")):
        done = subprocess.run(install, capture_output=True, text=True, check=False, env=environment)
        if done.returncode == 0:
            return
    subprocess.run([*common, "update"], capture_output=True, check=False, env=environment)
    done = subprocess.run(install, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise FleetError(f"apt-get install {' '.join(names)} failed:\n{last_lines(done.stdout + done.stderr)}")


def missing_packages(runtime: str) -> list[str]:
    """The Debian packages that a fleet needs and this machine lacks."""

    def there(program: str) -> bool:
        if shutil.which(program):
            return True
        return any((Path(folder) / program).exists() for folder in (*LIBEXEC, "/usr/sbin", "/sbin"))

    programs = PREREQUISITES
    if runtime == "docker":
        skipped = {"podman", "runc", "netavark", "aardvark-dns", "iptables"}
        programs = {program: package for program, package in PREREQUISITES.items() if program not in skipped}
    missing = [package for program, package in programs.items() if not there(program)]
    if not Path(DEBIAN_KEYRING).exists():
        missing.append("debian-archive-keyring")
    return list(dict.fromkeys(missing))


def command_prerequisites(options: argparse.Namespace) -> int:
    """Checks what a fleet needs of this machine, and installs what is missing if asked to."""
    wanted = os.environ.get("DFLASH_FLEET_RUNTIME", "podman")
    runtime = "docker" if "docker" in Path(wanted).name else "podman"
    missing = missing_packages(runtime)
    if missing and options.install:
        say("install", " ".join(missing))
        apt_install(missing)
        missing = missing_packages(runtime)
    if runtime == "docker" and not shutil.which(wanted):
        raise FleetError(f"{wanted} is not installed")
    if missing:
        hint = "add --install" if shutil.which("apt-get") else "install them with this system's package manager"
        raise FleetError(f"missing (by their Debian names): {' '.join(missing)}; {hint}")
    chosen = find_runtime()
    version = chosen.run("version", "--format", "{{.Client.Version}}", check=False).stdout.strip()
    flags = " ".join(run_flags(chosen.name, chosen.machine))
    say("ready", f"{' '.join(chosen.command)} {version}, flags here: {flags}")
    return 0


# --------------------------------------------------------------------------------------------------------------------
# Command line


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="fleet.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "environment:\n"
            "  DFLASH_FLEET_CACHE       keys, downloaded packages and the like (default ~/.cache/dflash-fleet)\n"
            "  DFLASH_FLEET_RUNTIME     podman (default) or docker\n"
            "  DFLASH_FLEET_BASE_IMAGE  build host images from this image instead of by debootstrap; {debian} in it\n"
            "                           stands for bookworm or trixie, such as registry.example/debian:{debian}-slim\n"
            "  DFLASH_FLEET_MIRROR      Debian mirror for debootstrap instead of the one apt uses\n"
            "  DFLASH_FLEET_KEYRING     keyring to check that mirror with\n"
        ),
    )
    commands = top.add_subparsers(dest="command_name", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, fleet: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=run.__doc__)
        command.set_defaults(run=run)
        if fleet:
            command.add_argument("name", metavar="NAME", help="the fleet, such as demo")
        return command

    command = add("prerequisites", command_prerequisites, "check this machine, install what is missing", fleet=False)
    command.add_argument("--install", action="store_true", help="install missing packages by apt (as root)")

    command = add("image", command_image, "build or find the host images", fleet=False)
    command.add_argument(
        "--debian", action="append", choices=DEBIANS, help="release; may be given twice (default: bookworm)"
    )
    command.add_argument(
        "--from-registry", action="store_true", help="build by the Containerfile from a pulled Debian image"
    )
    command.add_argument("--prune", action="store_true", help="remove images of older recipes instead")
    command.add_argument("--remove", action="store_true", help="remove all host images instead")

    command = add("up", command_up, "boot a fleet (what is up already stays) and write its inventory")
    command.add_argument("--spec", type=Path, required=True, metavar="FILE", help="the fleet's hosts, YAML or JSON")
    command.add_argument(
        "--inventory", type=Path, required=True, metavar="DIR", help="folder for hosts.yml, or a .yml file to write"
    )
    command.add_argument("--fresh", action="store_true", help="boot all hosts anew, from the newest images")

    add("down", command_down, "remove a fleet and all that `up` made for it")

    command = add("status", command_status, "show a fleet; status 3 unless all of it is up")
    command.add_argument("--json", action="store_true", help="as JSON")

    command = add("bake", command_bake, "make an image layer of a folder of a running host")
    command.add_argument("host", metavar="HOST")
    command.add_argument("--path", required=True, help="absolute path of the folder, such as /var/lib/sglang/venvs")
    command.add_argument("--tag", required=True, help="name by which a spec asks for it, such as cpu")

    command = add("exec", command_exec, "run a command in a host")
    command.add_argument("host", metavar="HOST")
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")

    command = add("off", command_off, "cut a host's power")
    command.add_argument("host", metavar="HOST")

    command = add("reboot", command_reboot, "reboot a host and wait until it is up; also one that is off")
    command.add_argument("host", metavar="HOST")
    command.add_argument("--hard", action="store_true", help="as if the power was cut, instead of a clean shutdown")
    command.add_argument("--timeout", type=int, default=60, help="seconds for the clean shutdown (default 60)")

    command = add("check-sandbox", command_check_sandbox, "prove that sandboxing of services is enforced in a host")
    command.add_argument("host", metavar="HOST")
    command.add_argument("--json", action="store_true", help="as JSON")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; an error that a person can act on is one message and status 1."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except FleetError as error:
        print(f"fleet.py: {error}", file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired as error:
        command = shlex.join(map(str, error.cmd[:4]))
        print(f"fleet.py: {command} ... did not end in {error.timeout:.0f} s", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
