"""How figures and failures are written for people."""

from __future__ import annotations

import pytest
from dflash_fleet import words


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (488_234_778, "488 MB"),
        (6.1e9, "6.1 GB"),
        (2e12, "2.0 TB"),
        (None, "not known"),
    ],
)
def test_size(count, text):
    assert words.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (14.9, "0:14"), (118, "1:58"), (3700, "1:01:40"), (-1, "0:00")]
)
def test_clock(seconds, text):
    assert words.clock(seconds) == text


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"msg": "no room"}, "no room"),
        ({"msg": ["one", "two"]}, ["one", "two"]),
        ({"failed": True}, "failed, see above"),
        ({"msg": "", "results": []}, "failed, see above"),
        (
            {
                "msg": "One or more items failed",
                "results": [{"msg": "fetched"}, {"failed": True, "msg": "no room"}, {"failed": True, "msg": "no hub"}],
            },
            "no room",
        ),
        ({"msg": "One or more items failed", "results": [{"failed": True}]}, "failed, see above"),
    ],
)
def test_why(result, text):
    assert words.why(result) == text
