"""The second half of vLLM's `Scheduler.schedule`: waiting requests join the batch, in order of arrival.

Requests whose adapter finds no slot are passed over (`skipped_waiting_requests`); the first that finds no KV
blocks ends the walk. Nothing is admitted in a step that preempted (`if not preempted_reqs`).
`pool`, `ahead`: as in `schedule`.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray, Record
from packer.twin.engine.containers import link_last
from packer.twin.engine.emit import last_bucket
from packer.twin.engine.holding import find, hash_full, idle_blocks, sit_down
from packer.twin.engine.pool import Pool, free_blocks, take_blocks
from packer.twin.engine.schedule import blocks_of, end_prefill, to_admit
from packer.twin.engine.slots import join, make_room, walk
from packer.twin.engine.state import ACTIVE, IDLE, NO_LIMIT, ServerState
from packer.twin.engine.waiting import after_walk, place, take_first
from packer.twin.flags import ENGINE_FLAGS, INLINED


@njit(inline="always", **ENGINE_FLAGS)
def next_adapter(server: Record, heaps: Record) -> int:
    """Row of the adapter whose first request is admissible next; 0 if none finds a slot."""
    a = 0
    if server.heap_sizes[ACTIVE] > 0:
        a = heaps[1, 0].row  # its adapter is among `scheduled_loras`
    if server.heap_sizes[IDLE] > 0 and server.active < server.slots:  # `len(scheduled_loras) < max_loras`
        e = heaps[0, 0].row
        if a == 0 or heaps[0, 0].key < heaps[1, 0].key:
            a = e
    return a


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
        a = next_adapter(server, state.heaps)
        server.lingering -= a > 0 and lingers(state, a)  # it joins the batch, or the walk ends
        return int(a)
    # No slot is left: only requests whose adapter is in the batch or lingers can be admitted.
    a = state.heaps[1, 0].row if server.heap_sizes[ACTIVE] > 0 else 0
    bucket = server.sentinel + last_bucket(server)
    r = state.links[bucket].due.after
    while r != bucket:
        e = state.requests[r].owner + 1
        waits = adapters[e].head > 0 and lingers(state, e)
        if waits and (a == 0 or adapters[e].first_key < adapters[a].first_key):
            a = e
        r = state.links[r].due.after
    server.lingering -= a > 0 and lingers(state, a)
    return int(a)


@njit(inline="always", **ENGINE_FLAGS)
def room_for(state: ServerState, pool: Pool | None, r: int, budget: int) -> tuple[int, int]:
    """Return tokens of request `r` in the cache, -1 if blocks are too few, and tokens that this step computes.

    The request gets blocks for the tokens that the step computes. With the rule `whole_sequence`, those of all its
    tokens must be free (`full_sequence_must_fit` of `KVCacheManager.allocate_slots`).
    """
    server, request, size = state.server, state.requests[r], state.server.block_size
    a, tokens, hits = request.owner + 1, request.prompt + request.generated, 0
    if pool is not None and pool.all[0].caching == 1:
        hits = find(state, pool, r)
    take = min(tokens - hits * size, budget)  # chunked prefill: a preempted request computes its outputs again, too
    needed = to_admit(server, tokens if server.whole_sequence == 1 else hits * size + take, hits * size)
    if state.adapters[a].resident == 0:
        needed += state.adapters[a].blocks
    if needed > free_blocks(state):
        make_room(server, state.adapters, needed, a)
        held = 0
        if pool is not None and hits > 0:  # blocks found in the free queue are not free any more
            held = hits - idle_blocks(pool, r, hits, size)
        if needed - held > free_blocks(state):
            return -1, 0
    return hits * size, take


@njit(inline="always", **ENGINE_FLAGS)
def take_room(state: ServerState, pool: Pool | None, r: int, cached: int, take: int) -> None:
    """Give request `r` blocks for `take` tokens after the `cached` ones, and its adapter those that it needs."""
    server, size, adapter = state.server, state.server.block_size, state.adapters[state.requests[r].owner + 1]
    if pool is not None and pool.all[0].caching == 1:
        sit_down(state, pool, r, cached // size)
        take_blocks(state, pool, blocks_of(cached + take, size) - cached // size)
        hash_full(state, pool, r, (cached + take) // size)
        if pool.found[r] < 0:
            pool.found[r] = cached
    else:
        server.used += blocks_of(take, size)
        if adapter.resident == 0:
            server.used += adapter.blocks


@njit(inline="always", **ENGINE_FLAGS)
def admit_one(state: ServerState, loading: FloatArray, r: int, cached: int, take: int) -> None:
    """Add request `r` to the batch; this step computes `take` tokens after the `cached` ones."""
    server, request = state.server, state.requests[r]
    a, tokens = request.owner + 1, request.prompt + request.generated
    take_first(server, state.requests, state.adapters, state.links["batch"], state.trees, r, a)
    join(state, loading, a)
    place(server, state.adapters, state.heaps, a)
    server.running += 1
    link_last(state.links["batch"], server.sentinel, r)
    request.context = tokens
    server.step_prefill += take
    server.attended += take * (2 * cached + take) // 2
    if cached + take < tokens:
        server.partial, server.partial_done = r + 1, cached + take
    else:
        end_prefill(server, state.requests, r)


@njit(**INLINED)
def admit(state: ServerState, loading: FloatArray, pool: Pool | None, ahead: bool) -> None:
    """Admit waiting requests as far as slots, KV blocks, `max_seqs` and the token budget allow; sets `load_ms`."""
    server, adapters = state.server, state.adapters
    server.load_ms = 0.0
    # Adapter loads before the walk, plus those that admitted requests wait for.
    awaited, end_key = server.adapter_loads, -NO_LIMIT
    if server.waiting > 0 and server.step_preempted == 0:  # `if not preempted_reqs`
        budget = server.token_budget - server.step_decodes - server.step_prefill
        # A cut prefill took all that was left of the budget.
        while budget > 0 and server.running < server.max_seqs:
            if pool is not None and ahead and server.slots_of_running == 1 and server.lingering > 0:
                a = next_of_running(state)
            else:
                a = next_adapter(server, state.heaps)
            if a == 0:  # all waiting requests are in `skipped_waiting_requests`
                end_key = NO_LIMIT
                break
            r = adapters[a].head - 1
            end_key = adapters[a].first_key
            cached, take = room_for(state, pool, r, budget)
            if cached < 0:  # `allocate_slots` returned None: the walk ends
                break
            # Count before `admit_one`, which may load the adapter.
            awaited += adapters[a].resident == 0
            take_room(state, pool, r, cached, take)
            admit_one(state, loading, r, cached, take)
            budget -= take
    after_walk(server, state.requests, adapters, state.heaps, state.links["batch"], state.trees, end_key)
    if server.joiners > 0:
        walk(server, adapters, state.sets, state.members, loading)
    # Adapters of the batch that were evicted are loaded again without an admission.
    server.unawaited += max(0, server.adapter_loads - awaited)
