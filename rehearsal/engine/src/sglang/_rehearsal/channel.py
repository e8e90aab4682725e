"""JSON lines over a socket between the processes of one rehearsal."""

from __future__ import annotations

import json
import select
import socket
import threading
from typing import Any


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a socket pair; sending is safe from several threads."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._buffer = b""
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.end.fileno()

    def close(self) -> None:
        self.end.close()

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                self.end.sendall(data)
            except OSError as error:
                raise Closed from error

    def ready(self, seconds: float | None) -> bool:
        """Whether something can be received within this time."""
        if b"\n" in self._buffer:
            return True
        return bool(select.select([self.end], [], [], seconds)[0])

    def receive(self) -> list[dict[str, Any]]:
        """Waits for data and returns the whole messages in it."""
        while b"\n" not in self._buffer:
            try:
                data = self.end.recv(65536)
            except OSError as error:
                raise Closed from error
            if not data:
                raise Closed
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]


def pair() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right)
