"""Min-cost flow from adapters to GPUs: balances load and limits churn, as some routers in production do."""

from __future__ import annotations

import math

import numpy as np

from packer.arrays import FloatArray
from packer.solvers.backbone import backbone_tok_s
from packer.solvers.base import Problem, Solution
from packer.solvers.slots import SlotSearch
from packer.solvers.support import gpus_to_use, one_type

_STAY_BONUS = 0.05  # Bonus for a GPU that already runs the adapter, as a share of the backbone's throughput.


class Flow:
    """Min-cost flow from adapters, one unit per replica, to GPUs, whose cost is their load.

    Each round assigns as many units as there are GPUs, the heaviest first, one to each GPU. The cost of a GPU is its
    load so far, minus a bonus if it already runs the adapter. The placement ignores starvation and memory.
    """

    name = "flow"
    spreads = True
    supports = staticmethod(one_type)

    def solve(self, problem: Problem) -> Solution:
        """Bins that got at least one adapter."""
        n = gpus_to_use(problem)
        capacity = backbone_tok_s(problem.workload, problem.profile)
        loads = problem.workload.offered_tok_s_by_adapter
        copies = [min(n, problem.max_replicas, max(1, math.ceil(load / capacity))) for load in loads.tolist()]
        per_copy = loads / np.array(copies)
        units = sorted((i for i, count in enumerate(copies) for _ in range(count)), key=lambda i: (-per_copy[i], i))
        parts: list[list[int]] = [[] for _ in range(n)]
        used = np.zeros(n)
        for start in range(0, len(units), n):
            for i, k in _round(problem, units[start : start + n], used / capacity, parts):
                parts[k].append(i)
                used[k] += per_copy[i]
        slots = SlotSearch(problem)
        shares = [[1.0 / copies[i] for i in part] for part in parts]
        pairs = [(part, share) for part, share in zip(parts, shares, strict=True) if part]
        return Solution(tuple(slots.make(part, len(part), shares=share) for part, share in pairs))


def _round(problem: Problem, units: list[int], busy: FloatArray, parts: list[list[int]]) -> list[tuple[int, int]]:
    """(adapter, GPU) for each unit of a round, by an assignment: the flow if each GPU takes one unit."""
    from scipy.optimize import linear_sum_assignment

    cost = np.array([[math.inf if i in part else 0.0 for part in parts] for i in units]) + busy
    for k, old in enumerate(problem.old_bins[: len(parts)]):
        cost[[i in old.adapters for i in units], k] -= _STAY_BONUS
    rows, columns = linear_sum_assignment(cost)
    return [(units[row], column) for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]
