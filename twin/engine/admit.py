"""The second half of vLLM's `Scheduler.schedule`: waiting requests join the batch, in order of arrival.

Requests whose adapter finds no slot are passed over (`skipped_waiting_requests`); the first that finds no KV
blocks ends the walk. Nothing is admitted in a step that preempted (`if not preempted_reqs`).
"""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.engine.containers import link_last
from packer.twin.engine.schedule import blocks_of, end_prefill
from packer.twin.engine.slots import join, make_room, walk
from packer.twin.engine.state import (
    ACTIVE, ADAPTER_LOADS, ATTENDED, BLOCKS, BLOCK_SIZE, CONTEXT, FIRST_KEY, GENERATED, HEAD, HEAP_ACTIVE, HEAP_IDLE,
    KEY, KV_BLOCKS, LOAD_MS, MAX_SEQS, NO_LIMIT, OLDER, PARTIAL, PARTIAL_DONE, PROMPT, RESIDENT,
    JOINERS, RUNNING, SENTINEL, SLOTS, STEP_DECODES, STEP_PREEMPTED, STEP_PREFILL,
    TOKEN_BUDGET, UNAWAITED, USED, WAITING, WHOLE_SEQUENCE,
)  # fmt: skip
from packer.twin.engine.waiting import after_walk, place, take_first
from packer.twin.flags import ENGINE_FLAGS, INLINED


@njit(inline="always", **ENGINE_FLAGS)
def next_adapter(ints: IntArray, adapters: IntArray, heaps: IntArray) -> int:
    """Row of the adapter whose first request is admissible next; 0 if none finds a slot."""
    a = 0
    if ints[HEAP_ACTIVE] > 0:
        a = heaps[1, 0]  # its adapter is among `scheduled_loras`
    if ints[HEAP_IDLE] > 0 and ints[ACTIVE] < ints[SLOTS]:  # `len(scheduled_loras) < max_loras`
        e = heaps[0, 0]
        if a == 0 or adapters[e, FIRST_KEY] < adapters[a, FIRST_KEY]:
            a = e
    return a


@njit(inline="always", **ENGINE_FLAGS)
def fits(ints: IntArray, adapters: IntArray, sizes: IntArray, a: int, tokens: int, take: int) -> int:
    """KV blocks that admitting a request of adapter row `a` takes, -1 if there are too few.

    It gets blocks for the `take` of its `tokens` that this step computes. With the rule WHOLE_SEQUENCE all of them
    must fit (`full_sequence_must_fit` of `KVCacheManager.allocate_slots`).
    """
    blocks: int = blocks_of(take, ints[BLOCK_SIZE])
    needed = blocks_of(tokens, ints[BLOCK_SIZE]) if ints[WHOLE_SEQUENCE] == 1 else blocks
    if adapters[a, RESIDENT] == 0:
        blocks += sizes[a, BLOCKS]
        needed += sizes[a, BLOCKS]
    if ints[USED] + needed > ints[KV_BLOCKS]:
        make_room(ints, adapters, sizes, needed, a)
        if ints[USED] + needed > ints[KV_BLOCKS]:
            return -1
    return blocks


@njit(inline="always", **ENGINE_FLAGS)
def admit_one(
    ints: IntArray, floats: FloatArray, requests: IntArray, links: IntArray, adapters: IntArray,
    sizes: IntArray, classes: IntArray, heaps: IntArray, sets: IntArray, loading: FloatArray,
    r: int, a: int, tokens: int, take: int,
) -> None:  # fmt: skip
    """Request `r` joins the batch, with `take` of its `tokens` in this step."""
    take_first(ints, requests, adapters, r, a)
    join(ints, floats, adapters, sizes, classes, sets, loading, a)
    place(ints, adapters, heaps, a)
    ints[RUNNING] += 1
    link_last(links, OLDER, ints[SENTINEL], r)
    requests[r, CONTEXT] = tokens
    ints[STEP_PREFILL] += take
    ints[ATTENDED] += take * take // 2
    if take < tokens:
        ints[PARTIAL], ints[PARTIAL_DONE] = r + 1, take
    else:
        end_prefill(ints, requests, r)


@njit(**INLINED)
def admit(
    ints: IntArray, floats: FloatArray, requests: IntArray, links: IntArray, adapters: IntArray,
    sizes: IntArray, classes: IntArray, heaps: IntArray, sets: IntArray, loading: FloatArray,
) -> None:  # fmt: skip
    """Admit what slots, KV blocks, sequences and the token budget allow; sets LOAD_MS."""
    floats[LOAD_MS] = 0.0
    loads, misses, end_key = ints[ADAPTER_LOADS], 0, -NO_LIMIT
    if ints[WAITING] > 0 and ints[STEP_PREEMPTED] == 0:  # `if not preempted_reqs`
        budget = ints[TOKEN_BUDGET] - ints[STEP_DECODES] - ints[STEP_PREFILL]
        while budget > 0 and ints[RUNNING] < ints[MAX_SEQS] and ints[PARTIAL] == 0:
            a = next_adapter(ints, adapters, heaps)
            if a == 0:  # all that wait are in `skipped_waiting_requests`
                end_key = NO_LIMIT
                break
            r = adapters[a, HEAD] - 1
            end_key = requests[r, KEY]
            tokens = requests[r, PROMPT] + requests[r, GENERATED]
            take = min(tokens, budget)  # chunked prefill: a preempted request computes its outputs again, too
            blocks = fits(ints, adapters, sizes, a, tokens, take)
            if blocks < 0:  # `allocate_slots` returned None: the walk ends
                break
            ints[USED] += blocks
            if adapters[a, RESIDENT] == 0:
                misses += 1
            admit_one(
                ints, floats, requests, links, adapters, sizes, classes, heaps, sets, loading,
                r, a, tokens, take,
            )  # fmt: skip
            budget -= take
    after_walk(ints, requests, adapters, heaps, end_key)
    if ints[JOINERS] > 0:
        walk(ints, floats, adapters, sizes, sets, loading)
    # Adapters of the batch that were evicted come back without an admission.
    ints[UNAWAITED] += max(0, ints[ADAPTER_LOADS] - loads - misses)
