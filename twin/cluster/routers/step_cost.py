"""The time of a server's step with further requests, by its step law, for routers that predict latency."""

from __future__ import annotations

import math

from numba import njit

from packer.twin.cluster.state import Servers, row_of
from packer.twin.flags import ENGINE_FLAGS, INLINED
from packer.twin.law.law import IS_PAPER
from packer.twin.law.linear import AT, BLOCK_M, BLOCK_N, SPLIT_K_LARGE, linear_ms, state_vector
from packer.twin.law.paper import paper_ms


@njit(**ENGINE_FLAGS)
def step_ms(
    c: Servers, s: int, decodes: float, prefill: float, adapters: float, ranks: float, request_ranks: float,
    padded_ranks: float,
) -> float:  # fmt: skip
    """Return the time of a step, ms, without the KV terms: with numbers of decodes, prefill tokens and distinct
    adapters, the adapters' summed ranks, and the ranks of its requests, summed and padded.
    """
    kind, server = c.kind[s], c.servers[s]
    coefficients, settings = c.law.coefficients[kind], c.law.settings[kind]
    if settings[IS_PAPER] > 0:
        return float(paper_ms(coefficients, decodes, 0.0, adapters, server.served))
    vector = c.vector[0]  # scratch: the engine overwrites it in each step
    state_vector(
        vector, decodes, prefill, adapters, ranks, server.slots, server.slot_rank, 0.0, 0.0, settings, request_ranks,
        padded_ranks, server.on_host_count if server.track_host == 1 else server.served, 0.0,
    )  # fmt: skip
    return float(linear_ms(coefficients, vector))


@njit(**INLINED)
def prefill_floor(c: Servers, s: int, decodes: float, adapters: float, ranks: float) -> tuple[float, float]:
    """Return lower bounds of the time of a step with prefill tokens, ms, and of the time per prefill token, ms.

    Coefficients are not negative. Terms of thread blocks, which may fall with further tokens, are counted at their
    minimum; graphs are left out.
    """
    law, server = c.law.coefficients[c.kind[s]], c.servers[s]
    if c.law.settings[c.kind[s], IS_PAPER] > 0:
        return float(paper_ms(law, decodes, 0.0, adapters, server.served)), 0.0
    fixed = law[AT.base_ms] + law[AT.per_decode_ms] * decodes + law[AT.prefill_step_ms]
    slope = law[AT.per_prefill_token_ms]
    if adapters > 0.0:
        a_token = law[AT.per_lora_token_ms] + law[AT.per_adapter_token_ms] * adapters
        a_token += law[AT.per_slot_token_ms] * server.slots + law[AT.per_slot_rank_token_ms] * server.slot_rank
        fixed += law[AT.first_adapter_ms] + law[AT.per_adapter_ms] * adapters + law[AT.per_rank_ms] * ranks
        fixed += law[AT.per_slot_ms] * server.slots + law[AT.per_slot_rank_ms] * server.slot_rank
        blocks = SPLIT_K_LARGE * math.ceil(server.slot_rank / BLOCK_N)
        a_token += law[AT.per_slot_block_ms] * server.slots * blocks / BLOCK_M
        fixed += law[AT.per_adapter_block_ms] * adapters * blocks
        fixed += a_token * decodes
        slope += a_token
        known = server.on_host_count if server.track_host == 1 else server.served
        fixed += law[AT.per_adapter_registered_ms] * adapters * known
    return float(fixed), float(slope)


@njit(**INLINED)
def rank_floors(c: Servers, s: int, rank: float, n: float, largest: float) -> tuple[float, float]:
    """Return the ms that a request's rank adds to a decode step of `n` requests, and its adapter's if it joins."""
    law = c.law.coefficients[c.kind[s]]
    if c.law.settings[c.kind[s], IS_PAPER] > 0:
        return 0.0, 0.0
    own = law[AT.per_request_rank_ms] * rank + law[AT.per_padded_rank_ms] * n * (max(largest, rank) - largest)
    return float(own), float(law[AT.per_rank_ms] * rank)


@njit(**INLINED)
def adapters_with(c: Servers, s: int, a: int) -> tuple[float, float]:
    """Return the distinct adapters of the batch and the sum of their ranks, if adapter `a` joined it."""
    adapters, ranks = float(c.servers[s].active), float(c.servers[s].active_ranks)
    row = row_of(c, s, a)
    if c.ranks[a] == 0 or (row > 0 and c.adapters[s, row].in_batch > 0):
        return adapters, ranks
    return min(adapters + 1.0, float(c.servers[s].slots)), ranks + c.ranks[a]


@njit(**INLINED)
def ranks_of(c: Servers, s: int) -> tuple[float, float, float]:
    """Return the ranks of a server's requests: their sum, the sum outside the batch, and the largest."""
    total, largest = 0.0, 0.0
    for k in range(1, c.classes.shape[1]):
        if c.classes[s, k].unfinished > 0:
            largest = float(c.classes[s, k].rank)
            total += c.classes[s, k].unfinished * largest
    return total, total - c.servers[s].request_ranks, largest
