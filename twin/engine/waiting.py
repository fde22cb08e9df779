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
    FIRST_KEY, FRONT, HEAD, HEAP, HEAP_IDLE, IN_BATCH, KEY, NEXT, PLACE, PROMPT, TAIL, WAITING,
    WAITING_PROMPT,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS, INLINED


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
