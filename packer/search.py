"""Search for the smallest number that is enough."""

from __future__ import annotations

from collections.abc import Callable


def fewest(
    holds: Callable[[int], bool], low: int, high: int, stop: Callable[[], bool] = lambda: False
) -> int | None:
    """The smallest number from `low` to `high` that holds, in doubling steps and then by halving; None if none does.

    Numbers above one that holds are taken to hold. Once `stop` is true, the smallest that was found so far is given.
    """
    step, below, n = 1, low - 1, low
    while not holds(n):
        if n >= high or stop():
            return None
        below, n, step = n, min(high, n + step), 2 * step
    while n - below > 1 and not stop():
        middle = (n + below) // 2
        below, n = (below, middle) if holds(middle) else (middle, n)
    return n
