"""What a step does where vLLM schedules ahead or caches prefixes: `advance_ahead` puts these parts together.

With asynchronous scheduling (vllm/v1/core/sched/async_scheduler.py; `EngineCore.step_with_batch_queue`) a step is
scheduled while the one before it is executed: its tokens are scheduled before they are known. A request whose last
token is computed by the step in flight is not scheduled again, but keeps its seat and its blocks until that step ends.
One that is preempted still gets the token that is on its way.

The order of a step s, in which only the last two change places with synchronous scheduling:
`plan` (schedule), `begin` (it is executed), `turn` (its prefills are decodes now), `deliver` (it ended), next `plan`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from packer.twin.engine.charge import charge
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.emit import MIN_GAP_S, gap_bin
from packer.twin.engine.frontend import CHUNK_OUTPUTS, LESS, MORE, RUNS, WAITS, change, count_series, stream
from packer.twin.engine.plan import last_bucket, phase_of_start, plan, planned_ms
from packer.twin.engine.holding import enter_phase, hash_full, leave_phase, stand_up
from packer.twin.engine.pool import Pool, Records
from packer.twin.engine.schedule import blocks_of
from packer.twin.engine.slots import leave
from packer.twin.engine.state import (
    ACTIVE, BLOCK_SIZE, BUCKET, CONTEXT, CONTEXT_TOKENS, DECODES, DUE_AFTER, DUE_BEFORE, ENDED, ENDED_LAST, FINISH,
    FINISHED, FINISH_SEEN, FIRST, FIRST_SEEN, GAPS, GENERATED, IN_FLIGHT, LAST, LINGERING, LOAD_MS, MERGED, NEXT, NOW,
    OLDER, OUTPUT, OWNER, PHASE, RANK_CLASS, RING, RUNNING, SEEN_S, SENTINEL, SERIES_OF_LISTS, START, STEP,
    STEP_DECODES, STEP_PREEMPTED, STEP_PREFILL, UNFINISHED, USED, WAITING, ServerState,
)  # fmt: skip
from packer.twin.engine.waiting import place
from packer.twin.flags import INLINED
from packer.twin.law.law import Law

PIPELINE = np.dtype(
    [
        ("depth", "i8"),  # steps that are scheduled at once: 1, or 2 with asynchronous scheduling
        ("turned", "i8"),  # 1: prefills that the step in flight ends are decodes already
        (
            "ahead",
            "i8",
        ),  # 1: a further step is scheduled, and this is what it computes, as the registers say it of
        ("ended", "i8"),  # the step in flight
        ("ended_last", "i8"),
        ("decodes", "i8"),
        ("prefill", "i8"),
        ("preempted", "i8"),
        ("load_ms", "f8"),
        ("ms", "f8"),
    ],
    align=True,
)


def new_pipeline(depth: int) -> Records:
    """The pipeline of an idle server, (1,) of `PIPELINE`."""
    pipeline = np.zeros(1, dtype=PIPELINE)
    pipeline["depth"], pipeline["turned"] = depth, 1
    return pipeline


@njit(**INLINED)
def turn(state: ServerState, pool: Pool) -> None:
    """After a step is scheduled: its prefills are decodes, who gets its last token is scheduled no more; the next one.

    As `AsyncScheduler._update_after_schedule` does by counting tokens that are not there yet.
    """
    ints, requests, links = state.ints, state.requests, state.links
    number = ints[ENDED]
    while number > 0:
        r = number - 1
        number = requests[r, NEXT]
        pool.after[r] = number
        requests[r, START] = ints[STEP]
        ints[DECODES] += 1
        ints[CONTEXT_TOKENS] += requests[r, CONTEXT]
        phase = phase_of_start(state, r)
        state.phase[phase] += 1
        if pool.seat[r] > 0:
            enter_phase(pool, pool.seat[r], phase, ints[BLOCK_SIZE])
        due = ints[BUCKET] + requests[r, OUTPUT] - requests[r, GENERATED] - 1
        if due >= ints[RING]:
            due -= ints[RING]
        link_last(links, DUE_BEFORE, ints[SENTINEL] + due, r)
    bucket = ints[SENTINEL] + ints[BUCKET]
    r = links[bucket, DUE_AFTER]
    ints[LINGERING] = ints[ACTIVE]
    while r != bucket:
        ints[DECODES] -= 1
        ints[CONTEXT_TOKENS] -= requests[r, CONTEXT] + ints[STEP] - requests[r, START]
        state.phase[phase_of_start(state, r)] -= 1
        if pool.seat[r] > 0:
            leave_phase(pool, pool.seat[r])
        a = requests[r, OWNER] + 1
        leave(ints, state.adapters, state.sizes, state.classes, state.sets, a, ints[STEP])
        place(ints, state.adapters, state.heaps, a)
        r = links[r, DUE_AFTER]
    ints[LINGERING] -= ints[ACTIVE]
    ints[STEP] += 1
    ints[PHASE] = ints[PHASE] + 1 if ints[PHASE] + 1 < ints[BLOCK_SIZE] else 0
    ints[BUCKET] = ints[BUCKET] + 1 if ints[BUCKET] + 1 < ints[RING] else 0


@njit(**INLINED)
def finish(state: ServerState, pool: Pool, r: int) -> None:
    """Request `r` got its last token: its seat and its blocks are free."""
    ints, requests, times = state.ints, state.requests, state.times
    a = requests[r, OWNER] + 1
    unlink(state.links, DUE_BEFORE, r)
    times[r, FINISH] = state.floats[NOW]
    times[r, FINISH_SEEN] = state.floats[SEEN_S]
    state.status[r] = FINISHED
    state.classes[state.sizes[a, RANK_CLASS], UNFINISHED] -= 1
    if state.series.size > 1:
        change(ints, state.adapters, state.sizes, a, RUNS, LESS)
    if requests[r, GENERATED] == requests[r, OUTPUT]:  # preempted with its last token on its way
        ints[WAITING] -= 1
        return
    size = requests[r, CONTEXT] + requests[r, OUTPUT] - requests[r, GENERATED] - 1
    if pool.all[0].caching == 1:
        full = size // ints[BLOCK_SIZE]
        hash_full(state, pool, r, full)
        stand_up(state, pool, r, blocks_of(size, ints[BLOCK_SIZE]), full, False)
    else:
        ints[USED] -= blocks_of(size, ints[BLOCK_SIZE])
    unlink(state.links, OLDER, r)
    ints[RUNNING] -= 1


@njit(**INLINED)
def first_token(state: ServerState, r: int) -> None:
    """The prefill of request `r` ended: its first token comes out, or its next one, if it was preempted."""
    times, now = state.times, state.floats[NOW]
    if math.isnan(times[r, FIRST]):
        times[r, FIRST] = now
        times[r, FIRST_SEEN] = state.floats[SEEN_S]
        if state.series.size > 1 and state.ints[SERIES_OF_LISTS] == 1:
            change(state.ints, state.adapters, state.sizes, state.requests[r, OWNER] + 1, RUNS, MORE)
    else:
        state.histogram[gap_bin(now - times[r, LAST])] += 1
    times[r, LAST] = now


@njit(**INLINED)
def name_first(state: ServerState, pool: Pool, which: int, by: int) -> None:
    """`frontend.follow`."""
    number = state.ints[ENDED]
    while number > 0:
        if math.isnan(state.times[number - 1, FIRST]):
            owner = state.requests[number - 1, OWNER] + 1
            change(state.ints, state.adapters, state.sizes, owner, which, by)
        number = pool.after[number - 1]


@njit(**INLINED)
def deliver(state: ServerState, law: Law, pool: Pool) -> None:
    """`Scheduler.update_from_output`: the tokens of the step that ends NOW come out, as `emit.emit` does."""
    ints, floats, links = state.ints, state.floats, state.links
    decodes = outputs = ints[STEP_DECODES]
    number = ints[ENDED]
    while number > 0:
        outputs += 1
        number = pool.after[number - 1]
    gap_s = stream(floats, law.frontend, outputs)
    counted = state.series.size > 1 and ints[SERIES_OF_LISTS] == 0 and outputs > CHUNK_OUTPUTS
    if state.series.size > 1 and ints[SERIES_OF_LISTS] == 0:
        name_first(state, pool, RUNS, MORE)
        if counted:
            count_series(ints, state.adapters, state.sizes, state.series)
        name_first(state, pool, WAITS, LESS)
    bucket = last_bucket(ints)
    r = links[bucket, DUE_AFTER]
    while r != bucket and state.requests[r, START] != ints[STEP] - 1:
        finish(state, pool, r)
        r = links[bucket, DUE_AFTER]
    while ints[ENDED] > 0:
        r = ints[ENDED] - 1
        ints[ENDED] = pool.after[r]
        first_token(state, r)
        if links[bucket, DUE_AFTER] == r:
            finish(state, pool, r)
    if decodes > 0:
        ints[GAPS] += decodes
        if gap_s < 0.0:
            ints[MERGED] += decodes
        else:
            state.histogram[gap_bin(max(gap_s, MIN_GAP_S))] += decodes
    if state.series.size > 1 and not counted:
        count_series(ints, state.adapters, state.sizes, state.series)


# ---- the loop


@njit(**INLINED)
def begin(state: ServerState, pipeline: Records, ms: float) -> None:
    """The step is executed, from NOW on."""
    charge(state.ints, state.floats, state.timeline, ms)
    state.ints[IN_FLIGHT], pipeline[0].turned = 1, 0


@njit(**INLINED)
def begin_next(state: ServerState, pipeline: Records) -> None:
    """The step that was scheduled ahead is executed."""
    ints, step = state.ints, pipeline[0]
    ints[ENDED], ints[ENDED_LAST] = step.ended, step.ended_last
    ints[STEP_DECODES], ints[STEP_PREFILL], ints[STEP_PREEMPTED] = step.decodes, step.prefill, step.preempted
    state.floats[LOAD_MS] = step.load_ms
    step.ahead = 0
    begin(state, pipeline, step.ms)


@njit(**INLINED)
def plan_next(state: ServerState, law: Law, pool: Pool, pipeline: Records) -> None:
    """Schedule the step after the one in flight; a step without tokens is none."""
    ints, floats, step = state.ints, state.floats, pipeline[0]
    if step.turned == 0:
        turn(state, pool)
        step.turned = 1
    ended, last, load_ms = ints[ENDED], ints[ENDED_LAST], floats[LOAD_MS]
    decodes, prefill, preempted = ints[STEP_DECODES], ints[STEP_PREFILL], ints[STEP_PREEMPTED]
    plan(state, law, pool, True)
    if ints[STEP_DECODES] + ints[STEP_PREFILL] > 0:
        step.ahead, step.ms = 1, planned_ms(state, law, 2)
        step.ended, step.ended_last, step.load_ms = ints[ENDED], ints[ENDED_LAST], floats[LOAD_MS]
        step.decodes, step.prefill, step.preempted = (
            ints[STEP_DECODES], ints[STEP_PREFILL], ints[STEP_PREEMPTED],
        )  # fmt: skip
    ints[ENDED], ints[ENDED_LAST], floats[LOAD_MS] = ended, last, load_ms
    ints[STEP_DECODES], ints[STEP_PREFILL], ints[STEP_PREEMPTED] = decodes, prefill, preempted
