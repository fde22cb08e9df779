"""A step is scheduled where vLLM schedules ahead or caches prefixes: `schedule` and `admit` with blocks of their own.

See `engine.pipeline` for what comes before and after.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import IntArray
from packer.twin.engine.admit import next_adapter
from packer.twin.engine.charge import step_ms
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.holding import find, hash_full, idle_blocks, leave_phase, sit_down, stand_up
from packer.twin.engine.pool import Pool, free_blocks, take_blocks
from packer.twin.engine.schedule import blocks_of, end_prefill, phase_of
from packer.twin.engine.slots import join, leave, walk
from packer.twin.engine.state import (
    ACTIVE, ADAPTER_LOADS, ATTENDED, BLOCK_SIZE, BUCKET, CONTEXT, CONTEXT_TOKENS, DECODES, DUE_AFTER, DUE_BEFORE,
    ENDED, END_S, FIRST_KEY, GENERATED, HEAD, HEAP_ACTIVE, IN_BATCH, IN_FLIGHT, JOINERS, KEY, KV_BLOCKS, LAST,
    LAST_USE, LINGERING, LOAD_MS, MAX_SEQS, NOW, NO_LIMIT, OLDER, OUTPUT, OWNER, PARTIAL, PARTIAL_DONE, PHASE,
    PREEMPTIONS, PROMPT, RESIDENT, RING, RUNNING, SENTINEL, SKIPPED_FIRST, SLOTS, SLOTS_OF_RUNNING, START, STEP,
    STEP_DECODES, STEP_PREEMPTED, STEP_PREFILL, ServerState, TOKEN_BUDGET, UNAWAITED, USED, WAITING, WHOLE_SEQUENCE,
)  # fmt: skip
from packer.twin.engine.waiting import after_walk, place, put_behind_skipped, put_first, take_first
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED
from packer.twin.law.law import IS_PAPER, Law
from packer.twin.law.linear import AT


@njit(**CALLED)
def preempt_last(state: ServerState, pool: Pool, ahead: bool) -> None:
    """Preempt the request admitted last, as `schedule.preempt` does; `ahead` as in `grow_hashed`."""
    ints, requests, times, size = state.ints, state.requests, state.times, state.ints[BLOCK_SIZE]
    r = state.links[ints[SENTINEL], OLDER]
    a = requests[r, OWNER] + 1
    unlink(state.links, OLDER, r)
    ints[RUNNING] -= 1
    ints[STEP_PREEMPTED] += 1
    ints[PREEMPTIONS] += 1
    done = False
    if r + 1 == ints[PARTIAL]:
        held = ints[PARTIAL_DONE]
        full = held // size
        ints[PARTIAL] = 0
    else:
        held = context_of(state, r)
        full = max(requests[r, CONTEXT] // size, (held - ahead) // size)
        if requests[r, START] != ints[STEP] - 1:  # else `deliver` says when its token came
            times[r, LAST] = state.floats[END_S] if ints[IN_FLIGHT] == 1 else state.floats[NOW]
        requests[r, GENERATED] += ints[STEP] - requests[r, START]
        done = requests[r, GENERATED] == requests[r, OUTPUT]  # by the step in flight: it waits for that alone
        if not done:
            ints[CONTEXT_TOKENS] -= held
            ints[DECODES] -= 1
            unlink(state.links, DUE_BEFORE, r)
            state.phase[phase_of_start(state, r)] -= 1  # of the step in which it was scheduled last
            if pool.seat[r] > 0:
                leave_phase(pool, pool.seat[r])
    if pool.all[0].caching == 1:
        stand_up(state, pool, r, blocks_of(held, size), full, not done)
    else:
        ints[USED] -= blocks_of(held, size)
    if done:
        ints[WAITING] += 1
        return
    if ints[SKIPPED_FIRST] == 1:
        put_behind_skipped(ints, requests, state.adapters, state.heaps, r, a)
    else:
        put_first(ints, requests, state.adapters, r, a)
    leave(ints, state.adapters, state.sizes, state.classes, state.sets, a, ints[STEP] - 1)
    place(ints, state.adapters, state.heaps, a)


@njit(inline="always", **ENGINE_FLAGS)
def context_of(state: ServerState, r: int) -> int:
    """Tokens of decode `r` that were computed, or scheduled, before the step that is being scheduled."""
    tokens: int = state.requests[r, CONTEXT] + state.ints[STEP] - 1 - state.requests[r, START]
    return tokens


@njit(inline="always", **ENGINE_FLAGS)
def phase_of_start(state: ServerState, r: int) -> int:
    """`phase_of`."""
    phase: int = phase_of(state.requests, r, state.ints[BLOCK_SIZE])
    return phase


@njit(**INLINED)
def grow_counted(state: ServerState, pool: Pool) -> int:
    """Blocks for the running requests where they are only counted; tokens that the cut prefill gets."""
    ints, phase = state.ints, state.phase
    while True:
        chunk, growth = chunk_of(state)
        needed = growth + phase[ints[PHASE]]
        if ints[USED] + needed <= ints[KV_BLOCKS]:
            ints[USED] += needed
            return int(chunk)
        preempt_last(state, pool, False)


@njit(inline="always", **ENGINE_FLAGS)
def chunk_of(state: ServerState) -> tuple[int, int]:
    """Tokens of the cut prefill that this step takes, and the blocks that they need; 0 without one."""
    ints = state.ints
    if ints[PARTIAL] == 0:
        return 0, 0
    done, size = ints[PARTIAL_DONE], ints[BLOCK_SIZE]
    chunk = min(state.requests[ints[PARTIAL] - 1, CONTEXT] - done, ints[TOKEN_BUDGET] - ints[DECODES])
    return chunk, blocks_of(done + chunk, size) - blocks_of(done, size)


@njit(**INLINED)
def hash_phase(state: ServerState, pool: Pool, phase: int, new: int) -> None:
    """What decodes of this phase have filled, with `new` tokens of the step that is being scheduled, can be found."""
    s = pool.seats[phase].after
    while s != phase:
        r = pool.seats[s].request
        hash_full(state, pool, r, (context_of(state, r) + new) // state.ints[BLOCK_SIZE])
        s = pool.seats[s].after


@njit(**INLINED)
def grow_hashed(state: ServerState, pool: Pool, ahead: bool) -> int:
    """As `grow_counted`, where blocks that are taken are found no more, in the order of `self.running`.

    Requests take theirs one by one, until none is free: then the last of them is preempted. A block that a decode
    fills is hashed when the step that fills it is scheduled; with a token on its way (`ahead`) when the next one is,
    because `request.num_tokens` does not count that token yet (`allocate_slots`).
    """
    ints, phase, taken = state.ints, state.ints[PHASE], 0
    while taken < state.phase[phase]:
        count = min(free_blocks(state), state.phase[phase] - taken)
        if count == 0:
            preempt_last(state, pool, ahead)
        take_blocks(state, pool, count)
        taken += count
    if ahead:
        hash_phase(state, pool, phase, 0)
    else:
        hash_phase(state, pool, phase + 1 if phase + 1 < ints[BLOCK_SIZE] else 0, 1)
    chunk, growth = chunk_of(state)
    if growth > free_blocks(state):
        preempt_last(state, pool, ahead)  # itself
        return 0
    if chunk > 0:
        take_blocks(state, pool, growth)
        hash_full(state, pool, ints[PARTIAL] - 1, (ints[PARTIAL_DONE] + chunk) // ints[BLOCK_SIZE])
    return int(chunk)


@njit(inline="always", **ENGINE_FLAGS)
def last_bucket(ints: IntArray) -> int:
    """Head of the ring of requests whose last token the step in flight computes."""
    bucket: int = ints[SENTINEL] + (ints[BUCKET] if ints[BUCKET] > 0 else ints[RING]) - 1
    return bucket


@njit(inline="always", **ENGINE_FLAGS)
def lingers(state: ServerState, a: int) -> bool:
    """With a step in flight: whether adapter row `a` belongs to the running requests because of one that it ends."""
    left: bool = state.adapters[a, LAST_USE] == state.ints[STEP] + 1
    return left and state.adapters[a, IN_BATCH] == 0


@njit(**INLINED)
def next_of_running(state: ServerState) -> int:
    """`next_adapter` where adapters that linger have slots, too: no other may take one while all are taken."""
    ints, adapters = state.ints, state.adapters
    if ints[ACTIVE] + ints[LINGERING] < ints[SLOTS]:
        a = next_adapter(ints, adapters, state.heaps)
        ints[LINGERING] -= a > 0 and lingers(state, a)  # it joins the batch, or the walk ends
        return int(a)
    a = state.heaps[1, 0] if ints[HEAP_ACTIVE] > 0 else 0
    bucket = last_bucket(ints)
    r = state.links[bucket, DUE_AFTER]
    while r != bucket:
        e = state.requests[r, OWNER] + 1
        waits = adapters[e, HEAD] > 0 and lingers(state, e)
        if waits and (a == 0 or adapters[e, FIRST_KEY] < adapters[a, FIRST_KEY]):
            a = e
        r = state.links[r, DUE_AFTER]
    ints[LINGERING] -= a > 0 and lingers(state, a)
    return int(a)


@njit(**INLINED)
def room_for(state: ServerState, pool: Pool, r: int, tokens: int, budget: int) -> tuple[int, int]:
    """Tokens of request `r` that are in the cache, and those of the rest that this step computes; -1: no room."""
    ints, size = state.ints, state.ints[BLOCK_SIZE]
    hits = find(state, pool, r) if pool.all[0].caching == 1 else 0
    take = min(tokens - hits * size, budget)
    last = tokens if ints[WHOLE_SEQUENCE] == 1 else hits * size + take
    needed = blocks_of(last, size)
    if needed > free_blocks(state):  # even if all that was found is free
        held = hits - idle_blocks(pool, r, hits, size) if hits > 0 else 0
        if needed - held > free_blocks(state):
            return -1, 0
    return hits * size, take


@njit(**INLINED)
def admit_one(state: ServerState, law: Law, pool: Pool, a: int, cached: int, take: int) -> None:
    """The first waiting request of adapter row `a` joins the batch, with `take` tokens behind the `cached` ones."""
    ints, requests = state.ints, state.requests
    r = state.adapters[a, HEAD] - 1
    size, tokens = ints[BLOCK_SIZE], requests[r, PROMPT] + requests[r, GENERATED]
    if pool.all[0].caching == 1:
        sit_down(state, pool, r, cached // size)
        take_blocks(state, pool, blocks_of(cached + take, size) - cached // size)
        hash_full(state, pool, r, (cached + take) // size)
        if pool.found[r] < 0:
            pool.found[r] = cached
    else:
        ints[USED] += blocks_of(take, size)
    take_first(ints, requests, state.adapters, r, a)
    join(
        ints, state.floats, state.adapters, state.sizes, state.classes, state.sets, law.loading, a,
    )  # fmt: skip
    place(ints, state.adapters, state.heaps, a)
    ints[RUNNING] += 1
    link_last(state.links, OLDER, ints[SENTINEL], r)
    requests[r, CONTEXT] = tokens
    ints[STEP_PREFILL] += take
    ints[ATTENDED] += take * (2 * cached + take) // 2
    if cached + take < tokens:
        ints[PARTIAL], ints[PARTIAL_DONE] = r + 1, cached + take
    else:
        end_prefill(ints, requests, r)


@njit(**INLINED)
def plan(state: ServerState, law: Law, pool: Pool, ahead: bool) -> None:
    """`Scheduler.schedule`: what the next step computes (STEP_DECODES, STEP_PREFILL, ENDED, LOAD_MS)."""
    ints, requests = state.ints, state.requests
    ints[STEP_PREEMPTED] = ints[ENDED] = 0
    caching = pool.all[0].caching == 1
    chunk = grow_hashed(state, pool, ahead) if caching else grow_counted(state, pool)
    ints[CONTEXT_TOKENS] += ints[DECODES]
    ints[STEP_DECODES], ints[STEP_PREFILL] = ints[DECODES], chunk
    ints[ATTENDED] = chunk * (2 * ints[PARTIAL_DONE] + chunk) // 2
    if chunk > 0:
        ints[PARTIAL_DONE] += chunk
        if ints[PARTIAL_DONE] == requests[ints[PARTIAL] - 1, CONTEXT]:
            end_prefill(ints, requests, ints[PARTIAL] - 1)
            ints[PARTIAL] = 0
    state.floats[LOAD_MS] = 0.0
    loads, misses, end_key = ints[ADAPTER_LOADS], 0, -NO_LIMIT
    budget = ints[TOKEN_BUDGET] - ints[STEP_DECODES] - chunk
    while (
        ints[STEP_PREEMPTED] == 0 and ints[WAITING] > 0 and budget > 0 and ints[PARTIAL] == 0
        and ints[RUNNING] < ints[MAX_SEQS]
    ):  # fmt: skip
        if ahead and ints[SLOTS_OF_RUNNING] == 1 and ints[LINGERING] > 0:
            a = next_of_running(state)
        else:
            a = next_adapter(ints, state.adapters, state.heaps)
        if a == 0:
            end_key = NO_LIMIT
            break
        r = state.adapters[a, HEAD] - 1
        end_key = requests[r, KEY]
        cached, take = room_for(state, pool, r, requests[r, PROMPT] + requests[r, GENERATED], budget)
        if cached < 0:  # `allocate_slots` returned None: the walk ends
            break
        misses += state.adapters[a, RESIDENT] == 0
        admit_one(state, law, pool, a, cached, take)
        budget -= take
    after_walk(ints, requests, state.adapters, state.heaps, end_key)
    if ints[JOINERS] > 0:
        walk(ints, state.floats, state.adapters, state.sizes, state.sets, law.loading)
    ints[UNAWAITED] += max(0, ints[ADAPTER_LOADS] - loads - misses)


@njit(**INLINED)
def planned_ms(state: ServerState, law: Law, depth: int) -> float:
    """How long the step takes that was scheduled last, ms.

    Scheduled ahead, the walk over the waiting requests is done while the step before it is executed: it costs time
    only where it takes longer than the step itself. The loads of adapters are part of the step (`execute_model`).
    """
    load_ms = state.floats[LOAD_MS]
    ms = step_ms(
        state.ints, state.classes, state.vector, state.means, law.coefficients, law.settings, load_ms
    )
    if depth == 1 or law.settings[IS_PAPER] > 0:
        return float(ms)
    host_ms = law.coefficients[AT.per_waiting_ms] * state.vector[AT.per_waiting_ms]
    return float(max(ms - load_ms - host_ms, host_ms) + load_ms)
