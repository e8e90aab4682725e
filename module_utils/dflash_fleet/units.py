"""What systemd knows about a unit: a small system-bus client, `systemctl show` as a fallback, and control groups.

The bus is preferred because a signal arrives about 2 ms after a process dies, where asking `systemctl` costs 5 ms a
time and a polling loop its whole interval. Everything works without privileges; only the standard library is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterable, Iterator
from typing import Any

BUS_SOCKET = "/run/dbus/system_bus_socket"
MANAGER_PATH = "/org/freedesktop/systemd1"
MANAGER = "org.freedesktop.systemd1.Manager"
UNIT = "org.freedesktop.systemd1.Unit"
SERVICE = "org.freedesktop.systemd1.Service"
PROPERTIES = "org.freedesktop.DBus.Properties"

# What the wait reads, by interface. One Get each: GetAll also walks the accounting of the control group.
UNIT_PROPERTIES = ("LoadState", "ActiveState", "SubState", "InvocationID", "StateChangeTimestampMonotonic", "Job")
SERVICE_PROPERTIES = (
    "Type", "Result", "NRestarts", "MainPID", "ExecMainPID", "ExecMainCode", "ExecMainStatus",
    "ExecMainStartTimestampMonotonic", "ExecMainExitTimestampMonotonic", "ControlGroup", "StatusText", "UID",
)  # fmt: skip
SHOW_PROPERTIES = (*UNIT_PROPERTIES, *SERVICE_PROPERTIES)
_NUMBERS = frozenset(
    ("StateChangeTimestampMonotonic", "NRestarts", "MainPID", "ExecMainPID", "ExecMainCode", "ExecMainStatus",
     "ExecMainStartTimestampMonotonic", "ExecMainExitTimestampMonotonic", "Job", "UID")
)  # fmt: skip


class BusError(Exception):
    """The system bus cannot be used, or refused a call."""


class BusLost(BusError):
    """The connection is of no more use."""


# --- names -----------------------------------------------------------------------------------------------------------


def unit_path(unit: str) -> str:
    """The object path of a unit: every byte but letters and digits becomes _xx (a leading digit too)."""
    out = []
    for index, char in enumerate(unit.encode()):
        plain = chr(char).isascii() and chr(char).isalnum() and not (index == 0 and chr(char).isdigit())
        out.append(chr(char) if plain else f"_{char:02x}")
    return f"{MANAGER_PATH}/unit/{''.join(out) or '_'}"


def full_name(unit: str) -> str:
    """`sglang-main-ep8` -> `sglang-main-ep8.service`, as systemctl completes it."""
    known = (".service", ".socket", ".target", ".timer", ".mount", ".scope", ".slice", ".path", ".device", ".swap")
    return unit if unit.endswith(known) else f"{unit}.service"


# --- marshalling (https://dbus.freedesktop.org/doc/dbus-specification.html, "Type system") ---------------------------

_ALIGN = {"y": 1, "b": 4, "n": 2, "q": 2, "i": 4, "u": 4, "x": 8, "t": 8, "d": 8, "s": 4, "o": 4, "g": 1, "a": 4,
          "(": 8, "{": 8, "v": 1, "h": 4}  # fmt: skip
_STRUCT = {"y": "B", "n": "h", "q": "H", "i": "i", "u": "I", "x": "q", "t": "Q", "d": "d", "b": "I", "h": "I"}
_MAX_MESSAGE = 128 * 1024 * 1024


def _split_signature(signature: str) -> list[str]:
    """Complete types of a signature: 'sa{sv}as' -> ['s', 'a{sv}', 'as']."""
    parts: list[str] = []
    start = 0
    while start < len(signature):
        end = start
        while end < len(signature) and signature[end] == "a":
            end += 1
        if end < len(signature) and signature[end] in "({":
            depth = 0
            while end < len(signature):
                depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(signature[end], 0)
                end += 1
                if depth == 0:
                    break
        else:
            end += 1
        parts.append(signature[start:end])
        start = end
    return parts


def _pad(data: bytearray, boundary: int) -> None:
    data.extend(b"\0" * (-len(data) % boundary))


def _pack(data: bytearray, kind: str, value: Any) -> None:
    code = kind[0]
    _pad(data, _ALIGN[code])
    if code in "so":
        raw = value.encode()
        data += struct.pack("<I", len(raw)) + raw + b"\0"
    elif code == "g":
        raw = value.encode()
        data += struct.pack("<B", len(raw)) + raw + b"\0"
    elif code == "v":
        inner, content = value
        _pack(data, "g", inner)
        _pack(data, inner, content)
    elif code == "a":
        at = len(data)
        data += b"\0\0\0\0"
        _pad(data, _ALIGN[kind[1]])
        begin = len(data)
        for item in value:
            _pack(data, kind[1:], item)
        data[at : at + 4] = struct.pack("<I", len(data) - begin)
    elif code in "({":
        for part, item in zip(_split_signature(kind[1:-1]), value):
            _pack(data, part, item)
    else:
        data += struct.pack("<" + _STRUCT[code], value)


class _Reader:
    def __init__(self, data: bytes, little: bool) -> None:
        self.data = data
        self.at = 0
        self.order = "<" if little else ">"

    def align(self, boundary: int) -> None:
        self.at += -self.at % boundary

    def number(self, code: str) -> Any:
        fmt = self.order + _STRUCT[code]
        (value,) = struct.unpack_from(fmt, self.data, self.at)
        self.at += struct.calcsize(fmt)
        return value

    def read(self, kind: str) -> Any:
        code = kind[0]
        self.align(_ALIGN[code])
        if code in "so":
            return self._text(self.number("u"))
        if code == "g":
            return self._text(self.number("y"))
        if code == "v":
            return self.read(self.read("g"))
        if code == "a":
            length = self.number("u")
            inner = kind[1:]
            self.align(_ALIGN[inner[0]])
            end = self.at + length
            if inner == "y":
                value = self.data[self.at : end]
                self.at = end
                return value
            items = []
            while self.at < end:
                items.append(self.read(inner))
            return dict(items) if inner[0] == "{" else items
        if code in "({":
            return tuple(self.read(part) for part in _split_signature(kind[1:-1]))
        value = self.number(code)
        return bool(value) if code == "b" else value

    def _text(self, length: int) -> str:
        value = self.data[self.at : self.at + length].decode("utf-8", "replace")
        self.at += length + 1
        return value


# --- the bus ---------------------------------------------------------------------------------------------------------


class Message:
    """One message from the bus: type 2 is a reply, 3 an error, 4 a signal."""

    __slots__ = ("body", "interface", "kind", "member", "path", "reply_to")

    def __init__(self, kind: int, fields: dict[int, Any], body: list[Any]) -> None:
        self.kind = kind
        self.path = fields.get(1)
        self.interface = fields.get(2)
        self.member = fields.get(4) if kind == 3 else fields.get(3)
        self.reply_to = fields.get(5)
        self.body = body


class SystemBus:
    """A connection to the system bus that can call methods and receive signals. Use `fileno()` in select."""

    def __init__(self, address: str = BUS_SOCKET, timeout: float = 5.0) -> None:
        self.timeout = timeout
        self._serial = 0
        self._buffer = bytearray()
        self._signals: list[Message] = []
        self._replies: dict[int, Message] = {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(timeout)
            self._sock.connect(address)
            self._authenticate()
            self.call("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "Hello")
        except (OSError, BusError) as error:
            self._sock.close()
            raise BusError(f"system bus at {address}: {error}") from error

    def _authenticate(self) -> None:
        # EXTERNAL: the socket's own credentials prove the user, whose number is sent as hexadecimal ASCII.
        uid = str(os.geteuid()).encode().hex().encode()
        self._sock.sendall(b"\0AUTH EXTERNAL " + uid + b"\r\n")
        line = b""
        while not line.endswith(b"\r\n"):
            chunk = self._sock.recv(1)  # byte by byte: nothing after the answer may be swallowed
            if not chunk:
                raise BusError("closed during authentication")
            line += chunk
        if not line.startswith(b"OK "):
            raise BusError(f"authentication refused: {line.decode('ascii', 'replace').strip()}")
        self._sock.sendall(b"BEGIN\r\n")

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> SystemBus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self, dest: str, path: str, interface: str, member: str, signature: str = "", args: Iterable[Any] = ()
    ) -> int:
        """Send a method call without waiting; the serial identifies its reply."""
        self._serial += 1
        body = bytearray()
        for part, value in zip(_split_signature(signature), args):
            _pack(body, part, value)
        fields = [(1, ("o", path)), (2, ("s", interface)), (3, ("s", member)), (6, ("s", dest))]
        if signature:
            fields.append((8, ("g", signature)))
        head = bytearray(struct.pack("<BBBBII", ord("l"), 1, 0, 1, len(body), self._serial))
        _pack(head, "a(yv)", fields)
        _pad(head, 8)
        try:
            self._sock.sendall(bytes(head) + bytes(body))
        except OSError as error:
            raise BusLost(f"connection lost: {error}") from error
        return self._serial

    def wait_reply(self, serial: int) -> list[Any]:
        """The body of the reply to `serial`; signals met on the way are kept."""
        deadline = time.monotonic() + self.timeout
        while serial not in self._replies:
            left = deadline - time.monotonic()
            if left <= 0:
                raise BusLost("no reply in time")
            self._receive(left)
        message = self._replies.pop(serial)
        if message.kind == 3:
            raise BusError(f"{message.member}: {message.body[0] if message.body else ''}")
        return message.body

    def call(
        self, dest: str, path: str, interface: str, member: str, signature: str = "", args: Iterable[Any] = ()
    ) -> list[Any]:
        return self.wait_reply(self.send(dest, path, interface, member, signature, args))

    def _receive(self, timeout: float) -> bool:
        """Read what is there (waiting up to `timeout` s for a first byte); False when nothing came."""
        if not select.select([self._sock], [], [], max(0.0, timeout))[0]:
            return False
        try:
            chunk = self._sock.recv(65536)
        except OSError as error:
            raise BusLost(f"connection lost: {error}") from error
        if not chunk:
            raise BusLost("connection closed by the bus")
        self._buffer += chunk
        for message in self._parse():
            if message.kind == 4:
                self._signals.append(message)
            elif message.reply_to is not None:
                self._replies[message.reply_to] = message
        return True

    def _parse(self) -> Iterator[Message]:
        while len(self._buffer) >= 16:
            little = self._buffer[0] == ord("l")
            order = "<" if little else ">"
            body_length, _serial, fields_length = struct.unpack_from(order + "III", self._buffer, 4)
            head = 16 + fields_length + (-fields_length % 8)
            if head + body_length > _MAX_MESSAGE:
                raise BusLost("message too long")
            if len(self._buffer) < head + body_length:
                return
            raw = bytes(self._buffer[: head + body_length])
            del self._buffer[: head + body_length]
            reader = _Reader(raw[:head], little)
            reader.at = 12
            fields = dict(reader.read("a(yv)"))
            content = _Reader(raw[head:], little)
            body = [content.read(part) for part in _split_signature(fields.get(8, ""))]
            yield Message(raw[1], fields, body)

    def signals(self) -> list[Message]:
        """Signals received so far; never blocks."""
        while self._receive(0):
            pass
        found, self._signals = self._signals, []
        return found

    # systemd

    def subscribe(self, unit: str) -> None:
        """Ask for the unit's PropertiesChanged signals; before looking at its state, so that nothing is missed."""
        rule = f"type='signal',interface='{PROPERTIES}',member='PropertiesChanged',path='{unit_path(unit)}'"
        bus = "org.freedesktop.DBus"
        first = self.send(bus, "/org/freedesktop/DBus", bus, "AddMatch", "s", [rule])
        # Without Subscribe systemd emits no signals at all.
        second = self.send("org.freedesktop.systemd1", MANAGER_PATH, MANAGER, "Subscribe")
        self.wait_reply(first)
        try:
            self.wait_reply(second)
        except BusError as error:
            if "AlreadySubscribed" not in str(error):
                raise

    def get(self, path: str, interface: str, name: str) -> Any:
        return self.call("org.freedesktop.systemd1", path, PROPERTIES, "Get", "ss", [interface, name])[0]

    def properties(self, unit: str) -> dict[str, Any]:
        """The unit's state in the shape of `parse_show`: one round trip for all properties."""
        path = unit_path(unit)
        wanted = [(UNIT, name) for name in UNIT_PROPERTIES] + [(SERVICE, name) for name in SERVICE_PROPERTIES]
        serials = [
            self.send("org.freedesktop.systemd1", path, PROPERTIES, "Get", "ss", [interface, name])
            for interface, name in wanted
        ]
        found: dict[str, Any] = {}
        for (_interface, name), serial in zip(wanted, serials):
            try:
                found[name] = self.wait_reply(serial)[0]
            except BusLost:
                raise
            except BusError:
                continue  # a unit that is no service lacks the Service interface
        return normalise(found, self._job_type)

    def _job_type(self, path: str) -> str:
        try:
            return str(self.get(path, "org.freedesktop.systemd1.Job", "JobType"))
        except BusError:
            return ""  # the job ended between the two questions


