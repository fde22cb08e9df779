"""What a request does with the pool: it finds blocks, holds them, hashes the blocks that it fills, and frees them."""

from __future__ import annotations

import numpy as np
from numba import njit

from packer.arrays import Record
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.pool import (
    LONE, Pool, RUN, block_of, drop_entry, free_blocks, free_run, new_entry, shared_blocks, slot_of,
)  # fmt: skip
from packer.twin.engine.state import NO_LIMIT, ServerState
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED


@njit(**INLINED)
def find(state: ServerState, pool: Pool, r: int) -> int:
    """Return how many of the first blocks of request `r` are in the cache.

    The last token is always computed, to sample the next one from it (`KVCacheManager.get_computed_blocks`).
    """
    size = state.server.block_size
    most = (state.requests[r].prompt + state.requests[r].generated - 1) // size
    shared, hits = shared_blocks(pool, r, size), 0
    if shared > 0:
        hits = find_shared(pool, r, min(shared, most), size)
    # A preempted request's own blocks follow the shared ones: they are found only after all of these.
    own = min(most - hits, pool.blocks[pool.run[r]].count) if hits == shared and pool.run[r] > 0 else 0
    kept = hits + own
    if state.server.windowed > 0.0 and hits > 0:
        kept = kept_by_windows(state, pool, hits, own)
    if state.server.found_in > 1:  # a state is cached only where a block of its own size ends
        kept -= kept % state.server.found_in
    if kept < hits:
        shorten(pool, pool.all[0].free_seat, kept)
    return int(kept)


@njit(**INLINED)
def find_shared(pool: Pool, r: int, most: int, size: int) -> int:
    """As `find`, for blocks that other requests may share: find a chain by bisection, then entries one by one.

    The first free seat receives what is found.
    """
    s = pool.all[0].free_seat
    seat, row = pool.seats[s], pool.held[s - size]
    leaf = low = 0
    # The last blocks of a chain are taken first, so what is left is its beginning: bisection finds its end.
    high = middle = most
    while low < high:
        e = pool.table[slot_of(pool, block_of(pool, r, middle - 1, size))]
        if e > 0 and pool.entries[e].parent != LONE:
            leaf, low = e, middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    seat.leaf, seat.chained, seat.lone = leaf, low, 0
    for place in range(low, most):
        e = pool.table[slot_of(pool, block_of(pool, r, place, size))]
        if e == 0:
            break
        row[seat.lone] = e
        seat.lone += 1
    return int(seat.chained + seat.lone)


@njit(**INLINED)
def entry_at(pool: Pool, s: int, place: int, later: int, size: int) -> int:
    """Entry that holds block `place` of the request in seat `s`; `later`: that of the block after it."""
    seat = pool.seats[s]
    if place >= seat.chained:
        return int(pool.held[s - size, place - seat.chained])
    return int(seat.leaf if place == seat.chained - 1 else pool.entries[later].parent)


@njit(**INLINED)
def shorten(pool: Pool, s: int, most: int) -> None:
    """Leave only the first `most` entries in seat `s`."""
    seat = pool.seats[s]
    while seat.chained + seat.lone > most:
        if seat.lone > 0:
            seat.lone -= 1
        else:
            seat.leaf = pool.entries[seat.leaf].parent
            seat.chained -= 1


