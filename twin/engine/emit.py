"""The end of a step: tokens come out, prefills turn into decodes, finished requests leave.

Mirrors vLLM's `Scheduler.update_from_output`. Running decodes are not updated one by one: each is in the bucket of the
step in which it will finish, and is counted in the phase in which it takes its next KV block.
"""

from __future__ import annotations

import math

from numba import njit

from packer.arrays import Record
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.frontend import LESS, MORE, begin, change, count_series, stream
from packer.twin.engine.schedule import blocks_of, phase_of
from packer.twin.engine.slots import leave
from packer.twin.engine.state import (
    FINISHED,
    HISTOGRAM_BINS,
    HISTOGRAM_FLOOR_MS,
    HISTOGRAM_PER_E,
    RUNS,
    ServerState,
)
from packer.twin.engine.waiting import place
from packer.twin.flags import ENGINE_FLAGS, INLINED


MIN_GAP_S = 5e-5  # gap between chunks that leave the front end in one burst


@njit(**INLINED)
def gap_bin(gap_s: float) -> int:
    """Bin of the histogram that a gap between tokens falls into."""
    k = int(math.log(gap_s * (1e3 / HISTOGRAM_FLOOR_MS)) * HISTOGRAM_PER_E)
    return 0 if k < 0 else (HISTOGRAM_BINS - 1 if k >= HISTOGRAM_BINS else k)


@njit(inline="always", **ENGINE_FLAGS)
def start_decode(state: ServerState, r: int) -> None:
    """Turn request `r`, whose prefill ended, into a decode; record its first token (if it was preempted, its next)."""
    server, request = state.server, state.requests[r]
    if request.generated == 0:
        request.first_s = server.now_s
        request.first_seen_s = server.seen_s
        if state.series.size > 1 and server.series_of_lists == 1:
            change(server, state.adapters, request.owner + 1, RUNS, MORE)
    else:
        state.histogram[gap_bin(server.now_s - request.last_s)] += 1
    request.start = server.step
    server.decodes += 1
    server.context_tokens += request.context
    state.phase[phase_of(state.requests, r, server.block_size)] += 1
    bucket = due_bucket(server, request)
    state.ends[bucket - server.sentinel] = 1
    link_last(state.links["due"], bucket, r)


@njit(inline="always", **ENGINE_FLAGS)
def due_bucket(server: Record, request: Record) -> int:
    """Head of the ring of requests that get their last token in the same step as `request`, which gets a token now."""
    due = server.bucket + request.output - request.generated - 1
    bucket: int = server.sentinel + (due if due < server.ring else due - server.ring)
    return bucket


@njit(**INLINED)
def complete(state: ServerState, r: int) -> None:
    """Finish request `r`, which got its last token: free its blocks; its adapter may leave the batch."""
    server, request = state.server, state.requests[r]
    unlink(state.links["due"], r)
    unlink(state.links["batch"], r)
    a = request.owner + 1
    size = request.context + server.step - request.start
    server.used -= blocks_of(size, server.block_size)
    server.context_tokens -= size
    state.phase[phase_of(state.requests, r, server.block_size)] -= 1
    server.decodes -= 1
    server.running -= 1
    leave(state, a, server.step)
    note_finish(state, r)
    if state.adapters[a].in_batch == 0 and state.adapters[a].head > 0:
        place(server, state.adapters, state.heaps, a)


@njit(inline="always", **ENGINE_FLAGS)
def note_finish(state: ServerState, r: int) -> None:
    """Record that the client gets the last token of request `r`."""
    server, request = state.server, state.requests[r]
    a = request.owner + 1
    request.finish_s = server.now_s
    request.finish_seen_s = server.seen_s
    request.status = FINISHED
    state.classes[state.adapters[a].rank_class].unfinished -= 1
    if state.series.size > 1:
        change(server, state.adapters, a, RUNS, LESS)


@njit(inline="always", **ENGINE_FLAGS)
def next_step(server: Record) -> None:
    """Increment the step's number, phase and bucket."""
    server.step += 1
    server.phase = server.phase + 1 if server.phase + 1 < server.block_size else 0
    server.bucket = server.bucket + 1 if server.bucket + 1 < server.ring else 0


@njit(inline="always", **ENGINE_FLAGS)
def count_gaps(state: ServerState, decodes: int, gap_s: float) -> None:
    """Count the gaps before the tokens of `decodes` decodes; `gap_s` as returned by `stream`, < 0 for merged chunks."""
    if decodes > 0:
        state.server.gaps += decodes
        if gap_s < 0.0:
            state.server.merged += decodes
        else:
            state.histogram[gap_bin(max(gap_s, MIN_GAP_S))] += decodes


@njit(**INLINED)
def emit(state: ServerState, frontend: Record) -> None:
    """Deliver the tokens of the step that ends now; they are streamed as soon as the front end is free."""
    server, requests, due = state.server, state.requests, state.links["due"]
    decodes = outputs = server.step_decodes
    r = server.ended
    while r > 0:
        outputs += 1
        r = requests[r - 1].next
    gap_s = stream(server, frontend, outputs)
    counted = False
    if state.series.size > 1 and server.series_of_lists == 0:
        counted = begin(state, outputs)
    bucket = server.sentinel + server.bucket
    # `for request in self.running`: these were admitted before the requests that get their first token now
    if state.ends[server.bucket] == 1:  # the ring itself is seldom in the CPU's cache
        state.ends[server.bucket] = 0
        while due[bucket].after != bucket:
            complete(state, due[bucket].after)
    while server.ended > 0:  # in the order of `self.running`, too; an output of one token ends at once
        r = server.ended - 1
        server.ended = requests[r].next
        start_decode(state, r)
        if due[bucket].after == r:
            complete(state, r)
    count_gaps(state, decodes, gap_s)
    if state.series.size > 1 and not counted:
        count_series(server, state.adapters, state.series)
