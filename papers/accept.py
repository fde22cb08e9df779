"""How requests arrive at engines other than vLLM's: from the inbox into one queue, without a front end."""

from __future__ import annotations

import math

from numba import njit

from packer.papers.state import CellState
from packer.twin.cluster.state import next_event_s
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import ACCEPTED
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def accept(state: CellState) -> int:
    """Move the first request of the inbox to the end of the queue; return its row."""
    server, request = state.server, state.requests[state.server.inbox - 1]
    r, following = server.inbox - 1, request.next
    server.inbox = following
    server.inbox_count -= 1
    request.key = server.taken
    request.generated = 0
    request.reached_s = request.sent_s
    request.first_s = request.finish_s = request.first_seen_s = request.finish_seen_s = math.nan
    request.status = ACCEPTED
    server.taken += 1
    server.sent += 1
    server.waiting += 1
    state.cached[request.owner + 1].wanted += 1
    link_last(state.links["due"], server.sentinel, r)
    server.next_s = state.requests[following - 1].sent_s if following > 0 else math.inf
    return int(r)


@njit(**ENGINE_FLAGS)
def leave_queue(state: CellState, r: int) -> None:
    """Remove request `r` from the queue."""
    server = state.server
    unlink(state.links["due"], r)
    server.waiting -= 1
    server.waiting_prompt -= state.requests[r].prompt
    state.cached[state.requests[r].owner + 1].wanted -= 1


@njit(**ENGINE_FLAGS)
def event_s(state: CellState) -> float:
    """When the server next has something to do, infinite if it is idle."""
    return float(next_event_s(state.server))
