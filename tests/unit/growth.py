"""How the time of a computation grows with its input: linear is told from quadratic on a noisy machine, by ratios."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

ATTEMPTS = 5


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call, without the garbage collector's, which grow with everything that the process holds."""
    gc.disable()
    try:
        began = time.process_time()
        work()
        return time.process_time() - began
    finally:
        gc.enable()


def is_linear(work: Callable[[int], object], small: int, times: int) -> bool:
    """Whether ``work(small * times)`` costs nearer to ``times`` as much as ``work(small)`` than to the square of that.

    The limit is half way between both (times ** 1.5); noise only ever adds, so the best of a few attempts counts.
    """
    work(small)
    least, most = [], []
    for _attempt in range(ATTEMPTS):
        least.append(seconds(lambda: work(small)))
        most.append(seconds(lambda: work(small * times)))
        if min(most) < max(min(least), 1e-5) * times**1.5:
            return True
    return False
