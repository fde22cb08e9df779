"""Finding the largest bin with few questions."""

from __future__ import annotations

from collections.abc import Callable

from packer.bin import Bin


def largest(
    feasible: Callable[[int], Bin | None], guess: int, limit: int, hurry: Callable[[], bool]
) -> Bin | None:
    """Bin of the largest feasible n in [1, limit], None if there is none.

    Doubles its steps away from the guess, then bisects: what is too large is taken to be too large with more
    as well. In a hurry it settles for the first feasible n, halving the guess.
    """
    low, best, high = 0, None, limit + 1
    n, step = guess, max(1, guess // 16)
    bracketed = False
    while low < n < high:
        found = feasible(n)
        up = found is not None
        bracketed = bracketed or (low > 0 if not up else high <= limit)
        if found is not None:
            low, best = n, found
            if hurry():
                break
        else:
            high = n
        if hurry() and not up:
            n //= 2
        elif bracketed:
            n = (low + high) // 2
        else:
            n = min(low + step, high - 1) if up else max(high - step, low + 1)
        step *= 2
    return best
