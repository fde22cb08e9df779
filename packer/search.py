"""Searches over whole numbers for the threshold at which a condition begins or ceases to hold."""

from __future__ import annotations

from collections.abc import Callable


def reach(
    holds: Callable[[int], bool], low: int, high: int, start: int | None = None, step: int = 1,
    stop: Callable[[], bool] = lambda: False, same: int = 1, lost: int = 0,
) -> tuple[int, int]:  # fmt: skip
    """The largest number from `low` to `high` known to hold (low - 1: none), and the smallest known not to (high + 1:
    none). They are neighbours, unless `stop`, which is called after each evaluation, ended the search.

    The search moves away from `start` (None: `low`) in steps that double after each `same` steps, then bisects;
    `step` 0: only bisection. It assumes that all numbers below one that holds also hold. `lost`: after so many numbers
    that hold, `high` is tried before further steps; 0: never.
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
        elif bad > high and taken == lost:
            n = high
        elif step and (bad > high or (bad == high and taken > lost > 0 and good + step < bad)):
            n = min(good + step, high)
        else:
            n = (good + bad) // 2
        step *= 1 if taken % same else 2
        if stop():
            break
    return good, bad


def fewest(
    holds: Callable[[int], bool], low: int, high: int, stop: Callable[[], bool] = lambda: False, same: int = 1,
    start: int | None = None, lost: int = 0,
) -> int | None:  # fmt: skip
    """The smallest number from `low` to `high` that holds; None if none does. The search, from `start`, assumes that
    all numbers above one that holds also hold. Steps double after each `same` steps. `lost`: after so
    many numbers that do not hold, `high` is tried, and none holds if that does not; 0: never. If `stop` ends the
    search, the smallest number found so far is returned."""
    found = reach(lambda n: not holds(n), low, high, start, stop=stop, same=same, lost=lost)[1]
    return found if found <= high else None
