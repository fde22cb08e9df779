"""The end of a step of a server that counts the tokens of each request (`engine.each`)."""

from __future__ import annotations

import math

from numba import njit

from packer.arrays import Record
from packer.twin.engine.each import Each, accepted
from packer.twin.engine.each_plan import give_up, hash_known
from packer.twin.engine.emit import MIN_GAP_S, gap_bin, note_finish, note_first
from packer.twin.engine.frontend import CHUNK_OUTPUTS, LESS, MORE, change, count_series, stream
from packer.twin.engine.pool import Pool
from packer.twin.engine.state import FINISHED, RUNS, WAITS, ServerState
from packer.twin.flags import INLINED


@njit(**INLINED)
def name_first(state: ServerState, each: Each, which: int, by: int) -> None:
    """As `emit.name_first`."""
    k = each.whole[0].current
    for i in range(each.steps[k].count):
        if each.batches[k, i].tried >= 0 and math.isnan(state.requests[each.batches[k, i].request].first_s):
            change(state.server, state.adapters, state.requests[each.batches[k, i].request].owner + 1, which, by)


@njit(**INLINED)
def count_outputs(state: ServerState, each: Each) -> int:
    """Number of requests that get tokens from the step."""
    k, outputs = each.whole[0].current, 0
    for i in range(each.steps[k].count):
        batch = each.batches[k, i]
        outputs += batch.tried >= 0 and state.requests[batch.request].status != FINISHED
    return outputs


@njit(**INLINED)
def verify(state: ServerState, each: Each, i: int) -> int:
    """Return the number of tokens that the request of entry `i` gets, maybe 0; correct its counters as vLLM does."""
    whole = each.whole[0]
    batch = each.batches[whole.current, i]
    r = batch.request
    row, request = each.rows[r], state.requests[r]
    row.in_flight -= batch.tokens
    stale = row.stale > 0
    if stale:
        row.stale -= batch.tokens
    if batch.tried < 0 or request.status == FINISHED:
        return 0
    kept = 0
    if batch.padded == 0:
        kept = accepted(each.chances[each.adapter[r]], r, row.outputs, batch.tried)
        whole.tried += batch.tried
        whole.kept += kept
        whole.steps += batch.tokens == 1 + batch.tried
    got = int(min(1 + kept, request.output - row.outputs))
    row.outputs += got
    # `preempt` has reset the counters: the token counts, but corrects nothing.
    if stale:
        return got
    if whole.caches_verified == 1:
        # Tokens beyond the last one of the request are dropped (scheduler.py:2762 of 0.33.0).
        row.computed -= 1 + kept - got
    # What was counted for drafts that are rejected (scheduler.py:2119–2128 of 0.32.0, async_scheduler.py:70).
    row.computed -= batch.tried - kept
    if state.server.depth == 2:
        row.placeholders -= got + batch.tried - kept
    else:
        row.drafts = whole.drafts
    return got


@njit(**INLINED)
def show(state: ServerState, r: int, got: int, gap_s: float) -> None:
    """Show the client `got` tokens of request `r`; `gap_s` as returned by `frontend.stream`."""
    server, request = state.server, state.requests[r]
    if math.isnan(request.first_s):
        note_first(state, r)
        server.merged += got - 1  # no gap before the first token
    else:
        server.merged += got - (gap_s >= 0.0)
        if gap_s >= 0.0:
            state.histogram[gap_bin(max(server.seen_s - request.last_s, MIN_GAP_S))] += 1
    request.last_s = server.seen_s


@njit(**INLINED)
def emit_each(state: ServerState, frontend: Record, each: Each, pool: Pool) -> None:
    """As `emit.emit`: deliver the tokens of the step that ends."""
    server, whole, requests = state.server, each.whole[0], state.requests
    outputs = count_outputs(state, each)
    gap_s = stream(server, frontend, outputs)
    counted = state.series.size > 1 and server.series_of_lists == 0 and outputs > CHUNK_OUTPUTS
    if state.series.size > 1 and server.series_of_lists == 0:
        name_first(state, each, RUNS, MORE)
        if counted:
            count_series(server, state.adapters, state.series)
        name_first(state, each, WAITS, LESS)
    ended = False
    for i in range(each.steps[whole.current].count):
        r = each.batches[whole.current, i].request
        row = each.rows[r]
        # Read both before `verify` changes them.
        stale, ahead = row.stale > 0, server.depth == 2 and row.placeholders > 0
        got = verify(state, each, i)
        if got == 0:
            continue
        show(state, r, got, gap_s)
        if row.preempted == 0 and not stale and whole.caches_verified == 1:
            if ahead or whole.drafts > 0:
                hash_known(state, each, pool, r, row.computed - row.in_flight)
        elif row.preempted == 0 and not stale and server.depth == 2:
            hash_known(state, each, pool, r, row.computed - row.placeholders)
        if row.outputs == requests[r].output:
            note_finish(state, r)
            if row.preempted == 1:
                server.waiting -= 1  # `end_limbo` skips it
            else:
                give_up(state, each, pool, r, False)
                ended = True
    if ended:
        count = 0
        for i in range(server.running):
            r = each.running[i]
            if requests[r].status != FINISHED:
                each.running[count] = r
                count += 1
        server.running = count
    if state.series.size > 1 and not counted:
        count_series(server, state.adapters, state.series)
