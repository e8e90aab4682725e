"""Parsers of /proc, /sys, systemctl and nvidia-smi, and the readers around them."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dflash_fleet import hostfacts, journal, state

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "nvidia-smi"


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text()


# --- operating system ------------------------------------------------------------------------------------------------


def test_os_release(tmp_path: Path) -> None:
    (tmp_path / "os-release").write_text(
        '# comment\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_ID="12"\nBUG="a\\"b"\n\n'
    )
    found = hostfacts.os_release(str(tmp_path))
    assert (found["id"], found["version_id"], found["id_like"]) == ("debian", "12", "")
    assert hostfacts.parse_os_release('BUG="a\\"b"\nX=\'y\'')["bug"] == 'a"b'


def test_meminfo_is_bytes() -> None:
    found = hostfacts.parse_meminfo("MemTotal:       24684084 kB\nMemAvailable:   23000000 kB\nCached: 1 kB\nHuge: 0\n")
    assert found == {
        "total_bytes": 24684084 * 1024,
        "available_bytes": 23000000 * 1024,
        "cached_bytes": 1024,
        "swap_total_bytes": 0,
    }


def test_interpreters_by_name_newest_first(tmp_path: Path) -> None:
    for name in ("python3.9", "python3.11", "python3.11-config", "python3", "python3.13"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "python3.12").write_text("")  # not executable
    found = hostfacts.python_versions([str(tmp_path), str(tmp_path / "none")])
    assert [entry["version"] for entry in found] == ["3.13", "3.11", "3.9"]


def test_free_space_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    there, later = hostfacts.filesystem(str(tmp_path)), hostfacts.filesystem(str(tmp_path / "a" / "b"))
    assert there["device"] == later["device"]
    assert later["free_bytes"] > 0


def test_this_machine() -> None:
    found = hostfacts.base_facts(["/"])
    assert found["memory"]["total_bytes"] > 0
    assert found["uptime"] > 0
    assert found["boot_id"].count("-") == 4
    assert found["filesystems"]["/"]["total_bytes"] > 0
    assert set(hostfacts.limits()) == {"memlock_bytes", "nofile"}


def test_a_program_that_is_missing_or_slow_is_a_fact() -> None:
    assert hostfacts.run(["/none/such"], 1)[0] is None
    assert hostfacts.run(["sleep", "5"], 0.05) == (None, "", "sleep: no answer within 0 s")


# --- systemd ---------------------------------------------------------------------------------------------------------

SHOW = """Id=sglang-main-ep8.service
LoadState=loaded
ActiveState=active
SubState=running
Result=success
MainPID=411
NRestarts=2
InvocationID=0123456789abcdef0123456789abcdef
UnitFileState=enabled
ActiveEnterTimestampMonotonic=2500000
StateChangeTimestampMonotonic=2500000
NeedDaemonReload=no
ExecMainCode=0
ExecMainStatus=0
StatusText=weights = 3 of 8

