"""A solver: next fit, one adapter at a time, in the order of the workload."""

from __future__ import annotations

from packer.bin import Bin
from packer.solvers.base import Problem, Solution
from packer.solvers.slots import SlotSearch


class NextFit:
    """Adds the next adapter to the current GPU while the predictor agrees, else opens another one."""

    name = "next-fit"

    def supports(self, problem: Problem) -> str | None:
        """It does not spread over a given number of GPUs."""
        return "it chooses how many GPUs to use" if problem.objective.fixed_gpus else None

    def solve(self, problem: Problem) -> Solution:
        """Bins in the order in which they were filled."""
        slots = SlotSearch(problem)
        bins: list[Bin] = []
        left: list[int] = []
        for i in range(len(problem.workload)):
            grown = slots.feasible([*bins[-1].adapters, i], hint=bins[-1].max_loras) if bins else None
            if grown is not None:
                bins[-1] = grown
                continue
            full = problem.max_gpus is not None and len(bins) >= problem.max_gpus
            alone = None if full else slots.feasible([i])
            if alone is not None:
                bins.append(alone)
            else:
                left.append(i)
        names = ", ".join(problem.workload.names[i] for i in left[:5])
        reasons = (f"no room for {len(left)} adapters ({names}, …)",) if left else ()
        return Solution(tuple(bins), tuple(left), reasons)