def normalise(found: dict[str, Any], job_type: Any = None) -> dict[str, Any]:
    """Bus values in the shape of `systemctl show`: hexadecimal invocation, job number, `JobType`."""
    out: dict[str, Any] = {name: (0 if name in _NUMBERS else "") for name in SHOW_PROPERTIES}
    out["JobType"] = ""
    for name, value in found.items():
        if name == "InvocationID":
            out[name] = "" if not any(value) else bytes(value).hex()
        elif name == "UID":
            out[name] = -1 if value == 0xFFFFFFFF else value
        elif name == "Job":
            out[name] = int(value[0])
            if value[0] and job_type is not None:
                out["JobType"] = job_type(value[1])
        else:
            out[name] = value
    return out


def parse_show(text: str) -> dict[str, Any]:
    """Parse `systemctl show` output (KEY=VALUE lines); numbers become int, what is unset 0 or ''."""
    out: dict[str, Any] = {name: (0 if name in _NUMBERS else "") for name in SHOW_PROPERTIES}
    out["JobType"] = ""
    for line in text.splitlines():
        name, found, value = line.partition("=")
        if not found:
            continue
        if name == "UID":
            out[name] = int(value) if value.isdigit() else -1
        elif name in _NUMBERS:
            out[name] = int(value) if value.isdigit() else 0
        else:
            out[name] = value
    return out


