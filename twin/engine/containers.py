"""Rings, heaps and a counter inside the arrays of a server, compiled by Numba.

A ring is doubly linked around a sentinel: column `k` of a row holds the row before it, column `k + 1` the row
after it. A heap holds rows of the adapters, that with the smallest key first; each row says where in the heap
it stands.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import IntArray
from packer.twin.engine.state import FIRST_KEY, PLACE
from packer.twin.flags import CALLED, INLINED


@njit(**INLINED)
def link_last(ring: IntArray, k: int, sentinel: int, i: int) -> None:
    """Append row `i` to the ring around `sentinel`."""
    last = ring[sentinel, k]
    ring[i, k] = last
    ring[i, k + 1] = sentinel
    ring[last, k + 1] = i
    ring[sentinel, k] = i


@njit(**INLINED)
def unlink(ring: IntArray, k: int, i: int) -> None:
    """Take row `i` out of its ring."""
    before, after = ring[i, k], ring[i, k + 1]
    ring[before, k + 1] = after
    ring[after, k] = before


@njit(**CALLED)
def sift(heap: IntArray, size: int, adapters: IntArray, i: int) -> None:
    """Restore the order after position `i` received another row or another key."""
    a = heap[i]
    key = adapters[a, FIRST_KEY]
    while i > 0:
        parent = (i - 1) >> 1
        b = heap[parent]
        if adapters[b, FIRST_KEY] <= key:
            break
        heap[i] = b
        adapters[b, PLACE] = i
        i = parent
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and adapters[heap[child + 1], FIRST_KEY] < adapters[heap[child], FIRST_KEY]:
            child += 1
        b = heap[child]
        if key <= adapters[b, FIRST_KEY]:
            break
        heap[i] = b
        adapters[b, PLACE] = i
        i = child
    heap[i] = a
    adapters[a, PLACE] = i
