"""The KV cache as vLLM keeps it with prefix caching: blocks with reference counts, and their hashes.

Mirrors vllm/v1/core/block_pool.py (`BlockPool`) and single_type_kv_cache_manager.py (`FullAttentionManager`). A block
that no request holds is in the free queue, from which blocks are taken at the front. It keeps its hash until then, and
a request that begins with its content takes it out again. Equal blocks are not merged: of several with one hash the
one that was hashed first is found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.arrays import IntArray
from packer.blocks import Blocks
from packer.twin.engine.state import BLOCK_SIZE, GENERATED, KV_BLOCKS, OWNER, PROMPT, USED, ServerState
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED

Records = Any
"""An array of records; NumPy's types do not know the names of their fields."""
Int32Array = npt.NDArray[np.int32]

POOL = np.dtype(
    [
        ("caching", "i8"),  # 0: blocks are counted alone, and nothing else of the pool is used
        ("unhashed_first", "i8"),  # see `packer.twin.engine_rules`
        ("tokens", "i8"),  # of a block of `ids`
        ("free_seat", "i8"),  # first seat that no request has, 0: none
    ],
    align=True,
)
BLOCK = np.dtype(
    [
        ("refs", "i4"),  # requests that hold it
        ("before", "i4"),  # in the free queue, a ring around block 0
        ("after", "i4"),
        ("older", "i4"),  # among blocks of one hash, a ring; that before the first one is the last one
        ("newer", "i4"),
        ("hashed", "i4"),  # 1: it can be found
        ("owner", "i4"),  # its hash: adapter, place in the request, id of the content
        ("place", "i4"),
        ("id", "i8"),
    ],
    align=True,
)
SEAT = np.dtype(
    [
        ("request", "i8"),
        ("held", "i4"),  # blocks of the request
        ("cached", "i4"),  # how many of these are hashed (`num_cached_block`)
        (
            "before",
            "i4",
        ),  # decodes that take their next block in the same step, a ring around that step's phase
        ("after", "i4"),  # of a free seat: the next one, 0: none
    ],
    align=True,
)


class Pool(NamedTuple):
    """Blocks of a server, for n requests.

    all (1,) of `POOL`; blocks (KV blocks + 1,) of `BLOCK`; table (2^k,): by hash the block that was hashed first, 0:
    none; seats (block size + seats,) of `SEAT`: first a ring for each phase, then a seat for each running request;
    held (seats, blocks of the longest request): numbers of its blocks; seat (n,): of each request; starts (n + 1,),
    ids: content (`packer.blocks.Blocks`); found (n,): tokens of a request that were in the cache at its first
    admission, -1 before; after (n,): the next request whose prefill ends in the same step + 1.
    """

    all: Records
    blocks: Records
    table: Int32Array
    seats: Records
    held: Int32Array
    seat: Int32Array
    starts: IntArray
    ids: IntArray
    found: Int32Array
    after: Int32Array


