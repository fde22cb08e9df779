"""Adapters on the GPU of an engine other than vLLM's: which leave, and how they come.

An adapter on the GPU is in the batch, in the ring of idle ones (by last use), or on its way over the link between
host and GPU, which brings one after the other. What it takes is counted in `used`, with the KV cache's cells.
"""

from __future__ import annotations

import math

from numba import njit

from packer.arrays import FloatArray, Record
from packer.papers.cache.loading import ASYNC
from packer.papers.state import CellState, Own, state_of
from packer.twin.cluster.caching import DROP, LFU, NOTHING
from packer.twin.cluster.state import Servers
from packer.twin.engine.containers import link_last, unlink
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def drop(state: CellState, a: int) -> None:
    """Idle adapter row `a` leaves the GPU."""
    server, adapters = state.server, state.adapters
    unlink(adapters["idle"], a)
    adapters[a].resident = 0
    server.residents -= 1
    server.used -= adapters[a].blocks


@njit(**ENGINE_FLAGS)
def victim(state: CellState, spare: int) -> int:
    """Row of the idle adapter that leaves next, 0 without one; `spare` stays, and what is kept, or was
    brought for a waiting request, goes last.
    """
    server, own, adapters, cached = state.server, state.own, state.adapters, state.cached
    best, found, worst = 0, 0, 0
    e = adapters[0].idle.after
    while e != 0:
        if e != spare:
            awaited = own.loading_mode == ASYNC and cached[e].wanted > 0
            held = 2 * cached[e].kept + (1 if awaited else 0)
            uses = cached[e].uses if server.cache_rule == LFU else 0
            if best == 0 or held < worst or (held == worst and uses < found):
                best, found, worst = e, uses, held
            if held == 0 and server.cache_rule != LFU:
                return int(e)
        e = adapters[e].idle.after
    return int(best)


@njit(**ENGINE_FLAGS)
def make_room(state: CellState, blocks: int, slots: int, spare: int) -> bool:
    """Drop idle adapters until so many cells, and slots, are free; False if that is not enough."""
    server, own = state.server, state.own
    while server.used + blocks > server.kv_blocks or server.residents + slots > own.slot_limit:
        e = victim(state, spare)
        if e == 0:
            return False
        drop(state, e)
    return True


@njit(**ENGINE_FLAGS)
def put(state: CellState, a: int) -> None:
    """Adapter row `a`, which is absent, comes to the GPU at once; the caller has made room."""
    server, adapters = state.server, state.adapters
    adapters[a].resident = 1
    server.residents += 1
    server.used += adapters[a].blocks
    server.adapter_loads += 1


@njit(**ENGINE_FLAGS)
def enter_batch(state: CellState, loading: FloatArray, a: int) -> float:
    """A request of adapter row `a` runs; its adapter, for which there is room, comes with it. Time of the load, ms."""
    server, adapters, own, cached = state.server, state.adapters, state.own, state.cached
    k, loads = adapters[a].rank_class, True
    if adapters[a].resident == 0:
        put(state, a)
    elif adapters[a].in_batch > 0 and server.cache_rule == NOTHING:
        server.adapter_loads += 1
    else:
        loads = False
        if adapters[a].in_batch == 0:
            unlink(adapters["idle"], a)
    cached[a].uses += 1
    adapters[a].in_batch += 1
    server.running += 1
    server.request_ranks += adapters[a].rank
    if adapters[a].in_batch == 1:
        server.active += 1
        server.active_ranks += adapters[a].rank
        own.active_blocks += adapters[a].blocks
        state.classes[k].members += 1
        server.largest = max(server.largest, k)
    return load_ms(adapters[a], loading) if loads else 0.0


