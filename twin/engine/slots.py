"""Adapters in GPU slots and in host memory: two caches, each evicting what was used least recently.

Mirrors vllm/lora/worker_manager.py (`LRUCacheWorkerLoRAManager.add_adapter`) and vllm/lora/model_manager.py
(`LRUCacheLoRAModelManager`): host memory registers `max_cpu_loras` adapters, the slots activate `max_loras` of
these. A step touches every adapter of its batch in both, so that those outside the batch are ordered by the
step that they left it in: two rings, and eviction takes the first of a ring.
"""

from __future__ import annotations

from numba import njit

from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import (
    ACTIVE, ACTIVE_RANKS, ADAPTER_LOADS, BLOCKS, CLASS_RANK, DISK_LOADS, HOST_AFTER, HOST_BEFORE,
    HOST_PLACES, IDLE_AFTER, IDLE_BEFORE, IN_BATCH, KV_BLOCKS, LARGEST, LOAD_MS, MEMBERS, ON_HOST,
    ON_HOST_COUNT, RANK, RANK_CLASS, REQUEST_RANKS, RESIDENT, RESIDENTS, SLOTS, TRACK_HOST, USED,
    FloatArray, IntArray,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS


@njit(inline="always", **ENGINE_FLAGS)
def free_slot(ints: IntArray, adapters: IntArray, sizes: IntArray, a: int) -> None:
    """Adapter row `a`, which is outside the batch, leaves its slot."""
    unlink(adapters, IDLE_BEFORE, a)
    adapters[a, RESIDENT] = 0
    ints[RESIDENTS] -= 1
    ints[USED] -= sizes[a, BLOCKS]


@njit(**ENGINE_FLAGS)
def make_room(ints: IntArray, adapters: IntArray, sizes: IntArray, blocks: int, keep: int) -> None:
    """Free slots of adapters outside the batch, but for `keep`, until `blocks` more KV blocks are free.

    Only where adapters live in the KV cache (unified memory); they leave before requests are preempted.
    """
    e = adapters[0, IDLE_AFTER]
    while ints[USED] + blocks > ints[KV_BLOCKS]:
        if e == keep and e != 0:
            e = adapters[e, IDLE_AFTER]
        if e == 0 or sizes[e, BLOCKS] == 0:
            return
        following = adapters[e, IDLE_AFTER]
        free_slot(ints, adapters, sizes, e)
        e = following


@njit(**ENGINE_FLAGS)
def bring(
    ints: IntArray, floats: FloatArray, adapters: IntArray, sizes: IntArray, loading: FloatArray, a: int,
) -> None:  # fmt: skip
    """Adapter row `a` gets into a slot, if it is not in one; adds what that takes to LOAD_MS.

    `loading` float64 (4,): ms from host (base, per rank) and from disk (base, per rank). The caller accounts
    for its KV blocks.
    """
    if adapters[a, RESIDENT] == 1:
        unlink(adapters, IDLE_BEFORE, a)
        if ints[TRACK_HOST] == 1:
            unlink(adapters, HOST_BEFORE, a)
        return
    rank = sizes[a, RANK]
    from_disk = False
    if ints[TRACK_HOST] == 1:
        if adapters[a, ON_HOST] == 1:
            unlink(adapters, HOST_BEFORE, a)
        else:
            # An adapter that leaves host memory leaves its slot as well (`_on_remove` deactivates it).
            e = adapters[0, HOST_AFTER]
            if ints[ON_HOST_COUNT] == ints[HOST_PLACES]:
                unlink(adapters, HOST_BEFORE, e)
                adapters[e, ON_HOST] = 0
                ints[ON_HOST_COUNT] -= 1
                if adapters[e, RESIDENT] == 1:
                    free_slot(ints, adapters, sizes, e)
            adapters[a, ON_HOST] = 1
            ints[ON_HOST_COUNT] += 1
            ints[DISK_LOADS] += 1
            from_disk = True
    if ints[RESIDENTS] == ints[SLOTS]:
        free_slot(ints, adapters, sizes, adapters[0, IDLE_AFTER])
    adapters[a, RESIDENT] = 1
    ints[RESIDENTS] += 1
    ints[ADAPTER_LOADS] += 1
    floats[LOAD_MS] += loading[0] + loading[1] * rank
    if from_disk:
        floats[LOAD_MS] += loading[2] + loading[3] * rank


@njit(inline="always", **ENGINE_FLAGS)
def join(ints: IntArray, adapters: IntArray, sizes: IntArray, classes: IntArray, a: int) -> None:
    """A request of adapter row `a` joins the batch: keeps the sums that step laws and routers read."""
    rank = sizes[a, RANK]
    ints[REQUEST_RANKS] += rank
    adapters[a, IN_BATCH] += 1
    if adapters[a, IN_BATCH] == 1:
        ints[ACTIVE] += 1
        ints[ACTIVE_RANKS] += rank
        k = sizes[a, RANK_CLASS]
        classes[k, MEMBERS] += 1
        if k > ints[LARGEST]:
            ints[LARGEST] = k


@njit(**ENGINE_FLAGS)
def leave(ints: IntArray, adapters: IntArray, sizes: IntArray, classes: IntArray, a: int) -> None:
    """A request of adapter row `a` leaves the batch; with the last one the adapter becomes evictable."""
    ints[REQUEST_RANKS] -= sizes[a, RANK]
    adapters[a, IN_BATCH] -= 1
    if adapters[a, IN_BATCH] == 0:
        ints[ACTIVE] -= 1
        ints[ACTIVE_RANKS] -= sizes[a, RANK]
        k = sizes[a, RANK_CLASS]
        classes[k, MEMBERS] -= 1
        while k > 0 and k == ints[LARGEST] and classes[k, MEMBERS] == 0:
            k -= 1
            ints[LARGEST] = k
        link_last(adapters, IDLE_BEFORE, 0, a)
        if ints[TRACK_HOST] == 1:
            link_last(adapters, HOST_BEFORE, 0, a)


@njit(inline="always", **ENGINE_FLAGS)
def largest_rank(ints: IntArray, classes: IntArray) -> int:
    """Largest rank in the batch; 0 without adapters."""
    rank: int = classes[ints[LARGEST], CLASS_RANK]
    return rank
