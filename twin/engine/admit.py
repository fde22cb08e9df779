"""The second half of vLLM's `Scheduler.schedule`: waiting requests join the batch, in order of arrival.

Requests whose adapter finds no slot are passed over (`skipped_waiting_requests`); the first that finds no KV
blocks ends the walk. Nothing is admitted in a step that preempted (`if not preempted_reqs`).
"""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray, Record
from packer.twin.engine.containers import link_last
from packer.twin.engine.schedule import blocks_of, end_prefill
from packer.twin.engine.slots import join, make_room, walk
from packer.twin.engine.state import ACTIVE, IDLE, NO_LIMIT, ServerState
from packer.twin.engine.waiting import after_walk, place, take_first
from packer.twin.flags import ENGINE_FLAGS, INLINED


@njit(inline="always", **ENGINE_FLAGS)
def next_adapter(server: Record, adapters: Record, heaps: Record) -> int:
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
def fits(server: Record, adapters: Record, a: int, tokens: int, take: int) -> int:
    """KV blocks that admitting a request of adapter row `a` takes, -1 if too few are free.

    The request gets blocks for the `take` tokens, out of `tokens`, that this step computes. With the rule
    `whole_sequence`, all `tokens` must fit (`full_sequence_must_fit` of `KVCacheManager.allocate_slots`).
    """
    blocks: int = blocks_of(take, server.block_size)
    needed = blocks_of(tokens, server.block_size) if server.whole_sequence == 1 else blocks
    if adapters[a].resident == 0:
        blocks += adapters[a].blocks
        needed += adapters[a].blocks
    if server.used + needed > server.kv_blocks:
        make_room(server, adapters, needed, a)
        if server.used + needed > server.kv_blocks:
            return -1
    return blocks


@njit(inline="always", **ENGINE_FLAGS)
def admit_one(state: ServerState, loading: FloatArray, r: int, cached: int, take: int) -> None:
    """Add request `r` to the batch; this step computes `take` tokens after the `cached` ones."""
    server, request = state.server, state.requests[r]
    a, tokens = request.owner + 1, request.prompt + request.generated
    take_first(server, state.requests, state.adapters, r, a)
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


@njit(inline="always", **ENGINE_FLAGS)
def end_admission(state: ServerState, loading: FloatArray, end_key: int, awaited: int) -> None:
    """End the walk over the waiting requests before the request with `end_key`; load adapters into slots.

    `awaited`: number of adapter loads before the walk, plus the loads that the admitted requests wait for.
    """
    server = state.server
    after_walk(server, state.requests, state.adapters, state.heaps, end_key)
    if server.joiners > 0:
        walk(server, state.adapters, state.sets, state.members, loading)
    # Adapters of the batch that were evicted are loaded again without an admission.
    server.unawaited += max(0, server.adapter_loads - awaited)


@njit(**INLINED)
def admit(state: ServerState, loading: FloatArray) -> None:
    """Admit waiting requests as far as slots, KV blocks, `max_seqs` and the token budget allow; sets `load_ms`."""
    server, adapters = state.server, state.adapters
    server.load_ms = 0.0
    awaited, end_key = server.adapter_loads, -NO_LIMIT
    if server.waiting > 0 and server.step_preempted == 0:  # `if not preempted_reqs`
        budget = server.token_budget - server.step_decodes - server.step_prefill
        while budget > 0 and server.running < server.max_seqs and server.partial == 0:
            a = next_adapter(server, adapters, state.heaps)
            if a == 0:  # all waiting requests are in `skipped_waiting_requests`
                end_key = NO_LIMIT
                break
            r = adapters[a].head - 1
            request = state.requests[r]
            end_key = request.key
            tokens = request.prompt + request.generated
            take = min(tokens, budget)  # chunked prefill: a preempted request computes its outputs again, too
            blocks = fits(server, adapters, a, tokens, take)
            if blocks < 0:  # `allocate_slots` returned None: the walk ends
                break
            server.used += blocks
            awaited += adapters[a].resident == 0
            admit_one(state, loading, r, 0, take)
            budget -= take
    end_admission(state, loading, end_key, awaited)
