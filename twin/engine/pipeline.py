"""Parts of a step with asynchronous scheduling or prefix caching: `advance_ahead` puts these parts together.

With asynchronous scheduling (vllm/v1/core/sched/async_scheduler.py; `EngineCore.step_with_batch_queue`) a step is
scheduled while the previous step is executed, before the tokens of that step are known. A request whose last token is
computed by the step in flight is not scheduled again, but keeps its seat and its blocks until that step ends. A
preempted request still gets the token that the step in flight computes.

The order of a step with synchronous scheduling; with asynchronous scheduling, the last two change places:
`plan` (schedule), `begin` (execute), `turn` (its prefills become decodes), `deliver` (it has ended), next `plan`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from packer.arrays import Record, record
from packer.twin.engine.charge import charge
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.emit import count_gaps, due_bucket, gap_bin, next_step, note_finish
from packer.twin.engine.frontend import CHUNK_OUTPUTS, LESS, MORE, change, count_series, stream
from packer.twin.engine.plan import last_bucket, phase_of_start, plan, planned_ms
from packer.twin.engine.holding import enter_phase, hash_full, leave_phase, stand_up
from packer.twin.engine.pool import Pool
from packer.twin.engine.schedule import blocks_of
from packer.twin.engine.slots import leave
from packer.twin.engine.state import RUNS, WAITS, ServerState
from packer.twin.engine.waiting import place
from packer.twin.flags import INLINED
from packer.twin.law.law import Law

PIPELINE = record(
    ("depth", "i8"),  # steps that are scheduled at once: 1, or 2 with asynchronous scheduling
    ("turned", "i8"),  # 1: `turn` was called for the step in flight
    (
        "ahead",
        "i8",
    ),  # 1: the next step is scheduled; the fields below describe it, as the server's describe the step in flight
    ("ended", "i8"),
    ("ended_last", "i8"),
    ("decodes", "i8"),
    ("prefill", "i8"),
    ("preempted", "i8"),
    ("load_ms", "f8"),
    ("ms", "f8"),
)


def new_pipeline(depth: int) -> Record:
    """The pipeline of an idle server, (1,) of `PIPELINE`."""
    pipeline = np.zeros(1, dtype=PIPELINE)
    pipeline["depth"], pipeline["turned"] = depth, 1
    return pipeline


@njit(**INLINED)
def turn(state: ServerState, pool: Pool) -> None:
    """Go on to the next step: ended prefills become decodes; requests that get their last token are scheduled no more.

    `AsyncScheduler._update_after_schedule` does the same by counting tokens that are not there yet.
    """
    server, requests, links = state.server, state.requests, state.links
    number = server.ended
    while number > 0:
        r = number - 1
        number = requests[r].next
        pool.after[r] = number
        requests[r].start = server.step
        server.decodes += 1
        server.context_tokens += requests[r].context
        phase = phase_of_start(state, r)
        state.phase[phase] += 1
        if pool.seat[r] > 0:
            enter_phase(pool, pool.seat[r], phase, server.block_size)
        link_last(links["due"], due_bucket(server, requests[r]), r)
    bucket = server.sentinel + server.bucket
    r = links[bucket].due.after
    server.lingering = server.active
    while r != bucket:
        server.decodes -= 1
        server.context_tokens -= requests[r].context + server.step - requests[r].start
        state.phase[phase_of_start(state, r)] -= 1
        if pool.seat[r] > 0:
            leave_phase(pool, pool.seat[r])
        a = requests[r].owner + 1
        leave(state, a, server.step)
        place(server, state.adapters, state.heaps, a)
        r = links[r].due.after
    server.lingering -= server.active
    next_step(server)


@njit(**INLINED)
def finish(state: ServerState, pool: Pool, r: int) -> None:
    """Finish request `r`, which got its last token: free its seat and its blocks."""
    server, request = state.server, state.requests[r]
    unlink(state.links["due"], r)
    note_finish(state, r)
    if request.generated == request.output:  # preempted while the step in flight computed its last token
        server.waiting -= 1
        return
    size = request.context + request.output - request.generated - 1
    if pool.all[0].caching == 1:
        full = size // server.block_size
        hash_full(state, pool, r, full)
        stand_up(state, pool, r, blocks_of(size, server.block_size), full, False)
    else:
        server.used -= blocks_of(size, server.block_size)
    unlink(state.links["batch"], r)
    server.running -= 1


@njit(**INLINED)
def first_token(state: ServerState, r: int) -> None:
    """Record the first token of request `r`, whose prefill ended, or its next token if it was preempted."""
    server, request = state.server, state.requests[r]
    if math.isnan(request.first_s):
        request.first_s = server.now_s
        request.first_seen_s = server.seen_s
        if state.series.size > 1 and server.series_of_lists == 1:
            change(server, state.adapters, request.owner + 1, RUNS, MORE)
    else:
        state.histogram[gap_bin(server.now_s - request.last_s)] += 1
    request.last_s = server.now_s


@njit(**INLINED)
def name_first(state: ServerState, pool: Pool, which: int, by: int) -> None:
    """`frontend.follow`: call `change` for each request whose first token comes out."""
    number = state.server.ended
    while number > 0:
        if math.isnan(state.requests[number - 1].first_s):
            owner = state.requests[number - 1].owner + 1
            change(state.server, state.adapters, owner, which, by)
        number = pool.after[number - 1]


@njit(**INLINED)
def deliver(state: ServerState, law: Law, pool: Pool) -> None:
    """`Scheduler.update_from_output`: deliver the tokens of the step that ends, as `emit.emit` does."""
    server, due = state.server, state.links["due"]
    decodes = outputs = server.step_decodes
    number = server.ended
    while number > 0:
        outputs += 1
        number = pool.after[number - 1]
    gap_s = stream(server, law.frontend, outputs)
    counted = state.series.size > 1 and server.series_of_lists == 0 and outputs > CHUNK_OUTPUTS
    if state.series.size > 1 and server.series_of_lists == 0:
        name_first(state, pool, RUNS, MORE)
        if counted:
            count_series(server, state.adapters, state.series)
        name_first(state, pool, WAITS, LESS)
    bucket = last_bucket(server)
    r = due[bucket].after
    while r != bucket and state.requests[r].start != server.step - 1:
        finish(state, pool, r)
        r = due[bucket].after
    while server.ended > 0:
        r = server.ended - 1
        server.ended = pool.after[r]
        first_token(state, r)
        if due[bucket].after == r:
            finish(state, pool, r)
    count_gaps(state, decodes, gap_s)
    if state.series.size > 1 and not counted:
        count_series(server, state.adapters, state.series)


# ---- the loop


@njit(**INLINED)
def begin(state: ServerState, pipeline: Record, ms: float) -> None:
    """Start executing the step that was scheduled; it takes `ms`."""
    charge(state.server, state.timeline, ms)
    state.server.in_flight, pipeline[0].turned = 1, 0


@njit(**INLINED)
def begin_next(state: ServerState, pipeline: Record) -> None:
    """Start executing the step that was scheduled ahead."""
    server, step = state.server, pipeline[0]
    server.ended, server.ended_last = step.ended, step.ended_last
    server.step_decodes, server.step_prefill, server.step_preempted = (
        step.decodes,
        step.prefill,
        step.preempted,
    )
    server.load_ms = step.load_ms
    step.ahead = 0
    begin(state, pipeline, step.ms)


@njit(**INLINED)
def plan_next(state: ServerState, law: Law, pool: Pool, pipeline: Record) -> None:
    """Schedule the step after the one in flight; a step without tokens is dropped."""
    server, step = state.server, pipeline[0]
    if step.turned == 0:
        turn(state, pool)
        step.turned = 1
    ended, last, load_ms = server.ended, server.ended_last, server.load_ms
    decodes, prefill, preempted = server.step_decodes, server.step_prefill, server.step_preempted
    plan(state, law, pool, True)
    if server.step_decodes + server.step_prefill > 0:
        step.ahead, step.ms = 1, planned_ms(state, law, 2)
        step.ended, step.ended_last, step.load_ms = server.ended, server.ended_last, server.load_ms
        step.decodes, step.prefill, step.preempted = (
            server.step_decodes, server.step_prefill, server.step_preempted,
        )  # fmt: skip
    server.ended, server.ended_last, server.load_ms = ended, last, load_ms
    server.step_decodes, server.step_prefill, server.step_preempted = decodes, prefill, preempted
