"""Adapters in GPU slots and in host memory: two caches, each of which evicts the least recently used adapter.

Mirrors vllm/lora/worker_manager.py (`LRUCacheWorkerLoRAManager._apply_adapters`, `add_adapter`) and
vllm/lora/model_manager.py (`LRUCacheLoRAModelManager`): host memory registers `max_cpu_loras` adapters, the slots
activate `max_loras` of these. Each step touches the adapters of its batch in both caches, in the order of a Python set
(`walk_order`). Adapters are therefore ordered by (step of last use, place in the walk of that step), and only steps in
which an adapter joins the batch need work. An absent adapter evicts the oldest one. That one may belong to the batch
and come later in the walk; it is then loaded again, and evicts the next one.

Two rings, ordered by last use, hold the adapters outside the batch: those in slots, and those only in host memory,
which are older than all of the former. The work is bounded by the adapters that join and the loads.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray, Record
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import IN_SLOT, NO_LIMIT, ON_HOST, ServerState, numbers
from packer.twin.engine.walk_order import enter, note_leave, order
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED


(BEFORE_ALL,) = numbers(-1, 0)  # place in the walk


def register(server: Record, adapters: Record, *, in_slots: bool) -> None:
    """Load every adapter once before the first request, in order; host memory keeps the last `host_places` of them.
    vLLM does this with the adapters of `--lora-modules` (vllm/entrypoints/openai/serving_models.py,
    `init_static_loras`). `in_slots`: the adapters loaded last also stay in slots."""
    loaded = (np.flatnonzero(adapters["rank"][1:]) + 1).tolist()
    kept = loaded[-int(server["host_places"]) :]
    resident = kept[-int(server["slots"]) :] if in_slots else []
    adapters["on_host"][kept] = 1
    adapters["resident"][resident] = 1
    server["on_host_count"], server["residents"] = len(kept), len(resident)
    for ring, rows in (("host", kept[: len(kept) - len(resident)]), ("idle", resident)):
        _fill(adapters[ring], rows)


def keep_tokenizers(server: Record, adapters: Record) -> None:
    """Use every adapter once before the first request, in order: the front end keeps the last `tokenizer_places`."""
    kept = (np.flatnonzero(adapters["rank"][1:]) + 1)[-int(server["tokenizer_places"]) :].tolist()
    adapters["known"][kept], server["tokenizers"] = 1, len(kept)
    _fill(adapters["named"], kept)


def _fill(ring: Record, rows: list[int]) -> None:
    around = [0, *rows, 0]
    ring["before"][around[1:]] = around[:-1]
    ring["after"][around[:-1]] = around[1:]


@njit(**INLINED)
def free_slot(server: Record, adapters: Record, a: int) -> None:
    """Free the slot of adapter row `a`, which is in the ring of idle adapters; host memory keeps the adapter."""
    unlink(adapters["idle"], a)
    adapters[a].resident = 0
    server.residents -= 1
    server.used -= adapters[a].blocks
    if server.track_host == 1:
        link_last(adapters["host"], 0, a)


@njit(**CALLED)
def make_room(server: Record, adapters: Record, blocks: int, keep: int) -> None:
    """Free slots of adapters outside the batch, except `keep`, until `blocks` more KV blocks are free.

    Used only if adapters are in the KV cache (unified memory): they are evicted before requests are preempted.
    """
    e = adapters[0].idle.after
    while server.used + blocks > server.kv_blocks:
        # `keep` is the adapter for whose request the room is made.
        if e == keep and e != 0:
            e = adapters[e].idle.after
        if e == 0 or adapters[e].blocks == 0:
            return
        after = adapters[e].idle.after
        free_slot(server, adapters, e)
        e = after


@njit(**CALLED)
def oldest(server: Record, adapters: Record, sets: IntArray, idle: int, p: int, cache: int) -> int:
    """Row of the least recently used adapter of a cache that the walk, at place `p`, has not touched yet.

    `idle`: the oldest adapter outside the batch, or 0. Adapters that the last step touched are searched in the order of
    that step's walk, from `server.oldest` on. `p` NO_LIMIT: only `idle` is evicted.
    """
    # An idle adapter that the last step did not touch is older than every adapter of the batch.
    if p == NO_LIMIT or (idle > 0 and adapters[idle].last_use < server.step + 1):
        return idle
    row = server.walk_row
    for i in range(server.oldest[cache], server.set_count[1 - row]):
        a = sets[1 - row, i]
        if a > 0:
            adapter = adapters[a]
            held = adapter.resident if cache == IN_SLOT else adapter.on_host
            if held == 1 and (adapter.in_batch == 0 or adapter.walked[row] > p):
                server.oldest[cache] = i
                return int(a)
    return idle


@njit(**INLINED)
def forget(server: Record, adapters: Record, a: int, linked: bool) -> None:
    """Remove adapter row `a` from host memory and from its slot (`AdapterLRUCache._on_remove` deactivates it)."""
    if adapters[a].resident == 1:
        if linked:
            unlink(adapters["idle"], a)
        adapters[a].resident = 0
        server.residents -= 1
        server.used -= adapters[a].blocks
    elif linked:
        unlink(adapters["host"], a)
    adapters[a].on_host = 0
    server.on_host_count -= 1


@njit(**INLINED)
def outside(server: Record, adapters: Record, a: int, p: int) -> bool:
    """Whether adapter row `a` is in a ring; an adapter that joins the batch is until the walk comes to it."""
    joined = adapters[a].joined == server.step + 1
    return bool(adapters[a].in_batch == 0 or (joined and adapters[a].walked[server.walk_row] > p))


@njit(**INLINED)
def bring(server: Record, adapters: Record, sets: IntArray, loading: FloatArray, a: int, p: int) -> int:
    """Touch adapter row `a`, at place `p` of the walk: load it if it is in no slot, and add the time to `load_ms`.

    `loading` float64 (4,): ms from host (base, per rank) and from disk (base, per rank). The caller accounts
    for its KV blocks. Returns the number of evicted adapters of the batch; the walk comes to all of them later.
    """
    rank, evicted = adapters[a].rank, 0
    if adapters[a].joined == server.step + 1:  # it was outside the batch
        if adapters[a].resident == 1:
            unlink(adapters["idle"], a)
        elif adapters[a].on_host == 1:
            unlink(adapters["host"], a)
    if server.track_host == 1 and adapters[a].on_host == 0:
        if server.on_host_count == server.host_places:
            idle = adapters[0].host.after
            if idle == 0:
                idle = adapters[0].idle.after
            e = oldest(server, adapters, sets, idle, p, ON_HOST)
            linked = outside(server, adapters, e, p)
            forget(server, adapters, e, linked)
            evicted += not linked
        adapters[a].on_host = 1
        server.on_host_count += 1
        server.disk_loads += 1
        server.load_ms += loading[2] + loading[3] * rank
    if adapters[a].resident == 0:
        if server.residents == server.slots:
            e = oldest(server, adapters, sets, adapters[0].idle.after, p, IN_SLOT)
            if outside(server, adapters, e, p):
                free_slot(server, adapters, e)
            else:
                adapters[e].resident = 0
                server.residents -= 1
                evicted += 1
        adapters[a].resident = 1
        server.residents += 1
        server.adapter_loads += 1
        server.load_ms += loading[0] + loading[1] * rank
    return evicted


@njit(**INLINED)
def plenty(server: Record, adapters: Record, ring: Record, needed: int) -> int:
    """How many of `needed` adapters the ring lacks, without adapters that the last step touched or that join."""
    e = ring[0].after
    while needed > 0 and e != 0 and adapters[e].last_use < server.step + 1 and adapters[e].in_batch == 0:
        needed -= 1
        e = ring[e].after
    return needed


@njit(**INLINED)
def scarce(server: Record, adapters: Record, members: Record) -> bool:
    """Whether the adapters that join may evict an adapter that the last step touched, or one another."""
    slots = server.residents - server.slots
    places = server.on_host_count - server.host_places
    for k in range(server.joiners):
        a = members[k].joining
        slots += adapters[a].resident == 0
        places += adapters[a].on_host == 0
    if plenty(server, adapters, adapters["idle"], slots) > 0:
        return True
    return bool(server.track_host == 1 and plenty(server, adapters, adapters["host"], places) > 0)


@njit(**CALLED)
def walk(server: Record, adapters: Record, sets: IntArray, members: Record, loading: FloatArray) -> None:
    """Touch the adapters of the batch in the order of the walk, as long as any needs loading into a slot.

    With `prefills_first`, adapters that join come before all others, because their prefill has a step of its own.
    """
    to_visit = server.joiners
    if server.spares_batch == 1:
        # `join` has loaded them already: only their order of entry is left to note.
        enter(server, adapters, members)
    elif scarce(server, adapters, members):
        order(server, adapters, sets, members, server.step - 1)
        enter(server, adapters, members)
        row = order(server, adapters, sets, members, server.step)
        server.walk_row = row
        server.oldest[IN_SLOT] = server.oldest[ON_HOST] = 0
        if server.prefills_first == 1:
            for k in range(to_visit):
                a = members[k].joining
                to_visit += bring(server, adapters, sets, loading, a, BEFORE_ALL) - 1
                if adapters[a].last_use == server.step + 1:  # no longer what the last step touched
                    sets[1 - row, adapters[a].walked[1 - row]] = 0
        for p in range(server.set_count[row]):
            a = sets[row, p]
            if a == 0:
                continue
            comes = server.prefills_first == 0 and adapters[a].joined == server.step + 1
            if comes or adapters[a].resident == 0:
                to_visit += bring(server, adapters, sets, loading, a, p) - 1
                if to_visit == 0:
                    return
    else:
        enter(server, adapters, members)
        for k in range(to_visit):
            # Enough idle adapters are older than the last step: the order of the walk does not matter.
            bring(server, adapters, sets, loading, members[k].joining, NO_LIMIT)


@njit(inline="always", **ENGINE_FLAGS)
def join(state: ServerState, loading: FloatArray, a: int) -> None:
    """Add a request of adapter row `a` to the batch; update the sums that step laws and routers read.

    The adapter gets its slot in the walk over the batch, or at once if it would not evict other adapters of the batch.
    """
    server, adapter, members = state.server, state.adapters[a], state.members
    server.request_ranks += adapter.rank
    adapter.in_batch += 1
    if adapter.in_batch == 1:
        server.active += 1
        server.active_ranks += adapter.rank
        k = adapter.rank_class
        state.classes[k].members += 1
        if k > server.largest:
            server.largest = k
        adapter.joined = server.step + 1
        if server.spares_batch == 1 or members.size == 1:
            bring(server, state.adapters, state.sets, loading, a, NO_LIMIT)
        if members.size > 1:
            members[server.joiners].joining = a
            server.joiners += 1


@njit(**INLINED)
def leave(state: ServerState, a: int, last_step: int) -> None:
    """Remove a request of adapter row `a` from the batch; `last_step` is the last step in which it was in the batch.

    With its last request, the adapter joins the ring of idle adapters, after those that were touched before it.
    """
    server, adapters, classes, adapter = state.server, state.adapters, state.classes, state.adapters[a]
    server.request_ranks -= adapter.rank
    adapter.in_batch -= 1
    if adapter.in_batch == 0:
        server.active -= 1
        server.active_ranks -= adapter.rank
        k = adapter.rank_class
        classes[k].members -= 1
        while k > 0 and k == server.largest and classes[k].members == 0:
            k -= 1
            server.largest = k
        adapter.last_use = last_step + 2
        note_leave(server, last_step)
        e = adapters[0].idle.before
        if state.members.size > 1 and adapters[e].last_use == last_step + 2:
            row = order(server, adapters, state.sets, state.members, last_step)
            place = adapter.walked[row]
            # Adapters that leave after the same step were last used in the order of its walk.
            while adapters[e].last_use == last_step + 2 and adapters[e].walked[row] > place:
                e = adapters[e].idle.before
        link_last(adapters["idle"], adapters[e].idle.after, a)


@njit(inline="always", **ENGINE_FLAGS)
def largest_rank(server: Record, classes: Record) -> int:
    """Largest rank in the batch; 0 without adapters."""
    rank: int = classes[server.largest].rank
    return rank
