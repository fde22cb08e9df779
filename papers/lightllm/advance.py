"""The step loop of LightLLM as S-LoRA and CaraServe use it: prefills and decodes in steps of their own.

Written from S-LoRA (arXiv 2311.03285) and its public router: a pool of cells holds the KV cache and adapters; a
request is admitted if the batch can never need more cells than there are, with its adapters, so that nothing is
preempted; adapters that no running request uses leave at once; every `MAX_WAIT` decode steps the queue is looked
at, and what is admitted is prefilled while the decodes wait. Compiled only where it is used.
"""

from __future__ import annotations

import math

from numba import njit

from packer.papers.cache.kernel import LOADING, TAGGED, enter_batch, leave_batch, make_room, put, tidy
from packer.papers.cache.loading import ASYNC, CPU_ASSIST, PREFETCH
from packer.papers.accept import leave_queue
from packer.twin.engine.charge import charge
from packer.twin.engine.containers import link_last
from packer.twin.engine.emit import gap_bin
from packer.papers.lightllm.peak import insert, peak, remove
from packer.papers.lightllm.queue import arrive, fetch, finish_loads, give_up
from packer.twin.engine.state import (
    ABORT_AFTER_S, ACTIVE, ACTIVE_BLOCKS, ACTIVE_RANKS, ADMISSIONS, ARRIVALS, BATCH, BLOCKED, BLOCKS, CLASS_RANK,
    CLUSTER, CONTEXT_TOKENS, CPU_FACTOR, DECODES, DECODE_STEPS, DUE_AFTER, DUE_BEFORE, ENDED, END_S, FINISH,
    FINISHED, FINISH_SEEN, FIRST, FIRST_SEEN, GAPS, IDLE_BEFORE, IN_BATCH, IN_FLIGHT, KV_BLOCKS, LARGEST, LAST,
    LAST_USE, LEFT, LOADING_BLOCKS, LOADING_MODE, LOAD_END_S, LOAD_MS, MAX_SEQS, MAX_WAIT, NEXT, NEXT_S, NOW,
    OUTPUT, OWNER, PLACE, PREFILLING, PROMPT, RANK, REACH_S, REQUEST_RANKS, RESIDENT, RESIDENTS, RUNNING, RUN_S,
    SENTINEL, SINCE, SLOTS, SLOT_LIMIT, SLOT_RANK, START, STEP, STEP_DECODES, STEP_PREFILL, TAG, TOKEN_BUDGET,
    UNAWAITED, USED, WAITING, ServerState,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS, INLINED
from packer.twin.law.law import Law
from packer.twin.law.linear import AT, linear_ms, state_vector

REFUSED, ADMITTED, PASSED_OVER = range(3)
SMOOTHING = 0.7
_PREFILL = AT.per_prefill_token_ms
COUNTED = PLACE
"""Column of `adapters` that only vLLM's engine uses otherwise: step + 1 in whose prefill it was counted."""


@njit(**ENGINE_FLAGS)
def join(state: ServerState, law: Law, r: int, a: int) -> None:
    """Request `r` of adapter row `a` joins the batch, its adapter with it; adds its load to LOAD_MS."""
    ints, adapters, sizes = state.ints, state.adapters, state.sizes
    if adapters[a, RESIDENT] == 0:
        make_room(ints, adapters, sizes, sizes[a, BLOCKS], 1, a)
        adapters[a, LAST_USE] = ints[STEP] + 1
    state.floats[LOAD_MS] += enter_batch(state, law.loading, a)
    make_room(ints, adapters, sizes, state.requests[r, PROMPT] + 1, 0, a)
    ints[USED] += state.requests[r, PROMPT] + 1


@njit(**INLINED)
def leave(state: ServerState, r: int) -> None:
    """Request `r`, which got its last token, leaves the batch."""
    ints, requests = state.ints, state.requests
    state.times[r, FINISH] = state.times[r, FINISH_SEEN] = state.floats[NOW]
    state.status[r] = FINISHED
    tokens = requests[r, PROMPT] + requests[r, OUTPUT]
    ints[USED] -= tokens
    ints[CONTEXT_TOKENS] -= tokens
    leave_batch(state, requests[r, OWNER] + 1)


@njit(**ENGINE_FLAGS)
def try_to_admit(state: ServerState, law: Law, r: int) -> int:
    """REFUSED, ADMITTED, or PASSED_OVER because its adapter is still on its way."""
    ints, requests, adapters, sizes = state.ints, state.requests, state.adapters, state.sizes
    a = requests[r, OWNER] + 1
    if ints[LOADING_MODE] == ASYNC and adapters[a, RESIDENT] == 0:
        if adapters[a, LOADING] == 0 and not fetch(state, law, a):
            return REFUSED
        return PASSED_OVER
    joins = adapters[a, IN_BATCH] == 0
    if (
        ints[BATCH] >= ints[MAX_SEQS]
        or ints[STEP_PREFILL] + requests[r, PROMPT] > ints[TOKEN_BUDGET]
        or (joins and ints[ACTIVE] >= ints[SLOT_LIMIT])
    ):
        return REFUSED
    requests[r, START] = ints[DECODE_STEPS] + requests[r, OUTPUT] - 1
    order = state.sets[0]
    place = insert(ints, requests, order, r)
    blocks = ints[ACTIVE_BLOCKS] + ints[LOADING_BLOCKS] + (sizes[a, BLOCKS] if joins else 0)
    if peak(ints, requests, order) >= ints[KV_BLOCKS] - blocks:
        remove(ints, order, place)
        return REFUSED
    leave_queue(state, r)
    join(state, law, r, a)
    if adapters[a, LAST_USE] == ints[STEP] + 1:
        ints[STEP_DECODES] += requests[r, PROMPT]
    ints[STEP_PREFILL] += requests[r, PROMPT]
    requests[r, NEXT] = ints[ENDED]
    ints[ENDED] = r + 1
    return ADMITTED


@njit(**ENGINE_FLAGS)
def walk(state: ServerState, law: Law, along: int, only_batch: bool) -> None:
    """Admit along the queue (`along`: the column of `links` to follow) up to the first refusal."""
    ints, links = state.ints, state.links
    r = links[ints[SENTINEL], along]
    while r != ints[SENTINEL]:
        after = links[r, along]
        tried = not only_batch or state.adapters[state.requests[r, OWNER] + 1, IN_BATCH] > 0
        if tried and try_to_admit(state, law, r) == REFUSED:
            return
        r = after


@njit(**ENGINE_FLAGS)
def admit(state: ServerState, law: Law) -> int:
    """Admit what fits; STEP_PREFILL, LOAD_MS and the list ENDED say what; returns how many.

    STEP_DECODES holds, until the step is charged, the prompt tokens whose adapter has yet to come.
    """
    ints, floats = state.ints, state.floats
    ints[STEP_PREFILL] = ints[STEP_DECODES] = ints[ENDED] = 0
    floats[LOAD_MS] = 0.0
    before, along = ints[RUNNING], DUE_AFTER
    if floats[ABORT_AFTER_S] < math.inf:
        arrived = ints[WAITING] - ints[LEFT]
        floats[ARRIVALS] = SMOOTHING * arrived + (1.0 - SMOOTHING) * floats[ARRIVALS]
        give_up(state)
        if floats[ARRIVALS] >= floats[ADMISSIONS]:
            along = DUE_BEFORE  # newest first
    if ints[ACTIVE] >= ints[CLUSTER]:
        walk(state, law, along, True)
    walk(state, law, along, False)
    admitted = ints[RUNNING] - before
    if admitted > 0:
        floats[ADMISSIONS] = SMOOTHING * admitted + (1.0 - SMOOTHING) * floats[ADMISSIONS]
    ints[LEFT] = ints[WAITING]
    return int(admitted)


@njit(**ENGINE_FLAGS)
def prefetch(state: ServerState) -> None:
    """Load the adapters of the next batch during the decodes, while cells are free."""
    ints, links, adapters, sizes = state.ints, state.links, state.adapters, state.sizes
    ints[TAG] += 1
    tokens = 0
    r = links[ints[SENTINEL], DUE_AFTER]
    while r != ints[SENTINEL]:
        tokens += state.requests[r, PROMPT]
        a = state.requests[r, OWNER] + 1
        absent = adapters[a, RESIDENT] == 0
        full = ints[USED] + sizes[a, BLOCKS] > ints[KV_BLOCKS] or ints[RESIDENTS] >= ints[SLOT_LIMIT]
        if tokens > ints[TOKEN_BUDGET] or (absent and full):
            return
        if absent:
            put(ints, adapters, sizes, a)
            ints[UNAWAITED] += 1
            link_last(adapters, IDLE_BEFORE, 0, a)
        adapters[a, TAGGED] = ints[TAG]
        r = links[r, DUE_AFTER]


@njit(**ENGINE_FLAGS)
def begin_prefill(state: ServerState, law: Law, admitted: int) -> None:
    """The step that prefills what was admitted, by the law of those requests alone."""
    ints, floats, requests, sizes = state.ints, state.floats, state.requests, state.sizes
    adapters, ranks, request_ranks, largest = 0, 0, 0, 0
    r = ints[ENDED] - 1
    while r >= 0:
        a = requests[r, OWNER] + 1
        rank = sizes[a, RANK]
        request_ranks += rank
        largest = max(largest, rank)
        if state.adapters[a, COUNTED] != ints[STEP] + 1:
            state.adapters[a, COUNTED] = ints[STEP] + 1
            adapters += 1
            ranks += rank
        r = requests[r, NEXT] - 1
    missing = ints[STEP_DECODES]
    ints[STEP_DECODES], ints[PREFILLING] = 0, 1
    state_vector(
        state.vector, 0.0, ints[STEP_PREFILL], adapters, ranks, ints[SLOTS], ints[SLOT_RANK], 0.0,
        ints[WAITING], law.settings, request_ranks, admitted * largest, 0.0,
        0.5 * ints[STEP_PREFILL] * ints[STEP_PREFILL] / max(admitted, 1),
    )  # fmt: skip
    ms = linear_ms(law.coefficients, state.vector)
    if ints[LOADING_MODE] == CPU_ASSIST and missing > 0:
        assisted = ms + (floats[CPU_FACTOR] - 1.0) * law.coefficients[_PREFILL] * missing
        floats[LOAD_MS] = max(assisted, floats[LOAD_MS]) - ms
    charge(ints, floats, state.timeline, ms + floats[LOAD_MS])


@njit(**ENGINE_FLAGS)
def begin_decode(state: ServerState, law: Law) -> None:
    """The step in which each request of the batch gets a token."""
    ints, floats = state.ints, state.floats
    floats[LOAD_MS] = 0.0
    decodes = ints[BATCH]
    make_room(ints, state.adapters, state.sizes, decodes, 0, 0)
    ints[USED] += decodes
    ints[STEP_DECODES], ints[STEP_PREFILL], ints[PREFILLING] = decodes, 0, 0
    state_vector(
        state.vector, decodes, 0.0, ints[ACTIVE], ints[ACTIVE_RANKS], ints[SLOTS], ints[SLOT_RANK],
        ints[CONTEXT_TOKENS], ints[WAITING], law.settings, ints[REQUEST_RANKS],
        decodes * state.classes[ints[LARGEST], CLASS_RANK], 0.0, 0.0,
    )  # fmt: skip
    ms = linear_ms(law.coefficients, state.vector)
    charge(ints, floats, state.timeline, ms)


@njit(**ENGINE_FLAGS)
def emit(state: ServerState) -> None:
    """Tokens come out at NOW, the end of the step; requests with all of theirs leave."""
    ints, requests, times, order = state.ints, state.requests, state.times, state.sets[0]
    now = state.floats[NOW]
    if ints[PREFILLING] == 1:
        r = ints[ENDED] - 1
        while r >= 0:
            times[r, FIRST] = times[r, FIRST_SEEN] = times[r, LAST] = now
            ints[CONTEXT_TOKENS] += requests[r, PROMPT] + 1
            r = requests[r, NEXT] - 1
        ints[ENDED] = 0
    else:
        ints[DECODE_STEPS] += 1
        ints[CONTEXT_TOKENS] += ints[BATCH]
        ints[GAPS] += ints[BATCH]
        last_s, k = math.nan, 0
        for i in range(ints[BATCH]):
            r = order[i]
            if times[r, LAST] != last_s:
                last_s = times[r, LAST]
                k = gap_bin(now - last_s)
            state.histogram[k] += 1
            times[r, LAST] = now
    finished = False
    while ints[BATCH] > 0 and requests[order[ints[BATCH] - 1], START] <= ints[DECODE_STEPS]:
        ints[BATCH] -= 1
        leave(state, order[ints[BATCH]])
        finished = True
    ints[DECODES] = ints[BATCH]
    if finished:
        tidy(ints, state.adapters, state.sizes, ints[TAG] if ints[BATCH] > 0 else 0)


@njit(**ENGINE_FLAGS)
def advance(state: ServerState, law: Law, until_s: float) -> None:
    """As `engine.advance.advance`: every step that starts before `until_s`; how a run is cut changes nothing."""
    ints, floats = state.ints, state.floats
    while True:
        over = False
        if ints[IN_FLIGHT] == 1:
            if floats[END_S] > until_s:
                over = True
            else:
                floats[NOW] = floats[END_S]
                emit(state)
                ints[IN_FLIGHT] = 0
                ints[STEP] += 1
        idle = ints[BLOCKED] == 1 or (ints[RUNNING] == 0 and ints[WAITING] == 0)
        next_s = wake_s(state)
        if idle and floats[NOW] < next_s < until_s:
            floats[NOW] = next_s
        over = over or (idle and next_s >= until_s) or floats[NOW] >= until_s
        if over and until_s < floats[RUN_S]:
            return
        now = until_s if over else floats[NOW]
        finish_loads(state, law, now)
        arrive(state, law, now)
        finish_loads(state, law, now)  # those that take no time
        if over:
            return
        ints[BLOCKED] = 0
        if ints[RUNNING] == 0 and ints[WAITING] == 0:
            continue
        admitted = 0
        if ints[WAITING] > 0 and (ints[RUNNING] == 0 or ints[SINCE] >= ints[MAX_WAIT]):
            admitted = admit(state, law)
        if admitted > 0:
            ints[SINCE] = 0
            begin_prefill(state, law, admitted)
        elif ints[RUNNING] == 0:
            ints[BLOCKED] = 1 if ints[WAITING] > 0 else 0
            continue
        else:
            since, wait = ints[SINCE], ints[MAX_WAIT]
            if ints[LOADING_MODE] == PREFETCH and since < wait and since in (wait // 2, wait - 3):
                prefetch(state)
            begin_decode(state, law)
            ints[SINCE] = min(ints[SINCE] + 1, ints[MAX_WAIT])
        ints[IN_FLIGHT] = 1


@njit(**ENGINE_FLAGS)
def wake_s(state: ServerState) -> float:
    """When an idle server next has something to do."""
    next_s: float = state.floats[NEXT_S]
    if state.ints[WAITING] > 0:
        next_s = min(next_s, state.floats[LOAD_END_S])
    return next_s


@njit(**ENGINE_FLAGS)
def event_s(state: ServerState) -> float:
    """When the server next has something to do, seen by the cluster."""
    ints, floats = state.ints, state.floats
    if ints[IN_FLIGHT] == 1:
        return float(floats[END_S])
    if ints[BLOCKED] == 1:
        return float(wake_s(state))
    if ints[RUNNING] + ints[WAITING] > 0:
        return float(floats[NOW])
    return float(min(floats[NEXT_S], floats[REACH_S]))
