"""Whether a host can take what it is asked to run: facts and requirements in, a table of checks out.

Pure. A row is {check, status: pass|warn|fail, found, wanted, remedy}; `remedy` names a variable or an action, and is
empty where nothing needs doing. `fail` means that the deployment would end badly; `warn` that it can work, and why it
may not.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

from . import state as statefiles
from . import words

GB = 1_000_000_000  # disks are sold and models listed in powers of ten
_MIB = 1024 * 1024

# The wheels of torch and of SGLang's kernels carry the tag manylinux_2_34.
MIN_GLIBC = "2.34"
# CUDA 13 wheels need a driver of the 580 branch.
MIN_DRIVER = "580"
MIN_CUDA = "13.0"
# Oldest Python by build and engine release (its metadata's Requires-Python): the first row that applies.
MIN_PYTHON = (
    ("rehearsal", "0", "3.9"),
    ("cpu", "0.5.23", "3.11"),
    ("cuda", "0.5.23", "3.11"),
    ("cpu", "0", "3.10"),
    ("cuda", "0", "3.10"),
)
# First toolkits whose nvcc knows an architecture (CUDA's release notes), and the oldest for SGLang's kernels.
NVCC_FOR = (("sm_103", "12.9"), ("sm_121", "12.9"), ("sm_10", "12.8"), ("sm_12", "12.8"))
MIN_TOOLKIT = "12.3"
# Files of a virtual environment: torch alone installs about 20,000.
VENV_FILES = {"cuda": 100_000, "cpu": 50_000, "rehearsal": 2_000}
# SGLang keeps snapshots in /dev/shm and NCCL its channels.
SHM_WANTED_GB = 8
SHM_LEAST_GB = 1

# Only the open kernel modules drive Blackwell and later (compute capability 10.0 and up).
_OPEN_ONLY_MAJOR = 10
_BLACKWELL_NAME = re.compile(r"Blackwell|\bG?B[1-3]00\b", re.IGNORECASE)

DEFAULTS: dict[str, Any] = {
    "root": "/var/lib/sglang",
    "instances": [],
    # Where the inventory is so wrong that no instance could be worked out.
    "build": "cuda",
    "venvs": [],
    "model_sizes_gb": {},
    "venv_sizes_gb": {},
    "min_free_gb": 20,
    "min_driver": MIN_DRIVER,
    "min_cuda": MIN_CUDA,
    "min_python": "",
    "venv_python": "",
    "foreign_memory_mib": 512,
    # The driver is about to be installed: what it will mend is no reason to stop.
    "driver_pending": False,
}

# Checks that installing the driver (and the reboot after it) mends.
DRIVER_CHECKS = ("driver", "nvidia-smi", "nouveau", "cuda", "kernel module", "module version", "persistence")
OPEN_ENGINE = "open engine"
PENDING = "the driver is about to be installed (gpu_host_driver_install)"


def row(check: str, status: str, found: Any, wanted: Any, remedy: str = "") -> dict[str, str]:
    """One line of the table; a passing one needs no remedy."""
    return {
        "check": check,
        "status": status,
        "found": str(found),
        "wanted": str(wanted),
        "remedy": remedy if status != "pass" else "",
    }


def version(text: str | None) -> tuple[int, ...]:
    """`580.105.08` as numbers, so that 580 <= 580.105.08 < 1000; () for None."""
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def at_least(found: str | None, least: str) -> bool:
    """Whether a dotted version is not older than another."""
    return bool(found) and version(found) >= version(least)


def check_host(facts: Mapping[str, Any], requirements: Mapping[str, Any]) -> list[dict[str, str]]:
    """All rows, in the order in which a person would mend them."""
    wanted = {**DEFAULTS, **{name: value for name, value in requirements.items() if value is not None}}
    builds = {str((instance.get("engine") or {}).get("build", "cuda")) for instance in wanted["instances"]}
    builds = builds or {str(wanted["build"])}
    rows = [*check_system(facts), *check_runtime(facts, wanted, builds), *check_disk(facts, wanted, builds)]
    rows.extend(check_ports(facts.get("listeners") or {}, wanted["instances"], facts.get("instances") or []))
    rows.extend(check_open_engines(facts.get("open_engines") or []))
    if "cuda" in builds:
        rows.extend(check_gpus(facts, wanted))
        rows.extend(check_toolchain(facts, wanted))
    if wanted["driver_pending"]:
        rows = [
            {**entry, "status": "warn", "remedy": PENDING}
            if entry["status"] == "fail" and entry["check"] in DRIVER_CHECKS
            else entry
            for entry in rows
        ]
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# System


def check_system(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Distribution, architecture, systemd."""
    release = facts.get("os_release") or {}
    name = release.get("pretty_name") or release.get("id") or "an unknown system"
    supported = release.get("id") in ("debian", "ubuntu")
    machine = facts.get("architecture") or "unknown"
    rows = [
        row(
            "system",
            "pass" if supported else "fail",
            name,
            "Debian or Ubuntu",
            f"dflash-fleet supports Debian and Ubuntu on x86_64, and this is {name}",
        ),
        row(
            "architecture",
            "pass" if machine == "x86_64" else "fail",
            machine,
            "x86_64",
            f"dflash-fleet supports Debian and Ubuntu on x86_64, and this is {machine}",
        ),
    ]
    systemd = facts.get("systemd") or {}
    rows.append(
        row(
            "systemd",
            "pass" if systemd.get("running") else "fail",
            f"version {systemd.get('version')}" if systemd.get("running") else "not the init of this host",
            "running",
            "engines are systemd units: use a host, or a container, that boots systemd",
        )
    )
    return rows


