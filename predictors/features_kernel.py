"""Features of many bins at once, compiled by Numba. `tests/predictors/naive_features.py` is the slow oracle."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from packer.predictors.physics import (
    Server,
    Traffic,
    capacity,
    operating_batch,
    slot_wait,
    step,
)
from packer.twin.kernel_state import FLAGS

MAX_GROUPS = 64
TINY = 1e-12
HORIZON_S = 3600.0
CLIENT_CEILING = 26_800.0  # requests outstanding in the runs that predictors learn from


@njit(**FLAGS)
def group(share, start, end, index, fleet, groups, sums, slots):
    """Sums over one bin's adapters, and its groups by output demand (factors of two), heaviest first.

    Writes `groups` (see `Traffic`) and `sums` (11,); returns the number of groups and the part of the request
    rate that comes from the `slots` heaviest adapters.
    """
    n_by = np.zeros(MAX_GROUPS)
    rate_by = np.zeros(MAX_GROUPS)
    demand_by = np.zeros(MAX_GROUPS)
    rank_by = np.zeros(MAX_GROUPS)
    sums[:] = 0.0
    for j in range(start, end):
        i = index[j]
        rank = fleet[i, 0]
        rate = fleet[i, 1] * share[j]
        demand = rate * fleet[i, 3]
        sums[0] += rate
        sums[1] += rate * rate
        sums[2] = max(sums[2], rate)
        sums[3] = max(sums[3], rank)
        sums[4] += rank
        sums[5] += rank * rank
        sums[6] += rate * fleet[i, 2]
        sums[7] += demand
        sums[8] += rate * fleet[i, 4]
        sums[9] += rate * fleet[i, 5]
        sums[10] += rate * fleet[i, 6]
        e = math.frexp(demand)[1] + 32
        e = 0 if e < 0 else (MAX_GROUPS - 1 if e >= MAX_GROUPS else e)
        n_by[e] += 1.0
        rate_by[e] += rate
        demand_by[e] += demand
        rank_by[e] += rank
    k = 0
    left, held = slots, 0.0
    for e in range(MAX_GROUPS - 1, -1, -1):
        n = n_by[e]
        if n > 0.0:
            groups[0, k] = n
            groups[1, k] = rate_by[e] / n
            groups[2, k] = demand_by[e] / n
            groups[3, k] = rank_by[e] / n
            held += rate_by[e] * min(1.0, left / n)
            left = max(0.0, left - n)
            k += 1
    return k, held / sums[0]


@njit(**FLAGS)
def fill(indptr, index, share, slots, slot_rank, kv_tokens, fleet, law, paper, engine, out):
    """Write the features (`packer.predictors.features.FEATURES`) of each bin into `out` float64 (n, F).

    Arrays: indptr int64 (n + 1,), index int64 and share float64 (nnz,): the adapters of each bin and the part of
    their rate that comes there; slots, slot_rank, kv_tokens float64 (n,); fleet float64 (m, 7): rank, rate, and
    E[I], E[O], E[I²], E[O²], E[I·O] of the lengths; law: coefficients of the step law; engine float64 (7,):
    graph_max_tokens, max_num_batched_tokens, max_num_seqs, block_size, max_cpu_loras, ms to load an adapter from
    host, from disk.
    """
    groups = np.zeros((5, MAX_GROUPS))
    sums = np.zeros(11)
    for b in range(slots.size):
        start, end = indptr[b], indptr[b + 1]
        n = float(end - start)
        k, top_share = group(share, start, end, index, fleet, groups, sums, slots[b])
        rate, demand = sums[0], sums[7]
        prompt, output = sums[6] / rate, demand / rate
        input_var = max(0.0, sums[8] / rate - prompt * prompt)
        output_var = max(0.0, sums[9] / rate - output * output)
        offered = rate * (prompt + output)
        held = (sums[10] + 0.5 * sums[9]) / demand + 0.5 * engine[3]
        load_ms = engine[5]
        if n > engine[4]:
            load_ms += engine[6] * (1.0 - engine[4] / n)
        server = Server(law, paper, engine[0], slots[b], slot_rank[b], load_ms)
        traffic = Traffic(n, prompt, output, held, demand, groups, k)

        kv = max(kv_tokens[b], 1.0)
        fits = kv / held
        largest = max(min(fits, engine[2], engine[1] * output / (prompt + output)), TINY)
        best, best_batch = capacity(server, traffic, largest, 0.0)
        use = demand / best
        if use < 1.0:
            batch = operating_batch(server, traffic, best_batch)
        else:
            batch = best_batch
        step_ms, adapters = step(server, traffic, batch, 0.0)
        wait_s = slot_wait(server, traffic, step_ms * 1e-3)
        # Backlog: what the equilibrium can't serve gathers, at most up to the client's ceiling; long queues are
        # scanned when no slot is free.
        lost = max(0.0, 1.0 - 1.0 / use) + min(wait_s, HORIZON_S) / HORIZON_S
        waiting = min(CLIENT_CEILING, rate * 0.5 * HORIZON_S * min(1.0, lost))
        scanned = waiting if n > slots[b] else 0.0
        busy_ms = step(server, traffic, best_batch, scanned)[0] if lost > 0.0 else step_ms
        busy_use = demand * busy_ms / (1e3 * best_batch) if lost > 0.0 else use
        mean_rate = rate / n
        row = out[b]
        row[0] = n
        row[1] = rate
        row[2] = math.sqrt(max(0.0, sums[1] / n - mean_rate * mean_rate))
        row[3] = sums[3]
        row[4] = sums[4] / n
        row[5] = math.sqrt(max(0.0, sums[5] / n - row[4] * row[4]))
        row[6] = slots[b]
        row[7] = slot_rank[b]
        row[8] = offered
        row[9] = prompt
        row[10] = output
        row[11] = math.sqrt(input_var) / prompt
        row[12] = math.sqrt(output_var) / output
        row[13] = kv_tokens[b]
        row[14] = sums[2] / rate
        row[15] = top_share
        row[16] = slots[b] / n
        row[17] = held
        row[18] = fits
        row[19] = best * (prompt + output) / output
        row[20] = use
        row[21] = busy_use
        row[22] = batch
        row[23] = batch / fits
        row[24] = adapters
        row[25] = adapters / slots[b]
        row[26] = step_ms
        row[27] = wait_s
        row[28] = output * step_ms * 1e-3
        row[29] = waiting
        row[30] = min(1.0, 1.0 / busy_use)
