"""A gateway's index of prompt prefixes: the blocks of prompts, by the servers that they were sent to.

Prompts are cut into blocks, each hashed with all blocks before it and with the adapter's name. Only blocks that several
requests share (`engine.content`) are kept one by one; other blocks never match, and only count towards the size of the
index. A server's own cache may have evicted a block that the index still has, and vice versa.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.cluster.state import Servers
from packer.twin.engine.content import Content
from packer.twin.flags import ENGINE_FLAGS, INLINED

Int32Array = npt.NDArray[np.int32]
WORD = 64
_SPREAD = 0x9E3779B97F4A7C1  # an odd multiplier: spreads consecutive keys over the hash table


class Index(NamedTuple):
    """The blocks of n requests on S servers, in LRU lists: one list for each server, or one for all.

    first, shared (n,), numbers: see `Content`. tokens: tokens of a content id. size: tokens of a block. most: most
    blocks of a prompt that are looked up. held (blocks, words): bits of the servers that have a block. key, last
    (2^k,): hash table with open addressing, (list, block) → the last request that used it + 1, 0: none. after (n,):
    next request of a list + 1. head, tail, at (lists,): first request of a list + 1, last request + 1, blocks of the
    first request already passed. filled, limit (lists,): blocks in a list, and at most. keep_s: how long an unused
    block stays. match (S,): leading blocks of the current request that each server has; total (1,): blocks of the
    current request.
    """

    first: IntArray
    shared: IntArray
    numbers: Int32Array
    tokens: int
    size: int
    most: int
    held: IntArray
    key: IntArray
    last: Int32Array
    after: Int32Array
    head: IntArray
    tail: IntArray
    at: IntArray
    filled: IntArray
    limit: IntArray
    keep_s: float
    match: FloatArray
    total: FloatArray


def new_index(
    servers: Servers, content: Content, size: int, most: int, limit: IntArray, keep_s: float = math.inf
) -> Index:
    """Return an empty index; `limit`, in blocks: (1,) for all servers together, or (S,) for each."""
    n, count = len(servers.prompt), len(servers.wake_s)
    blocks = content.total * -(-content.tokens // size)
    prompts = np.minimum(np.minimum(servers.prompt, content.shared * content.tokens) // size, most)
    pairs = min(int(prompts.sum()), blocks * len(limit))
    places = 1 << max(4, (2 * pairs).bit_length())
    head, tail, at, filled = (np.zeros(len(limit), dtype=np.int64) for _ in range(4))
    return Index(
        content.first, content.shared, content.numbers, content.tokens, size, most,
        np.zeros((blocks, -(-count // WORD)), dtype=np.int64), np.zeros(places, dtype=np.int64),
        np.zeros(places, dtype=np.int32), np.zeros(n, dtype=np.int32), head, tail, at, filled, limit, keep_s,
        np.zeros(count), np.zeros(1),
    )  # fmt: skip


@njit(**ENGINE_FLAGS)
def _blocks(i: Index, c: Servers, r: int) -> tuple[int, int]:
    """Return the number of whole blocks of the prompt that are looked up, and of those that others may share."""
    total = min(c.prompt[r] // i.size, i.most)
    return total, min(total, i.shared[r] * i.tokens // i.size)


@njit(**INLINED)
def _block(i: Index, r: int, place: int) -> int:
    """Return the number of block `place` of a prompt: by the content id in which it ends and its position in the id."""
    if i.tokens == i.size:
        return int(i.numbers[i.first[r] + place])
    k = ((place + 1) * i.size - 1) // i.tokens
    per_id = (i.tokens + i.size - 1) // i.size
    return int(np.int64(i.numbers[i.first[r] + k]) * per_id + place - k * i.tokens // i.size)


@njit(**INLINED)
def _slot(i: Index, which: int, block: int) -> int:
    """Return the position of (list, block) in the hash table; the key is inserted if it is missing."""
    key = block * i.head.size + which + 1
    mask = i.key.size - 1
    k = ((key * _SPREAD) >> 20) & mask
    while i.key[k] != 0 and i.key[k] != key:
        k = (k + 1) & mask
    i.key[k] = key
    return k


@njit(**ENGINE_FLAGS)
def _add(match: FloatArray, bits: int, first: int, value: float) -> None:
    """Add a value to `match` for each server whose bit is set; `first`: the server of the lowest bit."""
    for k in range(WORD if bits != 0 else 0):
        if (bits >> k) & 1:
            match[first + k] += value


@njit(**INLINED)
def _drop_first(i: Index, c: Servers, which: int) -> None:
    """Drop the least recently used block of a list; if its first request has none left, drop the request instead."""
    g = i.head[which] - 1
    total, shared = _blocks(i, c, g)
    while i.at[which] < total:
        place = i.at[which]
        i.at[which] += 1
        if place >= shared:
            i.filled[which] -= 1
            return
        block = _block(i, g, place)
        k = _slot(i, which, block)
        # A block that a later request has used stays, in that request's place of the list.
        if i.last[k] == g + 1:
            i.last[k] = 0
            i.filled[which] -= 1
            if i.head.size == 1:
                i.held[block, :] = 0
            else:
                i.held[block, which // WORD] &= ~(1 << (which % WORD))
            return
    i.head[which] = i.after[g]
    i.at[which] = 0


@njit(**INLINED)
def _expire(i: Index, c: Servers, now_s: float) -> None:
    """Drop the blocks that were not used for `keep_s`."""
    for which in range(i.head.size):
        while i.head[which] > 0 and c.sent_s[i.head[which] - 1] + i.keep_s < now_s:
            _drop_first(i, c, which)


@njit(**ENGINE_FLAGS)
def look_up(i: Index, c: Servers, r: int, chained: bool) -> None:
    """Count the leading blocks of a request that each server has, up to a block that none has; see `match` and `total`.

    `chained`: count a server's blocks only up to the first block that it lacks.
    """
    if i.keep_s < math.inf:
        _expire(i, c, c.sent_s[r])
    total, shared = _blocks(i, c, r)
    i.total[0] = total
    i.match[:] = 0.0
    if i.numbers.size == 0 or shared == 0:
        return
    # Where a server's run of blocks begins, its place is subtracted, where it ends, it is added.
    words, reached = i.held.shape[1], shared
    # The pass beyond the last block ends all runs.
    for place in range(shared + 1):
        block = _block(i, r, place) if place < shared else -1
        before = _block(i, r, place - 1) if place > 0 else -1
        some = False
        for w in range(words):
            was = i.held[before, w] if place > 0 else 0
            now = i.held[block, w] if place < shared else 0
            some |= now != 0
            if was != now:
                _add(i.match, was & ~now, w * WORD, float(place))
                _add(i.match, now & ~was, w * WORD, -float(place))
        if not some:
            reached = place
            break
    if chained:
        _cut(i, r, reached)


@njit(**ENGINE_FLAGS)
def _cut(i: Index, r: int, reached: int) -> None:
    """Drop from each server's count the blocks behind the first block that the server lacks."""
    for s in range(i.match.size):
        if i.match[s] > 0.0:
            length = 0
            while length < reached and (i.held[_block(i, r, length), s // WORD] >> (s % WORD)) & 1:
                length += 1
            i.match[s] = length


@njit(**ENGINE_FLAGS)
def use(i: Index, c: Servers, s: int, r: int) -> None:
    """Mark the blocks of request `r` as the last ones used on server `s`, and drop blocks beyond the list's limit."""
    if i.numbers.size == 0:
        return
    which = s if i.head.size > 1 else 0
    total, shared = _blocks(i, c, r)
    i.after[r] = 0
    if i.head[which] == 0:
        i.head[which], i.at[which] = r + 1, 0
    else:
        i.after[i.tail[which] - 1] = r + 1
    i.tail[which] = r + 1
    for place in range(total):
        if place < shared:
            block = _block(i, r, place)
            k = _slot(i, which, block)
            i.filled[which] += i.last[k] == 0
            i.last[k] = r + 1
            i.held[block, s // WORD] |= 1 << (s % WORD)
        else:
            i.filled[which] += 1
        # Blocks of this request stay, even if they alone are more than the list may hold.
        while i.filled[which] > i.limit[which] and i.head[which] != r + 1:
            _drop_first(i, c, which)
