"""Router "predicted": the shortest latency, as the server's own step law predicts it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.routers.step_cost import adapters_with, ranks_of, step_ms
from packer.twin.cluster.state import Servers, on_gpu, outstanding
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def _score(c: Servers, p: FloatArray, s: int, r: int) -> float:
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
    load = 0.0
    if not on_gpu(c, s, a):
        load = c.law.loading[s, 0] + c.law.loading[s, 1] * c.ranks[a]
    decode = step_ms(c, s, n, 0.0, adapters, ranks, all_ranks + rank, n * most)
    return float(steps * prefill + load + (p[0] - 1.0) * decode)


@dataclass(frozen=True)
class Predicted(ScoringRouter):
    """Time to prefill the queue and the request in steps of the token budget, loads of its adapter, and its decode
    steps among the server's requests: the best estimate of a router without knowledge of later requests.
    """

    name = "predicted"
    score = staticmethod(_score)
