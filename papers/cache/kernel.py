"""Adapters on the GPU of an engine other than vLLM's: which leave, and how they come.

An adapter on the GPU is in the batch, in the ring of idle ones (by last use), or on its way over the link between
host and GPU, which brings one after the other. What it takes is counted in `USED`, with the KV cache's cells.
"""

from __future__ import annotations

import math

from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.papers.cache.loading import ASYNC
from packer.twin.cluster.caching import DROP, LFU, NOTHING
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import (
    ACTIVE, ACTIVE_BLOCKS, ACTIVE_RANKS, ADAPTER_LOADS, BLOCKS, CACHE_RULE, ENTERED, HIGH_WATER, HOST_AFTER,
    HOST_BEFORE, IDLE_AFTER, IDLE_BEFORE, IN_BATCH, JOINED, KNOWN, KNOWN_RUNNING, KNOWN_WAITING, KV_BLOCKS,
    LARGEST, LOADING_BLOCKS, LOADING_MODE, LOAD_END_S, MEMBERS, NOW, RANK, RANK_CLASS, REQUEST_RANKS, RESIDENT,
    RESIDENTS, RUNNING, SLOT_LIMIT, UNAWAITED, UNFINISHED, USED, ServerState,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS

# Columns of `adapters` that only vLLM's engine uses otherwise: on its way to the GPU; kept there by a
# policy; uses; waiting requests; number of the prefetch that brought it.
LOADING, KEPT, USES, WANTED, TAGGED = ENTERED, KNOWN_RUNNING, KNOWN, KNOWN_WAITING, JOINED


@njit(**ENGINE_FLAGS)
def drop(ints: IntArray, adapters: IntArray, sizes: IntArray, a: int) -> None:
    """Idle adapter row `a` leaves the GPU."""
    unlink(adapters, IDLE_BEFORE, a)
    adapters[a, RESIDENT] = 0
    ints[RESIDENTS] -= 1
    ints[USED] -= sizes[a, BLOCKS]


@njit(**ENGINE_FLAGS)
def victim(ints: IntArray, adapters: IntArray, spare: int) -> int:
    """Row of the idle adapter that leaves next, 0 without one; `spare` stays, and what is kept, or was
    brought for a waiting request, goes last.
    """
    best, found, worst = 0, 0, 0
    e = adapters[0, IDLE_AFTER]
    while e != 0:
        if e != spare:
            awaited = ints[LOADING_MODE] == ASYNC and adapters[e, WANTED] > 0
            held = 2 * adapters[e, KEPT] + (1 if awaited else 0)
            uses = adapters[e, USES] if ints[CACHE_RULE] == LFU else 0
            if best == 0 or held < worst or (held == worst and uses < found):
                best, found, worst = e, uses, held
            if held == 0 and ints[CACHE_RULE] != LFU:
                return int(e)
        e = adapters[e, IDLE_AFTER]
    return int(best)


@njit(**ENGINE_FLAGS)
def make_room(
    ints: IntArray, adapters: IntArray, sizes: IntArray, blocks: int, slots: int, spare: int
) -> bool:
    """Drop idle adapters until so many cells, and slots, are free; False if that is not enough."""
    while ints[USED] + blocks > ints[KV_BLOCKS] or ints[RESIDENTS] + slots > ints[SLOT_LIMIT]:
        e = victim(ints, adapters, spare)
        if e == 0:
            return False
        drop(ints, adapters, sizes, e)
    return True


@njit(**ENGINE_FLAGS)
def put(ints: IntArray, adapters: IntArray, sizes: IntArray, a: int) -> None:
    """Adapter row `a`, which is absent, comes to the GPU at once; the caller has made room."""
    adapters[a, RESIDENT] = 1
    ints[RESIDENTS] += 1
    ints[USED] += sizes[a, BLOCKS]
    ints[ADAPTER_LOADS] += 1


@njit(**ENGINE_FLAGS)
def enter_batch(state: ServerState, loading: FloatArray, a: int) -> float:
    """A request of adapter row `a` runs; its adapter, for which there is room, comes with it. Time of the load, ms."""
    ints, adapters, sizes = state.ints, state.adapters, state.sizes
    k, loads = sizes[a, RANK_CLASS], True
    if adapters[a, RESIDENT] == 0:
        put(ints, adapters, sizes, a)
    elif adapters[a, IN_BATCH] > 0 and ints[CACHE_RULE] == NOTHING:
        ints[ADAPTER_LOADS] += 1
    else:
        loads = False
        if adapters[a, IN_BATCH] == 0:
            unlink(adapters, IDLE_BEFORE, a)
    adapters[a, USES] += 1
    adapters[a, IN_BATCH] += 1
    ints[RUNNING] += 1
    ints[REQUEST_RANKS] += sizes[a, RANK]
    if adapters[a, IN_BATCH] == 1:
        ints[ACTIVE] += 1
        ints[ACTIVE_RANKS] += sizes[a, RANK]
        ints[ACTIVE_BLOCKS] += sizes[a, BLOCKS]
        state.classes[k, MEMBERS] += 1
        ints[LARGEST] = max(ints[LARGEST], k)
    return load_ms(sizes, loading, a) if loads else 0.0


@njit(**ENGINE_FLAGS)
def leave_batch(state: ServerState, a: int) -> bool:
    """A request of adapter row `a` is finished; whether it was the last that ran: its adapter is idle then."""
    ints, adapters, sizes, classes = state.ints, state.adapters, state.sizes, state.classes
    k = sizes[a, RANK_CLASS]
    ints[RUNNING] -= 1
    ints[REQUEST_RANKS] -= sizes[a, RANK]
    classes[k, UNFINISHED] -= 1
    adapters[a, IN_BATCH] -= 1
    if adapters[a, IN_BATCH] > 0:
        return False
    ints[ACTIVE] -= 1
    ints[ACTIVE_RANKS] -= sizes[a, RANK]
    ints[ACTIVE_BLOCKS] -= sizes[a, BLOCKS]
    classes[k, MEMBERS] -= 1
    while ints[LARGEST] > 0 and classes[ints[LARGEST], MEMBERS] == 0:
        ints[LARGEST] -= 1
    link_last(adapters, IDLE_BEFORE, 0, a)
    return True


@njit(**ENGINE_FLAGS)
def tidy(ints: IntArray, adapters: IntArray, sizes: IntArray, tag: int) -> None:
    """Idle adapters leave unless the rule keeps them or, where `tag` is not 0, prefetch `tag` brought them."""
    rule = ints[CACHE_RULE]
    if rule in (DROP, NOTHING):
        e = adapters[0, IDLE_AFTER]
        while e != 0:
            after = adapters[e, IDLE_AFTER]
            wanted = ints[LOADING_MODE] == ASYNC and adapters[e, WANTED] > 0
            fetched = tag > 0 and adapters[e, TAGGED] == tag
            if adapters[e, KEPT] == 0 and not wanted and not fetched:
                drop(ints, adapters, sizes, e)
            e = after
    while ints[USED] > ints[HIGH_WATER]:
        e = victim(ints, adapters, 0)
        if e == 0 or adapters[e, KEPT] == 1:
            return
        drop(ints, adapters, sizes, e)


@njit(**ENGINE_FLAGS)
def start_load(
    ints: IntArray, floats: FloatArray, adapters: IntArray, sizes: IntArray, loading: FloatArray, a: int
) -> bool:
    """Absent adapter row `a`, for which requests wait, is put on the link and takes its room; False without room."""
    blocks = sizes[a, BLOCKS]
    if not make_room(ints, adapters, sizes, blocks, 1, 0):
        return False
    ints[USED] += blocks
    ints[RESIDENTS] += 1
    ints[LOADING_BLOCKS] += blocks
    ints[ADAPTER_LOADS] += 1
    adapters[a, LOADING] = 1
    if adapters[0, HOST_AFTER] == 0:
        floats[LOAD_END_S] = floats[NOW] + load_ms(sizes, loading, a) * 1e-3
    link_last(adapters, HOST_BEFORE, 0, a)
    return True


@njit(**ENGINE_FLAGS)
def end_load(
    ints: IntArray, floats: FloatArray, adapters: IntArray, sizes: IntArray, loading: FloatArray
) -> int:
    """The load that ends at LOAD_END_S is over, and the next one begins; returns its row."""
    a = int(adapters[0, HOST_AFTER])
    unlink(adapters, HOST_BEFORE, a)
    adapters[a, LOADING] = 0
    adapters[a, RESIDENT] = 1
    ints[LOADING_BLOCKS] -= sizes[a, BLOCKS]
    link_last(adapters, IDLE_BEFORE, 0, a)
    after = adapters[0, HOST_AFTER]
    if after == 0:
        floats[LOAD_END_S] = math.inf
    else:
        floats[LOAD_END_S] += load_ms(sizes, loading, after) * 1e-3
    return a


@njit(**ENGINE_FLAGS)
def keep(ints: IntArray, adapters: IntArray, sizes: IntArray, a: int, on: bool) -> None:
    """A policy keeps adapter row `a` on the GPU from now on, if there is room without others that it keeps, or no more.

    It is loaded while the server works, and takes no time.
    """
    if not on:
        adapters[a, KEPT] = 0
        return
    if adapters[a, RESIDENT] == 0 and adapters[a, LOADING] == 0:
        while ints[USED] + sizes[a, BLOCKS] > ints[KV_BLOCKS] or ints[RESIDENTS] + 1 > ints[SLOT_LIMIT]:
            e = victim(ints, adapters, 0)
            if e == 0 or adapters[e, KEPT] == 1:
                return
            drop(ints, adapters, sizes, e)
        put(ints, adapters, sizes, a)
        ints[UNAWAITED] += 1
        link_last(adapters, IDLE_BEFORE, 0, a)
    adapters[a, KEPT] = 1


@njit(inline="always", **ENGINE_FLAGS)
def load_ms(sizes: IntArray, loading: FloatArray, a: int) -> float:
    """Time that adapter row `a` takes from host memory to the GPU, ms."""
    return float(loading[0] + loading[1] * sizes[a, RANK])