Id=sglang-main-tp8.service
LoadState=not-found
ActiveState=inactive
SubState=dead
MainPID=0
NRestarts=0
ActiveEnterTimestampMonotonic=0
StateChangeTimestampMonotonic=0
"""


def test_units_of_one_systemctl_call() -> None:
    blocks = hostfacts.parse_show_blocks(SHOW)
    assert [block["Id"] for block in blocks] == ["sglang-main-ep8.service", "sglang-main-tp8.service"]
    first, second = (hostfacts.unit_facts(block, 1000.0) for block in blocks)
    assert first["main_pid"] == 411
    assert first["n_restarts"] == 2
    assert first["active_since"] == "1970-01-01T00:16:42.500000Z"
    assert first["status_text"] == "weights = 3 of 8"
    assert (second["active_since"], second["since"], second["invocation_id"]) == (None, None, "")


@pytest.mark.parametrize(
    ("start", "left", "exited", "result", "asked"),
    [
        (100, 200, 210, "signal", True),  # stopped, and killed itself at the end of its drain
        (100, 200, 210, "exit-code", True),
        (100, 211, 210, "signal", False),  # died, then systemd noticed
        (220, 200, 230, "exit-code", False),  # never became active: the stamp is of the run before
        (100, 200, 210, "oom-kill", False),  # systemd stopped what was left
        (100, 0, 0, "success", False),  # runs
        (0, 0, 0, "success", False),
    ],
)
def test_whether_a_stop_was_asked_for(start: int, left: int, exited: int, result: str, asked: bool) -> None:
    block = {
        "ExecMainStartTimestampMonotonic": str(start),
        "ActiveExitTimestampMonotonic": str(left),
        "ExecMainExitTimestampMonotonic": str(exited),
        "Result": result,
    }
    assert hostfacts.stop_asked(block) is asked


def test_installed_units_are_found_where_systemd_has_not_loaded_them(tmp_path: Path) -> None:
    (tmp_path / "sglang-main-ep8.service").write_text("")
    (tmp_path / "ssh.service").write_text("")
    assert hostfacts.installed_units([str(tmp_path), str(tmp_path / "none")]) == ["sglang-main-ep8.service"]


def test_all_units_with_one_call_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "systemctl"
    (tmp_path / "answer").write_text(SHOW + "\n" + SHOW)
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {tmp_path}/answer\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    units, error = hostfacts.show_units(["sglang-main-tp8.service"])
    assert error is None
    assert [unit["name"] for unit in units] == ["sglang-main-ep8.service", "sglang-main-tp8.service"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].endswith("sglang-main-tp8.service sglang-*.service")


def test_a_systemd_that_does_not_answer_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "systemctl"
    program.write_text("#!/bin/sh\necho 'Failed to connect to bus: Host is down' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert hostfacts.show_units() == ([], "Failed to connect to bus: Host is down")


def test_how_far_a_start_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    class Collected:
        entries = [
            {"MESSAGE": f"[2026-11-30 00:00:0{rank} TP{rank} EP{rank}] Load weight begin. avail mem=94.10 GB"}
            for rank in range(2)
        ]

    def read(unit: str, invocation_id: str) -> Collected:
        asked.append((unit, invocation_id))
        return Collected()

    monkeypatch.setattr(journal, "read_invocation", read)
    found = hostfacts.start_progress(
        "sglang-main-ep8.service", "a" * 32, {"parallel": {"ranks": 8}, "drafter": {"algorithm": "DFLASH"}}
    )
    assert asked == [("sglang-main-ep8.service", "a" * 32)]
    assert (found["phase"], found["ranks_done"], found["ranks"]) == ("weights", 0, 8)
    assert hostfacts.start_progress("u", "b" * 32, {"drafter": "none"})["ranks"] == 1


# --- listeners -------------------------------------------------------------------------------------------------------

NET_TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000   998        0 51234 1 0000000000000000
   1: 0100007F:7530 0100007F:C3A0 01 00000000:00000000 00:00000000 00000000   998        0 51235 1 0000000000000000
   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4321 1 0000000000000000
"""
NET_TCP6 = """  sl  local_address                         remote_address                        st tx_queue rx_queue
   0: 00000000000000000000000000000000:7530 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 99
   1: 0000000000000000FFFF00000100007F:7531 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 98
"""


def test_listening_sockets_only() -> None:
    assert hostfacts.parse_proc_net_tcp(NET_TCP) == [
        {"address": "127.0.0.1", "port": 30000, "uid": 998, "inode": 51234},
        {"address": "0.0.0.0", "port": 22, "uid": 0, "inode": 4321},
    ]
    assert [(entry["address"], entry["port"]) for entry in hostfacts.parse_proc_net_tcp(NET_TCP6)] == [
        ("::", 30000),
        ("127.0.0.1", 30001),
    ]


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/sglang-main-ep8.service\n", "sglang-main-ep8.service"),
        ("0::/system.slice/ssh.service/child\n", "ssh.service"),
        ("0::/user.slice/user-0.slice/session-2.scope\n", "session-2.scope"),
        ("12:cpu:/x.service\n1:name=systemd:/system.slice/nginx.service\n", "nginx.service"),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_the_unit_of_a_process(text: str, unit: str | None) -> None:
    assert hostfacts.parse_cgroup(text) == unit


