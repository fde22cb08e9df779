"""Rings and heaps inside the arrays of a server, compiled by Numba.

A ring is doubly linked around a sentinel, rows of `engine.state.LINK`: a field of the records that it links. A heap
holds rows of the adapters, that with the smallest key first; each row says where in the heap it stands.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import IntArray, Record
from packer.twin.flags import CALLED, INLINED


@njit(**INLINED)
def link_last(ring: Record, sentinel: int, i: int) -> None:
    """Append row `i` to the ring around `sentinel`."""
    last = ring[sentinel].before
    ring[i].before = last
    ring[i].after = sentinel
    ring[last].after = i
    ring[sentinel].before = i


@njit(**INLINED)
def unlink(ring: Record, i: int) -> None:
    """Take row `i` out of its ring."""
    before, after = ring[i].before, ring[i].after
    ring[before].after = after
    ring[after].before = before


@njit(**CALLED)
def sift(heap: IntArray, size: int, adapters: Record, i: int) -> None:
    """Restore the order after position `i` received another row or another key."""
    a = heap[i]
    key = adapters[a].first_key
    while i > 0:
        parent = (i - 1) >> 1
        b = heap[parent]
        if adapters[b].first_key <= key:
            break
        heap[i] = b
        adapters[b].place = i
        i = parent
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and adapters[heap[child + 1]].first_key < adapters[heap[child]].first_key:
            child += 1
        b = heap[child]
        if key <= adapters[b].first_key:
            break
        heap[i] = b
        adapters[b].place = i
        i = child
    heap[i] = a
    adapters[a].place = i
