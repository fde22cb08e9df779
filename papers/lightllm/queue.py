"""LightLLM's queue: arrivals, asynchronous loads of adapters for waiting requests, and early abort."""

from __future__ import annotations

from numba import njit

from packer.papers.accept import accept, leave_queue
from packer.papers.cache.kernel import end_load, start_load
from packer.papers.cache.loading import ASYNC
from packer.papers.lightllm.peak import peak
from packer.papers.state import CellState
from packer.twin.engine.state import GIVEN_UP
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import Law

ABORT_MARGIN_S = 0.5


@njit(**ENGINE_FLAGS)
def fetch(state: CellState, law: Law, a: int) -> bool:
    """Start loading adapter row `a` for a waiting request if the batch never needs its cells; return whether it did."""
    server, own = state.server, state.own
    blocks = own.active_blocks + own.loading_blocks + state.adapters[a].blocks
    if peak(state) >= server.kv_blocks - blocks:
        return False
    return bool(start_load(state, law.loading, a))


@njit(**ENGINE_FLAGS)
def arrive(state: CellState, law: Law, now: float) -> None:
    """Move requests of the inbox that were sent by `now` to the queue."""
    own = state.own
    while state.server.next_s <= now:
        r = accept(state)
        a = state.requests[r].owner + 1
        if own.loading_mode == ASYNC and state.adapters[a].resident + state.cached[a].loading == 0:
            fetch(state, law, a)


@njit(**ENGINE_FLAGS)
def finish_loads(state: CellState, law: Law, now: float) -> None:
    """Finish the loads that end by `now`, and count the stalls of requests that waited for them."""
    server, links, own = state.server, state.links, state.own
    while own.load_end_s <= now:
        end_s = own.load_end_s
        a = end_load(state, law.loading)
        r = links[server.sentinel].due.after
        while r != server.sentinel:
            if state.requests[r].owner + 1 == a:
                server.stall_s += max(0.0, end_s - state.requests[r].sent_s)
            r = links[r].due.after


@njit(**ENGINE_FLAGS)
def give_up(state: CellState) -> None:
    """Drop waiting requests that would miss the limit on TTFT, `abort_after_s`."""
    server, links = state.server, state.links
    r = links[server.sentinel].due.after
    while r != server.sentinel:
        after = links[r].due.after
        waited = state.server.now_s - state.requests[r].sent_s
        if waited + ABORT_MARGIN_S > state.own.abort_after_s:
            leave_queue(state, r)
            state.requests[r].status = GIVEN_UP
            server.aborted += 1
            a = state.requests[r].owner + 1
            state.classes[state.adapters[a].rank_class].unfinished -= 1
        r = after
