"""Measure what requests of a trace share: sessions, and a prefix of each adapter's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from packer import checks
from packer.arrays import BoolArray, FloatArray, IntArray, distinct
from packer.blocks import Blocks
from packer.lengths import MAX_TOKENS, Lengths, normal_grid
from packer.search import fewest
from packer.sessions import FIRST_TOKEN_S, MAX_THINK_S, MAX_TURNS, PER_TOKEN_S, Sessions
from packer.traces.trace import Trace
from packer.workload import Workload

BLOCK_TOKENS = 16  # Tokens of a block of vLLM's KV cache; prefixes are whole multiples of it.
MOST_WAYS = 3  # A block with more different successors is of a system prompt or document, not of one conversation.
FEWEST_TURNS = 1.05  # Requests per session below which a trace or adapter counts as one without sessions.
OWN_FROM = 100  # Sessions from which an adapter's own turns and think time are measured, instead of the fleet's.


def common_groups(blocks: Blocks) -> IntArray:
    """Group number of each request, int64 (n,): a group shares the block after the prefix that most requests share. A
    request without a block after this prefix is a group of its own."""
    counts, n = blocks.counts, len(blocks)
    place = blocks.starts[:-1].copy()
    inside = counts > 0  # requests with a further block that have the common prefix so far
    while True:
        found, number = np.unique(blocks.ids[place[inside]], return_counts=True)
        if not len(found) or 2 * int(number.max()) <= n:
            break
        following = inside.copy()
        following[inside] = blocks.ids[place[inside]] == found[number.argmax()]
        place[following] += 1
        inside = following & (place < blocks.starts[1:])
    left = place < blocks.starts[1:]
    group = -1 - np.arange(n)
    group[left] = blocks.ids[place[left]]
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def conversations(trace: Trace) -> tuple[IntArray, IntArray]:
    """Session of each request, by its blocks, and number of its first tokens that its adapter had in earlier requests.
    A request continues the latest earlier request whose whole prompt is a prefix of its own. Both int64 (n,)."""
    blocks = trace.blocks
    assert blocks is not None
    n, size = len(trace), blocks.tokens
    of = np.repeat(np.arange(n), blocks.counts)
    place = np.arange(len(blocks.ids)) - blocks.starts[:-1][of]
    owner = np.zeros(n, dtype=np.int64) if trace.adapter is None else trace.adapter
    order = np.lexsort((of, blocks.ids, owner[of]))
    later, earlier = order[1:], order[:-1]
    same = (blocks.ids[later] == blocks.ids[earlier]) & (owner[of[later]] == owner[of[earlier]])
    before = np.full(len(order), -1)  # the latest earlier request with the same block
    before[later] = np.where(same, of[earlier], -1)
    # Ids stand for all content up to them, so the blocks found are the first ones of a request.
    hits = np.bincount(of[before >= 0], minlength=n)
    full = trace.input_tokens // size
    popular = _popular(blocks, of, place)
    last = blocks.starts[:-1] + np.maximum(hits, 1) - 1
    session = np.arange(n)
    for r in np.flatnonzero(hits > 0).tolist():
        parent, at = int(before[last[r]]), last[r]
        if not popular[at] and place[at] >= full[parent] - 1:
            session[r] = session[parent]
    return session, np.minimum(hits * size, trace.input_tokens - 1)


def _popular(blocks: Blocks, of: IntArray, place: IntArray) -> BoolArray:
    """Which blocks are shared by several sessions: a later block on their path has more than `MOST_WAYS` successors.
    `of`, `place`: int64 (ids,), the request of each block, and the position of the block in the request."""
    _, kind = np.unique(blocks.ids, return_inverse=True)
    final = np.ones(len(kind), dtype=bool)
    final[:-1] = of[1:] != of[:-1]
    # The end of a request counts as a unique successor.
    following = np.where(final, -1 - of, np.append(kind[1:], 0))
    # Pairs (kind, successor) are encoded as one number, because sorting pairs is many times slower.
    ends = len(blocks) + len(kind)
    ways = np.bincount(distinct(kind * ends + following + len(blocks)) // ends, minlength=len(kind))
    branching = np.where(ways[kind] > MOST_WAYS, place, -1)
    deepest = np.full(len(blocks), -1)
    np.maximum.at(deepest, of, branching)
    reach = np.full(len(kind), -1)
    np.maximum.at(reach, kind, deepest[of])
    return reach[kind] >= place


@dataclass(frozen=True, slots=True)
class Shared:
    """What the requests of an adapter share. `input_tokens`: lengths of first prompts."""

    input_tokens: Lengths
    prefix_tokens: int
    sessions: Sessions | None


def measured_prefixes(trace: Trace, inputs: Sequence[Lengths]) -> tuple[list[Shared], Trace] | None:
    """What requests of each adapter share, from a trace's sessions, blocks and cached tokens, and the first request of
    each session, whose time is the arrival of a user; None if it has none. `inputs`: lengths of all prompts of each
    adapter. The mean prompt length of the trace is preserved."""
    cached, session = trace.cached_tokens, trace.sessions
    if trace.blocks is not None:
        found, hits = conversations(trace)
        session = found if session is None else session
        cached = hits if cached is None else cached
    if session is None and cached is None:
        return None
    session = np.arange(len(trace)) if session is None else session
    turns = _turns(trace, session)
    whole = turns.of(np.arange(len(trace)))
    order = np.argsort(trace.owner, kind="stable")
    rows = np.split(order, np.searchsorted(trace.owner[order], np.arange(1, len(inputs))))
    spread = _spread(trace, rows, turns.first)
    shared = []
    for mine, lengths in zip(rows, inputs, strict=True):
        first, sessions = mine[turns.first[mine]], None
        known = turns.of(mine) if len(first) >= OWN_FROM else whole
        if known is not None and len(mine) > len(first):
            prompt = float(trace.input_tokens[first].mean())
            lengths = Lengths.gamma(lengths.mean, spread) if spread > 0 else Lengths.constant(lengths.mean)
            lengths, sessions = _grown(lengths, prompt, float(trace.output_tokens[mine].mean()), known)
        chosen = first if sessions is not None else mine
        wanted = 0.0 if cached is None else float(cached[chosen].mean()) / BLOCK_TOKENS
        prefix = BLOCK_TOKENS * _nearest(_own_blocks(lengths), wanted) if wanted else 0
        shared.append(Shared(lengths, prefix, sessions))
    return shared, trace.take(np.flatnonzero(turns.first))


def _spread(trace: Trace, rows: Sequence[IntArray], first: BoolArray) -> float:
    """Coefficient of variation of the lengths of first prompts within adapters."""
    own = [trace.input_tokens[mine[first[mine]]] for mine in rows]
    parts = np.concatenate([each / each.mean() - 1.0 for each in own])
    return round(min(float(np.sqrt((parts**2).sum() / max(1, len(parts) - len(own)))), 100.0), 4)


@dataclass(frozen=True, eq=False)
class _Turns:
    """Turns of sessions. `first`: whether a request is a first turn (n,); `thought_s`: think time before it (n,)."""

    first: BoolArray
    thought_s: FloatArray

    def of(self, rows: IntArray) -> Sessions | None:
        """Sessions of some requests; None if there are hardly any later turns."""
        first = self.first[rows]
        turns = len(rows) / max(1, int(first.sum()))
        if turns < FEWEST_TURNS:
            return None
        thought_s = float(np.clip(self.thought_s[rows][~first].mean(), 0.0, MAX_THINK_S))
        return Sessions(min(round(turns, 4), MAX_TURNS), round(thought_s, 3))


def _turns(trace: Trace, session: IntArray) -> _Turns:
    """Turns by session; a request whose prompt is not longer than the previous one starts a new session."""
    owner = np.zeros(len(trace), dtype=np.int64) if trace.adapter is None else trace.adapter
    n = len(trace)
    order = np.lexsort((np.arange(n), session, owner))
    earlier, later = order[:-1], order[1:]
    goes_on = (session[later] == session[earlier]) & (owner[later] == owner[earlier])
    goes_on &= trace.input_tokens[later] > trace.input_tokens[earlier]
    first, thought_s = np.ones(n, dtype=bool), np.zeros(n)
    first[later[goes_on]] = False
    expected_s = FIRST_TOKEN_S + PER_TOKEN_S * trace.output_tokens[earlier]
    thought_s[later] = np.maximum(trace.time_s[later] - trace.time_s[earlier] - expected_s, 0.0)
    return _Turns(first, thought_s)


def _grown(lengths: Lengths, first: float, output: float, known: Sessions) -> tuple[Lengths, Sessions]:
    """Lengths of first prompts, and sessions, that give a mean prompt over all turns equal to that of `lengths`."""
    later = known.turns - 1.0
    added = (lengths.mean - first) / later - output
    if added < 1.0:  # histories omit part of the answers, as with reasoning models
        added, first = 1.0, max(1.0, lengths.mean - later * (output + 1.0))
        later = min(later, (lengths.mean - first) / (output + 1.0))
    sessions = replace(known, turns=max(1.0, 1.0 + later), turn_tokens=float(f"{min(added, MAX_TOKENS):.6g}"))
    return lengths.scaled(first), sessions


def _own_blocks(lengths: Lengths) -> tuple[IntArray, FloatArray]:
    """Number of full blocks before the last token of a prompt, int64 (n,), and its distribution, float64 (n,)."""
    z, weight = normal_grid(801)
    return (lengths.at_normal(z) - 1) // BLOCK_TOKENS, weight


def _hit(own: tuple[IntArray, FloatArray], shared: int) -> float:
    """E[min(shared, own blocks)]."""
    return float(np.minimum(own[0], shared) @ own[1])


def _nearest(own: tuple[IntArray, FloatArray], wanted: float) -> int:
    """Number of shared blocks whose hits (`_hit`, which grows with it) are nearest to `wanted`."""
    most = int(own[0].max())
    low = fewest(lambda shared: shared == most or _hit(own, shared) >= wanted, 0, most) or 0
    return low - 1 if low and wanted - _hit(own, low - 1) <= _hit(own, low) - wanted else low


def with_hit_rate(workload: Workload, hit_rate: float) -> Workload:
    """The fleet with shared prefixes for which a KV cache that keeps them has this hit rate over all prompt tokens.

    `hit_rate`: as `prefix_cache_hits / prefix_cache_queries` in vLLM's metrics. These do not say which prompts share
    prefixes, so each adapter gets the same share, in whole blocks; rounding errors are carried to the next adapter.
    """
    checks.real("the hit rate of the prefix cache", hit_rate, low=0.0, high=1.0)
    shares: dict[int, tuple[IntArray, FloatArray]] = {}
    adapters, owed = list(workload.adapters), 0.0
    for k in np.argsort(-workload.rates, kind="stable").tolist():
        adapter = adapters[k]
        lengths = adapter.input_tokens or workload.input_tokens
        if id(lengths) not in shares:
            shares[id(lengths)] = _own_blocks(lengths)
        own = shares[id(lengths)]
        wanted = adapter.rate * hit_rate * lengths.expected + owed
        count = _nearest(own, wanted / (BLOCK_TOKENS * adapter.rate))
        owed = wanted - adapter.rate * BLOCK_TOKENS * _hit(own, count)
        adapters[k] = replace(adapter, shared_prefix_tokens=BLOCK_TOKENS * count)
    return replace(workload, adapters=tuple(adapters))
