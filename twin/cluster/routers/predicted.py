"""Router "predicted": the server with the shortest latency that its step law predicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.cluster.residents import (
    BitArray, Residents, may_have, new_residents, note_residents, row_of_bits, servers_among,
)  # fmt: skip
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.routers.step_cost import adapters_with, prefill_floor, rank_floors, ranks_of, step_ms
from packer.twin.cluster.running import Running, new_running, note_running
from packer.twin.cluster.state import Servers, on_gpu, outstanding
from packer.twin.engine.content import Content
from packer.twin.flags import CALLED, INLINED

SAFE = 1.0 - 1e-9  # Margin for rounding: sums of the same terms in another order differ by less.


class Known(NamedTuple):
    """numbers: as in `parameters`. looked (S, 6): the state of each server when its `kept` was computed.

    kept (rows, S, up to a multiple of 8): lower bounds for each server, ms. Three rows for each rank: time of a request
    if its adapter is in the batch, if the adapter joins it, and the adapter's load. Two more rows: time of each further
    prompt token in the first and in the second case. least (rows, words): the smallest of each eight servers. floors
    (2, words): least time of the current request on any of eight servers, and on those that must load its adapter.
    """

    numbers: FloatArray
    looked: FloatArray
    kept: FloatArray
    least: FloatArray
    floors: FloatArray
    holders: Residents
    running: Running


@njit(**INLINED)
def _load_ms(c: Servers, s: int, a: int) -> float:
    """Return the time to load the adapter from the host."""
    loading = c.law.loading[c.kind[s]]
    return float(loading[0] + loading[1] * c.ranks[a])


@njit(**INLINED)
def latency_ms(c: Servers, output_tokens: float, s: int, r: int, may_be_held: bool) -> float:
    """Predicted latency of the request; `may_be_held`: False if the server certainly does not hold its adapter."""
    server, a = c.servers[s], c.adapter[r]
    adapters, ranks, load = float(server.active), float(server.active_ranks), 0.0
    if c.ranks[a] > 0 and may_be_held:
        adapters, ranks = adapters_with(c, s, a)
        load = 0.0 if on_gpu(c, s, a) else _load_ms(c, s, a)
    elif c.ranks[a] > 0:
        adapters, ranks = min(adapters + 1.0, float(server.slots)), ranks + c.ranks[a]
        load = _load_ms(c, s, a)
    decodes, tokens = float(server.decodes), float(server.waiting_prompt + c.prompt[r])
    budget = max(1.0, server.token_budget - decodes)
    steps = math.ceil(tokens / budget)
    rank, n = float(c.ranks[a]), outstanding(c, s) + 1.0
    all_ranks, queued_ranks, largest = ranks_of(c, s)
    most = max(largest, rank)
    if decodes > 0.0:
        prefill = step_ms(c, s, decodes, tokens / steps, adapters, ranks, all_ranks + rank, n * most)
    else:
        # Without decodes, the step holds only requests that wait now.
        alone = (n - server.running) * most
        prefill = step_ms(c, s, 0.0, tokens / steps, adapters, ranks, queued_ranks + rank, alone)
    decode = step_ms(c, s, n, 0.0, adapters, ranks, all_ranks + rank, n * most)
    return float(steps * prefill + load + (output_tokens - 1.0) * decode)


@njit(**INLINED)
def _score(c: Servers, p: Known, s: int, r: int) -> float:
    """Predicted latency of the request, ms."""
    return float(latency_ms(c, p.numbers[0], s, r, may_have(p.holders.bits, s, c.adapter[r])))


@njit(**INLINED)
def _changed(c: Servers, looked: FloatArray, s: int) -> bool:
    """Whether a server has changed since the last check, apart from the lengths of its contexts; updates `looked`."""
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
    """Update what `Known` keeps of server `s`."""
    note_residents(c, p.holders, s)
    note_running(c, p.running, s)
    if not _changed(c, p.looked[s], s):
        return
    server, kept, loading = c.servers[s], p.kept, c.law.loading[c.kind[s]]
    decodes, waiting, n = float(server.decodes), float(server.waiting_prompt), outstanding(c, s) + 1.0
    adapters, ranks = float(server.active), float(server.active_ranks)
    joined = min(adapters + 1.0, float(server.slots))
    # A prompt has at least one token, so the bound holds for every request.
    steps = math.ceil((waiting + 1.0) / max(1.0, server.token_budget - decodes))
    fixed, slope = prefill_floor(c, s, decodes, adapters, ranks)
    fixed_joined, slope_joined = prefill_floor(c, s, decodes, joined, ranks)
    all_ranks, _, largest = ranks_of(c, s)
    decode = step_ms(c, s, n, 0.0, adapters, ranks, all_ranks, n * largest)
    decode_joined = step_ms(c, s, n, 0.0, joined, ranks, all_ranks, n * largest)
    further = p.numbers[0] - 1.0
    for k in range(1, c.classes.shape[1]):
        rank = float(c.classes[s, k].rank)
        own, more = rank_floors(c, s, rank, n, largest)
        kept[3 * k - 3, s] = steps * fixed + slope * waiting + further * (decode + own)
        kept[3 * k - 2, s] = (
            steps * (fixed_joined + more) + slope_joined * waiting + further * (decode_joined + own + more)
        )
        kept[3 * k - 1, s] = loading[0] + loading[1] * rank
    kept[kept.shape[0] - 2, s], kept[kept.shape[0] - 1, s] = slope, slope_joined
    first = s & ~7
    for k in range(kept.shape[0]):
        least = kept[k, first]
        for other in range(first + 1, first + 8):
            if kept[k, other] < least:
                least = kept[k, other]
        p.least[k, s >> 3] = least


@njit(**INLINED)
def _in_batch(c: Servers, p: Known, s: int, r: int) -> float:
    """Return the least time of the request on a server that has its adapter in the batch."""
    rows = p.kept.shape[0]
    return float(p.kept[3 * c.rank_class[c.adapter[r]] - 3, s] + p.kept[rows - 2, s] * c.prompt[r])


@njit(**INLINED)
def _least(c: Servers, p: Known, s: int, r: int) -> float:
    """Return the least time of the request on a server."""
    a, rows = c.adapter[r], p.kept.shape[0]
    if c.ranks[a] == 0 or may_have(p.running.bits, s, a):
        return float(_in_batch(c, p, s, r))
    k = 3 * c.rank_class[a] - 2
    least = p.kept[k, s] + p.kept[rows - 1, s] * c.prompt[r]
    return float(least if may_have(p.holders.bits, s, a) else least + p.kept[k + 1, s])


@njit(**CALLED)
def _best_word(
    kept: FloatArray, least: FloatArray, floors: FloatArray, held: BitArray, runs: BitArray, k: int, prompt: float
) -> int:
    """Set `floors`; return the eight servers (a word) with the smallest floor.

    held, runs (words,): bits of the servers that may hold the adapter, and of those that have it in their batch. k:
    first row of `kept` for its rank. Not inlined: with `choose` it would need more registers than the processor has.
    """
    some, every, last = floors[0], floors[1], least.shape[0] - 1
    batch, joins, load = least[k], least[k + 1], least[k + 2]
    slope, slope_joined = least[last - 1], least[last]
    for word in range(some.size):
        some[word] = joins[word] + slope_joined[word] * prompt
        every[word] = some[word] + load[word]
    lowest, best = math.inf, 0
    for word in range(some.size):
        some[word] = every[word] if held[word] == 0 else some[word]
        if some[word] < lowest:
            lowest, best = some[word], word
    for word in range(some.size):
        if runs[word] == 0:
            continue
        floor = batch[word] + slope[word] * prompt
        if floor < lowest:  # it may belong to a server that does not run the adapter
            floor = some[word]
            for s in range(8):
                if (runs[word] >> s) & 1:
                    floor = min(floor, kept[k, 8 * word + s] + kept[last - 1, 8 * word + s] * prompt)
        if floor < some[word]:
            some[word] = floor
        if floor < lowest:
            lowest, best = floor, word
    return best


@njit(**CALLED)
def _best_word_of_base(least: FloatArray, floors: FloatArray, k: int, prompt: float) -> int:
    """As `_best_word`, for a request to the base model, which needs no adapter."""
    some, every, slope = floors[0], floors[1], least[least.shape[0] - 2]
    lowest, best = math.inf, 0
    for word in range(some.size):
        some[word] = every[word] = least[k, word] + slope[word] * prompt
        if some[word] < lowest:
            lowest, best = some[word], word
    return best


@njit(**INLINED)
def _survey(c: Servers, p: Known, server: IntArray, first: int, last: int, r: int) -> int:
    """Return the position of the server with the least time if all servers are candidates, else -1."""
    a, lowest, prompt = c.adapter[r], math.inf, float(c.prompt[r])
    k = 3 * c.rank_class[a] - 3
    if c.ranks[a] == 0:
        best = 8 * _best_word_of_base(p.least, p.floors, k, prompt)
    else:
        held = p.holders.bits[row_of_bits(p.holders.bits, a)]
        runs = p.running.bits[row_of_bits(p.running.bits, a)]
        best = 8 * _best_word(p.kept, p.least, p.floors, held, runs, k, prompt)
    # `_among` reads the floors in this case, too, so they are set first.
    if last - first < c.wake_s.size:
        return -1
    for s in range(best, min(best + 8, c.wake_s.size)):
        least = _least(c, p, s, r)
        if least < lowest:
            lowest, best = least, s
    return int(first + best)


@njit(**INLINED)
def _among(c: Servers, p: Known, word: int, r: int, lowest: float) -> int:
    """Return all eight servers if one may win with a load, else those that may hold the adapter, or none."""
    if p.floors[0, word] * SAFE >= lowest:
        return 0
    return 255 if p.floors[1, word] * SAFE < lowest else int(servers_among(p.holders.bits, word, c.adapter[r]))


@njit(**INLINED)
def _worth(c: Servers, p: Known, s: int, r: int, lowest: float) -> bool:
    """Whether the latency may be shorter than `lowest`."""
    return bool(_least(c, p, s, r) * SAFE < lowest)


@dataclass(frozen=True)
class Predicted(ScoringRouter):
    """The least time to prefill the server's queue and the request in steps of the token budget, load the adapter, and
    decode among the server's requests: the best estimate of a router that does not know later requests."""

    name = "predicted"
    score, note, worth = staticmethod(_score), staticmethod(_note), staticmethod(_worth)
    survey, among = staticmethod(_survey), staticmethod(_among)

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Known:
        """Return the parameters with room for what is kept and what the servers hold."""
        words, rows = servers.touched_words.size, 3 * servers.classes.shape[1] - 1
        kept, floors = np.full((rows, 8 * words), np.inf), np.zeros((2, words))
        looked = np.full((8 * words, 6), np.inf)
        least = kept[:, :words].copy()
        return Known(numbers, looked, kept, least, floors, new_residents(servers), new_running(servers))
