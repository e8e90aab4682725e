"""Every check of the preflight table, and the text made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import hostfacts, preflight

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "nvidia-smi"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def gpus(csv: str = "rtx-pro-6000.csv", xml: str = "rtx-pro-6000.xml", **changes: Any) -> dict[str, Any]:
    """What `hostfacts.gpus` makes of the recorded answers."""
    listed = hostfacts.parse_gpu_csv((FIXTURES / csv).read_text())
    details = hostfacts.parse_gpu_xml((FIXTURES / xml).read_text())
    for gpu in listed:
        gpu["processes"] = details["processes"].get(gpu["uuid"], [])
        for process in gpu["processes"]:
            process["unit"] = "sglang-main-ep8.service" if process["name"].startswith("sglang") else None
    return {
        "available": True,
        "error": None,
        "nvidia_smi": "/usr/bin/nvidia-smi",
        "list": listed,
        "driver_version": listed[0]["driver_version"],
        "cuda_version": details["cuda_version"],
        "module": {"loaded": "580.105.08", "installed": "580.105.08", "flavour": "open", "nouveau": False},
        "devices": [{"bus_id": gpu["bus_id"]} for gpu in listed],
        "peer_access": {"all": True, "pairs": 56, "without": 0, "reasons": []},
        **changes,
    }


def facts(**changes: Any) -> dict[str, Any]:
    """An empty, healthy eight-GPU host."""
    return {
        "os_release": {"id": "debian", "pretty_name": "Debian GNU/Linux 12 (bookworm)"},
        "architecture": "x86_64",
        "systemd": {"running": True, "version": 252},
        "glibc": "2.36",
        "python": {"version": "3.11.2"},
        "python_versions": [{"version": "3.11", "path": "/usr/bin/python3.11"}],
        "filesystems": {
            "/var/lib/sglang": {"free_bytes": 2e12, "free_inodes": 10_000_000, "total_bytes": 4e12},
            "/dev/shm": {"free_bytes": 5e11, "free_inodes": None, "total_bytes": 5e11},
        },
        "listeners": {},
        "models": {},
        "venvs": {},
        "gpus": gpus(),
        "gpu_architecture": "sm_120",
        "build_tools": {"cc": "/usr/bin/gcc", "cxx": "/usr/bin/g++", "ninja": None, "python_headers": ["3.11"]},
        "cuda_toolkits": [],
        "iommu": {"mode": "passthrough"},
        "acs": {"redirecting": [], "bridges": 9},
        **changes,
    }


def instance(**changes: Any) -> dict[str, Any]:
    """The part of a resolved instance that is read."""
    return {
        "instance": "main",
        "unit": "sglang-main-ep8.service",
        "port": 30000,
        "profile": "ep8",
        "gpus": 8,
        "gpu_ids": [],
        "engine": {"name": "sglang", "build": "cuda", "version": "0.5.20"},
        "model": {"name": "moonshotai/Kimi-K2.6", "revision": REVISION},
        "drafter": {"model": "SubSir/Kimi-K2.6-DFlash-tmp-long", "revision": REVISION},
        **changes,
    }


SIZES = {"moonshotai/Kimi-K2.6": 610, "SubSir/Kimi-K2.6-DFlash-tmp-long": 7}
WANTED: dict[str, Any] = {
    "instances": [instance()],
    "model_sizes_gb": SIZES,
    "venv_sizes_gb": {"cuda": 15, "cpu": 3, "rehearsal": 0.1},
}


def check(found: dict[str, Any], **changes: Any) -> dict[str, dict[str, str]]:
    """The table, by check."""
    rows = preflight.check_host(found, {**WANTED, **changes})
    table = {entry["check"]: entry for entry in rows}
    assert len(table) == len(rows), "two rows have one name"
    return table


def failing(table: dict[str, dict[str, str]]) -> list[str]:
    return [name for name, entry in table.items() if entry["status"] == "fail"]


def test_a_good_host_passes_everything() -> None:
    table = check(facts())
    assert {entry["status"] for entry in table.values()} == {"pass"}, table
    assert not any(entry["remedy"] for entry in table.values())
    assert preflight.failure_message(list(table.values())) == ""


@pytest.mark.parametrize(
    ("changes", "name", "found", "remedy"),
    [
        (
            {"os_release": {"id": "rocky", "pretty_name": "Rocky Linux 9.4"}},
            "system",
            "Rocky Linux 9.4",
            "supports Debian and Ubuntu on x86_64, and this is Rocky Linux 9.4",
        ),
        ({"architecture": "aarch64"}, "architecture", "aarch64", "Debian and Ubuntu on x86_64, and this is aarch64"),
        ({"systemd": {"running": False}}, "systemd", "not the init", "boots systemd"),
        ({"glibc": "2.31"}, "glibc", "2.31", "Debian 12 or Ubuntu 22.04"),
        ({"glibc": None}, "glibc", "not glibc", "Debian 12"),
        (
            {"python": {"version": "3.9.2"}, "python_versions": [{"version": "3.9", "path": "/usr/bin/python3.9"}]},
            "python",
            "3.9",
            "sglang_version",
        ),
        (
            {"listeners": {"30000": {"pid": 411, "command": "nginx: master", "unit": "nginx.service"}}},
            "port 30000",
            "taken by pid 411 (nginx: master), nginx.service",
            "change sglang_port",
        ),
        (
            {"listeners": {"30000": {"pid": None, "command": None, "unit": None, "uid": 0, "address": "0.0.0.0"}}},
            "port 30000",
            "cannot be seen from here (uid 0, 0.0.0.0)",
            "sglang_port",
        ),
        (
            {"gpus": gpus("h100.csv", "h100.xml", driver_version="570.133.20")},
            "driver",
            "570.133.20",
            "gpu_host_min_driver",
        ),
        ({"gpus": gpus("h100.csv", "h100.xml", driver_version="580.1")}, "cuda", "12.8", "gpu_host_min_cuda"),
        (
            {"gpus": {"available": False, "error": "Failed to initialize NVML", "nvidia_smi": "/x", "devices": [1, 2]}},
            "driver",
            "Failed to initialize NVML; 2 NVIDIA devices",
            "journalctl",
        ),
        (
            {"gpus": {"available": False, "error": "nvidia-smi: not found", "nvidia_smi": None, "devices": []}},
            "driver",
            "nvidia-smi: not found; 0",
            "sglang_build",
        ),
        (
            {"gpus": {"available": False, "error": "nvidia-smi: not found", "nvidia_smi": None, "devices": [1]}},
            "driver",
            "1 NVIDIA devices",
            "install NVIDIA's open driver",
        ),
        (
            {"gpus": gpus(module={"flavour": "proprietary"})},
            "kernel module",
            "proprietary",
            "nvidia-open instead of cuda-drivers",
        ),
        ({"gpus": gpus(module={"flavour": "open", "nouveau": True})}, "nouveau", "loaded", "blacklist nouveau"),
        ({"gpus": gpus("mixed.csv")}, "GPUs", "6x NVIDIA RTX PRO 6000", "equal GPUs in sglang_instances"),
        ({"gpus": gpus("lost.csv", error="GPU is lost")}, "GPUs", "7", "sglang_profile"),
        ({"gpus": gpus(xml="rtx-pro-6000-busy.xml")}, "GPU processes", "GPU 3: pid 31007", "stop that process"),
        (
            {"filesystems": {"/var/lib/sglang": {"free_bytes": 2e12}, "/dev/shm": {"total_bytes": 64e6}}},
            "/dev/shm",
            "64 MB",
            "remount",
        ),
        (
            {"filesystems": {"/var/lib/sglang": {"free_bytes": 6e11}, "/dev/shm": {"total_bytes": 64e9}}},
            "disk",
            "600 GB free in /var/lib/sglang",
            "gpu_host_min_free_gb",
        ),
        (
            {
                "filesystems": {
                    "/var/lib/sglang": {"free_bytes": 2e12, "free_inodes": 100},
                    "/dev/shm": {"total_bytes": 64e9},
                }
            },
            "inodes",
            "100 free",
            "sglang_root",
        ),
    ],
)
def test_what_stops_a_host(changes: dict[str, Any], name: str, found: str, remedy: str) -> None:
    entry = check(facts(**changes))[name]
    assert entry["status"] == "fail"
    assert found in entry["found"]
    assert remedy in entry["remedy"]
    assert entry["wanted"]


@pytest.mark.parametrize(
    ("changes", "name", "found"),
    [
        ({"gpus": gpus(module={"flavour": None})}, "kernel module", "cannot be told"),
        (
            {"gpus": gpus(module={"flavour": "open", "loaded": "580.95.05", "installed": "580.105.08"})},
            "module version",
            "580.95.05 loaded",
        ),
        ({"gpus": gpus(devices=[{}] * 9)}, "GPUs on the bus", "8 of 9"),
        (
            {"gpus": gpus(peer_access={"all": False, "pairs": 56, "without": 32, "reasons": ["CNS"]})},
            "peer access",
            "32 of 56 pairs",
        ),
        ({"iommu": {"mode": "translated"}}, "IOMMU", "translates"),
        ({"acs": {"redirecting": ["0000:00:01.1"], "bridges": 9}}, "PCIe ACS", "1 of 9"),
        ({"gpus": gpus(cuda_version=None)}, "cuda", "not said"),
        (
            {"filesystems": {"/var/lib/sglang": {"free_bytes": 2e12}, "/dev/shm": {"total_bytes": 2e9}}},
            "/dev/shm",
            "2.0 GB",
        ),
    ],
)
def test_what_only_warns(changes: dict[str, Any], name: str, found: str) -> None:
    table = check(facts(**changes))
    assert table[name]["status"] == "warn"
    assert found in table[name]["found"]
    assert table[name]["remedy"]
    assert failing(table) == []


def test_an_h100_may_have_the_proprietary_module() -> None:
    table = check(facts(gpus=gpus("h100.csv", "h100.xml", driver_version="590.1", cuda_version="13.1", module={})))
    assert failing(table) == []
    assert "kernel module" not in table
    assert table["persistence"]["status"] == "warn"


@pytest.mark.parametrize(
    ("gpu", "answer"),
    [
        ({"compute_capability": "12.0", "name": "x"}, True),
        ({"compute_capability": "10.3", "name": "x"}, True),
        ({"compute_capability": "9.0", "name": "Blackwell by mistake"}, False),
        ({"compute_capability": None, "name": "NVIDIA B200"}, True),
        ({"compute_capability": None, "name": "NVIDIA GB300"}, True),
        ({"compute_capability": None, "name": "NVIDIA H100 80GB HBM3"}, False),
    ],
)
def test_blackwell_or_not(gpu: dict[str, Any], answer: bool) -> None:
    assert preflight.is_blackwell(gpu) is answer


def test_mig_is_refused() -> None:
    sliced = gpus()
    sliced["list"][0]["mig"] = True
    assert failing(check(facts(gpus=sliced))) == ["GPUs, MIG"]


def test_an_answer_cut_short_is_refused_by_itself() -> None:
    table = check(facts(gpus=gpus("lost.csv", error="GPU4 is lost")), instances=[instance(gpus=4)])
    assert failing(table) == ["nvidia-smi"]


# --- GPUs of several instances ---------------------------------------------------------------------------------------


def test_instances_with_their_own_gpus() -> None:
    first = instance(gpus=4, gpu_ids=[0, 1, 2, 3])
    second = instance(
        instance="b", unit="sglang-b-tp4.service", port=30001, profile="tp4", gpus=4, gpu_ids=[4, 5, 6, 7]
    )
    table = check(facts(gpus=gpus("mixed.csv")), instances=[first, second])
    assert table["GPUs"]["status"] == "pass"
    assert table["GPUs (b)"]["status"] == "fail"
    table = check(facts(gpus=gpus("lost.csv")), instances=[first, second])
    assert table["GPUs (b)"]["found"] == "no GPU 4"
    assert "4 for profile tp4" in table["GPUs (b)"]["wanted"]


# --- ports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "status"),
    [
        ("sglang-main-ep8.service", "pass"),
        ("sglang-main-tp8.service", "pass"),  # the profile before: the switch stops it
        ("sglang-main-b-tp8.service", "fail"),  # another instance
        ("sglang-k26-dflash.service", "fail"),  # an engine that someone set up by hand
        (None, "fail"),
    ],
)
def test_a_port_of_our_own_is_no_obstacle(unit: str | None, status: str) -> None:
    held = {"30000": {"pid": 5, "command": "x", "unit": unit, "uid": 0, "address": "::"}}
    other = instance(instance="main-b", unit="sglang-main-b-tp8.service", port=30001)
    assert check(facts(listeners=held), instances=[instance(), other])["port 30000"]["status"] == status


def test_a_port_of_an_instance_that_goes_is_no_obstacle() -> None:
    held = {"30000": {"pid": 5, "command": "x", "unit": "sglang-old-ep8.service", "uid": 0, "address": "::"}}
    assert check(facts(listeners=held))["port 30000"]["status"] == "fail"
    assert check(facts(listeners=held, instances=["old"]))["port 30000"]["status"] == "pass"


def test_a_stranger_beside_ours_on_one_port() -> None:
    held = {
        "30000": {
            "pid": 5,
            "command": "x",
            "unit": "sglang-main-ep8.service",
            "others": [{"pid": 6, "command": "nc -l", "unit": None}],
        }
    }
    assert check(facts(listeners=held))["port 30000"]["found"] == "taken by pid 6 (nc -l)"


def test_two_instances_on_one_port() -> None:
    table = check(facts(), instances=[instance(), instance(instance="b", unit="sglang-b-ep8.service")])
    assert table["port 30000 (b)"]["status"] == "fail"
    assert "sglang_instances" in table["port 30000 (b)"]["remedy"]


# --- disk ------------------------------------------------------------------------------------------------------------


def present(**models: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "--"): {REVISION: entry} for name, entry in models.items()}


def test_only_what_is_missing_is_counted() -> None:
    found = facts()
    missing, names, _ = preflight.missing_bytes(found, {**preflight.DEFAULTS, **WANTED}, ["cuda"])
    assert missing == (610 + 7 + 15) * 1e9
    assert names == ["moonshotai/Kimi-K2.6", "SubSir/Kimi-K2.6-DFlash-tmp-long", "environment (cuda)"]
    found["models"] = {"moonshotai--Kimi-K2.6": {REVISION: {"complete": True}}}
    found["venvs"] = {"a": {"complete": True, "build": "cuda"}}
    missing, names, _ = preflight.missing_bytes(found, {**preflight.DEFAULTS, **WANTED}, ["cuda"])
    assert (missing, names) == (7e9, ["SubSir/Kimi-K2.6-DFlash-tmp-long"])


def test_the_environment_of_another_lock_is_no_help() -> None:
    found = facts(venvs={"a": {"complete": True, "build": "cuda"}})
    wanted = {**preflight.DEFAULTS, **WANTED, "instances": [], "venvs": ["b"]}
    assert preflight.missing_bytes(found, wanted, ["cuda"])[0] == 15e9


def test_a_model_of_unknown_size_is_said_to_be_so() -> None:
    table = check(facts(), model_sizes_gb={}, instances=[instance()])
    assert "moonshotai/Kimi-K2.6 (size unknown)" in table["disk"]["wanted"]


def test_the_stand_ins_of_a_rehearsal_are_tiny() -> None:
    engine = {"name": "sglang", "build": "rehearsal", "version": "0.5.11"}
    found = facts(gpus={}, filesystems={"/var/lib/sglang": {"free_bytes": 3e9, "free_inodes": 1e6}})
    table = check(found, instances=[instance(engine=engine)], min_free_gb=1)
    assert failing(table) == []
    assert not {"glibc", "driver", "/dev/shm"} & set(table)
    table = check(found, instances=[instance(engine=engine)], min_free_gb=100)
    assert failing(table) == ["disk"]


# --- Python ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "release", "least"),
    [
        ("cuda", "0.5.11", "3.10"),
        ("cuda", "0.5.12.post1", "3.10"),
        ("cuda", "0.5.23", "3.11"),
        ("cpu", "0.5.23", "3.11"),
        ("rehearsal", "0.5.23", "3.9"),
    ],
)
def test_the_python_that_a_release_needs(build: str, release: str, least: str) -> None:
    assert preflight.python_needed([{"engine": {"build": build, "version": release}}]) == least


def test_versions_are_numbers() -> None:
    assert preflight.at_least("580.105.08", "580")
    assert preflight.at_least("3.10", "3.9")
    assert not preflight.at_least("570.999", "580")
    assert not preflight.at_least(None, "1")


# --- text ------------------------------------------------------------------------------------------------------------


def test_all_failures_in_one_message_worst_first() -> None:
    broken = facts(
        architecture="aarch64",
        glibc="2.31",
        iommu={"mode": "translated"},
        listeners={"30000": {"pid": 411, "command": "nginx", "unit": "nginx.service"}},
    )
    rows = list(check(broken).values())
    message = preflight.failure_message(rows)
    assert message.splitlines()[0] == f"preflight: 3 of {len(rows)} checks fail, and nothing was changed"
    assert all(word in message for word in ("aarch64", "2.31", "pid 411 (nginx)", "sglang_port"))
    assert "IOMMU" not in message
    lines = [line for line in preflight.table(rows) if not line.startswith(" ")]
    assert [line[:4] for line in lines] == ["fail"] * 3 + ["warn"] + ["pass"] * (len(rows) - 4)


def test_one_failure_is_one() -> None:
    assert "1 of 2 checks fails" in preflight.failure_message(
        [preflight.row("a", "fail", 1, 2, "x"), preflight.row("b", "pass", 1, 2)]
    )
    assert preflight.table([]) == []


# --- fleet -----------------------------------------------------------------------------------------------------------

BAD_DISK = preflight.row("disk", "fail", "1 GB free", "20 GB", "gpu_host_min_free_gb")
SLOW = preflight.row("IOMMU", "warn", "translates", "off", "iommu=pt")
GOOD = preflight.row("system", "pass", "Debian | 12", "Debian or Ubuntu")
FLEET = {
    "gpu-01": {"problems": [], "checks": [GOOD, BAD_DISK], "unreachable": None},
    "gpu-02": {"problems": [], "checks": [GOOD, BAD_DISK, SLOW], "unreachable": None},
    "gpu-03": {"problems": [], "checks": [GOOD, SLOW], "unreachable": None},
    "gpu-04": {"problems": [], "checks": [GOOD], "unreachable": None},
    "gpu-05": {"problems": [], "checks": [], "unreachable": "No route to host\nmore"},
    "gpu-06": {"problems": ["sglang_profile: 'x' is unknown"], "checks": [GOOD], "unreachable": None},
    "gpu-07": {},
}


def test_the_fleet_as_data() -> None:
    report = preflight.fleet_report(FLEET, at="now")
    assert (report["schema"], report["at"]) == (1, "now")
    assert {name: host["status"] for name, host in report["hosts"].items()} == {
        "gpu-01": "fail",
        "gpu-02": "fail",
        "gpu-03": "warn",
        "gpu-04": "pass",
        "gpu-05": "fail",
        "gpu-06": "fail",
        "gpu-07": "fail",
    }


def test_the_fleet_as_text_groups_what_hosts_share() -> None:
    text = preflight.fleet_text(preflight.fleet_report(FLEET))
    assert text.splitlines()[0] == "7 hosts: 5 fail, 1 passes with warnings, 1 passes"
    assert "fail  disk        gpu-01, gpu-02" in text
    assert "warn  IOMMU       gpu-02, gpu-03" in text
    assert "No route to host\n" in text
    assert "sglang_profile: 'x' is unknown" in text
    assert "did not finish" in text
    assert text.index("fail  disk") < text.index("warn  IOMMU")
    assert preflight.fleet_text(preflight.fleet_report({"a": {"checks": [GOOD]}})) == "1 host: 1 passes"


def test_the_fleet_as_markdown_escapes_its_cells() -> None:
    text = preflight.fleet_markdown(preflight.fleet_report(FLEET))
    assert "| fail | disk | gpu-01, gpu-02 | 1 GB free | 20 GB | gpu_host_min_free_gb |" in text
    assert "## gpu-04: pass" in text
    assert "| pass | system | Debian \\| 12 | Debian or Ubuntu |" in text


@pytest.mark.parametrize(
    ("build", "own", "versions", "status"),
    [
        ("cuda", "3.11", ["3.11"], "pass"),
        ("cuda", "3.11", ["3.13", "3.11"], "pass"),
        ("cuda", "3.11", ["3.13"], "warn"),  # Debian 13
        ("cpu", "3.11", ["3.12"], "warn"),
        ("cuda", "", ["3.13"], "pass"),  # one is brought along
        ("rehearsal", "3.11", ["3.13"], "pass"),  # runs on any
        ("cuda", "3.11", ["3.10"], "fail"),
    ],
)
def test_python_that_environments_are_made_from(build: str, own: str, versions: list[str], status: str) -> None:
    found = facts(python_versions=[{"version": one, "path": f"/usr/bin/python{one}"} for one in versions])
    found["python"] = {"version": versions[0]}
    instances = [{**one, "engine": {**one["engine"], "build": build}} for one in WANTED["instances"]]
    entry = check(found, instances=instances, venv_python=own, min_python="3.11")["python"]
    assert entry["status"] == status
    assert ("sglang_venv_python_version" in entry["remedy"]) == (status == "warn")
    assert ("sglang_venv_python_archive" in entry["remedy"]) == (status != "pass")


# --- what kernels are compiled with ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "headers", "status", "found"),
    [
        ({}, "3.11", "pass", "/usr/bin/gcc, /usr/bin/g++"),
        ({"cxx": None}, "3.11", "warn", "no g++"),
        ({"cc": None, "cxx": None, "python_headers": []}, "3.12", "warn", "no gcc, no g++, no Python.h of 3.12"),
        # An interpreter that is brought along has its own.
        ({"python_headers": []}, "", "pass", "/usr/bin/gcc, /usr/bin/g++"),
    ],
)
def test_compilers(tools: dict[str, Any], headers: str, status: str, found: str) -> None:
    entry = check(facts(build_tools={**facts()["build_tools"], **tools}), venv_python=headers)["compilers"]
    assert (entry["status"], entry["found"]) == (status, found)
    assert ("sglang_venv_packages" in entry["remedy"]) == (status == "warn")


def place(home: str, source: str, version: str | None, *missing: str) -> dict[str, Any]:
    return {"home": home, "source": source, "version": version, "missing": list(missing)}


LOCKED = {"a": {"complete": True, "build": "cuda", "version": "0.5.20", "cuda_toolkit": "13.0.88"}}
OWN_WHEELS = {"a": {"complete": True, "build": "cuda", "version": "0.5.20", "cuda_toolkit": None}}
LOCAL, ELSEWHERE = "/usr/local/cuda", "/usr/local/cuda-*"


@pytest.mark.parametrize(
    ("named", "venvs", "toolkits", "status", "found", "remedy"),
    [
        ("", {}, [], "pass", "to come, with the environment", ""),
        ("", LOCKED, [place(LOCAL, LOCAL, "11.8")], "pass", "13.0.88, with the environment", ""),
        # Another release's environment says nothing about this one's.
        ("", {"a": {**OWN_WHEELS["a"], "version": "0.5.11"}}, [], "pass", "to come, with the environment", ""),
        ("", OWN_WHEELS, [place(LOCAL, LOCAL, "13.0")], "pass", "13.0 in /usr/local/cuda", ""),
        ("", OWN_WHEELS, [place("/usr", "PATH", "12.8")], "pass", "12.8 in /usr", ""),
        ("", OWN_WHEELS, [place(LOCAL, LOCAL, "12.6")], "warn", "12.6 in /usr/local/cuda", "nvidia-cuda-nvcc"),
        (
            "", OWN_WHEELS, [place(LOCAL, LOCAL, "12.6"), place("/usr/local/cuda-13.0", ELSEWHERE, "13.0")],
            "warn", "13.0 in /usr/local/cuda-13.0, where the engine does not look",
            "sglang_environment: {CUDA_HOME: /usr/local/cuda-13.0}",
        ),
        ("", OWN_WHEELS, [], "warn", "none", "CUDA_HOME"),
        ("/opt/cuda", LOCKED, [place("/opt/cuda", "CUDA_HOME", "13.1")], "pass", "13.1 in /opt/cuda (CUDA_HOME)", ""),
        (
            "/opt/cuda", LOCKED, [place("/opt/cuda", "CUDA_HOME", "12.6")],
            "fail", "12.6 in /opt/cuda (CUDA_HOME)", "correct CUDA_HOME",
        ),
        (
            ":/opt/cuda", LOCKED, [place(":/opt/cuda", "CUDA_HOME", None, "bin/nvcc", "include/cuda_runtime.h")],
            "fail", "CUDA_HOME is :/opt/cuda, which has no bin/nvcc, no include/cuda_runtime.h", "correct CUDA_HOME",
        ),
    ],
)  # fmt: skip
def test_the_toolkit_that_an_engine_would_take(
    named: str, venvs: dict[str, Any], toolkits: list[dict[str, Any]], status: str, found: str, remedy: str
) -> None:
    wanted = [instance(environment={"CUDA_HOME": named} if named else {})]
    entry = check(facts(venvs=venvs, cuda_toolkits=toolkits), instances=wanted)["CUDA toolkit"]
    assert (entry["status"], entry["found"]) == (status, found)
    assert remedy in entry["remedy"]
    assert entry["wanted"] == ">= 12.8 for sm_120"


@pytest.mark.parametrize(
    ("architecture", "least"),
    [("sm_90", "12.3"), ("sm_100", "12.8"), ("sm_103", "12.9"), ("sm_120", "12.8"), ("sm_121", "12.9"), ("", "12.3")],
)
def test_what_an_architecture_asks_of_the_toolkit(architecture: str, least: str) -> None:
    assert check(facts(gpu_architecture=architecture))["CUDA toolkit"]["wanted"].startswith(f">= {least}")


def test_only_engines_for_gpus_compile() -> None:
    engine = {"name": "sglang", "build": "cpu", "version": "0.5.23"}
    assert not {"compilers", "CUDA toolkit"} & set(check(facts(), instances=[instance(engine=engine)]))
    two = [instance(), instance(instance="b", port=30001)]
    assert "CUDA toolkit (b)" in check(facts(), instances=two)
