"""What a host is: read from /proc, /sys, systemd and nvidia-smi, never changed.

Parsers are pure functions of text; readers take the directory they read (`proc`, `sys`), so that tests give them one.
A missing tool or file is a fact (None, an empty list, `available: false`), not an error. Sizes are bytes, times
seconds, unless a name says otherwise.
"""

from __future__ import annotations

import glob
import http.client
import ipaddress
import os
import platform
import re
import resource
import shutil
import struct
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import redact
from . import state as statefiles

# nvidia-smi waits for every GPU to wake where no persistence daemon runs: about 1 s each, and 8 of them.
NVIDIA_SMI_TIMEOUT = 60
SYSTEMCTL_TIMEOUT = 20


# ---------------------------------------------------------------------------------------------------------------------
# Small readers


def read_text(path: str | os.PathLike[str]) -> str | None:
    """A small file's text, or None where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def run(command: Sequence[str], timeout: float) -> tuple[int | None, str, str]:
    """(exit status, stdout, stderr) of a program in the C locale; status None where it is missing or too slow."""
    environment = {**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
    try:
        done = subprocess.run(
            list(command), capture_output=True, timeout=timeout, check=False, env=environment, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return None, "", f"{command[0]}: not found"
    except subprocess.TimeoutExpired:
        return None, "", f"{command[0]}: no answer within {timeout:.0f} s"
    except OSError as problem:
        return None, "", f"{command[0]}: {problem}"
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


# ---------------------------------------------------------------------------------------------------------------------
# Operating system


def parse_os_release(text: str) -> dict[str, str]:
    """/etc/os-release as a mapping with lower-case keys (source: os-release(5))."""
    found = {}
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and name and not name.startswith("#"):
            value = value.strip()
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
                value = re.sub(r"\\(.)", r"\1", value[1:-1])
            found[name.strip().lower()] = value
    return found


def os_release(etc: str = "/etc") -> dict[str, str]:
    """The parts that decide: id, version_id, pretty_name, id_like, version_codename."""
    text = read_text(f"{etc}/os-release") or read_text("/usr/lib/os-release") or ""
    found = parse_os_release(text)
    return {key: found.get(key, "") for key in ("id", "version_id", "version_codename", "id_like", "pretty_name")}


def glibc_version() -> str | None:
    """The C library's version, as the library itself says it (None where it is not glibc)."""
    try:
        answer = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    name, _, version = answer.partition(" ")
    return version if name == "glibc" else None