@njit(**ENGINE_FLAGS)
def leave_batch(state: CellState, a: int) -> bool:
    """A request of adapter row `a` is finished; whether it was the last that ran: its adapter is idle then."""
    server, adapters, classes, own = state.server, state.adapters, state.classes, state.own
    k = adapters[a].rank_class
    server.running -= 1
    server.request_ranks -= adapters[a].rank
    classes[k].unfinished -= 1
    adapters[a].in_batch -= 1
    if adapters[a].in_batch > 0:
        return False
    server.active -= 1
    server.active_ranks -= adapters[a].rank
    own.active_blocks -= adapters[a].blocks
    classes[k].members -= 1
    while server.largest > 0 and classes[server.largest].members == 0:
        server.largest -= 1
    link_last(adapters["idle"], 0, a)
    return True


@njit(**ENGINE_FLAGS)
def tidy(state: CellState, tag: int) -> None:
    """Idle adapters leave unless the rule keeps them or, where `tag` is not 0, prefetch `tag` brought them."""
    server, own, adapters, cached = state.server, state.own, state.adapters, state.cached
    rule = server.cache_rule
    if rule in (DROP, NOTHING):
        e = adapters[0].idle.after
        while e != 0:
            after = adapters[e].idle.after
            wanted = own.loading_mode == ASYNC and cached[e].wanted > 0
            fetched = tag > 0 and cached[e].tagged == tag
            if cached[e].kept == 0 and not wanted and not fetched:
                drop(state, e)
            e = after
    while server.used > own.high_water:
        e = victim(state, 0)
        if e == 0 or cached[e].kept == 1:
            return
        drop(state, e)


@njit(**ENGINE_FLAGS)
def start_load(state: CellState, loading: FloatArray, a: int) -> bool:
    """Absent adapter row `a`, for which requests wait, is put on the link and takes its room; False without room."""
    server, own, adapters, cached = state.server, state.own, state.adapters, state.cached
    blocks = adapters[a].blocks
    if not make_room(state, blocks, 1, 0):
        return False
    server.used += blocks
    server.residents += 1
    own.loading_blocks += blocks
    server.adapter_loads += 1
    cached[a].loading = 1
    if adapters[0].host.after == 0:
        own.load_end_s = server.now_s + load_ms(adapters[a], loading) * 1e-3
    link_last(adapters["host"], 0, a)
    return True


@njit(**ENGINE_FLAGS)
def end_load(state: CellState, loading: FloatArray) -> int:
    """The load that ends at `load_end_s` is over, and the next one begins; returns its row."""
    own, adapters, cached = state.own, state.adapters, state.cached
    a = int(adapters[0].host.after)
    unlink(adapters["host"], a)
    cached[a].loading = 0
    adapters[a].resident = 1
    own.loading_blocks -= adapters[a].blocks
    link_last(adapters["idle"], 0, a)
    after = adapters[0].host.after
    if after == 0:
        own.load_end_s = math.inf
    else:
        own.load_end_s += load_ms(adapters[after], loading) * 1e-3
    return a


@njit(**ENGINE_FLAGS)
def keep(c: Servers, memory: Own, s: int, a: int, on: bool) -> None:
    """A policy keeps adapter row `a` on the GPU from now on, if there is room without others that it keeps, or no more.

    It is loaded while the server works, and takes no time.
    """
    state = state_of(c, memory, s)
    server, adapters, own, cached = state.server, state.adapters, state.own, state.cached
    if not on:
        cached[a].kept = 0
        return
    if adapters[a].resident == 0 and cached[a].loading == 0:
        while server.used + adapters[a].blocks > server.kv_blocks or server.residents + 1 > own.slot_limit:
            e = victim(state, 0)
            if e == 0 or cached[e].kept == 1:
                return
            drop(state, e)
        put(state, a)
        server.unawaited += 1
        link_last(adapters["idle"], 0, a)
    cached[a].kept = 1


@njit(inline="always", **ENGINE_FLAGS)
def load_ms(adapter: Record, loading: FloatArray) -> float:
    """Time that an adapter takes from host memory to the GPU, ms."""
    return float(loading[0] + loading[1] * adapter.rank)
