"""The end of a step: tokens come out, prefills turn into decodes, finished requests leave.

Mirrors vLLM's `Scheduler.update_from_output`. Running decodes are not updated one by one: each is in the bucket of the
step in which it will finish, and is counted in the phase in which it takes its next KV block. `pool`: as in `schedule`.
"""

from __future__ import annotations

import math

from numba import njit

from packer.arrays import Record
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.frontend import CHUNK_OUTPUTS, LESS, MORE, change, count_series, stream
from packer.twin.engine.holding import enter_phase, hash_full, leave_phase, stand_up
from packer.twin.engine.pool import Pool
from packer.twin.engine.schedule import blocks_of, phase_of
from packer.twin.engine.slots import leave
from packer.twin.engine.state import (
    FINISHED, HISTOGRAM_BINS, HISTOGRAM_FLOOR_MS, HISTOGRAM_PER_E, RUNS, WAITS, ServerState,
)  # fmt: skip
from packer.twin.engine.waiting import place
from packer.twin.flags import ENGINE_FLAGS, INLINED

MIN_GAP_S = 5e-5  # gap between chunks that leave the front end in one burst


@njit(**INLINED)
def gap_bin(gap_s: float) -> int:
    """Bin of the histogram that a gap between tokens falls into."""
    k = int(math.log(gap_s * (1e3 / HISTOGRAM_FLOOR_MS)) * HISTOGRAM_PER_E)
    return 0 if k < 0 else (HISTOGRAM_BINS - 1 if k >= HISTOGRAM_BINS else k)


@njit(inline="always", **ENGINE_FLAGS)
def due_bucket(server: Record, request: Record) -> int:
    """Bucket of requests that get their last token in the same step as `request`, which gets a token now."""
    due: int = server.bucket + request.output - request.generated - 1
    return due if due < server.ring else due - server.ring


@njit(inline="always", **ENGINE_FLAGS)
def last_bucket(server: Record) -> int:
    """Bucket of requests whose last token the step before the next one computes."""
    bucket: int = (server.bucket if server.bucket > 0 else server.ring) - 1
    return bucket


@njit(**INLINED)
def turn(state: ServerState, pool: Pool | None) -> None:
    """Go on to the next step: ended prefills become decodes; requests that get their last token are scheduled no more.

    With asynchronous scheduling, this comes before the step in flight ends (`AsyncScheduler._update_after_schedule`
    does the same by counting tokens that are not there yet).
    """
    server, requests, links = state.server, state.requests, state.links
    number = server.ended
    while number > 0:
        r = number - 1
        number = requests[r].next
        if pool is not None:
            pool.ended[r] = number
        requests[r].start = server.step
        server.decodes += 1
        server.context_tokens += requests[r].context
        phase = phase_of(state, r)
        state.phase[phase] += 1
        if pool is not None and pool.seat[r] > 0:
            enter_phase(pool, pool.seat[r], phase, server.block_size)
        bucket = due_bucket(server, requests[r])
        state.ends[bucket] = 1
        link_last(links["due"], server.sentinel + bucket, r)
    before = server.active
    if state.ends[server.bucket] == 1:  # the ring itself is seldom in the CPU's cache
        bucket = server.sentinel + server.bucket
        # `for request in self.running`: these were admitted before the requests that get their first token now
        r = links[bucket].due.after
        while r != bucket:
            server.decodes -= 1
            server.context_tokens -= requests[r].context + server.step - requests[r].start
            state.phase[phase_of(state, r)] -= 1
            if pool is not None and pool.seat[r] > 0:
                leave_phase(pool, pool.seat[r])
            a = requests[r].owner + 1
            leave(state, a, server.step)
            if state.adapters[a].in_batch == 0 and state.adapters[a].head > 0:
                place(server, state.adapters, state.heaps, a)
            r = links[r].due.after
    if pool is not None:
        server.lingering = before - server.active
    server.step += 1
    server.phase = server.phase + 1 if server.phase + 1 < server.block_size else 0
    server.bucket = server.bucket + 1 if server.bucket + 1 < server.ring else 0
    server.turned = 1


