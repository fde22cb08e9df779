"""Spread: put each adapter on the least loaded GPU, by falling rate (ProposedLat of arXiv 2602.24044)."""

from __future__ import annotations

import numpy as np

from packer.solvers.base import Problem, Solution
from packer.solvers.order import levelled
from packer.solvers.slots import SlotSearch
from packer.solvers.support import gpus_to_use, one_type


def spread_parts(problem: Problem) -> list[list[int]]:
    """Adapters by falling rate, each on the GPU with the lowest sum of rates."""
    rates = problem.workload.rates
    return levelled(np.argsort(-rates, kind="stable"), rates, gpus_to_use(problem))


class Spread:
    """Evens out the rates over all GPUs given; every adapter has its own slot."""

    name = "spread"
    spreads = True
    supports = staticmethod(one_type)

    def solve(self, problem: Problem) -> Solution:
        """One bin per GPU."""
        slots = SlotSearch(problem)
        return Solution(tuple(slots.make(part, len(part)) for part in spread_parts(problem)))
