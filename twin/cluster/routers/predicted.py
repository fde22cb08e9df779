"""Router "predicted": the shortest latency, as the server's own step law predicts it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray
from packer.cluster import Cluster
from packer.twin.cluster.residents import Residents, may_hold, new_residents, note_residents
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.routers.step_cost import adapters_with, prefill_floor, rank_floors, ranks_of, step_ms
from packer.twin.cluster.state import Servers, on_gpu, outstanding, row_of
from packer.twin.engine.content import Content
from packer.twin.flags import INLINED
from packer.workload import Workload

SAFE = 1.0 - 1e-9
"""Sums of the same terms in another order differ by less."""


class Known(NamedTuple):
    """numbers: of `Predicted.parameters`."""

    numbers: FloatArray
    holders: Residents


@njit(**INLINED)
def _load_ms(c: Servers, s: int, a: int) -> float:
    """What it takes to load the adapter from the host."""
    return float(c.law.loading[s, 0] + c.law.loading[s, 1] * c.ranks[a])


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
def _note(c: Servers, p: Known, s: int) -> None:
    """Keep, for each rank, what a request takes at least if its adapter is in the batch, and how much more if not.

    And what each further prompt token takes at least.
    """
    server, count = c.servers[s], c.wake_s.size
    first = p.numbers.size - (2 * c.classes.shape[1] - 1) * count + s
    decodes, waiting, n = float(server.decodes), float(server.waiting_prompt), outstanding(c, s) + 1.0
    adapters, ranks = float(server.active), float(server.active_ranks)
    steps = math.ceil((waiting + 1.0) / max(1.0, server.token_budget - decodes))
    fixed, slope = prefill_floor(c, s, decodes, adapters, ranks)
    all_ranks, _, largest = ranks_of(c, s)
    decode = step_ms(c, s, n, 0.0, adapters, ranks, all_ranks, n * largest)
    joined = min(adapters + 1.0, float(server.slots))
    joins = step_ms(c, s, n, 0.0, joined, ranks, all_ranks, n * largest) - decode
    for k in range(1, c.classes.shape[1]):
        own, more = rank_floors(c, s, float(c.classes[s, k].rank), n, largest)
        p.numbers[first + (2 * k - 2) * count] = (
            steps * fixed + slope * waiting + (p.numbers[0] - 1.0) * (decode + own)
        )
        p.numbers[first + (2 * k - 1) * count] = (p.numbers[0] - 1.0) * (joins + more)
    p.numbers[first + (2 * c.classes.shape[1] - 2) * count] = slope
    note_residents(c, p.holders, s)


@njit(**INLINED)
def _worth(c: Servers, p: Known, s: int, r: int, lowest: float) -> bool:
    """Whether the latency may be shorter than `lowest`."""
    count, a = c.wake_s.size, c.adapter[r]
    k, end = 2 * c.rank_class[a] - 2, p.numbers.size - count + s
    first = p.numbers.size - (2 * c.classes.shape[1] - 1) * count + s
    least = p.numbers[first + k * count] + p.numbers[end] * c.prompt[r]
    if c.ranks[a] == 0 or least * SAFE >= lowest:
        return bool(least * SAFE < lowest)
    row = row_of(c, s, a) if may_hold(p.holders, s, a) else 0
    if row == 0 or c.adapters[s, row].in_batch == 0:
        least += p.numbers[first + (k + 1) * count]
    if row == 0 or c.adapters[s, row].resident == 0:
        least += _load_ms(c, s, a)
    return bool(least * SAFE < lowest)


@dataclass(frozen=True)
class Predicted(ScoringRouter):
    """Time to prefill the queue and the request in steps of the token budget, loads of its adapter, and its decode
    steps among the server's requests: the best estimate of a router without knowledge of later requests.
    """

    name = "predicted"
    score, note, worth = staticmethod(_score), staticmethod(_note), staticmethod(_worth)

    def parameters(self, cluster: Cluster, workload: Workload) -> FloatArray:
        """The mean output tokens of a request, and room for `_note`."""
        kept = 2 * len(np.unique(workload.ranks)) + 1
        return np.append(super().parameters(cluster, workload), np.zeros(kept * len(cluster)))

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Known:
        """With what the servers hold."""
        return Known(numbers, new_residents(servers))
