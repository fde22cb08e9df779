"""Requests arrive, from the inbox or a stream of times: at `AsyncLLM.add_request`, then `Scheduler.add_request`."""

from __future__ import annotations

import math

from numba import njit

from packer.arrays import ByteArray, FloatArray, IntArray
from packer.twin.engine.frontend import MORE, WAITS, accept, change
from packer.twin.engine.state import (
    ACCEPTED, CONCURRENCY, EXHAUSTED, FINISH, FINISH_SEEN, FIRST, FIRST_SEEN, GENERATED, INBOX, INBOX_COUNT,
    INBOX_LAST, KEY, MAX_OUTSTANDING, NEXT, NEXT_S, OWNER, PENDING, PENDING_COUNT, PENDING_LAST,
    PROMPT, RANK_CLASS, REACHED, REACH_S, REFUSED, RELEASED, RUNNING, RUN_S, SEEN_S, SENT, SENT_AT, SERIES_OF_LISTS,
    STREAM, TAKEN, UNFINISHED, WAITING, WAITING_PROMPT, ServerState,
)  # fmt: skip
from packer.twin.engine.waiting import put_last
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED


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
    ints[WAITING_PROMPT] += state.requests[r, PROMPT]
    state.classes[state.sizes[state.requests[r, OWNER] + 1, RANK_CLASS], UNFINISHED] += 1


@njit(**INLINED)
def next_of_stream(ints: IntArray, floats: FloatArray, stream_s: FloatArray, i: int) -> float:
    """When request `i` of the stream is sent; infinite if there is none, or none of the client's places is free."""
    if i >= stream_s.size or (ints[CONCURRENCY] > 0 and i >= ints[RELEASED]):
        return math.inf
    if ints[CONCURRENCY] > 0 and stream_s[i] >= floats[RUN_S]:
        return math.inf  # its place gets free after the run
    sent_s: float = stream_s[i]
    return sent_s


@njit(**INLINED)
def free_places(ints: IntArray, floats: FloatArray, stream_s: FloatArray) -> None:
    """After a step: requests that the client saw finish at SEEN_S make room for those that it holds back, in order.

    A client that keeps C requests open sends request i (from 0) at its own time, but not before it has seen i - C + 1
    others finish: `stream_s` gets the later one of these times. It does so in `vllm bench serve --max-concurrency C`,
    where each request waits for a semaphore (vllm/benchmarks/serve.py, `limited_request_func`).
    """
    finished = ints[TAKEN] - ints[RUNNING] - ints[WAITING] - ints[PENDING_COUNT]
    released = min(stream_s.size, ints[CONCURRENCY] + finished)
    for i in range(ints[RELEASED], released):
        stream_s[i] = max(stream_s[i], floats[SEEN_S])
    if released > ints[RELEASED]:
        ints[RELEASED] = released
        floats[NEXT_S] = next_of_stream(ints, floats, stream_s, ints[SENT])


@njit(**CALLED)
def arrive(
    ints: IntArray, floats: FloatArray, stream_s: FloatArray, requests: IntArray, times: FloatArray,
    status: ByteArray, adapters: IntArray, sizes: IntArray, classes: IntArray, heaps: IntArray,
    series: IntArray, frontend: FloatArray, now: float,
) -> None:  # fmt: skip
    """The front end takes in all requests sent up to `now`, and the engine those that reach it by then.

    Requests beyond the client's ceiling are refused. Of a stream, the i-th request accepted takes the i-th row:
    what is refused leaves its marks to the next.
    """
    streaming = ints[STREAM] == 1
    while floats[NEXT_S] <= now:
        sent_s = floats[NEXT_S]
        outstanding = ints[RUNNING] + ints[WAITING] + ints[PENDING_COUNT]
        refused = outstanding >= ints[MAX_OUTSTANDING]
        if streaming:
            r = ints[TAKEN]
            if not refused and r == times.shape[0]:
                ints[EXHAUSTED] = 1
                return
            following = ints[SENT] + 1
            floats[NEXT_S] = next_of_stream(ints, floats, stream_s, following)
            if refused:  # there may be no row left
                ints[SENT] += 1
                continue
            times[r, SENT_AT] = sent_s
            ints[WAITING_PROMPT] += requests[r, PROMPT]
        else:
            r = ints[INBOX] - 1
            classes[sizes[requests[r, OWNER] + 1, RANK_CLASS], UNFINISHED] -= refused
            following = requests[r, NEXT]
            ints[INBOX] = following
            ints[INBOX_COUNT] -= 1
            floats[NEXT_S] = times[following - 1, SENT_AT] if following > 0 else math.inf
        ints[SENT] += 1
        a = requests[r, OWNER] + 1
        if refused:
            adapters[a, REFUSED] += 1
            ints[WAITING_PROMPT] -= requests[r, PROMPT]
            continue
        requests[r, KEY] = ints[TAKEN]
        requests[r, GENERATED] = 0
        times[r, FIRST] = math.nan
        times[r, FINISH] = math.nan
        times[r, FIRST_SEEN] = math.nan
        times[r, FINISH_SEEN] = math.nan
        status[r] = ACCEPTED
        ints[TAKEN] += 1
        times[r, REACHED] = accept(ints, floats, adapters, frontend, a, sent_s)
        if series.size > 1 and ints[SERIES_OF_LISTS] == 0:
            change(ints, adapters, sizes, a, WAITS, MORE)
        if ints[PENDING] == 0:
            ints[PENDING] = r + 1
            floats[REACH_S] = times[r, REACHED]
        else:
            requests[ints[PENDING_LAST] - 1, NEXT] = r + 1
        requests[r, NEXT] = 0
        ints[PENDING_LAST] = r + 1
        ints[PENDING_COUNT] += 1
    while floats[REACH_S] <= now:
        r = ints[PENDING] - 1
        following = requests[r, NEXT]
        ints[PENDING] = following
        ints[PENDING_COUNT] -= 1
        floats[REACH_S] = times[following - 1, REACHED] if following > 0 else math.inf
        put_last(ints, requests, adapters, heaps, r, requests[r, OWNER] + 1)
