"""The small data structures of the step loop against lists and sums."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from packer.arrays import IntArray
from packer.twin.engine import containers, waiting
from packer.twin.engine.state import FIRST_KEY, HEAD, HEAP, HEAP_ACTIVE, HEAP_IDLE, IN_BATCH, N_INTS

M = 12


@njit
def link_last(ring: IntArray, k: int, sentinel: int, i: int) -> None:
    """The kernel, called as kernels call it."""
    containers.link_last(ring, k, sentinel, i)


@njit
def unlink(ring: IntArray, k: int, i: int) -> None:
    """The kernel, called as kernels call it."""
    containers.unlink(ring, k, i)


@njit
def place(ints: IntArray, adapters: IntArray, heaps: IntArray, a: int) -> None:
    """The kernel, called as kernels call it."""
    waiting.place(ints, adapters, heaps, a)


@given(st.lists(st.tuples(st.integers(1, M), st.booleans(), st.booleans(), st.integers(-50, 50))))
@settings(deadline=None)
def test_heaps_hold_who_waits_with_the_smallest_key_first(
    changes: list[tuple[int, bool, bool, int]],
) -> None:
    """After any changes, adapters with waiting requests are in the heap of their kind, the first on top."""
    ints, adapters = np.zeros(N_INTS, np.int64), np.zeros((M + 1, 13), np.int64)
    heaps = np.zeros((2, M), np.int64)
    for number, (a, waits, in_batch, key) in enumerate(changes):
        adapters[a, HEAD], adapters[a, IN_BATCH] = waits, in_batch
        adapters[a, FIRST_KEY] = key * 1000 + number
        place(ints, adapters, heaps, a)
        for heap, size, kind in ((heaps[0], ints[HEAP_IDLE], 0), (heaps[1], ints[HEAP_ACTIVE], 1)):
            members = [b for b in range(1, M + 1) if adapters[b, HEAD] > 0 and adapters[b, IN_BATCH] == kind]
            assert sorted(heap[:size].tolist()) == members
            assert all(adapters[b, HEAP] == kind + 1 for b in members)
            assert not members or heap[0] == min(members, key=lambda b: adapters[b, FIRST_KEY])


@given(st.lists(st.integers(0, 9)))
@settings(deadline=None)
def test_ring_keeps_the_order_of_arrival(toggles: list[int]) -> None:
    """A ring around its sentinel lists its members in the order in which they were appended."""
    ring = np.full((11, 4), 10, np.int64)
    members: list[int] = []
    for i in toggles:
        if i in members:
            unlink(ring, 2, i)
            members.remove(i)
        else:
            link_last(ring, 2, 10, i)
            members.append(i)
        forward, backward, at, back = [], [], ring[10, 3], ring[10, 2]
        while at != 10:
            forward.append(int(at))
            at = ring[at, 3]
        while back != 10:
            backward.append(int(back))
            back = ring[back, 2]
        assert forward == members == backward[::-1]
