"""Requests arrive: from the inbox, or from a stream of times, into the queue of waiting requests."""

from __future__ import annotations

import math

from numba import njit

from packer.twin.engine.containers import fenwick_add
from packer.twin.engine.state import (
    ACCEPTED, EXHAUSTED, FINISH, FIRST, GENERATED, INBOX, INBOX_COUNT, INBOX_LAST, KEY, MAX_OUTSTANDING,
    NEXT, NEXT_S, OWNER, REFUSED, RUNNING, SENT, SENT_AT, STREAM, TAKEN, WAITING, ByteArray, FloatArray,
    IntArray, ServerState,
)  # fmt: skip
from packer.twin.engine.waiting import put_last
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def offer(state: ServerState, r: int) -> None:
    """Append request `r` to the inbox: it arrives at its SENT_AT, which is not before that of the last one.

    Its OWNER, PROMPT, OUTPUT and SENT_AT are written by the caller.
    """
    ints = state.ints
    state.requests[r, NEXT] = 0
    if ints[INBOX] == 0:
        ints[INBOX] = r + 1
        state.floats[NEXT_S] = state.times[r, SENT_AT]
    else:
        state.requests[ints[INBOX_LAST] - 1, NEXT] = r + 1
    ints[INBOX_LAST] = r + 1
    ints[INBOX_COUNT] += 1


@njit(**ENGINE_FLAGS)
def arrive(
    ints: IntArray, floats: FloatArray, stream_s: FloatArray, requests: IntArray, times: FloatArray,
    status: ByteArray, adapters: IntArray, heaps: IntArray, tree: IntArray, now: float,
) -> None:  # fmt: skip
    """Take in all requests sent up to `now`; those beyond the client's ceiling are refused.

    Of a stream, the i-th request accepted takes the i-th row: what is refused leaves its marks to the next.
    """
    streaming = ints[STREAM] == 1
    while floats[NEXT_S] <= now:
        sent_s = floats[NEXT_S]
        refused = ints[RUNNING] + ints[WAITING] >= ints[MAX_OUTSTANDING]
        if streaming:
            r = ints[TAKEN]
            if not refused and r == times.shape[0]:
                ints[EXHAUSTED] = 1
                return
            following = ints[SENT] + 1
            has_next = following < stream_s.size
            floats[NEXT_S] = stream_s[following] if has_next else math.inf
            times[r, SENT_AT] = sent_s
        else:
            r = ints[INBOX] - 1
            following = requests[r, NEXT]
            ints[INBOX] = following
            ints[INBOX_COUNT] -= 1
            floats[NEXT_S] = times[following - 1, SENT_AT] if following > 0 else math.inf
        ints[SENT] += 1
        a = requests[r, OWNER] + 1
        if refused:
            if not streaming:
                adapters[a, REFUSED] += 1
            continue
        requests[r, KEY] = ints[TAKEN]
        requests[r, GENERATED] = 0
        times[r, FIRST] = math.nan
        times[r, FINISH] = math.nan
        status[r] = ACCEPTED
        if tree.size > 1:
            fenwick_add(tree, ints[TAKEN], 1)
        ints[TAKEN] += 1
        put_last(ints, requests, adapters, heaps, r, a)