def fake_proc(root: Path) -> str:
    (root / "net").mkdir()
    (root / "net" / "tcp").write_text(NET_TCP)
    (root / "net" / "tcp6").write_text(NET_TCP6)
    for pid, inode, command in (
        (411, 51234, "python\0-m\0sglang.launch_server\0--api-key\0sk\0"),
        (412, 99, "nc\0-l\0"),
    ):
        (root / str(pid) / "fd").mkdir(parents=True)
        (root / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
        (root / str(pid) / "fd" / "4").symlink_to("/dev/null")
        (root / str(pid) / "cmdline").write_text(command)
        (root / str(pid) / "cgroup").write_text(
            "0::/system.slice/sglang-main-ep8.service\n" if pid == 411 else "0::/\n"
        )
    return str(root)


def test_who_listens(tmp_path: Path) -> None:
    found = hostfacts.listeners([30000, 30001, 8080], [411], fake_proc(tmp_path))
    assert found["30000"] == {
        "pid": 411,
        "command": "python -m sglang.launch_server --api-key [redacted]",
        "unit": "sglang-main-ep8.service",
        "address": "127.0.0.1",
        "uid": 998,
        "others": [{"pid": 412, "command": "nc -l", "unit": None, "address": "::", "uid": 0}],
    }
    assert found["30001"]["pid"] is None  # nobody's that we can see
    assert "8080" not in found


def test_who_listens_here() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        found = hostfacts.listeners([port])
    assert found[str(port)]["pid"] == os.getpid()
    assert found[str(port)]["command"] == hostfacts.command_of(os.getpid(), "/proc")
    assert Path(found[str(port)]["command"].split()[0]).name.startswith("python")


def test_a_process_without_a_command_line_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_text("")
    (tmp_path / "7" / "comm").write_text("kworker\n")
    assert hostfacts.command_of(7, str(tmp_path)) == "kworker"
    assert hostfacts.command_of(8, str(tmp_path)) is None


def toolkit(home: Path, release: str, *missing: str) -> None:
    """A toolkit as far as it is looked at."""
    for name in {"bin/nvcc", "include/cuda_runtime.h"} - set(missing):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
        (home / name).chmod(0o755)


def test_toolkits_in_the_order_in_which_an_engine_takes_them(tmp_path: Path) -> None:
    local = tmp_path / "usr/local"
    toolkit(local / "cuda-9.2", "9.2")
    toolkit(local / "cuda-13.0", "13.0")
    toolkit(local / "cuda-12.8", "12.8", "include/cuda_runtime.h")
    (local / "cuda").symlink_to("cuda-12.8")
    toolkit(tmp_path / "usr", "11.8")
    toolkit(tmp_path / "own", "13.1")
    own, gone = str(tmp_path / "own"), str(tmp_path / "gone")
    found = hostfacts.cuda_toolkits([own, gone], str(tmp_path))
    assert [(entry["home"].removeprefix(str(tmp_path)), *list(entry.values())[1:]) for entry in found] == [
        ("/own", "CUDA_HOME", "13.1", []),
        ("/gone", "CUDA_HOME", None, ["bin/nvcc", "include/cuda_runtime.h"]),
        ("/usr/local/cuda", "/usr/local/cuda", "12.8", ["include/cuda_runtime.h"]),
        ("/usr", "PATH", "11.8", []),
        ("/usr/local/cuda-13.0", "/usr/local/cuda-*", "13.0", []),
        ("/usr/local/cuda-9.2", "/usr/local/cuda-*", "9.2", []),
    ]
    assert hostfacts.cuda_toolkits([], str(tmp_path / "own")) == []


def test_compilers_and_the_pythons_that_have_headers(tmp_path: Path) -> None:
    nothing = {"cc": None, "cxx": None, "ninja": None, "python_headers": []}
    assert hostfacts.build_tools(str(tmp_path)) == nothing
    for name in ("usr/bin/gcc", "usr/bin/c++", "usr/include/python3.11/Python.h", "usr/include/python3.12/other.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert hostfacts.build_tools(str(tmp_path)) == {
        "cc": str(tmp_path / "usr/bin/gcc"), "cxx": str(tmp_path / "usr/bin/c++"), "ninja": None,
        "python_headers": ["3.11"],
    }  # fmt: skip


ENGINE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked = self.path == "/v1/models" and (not key or self.headers["Authorization"] == "Bearer " + key)
        self.send_response(200 if asked else 401)
        self.end_headers()
    def log_message(self, *_):
        pass
key = os.environ.get("KEY")
server = http.server.HTTPServer((sys.argv[1], 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., tuple[int, int]]]:
    """Starts a process of its own that answers as an engine does; (pid, port)."""
    running = []

    def start(address: str, name: str = "sglang.launch_server", key: str = "") -> tuple[int, int]:
        (tmp_path / name).write_text(ENGINE)
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / name), address],
            env={**os.environ, "KEY": key},
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        return process.pid, int(process.stdout.readline())

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("address", "name", "key", "open_to_all"),
    [
        ("0.0.0.0", "sglang.launch_server", "", True),
        ("0.0.0.0", "sglang.launch_server", "secret", False),
        ("127.0.0.1", "sglang.launch_server", "", False),
        ("127.8.0.1", "sglang.launch_server", "", False),
        ("0.0.0.0", "vllm.entrypoints", "", True),
        # The same answers, from a program that is no engine.
        ("0.0.0.0", "web-shop", "", False),
    ],
)
def test_engines_that_anyone_may_use(
    engine: Callable[..., tuple[int, int]], address: str, name: str, key: str, open_to_all: bool
) -> None:
    pid, port = engine(address, name, key)
    found = [entry for entry in hostfacts.open_engines() if entry["port"] == port]
    assert [(entry["pid"], entry["address"]) for entry in found] == ([(pid, address)] if open_to_all else [])