def parse_meminfo(text: str) -> dict[str, int]:
    """total, available and page cache of /proc/meminfo (kB there), and swap."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            values[name] = int(number[0]) * (1024 if number[1:] == ["kB"] else 1)
    return {
        "total_bytes": values.get("MemTotal", 0),
        "available_bytes": values.get("MemAvailable", 0),
        "cached_bytes": values.get("Cached", 0),
        "swap_total_bytes": values.get("SwapTotal", 0),
    }


def memory(proc: str = "/proc") -> dict[str, int]:
    """Memory of the host."""
    return parse_meminfo(read_text(f"{proc}/meminfo") or "")


def boot_id(proc: str = "/proc") -> str | None:
    """Changes with every boot (32 hex digits with dashes, as the kernel prints it)."""
    return (read_text(f"{proc}/sys/kernel/random/boot_id") or "").strip() or None


def uptime(proc: str = "/proc") -> float | None:
    """Seconds since boot."""
    words = (read_text(f"{proc}/uptime") or "").split()
    return float(words[0]) if words else None


PYTHON_DIRECTORIES = ("/usr/bin", "/usr/local/bin")


def python_versions(directories: Iterable[str] = PYTHON_DIRECTORIES) -> list[dict[str, str]]:
    """Interpreters by file name (python3.11), newest first: nothing is executed, so this is quick."""
    found: dict[str, str] = {}
    for directory in directories:
        for path in glob.glob(f"{directory}/python3.*"):
            match = re.fullmatch(r"python(3\.\d+)", os.path.basename(path))
            if match and os.access(path, os.X_OK):
                found.setdefault(match.group(1), path)
    ordered = sorted(found, key=lambda version: int(version.split(".")[1]), reverse=True)
    return [{"version": version, "path": found[version]} for version in ordered]


def filesystem(path: str) -> dict[str, Any]:
    """Free space for unprivileged use and inodes of the file system that holds `path`, or would hold it."""
    place = os.path.abspath(path)
    while not os.path.exists(place) and place != "/":
        place = os.path.dirname(place)
    try:
        found = os.statvfs(place)
        device = os.stat(place).st_dev
    except OSError as problem:
        return {"free_bytes": None, "free_inodes": None, "total_bytes": None, "device": None, "error": str(problem)}
    return {
        "free_bytes": found.f_bavail * found.f_frsize,
        # btrfs and others count no inodes and say 0 of 0: that is no shortage.
        "free_inodes": found.f_favail if found.f_files else None,
        "total_bytes": found.f_blocks * found.f_frsize,
        "device": f"{os.major(device)}:{os.minor(device)}",
    }


def limits() -> dict[str, int | None]:
    """Locked memory and open files that this process may have (None: no limit). A unit sets its own."""

    def soft(number: int) -> int | None:
        value = resource.getrlimit(number)[0]
        return None if value == resource.RLIM_INFINITY else value

    return {"memlock_bytes": soft(resource.RLIMIT_MEMLOCK), "nofile": soft(resource.RLIMIT_NOFILE)}


# ---------------------------------------------------------------------------------------------------------------------
# systemd

UNIT_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "NRestarts",
    "InvocationID",
    "UnitFileState",
    "ActiveEnterTimestampMonotonic",
    "ActiveExitTimestampMonotonic",
    "StateChangeTimestampMonotonic",
    "ExecMainStartTimestampMonotonic",
    "ExecMainExitTimestampMonotonic",
    "NeedDaemonReload",
    "ExecMainCode",
    "ExecMainStatus",
    "FragmentPath",
    "StatusText",
)

# Where units are installed; the first holds ours.
UNIT_DIRECTORIES = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


def parse_show_blocks(text: str) -> list[dict[str, str]]:
    """`systemctl show` of several units: blocks of NAME=VALUE parted by empty lines."""
    blocks: list[dict[str, str]] = []
    block: dict[str, str] = {}
    for line in [*text.splitlines(), ""]:
        if not line:
            if block:
                blocks.append(block)
            block = {}
            continue
        name, _, value = line.partition("=")
        block[name] = value
    return blocks


def unit_facts(block: Mapping[str, str], realtime_offset: float) -> dict[str, Any]:
    """One unit. `realtime_offset` is wall clock minus monotonic clock, in seconds.

    systemd's own wall-clock stamps come in the host's time zone and lie after a clock step; the monotonic ones do not.
    """

    def moment(name: str) -> str | None:
        number = block.get(name, "")
        return statefiles.now_utc(realtime_offset + int(number) / 1e6) if number.isdigit() and int(number) else None

    def count(name: str) -> int:
        number = block.get(name, "")
        return int(number) if number.isdigit() else 0

    return {
        "name": block.get("Id", ""),
        "load_state": block.get("LoadState", ""),
        "active_state": block.get("ActiveState", ""),
        "sub_state": block.get("SubState", ""),
        "result": block.get("Result", ""),
        "main_pid": count("MainPID"),
        "n_restarts": count("NRestarts"),
        "invocation_id": block.get("InvocationID", ""),
        "enabled": block.get("UnitFileState", ""),
        "active_since": moment("ActiveEnterTimestampMonotonic") if block.get("ActiveState") == "active" else None,
        "since": moment("StateChangeTimestampMonotonic"),
        "stop_asked": stop_asked(block),
        "need_daemon_reload": block.get("NeedDaemonReload") == "yes",
        "exit": {"code": count("ExecMainCode"), "status": count("ExecMainStatus")},
        "status_text": block.get("StatusText", ""),
    }


def stop_asked(block: Mapping[str, str]) -> bool:
    """Whether the last run ended because someone asked for a stop.

    Then the unit left `active` while its process still lived; a process that dies by itself is gone first. Result= does
    not tell: SGLang 0.5.11 to 0.5.18 end even a clean drain by SIGKILL on themselves, and a crash loop that systemd
    gave up reads `signal` just the same (tried on systemd 252).
    """
    names = ("ExecMainStartTimestampMonotonic", "ActiveExitTimestampMonotonic", "ExecMainExitTimestampMonotonic")
    start, left, exit_ = (int(block.get(name) or 0) for name in names)
    # systemd itself stops a unit that lost a process to the OOM killer or missed its watchdog.
    return 0 < start < left < exit_ and block.get("Result") not in ("oom-kill", "watchdog")


def installed_units(directories: Iterable[str] = UNIT_DIRECTORIES) -> list[str]:
    """Names of the unit files sglang-*.service (systemctl's patterns match loaded units only)."""
    paths = (path for directory in directories for path in glob.glob(f"{directory}/{statefiles.UNIT_GLOB}"))
    return sorted({os.path.basename(path) for path in paths})


def show_units(names: Iterable[str] = ()) -> tuple[list[dict[str, Any]], str | None]:
    """(units, error): all `sglang-*` units, installed or loaded, and those named, by one systemctl call."""
    wanted = sorted({*installed_units(), *names})
    command = ["systemctl", "show", "--no-pager", f"--property={','.join(UNIT_PROPERTIES)}", "--"]
    status, out, err = run([*command, *wanted, statefiles.UNIT_GLOB], SYSTEMCTL_TIMEOUT)
    # To the millisecond, so that two probes of one start agree.
    offset = round(time.time() - time.monotonic(), 3)
    units: dict[str, dict[str, Any]] = {}
    for block in parse_show_blocks(out):
        if block.get("Id"):
            units[block["Id"]] = unit_facts(block, offset)
    error = None
    if status != 0:
        error = (err.strip() or f"systemctl ended with status {status}").splitlines()[-1]
    return [units[name] for name in sorted(units)], error


# ---------------------------------------------------------------------------------------------------------------------
# What kernels are compiled with at run time


def build_tools(root: str = "/") -> dict[str, Any]:
    """Compilers as a unit's PATH has them, and the minor versions of Python whose headers are there."""

    def program(name: str) -> str | None:
        places = (os.path.join(root, folder, name) for folder in ("usr/local/bin", "usr/bin", "bin"))
        return next((place for place in places if os.access(place, os.X_OK)), None)

    headers = glob.glob(os.path.join(root, "usr/include/python3.*/Python.h"))
    return {
        "cc": program("gcc") or program("cc"),
        "cxx": program("g++") or program("c++"),
        "ninja": program("ninja"),
        "python_headers": sorted(Path(path).parent.name[len("python") :] for path in headers),
    }


def cuda_toolkits(homes: Iterable[str] = (), root: str = "/") -> list[dict[str, Any]]:
    """CUDA toolkits of the host, in the order in which an engine would take them: named ones, /usr/local/cuda, nvcc on
    the PATH, and those that it would not find by itself. `missing` names what of a toolkit is not there.
    """
    places: dict[str, str] = dict.fromkeys(homes, "CUDA_HOME")
    places.setdefault(os.path.join(root, "usr/local/cuda"), "/usr/local/cuda")
    for folder in ("usr/local", "usr"):
        if os.access(os.path.join(root, folder, "bin/nvcc"), os.X_OK):
            places.setdefault(os.path.join(root, folder), "PATH")
    for path in sorted(glob.glob(os.path.join(root, "usr/local/cuda-[0-9]*")), key=_numbers, reverse=True):
        places.setdefault(path, "/usr/local/cuda-*")
    found, seen = [], set()
    for home, source in places.items():
        real = os.path.realpath(home)
        if source != "CUDA_HOME" and (real in seen or not os.path.isdir(home)):
            continue
        seen.add(real)
        nvcc = os.path.join(home, "bin/nvcc")
        missing = [] if os.access(nvcc, os.X_OK) else ["bin/nvcc"]
        missing += [] if os.path.exists(os.path.join(home, "include/cuda_runtime.h")) else ["include/cuda_runtime.h"]
        version = None
        if "bin/nvcc" not in missing:
            _status, out, _ = run([nvcc, "--version"], SYSTEMCTL_TIMEOUT)
            match = re.search(r"\brelease (\d+\.\d+)", out)
            version = match.group(1) if match else None
        found.append({"home": home, "source": source, "version": version, "missing": missing})
    return found


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)]


