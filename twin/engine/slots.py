"""Adapters in GPU slots and in host memory: two caches, each evicting what was used least recently.

Mirrors vllm/lora/worker_manager.py (`LRUCacheWorkerLoRAManager._apply_adapters`, `add_adapter`) and
vllm/lora/model_manager.py (`LRUCacheLoRAModelManager`): host memory registers `max_cpu_loras` adapters, the slots
activate `max_loras` of these. Each step touches the adapters of its batch in both, in the order of a Python set
(`walk_order`). The order of last use is therefore that of (step of last use, place in the walk of that step), and only
steps that some adapter joins have anything to do. An absent adapter evicts the oldest one, which may belong to the
batch and only come later in the walk; then it is loaded again, and evicts the next one.

Rings, by last use: adapters outside the batch that are in slots, and those that are in host memory alone, which
are older than all of the former. The work is bounded by the adapters that join and the loads.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import (
    ACTIVE, ACTIVE_RANKS, ADAPTER_LOADS, BLOCKS, CLASS_RANK, DISK_LOADS, HOST_AFTER, HOST_BEFORE,
    HOST_PLACES, IDLE_AFTER, IDLE_BEFORE, IN_BATCH, JOINED, JOINERS, JOINING, KV_BLOCKS, LARGEST, LAST_USE,
    LOAD_MS, MEMBERS, NO_LIMIT, OLDEST_IN_SLOT, OLDEST_ON_HOST, ON_HOST, ON_HOST_COUNT,
    PREFILLS_FIRST, RANK, RANK_CLASS,
    REQUEST_RANKS, RESIDENT, RESIDENTS, SET_MASK, SLOTS, SPARES_BATCH, STEP, TRACK_HOST, USED, WALKED,
    WALK_ROW, numbers,
)  # fmt: skip
from packer.twin.engine.walk_order import enter, note_leave, order
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED


(BEFORE_ALL,) = numbers(-1, 0)  # place in the walk


@njit(**INLINED)
def free_slot(ints: IntArray, adapters: IntArray, sizes: IntArray, a: int) -> None:
    """Adapter row `a`, the oldest of the ring of idle ones, leaves its slot; host memory keeps it."""
    unlink(adapters, IDLE_BEFORE, a)
    adapters[a, RESIDENT] = 0
    ints[RESIDENTS] -= 1
    ints[USED] -= sizes[a, BLOCKS]
    if ints[TRACK_HOST] == 1:
        link_last(adapters, HOST_BEFORE, 0, a)


@njit(**CALLED)
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
        after = adapters[e, IDLE_AFTER]
        free_slot(ints, adapters, sizes, e)
        e = after


@njit(**CALLED)
def oldest(
    ints: IntArray, adapters: IntArray, sets: IntArray, idle: int, p: int, column: int, cursor: int
) -> int:
    """Row of the least recently used adapter that the walk, at place `p`, has not touched yet.

    `idle`: the oldest outside the batch of the last step, or 0. The others are searched in the order of that step's
    walk, for those that are still resident according to `column`; `ints[cursor]` is where the search stands. `p`
    NO_LIMIT: only idle ones are evicted.
    """
    if p == NO_LIMIT or (idle > 0 and adapters[idle, LAST_USE] < ints[STEP] + 1):
        return idle
    row = ints[WALK_ROW]
    for i in range(ints[cursor], ints[SET_MASK + 1 - row] + 1):
        a = sets[1 - row, i]
        if (
            a > 0
            and adapters[a, column] == 1
            and (adapters[a, IN_BATCH] == 0 or adapters[a, WALKED + row] > p)
        ):
            ints[cursor] = i
            return int(a)
    return idle


@njit(**INLINED)
def forget(ints: IntArray, adapters: IntArray, sizes: IntArray, a: int, linked: bool) -> None:
    """Adapter row `a` leaves host memory, and with it its slot (`AdapterLRUCache._on_remove` deactivates it)."""
    if adapters[a, RESIDENT] == 1:
        if linked:
            unlink(adapters, IDLE_BEFORE, a)
        adapters[a, RESIDENT] = 0
        ints[RESIDENTS] -= 1
        ints[USED] -= sizes[a, BLOCKS]
    elif linked:
        unlink(adapters, HOST_BEFORE, a)
    adapters[a, ON_HOST] = 0
    ints[ON_HOST_COUNT] -= 1


@njit(**INLINED)
def outside(ints: IntArray, adapters: IntArray, a: int, p: int) -> bool:
    """Whether adapter row `a` is in the ring of idle ones: those of the batch are until the walk comes to them."""
    joined = adapters[a, JOINED] == ints[STEP] + 1
    return bool(adapters[a, IN_BATCH] == 0 or (joined and adapters[a, WALKED + ints[WALK_ROW]] > p))


@njit(**INLINED)
def bring(
    ints: IntArray, floats: FloatArray, adapters: IntArray, sizes: IntArray, sets: IntArray,
    loading: FloatArray, a: int, p: int,
) -> int:  # fmt: skip
    """Touch adapter row `a`, at place `p` of the walk: it gets into a slot; adds what that takes to LOAD_MS.

    `loading` float64 (4,): ms from host (base, per rank) and from disk (base, per rank). The caller accounts
    for its KV blocks. Returns how many adapters of the batch it evicts, all of which the walk has yet to come to.
    """
    rank, evicted = sizes[a, RANK], 0
    if adapters[a, JOINED] == ints[STEP] + 1:  # it was outside the batch
        if adapters[a, RESIDENT] == 1:
            unlink(adapters, IDLE_BEFORE, a)
        elif adapters[a, ON_HOST] == 1:
            unlink(adapters, HOST_BEFORE, a)
    if ints[TRACK_HOST] == 1 and adapters[a, ON_HOST] == 0:
        if ints[ON_HOST_COUNT] == ints[HOST_PLACES]:
            idle = adapters[0, HOST_AFTER]
            if idle == 0:
                idle = adapters[0, IDLE_AFTER]
            e = oldest(ints, adapters, sets, idle, p, ON_HOST, OLDEST_ON_HOST)
            linked = outside(ints, adapters, e, p)
            forget(ints, adapters, sizes, e, linked)
            evicted += not linked
        adapters[a, ON_HOST] = 1
        ints[ON_HOST_COUNT] += 1
        ints[DISK_LOADS] += 1
        floats[LOAD_MS] += loading[2] + loading[3] * rank
    if adapters[a, RESIDENT] == 0:
        if ints[RESIDENTS] == ints[SLOTS]:
            e = oldest(ints, adapters, sets, adapters[0, IDLE_AFTER], p, RESIDENT, OLDEST_IN_SLOT)
            if outside(ints, adapters, e, p):
                free_slot(ints, adapters, sizes, e)
            else:
                adapters[e, RESIDENT] = 0
                ints[RESIDENTS] -= 1
                evicted += 1
        adapters[a, RESIDENT] = 1
        ints[RESIDENTS] += 1
        ints[ADAPTER_LOADS] += 1
        floats[LOAD_MS] += loading[0] + loading[1] * rank
    return evicted


@njit(**INLINED)
def plenty(ints: IntArray, adapters: IntArray, ring: int, needed: int) -> int:
    """How many of `needed` adapters the ring cannot give that are older than the last step and do not join."""
    e = adapters[0, ring]
    while needed > 0 and e != 0 and adapters[e, LAST_USE] < ints[STEP] + 1 and adapters[e, IN_BATCH] == 0:
        needed -= 1
        e = adapters[e, ring]
    return needed


@njit(**INLINED)
def scarce(ints: IntArray, adapters: IntArray, sets: IntArray) -> bool:
    """Whether those that join may evict an adapter that the last step touched, or each other."""
    slots = ints[RESIDENTS] - ints[SLOTS]
    places = ints[ON_HOST_COUNT] - ints[HOST_PLACES]
    for k in range(ints[JOINERS]):
        a = sets[JOINING, k]
        slots += adapters[a, RESIDENT] == 0
        places += adapters[a, ON_HOST] == 0
    if plenty(ints, adapters, IDLE_AFTER, slots) > 0:
        return True
    return bool(ints[TRACK_HOST] == 1 and plenty(ints, adapters, HOST_AFTER, places) > 0)


@njit(**CALLED)
def walk(
    ints: IntArray, floats: FloatArray, adapters: IntArray, sizes: IntArray, sets: IntArray,
    loading: FloatArray,
) -> None:  # fmt: skip
    """Touch the adapters of the batch in the order of the walk, as far as that brings any into a slot.

    Where prefills have steps of their own, those that join come before all others: theirs is the step before.
    """
    to_visit = ints[JOINERS]
    if ints[SPARES_BATCH] == 1:
        enter(ints, adapters, sizes, sets)
    elif scarce(ints, adapters, sets):
        order(ints, adapters, sets, ints[STEP] - 1)
        enter(ints, adapters, sizes, sets)
        row = order(ints, adapters, sets, ints[STEP])
        ints[WALK_ROW] = row
        ints[OLDEST_IN_SLOT] = ints[OLDEST_ON_HOST] = 0
        if ints[PREFILLS_FIRST] == 1:
            for k in range(to_visit):
                a = sets[JOINING, k]
                to_visit += bring(ints, floats, adapters, sizes, sets, loading, a, BEFORE_ALL) - 1
                if adapters[a, LAST_USE] == ints[STEP] + 1:  # no longer what the last step touched
                    sets[1 - row, adapters[a, WALKED + 1 - row]] = 0
        for p in range(ints[SET_MASK + row] + 1):
            a = sets[row, p]
            if a == 0:
                continue
            comes = ints[PREFILLS_FIRST] == 0 and adapters[a, JOINED] == ints[STEP] + 1
            if comes or adapters[a, RESIDENT] == 0:
                to_visit += bring(ints, floats, adapters, sizes, sets, loading, a, p) - 1
                if to_visit == 0:
                    return
    else:
        enter(ints, adapters, sizes, sets)
        for k in range(to_visit):
            bring(ints, floats, adapters, sizes, sets, loading, sets[JOINING, k], NO_LIMIT)


@njit(inline="always", **ENGINE_FLAGS)
def join(
    ints: IntArray, floats: FloatArray, adapters: IntArray, sizes: IntArray, classes: IntArray,
    sets: IntArray, loading: FloatArray, a: int,
) -> None:  # fmt: skip
    """A request of adapter row `a` joins the batch: keeps the sums that step laws and routers read.

    Its adapter gets its slot in the walk over the batch, or at once where it would not evict others of it.
    """
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
        adapters[a, JOINED] = ints[STEP] + 1
        if ints[SPARES_BATCH] == 1 or sets.shape[1] == 1:
            bring(ints, floats, adapters, sizes, sets, loading, a, NO_LIMIT)
        if sets.shape[1] > 1:
            sets[JOINING, ints[JOINERS]] = a
            ints[JOINERS] += 1


@njit(**INLINED)
def leave(
    ints: IntArray, adapters: IntArray, sizes: IntArray, classes: IntArray, sets: IntArray, a: int,
    last_step: int,
) -> None:  # fmt: skip
    """A request of adapter row `a` leaves the batch, to which it belonged last in `last_step`.

    With the last one the adapter joins the ring of idle ones, behind those that were touched before it.
    """
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
        adapters[a, LAST_USE] = last_step + 2
        note_leave(ints, last_step)
        e = adapters[0, IDLE_BEFORE]
        if sets.shape[1] > 1 and adapters[e, LAST_USE] == last_step + 2:
            place = WALKED + order(ints, adapters, sets, last_step)
            while adapters[e, LAST_USE] == last_step + 2 and adapters[e, place] > adapters[a, place]:
                e = adapters[e, IDLE_BEFORE]
        link_last(adapters, IDLE_BEFORE, adapters[e, IDLE_AFTER], a)


@njit(inline="always", **ENGINE_FLAGS)
def largest_rank(ints: IntArray, classes: IntArray) -> int:
    """Largest rank in the batch; 0 without adapters."""
    rank: int = classes[ints[LARGEST], CLASS_RANK]
    return rank
