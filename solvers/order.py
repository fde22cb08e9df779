"""The order in which adapters are packed."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from packer.arrays import FloatArray, IntArray, distinct
from packer.memo import Memo
from packer.solvers.classes import zigzag
from packer.workload import Workload

_GOLDEN = (5.0**0.5 - 1.0) / 2.0


@Memo
def paper_order(workload: Workload) -> IntArray:
    """Indices by rank, largest first; within a rank by rate in zigzag: highest, lowest, second highest, …

    arXiv 2602.24044, Algorithm 1. Equal rates keep their order.
    """

    def within(members: IntArray) -> IntArray:
        falling = members[np.argsort(-workload.rates[members], kind="stable")]
        return falling[zigzag(len(falling))]

    return _by_rank(workload, within)


def even_order(workload: Workload) -> IntArray:
    """Indices by rank, largest first; within a rank, any run of adapters has about the mix of loads of the rank.
    Golden-ratio steps through the adapters by falling load."""

    def within(members: IntArray) -> IntArray:
        return by_falling_load(workload, members)[np.argsort(golden(len(members)), kind="stable")]

    return _by_rank(workload, within)


def golden(n: int) -> IntArray:
    """The numbers below n, int64 (n,), ordered so that the first few are always spread over the whole range."""
    return np.argsort(np.arange(n) * _GOLDEN % 1.0, kind="stable")


def _by_rank(workload: Workload, within: Callable[[IntArray], IntArray]) -> IntArray:
    """Adapters by rank, largest first; `within` orders the adapters of one rank."""
    ranks = distinct(workload.ranks)[::-1]
    return np.concatenate([within(np.flatnonzero(workload.ranks == rank)) for rank in ranks]).astype(np.int64)


def by_falling_load(workload: Workload, adapters: IntArray) -> IntArray:
    """Adapters by falling load; equal loads by falling rank, so that equal adapters are adjacent."""
    loads, ranks = workload.offered_tok_s_by_adapter[adapters], workload.ranks[adapters]
    return adapters[np.lexsort((adapters, -ranks, -loads))]


def levelled(order: IntArray, loads: FloatArray, n: int) -> list[list[int]]:
    """Adapters in this order on `n` servers, each on the one with the least load so far."""
    heap = [(0.0, k) for k in range(n)]
    parts: list[list[int]] = [[] for _ in heap]
    for i, load in zip(order.tolist(), loads[order].tolist(), strict=True):
        total, k = heap[0]
        parts[k].append(i)
        heapq.heapreplace(heap, (total + load, k))
    return parts


def exchanged(parts: list[list[int]], loads: FloatArray) -> list[list[int]]:
    """Even out the loads of the parts: the fullest part gives an adapter to another part or exchanges one with it. Each
    step lowers the fuller of the two parts most; the search ends if no step lowers it by a thousandth."""
    found = [list(part) for part in parts]
    totals = np.array([loads[part].sum() for part in found])
    while len(found) > 1:
        k, best = int(totals.argmax()), (1e-3 * float(totals.max()), -1, 0, 0)
        for j in np.flatnonzero(totals < totals[k]).tolist():
            others = np.append(loads[found[j]], 0.0)  # the last entry: the part gets no adapter in return
            less = loads[found[k]][:, np.newaxis] - others
            # After the exchange, either part may be the fuller one.
            lowered = np.minimum(less, totals[k] - totals[j] - less)
            give, take = divmod(int(lowered.argmax()), lowered.shape[1])
            best = max(best, (float(lowered[give, take]), j, give, take))
        _, j, give, take = best
        if j < 0:
            break
        given = found[k].pop(give)
        found[k] += [found[j].pop(take)] if take < len(found[j]) else []
        found[j].append(given)
        totals[[k, j]] = [loads[found[each]].sum() for each in (k, j)]
    return found