def show(unit: str, timeout: float = 10.0) -> dict[str, Any]:
    """`systemctl show`, for hosts whose bus cannot be reached. Raises BusError where systemd is not there at all."""
    command = ["systemctl", "show", "--no-pager", "-p", ",".join(SHOW_PROPERTIES), "--", unit]
    try:
        # list-jobs has the type of the job, which show does not.
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        state = parse_show(done.stdout)
        if done.returncode != 0:
            raise BusError(f"systemctl show failed: {done.stderr.strip() or done.returncode}")
        if state["Job"]:
            jobs = subprocess.run(
                ["systemctl", "list-jobs", "--no-legend", "--no-pager"],
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            ).stdout
            for line in jobs.splitlines():
                parts = line.split()
                if len(parts) >= 3 and parts[0] == str(state["Job"]):
                    state["JobType"] = parts[2]
        return state
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BusError(f"systemctl: {error}") from error


def runtime_directory(unit: str, timeout: float = 10.0) -> str:
    """The unit's first RuntimeDirectory= as a path, or '' without one."""
    command = ["systemctl", "show", "--property=RuntimeDirectory", "--value", "--", unit]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    names = done.stdout.split()
    return f"/run/{names[0]}" if names else ""


# --- control groups --------------------------------------------------------------------------------------------------