# ---------------------------------------------------------------------------------------------------------------------
# Listeners


def parse_proc_net_tcp(text: str) -> list[dict[str, Any]]:
    """Listening sockets of /proc/net/tcp or tcp6: address, port, uid, inode (source: proc_net_tcp(5); state 0A)."""
    found = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) < 10 or words[3] != "0A":
            continue
        address, _, port = words[1].partition(":")
        found.append(
            {"address": _address(address), "port": int(port, 16), "uid": int(words[7]), "inode": int(words[9])}
        )
    return found


def _address(digits: str) -> str:
    # The kernel prints the address as 32-bit words of its own byte order (little-endian on x86_64).
    raw = bytes.fromhex(digits)
    words = b"".join(raw[place : place + 4][::-1] for place in range(0, len(raw), 4))
    address = ipaddress.ip_address(words)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def unit_of(pid: int, proc: str = "/proc") -> str | None:
    """The systemd unit that a process belongs to, from its control group; None outside of any."""
    text = read_text(f"{proc}/{pid}/cgroup")
    return parse_cgroup(text) if text else None


def parse_cgroup(text: str) -> str | None:
    """The innermost unit named in /proc/PID/cgroup (unified or systemd's own hierarchy)."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controllers == "name=systemd":
            units = [part for part in path.split("/") if part.endswith((".service", ".scope", ".socket"))]
            if units:
                return units[-1]
    return None


def command_of(pid: int, proc: str = "/proc") -> str | None:
    """A process's command line, at most 200 characters; its name where it has none."""
    text = read_text(f"{proc}/{pid}/cmdline")
    if text is None:
        return None
    words = text.replace("\0", " ").strip()
    if not words:
        words = (read_text(f"{proc}/{pid}/comm") or "").strip()
    return redact.redact(words)[:200]