@njit(inline="always", **ENGINE_FLAGS)
def in_window(server: Record) -> int:
    """Number of blocks before a token that its layers with a window read (`SlidingWindowManager`)."""
    blocks: int = (server.window + server.block_size // 2 - 1) // server.block_size
    return blocks


@njit(**CALLED)
def kept_by_windows(state: ServerState, pool: Pool, hits: int, own: int) -> int:
    """Return after how many of the blocks found all layers with a window have the blocks that they read.

    `hits`: entries; `own`: blocks after these that the request finds again. The blocks at the end are enough, or all
    from the first one on (`SlidingWindowManager.find_longest_cache_hit`).
    """
    need, s, kept, count, e = in_window(state.server), pool.all[0].free_seat, hits + own, own, 0
    place = hits - 1
    while place >= 0 and count < need:
        e = entry_at(pool, s, place, e, state.server.block_size)
        if pool.blocks[e].until > state.server.passed:
            kept = place + 1 if count == 0 else kept
            count += 1
        else:
            count = 0
        place -= 1
    return int(kept if count >= need else count)


@njit(**CALLED)
def keep_in_windows(state: ServerState, pool: Pool, s: int, blocks: int, end: int) -> None:
    """Note until when layers with a window keep what they read after the first `blocks` blocks of seat `s`.

    Its request has `end` tokens at its end. Blocks that they read then they keep; others are freed, and then taken.
    """
    server, seat, e = state.server, pool.seats[s], 0
    place = seat.chained + seat.lone - 1
    while place >= max(blocks - in_window(server), 0):
        e = entry_at(pool, s, place, e, server.block_size)
        pool.blocks[e].until = until_of(state, place, end)
        place -= 1


@njit(inline="always", **ENGINE_FLAGS)
def until_of(state: ServerState, place: int, end: int) -> float:
    """Return until when layers with a window keep block `place`, as for `keep_in_windows`."""
    server = state.server
    if (place + 1) * server.block_size + server.window > end:
        return np.inf
    return float(server.passed + free_blocks(state))


@njit(**CALLED)
def idle_blocks(pool: Pool, r: int, hits: int, size: int) -> int:
    """Number of the blocks that `find` found that are in the free queue."""
    idle = 0
    if shared_blocks(pool, r, size) > 0:
        s = pool.all[0].free_seat
        seat = pool.seats[s]
        e = seat.leaf
        # An entry that is held holds all entries before it.
        while e > 0 and pool.entries[e].refs == 0:
            idle += 1
            e = pool.entries[e].parent
        for i in range(seat.lone):
            idle += pool.entries[pool.held[s - size, i]].refs == 0
        # The remaining hits are the request's own run, which is in the free queue as a whole.
        hits -= seat.chained + seat.lone
    return idle + hits


@njit(**INLINED)
def hold_chain(state: ServerState, pool: Pool, leaf: int) -> None:
    """Hold entry `leaf`, which holds the entries before it; entries adjacent in the queue leave it together."""
    e = leaf
    while e > 0:
        entry = pool.entries[e]
        entry.refs += 1
        # It was held before, and so were the entries before it.
        if entry.refs > 1:
            return
        state.server.used += 1
        parent = entry.parent
        if entry.after != parent or parent == 0 or pool.entries[parent].refs > 0:
            before, after = pool.entries[leaf].before, entry.after
            pool.entries[before].after, pool.entries[after].before = after, before
            leaf = parent
        e = parent


@njit(**INLINED)
def let_go_chain(state: ServerState, pool: Pool, leaf: int) -> None:
    """Release entry `leaf`. If nothing else holds it, it joins the end of the queue; likewise the entries before it."""
    e, last = leaf, 0
    while e > 0:
        entry = pool.entries[e]
        entry.refs -= 1
        if entry.refs > 0:
            break
        state.server.used -= 1
        if last > 0:
            pool.entries[last].after, entry.before = e, last
        last = e
        e = entry.parent
    if last > 0:
        tail = pool.entries[0].before
        pool.entries[tail].after, pool.entries[leaf].before = leaf, tail
        pool.entries[last].after, pool.entries[0].before = 0, last


@njit(**INLINED)
def hold(state: ServerState, pool: Pool, e: int) -> None:
    """Hold an entry that is in no chain."""
    entry = pool.entries[e]
    entry.refs += 1
    if entry.refs == 1:
        unlink(pool.entries, e)
        state.server.used += 1


@njit(**INLINED)
def let_go(state: ServerState, pool: Pool, e: int) -> None:
    """Release an entry that is in no chain. If nothing else holds it, it joins the end of the queue."""
    entry = pool.entries[e]
    entry.refs -= 1
    if entry.refs == 0:
        link_last(pool.entries, 0, e)
        state.server.used -= 1


@njit(**INLINED)
def sit_down(state: ServerState, pool: Pool, r: int, hits: int) -> None:
    """Make request `r` hold the `hits` blocks that `find` found."""
    s, size, used = pool.all[0].free_seat, state.server.block_size, state.server.used
    pool.seat[r] = 0
    if shared_blocks(pool, r, size) > 0:
        pool.seat[r] = s
        seat = pool.seats[s]
        pool.all[0].free_seat = seat.after
        seat.request, seat.before, seat.after = r, s, s
        hold_chain(state, pool, seat.leaf)
        for i in range(seat.lone):
            hold(state, pool, pool.held[s - size, i])
        hits -= seat.chained + seat.lone
        if state.server.windowed > 0.0:
            state.server.passed += state.server.used - used
            end = state.requests[r].prompt + state.requests[r].output
            keep_in_windows(state, pool, s, seat.chained + seat.lone, end)
    e = pool.run[r]
    if e > 0:  # more than it finds is never left: it had at most so many blocks
        pool.run[r] = 0
        entry = pool.blocks[e]
        entry.count -= hits
        entry.block = RUN
        state.server.used += hits
        if entry.count == 0:
            drop_entry(pool, e)


@njit(**INLINED)
def hash_full(state: ServerState, pool: Pool, r: int, full: int) -> None:
    """Hash the first `full` blocks of request `r`, so that they can be found (`cache_full_blocks`)."""
    s, size = pool.seat[r], state.server.block_size
    if s == 0:
        return
    seat = pool.seats[s]
    known = seat.chained + seat.lone
    if known < full:
        end = state.requests[r].prompt + state.requests[r].output
        for place in range(known, min(full, shared_blocks(pool, r, size))):
            give_hash(pool, s, block_of(pool, r, place, size), size, until_of(state, place, end))


@njit(**CALLED)
def give_hash(pool: Pool, s: int, block: int, size: int, until: float) -> None:
    """Hash the next block of the request in seat `s`; it is found after other entries with the same content."""
    seat, k = pool.seats[s], slot_of(pool, block)
    other, e = pool.table[k], new_entry(pool, block, 1)
    entry, content = pool.entries[e], pool.blocks[e]
    entry.refs, content.until = 1, until
    if other == 0 and seat.lone == 0:
        entry.parent, seat.leaf = seat.leaf, e  # the new entry holds what the request held
        seat.chained += 1
    else:
        entry.parent = LONE
        pool.held[s - size, seat.lone] = e
        seat.lone += 1
    if other == 0:
        pool.table[k] = content.older = content.newer = e
    else:
        last = pool.blocks[other].older
        pool.blocks[other].until = max(pool.blocks[other].until, until)
        content.older, content.newer = last, other
        pool.blocks[last].newer = e
        pool.blocks[other].older = e


@njit(**INLINED)
def stand_up(state: ServerState, pool: Pool, r: int, held: int, full: int, again: bool) -> None:
    """Free the `held` blocks of request `r`, the last one first (`free_blocks`); `full` of them were hashed.

    `again`: the request was preempted and will look for its blocks again.
    """
    s, size, entries = pool.seat[r], state.server.block_size, 0
    if s > 0:
        entries = pool.seats[s].chained + pool.seats[s].lone
    own = max(full - entries, 0)
    state.server.used -= held - entries
    # A request frees its last blocks first, and those that are not hashed are its last ones.
    free_run(pool, held - entries - own, pool.all[0].unhashed_first == 1)
    if own > 0 and again:
        pool.run[r] = new_entry(pool, RUN - 1 - r, own)
        link_last(pool.entries, 0, pool.run[r])
    else:
        free_run(pool, own, False)
    if s == 0:
        return
    seat = pool.seats[s]
    if state.server.windowed > 0.0:
        keep_in_windows(state, pool, s, full, NO_LIMIT)
    for i in range(seat.lone - 1, -1, -1):
        let_go(state, pool, pool.held[s - size, i])
    let_go_chain(state, pool, seat.leaf)
    seat.after = pool.all[0].free_seat
    pool.all[0].free_seat = s
    pool.seat[r] = 0


@njit(**INLINED)
def enter_phase(pool: Pool, s: int, phase: int, size: int) -> None:
    """Append the request in seat `s` to the ring of the phase in which it takes its next block, if it may hash it."""
    seat = pool.seats[s]
    if seat.chained + seat.lone == shared_blocks(pool, seat.request, size):
        return
    link_last(pool.seats, phase, s)


@njit(**INLINED)
def leave_phase(pool: Pool, s: int) -> None:
    """Take the request in seat `s` out of the ring of its phase: it takes no further block."""
    unlink(pool.seats, s)
    # Some seats are in no ring (`enter_phase`): unlinking a row that points to itself changes nothing.
    pool.seats[s].before = pool.seats[s].after = s
