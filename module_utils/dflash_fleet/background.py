"""Work that outlives the run of the module that began it, and the later runs that come to look at it.

`look` is all that a module calls. The work goes on in a process of its own, which a fork gave everything it needs: no
secret is written down for it. It listens on an abstract Unix socket, which leaves no file and ends with the process,
and talks to processes of its own user only. When nobody has looked for ORPHAN seconds, it ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

ORPHAN = 300.0  # s without anybody looking: a controller that lost the host for AWAY seconds is back by then
TELL = 0.5  # s between words to those who look
ANSWER = 60.0  # s for a word of the other side, whose disk may be very busy


class Busy(Exception):
    """Somebody follows work of the same name that was asked for in another way."""


class Died(Exception):
    """The process ended without a result: it was killed."""


def _address(name: str) -> str:
    return "\0dflash-fleet/" + hashlib.sha256(name.encode()).hexdigest()[:40]


def _peer_is_us(connection: socket.socket) -> bool:
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid == os.geteuid()


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


# ---------------------------------------------------------------------------------------------------------------------
# Those who look


def look(
    name: str, key: str, seconds: float, begin: Callable[[], Callable[[], Any] | None], state: Callable[[], Any]
) -> tuple[bool, Any]:
    """(finished, result or state) of the work `name`, after `seconds` at most.

    Where it does not go on yet, `begin` says what to do: a function whose (JSON) result is wanted, or None for nothing,
    and then (True, None) is the answer. `state` is called in the process that works. Work that was begun with another
    `key` is stopped and begun anew, unless somebody follows it.
    """
    deadline = time.monotonic() + seconds
    patience = time.monotonic() + 4 * TELL  # it takes one word until it notices that somebody has left
    while True:
        connection = _connect(name)
        if connection is None:
            work = begin()
            if work is None:
                return True, None
            if not _start(name, key, work, state):
                time.sleep(0.1)  # another run began at the same moment: look at what it does
            continue
        with connection, connection.makefile("rb") as stream:
            connection.settimeout(ANSWER)
            try:
                _say(connection, {"key": key})
                message = _hear(stream)
            except (OSError, Died) as error:  # it may just have been ending
                if time.monotonic() > patience:
                    raise Died(str(error))
                time.sleep(0.1)
                continue
            while True:
                if "other" in message:
                    if time.monotonic() > patience:
                        raise Busy
                    break  # where nobody follows it, it has stopped for us
                if "result" in message:
                    with contextlib.suppress(OSError):  # it ends without our thanks too
                        _say(connection, {"taken": True})
                    return True, message["result"]
                if time.monotonic() >= deadline:
                    return False, message["state"]
                message = _hear(stream)
        time.sleep(0.1)


def _hear(stream: Any) -> dict[str, Any]:
    try:
        line = stream.readline()
    except OSError as error:
        raise Died(str(error))
    if not line.endswith(b"\n"):
        raise Died("it ended")
    return dict(json.loads(line))


def _connect(name: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(_address(name))
    except ConnectionRefusedError:
        connection.close()
        return None
    if not _peer_is_us(connection):
        connection.close()
        raise Busy
    return connection


# ---------------------------------------------------------------------------------------------------------------------
# The one that works


def _start(name: str, key: str, work: Callable[[], Any], state: Callable[[], Any]) -> bool:
    """Fork the process; False where another one took the name first."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(name))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    listener.listen(16)
    middle = os.fork()
    if middle:
        listener.close()
        os.waitpid(middle, 0)
        return True
    try:
        # Twice, in a session of its own: neither the module's end nor that of its SSH session reaches it.
        os.setsid()
        if os.fork():
            os._exit(0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        os.chdir("/")
        Worker(listener, key, state).run(work)
    finally:
        os._exit(1)


class Worker:
    """The process that works, with a thread for each one who looks."""

    def __init__(self, listener: socket.socket, key: str, state: Callable[[], Any]) -> None:
        self.listener = listener
        self.key = key
        self.state = state
        self.ended = threading.Event()
        self.taken = threading.Event()
        self.result: Any = None
        self.watching = 0
        self.seen = time.monotonic()
        self.lock = threading.Lock()

    def run(self, work: Callable[[], Any]) -> None:
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._end_when_forgotten, daemon=True).start()
        try:
            self.result = work()
        except BaseException:
            self.result = {"crash": traceback.format_exc()}
        self.ended.set()
        self.taken.wait()  # or nobody comes, see below
        time.sleep(TELL)  # for others who look at the same time
        os._exit(0)

    def _end_when_forgotten(self) -> None:
        while True:
            time.sleep(min(5.0, ORPHAN / 5))
            with self.lock:
                if not self.watching and time.monotonic() - self.seen > ORPHAN:
                    os._exit(0)

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            if _peer_is_us(connection):
                threading.Thread(target=self._tell, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _tell(self, connection: socket.socket) -> None:
        """Say how far it is until the other side leaves, and the result when there is one."""
        connection.settimeout(ANSWER)
        with contextlib.suppress(OSError, ValueError), connection, connection.makefile("rb") as stream:
            if json.loads(stream.readline())["key"] != self.key:
                with self.lock:
                    followed = self.watching > 0
                _say(connection, {"other": followed})
                if not followed:
                    os._exit(0)
                return
            if self.taken.is_set():  # whoever comes now wants another run: this one is over
                _say(connection, {"other": False})
                return
            with self.lock:
                self.watching += 1
            try:
                while not self.ended.is_set():
                    _say(connection, {"state": self.state()})
                    self.ended.wait(TELL)
                _say(connection, {"result": self.result})
                if stream.readline():
                    self.taken.set()
            finally:
                with self.lock:
                    self.watching -= 1
                    self.seen = time.monotonic()
