"""Processes with true PIDs: titles, death with the parent, reaping, and the end by SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Callable

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def set_title(title: str) -> None:
    """Makes `title` the process's name and command line, as setproctitle does: journald and ps show it."""
    libc = _libc()
    libc.prctl(PR_SET_NAME, ctypes.c_char_p(title.encode()[:15]), 0, 0, 0)
    try:
        with open("/proc/self/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
        # proc(5): arg_start is field 48; the first field after the name is field 3.
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError, ValueError):
        return
    room = end - start
    if start <= 0 or room < 2:
        return
    data = title.encode()[: room - 1]
    ctypes.memmove(start, data + b"\0" * (room - len(data)), room)


def die_with_parent(parent: int) -> None:
    """A child whose main process is gone is killed by the kernel."""
    _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


class Child:
    """One forked process; `exitcode` as multiprocessing gives it (negative for a signal)."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.exitcode: int | None = None

    def alive(self) -> bool:
        """Whether it still runs; reaps it when it does not."""
        if self.exitcode is not None:
            return False
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            self.exitcode = 0
            return False
        if pid == 0:
            return True
        self.exitcode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return False

    def kill(self) -> None:
        """SIGKILL, where it still runs."""
        if self.alive():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def fork(name: str, body: Callable[[], None]) -> Child:
    """Runs `body` in a child; it ends with 0 when body returns, 1 when it raises."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Child(name, pid)
    code = 1
    try:
        # Spawned processes of the real engine start without the parent's handlers.
        for number in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        # A terminal's Ctrl-C is the main process's business.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(parent)
        body()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def wait_all(children: list[Child], seconds: float) -> list[Child]:
    """Waits for the children to end; returns those that still run."""
    deadline = time.monotonic() + seconds
    while True:
        left = [child for child in children if child.alive()]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.01)
