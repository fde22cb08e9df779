"""What the step loop works on: the arrays, the names of their columns, and small data structures.

The data structures are a heap of adapters, a counter of waiting requests, and linked rings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.profile import LINEAR_TERMS

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FLAGS: dict[str, Any] = {"cache": True, "nogil": True, "boundscheck": False}
"""Numba flags of every kernel of the twin, named once."""

HISTOGRAM_BINS = 2400
HISTOGRAM_FLOOR_MS = 0.01
HISTOGRAM_PER_E = 140.0  # bins per factor e: a resolution of 0.7 %

# Columns of the requests: adapter, lengths, tokens that came out, step in which the last prefill ended,
# tokens of that prefill, place in the order of waiting requests, the one behind it in its adapter's FIFO.
(OWNER, PROMPT, OUTPUT, GENERATED, START, CONTEXT, KEY, NEXT) = range(8)
# Columns of the times, s: first token, finish (NaN until they happen), last token before a preemption, sent.
(FIRST, FINISH, LAST, SENT_AT) = range(4)
# Columns of the timeline: integrals over each bin, except the last three, which are counts.
(T_BUSY, T_RUNNING, T_WAITING, T_KV, T_ADAPTERS, T_PREFILL, T_DECODE, T_PREEMPTED) = range(8)
# The totals. TAKEN: requests accepted; EXHAUSTED: 1 if there were fewer marks than requests to accept.
(STEPS, PREEMPTIONS, ADAPTER_LOADS, DISK_LOADS, REFUSED, SENT, BUSY_S, LOAD_S, PEAK_BLOCKS, PEAK_RUNNING,
 TAKEN, LEFT_RUNNING, LEFT_WAITING, EXHAUSTED) = range(14)  # fmt: skip


class State(NamedTuple):
    """Arrays that the kernel works in, in the order of its arguments.

    `times` (n, 4) and `requests` (n, 8) hold the accepted requests in order of arrival; `finished` int8 (n,)
    is 1 for those that got all their tokens. `links` (2, n + 1) and `due` (2, n + ring) are doubly linked
    rings around sentinels: running requests by admission, and for each of the coming steps the requests that
    finish in it. `adapters` (7, m) and `adapter_links` (5, m + 1): what is known of each adapter, among it
    the ring of resident adapters outside the batch by last use. `refused` (m,): refused requests of each
    adapter, where it is known.
    """

    times: FloatArray
    requests: IntArray
    finished: npt.NDArray[np.int8]
    refused: IntArray
    links: IntArray
    due: IntArray
    adapters: IntArray
    adapter_links: IntArray
    phase: IntArray
    tree: IntArray
    totals: FloatArray
    histogram: IntArray
    timeline: FloatArray
    means: FloatArray


def new_state(
    n: int,
    m: int,
    longest_output: int,
    block_size: int,
    bins: int,
    *,
    count_waiting: bool,
    mean_state: bool = False,
) -> State:
    """Arrays for up to n requests of m adapters.

    `count_waiting`: the step law needs the number of requests passed over. `mean_state`: sum up the state
    that tokens see (`kernel_law.add_means`). The arrays are made here because making them in the kernel
    doubles its compilation time. Rows of requests are written when a request is accepted: memory that no
    request reaches is never touched.
    """
    links = np.empty((2, n + 1), dtype=np.int64)
    links[:, n] = n
    due = np.empty((2, n + longest_output + 2), dtype=np.int64)
    due[:, n:] = np.arange(n, due.shape[1])
    adapter_links = np.full((5, m + 1), -1, dtype=np.int64)
    adapter_links[3:, m] = m
    return State(
        times=np.empty((n, 4)),
        requests=np.empty((n, 8), dtype=np.int64),
        finished=np.zeros(n, dtype=np.int8),
        refused=np.zeros(m, dtype=np.int64),
        links=links,
        due=due,
        adapters=np.zeros((7, m), dtype=np.int64),
        adapter_links=adapter_links,
        phase=np.zeros(block_size, dtype=np.int64),
        tree=np.zeros(n + 1 if count_waiting else 1, dtype=np.int64),
        totals=np.zeros(14),
        histogram=np.zeros(HISTOGRAM_BINS, dtype=np.int64),
        timeline=np.zeros((bins, 8)),
        means=np.zeros(len(LINEAR_TERMS) + 2 if mean_state else 0),
    )


@njit(**FLAGS)
def _up(heap: IntArray, place: IntArray, key: IntArray, i: int) -> None:
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


@njit(**FLAGS)
def _down(heap: IntArray, size: int, place: IntArray, key: IntArray, i: int) -> None:
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


@njit(**FLAGS)
def heap_push(heap: IntArray, size: int, place: IntArray, key: IntArray, a: int) -> int:
    """Add adapter `a` to a heap ordered by `key[a]`; returns the new size."""
    heap[size] = a
    _up(heap, place, key, size)
    return size + 1


@njit(**FLAGS)
def heap_update(heap: IntArray, size: int, place: IntArray, key: IntArray, i: int) -> None:
    """Restore the order after the key of the adapter at position `i` changed."""
    a = heap[i]
    _up(heap, place, key, i)
    _down(heap, size, place, key, place[a])


@njit(**FLAGS)
def heap_pop(heap: IntArray, size: int, place: IntArray, key: IntArray, i: int) -> int:
    """Remove the adapter at position `i`; returns the new size."""
    size -= 1
    place[heap[i]] = -1
    if i < size:
        heap[i] = heap[size]
        place[heap[i]] = i
        heap_update(heap, size, place, key, i)
    return size


@njit(**FLAGS)
def fenwick_add(tree: IntArray, i: int, change: int) -> None:
    """Add `change` at index `i` (from 0) of a Fenwick tree."""
    i += 1
    while i < tree.size:
        tree[i] += change
        i += i & -i


@njit(**FLAGS)
def count_before(tree: IntArray, i: int) -> int:
    """Sum of a Fenwick tree over the indices below `i`."""
    total = 0
    while i > 0:
        total += tree[i]
        i -= i & -i
    return total


@njit(**FLAGS)
def link_last(before: IntArray, after: IntArray, sentinel: int, i: int) -> None:
    """Append `i` to the doubly linked ring around `sentinel`."""
    last = before[sentinel]
    before[i] = last
    after[i] = sentinel
    after[last] = i
    before[sentinel] = i


@njit(**FLAGS)
def unlink(before: IntArray, after: IntArray, i: int) -> None:
    """Take `i` out of its doubly linked ring."""
    p, q = before[i], after[i]
    after[p] = q
    before[q] = p
