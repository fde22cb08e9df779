"""The waiting requests: one FIFO per adapter, and two heaps of the adapters that have waiting requests.

vLLM keeps one deque (`Scheduler.waiting`) and passes over requests whose adapter finds no slot. The next request that
it would admit is the first request of an adapter in the batch or, while a slot is free, of any other adapter. Two
heaps, ordered by arrival, give this request without the walk. With `skipped_reversed`, the requests of an adapter are
not a FIFO but a tree (`engine.reversal`).

`trees`: None if no server has such trees; Numba then drops their code.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import Record
from packer.twin.engine.containers import sift
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
def put_last(server: Record, requests: Record, adapters: Record, heaps: Record, trees: Record | None, r: int) -> None:
    """Put an arrived request behind all other waiting requests."""
    a = requests[r].owner + 1
    server.waiting += 1
    requests[r].next = 0
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
def put_first(server: Record, requests: Record, adapters: Record, trees: Record | None, r: int, a: int) -> None:
    """Put a preempted request before all waiting requests; the caller calls `place`."""
    server.waiting += 1
    server.waiting_prompt += requests[r].prompt
    server.front -= 1
    requests[r].key = server.front
    if trees is not None and server.skipped_reversed == 1:
        put_in(trees, adapters[a], r)
        return
    requests[r].next = adapters[a].head
    if adapters[a].head == 0:
        adapters[a].tail = r + 1
    adapters[a].head = r + 1
    adapters[a].first_key = requests[r].key


@njit(**INLINED)
def take_first(server: Record, requests: Record, adapters: Record, trees: Record | None, r: int, a: int) -> None:
    """Remove the first waiting request of an adapter, which is admitted; the caller calls `place`."""
    server.waiting -= 1
    server.waiting_prompt -= requests[r].prompt
    if trees is not None and server.skipped_reversed == 1:
        take_out(trees, adapters[a])
        return
    adapters[a].head = requests[r].next
    if requests[r].next > 0:
        adapters[a].first_key = requests[requests[r].next - 1].key


@njit(**CALLED)
def put_behind_skipped(server: Record, requests: Record, adapters: Record, heaps: Record, r: int, a: int) -> None:
    """Put a preempted request before all requests that no walk has passed over yet; the caller calls `place`."""
    key = server.passed_key
    for k in range(2):
        for i in range(server.heap_sizes[k]):  # keys before it decrease by one: their order stays
            e = heaps[k, i].row
            number = adapters[e].head
            while number > 0 and requests[number - 1].key < key:
                requests[number - 1].key -= 1
                number = requests[number - 1].next
            adapters[e].first_key = heaps[k, i].key = requests[adapters[e].head - 1].key
    server.waiting += 1
    server.waiting_prompt += requests[r].prompt
    server.passed_key = requests[r].key = key - 1
    before, number = 0, adapters[a].head
    while number > 0 and requests[number - 1].key < key - 1:
        before, number = number, requests[number - 1].next
    requests[r].next = number
    if number == 0:
        adapters[a].tail = r + 1
    if before == 0:
        adapters[a].head, adapters[a].first_key = r + 1, key - 1
    else:
        requests[before - 1].next = r + 1


@njit(**INLINED)
def after_walk(
    server: Record, requests: Record, adapters: Record, heaps: Record, trees: Record | None, end_key: int
) -> None:
    """End a walk over the waiting requests before the one with `end_key`; NO_LIMIT: it passed all, - NO_LIMIT: none."""
    if trees is not None and server.skipped_reversed == 1:
        reverse_skipped(server, trees, adapters, heaps, end_key)
    elif server.skipped_first == 1:
        if end_key == NO_LIMIT:
            # The walk passed all requests of the engine: the next one to come has this key.
            end_key = server.taken if server.pending == 0 else requests[server.pending - 1].key
        server.passed_key = max(server.passed_key, end_key)
