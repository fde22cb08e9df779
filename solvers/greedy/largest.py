"""Find the largest number that holds, in few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