def check_runtime(facts: Mapping[str, Any], wanted: Mapping[str, Any], builds: Iterable[str]) -> list[dict[str, str]]:
    """C library and Python."""
    rows = []
    if set(builds) & {"cuda", "cpu"}:
        glibc = facts.get("glibc")
        rows.append(
            row(
                "glibc",
                "pass" if at_least(glibc, MIN_GLIBC) else "fail",
                glibc or "not glibc",
                f">= {MIN_GLIBC}",
                "the wheels are built for glibc 2.34: use Debian 12 or Ubuntu 22.04 or later",
            )
        )
    versions = [entry["version"] for entry in facts.get("python_versions") or []]
    running = (facts.get("python") or {}).get("version")
    newest = max([*versions, *([running] if running else [])], key=version, default=None)
    least = str(wanted["min_python"] or python_needed(wanted["instances"]))
    own = str(wanted["venv_python"])
    status, expected, remedy = "pass", f">= {least}", ""
    if not at_least(newest, least):
        status = "fail"
        remedy = (
            f"install Python {least} or later, bring one along (sglang_venv_python_archive), or choose an"
            f" sglang_version that runs on {newest}"
        )
    elif own and own not in versions and set(builds) & {"cuda", "cpu"}:
        status, expected = "warn", own
        remedy = (
            f"environments are made from Python {own}: set sglang_venv_python_version to one that the host has, if"
            " there is a lock for it, or bring one along (sglang_venv_python_archive)"
        )
    rows.append(row("python", status, ", ".join(versions) or running or "none", expected, remedy))
    return rows


def python_needed(instances: Iterable[Mapping[str, Any]]) -> str:
    """The oldest Python on which every instance's engine runs."""
    least = "3.9"
    for instance in instances:
        engine = instance.get("engine") or {}
        build, release = engine.get("build", "cuda"), str(engine.get("version") or "0")
        needed = next((py for kind, since, py in MIN_PYTHON if kind == build and at_least(release, since)), least)
        least = max(least, needed, key=version)
    return least