def test_an_engine_that_does_not_answer_is_no_open_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfacts, "ENGINE_TIMEOUT", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not hostfacts.lists_models("127.0.0.1", server.getsockname()[1])


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nvidia_smi(tmp_path: Path) -> Callable[..., str]:
    """Makes a program that answers as the named fixtures do."""

    def make(csv: str, xml: str | None = None, p2p: str | None = None, status: int = 0) -> str:
        program = tmp_path / "nvidia-smi"
        lines = ["#!/bin/sh", 'case "$*" in', f"*--query-gpu*) cat {FIXTURES}/{csv}; exit {status};;"]
        if xml:
            lines.append(f"*-q*-x*) cat {FIXTURES}/{xml};;")
        if p2p:
            lines.append(f"*topo*) cat {FIXTURES}/{p2p};;")
        program.write_text("\n".join([*lines, "*) exit 9;;", "esac", ""]))
        program.chmod(0o755)
        return str(program)

    return make


def read_gpus(program: str | None, tmp_path: Path) -> dict[str, Any]:
    return hostfacts.gpus(str(tmp_path / "proc"), str(tmp_path / "sys"), program)


def test_eight_blackwells(nvidia_smi: Callable[..., str], tmp_path: Path) -> None:
    found = read_gpus(nvidia_smi("rtx-pro-6000.csv", "rtx-pro-6000.xml", "p2p-ok.txt"), tmp_path)
    assert (found["available"], found["error"]) == (True, None)
    assert (found["driver_version"], found["cuda_version"]) == ("580.105.08", "13.0")
    assert len(found["list"]) == 8
    assert found["list"][7] == {
        "index": 7,
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "uuid": "GPU-3f9c1b07-7a4e-4d0b-9c1e-5b2f6d8e0107",
        "bus_id": "0000:e1:00.0",
        "compute_capability": "12.0",
        "memory_total_bytes": 97887 * 1024 * 1024,
        "memory_used_bytes": 4 * 1024 * 1024,
        "memory_free_bytes": 97250 * 1024 * 1024,
        "driver_version": "580.105.08",
        "persistence": True,
        "pcie_gen_max": 5,
        "pcie_width": 16,
        "mig": False,
        "processes": [],
    }
    assert found["peer_access"] == {"all": True, "pairs": 12, "without": 0, "reasons": []}


