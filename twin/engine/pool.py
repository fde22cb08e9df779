"""The KV cache with prefix caching, as in vLLM: which requests hold which blocks, and which blocks can be found.

Mirrors vllm/v1/core/block_pool.py (`BlockPool`) and single_type_kv_cache_manager.py (`FullAttentionManager`). A block
that no request holds is in the free queue, and blocks are taken from its front. A free block keeps its hash until it is
taken, and a request that begins with its content takes it out of the queue. Equal blocks are not merged: of several
blocks with one hash, the one that was hashed first is found.

Only blocks whose content several requests have (`engine.content`) are kept one by one, as entries. All other blocks are
only counted: held ones by the tokens of their request, free ones as runs, which are entries of the queue. Only their
own request can find them, after a preemption: its run says how many of them are left.

Consecutive entries are held as a chain: a request holds the last one, and each entry holds the one before it. An entry
is in a chain if it was hashed first among those with its content, and is the first block or follows an entry in a
chain. So one content has one chain. Blocks are freed from the last one on, so a chain's first entries are taken last.
All other entries, which repeat a content or follow one that does, are held one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import IntArray, Record, record
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.content import Content, Int32Array
from packer.twin.engine.state import ServerState
from packer.twin.flags import ENGINE_FLAGS, INLINED

POOL = record(
    ("caching", "i8"),  # 0: blocks are only counted
    ("unhashed_first", "i8"),  # see `packer.twin.engine_rules`
    ("tokens", "i8"),  # tokens of an id of `content`
    ("lookahead", "i8"),  # tokens after a block that its hash covers, too
    ("per_id", "i8"),  # most blocks that end in the tokens of one id
    ("factor", "i8"),  # spreads the numbers of contents over `table`; 1 if `table` has a place for each
    ("shift", "i8"),
    ("free_seat", "i8"),  # first seat that no request has, 0: none
    ("free_entry", "i8"),  # first unused entry
)
ENTRY = record(
    ("refs", "i4"),  # requests and entries that hold it
    ("parent", "i4"),  # the entry that it holds; 0: none, it is the first block; LONE: it is in no chain
    ("before", "i4"),  # links of the free queue, a ring around entry 0; `after` of an unused entry: the next
    ("after", "i4"),
)
LONE = -1
BLOCKS = record(
    ("block", "i8"),  # number of the content; RUN: no request finds it; RUN - 1 - r: only request r does
    ("count", "i4"),  # blocks of a run; 1 for a shared content
    ("older", "i4"),  # ring of the entries with one content; `older` of the first one is the last one
    ("newer", "i4"),
    ("until", "f4"),  # value of `passed` of the server at which layers with a window lose it
)
RUN = -1
SEAT = record(
    ("request", "i8"),
    ("leaf", "i4"),  # last entry of the chain that the request holds, 0: none
    ("chained", "i4"),  # entries of that chain
    ("lone", "i4"),  # entries after the chain that the request holds one by one, in its row of `held`
    ("before", "i4"),  # ring around a phase: decodes that may hash the block that they take in it
    ("after", "i4"),  # of a free seat: the next one, 0: none
)


class Pool(NamedTuple):
    """Blocks of a server, for n requests.

    all (1,) of `POOL`. entries (KV blocks + 2,) of `ENTRY`. blocks (KV blocks + 2,) of `BLOCKS`. table (2^k,): first
    entry hashed with each content, 0: none. seats (block size + seats,) of `SEAT`: a ring for each phase, then a
    seat for each running request that shares content. held (seats, most shared blocks of a request): entries. seat
    (n,): seat of each request, 0: none. run (n,): entry of the run that a preempted request finds again, 0: none.
    first, shared (n,), numbers: see `engine.content.Content`. found (n,): tokens of a request in the cache at its first
    admission, -1 before. ended (n,): as `REQUEST.next`, of the requests whose prefill the step in flight ends: planning
    the next step may put them into other lists.
    """

    all: Record
    entries: Record
    blocks: Record
    table: Int32Array
    seats: Record
    held: Int32Array
    seat: Int32Array
    run: Int32Array
    first: IntArray
    shared: IntArray
    numbers: Int32Array
    found: Int32Array
    ended: Int32Array


def new_pool(n: int, kv_blocks: int, block_size: int, max_seqs: int, content: Content) -> Pool:
    """Return an empty pool for n requests, of which at most `max_seqs` run at once."""
    whole = np.zeros(1, dtype=POOL)
    whole["caching"], whole["tokens"] = 1, content.tokens
    whole["per_id"] = -(-content.tokens // block_size)
    contents = int(content.total * whole["per_id"][0])
    # At most half of the places are ever taken, so searches are short.
    table = np.zeros(1 << max(4, (2 * min(kv_blocks, contents)).bit_length()), dtype=np.int32)
    whole["factor"], whole["shift"] = (1, 0) if contents <= len(table) else (0x9E3779B97F4A7C1, 29)
    entries, blocks = np.zeros(kv_blocks + 2, dtype=ENTRY), np.zeros(kv_blocks + 2, dtype=BLOCKS)
    # Entry 0 is the ring of the free queue; the others form the list of unused entries.
    entries["after"][1:-1] = np.arange(2, kv_blocks + 2)
    if kv_blocks:  # all blocks are one run
        blocks["block"][1], blocks["count"][1] = RUN, kv_blocks
        entries["before"][:2] = entries["after"][:2] = 1, 0
        whole["free_entry"] = 2
    count = max(1, min(max_seqs, n))
    seats = np.zeros(block_size + count, dtype=SEAT)
    seats["before"] = seats["after"] = np.arange(len(seats))
    # The first `block_size` seats are rings of phases; the others form the list of free seats.
    seats["after"][block_size:-1] += 1
    seats["after"][-1] = 0
    whole["free_seat"] = block_size
    most = int(content.shared.max(initial=0)) * content.tokens // block_size
    return Pool(
        whole, entries, blocks, table, seats, np.empty((count, most), dtype=np.int32), np.zeros(n, dtype=np.int32),
        np.zeros(n, dtype=np.int32), content.first, content.shared, content.numbers,
        np.full(n, -1, dtype=np.int32), np.zeros(n, dtype=np.int32),
    )  # fmt: skip


def no_pool(n: int) -> Pool:
    """Return the pool, without blocks, of a server without prefix caching for n requests."""
    pool = new_pool(0, 0, 1, 1, Content.none(0))
    pool.all["caching"] = 0
    seat, run, ended = np.zeros((3, n), dtype=np.int32)
    return pool._replace(seat=seat, run=run, ended=ended)


# ---- contents


@njit(inline="always", **ENGINE_FLAGS)
def shared_blocks(pool: Pool, r: int, size: int) -> int:
    """Number of blocks at the beginning of request `r` that other requests may share."""
    ids: int = pool.shared[r]
    tokens, lookahead = pool.all[0].tokens, pool.all[0].lookahead
    same = ids == 0 or (tokens == size and lookahead == 0)
    return ids if same else int(ids * tokens - lookahead) // size


@njit(**INLINED)
def block_of(pool: Pool, r: int, place: int, size: int) -> int:
    """Number of the content of block `place` of request `r`: the id in which it ends, and its place in that id.

    Tokens after the block that its hash covers (`lookahead`) count as part of the block.
    """
    tokens, lookahead = pool.all[0].tokens, pool.all[0].lookahead
    if tokens == size and lookahead == 0:
        return int(pool.numbers[pool.first[r] + place])
    k = ((place + 1) * size - 1 + lookahead) // tokens
    # Blocks that end, with their `lookahead`, before the tokens of this id don't count.
    before = max(k * tokens - lookahead, 0) // size
    return int(np.int64(pool.numbers[pool.first[r] + k]) * pool.all[0].per_id + place - before)


@njit(inline="always", **ENGINE_FLAGS)
def home_of(pool: Pool, block: int) -> int:
    """Place in the table where the search for a content begins."""
    home: int = ((block * pool.all[0].factor) >> pool.all[0].shift) & (pool.table.size - 1)
    return home


@njit(**INLINED)
def slot_of(pool: Pool, block: int) -> int:
    """Place of a content in the table; the table has 0 there if no entry has the content."""
    mask = pool.table.size - 1
    k = home_of(pool, block)
    while pool.table[k] != 0 and pool.blocks[pool.table[k]].block != block:
        k = (k + 1) & mask
    return int(k)


@njit(**INLINED)
def take_hash(pool: Pool, e: int) -> None:
    """Remove the hash of entry `e` (`BlockPool._maybe_evict_cached_block`)."""
    entry = pool.blocks[e]
    k = slot_of(pool, entry.block)
    # Other blocks have the same content: the one of them that was hashed first is found from now on.
    if entry.newer != e:
        pool.blocks[entry.older].newer = entry.newer
        pool.blocks[entry.newer].older = entry.older
        if pool.table[k] == e:
            pool.table[k] = entry.newer
        return
    mask = pool.table.size - 1
    hole = k
    while True:  # move later entries that a search would not find beyond an empty place
        pool.table[hole] = 0
        k = (k + 1) & mask
        while pool.table[k] != 0:
            home = home_of(pool, pool.blocks[pool.table[k]].block)
            if ((k - home) & mask) >= ((k - hole) & mask):
                break
            k = (k + 1) & mask
        if pool.table[k] == 0:
            return
        pool.table[hole] = pool.table[k]
        hole = k


# ---- the free queue


@njit(**INLINED)
def new_entry(pool: Pool, block: int, count: int) -> int:
    """Return an unused entry, now with `count` blocks of content `block`."""
    e = pool.all[0].free_entry
    pool.all[0].free_entry = pool.entries[e].after
    pool.entries[e].refs = 0
    pool.blocks[e].block, pool.blocks[e].count = block, count
    return int(e)


@njit(**INLINED)
def drop_entry(pool: Pool, e: int) -> None:
    """Remove entry `e`, which has no blocks any more, from the free queue; it is unused from now on."""
    unlink(pool.entries, e)
    pool.entries[e].after = pool.all[0].free_entry
    pool.all[0].free_entry = e


@njit(**INLINED)
def free_run(pool: Pool, count: int, front: bool) -> None:
    """Add `count` blocks that no request can find to the free queue, at its front or at its end."""
    if count == 0:
        return
    e = pool.entries[0].after if front else pool.entries[0].before
    if pool.blocks[e].block == RUN and e > 0:
        pool.blocks[e].count += count
    else:
        link_last(pool.entries, e if front else 0, new_entry(pool, RUN, count))


@njit(**INLINED)
def take_blocks(state: ServerState, pool: Pool, count: int) -> None:
    """Take `count` blocks from the front of the free queue (`get_new_blocks`)."""
    server, back = state.server, 0
    server.used += count
    if server.windowed > 0.0:
        # Layers with a window take as many blocks as others, and soon give back what the mean request does not hold.
        before = server.passed
        server.passed += count / server.share_held
        back = max(0, min(int(server.passed) - int(before) - count, server.kv_blocks - server.used))
        count += back
    while count > 0:
        e = pool.entries[0].after
        entry = pool.blocks[e]
        taken = min(count, entry.count)
        count -= taken
        if entry.block >= 0:
            take_hash(pool, e)
        elif entry.count == taken and entry.block < RUN:
            # The preempted request whose run this was finds none of its blocks any more.
            pool.run[RUN - 1 - entry.block] = 0
        if entry.count == taken:
            drop_entry(pool, e)
        else:
            entry.count -= taken
    free_run(pool, back, False)


@njit(inline="always", **ENGINE_FLAGS)
def free_blocks(state: ServerState) -> int:
    """Number of blocks that no request holds."""
    free: int = state.server.kv_blocks - state.server.used
    return free
