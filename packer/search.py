"""Searches over whole numbers for the threshold at which a condition begins or ceases to hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence


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


_DOUBLINGS = 4


def largest(
    fits: Callable[[Sequence[int]], Sequence[bool]], guess: int, limit: int, out_of_time: Callable[[], bool],
    step: int = 1, *, low: int = 0, batch: int = 1,
) -> int:  # fmt: skip
    """The largest n in ]low, limit] that fits; `low` (a number known to fit, or 0 for none) if there is none.

    Takes steps from the guess that double, up to the first number that is too large or down to the first that fits,
    then divides the interval. Numbers above one that is too large are taken to be too large. `fits` is called with
    ascending numbers: one, or about `batch`. Once the time is up, the first n that fits is returned; the guess falls
    by eighths.
    """
    high, n = limit + 1, min(guess, limit)
    doublings = _DOUBLINGS if batch > 1 else 1
    while low < high - 1 and not (low and out_of_time()):
        late, gap, bracketed = out_of_time(), high - low - 1, low > 0 and high <= limit
        if late:
            tried = [n]
        elif gap <= batch:
            tried = list(range(low + 1, high))
        elif bracketed:
            tried = [low + (gap + 1) * k // (batch + 1) for k in range(1, batch + 1)]
        else:
            steps = [step * (2**k - 1) for k in range(doublings)]
            tried = sorted({min(max(n + d, low + 1), high - 1) for each in steps for d in (-each, each)})
        found = dict(zip(tried, fits(tried), strict=True))
        # As in a search one by one from the guess: if the guess fits, smaller numbers that don't are ignored.
        start = tried[0] if bracketed else n
        low = max((size for size in tried if size <= start and found[size]), default=low)
        high = min((size for size in tried if size > low and not found[size]), default=high)
        low = max((size for size in tried if size < high and found[size]), default=low)
        step *= 2 ** (doublings - 1)
        n = n - max(1, n // 8) if late else low + step if low else high - step
        n = min(max(n, low + 1), high - 1)
        step *= 2
    return low