@njit(**INLINED)
def finish(state: ServerState, pool: Pool | None, r: int) -> None:
    """Finish request `r`, which got its last token: free its seat and its blocks."""
    server, request = state.server, state.requests[r]
    unlink(state.links["due"], r)
    note_finish(state, r)
    if request.generated == request.output:  # preempted while the step in flight computed its last token
        server.waiting -= 1
        return
    # The last token is sampled, not computed: it takes no place in the KV cache.
    size = request.context + request.output - request.generated - 1
    if pool is not None and pool.all[0].caching == 1:
        full = size // server.block_size
        hash_full(state, pool, r, full)
        stand_up(state, pool, r, blocks_of(size, server.block_size), full, False)
    else:
        server.used -= blocks_of(size, server.block_size)
    unlink(state.links["batch"], r)
    server.running -= 1


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
def note_first(state: ServerState, r: int) -> None:
    """Record the first token of request `r`. Numba inlines it, because LLVM copies all parts of the server here."""
    server, request = state.server, state.requests[r]
    request.first_s = server.now_s
    request.first_seen_s = server.seen_s
    if state.series.size > 1 and server.series_of_lists == 1:
        change(server, state.adapters, request.owner + 1, RUNS, MORE)


@njit(**INLINED)
def first_token(state: ServerState, r: int) -> None:
    """Record the first token of request `r`, whose prefill ended, or its next token if it was preempted."""
    server, request = state.server, state.requests[r]
    if math.isnan(request.first_s):
        note_first(state, r)
    else:
        state.histogram[gap_bin(server.now_s - request.last_s)] += 1
    request.last_s = server.now_s


@njit(**INLINED)
def next_ended(state: ServerState, pool: Pool | None, r: int) -> int:
    """The request after `r` of those whose prefill the step that ends has ended, + 1; 0: none."""
    if pool is not None:
        return int(pool.ended[r])
    return int(state.requests[r].next)


@njit(**INLINED)
def name_first(state: ServerState, pool: Pool | None, which: int, by: int) -> None:
    """Call `change` for each request whose first token comes out."""
    number = state.server.ended
    while number > 0:
        if math.isnan(state.requests[number - 1].first_s):
            change(state.server, state.adapters, state.requests[number - 1].owner + 1, which, by)
        number = next_ended(state, pool, number - 1)


@njit(inline="always", **ENGINE_FLAGS)
def count_gaps(state: ServerState, decodes: int, gap_s: float) -> None:
    """Count the gaps before the tokens of `decodes` decodes; `gap_s` as returned by `stream`, < 0 for merged chunks."""
    if decodes > 0:
        if gap_s < 0.0:
            state.server.merged += decodes
        else:
            state.histogram[gap_bin(max(gap_s, MIN_GAP_S))] += decodes


@njit(**INLINED)
def emit(state: ServerState, frontend: Record, pool: Pool | None) -> None:
    """Deliver the tokens of the step that ends now; they are streamed as soon as the front end is free.

    vLLM unites the labels of /metrics after each slice of `CHUNK_OUTPUTS` outputs (`update_iteration_stats` writes into
    the same dicts; `AsyncLLM.output_handler`). With several slices, they name requests that waited before the step and
    requests that end with it. vLLM does not name those that end in the first slice, which never has new requests; the
    twin does.
    """
    server, due = state.server, state.links["due"]
    decodes = outputs = server.step_decodes
    number = server.ended
    while number > 0:
        outputs += 1
        number = next_ended(state, pool, number - 1)
    gap_s = stream(server, frontend, outputs)
    counted = state.series.size > 1 and server.series_of_lists == 0 and outputs > CHUNK_OUTPUTS
    if state.series.size > 1 and server.series_of_lists == 0:
        name_first(state, pool, RUNS, MORE)
        if counted:
            count_series(server, state.adapters, state.series)
        name_first(state, pool, WAITS, LESS)
    last = last_bucket(server)
    bucket = server.sentinel + last
    if state.ends[last] == 1:
        state.ends[last] = 0
        r = due[bucket].after
        # Requests with a single output token ended their prefill in this step: they come below.
        while r != bucket and state.requests[r].start != server.step - 1:
            finish(state, pool, r)
            r = due[bucket].after
    while server.ended > 0:  # in the order of `self.running`, too; an output of one token ends at once
        r = server.ended - 1
        server.ended = next_ended(state, pool, r)
        first_token(state, r)
        if due[bucket].after == r:
            finish(state, pool, r)
    count_gaps(state, decodes, gap_s)
    if state.series.size > 1 and not counted:
        count_series(server, state.adapters, state.series)
