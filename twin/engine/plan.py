"""Schedule a step with asynchronous scheduling or prefix caching: `schedule` and `admit` with their own block handling.

See `engine.pipeline` for the parts of a step before and after.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import Record
from packer.twin.engine.admit import admit_one, end_admission, next_adapter
from packer.twin.engine.charge import step_ms
from packer.twin.engine.containers import unlink
from packer.twin.engine.holding import find, hash_full, idle_blocks, leave_phase, sit_down, stand_up
from packer.twin.engine.pool import Pool, free_blocks, take_blocks
from packer.twin.engine.schedule import blocks_of, chunk_of, compute, phase_of
from packer.twin.engine.slots import leave
from packer.twin.engine.state import ACTIVE, NO_LIMIT, ServerState
from packer.twin.engine.waiting import place, put_behind_skipped, put_first
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED
from packer.twin.law.law import IS_PAPER, Law
from packer.twin.law.linear import AT


@njit(**CALLED)
def preempt_last(state: ServerState, pool: Pool, ahead: bool) -> None:
    """Preempt the request admitted last, as `schedule.preempt` does; `ahead` as in `grow_hashed`."""
    server, requests, size = state.server, state.requests, state.server.block_size
    r = state.links[server.sentinel].batch.before
    a = requests[r].owner + 1
    unlink(state.links["batch"], r)
    server.running -= 1
    server.step_preempted += 1
    server.preemptions += 1
    done = False
    if r + 1 == server.partial:
        held = server.partial_done
        full = held // size
        server.partial = 0
    else:
        held = context_of(state, r)
        full = max(requests[r].context // size, (held - ahead) // size)
        if requests[r].start != server.step - 1:  # else `deliver` sets it when the token comes out
            requests[r].last_s = server.end_s if server.in_flight == 1 else server.now_s
        requests[r].generated += server.step - requests[r].start
        done = requests[r].generated == requests[r].output  # by the step in flight: it waits only for its end
        if not done:
            server.context_tokens -= held
            server.decodes -= 1
            unlink(state.links["due"], r)
            state.phase[phase_of_start(state, r)] -= 1  # of the step in which it was scheduled last
            if pool.seat[r] > 0:
                leave_phase(pool, pool.seat[r])
    if pool.all[0].caching == 1:
        stand_up(state, pool, r, blocks_of(held, size), full, not done)
    else:
        server.used -= blocks_of(held, size)
    if done:
        server.waiting += 1
        return
    if server.skipped_first == 1:
        put_behind_skipped(server, requests, state.adapters, state.heaps, r, a)
    else:
        put_first(server, requests, state.adapters, r, a)
    leave(state, a, server.step - 1)
    place(server, state.adapters, state.heaps, a)


@njit(inline="always", **ENGINE_FLAGS)
def context_of(state: ServerState, r: int) -> int:
    """Tokens of decode `r` that were computed, or scheduled, before the step that is being scheduled."""
    tokens: int = state.requests[r].context + state.server.step - 1 - state.requests[r].start
    return tokens


@njit(inline="always", **ENGINE_FLAGS)
def phase_of_start(state: ServerState, r: int) -> int:
    """`phase_of` of request `r`."""
    phase: int = phase_of(state.requests, r, state.server.block_size)
    return phase


@njit(**INLINED)
def grow_counted(state: ServerState, pool: Pool) -> int:
    """Take blocks, which are only counted, for the running requests; return the tokens that the cut prefill gets."""
    server, phase = state.server, state.phase
    while True:
        chunk, growth = chunk_of(server, state.requests)
        needed = growth + phase[server.phase]
        if server.used + needed <= server.kv_blocks:
            server.used += needed
            return int(chunk)
        preempt_last(state, pool, False)


@njit(**INLINED)
def hash_phase(state: ServerState, pool: Pool, phase: int, new: int) -> None:
    """Hash the blocks that decodes of this phase fill, counting `new` tokens of the step that is being scheduled."""
    s = pool.seats[phase].after
    while s != phase:
        r = pool.seats[s].request
        hash_full(state, pool, r, (context_of(state, r) + new) // state.server.block_size)
        s = pool.seats[s].after


@njit(**INLINED)
def grow_hashed(state: ServerState, pool: Pool, ahead: bool) -> int:
    """As `grow_counted`, with prefix caching: taken blocks lose their hash. The order is that of `self.running`.

    Requests take blocks one by one. When no block is free, the last request is preempted. A block that a decode fills
    is hashed when the step that fills it is scheduled. With a token in flight (`ahead`), it is hashed one step later,
    because `request.num_tokens` does not count that token yet (`allocate_slots`).
    """
    server, phase, taken = state.server, state.server.phase, 0
    while taken < state.phase[phase]:
        count = min(free_blocks(state), state.phase[phase] - taken)
        if count == 0:
            preempt_last(state, pool, ahead)
        take_blocks(state, pool, count)
        taken += count
    if ahead:
        hash_phase(state, pool, phase, 0)
    else:
        hash_phase(state, pool, phase + 1 if phase + 1 < server.block_size else 0, 1)
    chunk, growth = chunk_of(server, state.requests)
    if growth > free_blocks(state):
        preempt_last(state, pool, ahead)  # the request of the cut prefill itself
        return 0
    if chunk > 0:
        take_blocks(state, pool, growth)
        hash_full(state, pool, server.partial - 1, (server.partial_done + chunk) // server.block_size)
    return int(chunk)


@njit(inline="always", **ENGINE_FLAGS)
def last_bucket(server: Record) -> int:
    """Head of the ring of requests whose last token the step in flight computes."""
    bucket: int = server.sentinel + (server.bucket if server.bucket > 0 else server.ring) - 1
    return bucket


@njit(inline="always", **ENGINE_FLAGS)
def lingers(state: ServerState, a: int) -> bool:
    """Whether adapter row `a` only has running requests whose last token the step in flight computes."""
    left: bool = state.adapters[a].last_use == state.server.step + 1
    return left and state.adapters[a].in_batch == 0


@njit(**INLINED)
def next_of_running(state: ServerState) -> int:
    """As `next_adapter`, but adapters that linger (`lingers`) also count against `slots`, and may be returned."""
    server, adapters = state.server, state.adapters
    if server.active + server.lingering < server.slots:
        a = next_adapter(server, adapters, state.heaps)
        server.lingering -= a > 0 and lingers(state, a)  # it joins the batch, or the walk ends
        return int(a)
    a = state.heaps[1, 0].row if server.heap_sizes[ACTIVE] > 0 else 0
    bucket = last_bucket(server)
    r = state.links[bucket].due.after
    while r != bucket:
        e = state.requests[r].owner + 1
        waits = adapters[e].head > 0 and lingers(state, e)
        if waits and (a == 0 or adapters[e].first_key < adapters[a].first_key):
            a = e
        r = state.links[r].due.after
    server.lingering -= a > 0 and lingers(state, a)
    return int(a)


@njit(**INLINED)
def room_for(state: ServerState, pool: Pool, r: int, tokens: int, budget: int) -> tuple[int, int]:
    """Return tokens of request `r` in the cache, -1 if blocks are too few, and tokens that this step computes."""
    server, size = state.server, state.server.block_size
    hits = find(state, pool, r) if pool.all[0].caching == 1 else 0
    take = min(tokens - hits * size, budget)
    last = tokens if server.whole_sequence == 1 else hits * size + take
    needed = blocks_of(last, size)
    if needed > free_blocks(state):  # else they fit, even if all blocks found are in the free queue
        held = hits - idle_blocks(pool, r, hits, size) if hits > 0 else 0
        if needed - held > free_blocks(state):
            return -1, 0
    return hits * size, take


@njit(**INLINED)
def take_room(state: ServerState, pool: Pool, r: int, cached: int, take: int) -> None:
    """Give request `r` blocks for `take` tokens after the `cached` ones."""
    server, size = state.server, state.server.block_size
    if pool.all[0].caching == 0:
        server.used += blocks_of(take, size)
        return
    sit_down(state, pool, r, cached // size)
    take_blocks(state, pool, blocks_of(cached + take, size) - cached // size)
    hash_full(state, pool, r, (cached + take) // size)
    if pool.found[r] < 0:
        pool.found[r] = cached


@njit(**INLINED)
def plan(state: ServerState, law: Law, pool: Pool, ahead: bool) -> None:
    """`Scheduler.schedule`: set what the next step computes (`step_decodes`, `step_prefill`, `ended`, `load_ms`)."""
    server, requests = state.server, state.requests
    server.step_preempted = server.ended = 0
    caching = pool.all[0].caching == 1
    compute(server, requests, grow_hashed(state, pool, ahead) if caching else grow_counted(state, pool))
    server.load_ms = 0.0
    awaited, end_key = server.adapter_loads, -NO_LIMIT
    budget = server.token_budget - server.step_decodes - server.step_prefill
    while (
        server.step_preempted == 0 and server.waiting > 0 and budget > 0 and server.partial == 0
        and server.running < server.max_seqs
    ):  # fmt: skip
        if ahead and server.slots_of_running == 1 and server.lingering > 0:
            a = next_of_running(state)
        else:
            a = next_adapter(server, state.adapters, state.heaps)
        if a == 0:
            end_key = NO_LIMIT
            break
        r = state.adapters[a].head - 1
        end_key = requests[r].key
        cached, take = room_for(state, pool, r, requests[r].prompt + requests[r].generated, budget)
        if cached < 0:  # `allocate_slots` returned None: the walk ends
            break
        awaited += state.adapters[a].resident == 0
        take_room(state, pool, r, cached, take)
        admit_one(state, law.loading, r, cached, take)
        budget -= take
    end_admission(state, law.loading, end_key, awaited)


@njit(**INLINED)
def planned_ms(state: ServerState, law: Law, depth: int) -> float:
    """Duration of the step that was scheduled last, ms.

    With asynchronous scheduling, the walk over the waiting requests is done while the previous step is executed: it
    costs time only if it takes longer than the step itself. Loads of adapters are part of the step (`execute_model`).
    """
    load_ms = state.server.load_ms
    ms = step_ms(state, law)
    if depth == 1 or law.settings[IS_PAPER] > 0:
        return float(ms)
    host_ms = law.coefficients[AT.per_waiting_ms] * state.vector[AT.per_waiting_ms]
    return float(max(ms - load_ms - host_ms, host_ms) + load_ms)