def listeners(ports: Iterable[int], likely_pids: Iterable[int] = (), proc: str = "/proc") -> dict[str, dict[str, Any]]:
    """Who listens on these ports: {port: {pid, command, unit, address, uid}}; a free port is left out.

    A socket of another user has no pid for an unprivileged caller. Where several listen on one port (one address
    each), the first is named and the rest stand in `others`.
    """
    wanted = set(ports)
    sockets: list[dict[str, Any]] = []
    for name in ("tcp", "tcp6"):
        text = read_text(f"{proc}/net/{name}") if wanted else None
        sockets.extend(entry for entry in parse_proc_net_tcp(text or "") if entry["port"] in wanted)
    owners = socket_owners({entry["inode"] for entry in sockets}, likely_pids, proc)
    found: dict[str, dict[str, Any]] = {}
    for entry in sockets:
        pid = owners.get(entry["inode"])
        row = {
            "pid": pid,
            "command": command_of(pid, proc) if pid else None,
            "unit": unit_of(pid, proc) if pid else None,
            "address": entry["address"],
            "uid": entry["uid"],
        }
        first = found.setdefault(str(entry["port"]), row)
        if first is not row:
            first.setdefault("others", []).append(row)
    return found


#: Words in a command line that tell an engine; SGLang's processes also rename themselves so.
ENGINE_COMMAND = re.compile(r"\bsglang(\.launch_server|::|_router| serve)|\bvllm(\.entrypoints| serve|::)")
#: An engine answers its list of models at once, busy or not.
ENGINE_TIMEOUT = 2


def open_engines(proc: str = "/proc") -> list[dict[str, Any]]:
    """Engines that listen on more than loopback and list their models to a caller without a key.

    Asked by HTTP, since a command line does not tell: a key may stand in a file or in the environment.
    """
    sockets: list[dict[str, Any]] = []
    for name in ("tcp", "tcp6"):
        sockets.extend(parse_proc_net_tcp(read_text(f"{proc}/net/{name}") or ""))
    outside = [entry for entry in sockets if not ipaddress.ip_address(entry["address"]).is_loopback]
    owners = socket_owners({entry["inode"] for entry in outside}, (), proc)
    found = []
    for entry in outside:
        pid = owners.get(entry["inode"])
        command = command_of(pid, proc) if pid else None
        if command and ENGINE_COMMAND.search(command) and lists_models(entry["address"], entry["port"]):
            found.append(
                {
                    "port": entry["port"],
                    "address": entry["address"],
                    "pid": pid,
                    "command": command[:80],
                    "unit": unit_of(pid, proc) if pid else None,
                }
            )
    return sorted(found, key=lambda entry: (entry["port"], entry["address"]))