def test_processes_and_their_units(nvidia_smi: Callable[..., str], tmp_path: Path) -> None:
    for pid, group in ((20413, "/system.slice/sglang-main-ep8.service"), (31007, "/user.slice/session-9.scope")):
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "cgroup").write_text(f"0::{group}\n")
    found = read_gpus(nvidia_smi("rtx-pro-6000.csv", "rtx-pro-6000-busy.xml"), tmp_path)
    assert [process["unit"] for process in found["list"][3]["processes"]] == [
        "sglang-main-ep8.service",
        None,
        "session-9.scope",
    ]
    assert found["list"][3]["processes"][2]["memory_bytes"] == 21504 * 1024 * 1024
    assert found["peer_access"] is None  # topo did not answer


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("broken.txt", 9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"),
        ("mismatch.txt", 18, "Failed to initialize NVML: Driver/library version mismatch"),
        ("no-devices.txt", 0, "No devices were found"),
    ],
)
def test_an_nvidia_smi_that_fails_is_a_fact(
    nvidia_smi: Callable[..., str], tmp_path: Path, name: str, status: int, error: str
) -> None:
    found = read_gpus(nvidia_smi(name, status=status), tmp_path)
    assert not found["available"]
    assert found["list"] == []
    assert found["error"].startswith(error)


def test_a_lost_gpu_leaves_the_others_in_the_list(nvidia_smi: Callable[..., str], tmp_path: Path) -> None:
    found = read_gpus(nvidia_smi("lost.csv", "rtx-pro-6000.xml", status=15), tmp_path)
    assert found["available"]
    assert [gpu["index"] for gpu in found["list"]] == [0, 1, 2, 3, 5, 6, 7]
    assert "GPU is lost" in found["error"]


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfacts.shutil, "which", lambda *_args, **_more: None)
    found = read_gpus(None, tmp_path)
    assert (found["available"], found["error"]) == (False, "nvidia-smi: not found")


def test_a_value_that_the_driver_does_not_tell() -> None:
    (gpu,) = hostfacts.parse_gpu_csv(fixture("h200-na.csv"))
    assert (gpu["compute_capability"], gpu["persistence"], gpu["memory_used_bytes"]) == ("9.0", False, 0)
    broken = "0, NVIDIA X, GPU-1, 00000000:04:00.0, [N/A], [N/A], 0, 1, 580.1, Enabled, [N/A], 16\n"
    (gpu,) = hostfacts.parse_gpu_csv(broken)
    assert (gpu["compute_capability"], gpu["memory_total_bytes"], gpu["pcie_gen_max"]) == (None, None, None)


def test_xml_that_is_none() -> None:
    assert hostfacts.parse_gpu_xml("Failed to initialize NVML") == {}


def test_mig_is_seen(tmp_path: Path) -> None:
    text = fixture("h100.xml").replace("<current_mig>Disabled", "<current_mig>Enabled", 1)
    assert hostfacts.parse_gpu_xml(text)["mig"] == ["GPU-8d21e000-11c7-4c8e-8f0a-9e4d3c2b1000"]


def test_pairs_without_peer_access() -> None:
    assert hostfacts.parse_peer_access(fixture("p2p-cns.txt")) == {
        "all": False,
        "pairs": 12,
        "without": 8,
        "reasons": ["CNS"],
    }
    assert hostfacts.parse_peer_access("") is None


@pytest.mark.parametrize(
    ("text", "version", "flavour"),
    [
        ("proc-version-open.txt", "580.105.08", "open"),
        ("proc-version-proprietary.txt", "570.133.20", "proprietary"),
    ],
)
def test_the_flavour_of_the_loaded_module(tmp_path: Path, text: str, version: str, flavour: str) -> None:
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text(fixture(text))
    (tmp_path / "modules").write_text("nouveau 2000 0 - Live 0x0\n")
    found = hostfacts.kernel_module(str(tmp_path), modinfo=False)
    assert found == {"loaded": version, "flavour": flavour, "installed": None, "nouveau": True}


@pytest.mark.parametrize(("text", "flavour"), [("Dual MIT/GPL\n", "open"), ("NVIDIA\n", "proprietary"), ("", None)])
def test_the_flavour_by_licence(text: str, flavour: str | None) -> None:
    assert hostfacts.flavour_of_license(text) == flavour


# --- PCIe ------------------------------------------------------------------------------------------------------------


