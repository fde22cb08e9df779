"""How requests arrive at engines other than vLLM's: from the inbox into one queue, without a front end."""

from __future__ import annotations

import math

from numba import njit

from packer.papers.cache.kernel import WANTED
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import (
    ACCEPTED, DUE_BEFORE, FINISH, FINISH_SEEN, FIRST, FIRST_SEEN, GENERATED, INBOX, INBOX_COUNT, KEY, NEXT, NEXT_S,
    OWNER, PROMPT, REACHED, SENT, SENTINEL, SENT_AT, TAKEN, WAITING, WAITING_PROMPT, ServerState,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def accept(state: ServerState) -> int:
    """The first request of the inbox joins the end of the queue; its row."""
    ints, floats, requests, times = state.ints, state.floats, state.requests, state.times
    r = ints[INBOX] - 1
    following = requests[r, NEXT]
    ints[INBOX] = following
    ints[INBOX_COUNT] -= 1
    requests[r, KEY] = ints[TAKEN]
    requests[r, GENERATED] = 0
    times[r, REACHED] = times[r, SENT_AT]
    times[r, FIRST] = times[r, FINISH] = times[r, FIRST_SEEN] = times[r, FINISH_SEEN] = math.nan
    state.status[r] = ACCEPTED
    ints[TAKEN] += 1
    ints[SENT] += 1
    ints[WAITING] += 1
    state.adapters[requests[r, OWNER] + 1, WANTED] += 1
    link_last(state.links, DUE_BEFORE, ints[SENTINEL], r)
    floats[NEXT_S] = times[following - 1, SENT_AT] if following > 0 else math.inf
    return int(r)


@njit(**ENGINE_FLAGS)
def leave_queue(state: ServerState, r: int) -> None:
    """Request `r` is not waiting any more."""
    ints = state.ints
    unlink(state.links, DUE_BEFORE, r)
    ints[WAITING] -= 1
    ints[WAITING_PROMPT] -= state.requests[r, PROMPT]
    state.adapters[state.requests[r, OWNER] + 1, WANTED] -= 1
