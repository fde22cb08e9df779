"""Features of many bins at once, compiled by Numba; `tests/oracles/naive_predictors.py` is the slow reference."""

from __future__ import annotations

import math
from typing import NamedTuple

from numba import njit

from packer.adapter import IDLE_RATE
from packer.arrays import FloatArray, IntArray
from packer.predictors.physics import ServerTerms, TrafficTerms, capacity, mixture, operating_batch, slot_wait, step
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED

MAX_GROUPS = 64
MIDDLE_GROUP = 32
TINY = 1e-12
HORIZON_S = 3600.0
CLIENT_CEILING = 26_800.0  # maximum of outstanding requests in the training data
N_SUMS = 13  # over the adapters of a bin
(RATE, RATE_2, RATE_MAX, RANK_MAX, RANK, RANK_2, INPUT, OUTPUT, INPUT_2, OUTPUT_2, PRODUCT, LOAD, COUNT) = range(N_SUMS)
ROOM = (13, MAX_GROUPS)  # Working memory from the caller: an allocation in a kernel takes 0.4 s to compile.
SUMS = 9  # Row of the working memory with the sums of the latest bin.


class FleetArrays(NamedTuple):
    """A fleet on a profile.

    table float64 (m, 7): rank, rate, E[I], E[O], E[I²], E[O²], E[I·O] of the lengths; law: coefficients of the step
    law, which is the paper's if `paper`, else the linear one; engine float64 (13,): max_num_batched_tokens,
    max_num_seqs, block_size, max_cpu_loras, ms to load an adapter from host memory (base, per rank) and from disk
    (base, per rank), `law_settings`; load float64 (m,): offered load, tok/s.
    """

    table: FloatArray
    law: FloatArray
    paper: bool
    engine: FloatArray
    load: FloatArray


@njit(**INLINED)
def gather(
    first: int, last: int, index: IntArray, share: FloatArray, factor: float, fleet: FleetArrays,
    by_load: FloatArray, sums: FloatArray,
) -> None:  # fmt: skip
    """Add the entries first … last − 1 to the sums of a bin, and to its groups by output demand (factors of two). Idle
    adapters send nothing and never take a slot: they count as absent, except that slots have their rank."""
    table = fleet.table
    for j in range(first, last):
        i, part = index[j], share[j] * factor
        rank = table[i, 0]
        rate = table[i, 1] * part
        demand = rate * table[i, 3]
        sums[RATE] += rate
        sums[RATE_2] += rate * rate
        sums[RATE_MAX] = max(sums[RATE_MAX], rate)
        sums[RANK_MAX] = max(sums[RANK_MAX], rank)
        if table[i, 1] > IDLE_RATE:
            sums[COUNT] += 1.0
            sums[RANK] += rank
            sums[RANK_2] += rank * rank
        sums[INPUT] += rate * table[i, 2]
        sums[OUTPUT] += demand
        sums[INPUT_2] += rate * table[i, 4]
        sums[OUTPUT_2] += rate * table[i, 5]
        sums[PRODUCT] += rate * table[i, 6]
        sums[LOAD] += fleet.load[i] * part
        if table[i, 1] > IDLE_RATE:
            e = min(max(math.frexp(demand)[1] + MIDDLE_GROUP, 0), MAX_GROUPS - 1)
            by_load[0, e] += 1.0
            by_load[1, e] += rate
            by_load[2, e] += demand
            by_load[3, e] += rank


@njit(**INLINED)
def group(slots: float, by_load: FloatArray, groups: FloatArray) -> tuple[int, float]:
    """Write the means of the groups, heaviest first, into `groups` (see `TrafficTerms`).

    Returns their number and the req/s that the `slots` heaviest adapters get.
    """
    k = 0
    left, held = slots, 0.0
    for e in range(MAX_GROUPS - 1, -1, -1):
        n = by_load[0, e]
        if n > 0.0:
            held += by_load[1, e] * min(1.0, left / n)
            left = max(0.0, left - n)
            for q in range(4):
                groups[q, k] = by_load[q, e] / n
            groups[0, k] = n
            k += 1
    return k, held


