"""Small data structures of the step loop: a heap of adapters, a counter of waiting requests, linked rings."""

from __future__ import annotations

from numba import njit

HEAP_FLAGS = {"cache": True, "nogil": True, "boundscheck": False}
"""Numba flags of every kernel of the twin, named once."""


@njit(**HEAP_FLAGS)
def _up(heap, place, key, i):
    a = heap[i]
    while i > 0:
        parent = (i - 1) >> 1
        b = heap[parent]
        if key[b] <= key[a]:
            break
        heap[i] = b
        place[b] = i
        i = parent
    heap[i] = a
    place[a] = i


@njit(**HEAP_FLAGS)
def _down(heap, size, place, key, i):
    a = heap[i]
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        b = heap[child]
        if key[a] <= key[b]:
            break
        heap[i] = b
        place[b] = i
        i = child
    heap[i] = a
    place[a] = i


@njit(**HEAP_FLAGS)
def heap_push(heap, size, place, key, a):
    """Add adapter `a` to a heap ordered by `key[a]`; returns the new size."""
    heap[size] = a
    _up(heap, place, key, size)
    return size + 1


@njit(**HEAP_FLAGS)
def heap_update(heap, size, place, key, i):
    """Restore the order after the key of the adapter at position `i` changed."""
    a = heap[i]
    _up(heap, place, key, i)
    _down(heap, size, place, key, place[a])


@njit(**HEAP_FLAGS)
def heap_pop(heap, size, place, key, i):
    """Remove the adapter at position `i`; returns the new size."""
    size -= 1
    place[heap[i]] = -1
    if i < size:
        heap[i] = heap[size]
        place[heap[i]] = i
        heap_update(heap, size, place, key, i)
    return size


@njit(**HEAP_FLAGS)
def fenwick_add(tree, i, change):
    """Add `change` at index `i` (from 0) of a Fenwick tree."""
    i += 1
    while i < tree.size:
        tree[i] += change
        i += i & -i


@njit(**HEAP_FLAGS)
def count_before(tree, i):
    """Sum of a Fenwick tree over the indices below `i`."""
    total = 0
    while i > 0:
        total += tree[i]
        i -= i & -i
    return total


@njit(**HEAP_FLAGS)
def link_last(before, after, sentinel, i):
    """Append `i` to the doubly linked ring around `sentinel`."""
    last = before[sentinel]
    before[i] = last
    after[i] = sentinel
    after[last] = i
    before[sentinel] = i


@njit(**HEAP_FLAGS)
def unlink(before, after, i):
    """Take `i` out of its doubly linked ring."""
    p, q = before[i], after[i]
    after[p] = q
    before[q] = p
