"""Which blocks of a server's requests are shared: no other request ever looks for a block that is not shared."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.arrays import IntArray
from packer.blocks import COMPACT, Blocks
from packer.twin.flags import ENGINE_FLAGS

Int32Array = npt.NDArray[np.int32]


class Content(NamedTuple):
    """Content that several requests begin with, as ids of `tokens` tokens; vLLM shares it within one adapter only.

    first, shared (n,): request `r` begins with the contents `numbers[first[r]:first[r] + shared[r]]`; no other request
    has the content that follows. `total`: number of distinct contents.
    """

    first: IntArray
    shared: IntArray
    numbers: Int32Array
    total: int
    tokens: int

    @classmethod
    def none(cls, n: int) -> Content:
        """The content of n requests of which no two begin alike."""
        nothing = np.zeros(n, dtype=np.int64)
        return cls(nothing, nothing, np.zeros(0, dtype=np.int32), 0, 1)


def content_of_prefixes(adapter: IntArray, ids: IntArray, tokens: int) -> Content:
    """Content of requests that share their first `ids` (n,) ids with the other requests of their adapter (n,)."""
    longest = int(ids.max(initial=0))
    count = (int(adapter.max(initial=-1)) + 1) * longest
    return Content(adapter * longest, ids, np.arange(count, dtype=np.int32), count, tokens)


def blocks_of_sessions(
    sessions: IntArray, adapter: IntArray, prompt: IntArray, output: IntArray, tokens: int,
    cached: IntArray | None = None,
) -> Blocks | None:  # fmt: skip
    """Blocks of requests in order of time, int64 (n,) each, by their sessions; None if no request continues a session.
    A request continues its session if its prompt is at least as long as prompt and output of the turn before: it then
    begins with them. Otherwise its content is new, but for its first `cached` tokens, which belong to its adapter."""
    n, whole = len(sessions), prompt + output
    order = np.lexsort((np.arange(n), sessions, adapter))
    earlier, later = order[:-1], order[1:]
    anew = np.ones(n, dtype=bool)
    anew[1:] = (sessions[later] != sessions[earlier]) | (adapter[later] != adapter[earlier])
    anew[1:] |= prompt[later] < whole[earlier]
    if anew.all() and cached is None:
        return None
    counts, first = whole // tokens, np.empty(n, dtype=np.int64)
    # Turns of a session begin alike: they share one range of ids, as long as the longest turn.
    longest = np.maximum.reduceat(counts[order], np.flatnonzero(anew))
    first[order] = (np.cumsum(longest) - longest)[np.cumsum(anew) - 1]
    shared = np.zeros(n, dtype=np.int64)
    if cached is not None:
        begin = order[np.flatnonzero(anew)]
        shared[order] = (np.minimum(cached, prompt - 1)[begin] // tokens)[np.cumsum(anew) - 1]
    return chained(adapter, shared, counts, first, tokens)


def chained(owner: IntArray, shared: IntArray, counts: IntArray, first: IntArray, tokens: int) -> Blocks:
    """Blocks of requests, `counts` of each: the first `shared` belong to its owner, the rest to its session. `first`
    int64 (n,): number of the first block of the request's session; no two sessions have a number in common."""
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    longest = int(shared.max(initial=0))
    # The smaller numbers are those of the owners' prefixes, `longest` for each owner.
    before = (int(owner.max(initial=0)) + 1) * longest
    place = np.arange(starts[-1])
    ids = np.repeat(before + first - starts[:-1], counts) + place
    if longest:
        place -= np.repeat(starts[:-1], counts)
        in_prefix = place < np.repeat(shared, counts)
        ids[in_prefix] = (np.repeat(owner * longest, counts) + place)[in_prefix]
    return Blocks.unchecked(starts, ids, tokens)


def content_of_blocks(adapter: IntArray, blocks: Blocks) -> Content:
    """Content of requests of these adapters (n,) with the ids of `blocks`."""
    ids, n = blocks.ids, len(adapter)
    # `known` has a column for each id up to the largest: number sparse ids anew.
    if len(ids) and int(ids.max()) >= COMPACT * len(ids):
        ids = np.unique(ids, return_inverse=True)[1].ravel()
    known = np.zeros((2, int(ids.max(initial=-1)) + 1), dtype=np.int32)
    first, shared = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    numbers = np.empty(len(ids), dtype=np.int32)
    order = np.argsort(adapter, kind="stable")
    count = number_shared(order, adapter, blocks.starts, ids, known, (first, shared, numbers))
    return Content(first, shared, numbers, int(count), blocks.tokens)


@njit(**ENGINE_FLAGS)
def number_shared(
    order: IntArray, adapter: IntArray, starts: IntArray, ids: IntArray, known: Int32Array,
    out: tuple[IntArray, IntArray, Int32Array],
) -> int:  # fmt: skip
    """Fill `Content`'s first, shared and numbers; returns `total`.

    `order`: requests sorted by adapter. `known` (2, ids): for each id, the adapter + 1 that it was seen with last, and
    the number of that adapter's requests that have it. -1 - the number of the content replaces the latter.
    """
    first, shared, numbers = out
    count = end = begin = 0
    while begin < order.size:
        a, last = adapter[order[begin]], begin
        while last < order.size and adapter[order[last]] == a:
            r = order[last]
            for i in range(starts[r], starts[r + 1]):
                if known[0, ids[i]] != a + 1:
                    known[0, ids[i]], known[1, ids[i]] = a + 1, 0
                known[1, ids[i]] += 1
            last += 1
        for j in range(begin, last):
            r = order[j]
            first[r] = end
            for i in range(starts[r], starts[r + 1]):
                # No other request has this content, so none can have what follows it: hashes are chained.
                if known[1, ids[i]] == 1:
                    break
                if known[1, ids[i]] > 1:
                    known[1, ids[i]] = -1 - count
                    count += 1
                numbers[end] = -1 - known[1, ids[i]]
                end += 1
            shared[r] = end - first[r]
        begin = last
    return count
