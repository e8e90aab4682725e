"""Structured entries of our own in the journal, told apart from the engine's by SYSLOG_IDENTIFIER=dflash-fleet.

They belong to the unit (`journalctl -u` shows them) and are no evidence: phases and diagnosis pass over them.
"""

from __future__ import annotations

import contextlib
import socket
import struct

IDENTIFIER = "dflash-fleet"
JOURNAL_SOCKET = "/run/systemd/journal/socket"
#: `journalctl MESSAGE_ID=...` finds every report of a crash.
MSG_REPORT = "5c1e2f0f6a0b4f1d9c7e8a52d3b4960e"


def encode(fields: dict[str, str]) -> bytes:
    """journald's native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL): values of several lines have their length."""
    out = bytearray()
    for name, value in fields.items():
        raw = value.encode("utf-8", "replace")
        if b"\n" in raw:
            out += name.encode() + b"\n" + struct.pack("<Q", len(raw)) + raw + b"\n"
        else:
            out += name.encode() + b"=" + raw + b"\n"
    return bytes(out)


def log(message: str, priority: int = 5, message_id: str = "", **fields: str) -> None:
    """One entry; `fields` are stored as DFLASH_FLEET_<NAME>. Without journald nothing happens."""
    entry = {"MESSAGE": message[:8192], "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": IDENTIFIER}
    if message_id:
        entry["MESSAGE_ID"] = message_id
    entry.update({f"DFLASH_FLEET_{name}": value[:1024] for name, value in fields.items() if value})
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(2)
        sock.sendto(encode(entry), JOURNAL_SOCKET)