def models_needed(instances: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Targets and drafters of the instances, each once, with the build they are for."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for instance in instances:
        build = str((instance.get("engine") or {}).get("build", "cuda"))
        model, drafter = instance.get("model") or {}, instance.get("drafter") or {}
        for repo, revision in (
            (model.get("name"), model.get("revision")),
            (drafter.get("model"), drafter.get("revision")),
        ):
            if repo and revision:
                found.setdefault((repo, revision), {"repo": repo, "revision": revision, "build": build})
    return list(found.values())


# ---------------------------------------------------------------------------------------------------------------------
# Disk


def missing_bytes(
    facts: Mapping[str, Any], wanted: Mapping[str, Any], builds: Iterable[str]
) -> tuple[float, list[str], int]:
    """(bytes, names, files) of what is still to be brought to the host, as far as sizes are known."""
    total, names, files = 0.0, [], 0
    present = facts.get("models") or {}
    sizes = wanted["model_sizes_gb"]
    for model in models_needed(wanted["instances"]):
        revision = (present.get(statefiles.model_dirname(model["repo"])) or {}).get(model["revision"]) or {}
        if not revision.get("complete"):
            files += 200
            if model["build"] != "cuda":
                continue  # the other builds run tiny models, under the same names
            size = float(sizes.get(model["repo"], 0)) * GB
            total += size
            names.append(model["repo"] if size else f"{model['repo']} (size unknown)")
    venvs = facts.get("venvs") or {}
    complete = [lock for lock, venv in venvs.items() if venv.get("complete")]
    for build in sorted(builds):
        # Without a lock hash at hand any complete environment of this build counts.
        there = (
            all(lock in complete for lock in wanted["venvs"])
            if wanted["venvs"]
            else any(venvs[lock].get("build") in (build, None) for lock in complete)
        )
        if not there:
            total += float(wanted["venv_sizes_gb"].get(build, 0)) * GB
            names.append(f"environment ({build})")
            files += VENV_FILES.get(build, 0)
    return total, names, files


def check_disk(facts: Mapping[str, Any], wanted: Mapping[str, Any], builds: Iterable[str]) -> list[dict[str, str]]:
    """Free space and inodes under the root for what is missing, plus a margin."""
    root = str(wanted["root"])
    place = (facts.get("filesystems") or {}).get(root) or {}
    free, inodes = place.get("free_bytes"), place.get("free_inodes")
    missing, names, files = missing_bytes(facts, wanted, builds)
    margin = float(wanted["min_free_gb"]) * GB
    what = f"{words.size(missing)} for {', '.join(names)}, and " if names else ""
    rows = [
        row(
            "disk",
            "pass" if free is not None and free >= missing + margin else "fail",
            f"{words.size(free)} free in {root}",
            f"{words.size(missing + margin)}: {what}{words.size(margin)} margin",
            "free some space, put sglang_root on a larger disk, or lower gpu_host_min_free_gb",
        )
    ]
    if inodes is not None and files:
        rows.append(
            row(
                "inodes",
                "pass" if inodes >= files else "fail",
                f"{inodes} free in {root}",
                f">= {files}",
                "remove files there, or put sglang_root on another file system",
            )
        )
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Ports


def check_ports(
    listeners: Mapping[str, Any], instances: Iterable[Mapping[str, Any]], installed: Iterable[str] = ()
) -> list[dict[str, str]]:
    """Each instance's port is free, or held by a unit of that instance; and no two want the same.

    `installed` are the instances on the host: one that the inventory no longer names goes before anything starts.
    """
    rows = []
    taken: dict[int, str] = {}
    instances = list(instances)
    names = [str(instance["instance"]) for instance in instances]
    gone = [name for name in installed if name not in names]
    everyone = [*names, *gone]
    for instance in instances:
        name, port = str(instance["instance"]), int(instance["port"])
        check = f"port {port}" if name == "main" else f"port {port} ({name})"
        variable = "sglang_port" if name == "main" else f"the port of instance {name} in sglang_instances (sglang_port)"
        if port in taken:
            found = f"wanted by instance {taken[port]} too"
            rows.append(row(check, "fail", found, "one instance a port", f"change {variable}"))
            continue
        taken[port] = name
        holder = listeners.get(str(port))
        if holder is None:
            rows.append(row(check, "pass", "free", "free"))
            continue
        holders = [holder, *holder.get("others", [])]
        foreign = next((entry for entry in holders if not owns(entry.get("unit"), {name, *gone}, everyone)), None)
        if foreign is None:
            rows.append(row(check, "pass", f"held by {holder['unit']}", "free or ours"))
            continue
        rows.append(
            row(check, "fail", holder_text(foreign), "free or ours", f"stop that process, or change {variable}")
        )
    return rows


def check_open_engines(engines: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Engines that anyone on the network may use: they answered on an address of the host, and asked for no key."""
    return [
        row(
            f"{OPEN_ENGINE} {engine['port']}",
            "warn",
            f"{engine['address']} answers without a key ({engine.get('unit') or engine.get('command')})",
            "a key, or loopback",
            "set sglang_api_key, or let it listen on 127.0.0.1; the host's firewall is left as it is",
        )
        for engine in engines
    ]


def owns(unit: str | None, owners: Container[str], names: Iterable[str]) -> bool:
    """Whether a unit is one of these instances', under whatever profile (the switch will stop it)."""
    return bool(unit) and statefiles.instance_of_unit(str(unit), names) in owners


def holder_text(holder: Mapping[str, Any]) -> str:
    """`pid 411 (nginx: master process), nginx.service`."""
    if holder.get("pid"):
        where = f", {holder['unit']}" if holder.get("unit") else ""
        return f"taken by pid {holder['pid']} ({holder.get('command')}){where}"
    return f"taken by a process that cannot be seen from here (uid {holder.get('uid')}, {holder.get('address')})"


# ---------------------------------------------------------------------------------------------------------------------
# GPUs


def check_gpus(facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[dict[str, str]]:
    """Driver, kernel module, GPUs and their neighbourhood."""
    gpus = facts.get("gpus") or {}
    rows = [driver_row(gpus, wanted)]
    if gpus.get("available") and gpus.get("error"):
        remedy = "`journalctl -k -g Xid` says which GPU and why; power the host off and on"
        rows.append(row("nvidia-smi", "fail", gpus["error"], "an answer for every GPU", remedy))
    module = gpus.get("module") or {}
    if module.get("nouveau"):
        rows.append(row("nouveau", "fail", "loaded", "absent", "blacklist nouveau, update the initramfs and reboot"))
    if gpus.get("available"):
        rows.extend(check_driver(gpus, wanted))
        rows.extend(check_counts(gpus, wanted["instances"]))
        rows.append(processes_row(gpus["list"], wanted))
        rows.extend(check_fabric(facts, gpus))
    rows.append(shm_row(facts))
    return rows


def driver_row(gpus: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    """Whether nvidia-smi answers at all, and with a driver that is new enough."""
    if gpus.get("available"):
        driver = gpus.get("driver_version")
        return row(
            "driver",
            "pass" if at_least(driver, str(wanted["min_driver"])) else "fail",
            driver,
            f">= {wanted['min_driver']}",
            f"install the {wanted['min_driver']} branch of NVIDIA's open driver or later (gpu_host_min_driver)",
        )
    devices = len(gpus.get("devices") or [])
    remedy = "install NVIDIA's open driver, branch 580 or later"
    if gpus.get("nvidia_smi"):
        remedy = "look at `nvidia-smi` and `journalctl -k -g NVRM` on the host; a new driver needs a reboot"
    elif not devices:
        remedy = "there is no NVIDIA device on the PCI bus: is this the right host, or should sglang_build be cpu?"
    found = f"{gpus.get('error') or 'no answer from nvidia-smi'}; {devices} NVIDIA devices on the PCI bus"
    return row("driver", "fail", found, f">= {wanted['min_driver']}", remedy)


def is_blackwell(gpu: Mapping[str, Any]) -> bool:
    """Whether a GPU is of the Blackwell generation or later, by compute capability, else by name."""
    capability = version(gpu.get("compute_capability"))
    if capability:
        return capability[0] >= _OPEN_ONLY_MAJOR
    return bool(_BLACKWELL_NAME.search(str(gpu.get("name", ""))))


def check_driver(gpus: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[dict[str, str]]:
    """CUDA version, module flavour, and whether the loaded module is the installed one."""
    rows = []
    cuda = gpus.get("cuda_version")
    rows.append(
        row(
            "cuda",
            "pass" if at_least(cuda, str(wanted["min_cuda"])) else ("fail" if cuda else "warn"),
            cuda or "not said by nvidia-smi",
            f">= {wanted['min_cuda']}",
            f"the wheels need CUDA {wanted['min_cuda']}, which comes with a newer driver (gpu_host_min_cuda)",
        )
    )
    module = gpus.get("module") or {}
    flavour = module.get("flavour")
    blackwell = next((gpu["name"] for gpu in gpus["list"] if is_blackwell(gpu)), None)
    if blackwell:
        rows.append(
            row(
                "kernel module",
                {"open": "pass", None: "warn"}.get(flavour, "fail"),
                flavour or "cannot be told",
                "open",
                f"{blackwell} is driven by the open kernel modules only: install nvidia-open instead of cuda-drivers",
            )
        )
    loaded, installed = module.get("loaded"), module.get("installed")
    if loaded and installed and loaded != installed:
        rows.append(
            row("module version", "warn", f"{loaded} loaded, {installed} installed", "the same", "reboot the host")
        )
    return rows


def check_counts(gpus: Mapping[str, Any], instances: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Enough GPUs for each profile, and equal ones."""
    present = gpus["list"]
    rows = []
    on_bus = len(gpus.get("devices") or [])
    if on_bus > len(present):
        rows.append(
            row(
                "GPUs on the bus",
                "warn",
                f"nvidia-smi sees {len(present)} of {on_bus}",
                "all",
                "one may have fallen off the bus: `journalctl -k -g Xid`, then power the host off and on",
            )
        )
    for instance in instances:
        if (instance.get("engine") or {}).get("build", "cuda") != "cuda":
            continue
        indices = gpu_indices(instance)
        count = len(indices) if indices is not None else int(instance.get("gpus") or 1)
        check = "GPUs" if instance["instance"] == "main" else f"GPUs ({instance['instance']})"
        used = present[:count] if indices is None else [gpu for gpu in present if gpu["index"] in indices]
        wanted = f"{count} for profile {instance.get('profile')}"
        if len(used) < count:
            absent = sorted(set(indices or []) - {gpu["index"] for gpu in used})
            missing = f"no GPU {', '.join(map(str, absent))}" if absent else str(len(present))
            rows.append(row(check, "fail", missing, wanted, "choose a smaller sglang_profile, or another host"))
            continue
        if any(gpu.get("mig") for gpu in used):
            remedy = "an engine takes whole GPUs: switch MIG off (nvidia-smi -mig 0) on the GPUs it uses"
            rows.append(row(f"{check}, MIG", "fail", "enabled", "disabled", remedy))
        kinds = {(gpu["name"], gpu["memory_total_bytes"]) for gpu in used}
        names = ", ".join(
            f"{sum((gpu['name'], gpu['memory_total_bytes']) == kind for gpu in used)}x {kind[0]}"
            f" {(kind[1] or 0) // _MIB} MiB"
            for kind in sorted(kinds, key=str)
        )
        rows.append(
            row(
                check,
                "pass" if len(kinds) == 1 else "fail",
                names,
                f"{wanted}, equal",
                "ranks share the work evenly: name equal GPUs in sglang_instances (gpus), or use another host",
            )
        )
    return rows


def gpu_indices(instance: Mapping[str, Any]) -> list[int] | None:
    """The GPUs an instance names, or None where it only says how many."""
    named = instance.get("gpu_ids") or []
    return [int(entry) for entry in named] or None


def processes_row(present: list[dict[str, Any]], wanted: Mapping[str, Any]) -> dict[str, str]:
    """No process of others holds much GPU memory; units of ours are stopped by the switch."""
    limit = int(wanted["foreign_memory_mib"])
    foreign = []
    for gpu in present:
        for process in gpu.get("processes") or []:
            unit = process.get("unit")
            if unit and unit.startswith("sglang-"):
                continue
            used = process.get("memory_bytes")
            if used is None or used > limit * _MIB:
                size = "unknown" if used is None else f"{used // _MIB} MiB"
                where = f", {unit}" if unit else ""
                foreign.append(f"GPU {gpu['index']}: pid {process['pid']} ({process.get('name')}) {size}{where}")
    return row(
        "GPU processes",
        "fail" if foreign else "pass",
        "; ".join(foreign[:4]) + (f"; and {len(foreign) - 4} more" if len(foreign) > 4 else "") or "none of others",
        f"none of others above {limit} MiB",
        "stop that process, or raise gpu_host_foreign_memory_mib if it may stay",
    )


def check_fabric(facts: Mapping[str, Any], gpus: Mapping[str, Any]) -> list[dict[str, str]]:
    """What makes NCCL slow or hang between several GPUs. Only warnings: a host's IOMMU is its owner's decision."""
    rows = []
    if len(gpus["list"]) > 1:
        peers = gpus.get("peer_access")
        if peers and not peers["all"]:
            rows.append(
                row(
                    "peer access",
                    "warn",
                    f"{peers['without']} of {peers['pairs']} pairs without it ({', '.join(peers['reasons'])})",
                    "between all GPUs",
                    "NCCL goes through host memory then, at about half the speed",
                )
            )
        iommu = facts.get("iommu") or {}
        if iommu.get("mode") == "translated":
            rows.append(
                row(
                    "IOMMU",
                    "warn",
                    "translates DMA of the GPUs",
                    "off or passthrough",
                    "NCCL's first all-reduce can hang: boot with iommu=pt, if the host's security allows it",
                )
            )
        acs = facts.get("acs") or {}
        if acs.get("redirecting"):
            rows.append(
                row(
                    "PCIe ACS",
                    "warn",
                    f"redirects on {len(acs['redirecting'])} of {acs['bridges']} bridges",
                    "off",
                    "peer traffic takes the detour through the root: switch ACS off in the BIOS, if security allows it",
                )
            )
    if not all(gpu.get("persistence") for gpu in gpus["list"]):
        rows.append(row("persistence", "warn", "off", "on", "enable nvidia-persistenced: GPUs wake slowly without it"))
    return rows


def shm_row(facts: Mapping[str, Any]) -> dict[str, str]:
    """Room in /dev/shm."""
    total = ((facts.get("filesystems") or {}).get("/dev/shm") or {}).get("total_bytes")
    status = "pass"
    if total is None or total < SHM_LEAST_GB * GB:
        status = "fail"
    elif total < SHM_WANTED_GB * GB:
        status = "warn"
    return row(
        "/dev/shm",
        status,
        words.size(total),
        f">= {SHM_WANTED_GB} GB",
        "NCCL and the engine share memory there: mount -o remount,size=50% /dev/shm, and the same in /etc/fstab",
    )


# ---------------------------------------------------------------------------------------------------------------------
# What kernels are compiled with at run time


def cuda_homes(instances: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """{instance: CUDA_HOME} where an instance's environment names one; SGLang reads CUDA_PATH as well."""
    found = {}
    for instance in instances:
        environment = instance.get("environment") or {}
        home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
        if home:
            found[str(instance["instance"])] = str(home)
    return found


def check_toolchain(facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[dict[str, str]]:
    """Compilers, headers and the CUDA toolkit: without them an engine dies when it first meets a kernel to compile."""
    tools = facts.get("build_tools") or {}
    missing = [name for name, key in (("gcc", "cc"), ("g++", "cxx")) if not tools.get(key)]
    python = str(wanted["venv_python"])
    if python and python not in (tools.get("python_headers") or []):
        missing.append(f"Python.h of {python}")
    rows = [
        row(
            "compilers",
            "warn" if missing else "pass",
            f"no {', no '.join(missing)}" if missing else f"{tools['cc']}, {tools['cxx']}",
            "gcc, g++, Python headers",
            "role sglang_venv installs them with apt (sglang_venv_packages); install them beforehand where no package "
            "mirror answers",
        )
    ]
    architecture = str(facts.get("gpu_architecture") or "")
    toolkits = {entry["home"]: entry for entry in facts.get("cuda_toolkits") or []}
    for instance in wanted["instances"]:
        if str((instance.get("engine") or {}).get("build", "cuda")) == "cuda":
            rows.append(toolkit_row(instance, toolkits, facts.get("venvs") or {}, architecture))
    return rows


def toolkit_row(
    instance: Mapping[str, Any],
    toolkits: Mapping[str, Mapping[str, Any]],
    venvs: Mapping[str, Mapping[str, Any]],
    architecture: str,
) -> dict[str, str]:
    """Which toolkit this instance's engine compiles with, as the engine looks for it."""
    name = str(instance["instance"])
    check = "CUDA toolkit" if name == "main" else f"CUDA toolkit ({name})"
    least = next((version for prefix, version in NVCC_FOR if architecture.startswith(prefix)), MIN_TOOLKIT)
    wanted = f">= {least}" + (f" for {architecture}" if architecture else "")
    named = cuda_homes([instance]).get(name)
    if named:
        found = toolkits.get(named) or {"missing": ["bin/nvcc"], "version": None}
        correct = "correct CUDA_HOME in sglang_environment, or leave it out: the environment brings a toolkit"
        if found["missing"]:
            text = f"CUDA_HOME is {named}, which has no {', no '.join(found['missing'])}"
            return row(check, "fail", text, wanted, correct)
        text = f"{found['version'] or 'unknown version'} in {named} (CUDA_HOME)"
        return row(check, "pass" if at_least(found["version"], least) else "fail", text, wanted, correct)
    release = str((instance.get("engine") or {}).get("version") or "")
    installed = [
        venv for venv in venvs.values()
        if venv.get("complete") and venv.get("build") == "cuda" and str(venv.get("version")).split("+")[0] == release
    ]
    if not installed or any(venv.get("cuda_toolkit") for venv in installed):
        text = next((str(venv["cuda_toolkit"]) for venv in installed if venv.get("cuda_toolkit")), "to come")
        return row(check, "pass", f"{text}, with the environment", wanted)
    # An environment of one's own wheels: what the unit's PATH finds.
    usable = [entry for entry in toolkits.values() if not entry["missing"] and at_least(entry["version"], least)]
    for entry in usable:
        if entry["source"] in ("/usr/local/cuda", "PATH"):
            return row(check, "pass", f"{entry['version']} in {entry['home']}", wanted)
    if usable:
        home = usable[0]["home"]
        text = f"{usable[0]['version']} in {home}, where the engine does not look"
        return row(check, "warn", text, wanted, f"set sglang_environment: {{CUDA_HOME: {home}}}")
    text = ", ".join(f"{entry['version'] or 'incomplete'} in {entry['home']}" for entry in toolkits.values()) or "none"
    remedy = "lock nvidia-cuda-nvcc too, or install a toolkit and name it in sglang_environment (CUDA_HOME)"
    return row(check, "warn", text, wanted, remedy)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def pending(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """The checks that wait for the driver."""
    return [entry["check"] for entry in rows if entry["remedy"] == PENDING]


def open_engines(rows: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The engines among the rows that anyone on the network may use."""
    return [entry for entry in rows if entry["check"].startswith(OPEN_ENGINE)]


def failing(rows: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The rows that stop a deployment."""
    return [entry for entry in rows if entry["status"] == "fail"]


def table(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """The rows as lines of text: worst first, aligned, remedies under their check."""
    order = {"fail": 0, "warn": 1, "pass": 2}
    ordered = sorted(rows, key=lambda entry: order[entry["status"]])
    if not ordered:
        return []
    name = max(len(entry["check"]) for entry in ordered)
    lines = []
    for entry in ordered:
        wanted = "" if entry["status"] == "pass" else f" (wanted: {entry['wanted']})"
        lines.append(f"{entry['status']:4}  {entry['check']:{name}}  {entry['found']}{wanted}")
        if entry["remedy"]:
            lines.append(f"{'':4}  {'':{name}}  -> {entry['remedy']}")
    return lines


def failure_message(rows: Iterable[Mapping[str, str]]) -> str:
    """All that is wrong in one message; empty where nothing fails."""
    rows = list(rows)
    bad = failing(rows)
    if not bad:
        return ""
    count = f"{len(bad)} of {len(rows)} checks {'fails' if len(bad) == 1 else 'fail'}"
    return "\n".join([f"preflight: {count}, and nothing was changed", *(f"  {line}" for line in table(bad))])


# ---------------------------------------------------------------------------------------------------------------------
# Fleet


def fleet_report(hosts: Mapping[str, Mapping[str, Any]], at: str | None = None) -> dict[str, Any]:
    """All hosts as data. A host is {problems: [inventory errors], checks: [rows], unreachable: message or None}."""
    found: dict[str, Any] = {}
    for name, host in hosts.items():
        rows = [
            row("inventory", "fail", problem, "values that can work", "correct the inventory")
            for problem in host.get("problems") or []
        ]
        rows.extend(dict(entry) for entry in host.get("checks") or [])
        unreachable = host.get("unreachable")
        if unreachable:
            rows.append(row("connection", "fail", first_line(unreachable), "reachable", f"ssh {name}: see why"))
        elif "checks" not in host:
            rows.append(row("preflight", "fail", "did not finish", "a result", "see the error of this host above"))
        statuses = {entry["status"] for entry in rows}
        found[name] = {
            "status": "fail" if "fail" in statuses else ("warn" if "warn" in statuses else "pass"),
            "checks": rows,
        }
    return {"schema": 1, "at": at or statefiles.now_utc(), "hosts": found}


def first_line(text: Any) -> str:
    """The first line of an error message, without Ansible's own preamble, shortened to what a table can take."""
    lines = str(text or "").strip().splitlines()
    line = lines[0] if lines else ""
    for preamble in ("Task failed: ", "Module failed: ", "Action failed: "):
        line = line[len(preamble) :] if line.startswith(preamble) else line
    return line if len(line) <= 120 else line[:117] + "..."


def grouped(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What does not pass, worst first; hosts that share a finding share a row (500 hosts have few different ones)."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, host in report["hosts"].items():
        for entry in host["checks"]:
            if entry["status"] != "pass":
                key = tuple(entry[part] for part in ("status", "check", "found", "wanted", "remedy"))
                groups.setdefault(key, {**entry, "hosts": []})["hosts"].append(name)
    return sorted(groups.values(), key=lambda entry: (entry["status"] != "fail", -len(entry["hosts"])))


def fleet_tally(report: Mapping[str, Any]) -> str:
    """`3 hosts: 1 fails, 2 pass`."""
    statuses = [host["status"] for host in report["hosts"].values()]
    forms = {
        "fail": ("fails", "fail"),
        "warn": ("passes with warnings", "pass with warnings"),
        "pass": ("passes", "pass"),
    }
    parts = [
        f"{statuses.count(status)} {forms[status][statuses.count(status) != 1]}"
        for status in ("fail", "warn", "pass")
        if statuses.count(status)
    ]
    return f"{len(statuses)} host{'' if len(statuses) == 1 else 's'}: {', '.join(parts) or 'none looked at'}"


def fleet_text(report: Mapping[str, Any]) -> str:
    """The table for the terminal."""
    lines = [fleet_tally(report)]
    groups = grouped(report)
    name = max((len(entry["check"]) for entry in groups), default=0)
    for entry in groups:
        lines.append("")
        lines.append(f"{entry['status']:4}  {entry['check']:{name}}  {', '.join(entry['hosts'])}")
        indent = " " * (name + 8)
        lines.append(f"{indent}found   {entry['found']}")
        lines.append(f"{indent}wanted  {entry['wanted']}")
        if entry["remedy"]:
            lines.append(f"{indent}remedy  {entry['remedy']}")
    return "\n".join(lines)


def fleet_markdown(report: Mapping[str, Any]) -> str:
    """The report for a file: what does not pass, then every check of every host."""

    def cell(text: Any) -> str:
        return str(text).replace("|", "\\|").replace("\n", " ")

    lines = ["# Preflight", "", f"{fleet_tally(report)}. {report['at']}", ""]
    groups = grouped(report)
    if groups:
        lines += [
            "## What does not pass",
            "",
            "| | check | hosts | found | wanted | remedy |",
            "|---|---|---|---|---|---|",
        ]
        for entry in groups:
            cells = [
                entry["status"],
                entry["check"],
                ", ".join(entry["hosts"]),
                entry["found"],
                entry["wanted"],
                entry["remedy"],
            ]
            lines.append(f"| {' | '.join(map(cell, cells))} |")
        lines.append("")
    for name, host in report["hosts"].items():
        lines += [f"## {name}: {host['status']}", "", "| | check | found | wanted |", "|---|---|---|---|"]
        for entry in host["checks"]:
            cells = [entry["status"], entry["check"], entry["found"], entry["wanted"]]
            lines.append(f"| {' | '.join(map(cell, cells))} |")
        lines.append("")
    return "\n".join(lines)
