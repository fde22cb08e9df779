"""Random placement: a baseline of arXiv 2602.24044 that any method must beat."""

from __future__ import annotations

import numpy as np

from packer.arrays import distinct
from packer.solvers.base import Problem, Solution
from packer.solvers.slots import SlotSearch
from packer.solvers.support import gpus_to_use, one_type


class RandomPlacement:
    """A uniformly random GPU for each adapter, and uniform `max_loras` from 1 to the GPU's adapters. Seeded."""

    name = "random"
    spreads = True
    supports = staticmethod(one_type)

    def solve(self, problem: Problem) -> Solution:
        """Bins that got at least one adapter."""
        rng = np.random.default_rng(problem.seed)
        gpu = rng.integers(gpus_to_use(problem), size=len(problem.workload))
        slots = SlotSearch(problem)
        bins = []
        for k in distinct(gpu).tolist():
            part = np.flatnonzero(gpu == k).tolist()
            bins.append(slots.make(part, int(rng.integers(1, len(part) + 1))))
        return Solution(tuple(bins))
