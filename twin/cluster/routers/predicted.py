"""Router "predicted": the shortest latency, as the server's own step law predicts it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.cluster.residents import Residents, holders_among, may_hold, new_residents, note_residents
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.routers.step_cost import adapters_with, prefill_floor, rank_floors, ranks_of, step_ms
from packer.twin.cluster.state import Servers, on_gpu, outstanding, row_of
from packer.twin.engine.content import Content
from packer.twin.flags import INLINED

SAFE = 1.0 - 1e-9
"""Sums of the same terms in another order differ by less."""


class Known(NamedTuple):
    """numbers: of `parameters`. kept (S, up to a multiple of 8, rows): of each server, three for each rank: what a
    request takes at least if its adapter is in the batch, how much more if not, and its load; then what each further
    prompt token takes at least. least (words, rows): the smallest ones of eight servers. looked (S, 6): the state of
    each server when that was kept.
    """

    numbers: FloatArray
    looked: FloatArray
    kept: FloatArray
    least: FloatArray
    holders: Residents


@njit(**INLINED)
def _load_ms(c: Servers, s: int, a: int) -> float:
    """What it takes to load the adapter from the host."""
    loading = c.law.loading[c.kind[s]]
    return float(loading[0] + loading[1] * c.ranks[a])


@njit(**INLINED)
def _score(c: Servers, p: Known, s: int, r: int) -> float:
    """Predicted latency of the request, ms."""
    server, a = c.servers[s], c.adapter[r]
    adapters, ranks = adapters_with(c, s, a)
    decodes, tokens = float(server.decodes), float(server.waiting_prompt + c.prompt[r])
    budget = max(1.0, server.token_budget - decodes)
    steps = math.ceil(tokens / budget)
    rank, n = float(c.ranks[a]), outstanding(c, s) + 1.0
    all_ranks, queued_ranks, largest = ranks_of(c, s)
    most = max(largest, rank)
    if decodes > 0.0:
        prefill = step_ms(c, s, decodes, tokens / steps, adapters, ranks, all_ranks + rank, n * most)
    else:
        alone = (n - server.running) * most
        prefill = step_ms(c, s, 0.0, tokens / steps, adapters, ranks, queued_ranks + rank, alone)
    load = 0.0 if on_gpu(c, s, a) else _load_ms(c, s, a)
    decode = step_ms(c, s, n, 0.0, adapters, ranks, all_ranks + rank, n * most)
    return float(steps * prefill + load + (p.numbers[0] - 1.0) * decode)


@njit(**INLINED)
def _changed(c: Servers, looked: FloatArray, s: int) -> bool:
    """Whether a server has changed since it was looked at, but for the length of its contexts."""
    server, changed = c.servers[s], False
    now = (
        server.sent + server.inbox_count, outstanding(c, s), server.decodes, server.waiting_prompt,
        server.active_ranks, server.active + server.on_host_count * 2**20,
    )  # fmt: skip
    for k in range(6):
        changed |= looked[k] != now[k]
        looked[k] = now[k]
    return changed


@njit(**INLINED)
def _note(c: Servers, p: Known, s: int) -> None:
    """Keep what `Known` says of a server."""
    note_residents(c, p.holders, s)
    if not _changed(c, p.looked[s], s):
        return
    server, kept, loading = c.servers[s], p.kept[s], c.law.loading[c.kind[s]]
    decodes, waiting, n = float(server.decodes), float(server.waiting_prompt), outstanding(c, s) + 1.0
    adapters, ranks = float(server.active), float(server.active_ranks)
    steps = math.ceil((waiting + 1.0) / max(1.0, server.token_budget - decodes))
    fixed, slope = prefill_floor(c, s, decodes, adapters, ranks)
    all_ranks, _, largest = ranks_of(c, s)
    decode = step_ms(c, s, n, 0.0, adapters, ranks, all_ranks, n * largest)
    joined = min(adapters + 1.0, float(server.slots))
    joins = step_ms(c, s, n, 0.0, joined, ranks, all_ranks, n * largest) - decode
    for k in range(1, c.classes.shape[1]):
        rank = float(c.classes[s, k].rank)
        own, more = rank_floors(c, s, rank, n, largest)
        kept[3 * k - 3] = steps * fixed + slope * waiting + (p.numbers[0] - 1.0) * (decode + own)
        kept[3 * k - 2] = (p.numbers[0] - 1.0) * (joins + more)
        kept[3 * k - 1] = loading[0] + loading[1] * rank
    kept[kept.size - 1] = slope
    least, word = p.least[s >> 3], s & ~7
    for k in range(kept.size):
        least[k] = kept[k]
        for other in range(word, word + 8):
            least[k] = min(least[k], p.kept[other, k])


@njit(**INLINED)
def _floor(c: Servers, kept: FloatArray, r: int, held: bool) -> float:
    """What the request takes at least by what is kept; `held`: its adapter may be in a slot or in the batch."""
    k = 3 * c.rank_class[c.adapter[r]]
    least = kept[k - 3] + kept[kept.size - 1] * c.prompt[r]
    return float(least if held else least + kept[k - 2] + kept[k - 1])


@njit(**INLINED)
def _survey(c: Servers, p: Known, server: IntArray, first: int, last: int, r: int) -> int:
    """The server that takes least by what is kept."""
    a, best, lowest = c.adapter[r], 0, math.inf
    if last - first < c.wake_s.size:
        return -1
    for word in range(p.least.shape[0]):
        least = _floor(c, p.least[word], r, holders_among(p.holders, word, a) != 0)
        if least < lowest:
            lowest, best = least, 8 * word
    lowest = math.inf
    for s in range(best, min(best + 8, c.wake_s.size)):
        least = _floor(c, p.kept[s], r, may_hold(p.holders, s, a))
        if least < lowest:
            lowest, best = least, s
    return int(first + best)


@njit(**INLINED)
def _among(c: Servers, p: Known, word: int, r: int, lowest: float) -> int:
    """All, if their smallest terms may be below that with a load; without one those that may hold the adapter."""
    a, kept = c.adapter[r], p.least[word]
    if _floor(c, kept, r, True) * SAFE >= lowest:
        return 0
    every = c.ranks[a] == 0 or _floor(c, kept, r, False) * SAFE < lowest
    return 255 if every else int(holders_among(p.holders, word, a))


@njit(**INLINED)
def _worth(c: Servers, p: Known, s: int, r: int, lowest: float) -> bool:
    """Whether the latency may be shorter than `lowest`."""
    a, kept = c.adapter[r], p.kept[s]
    held = c.ranks[a] == 0 or may_hold(p.holders, s, a)
    least = _floor(c, kept, r, held)
    if c.ranks[a] == 0 or not held or least * SAFE >= lowest:
        return bool(least * SAFE < lowest)
    row, k = row_of(c, s, a), 3 * c.rank_class[a]
    if row == 0 or c.adapters[s, row].in_batch == 0:
        least += kept[k - 2]
    if row == 0 or c.adapters[s, row].resident == 0:
        least += kept[k - 1]
    return bool(least * SAFE < lowest)


@dataclass(frozen=True)
class Predicted(ScoringRouter):
    """Time to prefill the queue and the request in steps of the token budget, loads of its adapter, and its decode
    steps among the server's requests: the best estimate of a router without knowledge of later requests.
    """

    name = "predicted"
    score, note, worth = staticmethod(_score), staticmethod(_note), staticmethod(_worth)
    survey, among = staticmethod(_survey), staticmethod(_among)

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Known:
        """With room for what is kept, and what the servers hold."""
        words, rows = servers.touched_words.size, 3 * servers.classes.shape[1] - 2
        looked, kept = np.full((8 * words, 6), np.inf), np.full((8 * words, rows), np.inf)
        return Known(numbers, looked, kept, kept[:words].copy(), new_residents(servers))