@njit(**CALLED)
def fill(
    b: int, start: IntArray, end: IntArray, index: IntArray, share: FloatArray, factor: FloatArray,
    slots: FloatArray, slot_rank: FloatArray, kv_tokens: FloatArray, fleet: FleetArrays, room: FloatArray,
    out: FloatArray,
) -> None:  # fmt: skip
    """Write the features (`packer.predictors.features.FEATURES`) of bin b of n into `out` float64 (≥ F,).

    Call it for bins in order: if bin b extends the slice of bin b − 1 at the same factor, only the additional entries
    are summed.

    Arrays: start, end int64 (n,): each bin's slice of index int64 (nnz,), the adapters, and of share float64 (nnz,),
    the parts of their rates that come to the bin; factor float64 (n,) multiplies these rates; slots, slot_rank,
    kv_tokens float64 (n,); room float64 `ROOM`: its last two rows are left to the caller.
    """
    _table, law, paper, engine, _load = fleet
    by_load, groups, sums, vector = room[:4], room[4:SUMS], room[SUMS], room[10]
    first = start[b]
    if b > 0 and start[b - 1] == first and end[b - 1] <= end[b] and factor[b - 1] == factor[b]:
        first = end[b - 1]
    else:
        for e in range(MAX_GROUPS):
            sums[e] = 0.0
            for q in range(4):
                by_load[q, e] = 0.0
    gather(first, end[b], index, share, factor[b], fleet, by_load, sums)
    n, rate, demand = sums[COUNT], sums[RATE], sums[OUTPUT]
    if n > 0.0:
        k, held_rate = group(slots[b], by_load, groups)
        rank, rank_2, largest_rate = sums[RANK] / n, sums[RANK_2] / n, sums[RATE_MAX]
    else:  # all are idle: as one adapter of the largest rank
        n, k, held_rate, largest_rate, rank = 1.0, 1, rate, rate, sums[RANK_MAX]
        rank_2 = rank * rank
        groups[0, 0], groups[1, 0], groups[2, 0], groups[3, 0] = n, rate, demand, rank
    top_share = held_rate / rate
    prompt, output = sums[INPUT] / rate, demand / rate
    input_var = max(0.0, sums[INPUT_2] / rate - prompt * prompt)
    output_var = max(0.0, sums[OUTPUT_2] / rate - output * output)
    offered = rate * (prompt + output)
    # A running request holds its prompt, on average half of its output, and a last block that is half full.
    held = (sums[PRODUCT] + 0.5 * sums[OUTPUT_2]) / demand + 0.5 * engine[2]
    load_ms = engine[4] + engine[5] * rank
    # Adapters that host memory can't hold come from disk.
    if n > engine[3]:
        load_ms += (engine[6] + engine[7] * rank) * (1.0 - engine[3] / n)
    places = max(engine[3], slots[b])
    server = ServerTerms(law, paper, engine[8:], slots[b], slot_rank[b], load_ms, places, vector)
    traffic = TrafficTerms(n, prompt, output, held, demand, groups, k)

    fits = max(kv_tokens[b], 1.0) / held
    # B requests need B tokens and B / output prompts of a step's token budget, engine[0].
    largest = max(min(fits, engine[1], engine[0] * output / (prompt + output)), TINY)
    best, best_batch = capacity(server, traffic, largest)
    use = demand / best
    batch = operating_batch(server, traffic, best_batch) if use < 1.0 else best_batch
    step_ms, adapters = step(server, traffic, batch, 0.0)
    wait_s = slot_wait(server, traffic, step_ms * 1e-3)
    # Requests that the equilibrium can't serve accumulate, up to the client's limit.
    lost = max(0.0, 1.0 - 1.0 / use) + min(wait_s, HORIZON_S) / HORIZON_S
    # A queue that grows from empty is, on average, half as long as at the end.
    waiting = min(CLIENT_CEILING, rate * 0.5 * HORIZON_S * min(1.0, lost))
    busy_use = use
    if lost > 0.0:
        busy_ms = step(server, traffic, best_batch, waiting)[0]
        busy_use = demand * busy_ms / (1e3 * best_batch)
    mean_rate = rate / n
    out[0], out[1] = n, rate
    out[2] = math.sqrt(max(0.0, sums[RATE_2] / n - mean_rate * mean_rate))
    out[3] = sums[RANK_MAX]
    out[4] = rank
    out[5] = math.sqrt(max(0.0, rank_2 - rank * rank))
    out[6], out[7] = slots[b], slot_rank[b]
    out[8], out[9], out[10] = offered, prompt, output
    out[11] = math.sqrt(input_var) / prompt
    out[12] = math.sqrt(output_var) / output
    out[13] = kv_tokens[b]
    out[14] = largest_rate / rate
    out[15] = top_share
    out[16] = slots[b] / n
    out[17], out[18] = held, fits
    out[19] = best * (prompt + output) / output
    out[20], out[21], out[22] = use, busy_use, batch
    out[23] = batch / fits
    out[24] = adapters
    out[25] = mixture(traffic, batch)[0] / slots[b]
    out[26], out[27] = step_ms, wait_s
    out[28] = output * step_ms * 1e-3
    out[29] = waiting
    out[30] = min(1.0, 1.0 / busy_use)


@njit(**ENGINE_FLAGS)
def fill_all(
    start: IntArray, end: IntArray, index: IntArray, share: FloatArray, factor: FloatArray, slots: FloatArray,
    slot_rank: FloatArray, kv_tokens: FloatArray, fleet: FleetArrays, room: FloatArray, out: FloatArray,
) -> None:  # fmt: skip
    """Call `fill` for each bin and write the features into `out` float64 (n, F)."""
    for b in range(slots.size):
        fill(b, start, end, index, share, factor, slots, slot_rank, kv_tokens, fleet, room, out[b])