def configuration_space(acs: int | None) -> bytes:
    """4096 bytes with two extended capabilities; the second is ACS with this control register."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | 0x140 << 20)  # AER, next at 0x140
    if acs is not None:
        struct.pack_into("<IHH", space, 0x140, 0x000D | 1 << 16, 0x1F, acs)
    return bytes(space)


@pytest.mark.parametrize(
    ("space", "control"),
    [
        (configuration_space(0x1D), 0x1D),
        (configuration_space(0), 0),
        (configuration_space(None), None),
        (bytes(64), None),
        (b"\xff" * 4096, None),
        (bytes(0x100) + struct.pack("<I", 0x0001 | 0x100 << 20) + bytes(3836), None),  # points at itself
    ],
)
def test_the_acs_register(space: bytes, control: int | None) -> None:
    assert hostfacts.acs_control(space) == control


def pci_device(root: Path, bus_id: str, kind: str, vendor: str = "0x10de", config: bytes = b"") -> Path:
    path = root / "bus" / "pci" / "devices" / bus_id
    path.mkdir(parents=True)
    for name, text in (("class", kind), ("vendor", vendor), ("device", "0x2bb5")):
        (path / name).write_text(text + "\n")
    (path / "config").write_bytes(config)
    return path


def test_bridges_that_redirect(tmp_path: Path) -> None:
    pci_device(tmp_path, "0000:00:01.1", "0x060400", "0x1022", configuration_space(0x1D))
    pci_device(tmp_path, "0000:20:01.1", "0x060400", "0x1022", configuration_space(0))
    pci_device(tmp_path, "0000:01:00.0", "0x030200", config=configuration_space(0x1D))
    assert hostfacts.acs_redirect(str(tmp_path)) == {
        "readable": True,
        "bridges": 2,
        "redirecting": ["0000:00:01.1"],
    }
    assert hostfacts.display_devices(str(tmp_path)) == [{"bus_id": "0000:01:00.0", "device": "0x2bb5", "driver": ""}]


@pytest.mark.parametrize(
    ("kind", "line", "mode"),
    [
        ("DMA-FQ", "quiet", "translated"),
        ("DMA", "intel_iommu=on", "translated"),
        ("identity", "iommu=pt", "passthrough"),
        ("", "iommu=pt", "passthrough"),
        ("", "quiet", None),
        (None, "amd_iommu=off", "off"),
    ],
)
def test_the_iommu(tmp_path: Path, kind: str | None, line: str, mode: str | None) -> None:
    (tmp_path / "cmdline").write_text(f"BOOT_IMAGE=/vmlinuz {line}\n")
    device = pci_device(tmp_path, "0000:01:00.0", "0x030200")
    if kind is not None:
        group = tmp_path / "kernel" / "iommu_groups" / "12"
        group.mkdir(parents=True)
        (group / "type").write_text(f"{kind}\n")
        (device / "iommu_group").symlink_to(group)
    found = hostfacts.iommu(str(tmp_path), str(tmp_path))
    assert found["mode"] == mode
    assert found["options"] == [word for word in line.split() if word != "quiet"]


# --- whole -----------------------------------------------------------------------------------------------------------


def test_a_probe_of_this_machine(tmp_path: Path) -> None:
    layout = state.Layout(tmp_path, programs=tmp_path / "programs")
    layout.program("0.1.0").mkdir(parents=True)
    layout.state("main").mkdir(parents=True)
    found = hostfacts.probe(layout, instances=["main", "other"], ports=[1], paths=[str(tmp_path)])
    assert found["version_installed"] == ["0.1.0"]
    assert {name: entry["condition"] for name, entry in found["instances"].items()} == {
        "main": "absent",
        "other": "absent",
    }
    assert found["listeners"] == {}
    assert found["filesystems"][str(tmp_path)]["free_bytes"] > 0


def test_gpu_facts_of_this_machine(tmp_path: Path) -> None:
    found = hostfacts.gpu_host_facts(state.Layout(tmp_path), ports=[1], paths=["/dev/shm"])
    assert {"driver", "gpus", "iommu", "acs", "systemd", "models", "venvs", "glibc"} <= set(found)