def cgroup_directories(control_group: str, root: str = "/sys/fs/cgroup") -> list[str]:
    """Where the members of a unit's control group may be read, best first.

    Pure v2 has it at the root, hybrid hosts in `unified`; both v1 layouts have systemd's own hierarchy, `systemd`.
    """
    if not control_group:
        return []
    relative = control_group.lstrip("/")
    if os.path.exists(os.path.join(root, "cgroup.controllers")):
        places = [root]
    else:
        places = [os.path.join(root, "unified"), os.path.join(root, "systemd")]
    return [path for path in (os.path.join(place, relative) for place in places) if os.path.isdir(path)]


def cgroup_pids(control_group: str, root: str = "/sys/fs/cgroup") -> set[int]:
    """Every process of the unit, its sub-groups included."""
    for directory in cgroup_directories(control_group, root):
        pids: set[int] = set()
        for parent, _folders, files in os.walk(directory):
            if "cgroup.procs" in files:
                try:
                    with open(os.path.join(parent, "cgroup.procs"), encoding="ascii") as handle:
                        pids.update(int(line) for line in handle)
                except OSError:
                    continue  # the group ended while we looked
        if pids:
            return pids
    return set()


def in_cgroup(pid: int, control_group: str, proc: str = "/proc") -> bool:
    """Whether a process belongs to the control group, by its own /proc/PID/cgroup (readable by everyone)."""
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as handle:
            lines = handle.read().splitlines()
    except OSError:
        return False
    wanted = control_group.rstrip("/")
    for line in lines:
        number, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if (number == "0" or controllers == "name=systemd") and (path == wanted or path.startswith(wanted + "/")):
            return True
    return False