def lists_models(address: str, port: int) -> bool:
    """Whether GET /v1/models answers 200 to a caller without a key."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    connection = http.client.HTTPConnection(host, port, timeout=ENGINE_TIMEOUT)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def socket_owners(inodes: set[int], likely_pids: Iterable[int] = (), proc: str = "/proc") -> dict[int, int]:
    """{socket inode: pid}: the likely processes are looked at first, then all, until every inode is found."""
    found: dict[int, int] = {}
    if not inodes:
        return found
    likely = [str(pid) for pid in likely_pids]
    try:
        everyone = [name for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        everyone = []
    for pid in [*likely, *everyone]:
        try:
            links = os.scandir(f"{proc}/{pid}/fd")
        except OSError:
            continue  # gone, or another user's
        with links:
            for link in links:
                try:
                    target = os.readlink(link.path)
                except OSError:
                    continue
                if target.startswith("socket:[") and int(target[8:-1]) in inodes:
                    found.setdefault(int(target[8:-1]), int(pid))
        if len(found) == len(inodes):
            break
    return found


# ---------------------------------------------------------------------------------------------------------------------
# GPUs

GPU_COLUMNS = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "compute_cap",
    "memory.total",
    "memory.used",
    "memory.free",
    "driver_version",
    "persistence_mode",
    "pcie.link.gen.max",
    "pcie.link.width.current",
)
_MIB = 1024 * 1024


def parse_gpu_csv(text: str) -> list[dict[str, Any]]:
    """`nvidia-smi --query-gpu=GPU_COLUMNS --format=csv,noheader,nounits`; memory is MiB there."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(GPU_COLUMNS) or not words[0].isdigit():
            continue
        row = dict(zip(GPU_COLUMNS, words))

        def number(name: str, row: dict[str, str] = row) -> int | None:
            return int(float(row[name])) if re.fullmatch(r"\d+(\.\d+)?", row[name]) else None

        def size(name: str, row: dict[str, str] = row) -> int | None:
            value = number(name, row)
            return None if value is None else value * _MIB

        found.append(
            {
                "index": int(row["index"]),
                "name": row["name"],
                "uuid": row["uuid"],
                "bus_id": short_bus_id(row["pci.bus_id"]),
                "compute_capability": row["compute_cap"] if re.fullmatch(r"\d+\.\d+", row["compute_cap"]) else None,
                "memory_total_bytes": size("memory.total"),
                "memory_used_bytes": size("memory.used"),
                "memory_free_bytes": size("memory.free"),
                "driver_version": row["driver_version"],
                "persistence": row["persistence_mode"].lower() == "enabled",
                "pcie_gen_max": number("pcie.link.gen.max"),
                "pcie_width": number("pcie.link.width.current"),
                "processes": [],
            }
        )
    return found


def short_bus_id(text: str) -> str:
    """`00000000:01:00.0` as sysfs names it: `0000:01:00.0`."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest.count(":") == 1 else text.lower()


def parse_gpu_xml(text: str) -> dict[str, Any]:
    """`nvidia-smi -q -x`: driver, CUDA version, and the processes of each GPU by uuid ({} where it is no XML)."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return {}
    processes: dict[str, list[dict[str, Any]]] = {}
    mig: list[str] = []
    for gpu in root.findall("gpu"):
        uuid = gpu.findtext("uuid", "")
        if gpu.findtext("mig_mode/current_mig", "") == "Enabled":
            mig.append(uuid)
        rows = processes.setdefault(uuid, [])
        for entry in gpu.findall("processes/process_info"):
            pid = entry.findtext("pid", "")
            used = re.match(r"(\d+)\s*MiB", entry.findtext("used_memory", ""))
            if pid.isdigit():
                rows.append(
                    {
                        "pid": int(pid),
                        "name": entry.findtext("process_name", ""),
                        "type": entry.findtext("type", ""),
                        "memory_bytes": int(used.group(1)) * _MIB if used else None,
                    }
                )
    return {
        "driver_version": root.findtext("driver_version"),
        "cuda_version": root.findtext("cuda_version"),
        "mig": mig,
        "processes": processes,
    }


def parse_driver_proc(text: str) -> dict[str, str | None]:
    """/proc/driver/nvidia/version: the loaded module's version and flavour (open or proprietary)."""
    line = next((entry for entry in text.splitlines() if entry.startswith("NVRM version:")), "")
    version = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", line)
    flavour = None
    if line:
        flavour = "open" if "Open Kernel Module" in line else "proprietary"
    return {"version": version.group(1) if version else None, "flavour": flavour}


def flavour_of_license(text: str) -> str | None:
    """`modinfo -F license nvidia`: the open modules say Dual MIT/GPL, the proprietary ones NVIDIA."""
    line = text.strip().splitlines()
    if not line:
        return None
    return "open" if "GPL" in line[0] else "proprietary"


