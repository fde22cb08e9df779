"""`auto`: greedy first, then column generation while the gap is open and time remains."""

from __future__ import annotations

from dataclasses import replace

from packer.bin import Bin
from packer.solvers.base import Problem, Solution
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
        first = start(_limited(problem).with_share(START_SHARE))
        if counts_gpus(problem) is not None:
            return within_limit(problem, replace(first, details={**first.details, "refined": False}))
        if first.unplaced:
            return within_limit(problem, first)
        timed = _limited(replace(problem, max_gpus=None))
        search = ExactSearch(timed.with_share(_EXACT_SHARE), first.bins)
        search.run()
        details: dict[str, object] = {"greedy_gpus": len(first.bins)}
        refused = _refused(problem, first.bins, search.bins)
        if refused:
            details[refused] = len(search.bins)
            search.bins = first.bins
        search.problem = problem
        found = search.solution(first)
        return replace(found, details={**found.details, **details})


def _refused(problem: Problem, first: tuple[Bin, ...], bins: tuple[Bin, ...]) -> str:
    """Why a smaller plan is not taken, "" if it is.

    A search finds the bins about which a trained predictor is wrong, so the twin has to confirm them.
    """
    if len(bins) >= len(first) or not problem.evaluator.imitates_twin:
        return ""
    if problem.out_of_time():
        return "not_confirmed_in_time"
    return "" if confirmed(problem, bins) else "refused_by_twin"


def _limited(problem: Problem) -> Problem:
    if problem.time_limit_s is not None:
        return problem
    elapsed = _DEFAULT_S - replace(problem, time_limit_s=_DEFAULT_S).remaining_s()
    return replace(problem, time_limit_s=elapsed + _DEFAULT_S)
