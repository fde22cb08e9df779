"""`bounds`: greedy's plan and how many GPUs a fleet needs at the least."""

from __future__ import annotations

from packer.solvers.base import Problem, Solution, start
from packer.solvers.columns.exact import ExactSearch
from packer.solvers.limit import within_limit
from packer.solvers.support import counts_gpus


class Bounds:
    """Greedy's plan with the bound of few prices: a quick answer to "how good is it at least?".

    Where every bin can be evaluated, it is a plan of the fewest GPUs.
    """

    name = "bounds"

    def supports(self, problem: Problem) -> str | None:
        """Objectives that count GPUs of one type; no replicas, no replayed traces."""
        return counts_gpus(problem)

    def solve(self, problem: Problem) -> Solution:
        """The start's bins, or fewer, and the bound: proven where every bin could be evaluated."""
        first = start(problem)
        if first.unplaced:
            return within_limit(problem, first)
        search = ExactSearch(problem, first.bins)
        search.run(bound_alone=True)
        return search.solution(first)
