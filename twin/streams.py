"""Streams of random numbers, each drawn once for all servers with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from packer.arrays import FloatArray
from packer.arrival import Bursts
from packer.twin.bursts import integrated

Numbers = TypeVar("Numbers", bound=npt.NDArray[Any])
MOST_KEPT = 2**16  # Most requests of a server whose numbers are kept, for searches over slots and rates.


def generator(seed: int, stream: int) -> np.random.Generator:
    """Return the generator of a stream: each kind of number has its own, so more of one does not change another."""
    return np.random.default_rng(np.random.SeedSequence([seed, 0x7061636B, stream]))


def drawn_numbers(seed: int, stream: int, distribution: str, n: int) -> FloatArray:
    """The first n numbers of a stream, float64 (n,), read-only: a search simulates many servers with the same seeds."""

    def draw(most: int) -> FloatArray:
        numbers: FloatArray = getattr(generator(seed, stream), distribution)(most)
        return numbers

    return first_of(kept_for(seed, stream), n, draw)


def first_of(kept: list[Any], n: int, draw: Callable[[int], Numbers], *alive: object) -> Numbers:
    """Return the first n numbers of a stream, (n,), read-only; those drawn before are reused if they suffice. `draw`:
    draws the first numbers, as many as are asked for. `alive`: the objects whose ids are in the key of `kept`."""
    numbers: Any = kept[0][0] if kept else None
    if numbers is None or len(numbers) < n:
        before = 0 if numbers is None else len(numbers)
        # Twice as many as before, so that slowly growing numbers of requests are not drawn each time.
        numbers = draw(max(n, min(2 * before, MOST_KEPT)))
        numbers.setflags(write=False)
        if len(numbers) <= MOST_KEPT:
            kept[:] = ((numbers, *alive),)
    first: Numbers = numbers[:n]
    return first


@lru_cache(maxsize=128)
def kept_for(*_key: object) -> list[Any]:
    """Return the place for what was drawn last with this key, with the objects of its ids; threads replace it whole."""
    return []


@lru_cache(maxsize=16)
def common_clock(seed: int, bursts: Bursts, duration_s: float) -> tuple[FloatArray, FloatArray]:
    """Return the clock of the bursts that all adapters share: the same for all servers of a fleet."""
    return integrated(generator(seed, 4), bursts, duration_s)
