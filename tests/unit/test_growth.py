"""The measure itself: it tells a computation that looks at everything again for each line from one that does not."""

from __future__ import annotations

from growth import is_linear


def test_linear_is_told_from_quadratic() -> None:
    assert is_linear(lambda size: sum(range(size)), 2000, times=32)
    assert not is_linear(lambda size: [sum(range(size)) for _row in range(size)], 60, times=32)