def kernel_module(proc: str = "/proc", modinfo: bool = True) -> dict[str, Any]:
    """The nvidia module: the loaded one from /proc, the installed one from modinfo."""
    loaded = parse_driver_proc(read_text(f"{proc}/driver/nvidia/version") or "")
    installed: dict[str, Any] = {"version": None, "flavour": None}
    if modinfo:
        status, out, _ = run(["modinfo", "nvidia"], 20)
        if status is None and os.path.exists("/sbin/modinfo"):  # /sbin is not on every user's path
            status, out, _ = run(["/sbin/modinfo", "nvidia"], 20)
        if status == 0:
            fields = dict(re.findall(r"^(\w+):\s+(.*)$", out, flags=re.MULTILINE))
            installed = {
                "version": fields.get("version"),
                "flavour": flavour_of_license(fields.get("license", "")),
            }
    modules = read_text(f"{proc}/modules") or ""
    return {
        "loaded": loaded["version"],
        "flavour": loaded["flavour"] or installed["flavour"],
        "installed": installed["version"],
        "nouveau": any(line.startswith("nouveau ") for line in modules.splitlines()),
    }


def display_devices(sys_root: str = "/sys") -> list[dict[str, str]]:
    """NVIDIA display controllers on the PCI bus, driver or not (vendor 0x10de, classes 0x0300 and 0x0302)."""
    found = []
    for path in sorted(glob.glob(f"{sys_root}/bus/pci/devices/*")):
        if (read_text(f"{path}/vendor") or "").strip() != "0x10de":
            continue
        kind = (read_text(f"{path}/class") or "").strip()
        if kind.startswith(("0x0300", "0x0302")):
            driver = os.path.basename(os.path.realpath(f"{path}/driver")) if os.path.exists(f"{path}/driver") else ""
            device = (read_text(f"{path}/device") or "").strip()
            found.append({"bus_id": os.path.basename(path), "device": device, "driver": driver})
    return found


def gpus(proc: str = "/proc", sys_root: str = "/sys", nvidia_smi: str | None = None) -> dict[str, Any]:
    """All about the GPUs: {available, error, list, driver_version, cuda_version, module, devices}.

    `available` says that nvidia-smi answered; with GPUs on the bus and no answer, `error` says what it said.
    """
    program = nvidia_smi or shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', os.defpath)}:/usr/bin")
    result: dict[str, Any] = {
        "available": False,
        "error": None,
        "nvidia_smi": program,
        "list": [],
        "driver_version": None,
        "cuda_version": None,
        "module": kernel_module(proc),
        "devices": display_devices(sys_root),
    }
    if program is None:
        result["error"] = "nvidia-smi: not found"
        return result
    query = f"--query-gpu={','.join(GPU_COLUMNS)}"
    status, out, err = run([program, query, "--format=csv,noheader,nounits"], NVIDIA_SMI_TIMEOUT)
    result["list"] = parse_gpu_csv(out)
    if status != 0 or not result["list"]:
        # One lost GPU makes it fail after it has listed the others.
        said = [line.strip() for line in (out + "\n" + err).splitlines() if line.strip() and not parse_gpu_csv(line)]
        result["error"] = said[0] if said else f"nvidia-smi ended with status {status} and said nothing"
    if not result["list"]:
        return result
    result["available"] = True
    result["driver_version"] = result["list"][0]["driver_version"]
    _, out, _ = run([program, "-q", "-x"], NVIDIA_SMI_TIMEOUT)
    details = parse_gpu_xml(out)
    result["cuda_version"] = details.get("cuda_version")
    for gpu in result["list"]:
        gpu["mig"] = gpu["uuid"] in details.get("mig", [])
        gpu["processes"] = details.get("processes", {}).get(gpu["uuid"], [])
        for process in gpu["processes"]:
            process["unit"] = unit_of(process["pid"], proc)
    result["peer_access"] = peer_access(program) if len(result["list"]) > 1 else None
    return result


def peer_access(program: str) -> dict[str, Any] | None:
    """Whether every pair of GPUs can read each other's memory (`nvidia-smi topo -p2p r`)."""
    status, out, _ = run([program, "topo", "-p2p", "r"], NVIDIA_SMI_TIMEOUT)
    return parse_peer_access(out) if status == 0 else None


