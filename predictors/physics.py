"""A server in equilibrium, from the profile's own step law: the strongest features of a bin.

With B running requests (decodes), prompts of I and outputs of O tokens, each step admits B/O requests on average. Every
term of the step law is therefore a function of B: the step time t(B), the request rate B/(O·t) and the expected number
of distinct adapters. An adapter is running with probability 1 − exp(−its expected running requests). The server's
capacity is the largest rate over the B that fit into the KV cache. The server operates at the B whose rate is the
offered rate. Adapters are grouped by load (factors of two), so that the computation does not grow with their number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from numba import njit

from packer.arrays import FloatArray
from packer.twin.flags import CALLED, INLINED
from packer.twin.law.linear import linear_ms, state_vector
from packer.twin.law.paper import paper_ms

GRID = 7
ROOT_STEPS = 8
WAIT_STEPS = 12
LONGEST_WAIT_S = 1e5
SHORTEST_WAIT_S = 1e-3
LEAST_ADMITTED = 1e-12  # requests that a step admits, below which 1 - exp() loses all digits
MOST_RUNNING = 60.0  # running requests of one adapter, beyond which exp() is 0 to the precision needed


class ServerTerms(NamedTuple):
    """One server; `law`: vector of coefficients, `load_ms`: time to load one adapter into a slot, `host_places`:
    adapters that fit into host memory. `vector` float64 (terms of the linear law,): working memory."""

    law: FloatArray
    paper: bool
    law_settings: FloatArray
    slots: float
    slot_rank: float
    load_ms: float
    host_places: float
    vector: FloatArray


class TrafficTerms(NamedTuple):
    """Offered traffic: mean lengths by request, KV tokens held per running request, Σ rate × output, groups. `groups`
    float64 (5, ≥ k): adapters, and their mean rate, output tokens/s, rank; row 4 is working memory."""

    adapters: float
    prompt: float
    output: float
    held: float
    demand: float
    groups: FloatArray
    k: int


@njit(**INLINED)
def mixture(traffic: TrafficTerms, batch: float) -> tuple[float, float, float]:
    """Expected distinct adapters in a batch, sum of their ranks, and req/s whose adapter is not in the batch."""
    adapters, ranks, starts = 0.0, 0.0, 0.0
    groups = traffic.groups
    scale = batch / traffic.demand
    for g in range(traffic.k):
        absent = math.exp(-min(groups[2, g] * scale, MOST_RUNNING))
        present = groups[0, g] * (1.0 - absent)
        adapters += present
        ranks += present * groups[3, g]
        starts += groups[0, g] * groups[1, g] * absent
    return adapters, ranks, starts


@njit(**INLINED)
def request_ranks(traffic: TrafficTerms) -> tuple[float, float]:
    """Mean rank of the requests, and the largest rank."""
    requests, ranks, largest = 0.0, 0.0, 0.0
    for g in range(traffic.k):
        rate = traffic.groups[0, g] * traffic.groups[1, g]
        requests += rate
        ranks += rate * traffic.groups[3, g]
        largest = max(largest, traffic.groups[3, g])
    return (ranks / requests if requests > 0.0 else 0.0), largest


@njit(**CALLED)
def step(server: ServerTerms, traffic: TrafficTerms, batch: float, waiting: float) -> tuple[float, float]:
    """Mean step time, ms, with `batch` running and `waiting` waiting requests, and distinct running adapters."""
    adapters, ranks, starts = mixture(traffic, batch)
    missing = 0.0
    if traffic.adapters > server.slots:
        missing = 1.0
        if adapters < server.slots:
            # Slots that running adapters leave hold adapters without requests, which then need no load.
            missing = 1.0 - (server.slots - adapters) / (traffic.adapters - adapters)
    if adapters > server.slots:
        ranks *= server.slots / adapters
        adapters = server.slots
    admitted = max(batch / traffic.output, LEAST_ADMITTED)
    ms = 0.0
    if server.paper:
        ms = paper_ms(server.law, batch, waiting, adapters, traffic.adapters)
    else:
        # The share of steps that admit a request, which share all prompt tokens; arrivals are random.
        some = 1.0 - math.exp(-admitted)
        context = batch * traffic.held
        mean_rank, largest_rank = request_ranks(traffic)
        registered = min(traffic.adapters, server.host_places)
        state_vector(
            server.vector, batch, admitted * traffic.prompt / some, adapters, ranks, server.slots,
            server.slot_rank, context, waiting, server.law_settings, batch * mean_rank,
            batch * largest_rank, registered, 0.5 * admitted * traffic.prompt * traffic.prompt / some,
        )  # fmt: skip
        with_prompt = linear_ms(server.law, server.vector)
        state_vector(
            server.vector, batch, 0.0, adapters, ranks, server.slots, server.slot_rank, context, waiting,
            server.law_settings, batch * mean_rank, batch * largest_rank, registered, 0.0,
        )  # fmt: skip
        ms = some * with_prompt + (1.0 - some) * linear_ms(server.law, server.vector)
    # Loads stall the step. At this batch only a part of the demand is served: output tok/s here / offered.
    part = min(1.0, batch * 1e3 / (ms * traffic.demand))
    loading = min(0.9, starts * part * missing * server.load_ms * 1e-3)
    return ms / (1.0 - loading), adapters


@njit(**INLINED)
def capacity(server: ServerTerms, traffic: TrafficTerms, largest_batch: float) -> tuple[float, float]:
    """Largest output tok/s over batches up to `largest_batch`, and the batch that reaches it."""
    best, best_batch = 0.0, largest_batch
    batch = largest_batch
    for _ in range(GRID):
        ms, _adapters = step(server, traffic, batch, 0.0)
        rate = batch * 1e3 / ms
        if rate > best:
            best, best_batch = rate, batch
        batch *= 0.6
    return best, best_batch


@njit(**INLINED)
def operating_batch(server: ServerTerms, traffic: TrafficTerms, upper: float) -> float:
    """Batch at which the offered load is served, if `upper` can serve it; regula falsi (Illinois)."""
    low, f_low = 0.0, -traffic.demand
    high, f_high = upper, upper * 1e3 / step(server, traffic, upper, 0.0)[0] - traffic.demand
    side = 0
    x = high
    for _ in range(ROOT_STEPS):
        x = (low * f_high - high * f_low) / (f_high - f_low)
        f = x * 1e3 / step(server, traffic, x, 0.0)[0] - traffic.demand
        if abs(f) < 1e-3 * traffic.demand:
            break
        if f > 0:
            high, f_high = x, f
            if side == 1:
                f_low *= 0.5
            side = 1
        else:
            low, f_low = x, f
            if side == -1:
                f_high *= 0.5
            side = -1
    return x


@njit(**CALLED)
def slots_needed(traffic: TrafficTerms, step_s: float, wait_s: float) -> float:
    """Mean number of slots in use if every adapter waits `wait_s` for one.

    An adapter's cycle has three parts: no request for 1/rate, the wait, and a stay until no request is left. The
    stay is the busy period of M/G/∞, residence·(exp(b) − 1)/b for b expected running requests, plus
    residence·ln(1 + rate × wait) for the requests that arrived during the wait.
    """
    total = 0.0
    groups = traffic.groups
    for g in range(traffic.k):
        rate = groups[1, g]
        # Each running request gets a token in every step, so tokens/s × step time is their number.
        running = min(groups[2, g] * step_s, MOST_RUNNING)
        gathered = math.log(1.0 + rate * wait_s)
        # In both parts residence / b is 1 / rate.
        stay = (groups[4, g] + running * gathered) / rate
        total += groups[0, g] * stay / (wait_s + stay + 1.0 / rate)
    return total


@njit(**INLINED)
def slot_wait(server: ServerTerms, traffic: TrafficTerms, step_s: float) -> float:
    """Mean wait for a slot, s, in equilibrium; 0 if slots suffice, at most LONGEST_WAIT_S."""
    if traffic.adapters <= server.slots:
        return 0.0
    groups = traffic.groups
    for g in range(traffic.k):
        groups[4, g] = math.exp(min(groups[2, g] * step_s, MOST_RUNNING)) - 1.0
    if slots_needed(traffic, step_s, 0.0) <= server.slots:
        return 0.0
    # Waits range over eight orders of magnitude: their logarithm is bisected.
    low, high = math.log(SHORTEST_WAIT_S), math.log(LONGEST_WAIT_S)
    if slots_needed(traffic, step_s, LONGEST_WAIT_S) > server.slots:
        return LONGEST_WAIT_S
    for _ in range(WAIT_STEPS):
        middle = 0.5 * (low + high)
        if slots_needed(traffic, step_s, math.exp(middle)) > server.slots:
            low = middle
        else:
            high = middle
    return math.exp(0.5 * (low + high))
