"""Requests arrive, from the inbox or a stream of times: at `AsyncLLM.add_request`, then `Scheduler.add_request`."""

from __future__ import annotations

import math

from numba import njit

from packer.arrays import FloatArray, Record
from packer.twin.engine.by_priority import PRIORITY_BITS, put_by_key
from packer.twin.engine.each import Each
from packer.twin.engine.frontend import MORE, accept, change
from packer.twin.engine.state import ACCEPTED, WAITS, ServerState
from packer.twin.engine.waiting import put_last
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED


@njit(**ENGINE_FLAGS)
def offer(state: ServerState, r: int) -> None:
    """Append request `r` to the inbox: it arrives at its `sent_s`, which is not before that of the previous request.

    The caller has written its owner, prompt, output and `sent_s`.
    """
    server, request = state.server, state.requests[r]
    request.next = 0
    if server.inbox == 0:
        server.inbox = r + 1
        server.next_s = request.sent_s
    else:
        state.requests[server.inbox_last - 1].next = r + 1
    server.inbox_last = r + 1
    server.inbox_count += 1
    server.waiting_prompt += request.prompt
    state.classes[state.adapters[request.owner + 1].rank_class].unfinished += 1


@njit(**INLINED)
def next_of_stream(server: Record, stream_s: FloatArray, i: int) -> float:
    """Time at which request `i` of the stream is sent; infinite if it does not exist or `concurrency` holds it back."""
    if i >= stream_s.size or (server.concurrency > 0 and i >= server.released):
        return math.inf
    if server.concurrency > 0 and stream_s[i] >= server.run_s:
        return math.inf  # a place for it becomes free only after the run
    sent_s: float = stream_s[i]
    return sent_s


@njit(**INLINED)
def free_places(server: Record, stream_s: FloatArray) -> None:
    """After a step: release a held-back request, in order, for each request that the client saw finish at `seen_s`.

    A client that keeps at most C requests open sends request i (from 0) at its own time, but not before it has seen
    i - C + 1 other requests finish. `stream_s` gets the later of the two times. `vllm bench serve --max-concurrency C`
    does the same with a semaphore (vllm/benchmarks/serve.py, `limited_request_func`).
    """
    finished = server.taken - server.running - server.waiting - server.pending_count
    released = min(stream_s.size, server.concurrency + finished)
    for i in range(server.released, released):
        stream_s[i] = max(stream_s[i], server.seen_s)
    if released > server.released:
        server.released = released
        server.next_s = next_of_stream(server, stream_s, server.sent)


@njit(**CALLED)
def arrive(state: ServerState, frontend: Record, each: Each | None, now: float) -> None:
    """Move requests sent up to `now` to the front end, and requests that reach the engine by `now` to the engine.

    Requests beyond `max_outstanding` are refused. The i-th accepted request of a stream takes the i-th row of
    `requests`: a refused request leaves its row (owner and lengths) to the next request. `each`: as in `advance`.
    """
    server, requests, adapters = state.server, state.requests, state.adapters
    while server.next_s <= now:
        sent_s = server.next_s
        outstanding = server.running + server.waiting + server.pending_count
        refused = outstanding >= server.max_outstanding
        if server.stream == 1:
            r = server.taken
            if not refused and r == requests.size:
                server.exhausted = 1
                return
            server.next_s = next_of_stream(server, state.stream_s, server.sent + 1)
            if refused:  # there may be no row left
                server.sent += 1
                continue
            requests[r].sent_s = sent_s
            server.waiting_prompt += requests[r].prompt
        else:
            r = server.inbox - 1
            state.classes[adapters[requests[r].owner + 1].rank_class].unfinished -= refused
            following = requests[r].next
            server.inbox = following
            server.inbox_count -= 1
            server.next_s = requests[following - 1].sent_s if following > 0 else math.inf
        request = requests[r]
        server.sent += 1
        a = request.owner + 1
        if refused:
            adapters[a].refused += 1
            server.waiting_prompt -= request.prompt
            continue
        # Keys rise with arrivals from 0 on; `put_first` gives preempted requests keys below 0.
        request.key = server.taken
        if server.by_priority == 1:
            request.key += request.context << PRIORITY_BITS
        request.generated = 0
        request.first_s = request.finish_s = request.first_seen_s = request.finish_seen_s = math.nan
        request.status = ACCEPTED
        server.taken += 1
        request.reached_s = accept(server, adapters, a, frontend, sent_s)
        if state.series.size > 1 and server.series_of_lists == 0:
            # The front end names a request's adapter from its acceptance on, before the engine has it.
            change(server, adapters, a, WAITS, MORE)
        if server.pending == 0:
            server.pending = r + 1
            server.reach_s = request.reached_s
        else:
            requests[server.pending_last - 1].next = r + 1
        request.next = 0
        server.pending_last = r + 1
        server.pending_count += 1
    while server.reach_s <= now:
        r = server.pending - 1
        following = requests[r].next
        server.pending = following
        server.pending_count -= 1
        server.reach_s = requests[following - 1].reached_s if following > 0 else math.inf
        if each is not None and server.by_priority == 1:
            put_by_key(state, r)
        else:
            put_last(server, requests, adapters, state.heaps, state.links["batch"], state.trees, r)


@njit(inline="always", **ENGINE_FLAGS)
def arrive_until(state: ServerState, frontend: Record, each: Each | None, now: float) -> None:
    """Call `arrive` if a request is sent or reaches the engine by `now`."""
    if state.server.next_s <= now or state.server.reach_s <= now:
        arrive(state, frontend, each, now)
