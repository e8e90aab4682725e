"""systemd's view of a unit: bus client against a scripted bus, `systemctl show`, control groups, processes."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading

import pytest
from dflash_fleet import units

UNIT = "sglang-main-ep8.service"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("sglang-main-ep8.service", "sglang_2dmain_2dep8_2eservice"),
        ("a.service", "a_2eservice"),
        ("7up.service", "_37up_2eservice"),
        ("a@b_c.service", "a_40b_5fc_2eservice"),
        ("ä.service", "_c3_a4_2eservice"),
    ],
)
def test_unit_path(name, path):
    assert units.unit_path(name) == f"/org/freedesktop/systemd1/unit/{path}"


@pytest.mark.parametrize(("short", "full"), [("x", "x.service"), ("x.service", "x.service"), ("x.socket", "x.socket")])
def test_full_name(short, full):
    assert units.full_name(short) == full


@pytest.mark.parametrize(
    ("signature", "parts"),
    [
        ("", []),
        ("s", ["s"]),
        ("sa{sv}as", ["s", "a{sv}", "as"]),
        ("(uo)u", ["(uo)", "u"]),
        ("aa{s(iv)}x", ["aa{s(iv)}", "x"]),
    ],
)
def test_split_signature(signature, parts):
    assert units._split_signature(signature) == parts


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("y", 7),
        ("b", True),
        ("i", -5),
        ("u", 4000000000),
        ("t", 1 << 60),
        ("x", -(1 << 60)),
        ("d", 1.5),
        ("s", "Grüße"),
        ("as", ["a", "", "c"]),
        ("(uo)", (3, "/a/b")),
        ("a(yv)", [(1, "x"), (2, 5)]),
        ("at", []),
    ],
)
def test_marshalling_round_trip(kind, value):
    def wrap(item):  # variants carry their type
        return ("s", item) if isinstance(item, str) else ("u", item)

    data = bytearray()
    units._pack(data, kind, [(code, wrap(item)) for code, item in value] if kind == "a(yv)" else value)
    assert units._Reader(bytes(data), True).read(kind) == value


def test_dictionaries_and_bytes_are_read():
    data = bytearray()
    units._pack(data, "a{sv}", [("ActiveState", ("s", "active")), ("InvocationID", ("ay", [1, 2, 255]))])
    assert units._Reader(bytes(data), True).read("a{sv}") == {"ActiveState": "active", "InvocationID": b"\x01\x02\xff"}


class ScriptedBus(threading.Thread):
    """The far end of a system bus: authenticates, answers calls from a table, and can send a signal."""

    def __init__(self, path, values, refuse_auth=False):
        super().__init__(daemon=True)
        self.values = values
        self.refuse_auth = refuse_auth
        self.calls = []
        self.serial = 100
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(1)

    def run(self):
        self.peer, _ = self.listener.accept()
        line = b""
        while not line.endswith(b"\r\n"):
            line += self.peer.recv(1)
        self.auth = line
        if self.refuse_auth:
            self.peer.sendall(b"REJECTED EXTERNAL\r\n")
            return
        self.peer.sendall(b"OK 1234deadbeef\r\n")
        while not line.endswith(b"BEGIN\r\n"):
            line += self.peer.recv(1)
        data = b""
        while True:
            chunk = self.peer.recv(65536)
            if not chunk:
                return
            data += chunk
            while len(data) >= 16:
                body, serial, fields = struct.unpack_from("<III", data, 4)
                head = 16 + fields + (-fields % 8)
                if len(data) < head + body:
                    break
                reader = units._Reader(data[:head], True)
                reader.at = 12
                names = dict(reader.read("a(yv)"))
                content = units._Reader(data[head : head + body], True)
                args = [content.read(part) for part in units._split_signature(names.get(8, ""))]
                data = data[head + body :]
                self.answer(serial, names, args)

    def answer(self, serial, names, args):
        self.calls.append((names[3], args))
        if names[3] == "Get":
            if args[1] in self.values:
                kind, value = self.values[args[1]]
                self.send(2, serial, "v", (kind, value))
            else:
                self.send(3, serial, "s", "no such property", error="org.freedesktop.DBus.Error.UnknownProperty")
        elif names[3] == "Hello":
            # In pieces, as a stream may deliver it.
            self.send(2, serial, "s", ":1.7", pieces=True)
        else:
            self.send(2, serial, "", None)

    def message(self, kind, fields, signature, value):
        body = bytearray()
        if signature:
            fields = [*fields, (8, ("g", signature))]
            for part, item in zip(units._split_signature(signature), value if len(signature) > 1 else [value]):
                units._pack(body, part, item)
        self.serial += 1
        head = bytearray(struct.pack("<BBBBII", ord("l"), kind, 0, 1, len(body), self.serial))
        units._pack(head, "a(yv)", fields)
        units._pad(head, 8)
        return bytes(head) + bytes(body)

    def send(self, kind, reply_to, signature, value, error=None, pieces=False):
        fields = [(5, ("u", reply_to))] + ([(4, ("s", error))] if error else [])
        data = self.message(kind, fields, signature, value)
        if pieces:
            for index in range(len(data)):
                self.peer.sendall(data[index : index + 1])
        else:
            self.peer.sendall(data)

    def signal(self, values):
        fields = [(1, ("o", units.unit_path(UNIT))), (2, ("s", units.PROPERTIES)), (3, ("s", "PropertiesChanged"))]
        self.peer.sendall(self.message(4, fields, "sa{sv}as", [units.UNIT, list(values.items()), []]))


VALUES = {
    "LoadState": ("s", "loaded"),
    "ActiveState": ("s", "active"),
    "SubState": ("s", "running"),
    "InvocationID": ("ay", [0xAB] * 16),
    "StateChangeTimestampMonotonic": ("t", 123456789),
    "Job": ("(uo)", (12, "/org/freedesktop/systemd1/job/12")),
    "JobType": ("s", "restart"),
    "Result": ("s", "success"),
    "NRestarts": ("u", 3),
    "MainPID": ("u", 4711),
    "UID": ("u", 0xFFFFFFFF),
}


@pytest.fixture
def bus(tmp_path):
    server = ScriptedBus(tmp_path / "bus", VALUES)
    server.start()
    with units.SystemBus(str(tmp_path / "bus"), timeout=3) as client:
        yield server, client


def test_bus_subscribes_before_it_reads(bus):
    server, client = bus
    client.subscribe(UNIT)
    state = client.properties(UNIT)
    assert server.auth.strip() == b"\0AUTH EXTERNAL " + str(os.geteuid()).encode().hex().encode()
    names = [name for name, _args in server.calls]
    assert names[:3] == ["Hello", "AddMatch", "Subscribe"]
    assert units.unit_path(UNIT) in server.calls[1][1][0]
    assert (state["ActiveState"], state["NRestarts"], state["MainPID"]) == ("active", 3, 4711)
    assert state["InvocationID"] == "ab" * 16
    assert (state["Job"], state["JobType"]) == (12, "restart")
    assert state["UID"] == -1
    # What the bus did not know keeps its empty value, as in `systemctl show`.
    assert (state["ControlGroup"], state["ExecMainStatus"]) == ("", 0)


def test_bus_keeps_signals_met_while_waiting_for_a_reply(bus):
    server, client = bus
    server.signal({"ActiveState": ("s", "failed"), "SubState": ("s", "failed")})
    client.properties(UNIT)
    (message,) = client.signals()
    assert message.member == "PropertiesChanged"
    assert message.body[1] == {"ActiveState": "failed", "SubState": "failed"}
    assert client.signals() == []


def test_bus_reports_a_lost_connection(bus):
    server, client = bus
    server.peer.shutdown(socket.SHUT_RDWR)
    with pytest.raises(units.BusError):
        client.properties(UNIT)


def test_bus_that_is_not_there_or_refuses(tmp_path):
    with pytest.raises(units.BusError, match="nothing"):
        units.SystemBus(str(tmp_path / "nothing"))
    server = ScriptedBus(tmp_path / "bus", {}, refuse_auth=True)
    server.start()
    with pytest.raises(units.BusError, match="refused"):
        units.SystemBus(str(tmp_path / "bus"), timeout=3)


def test_parse_show():
    state = units.parse_show(
        "ActiveState=failed\nSubState=failed\nResult=signal\nNRestarts=2\nMainPID=0\nExecMainStatus=9\nUID=[not set]\n"
        "InvocationID=0123\nControlGroup=/system.slice/x.service\nJob=\nStatusText=a=b\nno equals sign\n"
    )
    assert (state["ActiveState"], state["Result"], state["NRestarts"], state["ExecMainStatus"]) == (
        "failed",
        "signal",
        2,
        9,
    )
    assert (state["UID"], state["Job"], state["StatusText"], state["LoadState"]) == (-1, 0, "a=b", "")


def test_show_asks_for_the_type_of_a_job(tmp_path, monkeypatch):
    script = tmp_path / "systemctl"
    script.write_text(
        '#!/bin/sh\nif [ "$1" = show ]; then echo ActiveState=activating; echo Job=42\n'
        'else echo "  42 x.service start running"; fi\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert units.show("x.service")["JobType"] == "start"
    script.write_text("#!/bin/sh\necho 'System has not been booted with systemd' >&2\nexit 1\n")
    with pytest.raises(units.BusError, match="not been booted"):
        units.show("x.service")


def _layout(root, kind):
    places = {"v2": ["."], "hybrid": ["unified", "systemd"], "v1": ["systemd"]}[kind]
    for index, place in enumerate(places):
        group = root / place / "system.slice" / UNIT
        (group / "sub").mkdir(parents=True)
        (group / "cgroup.procs").write_text("11\n12\n" if index == 0 else "99\n")
        (group / "sub" / "cgroup.procs").write_text("13\n")
    if kind == "v2":
        (root / "cgroup.controllers").write_text("cpu\n")


@pytest.mark.parametrize("kind", ["v2", "hybrid", "v1"])
def test_control_groups_of_every_layout(tmp_path, kind):
    _layout(tmp_path, kind)
    assert units.cgroup_pids(f"/system.slice/{UNIT}", str(tmp_path)) == {11, 12, 13}
    assert units.cgroup_pids("/system.slice/other.service", str(tmp_path)) == set()
    assert units.cgroup_pids("", str(tmp_path)) == set()


@pytest.mark.parametrize(
    ("lines", "member"),
    [
        (f"0::/system.slice/{UNIT}\n", True),
        (f"0::/system.slice/{UNIT}/worker\n", True),
        (f"1:name=systemd:/system.slice/{UNIT}\n0::/\n", True),
        (f"3:cpu:/system.slice/{UNIT}\n0::/\n", False),
        (f"0::/system.slice/{UNIT}x\n", False),
        ("", False),
    ],
)
def test_in_cgroup(tmp_path, lines, member):
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "cgroup").write_text(lines)
    assert units.in_cgroup(5, f"/system.slice/{UNIT}", str(tmp_path)) is member
    assert units.in_cgroup(6, f"/system.slice/{UNIT}", str(tmp_path)) is False


def _process(root, pid, cmdline=b"", state="S", comm="python3", minflt=0, read=None, parent=1):
    folder = root / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_bytes(cmdline)
    (folder / "comm").write_text(comm + "\n")
    fields = f"{pid} (we (ird) name) {state} {parent} 1 1 0 -1 0 {minflt} 0 3 0 " + "0 " * 30
    (folder / "stat").write_text(fields)
    if read is not None:
        (folder / "io").write_text(f"rchar: 1\nread_bytes: {read}\n")


def test_processes(tmp_path):
    _process(tmp_path, 1, b"python3\0-m\0sglang.launch_server\0")
    _process(tmp_path, 2, b"sglang::scheduler_TP0_EP0\0", minflt=10, read=8192)
    _process(tmp_path, 3, b"", state="Z", comm="sglang::schedul")
    _process(tmp_path, 4, b"sglang::detokenizer")
    proc = str(tmp_path)
    assert units.engine_workers([1, 2, 3, 4, 5], proc) == {2: "scheduler_TP0_EP0", 4: "detokenizer"}
    assert [units.alive(pid, proc) for pid in (1, 2, 3, 4, 5)] == [True, True, False, True, False]
    assert units.command_line(1, proc) == "python3 -m sglang.launch_server"
    assert units.command_line(3, proc) == "[sglang::schedul]"
    assert units.command_line(5, proc) == ""
    assert units.activity([2, 5], proc) == 10 + 3 + 2


def test_a_copy_that_a_worker_has_forked_is_no_worker(tmp_path):
    """It would count as a rank that died as soon as what it was forked for is done."""
    _process(tmp_path, 1, b"python3\0-m\0sglang.launch_server\0")
    _process(tmp_path, 2, b"sglang::data_parallel_controller\0")
    _process(tmp_path, 3, b"sglang::scheduler_DP0_TP0\0", parent=2)
    _process(tmp_path, 4, b"sglang::scheduler_DP0_TP0\0", parent=3)
    _process(tmp_path, 5, b"sglang::scheduler_DP1_TP0\0", parent=99)  # its parent is gone
    found = units.engine_workers([1, 2, 3, 4, 5], str(tmp_path))
    assert found == {2: "data_parallel_controller", 3: "scheduler_DP0_TP0", 5: "scheduler_DP1_TP0"}


def test_activity_moves_with_work_and_not_with_spinning():
    code = {
        "spin": "while True: pass",
        "load": "import time\nwhile True: bytearray(8 << 20); time.sleep(0.005)",
    }
    grown = {}
    for name, source in code.items():
        with subprocess.Popen(
            [sys.executable, "-S", "-c", "print(flush=True)\n" + source], stdout=subprocess.PIPE
        ) as child:
            child.stdout.readline()
            before = units.activity([child.pid])
            for _look in range(3 if name == "spin" else 50):
                threading.Event().wait(0.1)
                grown[name] = units.activity([child.pid]) - before
                if grown[name] > 2048:
                    break
            child.kill()
    assert grown["spin"] < 256
    assert grown["load"] > 2048


def test_flush_leaves_other_streams_alone(tmp_path):
    with subprocess.Popen(["sleep", "10"], stderr=(tmp_path / "log").open("wb")) as child:
        pidfd = os.pidfd_open(child.pid)
        try:
            assert units.flush_log_stream(pidfd) is False
            assert units.flush_log_stream(-1) is False
        finally:
            os.close(pidfd)
            child.kill()
    assert (tmp_path / "log").read_bytes() == b""