def parse_peer_access(text: str) -> dict[str, Any] | None:
    """The matrix of `topo -p2p`: OK, or why not (CNS chipset, NS not supported, DR disabled by regkey)."""
    pairs: dict[str, str] = {}
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for line in plain.splitlines():
        words = line.split()
        if len(words) < 2 or not re.fullmatch(r"GPU\d+", words[0]) or words[1].startswith("GPU"):
            continue
        for column, word in enumerate(words[1:]):
            if word != "X":
                pairs[f"{words[0]}-GPU{column}"] = word
    if not pairs:
        return None
    bad = {pair: word for pair, word in pairs.items() if word != "OK"}
    return {"all": not bad, "pairs": len(pairs), "without": len(bad), "reasons": sorted(set(bad.values()))}


# ---------------------------------------------------------------------------------------------------------------------
# PCIe and IOMMU


def kernel_command_line(proc: str = "/proc") -> str:
    """/proc/cmdline."""
    return redact.redact((read_text(f"{proc}/cmdline") or "").strip())


def iommu(proc: str = "/proc", sys_root: str = "/sys") -> dict[str, Any]:
    """How DMA is translated: {enabled, mode, groups, options}.

    mode is `translated`, `passthrough` (iommu=pt) or `off`; None where it cannot be told. Source: the domain type of a
    GPU's (else any device's) group in sysfs, which is what the kernel does, then the command line, which is what it
    was asked for.
    """
    words = kernel_command_line(proc).split()
    options = [word for word in words if re.match(r"(intel_iommu|amd_iommu|iommu|iommu\..*)=", word)]
    groups = glob.glob(f"{sys_root}/kernel/iommu_groups/*")
    of_gpus = [f"{sys_root}/bus/pci/devices/{device['bus_id']}/iommu_group" for device in display_devices(sys_root)]
    kinds = {(read_text(f"{group}/type") or "").strip() for group in (of_gpus or groups)} - {""}
    mode: str | None = None
    if not groups:
        mode = "off"
    elif any(kind.startswith("DMA") for kind in kinds):
        mode = "translated"
    elif "identity" in kinds or "iommu=pt" in options:
        mode = "passthrough"
    return {"enabled": bool(groups), "mode": mode, "groups": len(groups), "options": options}


def acs_redirect(sys_root: str = "/sys") -> dict[str, Any]:
    """PCIe bridges that send peer traffic up to the root: {readable, bridges, redirecting: [bus ids]}.

    ACS control bits 2 (request redirect) and 3 (completion redirect), read from the extended configuration space,
    which only root may read past byte 64 (source: PCI Express base specification, capability 000Dh).
    """
    readable, bridges, redirecting = False, 0, []
    for path in sorted(glob.glob(f"{sys_root}/bus/pci/devices/*")):
        if not (read_text(f"{path}/class") or "").strip().startswith("0x0604"):
            continue
        bridges += 1
        try:
            space = Path(path, "config").read_bytes()
        except OSError:
            continue
        if len(space) <= 256:
            continue
        readable = True
        control = acs_control(space)
        if control is not None and control & 0b1100:
            redirecting.append(os.path.basename(path))
    return {"readable": readable, "bridges": bridges, "redirecting": redirecting}


def acs_control(space: bytes) -> int | None:
    """The ACS control register of a PCI configuration space, or None without that capability."""
    place = 0x100
    for _ in range(64):  # the list is at most that long; a broken one could loop
        if place < 0x100 or place + 8 > len(space):
            return None
        header = struct.unpack_from("<I", space, place)[0]
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == 0x000D:
            return int(struct.unpack_from("<H", space, place + 6)[0])
        place = header >> 20
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Whole probes


