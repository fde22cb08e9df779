"""Adapters in GPU slots and in host memory: two caches, each evicting what was used least recently.

Mirrors vllm/lora/worker_manager.py (`LRUCacheWorkerLoRAManager._apply_adapters`, `add_adapter`) and
vllm/lora/model_manager.py (`LRUCacheLoRAModelManager`): host memory registers `max_cpu_loras` adapters, the slots
activate `max_loras` of these. Each step touches the adapters of its batch in both, in the order of a Python set:
arbitrary, but the same from step to step. The order of last use is therefore that of (step of last use, position
in the walk), and only steps that some adapter joins have anything to do. An absent adapter evicts the oldest one,
which may belong to the batch and only come later in the walk; then it is loaded again, and evicts the next one.

Rings, by last use: adapters outside the batch that are in slots, and those that are in host memory alone, which
are older than all of the former. The work is bounded by the adapters that join and the loads.
"""

from __future__ import annotations

from numba import njit

from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import (
    ACTIVE, ACTIVE_RANKS, ADAPTER_LOADS, BLOCKS, CLASS_RANK, DISK_LOADS, HOST_AFTER, HOST_BEFORE,
    HOST_PLACES, IDLE_AFTER, IDLE_BEFORE, IN_BATCH, IN_WALK, JOINED, KV_BLOCKS, LARGEST, LAST_USE,
    LOAD_MS, MEMBERS, NO_LIMIT, ON_HOST, ON_HOST_COUNT, RANK, RANK_CLASS, REQUEST_RANKS, RESIDENT,
    RESIDENTS, SLOTS, SPARES_BATCH, STEP, TO_BE_VISITED, TO_VISIT, TRACK_HOST, USED, VISITS, WALK,
    WALKERS, FloatArray, IntArray,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def after(sizes: IntArray, order: IntArray, n: int, place: int) -> int:
    """Index of the first of `n` rows of adapters, in the order of the walk, that comes after a place in it."""
    low, high = 0, n
    while low < high:
        middle = (low + high) >> 1
        if sizes[order[middle], WALK] > place:
            high = middle
        else:
            low = middle + 1
    return low


@njit(**ENGINE_FLAGS)
def include(ints: IntArray, sizes: IntArray, visits: IntArray, row: int, a: int) -> None:
    """Put adapter row `a` into a row of `visits`, which does not hold it."""
    n, order = ints[WALKERS + row], visits[row]
    i = after(sizes, order, n, sizes[a, WALK])
    for k in range(n, i, -1):
        order[k] = order[k - 1]
    order[i] = a
    ints[WALKERS + row] = n + 1


@njit(**ENGINE_FLAGS)
def exclude(ints: IntArray, sizes: IntArray, visits: IntArray, row: int, a: int) -> None:
    """Take adapter row `a` out of a row of `visits`, which holds it."""
    n, order = ints[WALKERS + row] - 1, visits[row]
    for k in range(after(sizes, order, n + 1, sizes[a, WALK]) - 1, n):
        order[k] = order[k + 1]
    ints[WALKERS + row] = n


@njit(**ENGINE_FLAGS)
def free_slot(ints: IntArray, adapters: IntArray, sizes: IntArray, a: int) -> None:
    """Adapter row `a`, the oldest of the ring of idle ones, leaves its slot; host memory keeps it."""
    unlink(adapters, IDLE_BEFORE, a)
    adapters[a, RESIDENT] = 0
    ints[RESIDENTS] -= 1
    ints[USED] -= sizes[a, BLOCKS]
    if ints[TRACK_HOST] == 1:
        link_last(adapters, HOST_BEFORE, 0, a)


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
        after = adapters[e, IDLE_AFTER]
        free_slot(ints, adapters, sizes, e)
        e = after


@njit(**ENGINE_FLAGS)
def oldest(
    ints: IntArray, adapters: IntArray, sizes: IntArray, visits: IntArray, idle: int, p: int, column: int,
) -> int:  # fmt: skip
    """Row of the least recently used adapter that the walk, at place `p`, has not touched yet.

    `idle`: the oldest outside the batch of the last step, or 0. Others of that batch count if they come after
    `p` and are still resident according to `column`.
    """
    step, order = ints[STEP], visits[IN_WALK]
    if idle > 0 and adapters[idle, LAST_USE] < step + 1:
        return idle
    for i in range(after(sizes, order, ints[WALKERS], p), ints[WALKERS]):
        a = order[i]
        if adapters[a, JOINED] != step + 1 and adapters[a, column] == 1:
            return idle if idle > 0 and sizes[idle, WALK] < sizes[a, WALK] else int(a)
    return idle


@njit(**ENGINE_FLAGS)
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


@njit(**ENGINE_FLAGS)
def visit(ints: IntArray, adapters: IntArray, sizes: IntArray, visits: IntArray, a: int) -> None:
    """Put adapter row `a`, of the batch, down for a visit by the walk."""
    if adapters[a, TO_BE_VISITED] == 0:
        adapters[a, TO_BE_VISITED] = 1
        include(ints, sizes, visits, TO_VISIT, a)


@njit(**ENGINE_FLAGS)
def bring(
    ints: IntArray, floats: FloatArray, adapters: IntArray, sizes: IntArray, visits: IntArray,
    loading: FloatArray, a: int, p: int,
) -> None:  # fmt: skip
    """Touch adapter row `a`, at place `p` of the walk: it gets into a slot; adds what that takes to LOAD_MS.

    `loading` float64 (4,): ms from host (base, per rank) and from disk (base, per rank). The caller accounts
    for its KV blocks. Adapters of the batch that it evicts are put down for a visit.
    """
    rank = sizes[a, RANK]
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
            e = oldest(ints, adapters, sizes, visits, idle, p, ON_HOST)
            forget(ints, adapters, sizes, e, e == idle)
            if e != idle:
                visit(ints, adapters, sizes, visits, e)
        adapters[a, ON_HOST] = 1
        ints[ON_HOST_COUNT] += 1
        ints[DISK_LOADS] += 1
        floats[LOAD_MS] += loading[2] + loading[3] * rank
    if adapters[a, RESIDENT] == 0:
        if ints[RESIDENTS] == ints[SLOTS]:
            idle = adapters[0, IDLE_AFTER]
            e = oldest(ints, adapters, sizes, visits, idle, p, RESIDENT)
            if e == idle:
                free_slot(ints, adapters, sizes, e)
            else:
                adapters[e, RESIDENT] = 0
                ints[RESIDENTS] -= 1
                visit(ints, adapters, sizes, visits, e)
        adapters[a, RESIDENT] = 1
        ints[RESIDENTS] += 1
        ints[ADAPTER_LOADS] += 1
        floats[LOAD_MS] += loading[0] + loading[1] * rank


@njit(**ENGINE_FLAGS)
def walk(
    ints: IntArray, floats: FloatArray, adapters: IntArray, sizes: IntArray, visits: IntArray,
    loading: FloatArray,
) -> None:  # fmt: skip
    """Touch the adapters of the batch in the order of the walk, of which only those matter that are put down."""
    while ints[VISITS] > 0:
        a = visits[TO_VISIT, 0]
        exclude(ints, sizes, visits, TO_VISIT, a)
        adapters[a, TO_BE_VISITED] = 0
        bring(ints, floats, adapters, sizes, visits, loading, a, sizes[a, WALK])


@njit(inline="always", **ENGINE_FLAGS)
def join(
    ints: IntArray, floats: FloatArray, adapters: IntArray, sizes: IntArray, classes: IntArray,
    visits: IntArray, loading: FloatArray, a: int,
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
        if ints[SPARES_BATCH] == 1:
            bring(ints, floats, adapters, sizes, visits, loading, a, NO_LIMIT)
        else:
            visit(ints, adapters, sizes, visits, a)
        include(ints, sizes, visits, IN_WALK, a)


@njit(**ENGINE_FLAGS)
def leave(
    ints: IntArray, adapters: IntArray, sizes: IntArray, classes: IntArray, visits: IntArray, a: int,
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
        exclude(ints, sizes, visits, IN_WALK, a)
        adapters[a, LAST_USE] = last_step + 2
        e = adapters[0, IDLE_BEFORE]
        while e != 0 and adapters[e, LAST_USE] == last_step + 2 and sizes[e, WALK] > sizes[a, WALK]:
            e = adapters[e, IDLE_BEFORE]
        link_last(adapters, IDLE_BEFORE, adapters[e, IDLE_AFTER], a)


@njit(inline="always", **ENGINE_FLAGS)
def largest_rank(ints: IntArray, classes: IntArray) -> int:
    """Largest rank in the batch; 0 without adapters."""
    rank: int = classes[ints[LARGEST], CLASS_RANK]
    return rank