# --- processes -------------------------------------------------------------------------------------------------------

_TITLE = re.compile(r"sglang::(\w+)")


def _stat(pid: int, proc: str) -> list[str]:
    """Fields of proc_pid_stat(5) from the third on (the state), none when it is gone: a name may hold blanks."""
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            return handle.read().rpartition(")")[2].split()
    except OSError:
        return []


def process_state(pid: int, proc: str = "/proc") -> str:
    """R, S, D, Z, ... or '' when it is gone."""
    return (_stat(pid, proc) or [""])[0]


def alive(pid: int, proc: str = "/proc") -> bool:
    """A zombie does not count: it has died, only nobody has asked for its exit status."""
    return process_state(pid, proc) not in ("", "Z", "X", "x")


def command_line(pid: int, proc: str = "/proc") -> str:
    """The command of a process, or its name in brackets where the command cannot be read."""
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as handle:
            text = handle.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        if text:
            return text
        with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as handle:
            return f"[{handle.read().strip()}]"
    except OSError:
        return ""


def engine_workers(pids: Iterable[int], proc: str = "/proc") -> dict[int, str]:
    """SGLang's own children among `pids`, by process title: {20413: 'scheduler_TP3_EP3', 20420: 'detokenizer'}.

    A copy that one of them has forked (to run a compiler, say) has its title, ends when it likes, and is none.
    """
    found: dict[int, str] = {}
    for pid in pids:
        match = _TITLE.match(command_line(pid, proc))
        if match and command_line(parent(pid, proc), proc) != match.string:
            found[pid] = match.group(1)
    return found


def parent(pid: int, proc: str = "/proc") -> int:
    """The parent's number, 0 when it is gone."""
    return int((_stat(pid, proc) or ["", "0"])[1])


def activity(pids: Iterable[int], proc: str = "/proc") -> int:
    """A counter that grows while processes load, import or compile, and stands still while they wait or spin.

    Page faults, and blocks of 4 KiB read from disk where we may see them. Processor time would not do: a stuck
    collective spins.
    """
    total = 0
    for pid in pids:
        fields = _stat(pid, proc)
        if not fields:
            continue
        total += int(fields[7]) + int(fields[9])  # minflt, majflt
        try:
            with open(f"{proc}/{pid}/io", encoding="ascii") as handle:
                for line in handle:
                    if line.startswith("read_bytes:"):
                        total += int(line.split()[1]) // 4096
        except (OSError, ValueError):
            continue  # another user's process
    return total


def session(pids: Iterable[int], leader: int, proc: str = "/proc") -> set[int]:
    """Those of `pids` that belong to the session of `leader` (setsid(2)), itself among them."""
    if leader <= 0:
        return set()
    return {pid for pid in pids if _stat(pid, proc)[3:4] == [str(leader)]}


_PIDFD_GETFD = 438  # the same number on every architecture; Linux 5.6
JOURNAL_STREAM = "/run/systemd/journal/stdout"


def flush_log_stream(pidfd: int) -> bool:
    """Make journald store what a process has written to its error stream without a newline, as progress bars do.

    journald closes a begun line when another process writes to the same stream, and stores no empty lines; so an empty
    line of ours leaves nothing behind but the bar. Needs the right to trace the process; False where it does not work.
    """
    if pidfd < 0:
        return False
    try:
        number = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, 2, 0)
    except (OSError, AttributeError):
        return False
    if number < 0:
        return False
    try:
        with socket.socket(fileno=number) as stream:
            if stream.family != socket.AF_UNIX or stream.getpeername() != JOURNAL_STREAM:
                return False  # a file, a pipe, a terminal: none of our business
            stream.send(b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return True
    except OSError:
        with contextlib.suppress(OSError):
            os.close(number)  # it was no socket, so nobody has closed it
        return False


def boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
        return handle.read().strip().replace("-", "")
    return ""
