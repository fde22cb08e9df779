"""The KV cache as vLLM keeps it with prefix caching: who holds which blocks, and which of them can be found.

Mirrors vllm/v1/core/block_pool.py (`BlockPool`) and single_type_kv_cache_manager.py (`FullAttentionManager`). A block
that no request holds is in the free queue, from which blocks are taken at the front. It keeps its hash until then, and
a request that begins with its content takes it out again. Equal blocks are not merged: of several with one hash the
one that was hashed first is found.

Only blocks whose content several requests have (`engine.content`) are kept one by one, as entries. All others are
counted: those that a request holds by its tokens, free ones as runs, entries of the queue. They are found by nobody but
their own request, after a preemption: its run says how many of them are left.

Entries that follow each other are held as a chain: a request holds the last one, which holds the one before it. An
entry is in a chain if it was the first with its content and comes after such an entry, or is the first block; thus one
content has one chain, and since blocks are freed from the last one on, its first entries are taken last. The others,
which hold a content a second time or come after one that does, are held one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import IntArray, Record, record
from packer.twin.engine.content import Content, Int32Array
from packer.twin.engine.state import ServerState
from packer.twin.flags import ENGINE_FLAGS, INLINED

POOL = record(
    ("caching", "i8"),  # 0: blocks are counted alone, and nothing else of the pool is used
    ("unhashed_first", "i8"),  # see `packer.twin.engine_rules`
    ("tokens", "i8"),  # of an id of `content`
    ("lookahead", "i8"),  # tokens after a block that its hash covers, too
    ("per_id", "i8"),  # most blocks that end in the tokens of one id
    ("factor", "i8"),  # spreads the numbers of blocks over `table`: 1 where it has a place for each
    ("shift", "i8"),
    ("free_seat", "i8"),  # first seat that no request has, 0: none
    ("free_entry", "i8"),  # first entry that nothing uses
)
ENTRY = record(
    ("refs", "i4"),  # requests and entries that hold it
    ("parent", "i4"),  # the entry that it holds, 0: none, it is the first block; LONE: it is in no chain
    ("before", "i4"),  # in the free queue, a ring around entry 0; unused: `after`, the next one
    ("after", "i4"),
)
LONE = -1
BLOCKS = record(
    ("block", "i8"),  # number of the content; RUN: nobody finds it; RUN - 1 - r: request r alone
    ("count", "i4"),  # of a run
    ("older", "i4"),  # among entries with one content, a ring; that before the first one is the last one
    ("newer", "i4"),
)
RUN = -1
SEAT = record(
    ("request", "i8"),
    ("leaf", "i4"),  # last entry of the chain that the request holds, 0: none
    ("chained", "i4"),  # entries of that chain
    ("lone", "i4"),  # entries behind it that the request holds one by one, in its row of `held`
    ("before", "i4"),  # decodes that may hash an entry with their next block, a ring around its phase
    ("after", "i4"),  # of a free seat: the next one, 0: none
)


class Pool(NamedTuple):
    """Blocks of a server, for n requests.

    all (1,) of `POOL`; entries (KV blocks + 2,) of `ENTRY`; blocks (KV blocks + 2,) of `BLOCKS`; table (2^k,):
    by content the entry that was hashed first, 0: none; seats (block size + seats,) of `SEAT`: first a ring for each
    phase, then a seat for each running request that shares content; held (seats, most shared blocks of a request):
    entries; seat (n,): of each request, 0: none; run (n,): entry of what a preempted request finds again, 0: nothing;
    first, shared (n,), numbers: see `engine.content.Content`; found (n,): tokens of a request that were in the cache at
    its first admission, -1 before; after (n,): the next request whose prefill ends in the same step + 1.
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
    after: Int32Array


