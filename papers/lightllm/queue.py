"""LightLLM's queue: requests arrive, wait for their adapters where these are loaded during the work, and give up."""

from __future__ import annotations


from numba import njit

from packer.papers.cache.kernel import LOADING, end_load, start_load
from packer.papers.cache.loading import ASYNC
from packer.papers.accept import accept, leave_queue
from packer.papers.lightllm.peak import peak
from packer.twin.engine.state import (
    ABORTED, ABORT_AFTER_S, ACTIVE_BLOCKS, BLOCKS, DUE_AFTER, GIVEN_UP, KV_BLOCKS, LOADING_BLOCKS, LOADING_MODE,
    LOAD_END_S, NEXT_S, NOW, OWNER, RANK_CLASS, RESIDENT, SENTINEL, SENT_AT, STALL_S, UNFINISHED, ServerState,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import Law

ABORT_MARGIN_S = 0.5


@njit(**ENGINE_FLAGS)
def fetch(state: ServerState, law: Law, a: int) -> bool:
    """Start to load adapter row `a` for a waiting request if the batch will never need its cells."""
    ints = state.ints
    blocks = ints[ACTIVE_BLOCKS] + ints[LOADING_BLOCKS] + state.sizes[a, BLOCKS]
    if peak(ints, state.requests, state.sets[0]) >= ints[KV_BLOCKS] - blocks:
        return False
    return bool(start_load(ints, state.floats, state.adapters, state.sizes, law.loading, a))


@njit(**ENGINE_FLAGS)
def arrive(state: ServerState, law: Law, now: float) -> None:
    """Requests of the inbox that were sent up to `now` join the queue."""
    ints = state.ints
    while state.floats[NEXT_S] <= now:
        r = accept(state)
        a = state.requests[r, OWNER] + 1
        if ints[LOADING_MODE] == ASYNC and state.adapters[a, RESIDENT] + state.adapters[a, LOADING] == 0:
            fetch(state, law, a)


@njit(**ENGINE_FLAGS)
def finish_loads(state: ServerState, law: Law, now: float) -> None:
    """Adapters that are there by `now` are; those who waited for them did so until then."""
    ints, floats, links = state.ints, state.floats, state.links
    while floats[LOAD_END_S] <= now:
        end_s = floats[LOAD_END_S]
        a = end_load(ints, floats, state.adapters, state.sizes, law.loading)
        r = links[ints[SENTINEL], DUE_AFTER]
        while r != ints[SENTINEL]:
            if state.requests[r, OWNER] + 1 == a:
                floats[STALL_S] += max(0.0, end_s - state.times[r, SENT_AT])
            r = links[r, DUE_AFTER]


@njit(**ENGINE_FLAGS)
def give_up(state: ServerState) -> None:
    """Drop the waiting requests that would miss the limit on the first token."""
    ints, links = state.ints, state.links
    r = links[ints[SENTINEL], DUE_AFTER]
    while r != ints[SENTINEL]:
        after = links[r, DUE_AFTER]
        waited = state.floats[NOW] - state.times[r, SENT_AT]
        if waited + ABORT_MARGIN_S > state.floats[ABORT_AFTER_S]:
            leave_queue(state, r)
            state.status[r] = GIVEN_UP
            ints[ABORTED] += 1
            a = state.requests[r, OWNER] + 1
            state.classes[state.sizes[a, RANK_CLASS], UNFINISHED] -= 1
        r = after
