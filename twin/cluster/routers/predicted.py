"""Router "predicted": the server with the shortest latency that its step law predicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.residents import Residents, may_have, new_residents, note_residents, servers_among
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.routers.step_cost import adapters_with, prefill_floor, rank_floors, ranks_of, step_ms
from packer.twin.cluster.state import Servers, on_gpu, outstanding
from packer.twin.engine.content import Content
from packer.twin.flags import INLINED

SAFE = 1.0 - 1e-9  # Margin for rounding: sums of the same terms in another order differ by less.


class Known(NamedTuple):
    """numbers: as in `parameters`. looked (S, 6): the state of each server when its `kept` was computed.

    kept (rows, S, up to a multiple of 8): lower bounds for each server, ms. Two rows for each rank: time of a request
    if its adapter is in the batch, and if it must be loaded. Two more rows: time of each further prompt token in the
    first and in the second case. least (rows, words): the smallest of each eight servers.
    """

    numbers: FloatArray
    looked: FloatArray
    kept: FloatArray
    least: FloatArray
    holders: Residents


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
        kept[2 * k - 2, s] = steps * fixed + slope * waiting + further * (decode + own)
        joins = steps * (fixed_joined + more) + slope_joined * waiting + further * (decode_joined + own + more)
        kept[2 * k - 1, s] = joins + loading[0] + loading[1] * rank
    kept[kept.shape[0] - 2, s], kept[kept.shape[0] - 1, s] = slope, slope_joined
    first = s & ~7
    for k in range(kept.shape[0]):
        least = kept[k, first]
        for other in range(first + 1, first + 8):
            least = min(least, kept[k, other])
        p.least[k, s >> 3] = least


@njit(**INLINED)
def _among(c: Servers, p: Known, word: int, r: int, lowest: float) -> int:
    """Return all eight servers if one may win with a load, else those that may hold the adapter, or none."""
    a, least, last = c.adapter[r], p.least, p.least.shape[0] - 1
    k = 2 * c.rank_class[a] - 2
    if (least[k, word] + least[last - 1, word] * c.prompt[r]) * SAFE >= lowest:
        return 0
    if c.ranks[a] == 0 or (least[k + 1, word] + least[last, word] * c.prompt[r]) * SAFE < lowest:
        return 255
    return int(servers_among(p.holders.bits, word, a))


@njit(**INLINED)
def _worth(c: Servers, p: Known, s: int, r: int, lowest: float) -> bool:
    """Whether the latency may be shorter than `lowest`."""
    a, rows = c.adapter[r], p.kept.shape[0]
    absent = c.ranks[a] > 0 and not may_have(p.holders.bits, s, a)
    least = p.kept[2 * c.rank_class[a] - 2 + absent, s] + p.kept[rows - 2 + absent, s] * c.prompt[r]
    return bool(least * SAFE < lowest)


@dataclass(frozen=True)
class Predicted(ScoringRouter):
    """The least time to prefill the server's queue and the request in steps of the token budget, load the adapter, and
    decode among the server's requests: the best estimate of a router that does not know later requests."""

    name = "predicted"
    score, note = staticmethod(_score), staticmethod(_note)
    among, worth = staticmethod(_among), staticmethod(_worth)

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Known:
        """Return the parameters with room for what is kept and what the servers hold."""
        words, rows = servers.touched_words.size, 2 * servers.classes.shape[1]
        looked, kept = np.full((8 * words, 6), np.inf), np.full((rows, 8 * words), np.inf)
        return Known(numbers, looked, kept, kept[:, :words].copy(), new_residents(servers))
