"""Spread: each adapter to the least loaded GPU (as ProposedLat of arXiv 2602.24044, by falling rate)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from packer.solvers.base import Problem, Solution
from packer.solvers.slots import SlotSearch
from packer.solvers.support import gpus_to_use, one_type


def spread_parts(problem: Problem, order: Sequence[int] | None = None) -> list[list[int]]:
    """Adapters in the given order, or by falling rate, each to the GPU with the lowest sum of rates."""
    rates = problem.workload.rates
    heap = [(0.0, k) for k in range(gpus_to_use(problem))]
    parts: list[list[int]] = [[] for _ in heap]
    for i in np.argsort(-rates, kind="stable").tolist() if order is None else order:
        total, k = heapq.heappop(heap)
        parts[k].append(i)
        heapq.heappush(heap, (total + float(rates[i]), k))
    return parts


class Spread:
    """Evens out the rates over all GPUs given; every adapter has its slot."""

    name = "spread"
    spreads = True
    supports = staticmethod(one_type)

    def solve(self, problem: Problem) -> Solution:
        """One bin per GPU."""
        slots = SlotSearch(problem)
        return Solution(tuple(slots.make(part, len(part)) for part in spread_parts(problem)))