def base_facts(paths: Iterable[str], proc: str = "/proc") -> dict[str, Any]:
    """The quick facts that every probe carries."""
    return {
        "memory": memory(proc),
        "boot_id": boot_id(proc),
        "uptime": uptime(proc),
        "glibc": glibc_version(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "os_release": os_release(),
        "python": {"version": platform.python_version(), "path": sys.executable},
        "python_versions": python_versions(),
        "filesystems": {path: filesystem(path) for path in paths},
    }


def start_progress(unit: str, invocation_id: str, release: Mapping[str, Any]) -> dict[str, Any]:
    """How far a start is, from its journal: the snapshot of `phases.PhaseTracker`."""
    # Imported here: only a probe that asks for progress pays for reading journals.
    from . import journal, phases

    drafter = release.get("drafter") or {}
    algorithm = drafter.get("algorithm") if isinstance(drafter, Mapping) else drafter
    ranks = (release.get("parallel") or {}).get("ranks") or 1
    tracker = phases.PhaseTracker(ranks=int(ranks), drafter=bool(algorithm and algorithm != "none"))
    tracker.feed_many(journal.read_invocation(unit, invocation_id).entries)
    return tracker.snapshot(now=time.monotonic())


def read_instances(layout: statefiles.Layout) -> dict[str, dict[str, Any]]:
    """Every instance on the host, as in `state.instances` of `sglang_state`."""
    names = statefiles.list_instances(layout)
    owned, _ = by_owner(show_units()[0], names)
    return {name: statefiles.read_instance(layout, name, owned.get(name, [])) for name in names}


def by_owner(
    units: Iterable[dict[str, Any]], names: Sequence[str]
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Units by the instance that they belong to, of these, and those that belong to none."""
    owned: dict[str, list[dict[str, Any]]] = {}
    others = []
    for unit in units:
        owner = statefiles.instance_of_unit(unit["name"], names)
        if owner is None:
            others.append(unit)
        else:
            owned.setdefault(owner, []).append(unit)
    return owned, others


def probe(
    layout: statefiles.Layout,
    *,
    instances: Sequence[str] = (),
    extra_units: Sequence[str] = (),
    ports: Sequence[int] = (),
    paths: Sequence[str] = (),
    progress: bool = False,
    live: bool = False,
    proc: str = "/proc",
) -> dict[str, Any]:
    """Everything `sglang_state` returns as `state`."""
    names = list(instances)
    units, units_error = show_units(extra_units)
    owned, others = by_owner(units, sorted({*names, *statefiles.list_instances(layout)}))
    read = {name: statefiles.read_instance(layout, name, owned.get(name, [])) for name in names}
    for instance in read.values():
        begun = statefiles.main_unit(instance) if progress and instance["condition"] == "starting" else None
        if begun and begun["invocation_id"]:
            instance["progress"] = start_progress(begun["name"], begun["invocation_id"], instance["release"] or {})
        release = instance["release"] or {}
        if live and instance["serving"] and release.get("port"):
            from . import metrics  # only a probe that asks for it pays for HTTP

            instance["live"] = metrics.ask(str(release.get("host") or "127.0.0.1"), int(release["port"]))
    return {
        "schema": statefiles.SCHEMA,
        "root": str(layout.root),
        "version_installed": statefiles.list_dirs(layout.programs),
        "venvs": statefiles.read_venvs(layout),
        "models": statefiles.read_models(layout),
        "instances": read,
        "other_units": others,
        "systemd_error": units_error,
        "listeners": listeners(ports, [unit["main_pid"] for unit in units if unit["main_pid"]], proc),
        **base_facts([str(path) for path in paths], proc),
    }


def architecture(listed: Sequence[Mapping[str, Any]]) -> str:
    """`sm_120` of the first GPU, as compilers name it; empty without one."""
    capability = str(listed[0]["compute_capability"] or "") if listed else ""
    return f"sm_{capability.replace('.', '')}" if capability else ""


def systemd(run_directory: str = "/run/systemd/system") -> dict[str, Any]:
    """Whether systemd is the init of this host, and its version."""
    running = os.path.isdir(run_directory)
    status, out, _ = run(["systemctl", "--version"], SYSTEMCTL_TIMEOUT) if running else (None, "", "")
    match = re.match(r"systemd (\d+)", out)
    return {"running": running, "version": int(match.group(1)) if status == 0 and match else None}


def gpu_host_facts(
    layout: statefiles.Layout,
    *,
    ports: Sequence[int] = (),
    paths: Sequence[str] = (),
    cuda_homes: Sequence[str] = (),
    proc: str = "/proc",
    sys_root: str = "/sys",
) -> dict[str, Any]:
    """Everything `gpu_facts` returns as `facts`."""
    found = gpus(proc, sys_root)
    return {
        "driver": found["driver_version"],
        "gpu_architecture": architecture(found["list"]),
        "gpus": found,
        "iommu": iommu(proc, sys_root),
        "acs": acs_redirect(sys_root),
        "kernel_command_line": kernel_command_line(proc),
        "limits": limits(),
        "systemd": systemd(),
        "listeners": listeners(ports, proc=proc),
        "open_engines": open_engines(proc),
        "build_tools": build_tools(),
        "cuda_toolkits": cuda_toolkits(cuda_homes),
        "instances": statefiles.list_instances(layout),
        "models": statefiles.read_models(layout),
        "venvs": statefiles.read_venvs(layout),
        **base_facts([str(path) for path in paths], proc),
    }
