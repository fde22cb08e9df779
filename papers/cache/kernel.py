"""Adapter cache on the GPU of engines other than vLLM's: which adapters are evicted, and how adapters are loaded.

An adapter on the GPU is in the batch, in the ring of idle adapters (ordered by last use), or in transfer from the
host, which is one adapter at a time. `used` counts the cells of adapters and of the KV cache.
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
    """Evict idle adapter row `a` from the GPU."""
    server, adapters = state.server, state.adapters
    unlink(adapters["idle"], a)
    adapters[a].resident = 0
    server.residents -= 1
    server.used -= adapters[a].blocks


@njit(**ENGINE_FLAGS)
def victim(state: CellState, spare: int) -> int:
    """Row of the idle adapter to evict next, 0 if there is none. `spare` is never evicted; adapters that a policy
    keeps, or that waiting requests need, are evicted last.
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
            # The ring is in order of last use, so the first adapter that nothing holds is the one to evict.
            if held == 0 and server.cache_rule != LFU:
                return int(e)
        e = adapters[e].idle.after
    return int(best)


@njit(**ENGINE_FLAGS)
def make_room(state: CellState, blocks: int, slots: int, spare: int) -> bool:
    """Drop idle adapters until `blocks` cells and `slots` slots are free; return False if that is not enough."""
    server, own = state.server, state.own
    while server.used + blocks > server.kv_blocks or server.residents + slots > own.slot_limit:
        e = victim(state, spare)
        if e == 0:
            return False
        drop(state, e)
    return True


@njit(**ENGINE_FLAGS)
def put(state: CellState, a: int) -> None:
    """Put absent adapter row `a` on the GPU at once. The caller has made room."""
    server, adapters = state.server, state.adapters
    adapters[a].resident = 1
    server.residents += 1
    server.used += adapters[a].blocks
    server.adapter_loads += 1


@njit(**ENGINE_FLAGS)
def enter_batch(state: CellState, loading: FloatArray, a: int) -> float:
    """Add a request of adapter row `a` to the batch and load the adapter, which has room. Return the load time, ms."""
    server, adapters, own, cached = state.server, state.adapters, state.own, state.cached
    k, loads = adapters[a].rank_class, True
    if adapters[a].resident == 0:
        put(state, a)
    # Each request loads a copy of its own.
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
    """Remove a finished request of adapter row `a`. Return whether the adapter is now idle: no request of it runs."""
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
    """Evict idle adapters unless the rule keeps them or, if `tag` is not 0, prefetch `tag` wanted them."""
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
        # Kept adapters are evicted last, so none but these are left.
        if e == 0 or cached[e].kept == 1:
            return
        drop(state, e)


@njit(**ENGINE_FLAGS)
def start_load(state: CellState, loading: FloatArray, a: int) -> bool:
    """Queue the load of absent adapter row `a`, for which requests wait. Return False if there is no room for it."""
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
    """Finish the load that ends at `load_end_s` and start the next one. Return the row of the loaded adapter."""
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
    """Keep adapter row `a` on the GPU if it fits without evicting other kept adapters. `on` False: stop keeping it.

    The load happens in the background and takes no time.
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
    """Time to load an adapter from host memory to the GPU, ms."""
    return float(loading[0] + loading[1] * adapter.rank)
