"""The waiting requests: one FIFO per adapter, and the adapters that have one in two heaps.

vLLM keeps one deque (`Scheduler.waiting`) and walks over requests whose adapter finds no slot. The first request
that it would admit is the first of an adapter in the batch or, while a slot is free, the first of any other: two
heaps by the order of arrival give it without the walk.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import IntArray
from packer.twin.engine.containers import sift
from packer.twin.engine.state import (
    ACTIVE, FIRST_KEY, FRONT, HEAD, HEAP, HEAP_IDLE, IN_BATCH, KEY, NEXT, NO_LIMIT, PASSED_KEY, PENDING,
    PLACE, PROMPT, SKIPPED_FIRST, SKIPPED_REVERSED, SLOTS, TAIL, TAKEN, WAITING, WAITING_PROMPT,
)  # fmt: skip
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED


@njit(**INLINED)
def place(ints: IntArray, adapters: IntArray, heaps: IntArray, a: int) -> None:
    """Put adapter row `a` where it belongs after its FIFO or its part in the batch changed."""
    belongs = 0
    if adapters[a, HEAD] > 0:
        belongs = 1 if adapters[a, IN_BATCH] == 0 else 2
    stands = adapters[a, HEAP]
    if stands != 0 and stands != belongs:  # leave
        heap = heaps[stands - 1]
        size = ints[HEAP_IDLE + stands - 1] - 1
        ints[HEAP_IDLE + stands - 1] = size
        i = adapters[a, PLACE]
        if i < size:
            heap[i] = heap[size]
            sift(heap, size, adapters, i)
    if belongs != 0:
        if stands != belongs:  # join, at the end
            i = ints[HEAP_IDLE + belongs - 1]
            ints[HEAP_IDLE + belongs - 1] = i + 1
            heaps[belongs - 1, i] = a
            adapters[a, PLACE] = i
        sift(heaps[belongs - 1], ints[HEAP_IDLE + belongs - 1], adapters, adapters[a, PLACE])
    adapters[a, HEAP] = belongs


@njit(inline="always", **ENGINE_FLAGS)
def put_last(
    ints: IntArray, requests: IntArray, adapters: IntArray, heaps: IntArray, r: int, a: int,
) -> None:  # fmt: skip
    """An arrived request waits behind all others."""
    ints[WAITING] += 1
    requests[r, NEXT] = 0
    if adapters[a, HEAD] > 0:
        requests[adapters[a, TAIL] - 1, NEXT] = r + 1
        adapters[a, TAIL] = r + 1
    else:
        adapters[a, HEAD] = r + 1
        adapters[a, TAIL] = r + 1
        adapters[a, FIRST_KEY] = requests[r, KEY]
        place(ints, adapters, heaps, a)


@njit(inline="always", **ENGINE_FLAGS)
def put_first(ints: IntArray, requests: IntArray, adapters: IntArray, r: int, a: int) -> None:
    """A preempted request waits before all others; the caller places its adapter."""
    ints[WAITING] += 1
    ints[WAITING_PROMPT] += requests[r, PROMPT]
    ints[FRONT] -= 1
    requests[r, KEY] = ints[FRONT]
    requests[r, NEXT] = adapters[a, HEAD]
    if adapters[a, HEAD] == 0:
        adapters[a, TAIL] = r + 1
    adapters[a, HEAD] = r + 1
    adapters[a, FIRST_KEY] = requests[r, KEY]


@njit(inline="always", **ENGINE_FLAGS)
def take_first(ints: IntArray, requests: IntArray, adapters: IntArray, r: int, a: int) -> None:
    """The first request of an adapter is admitted; the caller places its adapter."""
    ints[WAITING] -= 1
    ints[WAITING_PROMPT] -= requests[r, PROMPT]
    adapters[a, HEAD] = requests[r, NEXT]
    if requests[r, NEXT] > 0:
        adapters[a, FIRST_KEY] = requests[requests[r, NEXT] - 1, KEY]


@njit(**CALLED)
def put_behind_skipped(
    ints: IntArray, requests: IntArray, adapters: IntArray, heaps: IntArray, r: int, a: int
) -> None:
    """A preempted request waits before all that no walk has passed over yet; the caller places its adapter."""
    key = ints[PASSED_KEY]
    for k in range(2):
        for i in range(ints[HEAP_IDLE + k]):  # those before give way by one: their order stays
            e = heaps[k, i]
            number = adapters[e, HEAD]
            while number > 0 and requests[number - 1, KEY] < key:
                requests[number - 1, KEY] -= 1
                number = requests[number - 1, NEXT]
            adapters[e, FIRST_KEY] = requests[adapters[e, HEAD] - 1, KEY]
    ints[WAITING] += 1
    ints[WAITING_PROMPT] += requests[r, PROMPT]
    ints[PASSED_KEY] = requests[r, KEY] = key - 1
    before, number = 0, adapters[a, HEAD]
    while number > 0 and requests[number - 1, KEY] < key - 1:
        before, number = number, requests[number - 1, NEXT]
    requests[r, NEXT] = number
    if number == 0:
        adapters[a, TAIL] = r + 1
    if before == 0:
        adapters[a, HEAD], adapters[a, FIRST_KEY] = r + 1, key - 1
    else:
        requests[before - 1, NEXT] = r + 1


@njit(**CALLED)
def reverse_skipped(
    ints: IntArray, requests: IntArray, adapters: IntArray, heaps: IntArray, end_key: int
) -> None:
    """The requests with keys below `end_key` that found no slot wait before all others, in reverse order.

    They are the first ones of adapters outside the batch (`FCFSRequestQueue.prepend_requests` of vLLM 0.10 to 0.13).
    """
    if ints[ACTIVE] < ints[SLOTS] or ints[HEAP_IDLE] == 0:
        return
    idle, size = heaps[0], ints[HEAP_IDLE]
    low = adapters[idle[0], FIRST_KEY]
    if low >= end_key:
        return
    high = low  # nobody else that waits has a key between these two: it would have been admitted
    for i in range(size):
        number = adapters[idle[i], HEAD]
        while number > 0 and requests[number - 1, KEY] < end_key:
            high = max(high, requests[number - 1, KEY])
            number = requests[number - 1, NEXT]
    for i in range(size):
        a = idle[i]
        if adapters[a, FIRST_KEY] >= end_key:
            continue
        first = last = adapters[a, HEAD]  # `last` comes to the end of those that turn round
        before, number = 0, first
        while number > 0 and requests[number - 1, KEY] < end_key:
            r = number - 1
            requests[r, KEY] = low + high - requests[r, KEY]
            number, requests[r, NEXT], before = requests[r, NEXT], before, number
        requests[last - 1, NEXT] = number
        if number == 0:
            adapters[a, TAIL] = last
        adapters[a, HEAD] = before
        adapters[a, FIRST_KEY] = requests[before - 1, KEY]
    for i in range(size):  # all keys changed: a heap of the first ones, then of one more each
        adapters[idle[i], PLACE] = i
        sift(idle, i + 1, adapters, i)


@njit(**INLINED)
def after_walk(ints: IntArray, requests: IntArray, adapters: IntArray, heaps: IntArray, end_key: int) -> None:
    """A walk over the waiting requests ended before that of `end_key`; NO_LIMIT: it passed all, - NO_LIMIT: none."""
    if ints[SKIPPED_REVERSED] == 1:
        reverse_skipped(ints, requests, adapters, heaps, end_key)
    elif ints[SKIPPED_FIRST] == 1:
        if end_key == NO_LIMIT:
            end_key = ints[TAKEN] if ints[PENDING] == 0 else requests[ints[PENDING] - 1, KEY]
        ints[PASSED_KEY] = max(ints[PASSED_KEY], end_key)