def new_pool(n: int, kv_blocks: int, block_size: int, max_seqs: int, content: Content) -> Pool:
    """An empty pool for n requests, `max_seqs` of them at once."""
    whole = np.zeros(1, dtype=POOL)
    whole["caching"], whole["tokens"] = 1, content.tokens
    whole["per_id"] = -(-content.tokens // block_size)
    contents = int(content.total * whole["per_id"][0])
    table = np.zeros(1 << max(4, (2 * min(kv_blocks, contents)).bit_length()), dtype=np.int32)
    whole["factor"], whole["shift"] = (1, 0) if contents <= len(table) else (0x9E3779B97F4A7C1, 29)
    entries, blocks = np.zeros(kv_blocks + 2, dtype=ENTRY), np.zeros(kv_blocks + 2, dtype=BLOCKS)
    entries["after"][1:-1] = np.arange(2, kv_blocks + 2)
    if kv_blocks:  # all blocks are one run
        blocks["block"][1], blocks["count"][1] = RUN, kv_blocks
        entries["before"][:2] = entries["after"][:2] = 1, 0
        whole["free_entry"] = 2
    count = max(1, min(max_seqs, n))
    seats = np.zeros(block_size + count, dtype=SEAT)
    seats["before"] = seats["after"] = np.arange(len(seats))
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
    """The pool of a server without prefix caching, for n requests: nothing."""
    pool = new_pool(0, 0, 1, 1, Content.none(0))
    pool.all["caching"] = 0
    return pool._replace(seat=np.zeros(n, dtype=np.int32), after=np.zeros(n, dtype=np.int32))


# ---- contents


@njit(inline="always", **ENGINE_FLAGS)
def shared_blocks(pool: Pool, r: int, size: int) -> int:
    """Blocks with which request `r` begins that others may have, too."""
    ids: int = pool.shared[r]
    tokens, lookahead = pool.all[0].tokens, pool.all[0].lookahead
    same = ids == 0 or (tokens == size and lookahead == 0)
    return ids if same else int(ids * tokens - lookahead) // size


@njit(**INLINED)
def block_of(pool: Pool, r: int, place: int, size: int) -> int:
    """Number of the content of one of these blocks: the id in which it ends, and which of that id's blocks it is.

    What its hash covers beyond it belongs to it.
    """
    tokens, lookahead = pool.all[0].tokens, pool.all[0].lookahead
    if tokens == size and lookahead == 0:
        return int(pool.numbers[pool.first[r] + place])
    k = ((place + 1) * size - 1 + lookahead) // tokens
    before = max(k * tokens - lookahead, 0) // size
    return int(np.int64(pool.numbers[pool.first[r] + k]) * pool.all[0].per_id + place - before)


@njit(inline="always", **ENGINE_FLAGS)
def home_of(pool: Pool, block: int) -> int:
    """Place in the table where the search for a content begins."""
    home: int = ((block * pool.all[0].factor) >> pool.all[0].shift) & (pool.table.size - 1)
    return home


@njit(**INLINED)
def slot_of(pool: Pool, block: int) -> int:
    """Place in the table of a content; there is 0 if no entry has it."""
    mask = pool.table.size - 1
    k = home_of(pool, block)
    while pool.table[k] != 0 and pool.blocks[pool.table[k]].block != block:
        k = (k + 1) & mask
    return int(k)


@njit(**INLINED)
def take_hash(pool: Pool, e: int) -> None:
    """Entry `e` is not found any more (`BlockPool._maybe_evict_cached_block`)."""
    entry = pool.blocks[e]
    k = slot_of(pool, entry.block)
    if entry.newer != e:
        pool.blocks[entry.older].newer = entry.newer
        pool.blocks[entry.newer].older = entry.older
        if pool.table[k] == e:
            pool.table[k] = entry.newer
        return
    mask = pool.table.size - 1
    hole = k
    while True:  # move those behind that would not be found beyond an empty place
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
    """An entry that nothing uses so far."""
    e = pool.all[0].free_entry
    pool.all[0].free_entry = pool.entries[e].after
    pool.entries[e].refs = 0
    pool.blocks[e].block, pool.blocks[e].count = block, count
    return int(e)


@njit(**INLINED)
def out_of_queue(pool: Pool, e: int) -> None:
    """Entry `e` leaves the free queue."""
    entry = pool.entries[e]
    pool.entries[entry.before].after = entry.after
    pool.entries[entry.after].before = entry.before


@njit(**INLINED)
def into_queue(pool: Pool, e: int, before: int) -> None:
    """Entry `e` joins the free queue behind another one, or at its front, behind 0."""
    entry, after = pool.entries[e], pool.entries[before].after
    entry.before, entry.after = before, after
    pool.entries[before].after = e
    pool.entries[after].before = e


@njit(**INLINED)
def drop_entry(pool: Pool, e: int) -> None:
    """Entry `e` of the free queue has no blocks any more."""
    out_of_queue(pool, e)
    pool.entries[e].after = pool.all[0].free_entry
    pool.all[0].free_entry = e


@njit(**INLINED)
def free_run(pool: Pool, count: int, front: bool) -> None:
    """So many blocks that nobody finds join the free queue, at its front or at its end."""
    if count == 0:
        return
    e = pool.entries[0].after if front else pool.entries[0].before
    if pool.blocks[e].block == RUN and e > 0:
        pool.blocks[e].count += count
    else:
        into_queue(pool, new_entry(pool, RUN, count), 0 if front else e)


@njit(**INLINED)
def take_blocks(state: ServerState, pool: Pool, count: int) -> None:
    """So many blocks are taken from the front of the free queue (`get_new_blocks`)."""
    state.server.used += count
    while count > 0:
        e = pool.entries[0].after
        entry = pool.blocks[e]
        taken = min(count, entry.count)
        count -= taken
        if entry.block >= 0:
            take_hash(pool, e)
        elif entry.count == taken and entry.block < RUN:
            pool.run[RUN - 1 - entry.block] = 0
        if entry.count == taken:
            drop_entry(pool, e)
        else:
            entry.count -= taken


@njit(inline="always", **ENGINE_FLAGS)
def free_blocks(state: ServerState) -> int:
    """Blocks that no request holds."""
    free: int = state.server.kv_blocks - state.server.used
    return free
