"""Router "predicted": the shortest latency, as the server's own step law predicts it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import njit

from packer.twin.cluster.routers.base import FloatArray, ScoringRouter
from packer.twin.cluster.routers.step_cost import adapters_with, step_ms
from packer.twin.cluster.state import Servers, on_gpu, outstanding
from packer.twin.engine.state import DECODES, TOKEN_BUDGET, WAITING_PROMPT
from packer.twin.flags import ENGINE_FLAGS


@dataclass(frozen=True)
class Predicted(ScoringRouter):
    """Time to prefill the queue and the request in steps of the token budget, loads of its adapter, and its decode
    steps among the server's requests: what a router could know at best without looking ahead.
    """

    name = "predicted"


@njit(**ENGINE_FLAGS)
def score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Predicted latency of the request, ms."""
    ints, a = c.ints[s], c.adapter[r]
    adapters, ranks = adapters_with(c, s, a)
    decodes, tokens = float(ints[DECODES]), float(ints[WAITING_PROMPT] + c.prompt[r])
    budget = max(1.0, ints[TOKEN_BUDGET] - decodes)
    steps = math.ceil(tokens / budget)
    prefill = steps * step_ms(c, s, decodes, tokens / steps, adapters, ranks)
    load = 0.0
    if not on_gpu(c, s, a):
        load = c.law.loading[s, 0] + c.law.loading[s, 1] * c.ranks[a]
    decode = step_ms(c, s, outstanding(c, s) + 1.0, 0.0, adapters, ranks)
    return float(prefill + load + (p[0] - 1.0) * decode)
