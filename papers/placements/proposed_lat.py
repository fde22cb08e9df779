"""ProposedLat: the latency-oriented placement of arXiv 2602.24044, section 8.4.4."""

from __future__ import annotations

import numpy as np

from packer.solvers.base import Problem, Solution
from packer.solvers.order import levelled
from packer.solvers.reasons import listed
from packer.solvers.slots import SlotSearch
from packer.solvers.support import gpus_to_use, one_type
from packer.words import counted


class ProposedLat:
    """Each adapter, in the fleet's order, to the GPU with the lowest sum of rates; a slot for each adapter.

    The predictor then evaluates all servers. If one of them breaks the goal, for example starves or has a memory
    error, the whole placement is refused: the paper tries no other slots.
    """

    name = "proposed-lat"
    spreads = True
    supports = staticmethod(one_type)

    def solve(self, problem: Problem) -> Solution:
        """One bin per GPU, or none if one of them does not hold."""
        slots, order = SlotSearch(problem), np.arange(len(problem.workload))
        parts = levelled(order, problem.workload.rates, gpus_to_use(problem))
        bins = tuple(slots.make(part, len(part)) for part in parts)
        failed = [item for item, holds in zip(bins, slots.holds(bins), strict=True) if not holds]
        if not failed:
            return Solution(bins)
        reason = (
            f"with a slot for each adapter the goal breaks on {len(failed)} of {counted(len(bins), 'server')}, the "
            f"first with {listed(problem.workload, failed[0].adapters)}. "
            "What would help: --solver spread-refined, which tries other slots and moves adapters, or more --gpus"
        )
        return Solution((), tuple(order.tolist()), (reason,))
