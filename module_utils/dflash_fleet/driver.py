"""The GPU driver as packages: what is installed, held and running, and what has to change.

Pure, but for the last part, which fetches the repository's key, installs, and loads the module.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import os
import re
import ssl
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import hostfacts, preflight
from . import packages as system
from .packages import Package


class DriverError(Exception):
    """What went wrong, in words for the person who runs the play."""


@dataclass(frozen=True)
class Wanted:
    """What the driver should be."""

    branch: str  # 580
    version: str  # 580.105.08, or empty for any of the branch
    packages: tuple[str, ...]
    #: Patterns of package names that belong to a driver; those of them with a driver's version are held.
    belonging: tuple[str, ...]

    def fits(self, package_version: str) -> bool:
        """Whether a package's version is of the branch, and the exact release where one is asked for."""
        release = upstream(package_version)
        return release == self.version if self.version else release.split(".")[0] == self.branch

    def text(self) -> str:
        """`580.105.08`, or `branch 580`."""
        return self.version or f"branch {self.branch}"


@dataclass
class Plan:
    """What has to change in the packages."""

    missing: list[str] = field(default_factory=list)  # not installed
    other: list[str] = field(default_factory=list)  # installed, of another release
    unheld: list[str] = field(default_factory=list)

    @property
    def install(self) -> bool:
        return bool(self.missing or self.other)


def upstream(version: str) -> str:
    """`580.105.08` of `1:580.105.08-0ubuntu1`."""
    match = re.match(r"(?:\d+:)?([0-9.]+)", version)
    return match[1].rstrip(".") if match else version


def is_release(version: str) -> bool:
    """Whether a package's version is a driver's release: three digits, a dot, more digits."""
    return bool(re.fullmatch(r"\d{3}\.\d+(\.\d+)*", upstream(version)))


def of_driver(packages: Iterable[Package], wanted: Wanted) -> list[Package]:
    """The installed packages that are part of a driver, sorted by name."""
    return sorted(
        (
            one
            for one in packages
            if one.installed
            and is_release(one.version)
            and any(fnmatch.fnmatchcase(one.name, pattern) for pattern in wanted.belonging)
        ),
        key=lambda one: one.name,
    )


def plan(packages: Mapping[str, Package], wanted: Wanted) -> Plan:
    """What is missing, of another release, or not held."""
    result = Plan()
    result.missing = [name for name in wanted.packages if name not in packages or not packages[name].installed]
    driver = of_driver(packages.values(), wanted)
    result.other = [one.name for one in driver if not wanted.fits(one.version)]
    result.unheld = [one.name for one in driver if not one.held]
    return result


def releases(packages: Iterable[Package], wanted: Wanted) -> list[str]:
    """Releases of the installed driver's packages; more than one is a half-done upgrade."""
    return sorted({upstream(one.version) for one in of_driver(packages, wanted)}, key=preflight.version)


def reboot_reason(module: Mapping[str, Any]) -> str:
    """Why the running module is not the installed one; empty where it is."""
    loaded, installed = module.get("loaded"), module.get("installed")
    if not installed:
        return ""  # there is nothing that a reboot would load
    if not loaded:
        return "nouveau is loaded" if module.get("nouveau") else f"no driver is loaded, {installed} is installed"
    return f"{loaded} is loaded, {installed} is installed" if loaded != installed else ""


def not_running(module: Mapping[str, Any], wanted: Wanted) -> str:
    """Why the wanted driver does not run, as a sentence; empty where it does."""
    loaded, installed = module.get("loaded"), module.get("installed")
    if not installed:
        return (
            "no driver module is installed for the running kernel: `dkms status` on the host says why (kernel headers "
            "missing, a compiler error)"
        )
    if not loaded:
        return (
            f"driver {installed} is installed and not loaded: `modprobe nvidia` and `journalctl -k -g 'nvidia|NVRM'` "
            "on the host say why (Secure Boot without an enrolled key, nouveau, no GPU)"
        )
    if loaded != installed:
        return f"driver {loaded} is running and {installed} is installed: the host has to be rebooted"
    if not wanted.fits(loaded):
        return f"driver {loaded} is running, wanted is {wanted.text()}"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# The repository's key


