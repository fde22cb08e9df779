"""Streams of random numbers, each drawn once for all servers with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from packer.arrays import FloatArray
from packer.arrival import Bursts
from packer.twin.bursts import integrated

Numbers = TypeVar("Numbers", bound=npt.NDArray[Any])
MOST_KEPT = 2**16
"""So many requests of a server are kept at most: a search simulates it with several slots and rates."""


def generator(seed: int, stream: int) -> np.random.Generator:
    """Times, adapters and lengths each have their own stream, so that more of one does not change another."""
    return np.random.default_rng(np.random.SeedSequence([seed, 0x7061636B, stream]))


def drawn_numbers(seed: int, stream: int, distribution: str, n: int) -> FloatArray:
    """The first n numbers of a stream, float64 (n,), read-only: a search simulates many servers with the same seeds."""

    def draw(most: int) -> FloatArray:
        numbers: FloatArray = getattr(generator(seed, stream), distribution)(most)
        return numbers

    return first_of(kept_for(seed, stream), n, draw)


def first_of(kept: list[Any], n: int, draw: Callable[[int], Numbers], *alive: object) -> Numbers:
    """The first n of what is drawn, (n,), read-only; what was drawn before is taken where it is enough.

    `draw`: the first numbers, as many as are asked for. `alive`: what the ids of the key of `kept` belong to.
    """
    numbers: Any = kept[0][0] if kept else None
    if numbers is None or len(numbers) < n:
        before = 0 if numbers is None else len(numbers)
        numbers = draw(max(n, min(2 * before, MOST_KEPT)))
        numbers.setflags(write=False)
        if len(numbers) <= MOST_KEPT:
            kept[:] = ((numbers, *alive),)
    first: Numbers = numbers[:n]
    return first


@lru_cache(maxsize=64)
def kept_for(*_key: object) -> list[Any]:
    """A place for what was drawn last, which threads replace whole, and what the ids of its key belong to."""
    return []


@lru_cache(maxsize=4)
def _place(*_key: object) -> tuple[Lock, list[Any]]:
    """A place for what takes long to draw, and a lock so that one thread draws it and others wait."""
    return Lock(), []


def common_clock(seed: int, bursts: Bursts, duration_s: float) -> tuple[FloatArray, FloatArray]:
    """The clock of the bursts that all adapters share: the same for all servers of a fleet."""
    lock, kept = _place(seed, bursts, duration_s)
    with lock:
        if not kept:
            kept.append(integrated(generator(seed, 4), bursts, duration_s))
    clock: tuple[FloatArray, FloatArray] = kept[0]
    return clock
