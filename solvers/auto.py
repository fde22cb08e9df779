"""`auto`: greedy first, then column generation while the gap is open and time remains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packer.bin import Bin
from packer.solvers.base import Problem, Solution
from packer.solvers.confirm import confirmed_solution, mended
from packer.solvers.exact.solver import START_SHARE, ExactSearch
from packer.solvers.limit import within_limit
from packer.solvers.start import start
from packer.solvers.support import counts_gpus
from packer.solvers.verify import confirmed

_DEFAULT_S = 60.0
_EXACT_SHARE = 0.85
"""Of the time that greedy leaves; the rest is for the twin to confirm the plan."""


class Auto:
    """Never more GPUs than greedy; with a time limit, or Ctrl-C, the best plan so far.

    Without a time limit it takes at most about a minute beyond greedy.
    """

    name = "auto"

    def supports(self, problem: Problem) -> str | None:
        """Everything: what column generation can't take is left to greedy or, spread, to spread-refined."""
        return None

    def solve(self, problem: Problem) -> Solution:
        """The best plan found, with its bound where GPUs are counted."""
        if problem.objective.fixed_gpus:
            return start(problem, "spread-refined")
        timed = _limited(replace(problem, max_gpus=None))
        first = confirmed_solution(timed.with_share(START_SHARE), start)
        if counts_gpus(problem) is not None:
            return within_limit(problem, replace(first, details={**first.details, "refined": False}))
        if first.unplaced:
            return within_limit(problem, first)
        search = ExactSearch(timed.with_share(_EXACT_SHARE), first.bins)
        search.run()
        details: dict[str, object] = {"greedy_gpus": len(first.bins)}
        if len(search.bins) < len(first.bins):
            held, refused = _held(timed, search.bins)
            if held is None:
                details[refused] = len(search.bins)
            search.bins = held or first.bins
        search.problem = problem
        found = search.solution(first)
        return replace(found, details={**found.details, **details})


def _held(problem: Problem, bins: tuple[Bin, ...]) -> tuple[tuple[Bin, ...] | None, str]:
    """The bins of a smaller plan, mended where necessary; None if they don't hold, and why.

    A search finds the bins about which a trained predictor is wrong, so the twin has to confirm them.
    """
    evaluator = problem.evaluator
    if not evaluator.imitates_twin:
        return bins, ""
    if problem.out_of_time():
        return None, "not_confirmed_in_time"
    if not evaluator.confirms:
        return (bins if confirmed(problem, bins) else None), "refused_by_twin"
    found = problem.objective.admissible(evaluator.confirmed(problem.workload, bins))
    refused = np.flatnonzero(~found).tolist()
    return (mended(problem, bins, refused) if refused else bins), "refused_by_twin"


def _limited(problem: Problem) -> Problem:
    if problem.time_limit_s is not None:
        return problem
    elapsed = _DEFAULT_S - replace(problem, time_limit_s=_DEFAULT_S).remaining_s()
    return replace(problem, time_limit_s=elapsed + _DEFAULT_S)
