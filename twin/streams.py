"""Streams of random numbers, each drawn once for all servers with the same seed."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np

from packer.arrays import FloatArray
from packer.arrival import Bursts
from packer.twin.bursts import integrated

MOST_KEPT = 2**16
"""So many requests of a server are kept at most: a search simulates it with several slots and rates."""


def generator(seed: int, stream: int) -> np.random.Generator:
    """Times, adapters and lengths each have their own stream, so that more of one does not change another."""
    return np.random.default_rng(np.random.SeedSequence([seed, 0x7061636B, stream]))


def drawn_numbers(seed: int, stream: int, distribution: str, n: int) -> FloatArray:
    """The first n numbers of a stream, float64 (n,), read-only: a search simulates many servers with the same seeds."""
    kept = kept_for(seed, stream)
    numbers = kept[0] if kept else np.zeros(0)
    if len(numbers) < n:
        longest = max(n, min(2 * len(numbers), MOST_KEPT))
        numbers = getattr(generator(seed, stream), distribution)(longest)
        numbers.setflags(write=False)
        if longest <= MOST_KEPT:
            kept[:] = (numbers,)
    return numbers[:n]


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
