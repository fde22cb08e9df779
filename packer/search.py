"""Searches over whole numbers for the place where something begins or ends to hold."""

from __future__ import annotations

from collections.abc import Callable


def reach(
    holds: Callable[[int], bool], low: int, high: int, start: int | None = None, step: int = 1,
    stop: Callable[[], bool] = lambda: False, same: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """The largest number known to hold and the smallest known not to, from `low` to `high`: neighbours, unless `stop`
    ended the search after the first; low - 1 if none holds, high + 1 if all do.

    Outwards from `start` (None: from `low`) in steps (`step` 0: none) that double after each `same` of them, then by
    halving. Numbers below one that holds are taken to hold.
    """
    good, bad, n = low - 1, high + 1, low if start is None else min(max(start, low), high)
    taken = 0
    while bad - good > 1:
        if holds(n):
            good = n
        else:
            bad = n
        taken += 1
        if good < low and step:
            n = max(bad - step, low)
        elif bad > high and step:
            n = min(good + step, high)
        else:
            n = (good + bad) // 2
        step *= 1 if taken % same else 2
        if stop():
            break
    return good, bad


def fewest(
    holds: Callable[[int], bool], low: int, high: int, stop: Callable[[], bool] = lambda: False, same: int = 1
) -> int | None:
    """The smallest number from `low` to `high` that holds; None if none does.

    Numbers above one that holds are taken to hold. Steps double after each `same` of them. Once `stop` is true, the
    smallest that was found so far is given.
    """
    found = reach(lambda n: not holds(n), low, high, stop=stop, same=same)[1]
    return found if found <= high else None
