"""What a step of a server would take with further requests, by its step law: for routers that predict."""

from __future__ import annotations

from numba import njit

from packer.twin.cluster.state import Servers, row_of
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import IS_PAPER
from packer.twin.law.linear import linear_ms, state_vector
from packer.twin.law.paper import paper_ms


@njit(**ENGINE_FLAGS)
def step_ms(
    c: Servers, s: int, decodes: float, prefill: float, adapters: float, ranks: float, request_ranks: float,
    padded_ranks: float,
) -> float:  # fmt: skip
    """A step of so many decodes and prefill tokens, distinct adapters and their summed ranks, and the ranks of its
    requests, summed and padded; without the KV terms.
    """
    coefficients, settings, server = c.law.coefficients[s], c.law.settings[s], c.servers[s]
    if settings[IS_PAPER] > 0:
        return float(paper_ms(coefficients, decodes, 0.0, adapters, server.served))
    vector = c.vector[s]  # scratch: the engine fills it anew in each step
    state_vector(
        vector, decodes, prefill, adapters, ranks, server.slots, server.slot_rank, 0.0, 0.0,
        settings, request_ranks, padded_ranks,
        server.on_host_count if server.track_host == 1 else server.served, 0.0,
    )  # fmt: skip
    return float(linear_ms(coefficients, vector))


@njit(**ENGINE_FLAGS)
def adapters_with(c: Servers, s: int, a: int) -> tuple[float, float]:
    """Distinct adapters of the batch and the sum of their ranks, if adapter `a` joined it."""
    adapters, ranks = float(c.servers[s].active), float(c.servers[s].active_ranks)
    row = row_of(c, s, a)
    if c.ranks[a] == 0 or (row > 0 and c.adapters[s, row].in_batch > 0):
        return adapters, ranks
    return min(adapters + 1.0, float(c.servers[s].slots)), ranks + c.ranks[a]


@njit(**ENGINE_FLAGS)
def ranks_of(c: Servers, s: int) -> tuple[float, float, float]:
    """Ranks of the requests of a server: their sum, that of those outside the batch, and the largest of all."""
    total, largest = 0.0, 0.0
    for k in range(1, c.classes.shape[1]):
        if c.classes[s, k].unfinished > 0:
            largest = float(c.classes[s, k].rank)
            total += c.classes[s, k].unfinished * largest
    return total, total - c.servers[s].request_ranks, largest
