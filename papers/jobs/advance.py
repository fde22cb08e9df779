"""An engine that runs whole jobs, c at a time: image generation, and the limits of queueing theory.

No batching: a job first waits for its adapter's load, then takes as long as the step law says of a step with its
prompt tokens and one decode for each of its outputs (iterations), times its own noise. Jobs start in order of
arrival. The result comes at once: the first token is the last. Compiled only where it is used.
"""

from __future__ import annotations

import math

from numba import njit

from packer.papers.cache.kernel import enter_batch, leave_batch, make_room, tidy
from packer.papers.accept import accept, leave_queue
from packer.twin.engine.charge import MIN_STEP_S
from packer.twin.engine.state import (
    ACTIVE, BATCH, BIN_S, BLOCKS, BUSY_S, DECODES, DUE_AFTER, FINISH, FINISHED, FINISH_SEEN, FIRST, FIRST_SEEN,
    LAST, LOAD_S, MAX_SEQS, NEXT_S, NOW, OUTPUT, OWNER, PEAK_BLOCKS, PEAK_RUNNING, PROMPT, RANK, RESIDENT,
    RUNNING, RUN_S, SENTINEL, SLOTS, SLOT_RANK, STALL_S, STEP, T_ADAPTERS, T_BUSY, T_DECODE, T_KV, T_RUNNING,
    T_WAITING, USED, WAITING, ServerState,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import Law
from packer.twin.law.linear import linear_ms, state_vector


@njit(**ENGINE_FLAGS)
def spend(state: ServerState, until_s: float) -> None:
    """Time goes on to `until_s`: integrals of the state over the bins of the timeline."""
    ints, floats = state.ints, state.floats
    until_s = min(until_s, floats[RUN_S])
    busy = ints[RUNNING] / ints[MAX_SEQS]
    now = floats[NOW]
    floats[BUSY_S] += max(until_s - now, 0.0) * busy
    while now < until_s:
        k = min(int(now / floats[BIN_S]), state.timeline.shape[0] - 1)
        end_s = min(until_s, (k + 1) * floats[BIN_S]) if k + 1 < state.timeline.shape[0] else until_s
        dt = end_s - now
        row = state.timeline[k]
        row[T_BUSY] += dt * busy
        row[T_RUNNING] += dt * ints[RUNNING]
        row[T_WAITING] += dt * ints[WAITING]
        row[T_KV] += dt * ints[USED]
        row[T_ADAPTERS] += dt * ints[ACTIVE]
        if end_s <= now:
            break
        now = end_s
    floats[NOW] = max(floats[NOW], until_s)


@njit(**ENGINE_FLAGS)
def start(state: ServerState, law: Law, r: int) -> bool:
    """Job `r`, the first of the queue, starts: its adapter is loaded, then it runs to its end; False without room."""
    ints, floats, requests, times = state.ints, state.floats, state.requests, state.times
    adapters, sizes = state.adapters, state.sizes
    a = requests[r, OWNER] + 1
    if adapters[a, RESIDENT] == 0 and not make_room(ints, adapters, sizes, sizes[a, BLOCKS], 1, a):
        return False
    leave_queue(state, r)
    load_s, rank = enter_batch(state, law.loading, a) * 1e-3, sizes[a, RANK]
    ints[DECODES] += 1
    state_vector(
        state.vector, requests[r, OUTPUT], requests[r, PROMPT], 1.0, rank, ints[SLOTS], ints[SLOT_RANK], 0.0, 0.0,
        law.settings, rank, rank, 0.0, 0.5 * requests[r, PROMPT] * requests[r, PROMPT],
    )  # fmt: skip
    service_s = linear_ms(law.coefficients, state.vector) * 1e-3 * times[r, LAST]
    end_s = floats[NOW] + load_s + max(service_s, MIN_STEP_S)
    floats[LOAD_S] += load_s
    floats[STALL_S] += load_s
    times[r, FINISH] = end_s
    ints[PEAK_RUNNING] = max(ints[PEAK_RUNNING], ints[RUNNING])
    ints[PEAK_BLOCKS] = max(ints[PEAK_BLOCKS], ints[USED])
    order = state.sets[0]  # running jobs, last to finish first
    i = ints[BATCH]
    while i > 0 and times[order[i - 1], FINISH] < end_s:
        order[i] = order[i - 1]
        i -= 1
    order[i] = r
    ints[BATCH] += 1
    return True


@njit(**ENGINE_FLAGS)
def finish(state: ServerState) -> None:
    """The job that ends first is done, now."""
    ints, floats, requests, times = state.ints, state.floats, state.requests, state.times
    ints[BATCH] -= 1
    r = state.sets[0, ints[BATCH]]
    times[r, FIRST] = times[r, FIRST_SEEN] = times[r, FINISH_SEEN] = times[r, FINISH]
    state.status[r] = FINISHED
    ints[STEP] += 1
    ints[DECODES] -= 1
    k = min(int(floats[NOW] / floats[BIN_S]), state.timeline.shape[0] - 1)
    state.timeline[k, T_DECODE] += requests[r, OUTPUT]
    if leave_batch(state, requests[r, OWNER] + 1):
        tidy(ints, state.adapters, state.sizes, 0)


@njit(**ENGINE_FLAGS)
def wake_s(state: ServerState) -> float:
    """When the next job ends or arrives."""
    next_s: float = state.floats[NEXT_S]
    if state.ints[BATCH] > 0:
        next_s = min(next_s, state.times[state.sets[0, state.ints[BATCH] - 1], FINISH])
    return next_s


@njit(**ENGINE_FLAGS)
def advance(state: ServerState, law: Law, until_s: float) -> None:
    """As `engine.advance.advance`: jobs that end by `until_s` end, those that come before it arrive and may start."""
    ints, floats = state.ints, state.floats
    last = until_s >= floats[RUN_S]
    while True:
        end_s = math.inf
        if ints[BATCH] > 0:
            end_s = state.times[state.sets[0, ints[BATCH] - 1], FINISH]
        next_s = floats[NEXT_S]
        if end_s <= next_s:
            if end_s > until_s:
                break
            spend(state, end_s)
            finish(state)
        else:
            if next_s > until_s or (next_s == until_s and not last):
                break
            spend(state, next_s)
            accept(state)
        while ints[WAITING] > 0 and ints[RUNNING] < ints[MAX_SEQS] and floats[NOW] < floats[RUN_S]:
            if not start(state, law, state.links[ints[SENTINEL], DUE_AFTER]):
                break
    if last:
        spend(state, until_s)
        for i in range(ints[BATCH]):  # not finished by the end
            state.times[state.sets[0, i], FINISH] = math.nan
