"""Rings and heaps inside the arrays of a server, compiled by Numba.

A ring is a doubly linked list around a sentinel; its links (`engine.state.LINK`) are fields of the records that it
links. A heap holds rows of adapters with their keys (`engine.state.PLACED`), the smallest key first. The field `place`
of an adapter is its position in its heap.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import Record
from packer.twin.flags import CALLED, INLINED


@njit(**INLINED)
def link_last(ring: Record, sentinel: int, i: int) -> None:
    """Append row `i` to the ring around `sentinel`; before any other row in place of `sentinel`."""
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


@njit(**INLINED)
def put(heap: Record, adapters: Record, i: int, a: int, key: int) -> None:
    """Put adapter row `a` with this key at position `i` of the heap."""
    heap[i].row, heap[i].key = a, key
    adapters[a].place = i


@njit(**CALLED)
def sift(heap: Record, size: int, adapters: Record, i: int) -> None:
    """Restore the order after position `i` received another row or another key."""
    a = heap[i].row
    key = adapters[a].first_key
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent].key <= key:
            break
        put(heap, adapters, i, heap[parent].row, heap[parent].key)
        i = parent
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1].key < heap[child].key:
            child += 1
        if key <= heap[child].key:
            break
        put(heap, adapters, i, heap[child].row, heap[child].key)
        i = child
    put(heap, adapters, i, a, key)
