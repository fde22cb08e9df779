"""What a step of a server would take with further requests, by its step law: for routers that predict."""

from __future__ import annotations

from numba import njit

from packer.twin.cluster.state import Servers, row_of
from packer.twin.engine.state import ACTIVE, ACTIVE_RANKS, IN_BATCH, SERVED, SLOT_RANK, SLOTS
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import GRAPH_MAX, IS_PAPER
from packer.twin.law.linear import linear_ms, state_vector
from packer.twin.law.paper import paper_ms


@njit(**ENGINE_FLAGS)
def step_ms(c: Servers, s: int, decodes: float, prefill: float, adapters: float, ranks: float) -> float:
    """A step of so many decodes and prefill tokens, distinct adapters and their summed ranks; without the KV terms."""
    coefficients, settings, ints = c.law.coefficients[s], c.law.settings[s], c.ints[s]
    if settings[IS_PAPER] > 0:
        return float(paper_ms(coefficients, decodes, 0.0, adapters, ints[SERVED]))
    vector = c.vector[s]  # scratch: the engine fills it anew in each step
    state_vector(
        vector, decodes, prefill, adapters, ranks, ints[SLOTS], ints[SLOT_RANK], 0.0, 0.0, 0.0,
        settings[GRAPH_MAX],
    )  # fmt: skip
    return float(linear_ms(coefficients, vector))


@njit(**ENGINE_FLAGS)
def adapters_with(c: Servers, s: int, a: int) -> tuple[float, float]:
    """Distinct adapters of the batch and the sum of their ranks, if adapter `a` joined it."""
    adapters, ranks = float(c.ints[s, ACTIVE]), float(c.ints[s, ACTIVE_RANKS])
    row = row_of(c, s, a)
    if row > 0 and c.adapters[s, row, IN_BATCH] > 0:
        return adapters, ranks
    return min(adapters + 1.0, float(c.ints[s, SLOTS])), ranks + c.ranks[a]
