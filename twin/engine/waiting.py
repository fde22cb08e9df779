"""The waiting requests: one FIFO per adapter, and two heaps of the adapters that have waiting requests.

vLLM keeps one deque (`Scheduler.waiting`) and passes over requests whose adapter finds no slot. The next request that
it would admit is the first request of an adapter in the batch or, while a slot is free, of any other adapter. Two
heaps, ordered by arrival, give this request without the walk. With `skipped_reversed`, the requests of an adapter are
not a FIFO but a tree (`engine.reversal`).

With `skipped_first`, requests that a walk has passed over come first, in the order in which walks came to them, then
preempted ones. Passed-over requests have keys below those of all others; `start` of an adapter's first request, if that
was passed over, is the last such request of the adapter. `ring` links all waiting requests in order, so that each is
visited once, when it is passed over: the `batch` of requests that do not run, around the row after the sentinel.

`trees`: None if no server has such trees; Numba then drops their code.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import Record
from packer.twin.engine.containers import link_last, sift, unlink
from packer.twin.engine.reversal import put_in, reverse_skipped, take_out
from packer.twin.engine.state import NO_LIMIT
from packer.twin.flags import CALLED, INLINED


@njit(**INLINED)
def place(server: Record, adapters: Record, heaps: Record, a: int) -> None:
    """Move adapter row `a` to the heap where it belongs after its FIFO or its membership of the batch changed."""
    adapter = adapters[a]
    belongs = 0
    if adapter.head > 0:
        belongs = 1 if adapter.in_batch == 0 else 2
    stands = adapter.heap
    if stands != 0 and stands != belongs:  # leave
        heap = heaps[stands - 1]
        size = server.heap_sizes[stands - 1] - 1
        server.heap_sizes[stands - 1] = size
        i = adapter.place
        if i < size:
            heap[i].row = heap[size].row
            sift(heap, size, adapters, i)
    if belongs != 0:
        if stands != belongs:  # join, at the end
            i = server.heap_sizes[belongs - 1]
            server.heap_sizes[belongs - 1] = i + 1
            heaps[belongs - 1, i].row = a
            adapter.place = i
        # An adapter that stays in its heap may have another first request.
        sift(heaps[belongs - 1], server.heap_sizes[belongs - 1], adapters, adapter.place)
    adapter.heap = belongs


@njit(**INLINED)
def put_last(
    server: Record, requests: Record, adapters: Record, heaps: Record, ring: Record, trees: Record | None, r: int
) -> None:
    """Put an arrived request behind all other waiting requests."""
    a = requests[r].owner + 1
    server.waiting += 1
    requests[r].next = 0
    if server.skipped_first == 1:
        link_last(ring, server.sentinel + 1, r)
    if trees is not None and server.skipped_reversed == 1:
        put_in(trees, adapters[a], r)
        place(server, adapters, heaps, a)
    elif adapters[a].head > 0:
        requests[adapters[a].tail - 1].next = r + 1
        adapters[a].tail = r + 1
    else:
        adapters[a].head = r + 1
        adapters[a].tail = r + 1
        adapters[a].first_key = requests[r].key
        place(server, adapters, heaps, a)


@njit(**INLINED)
def put_first(
    server: Record, requests: Record, adapters: Record, ring: Record, trees: Record | None, r: int, a: int
) -> None:
    """Put a preempted request before all others but those that count as passed over; the caller calls `place`."""
    server.waiting += 1
    server.waiting_prompt += requests[r].prompt
    server.front -= 1
    requests[r].key = server.front
    if trees is not None and server.skipped_reversed == 1:
        put_in(trees, adapters[a], r)
        return
    head, last = adapters[a].head, 0
    if server.skipped_first == 1:
        link_last(ring, ring[last_passed(server)].after, r)
        if head > 0 and requests[head - 1].key < server.front:
            last = requests[head - 1].start
    if last > 0:
        requests[r].next = requests[last - 1].next
        requests[last - 1].next = r + 1
    else:
        requests[r].next = head
        adapters[a].head = r + 1
        adapters[a].first_key = server.front
    if requests[r].next == 0:
        adapters[a].tail = r + 1


@njit(**INLINED)
def take_first(
    server: Record, requests: Record, adapters: Record, ring: Record, trees: Record | None, r: int, a: int
) -> None:
    """Remove the first waiting request of an adapter, which is admitted; the caller calls `place`."""
    server.waiting -= 1
    server.waiting_prompt -= requests[r].prompt
    if trees is not None and server.skipped_reversed == 1:
        take_out(trees, adapters[a])
        return
    if server.skipped_first == 1:
        if server.passed_last == r + 1:
            server.passed_last = 0 if ring[r].before == server.sentinel + 1 else ring[r].before + 1
        unlink(ring, r)
    following = requests[r].next
    adapters[a].head = following
    if following > 0:
        adapters[a].first_key = requests[following - 1].key
        if server.skipped_first == 1:
            requests[following - 1].start = requests[r].start


@njit(**INLINED)
def last_passed(server: Record) -> int:
    """Row in the ring of the last request that was passed over; without any, the row that heads the ring."""
    return int(server.passed_last - 1 if server.passed_last > 0 else server.sentinel + 1)


@njit(**CALLED)
def pass_over(server: Record, requests: Record, adapters: Record, heaps: Record, ring: Record, end_key: int) -> None:
    """Count the waiting requests with keys below `end_key` as passed over: each gets the next key of those."""
    r = ring[last_passed(server)].after
    while r != server.sentinel + 1 and requests[r].key < end_key:
        adapter = adapters[requests[r].owner + 1]
        server.passed_key += 1
        requests[r].key = server.passed_key - NO_LIMIT
        if adapter.head == r + 1:
            adapter.first_key = heaps[adapter.heap - 1, adapter.place].key = requests[r].key
        requests[adapter.head - 1].start = server.passed_last = r + 1
        r = ring[r].after


@njit(**INLINED)
def after_walk(
    server: Record, requests: Record, adapters: Record, heaps: Record, ring: Record, trees: Record | None, end_key: int
) -> None:
    """End a walk over the waiting requests before the one with `end_key`; NO_LIMIT: it passed all, - NO_LIMIT: none."""
    if trees is not None and server.skipped_reversed == 1:
        reverse_skipped(server, trees, adapters, heaps, end_key)
    elif server.skipped_first == 1:
        pass_over(server, requests, adapters, heaps, ring, end_key)
