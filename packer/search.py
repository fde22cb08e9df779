"""Searches over whole numbers for the place where something begins or ends to hold."""

from __future__ import annotations

from collections.abc import Callable


def reach(
    holds: Callable[[int], bool], low: int, high: int, start: int | None = None, step: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[int, int]:  # fmt: skip
    """The largest number known to hold and the smallest known not to, from `low` to `high`: neighbours, unless `stop`
    ended the search after the first; low - 1 if none holds, high + 1 if all do.

    Outwards from `start` (None: from `low`) in steps that double (0: none), then by halving. Numbers below one
    that holds are taken to hold.
    """
    good, bad, n = low - 1, high + 1, low if start is None else min(max(start, low), high)
    while bad - good > 1:
        if holds(n):
            good = n
        else:
            bad = n
        if good < low and step:
            n, step = max(bad - step, low), 2 * step
        elif bad > high and step:
            n, step = min(good + step, high), 2 * step
        else:
            n = (good + bad) // 2
        if stop():
            break
    return good, bad


def fewest(
    holds: Callable[[int], bool], low: int, high: int, stop: Callable[[], bool] = lambda: False
) -> int | None:
    """The smallest number from `low` to `high` that holds; None if none does.

    Numbers above one that holds are taken to hold. Once `stop` is true, the smallest that was found so far is given.
    """
    found = reach(lambda n: not holds(n), low, high, stop=stop)[1]
    return found if found <= high else None