def new_pool(
    n: int, kv_blocks: int, block_size: int, max_seqs: int, longest: int, content: Blocks | None
) -> Pool:
    """An empty pool for n requests of at most `longest` tokens, `max_seqs` of them at once."""
    whole = np.zeros(1, dtype=POOL)
    whole["caching"] = 1
    blocks = np.zeros(kv_blocks + 1, dtype=BLOCK)
    around = np.arange(kv_blocks + 1)
    blocks["before"], blocks["after"] = np.roll(around, 1), np.roll(around, -1)
    table = np.zeros(1 << max(4, (2 * kv_blocks).bit_length()), dtype=np.int32)
    count = max(1, min(max_seqs, n))
    seats = np.zeros(block_size + count, dtype=SEAT)
    seats["before"] = seats["after"] = np.arange(len(seats))
    seats["after"][block_size:-1] += 1
    seats["after"][-1] = 0
    whole["free_seat"] = block_size
    whole["tokens"] = block_size if content is None else content.tokens
    nothing = np.zeros(n + 1, dtype=np.int64)
    return Pool(
        whole, blocks, table, seats, np.empty((count, -(-longest // block_size)), dtype=np.int32),
        np.zeros(n, dtype=np.int32), nothing if content is None else content.starts,
        np.zeros(0, dtype=np.int64) if content is None else content.ids,
        np.full(n, -1, dtype=np.int32), np.zeros(n, dtype=np.int32),
    )  # fmt: skip


def no_pool(n: int) -> Pool:
    """The pool of a server without prefix caching, for n requests: nothing."""
    pool = new_pool(0, 0, 1, 1, 1, None)
    pool.all["caching"] = 0
    return pool._replace(after=np.zeros(n, dtype=np.int32))


@njit(**INLINED)
def id_of(pool: Pool, r: int, place: int, block_size: int) -> int:
    """What the hash of a request's block is made of besides its adapter and place; below 0: of this request alone."""
    k = pool.starts[r] + ((place + 1) * block_size - 1) // pool.all[0].tokens
    return int(pool.ids[k]) if k < pool.starts[r + 1] else -1 - r


@njit(**INLINED)
def mixed(owner: int, place: int, content: int) -> int:
    """A number that spreads hashes over the table."""
    total = content * 0x9E3779B97F4A7C1 + owner * 0x2545F4914F6CDD1D + place * 0x27D4EB2F165667C5
    return (total >> 29) ^ total


@njit(**INLINED)
def slot_of(pool: Pool, owner: int, place: int, content: int) -> int:
    """Place in the table of a hash; there is 0 if no block has it."""
    mask = pool.table.size - 1
    k = mixed(owner, place, content) & mask
    while True:
        b = pool.table[k]
        if b == 0:
            return int(k)
        block = pool.blocks[b]
        if block.id == content and block.owner == owner and block.place == place:
            return int(k)
        k = (k + 1) & mask


@njit(**INLINED)
def home_of(pool: Pool, b: int) -> int:
    """Place in the table where the search for a block's hash begins."""
    block = pool.blocks[b]
    return int(mixed(block.owner, block.place, block.id) & (pool.table.size - 1))


@njit(**CALLED)
def give_hash(pool: Pool, b: int, owner: int, place: int, content: int) -> None:
    """Block `b` is full: it can be found, behind others with its hash (`BlockHashToBlockMap.insert`)."""
    k = slot_of(pool, owner, place, content)
    block, first = pool.blocks[b], pool.table[k]
    block.id, block.owner, block.place, block.hashed = content, owner, place, 1
    if first == 0:
        pool.table[k] = b
        block.older = block.newer = b
    else:
        last = pool.blocks[first].older
        block.older, block.newer = last, first
        pool.blocks[last].newer = b
        pool.blocks[first].older = b


@njit(**CALLED)
def take_hash(pool: Pool, b: int) -> None:
    """Block `b` is not found any more (`BlockPool._maybe_evict_cached_block`)."""
    block = pool.blocks[b]
    block.hashed = 0
    k = slot_of(pool, block.owner, block.place, block.id)
    if block.newer != b:
        pool.blocks[block.older].newer = block.newer
        pool.blocks[block.newer].older = block.older
        if pool.table[k] == b:
            pool.table[k] = block.newer
        return
    mask = pool.table.size - 1
    hole = k
    while True:  # move those behind that would not be found beyond an empty place
        pool.table[hole] = 0
        k = (k + 1) & mask
        while pool.table[k] != 0 and ((k - home_of(pool, pool.table[k])) & mask) < ((k - hole) & mask):
            k = (k + 1) & mask
        if pool.table[k] == 0:
            return
        pool.table[hole] = pool.table[k]
        hole = k


@njit(**INLINED)
def out_of_queue(pool: Pool, b: int) -> None:
    """Block `b` leaves the free queue."""
    block = pool.blocks[b]
    pool.blocks[block.before].after = block.after
    pool.blocks[block.after].before = block.before


@njit(**INLINED)
def into_queue(pool: Pool, b: int, before: int) -> None:
    """Block `b` joins the free queue behind another one."""
    block, after = pool.blocks[b], pool.blocks[before].after
    block.before, block.after = before, after
    pool.blocks[before].after = b
    pool.blocks[after].before = b


@njit(**INLINED)
def hold_new(state: ServerState, pool: Pool, s: int, count: int) -> None:
    """The request in seat `s` gets so many blocks from the front of the free queue (`get_new_blocks`)."""
    seat = pool.seats[s]
    row = pool.held[s - state.ints[BLOCK_SIZE]]
    for _ in range(count):
        b = pool.blocks[0].after
        out_of_queue(pool, b)
        if pool.blocks[b].hashed == 1:
            take_hash(pool, b)
        pool.blocks[b].refs = 1
        row[seat.held] = b
        seat.held += 1
    state.ints[USED] += count


@njit(**INLINED)
def hash_full(state: ServerState, pool: Pool, s: int, full: int) -> None:
    """The first `full` blocks of the request in seat `s` can be found (`cache_full_blocks`)."""
    seat = pool.seats[s]
    if seat.cached >= full:
        return
    r = seat.request
    size, owner = state.ints[BLOCK_SIZE], state.requests[r, OWNER]
    for place in range(seat.cached, full):
        give_hash(pool, pool.held[s - size, place], owner, place, id_of(pool, r, place, size))
    seat.cached = full


@njit(**CALLED)
def find(state: ServerState, pool: Pool, r: int) -> tuple[int, int]:
    """Blocks with which request `r` begins that are in the cache, and how many of these are in the free queue.

    The numbers are left in the row of the first free seat. The last token is computed in any case, to sample from
    (`KVCacheManager.get_computed_blocks`).
    """
    size, owner = state.ints[BLOCK_SIZE], state.requests[r, OWNER]
    row = pool.held[pool.all[0].free_seat - size]
    idle = 0
    most = (state.requests[r, PROMPT] + state.requests[r, GENERATED] - 1) // size
    for place in range(most):
        b = pool.table[slot_of(pool, owner, place, id_of(pool, r, place, size))]
        if b == 0:
            return place, idle
        row[place] = b
        idle += pool.blocks[b].refs == 0
    return most, idle


@njit(**CALLED)
def sit_down(state: ServerState, pool: Pool, r: int, hits: int) -> int:
    """Request `r` gets the first free seat, and holds the blocks that `find` left there; the seat."""
    ints = state.ints
    s = pool.all[0].free_seat
    seat = pool.seats[s]
    pool.all[0].free_seat = seat.after
    seat.request, seat.held, seat.cached = r, hits, hits
    pool.seat[r] = s
    row = pool.held[s - ints[BLOCK_SIZE]]
    for place in range(hits):
        block = pool.blocks[row[place]]
        if block.refs == 0:
            out_of_queue(pool, row[place])
            ints[USED] += 1
        block.refs += 1
    return int(s)


@njit(**CALLED)
def stand_up(state: ServerState, pool: Pool, r: int) -> None:
    """Request `r` gives up its seat and its blocks, the last one first (`free_blocks`)."""
    whole, s = pool.all[0], pool.seat[r]
    seat = pool.seats[s]
    row = pool.held[s - state.ints[BLOCK_SIZE]]
    front = 0
    for place in range(seat.held - 1, -1, -1):
        b = row[place]
        block = pool.blocks[b]
        block.refs -= 1
        if block.refs > 0:
            continue
        state.ints[USED] -= 1
        if block.hashed == 0 and whole.unhashed_first == 1:
            into_queue(pool, b, front)
            front = b
        else:
            into_queue(pool, b, pool.blocks[0].before)
    seat.after = whole.free_seat
    whole.free_seat = s


@njit(**INLINED)
def enter_phase(pool: Pool, s: int, phase: int) -> None:
    """The request in seat `s` takes its next block in this phase, after those that do already."""
    last = pool.seats[phase].before
    pool.seats[s].before, pool.seats[s].after = last, phase
    pool.seats[last].after = s
    pool.seats[phase].before = s


@njit(**INLINED)
def leave_phase(pool: Pool, s: int) -> None:
    """The request in seat `s` takes no further block."""
    seat = pool.seats[s]
    pool.seats[seat.before].after = seat.after
    pool.seats[seat.after].before = seat.before


@njit(inline="always", **ENGINE_FLAGS)
def free_blocks(state: ServerState) -> int:
    """Blocks that no request holds."""
    free: int = state.ints[KV_BLOCKS] - state.ints[USED]
    return free
