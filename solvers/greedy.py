"""The default solver: the paper's greedy with what it leaves on the table.

Against `greedy-paper` (arXiv 2602.24044, Algorithms 1 and 2): the largest admissible prefix is bisected, not
taken at the nearest testing point; every candidate of `max_loras` is tried before a GPU is closed; a closed
GPU is topped up with lighter adapters from further back in the queue; a set that fails goes to a fresh GPU;
an adapter too hot for one GPU is split over replicas where allowed, or reported with the rate it may have.
At the end the load is evened out over the GPUs, if they bear it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packer.solvers.balance import balanced
from packer.solvers.base import Problem, Solution
from packer.solvers.first_fit import FirstFit
from packer.solvers.greedy_paper import GreedyPaper
from packer.solvers.order import paper_order
from packer.solvers.probe import Probe
from packer.solvers.reasons import out_of_gpus


class Greedy:
    """First-fit decreasing with bisection; never needs more GPUs than `greedy-paper`, which it runs too."""

    name = "greedy"

    def supports(self, problem: Problem) -> str | None:
        """Any objective that chooses the number of GPUs."""
        if problem.objective.fixed_gpus:
            return "it chooses how many GPUs to use; for a fixed number take the solver spread"
        return None

    def solve(self, problem: Problem) -> Solution:
        """Bins in the order in which they were filled."""
        free = replace(problem, max_gpus=None)
        first_fit = FirstFit(free, paper_order(problem.workload))
        first_fit.run()
        found = Solution(tuple(first_fit.bins), tuple(first_fit.left), tuple(first_fit.reasons))
        found = _paper(free, found) or found
        if not found.unplaced:
            found = replace(found, bins=balanced(free, found.bins))
        return _within_limit(problem, found)


def _paper(problem: Problem, found: Solution) -> Solution | None:
    """The paper's plan, if it places every adapter on fewer GPUs; its slots are chosen again."""
    solver = GreedyPaper()
    limit = len(problem.workload) if found.unplaced else len(found.bins) - 1
    if limit < 1 or problem.out_of_time() or solver.supports(problem) is not None:
        return None
    plan = solver.solve(replace(problem, max_gpus=limit))
    if plan.unplaced:
        return None
    probe = Probe(problem)
    return replace(plan, bins=tuple(probe.best(bin_) for bin_ in plan.bins))


def _within_limit(problem: Problem, found: Solution) -> Solution:
    """At most `max_gpus` bins, those with the most load; the rest is unplaced."""
    limit = problem.max_gpus
    if limit is None or len(found.bins) <= limit:
        return found
    loads = np.array([bin_.offered_tok_s(problem.workload) for bin_ in found.bins])
    kept = sorted(np.argsort(-loads, kind="stable")[:limit].tolist())
    dropped = [bin_ for k, bin_ in enumerate(found.bins) if k not in set(kept)]
    left = sorted({i for bin_ in dropped for i in bin_.adapters})
    needed = None if found.unplaced else len(found.bins)
    reasons = (*found.reasons, *out_of_gpus(problem, left, needed))
    bins = tuple(found.bins[k] for k in kept)
    return replace(found, bins=bins, unplaced=tuple(sorted({*found.unplaced, *left})), reasons=reasons)