def dearmor(data: bytes) -> bytes:
    """A public key's binary form, which every release of apt reads."""
    if not data.lstrip().startswith(b"-----BEGIN"):
        return data
    body, inside = [], False
    for line in data.decode("ascii", "replace").splitlines():
        line = line.strip()
        if line.startswith("-----"):
            inside = line.startswith("-----BEGIN")
        elif inside and line and ":" not in line and not line.startswith("="):
            body.append(line)
    try:
        return base64.b64decode("".join(body), validate=True)
    except ValueError:
        raise DriverError("the repository's key is not a PGP public key")


def fingerprints(data: bytes) -> list[str]:
    """Fingerprints of the primary keys of a keyring (RFC 4880 sections 4.2 and 12.2, version 4 keys)."""
    found, place = [], 0
    while place < len(data):
        tag = data[place]
        if not tag & 0x80 or place + 1 >= len(data):
            break
        if tag & 0x40:
            kind, first = tag & 0x3F, data[place + 1]
            if first < 192:
                length, header = first, 2
            elif first < 224:
                length, header = ((first - 192) << 8) + data[place + 2] + 192, 3
            else:
                length, header = int.from_bytes(data[place + 2 : place + 6], "big"), 6
        else:
            size = 1 << (tag & 3)
            kind, header = (tag >> 2) & 0xF, 1 + size
            length = int.from_bytes(data[place + 1 : place + 1 + size], "big")
        body = data[place + header : place + header + length]
        if kind == 6 and body[:1] == b"\x04":
            prefix = b"\x99" + len(body).to_bytes(2, "big")
            found.append(hashlib.sha1(prefix + body).hexdigest().upper())
        place += header + length
    return found


def check_key(data: bytes, expected: Sequence[str]) -> bytes:
    """The key in binary form, if each of its primary keys is one that is expected."""
    key = dearmor(data)
    found = fingerprints(key)
    wanted = {value.replace(" ", "").upper() for value in expected}
    if not found or not set(found) <= wanted:
        raise DriverError(
            f"the repository's key has the fingerprint {', '.join(found) or 'of no PGP key'}, and not "
            f"{' or '.join(sorted(wanted))} (gpu_host_driver_fingerprints)"
        )
    return key


def fetch(url: str, environment: Mapping[str, str]) -> bytes:
    """A small file by HTTP, through the proxy and with the certificates that the environment names."""
    proxies = {
        scheme: environment[f"{scheme}_proxy"] for scheme in ("http", "https") if environment.get(f"{scheme}_proxy")
    }
    skipped = [part.strip() for part in environment.get("no_proxy", "").split(",") if part.strip()]
    host = urllib.parse.urlsplit(url).hostname or ""
    if any(host == part.lstrip(".") or host.endswith("." + part.lstrip(".")) for part in skipped):
        proxies = {}
    context = ssl.create_default_context(cafile=environment.get("SSL_CERT_FILE") or None)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(url, timeout=60) as answer:
            return bytes(answer.read(1 << 20))
    except OSError as problem:
        raise DriverError(f"{url} cannot be fetched: {problem}")


# ---------------------------------------------------------------------------------------------------------------------
# The host


def change(apt: system.Apt, todo: Plan, wanted: Wanted) -> None:
    """Install what is missing and of another release, in one transaction, after looking at what apt would choose."""
    names = [*todo.missing, *todo.other]
    apt.update()
    chosen = system.parse_simulation(apt.install(names, simulate=True))
    wrong = {
        name: version
        for name, version in chosen.items()
        if is_release(version)
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted.belonging)
        and not wanted.fits(version)
    }
    if wrong:
        offers = ", ".join(f"{name} (it offers {wrong[name]})" for name in sorted(wrong))
        raise DriverError(
            f"apt has no {wanted.text()} of {offers}: "
            "set gpu_host_driver_branch or gpu_host_driver_version to what the repository has"
        )
    apt.install(names)


def load_module() -> None:
    """Load the driver where nothing stands in its way; whether it worked is read from /proc afterwards."""
    for program in ("/usr/sbin/modprobe", "/sbin/modprobe"):
        if os.access(program, os.X_OK):
            hostfacts.run([program, "nvidia"], 120)
            return
