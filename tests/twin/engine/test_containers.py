"""The small data structures of the step loop against lists and sums."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from packer.arrays import Record
from packer.twin.engine import containers, waiting
from packer.twin.engine.state import ADAPTER, LINK, PLACED, SERVER

M = 12


@njit
def link_last(ring: Record, sentinel: int, i: int) -> None:
    """The kernel, called as kernels call it."""
    containers.link_last(ring, sentinel, i)


@njit
def unlink(ring: Record, i: int) -> None:
    """The kernel, called as kernels call it."""
    containers.unlink(ring, i)


@njit
def place(server: Record, adapters: Record, heaps: Record, a: int) -> None:
    """The kernel, called as kernels call it."""
    waiting.place(server, adapters, heaps, a)


@given(st.lists(st.tuples(st.integers(1, M), st.booleans(), st.booleans(), st.integers(-50, 50))))
@settings(deadline=None)
def test_heaps_hold_who_waits_with_the_smallest_key_first(
    changes: list[tuple[int, bool, bool, int]],
) -> None:
    """After any changes, adapters with waiting requests are in the heap of their kind, the first on top."""
    server, adapters = np.zeros(1, SERVER)[0], np.zeros(M + 1, ADAPTER)
    heaps = np.zeros((2, M), PLACED)
    for number, (a, waits, in_batch, key) in enumerate(changes):
        adapters[a].head, adapters[a].in_batch = waits, in_batch
        adapters[a].first_key = key * 1000 + number
        place(server, adapters, heaps, a)
        for heap, size, kind in zip(heaps, server.heap_sizes, (0, 1), strict=True):
            waiting_ones = (adapters["head"] > 0) & (adapters["in_batch"] == kind)
            members = np.flatnonzero(waiting_ones).tolist()
            assert sorted(heap["row"][:size].tolist()) == members
            assert all(adapters[b].heap == kind + 1 for b in members)
            assert not members or heap["row"][0] == min(members, key=adapters["first_key"].__getitem__)


@given(st.lists(st.integers(0, 9)))
@settings(deadline=None)
def test_ring_keeps_the_order_of_arrival(toggles: list[int]) -> None:
    """A ring around its sentinel lists its members in the order in which they were appended."""
    ring = np.zeros(11, LINK)
    ring[10] = 10, 10
    members: list[int] = []
    for i in toggles:
        if i in members:
            unlink(ring, i)
            members.remove(i)
        else:
            link_last(ring, 10, i)
            members.append(i)
        forward, backward, at, back = [], [], ring[10].after, ring[10].before
        while at != 10:
            forward.append(int(at))
            at = ring[at].after
        while back != 10:
            backward.append(int(back))
            back = ring[back].before
        assert forward == members == backward[::-1]
