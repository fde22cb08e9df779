"""Finding the largest bin with few questions."""

from __future__ import annotations

from collections.abc import Callable

from packer.bin import Bin


def largest(
    feasible: Callable[[int, bool], Bin | None],
    guess: int,
    limit: int,
    out_of_time: Callable[[], bool],
    step: int = 1,
) -> Bin | None:
    """Bin of the largest feasible n in [1, limit], None if there is none.

    Doubles its steps away from the guess, then bisects: what is too large is taken to be too large with more
    as well. `feasible` is called with (n, thorough); before the search ends, the next larger n is evaluated
    thoroughly. out of time it settles for the first feasible n, lowering the guess by an eighth at a time.
    """
    low, best, high = 0, None, limit + 1
    n, bracketed = min(guess, limit), False
    while low < high - 1:
        if out_of_time() and best is not None:
            break
        found = feasible(n, high - low == 2)
        if found is not None:
            bracketed = bracketed or high <= limit
            low, best = n, found
        else:
            bracketed = bracketed or low > 0
            high = n
        if out_of_time() and found is None:
            n -= max(1, n // 8)
        elif bracketed:
            n = (low + high) // 2
        else:
            n = min(low + step, high - 1) if found is not None else max(high - step, low + 1)
        step *= 2
    return best
