"""Gives every program of a host's own Python another wall clock: the seconds in /etc/other-time are added to it.

Copied to the host together with a .pth file that imports it, so that modules and supervisor have it from their first
line. The monotonic clock and the machine's own clock stay as they are. (libfaketime cannot do this: under it, sleeping
by the monotonic clock, as Python 3.11 and later do, ends with EINVAL.)
"""

from __future__ import annotations

import datetime
import time

_time, _time_ns, _Datetime = time.time, time.time_ns, datetime.datetime


def _shift() -> int:
    try:
        with open("/etc/other-time", encoding="ascii") as stream:
            return int(stream.read())
    except FileNotFoundError:
        return 0


class OtherDatetime(_Datetime):
    """Now is another time; everything else is as it was."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        """As the other clock has it."""
        return _Datetime.now(tz) + datetime.timedelta(seconds=_shift())


time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + _shift() * 10**9
datetime.datetime = OtherDatetime  # type: ignore[misc]
