"""Waiting requests by priority, then by arrival (`PriorityRequestQueue`): a pairing heap for each adapter."""

from __future__ import annotations

from numba import njit

from packer.arrays import Record
from packer.twin.engine.state import ServerState
from packer.twin.engine.waiting import place
from packer.twin.flags import CALLED, INLINED

PRIORITY_BITS = 40  # Low bits of a request's key for its place in the order of arrival; the priority is above.


@njit(**INLINED)
def meld(requests: Record, one: int, other: int) -> int:
    """Merge two heaps, each given by its first request; `start` is a request's first child, `next` its next sibling."""
    if one == 0 or other == 0:
        return one + other
    if requests[one - 1].key > requests[other - 1].key:
        one, other = other, one
    requests[other - 1].next = requests[one - 1].start
    requests[one - 1].start = other
    return one


@njit(**CALLED)
def put_by_key(state: ServerState, r: int) -> None:
    """Add request `r` to the waiting requests, behind the requests with smaller keys."""
    requests, a = state.requests, state.requests[r].owner + 1
    requests[r].next = requests[r].start = 0
    head = meld(requests, state.adapters[a].head, r + 1)
    state.adapters[a].head = head
    state.adapters[a].first_key = requests[head - 1].key
    state.server.waiting += 1
    place(state.server, state.adapters, state.heaps, a)


@njit(**INLINED)
def take_by_key(state: ServerState, a: int) -> None:
    """Remove the first waiting request of adapter row `a`, which is admitted; the caller calls `place`."""
    requests, adapter = state.requests, state.adapters[a]
    state.server.waiting -= 1
    state.server.waiting_prompt -= requests[adapter.head - 1].prompt
    pairs, number = 0, requests[adapter.head - 1].start
    while number > 0:  # meld its children in pairs
        other = requests[number - 1].next
        following = requests[other - 1].next if other > 0 else 0
        requests[number - 1].next = 0
        if other > 0:
            requests[other - 1].next = 0
        pair = meld(requests, number, other)
        requests[pair - 1].next = pairs
        pairs, number = pair, following
    head = 0
    # Second pass, from the last pair to the first: the two passes keep the heap's amortised cost logarithmic.
    while pairs > 0:
        following = requests[pairs - 1].next
        requests[pairs - 1].next = 0
        head = meld(requests, head, pairs)
        pairs = following
    adapter.head = head
    if head > 0:
        adapter.first_key = requests[head - 1].key
