"""`auto`: greedy first, then column generation while the gap is open and time remains."""

from __future__ import annotations

from dataclasses import replace

from packer.solvers.base import Problem, Solution, start
from packer.solvers.columns.exact import START_SHARE, ExactSearch
from packer.solvers.confirm import all_hold, holds_in_twin, solution_that_holds
from packer.solvers.cpsat.solver import CpSat
from packer.solvers.greedy.balance import balanced
from packer.solvers.limit import within_limit
from packer.solvers.support import counts_gpus

_DEFAULT_S = 60.0
_EXACT_SHARE = 0.85
"""Of the time that greedy leaves; the rest is for the twin to confirm the plan."""


class Auto:
    """Never more GPUs than greedy; with a time limit, or Ctrl-C, the best plan so far.

    Without a time limit it takes at most about a minute beyond greedy.
    """

    name = "auto"

    def supports(self, problem: Problem) -> str | None:
        """Everything: what column generation can't take is left to greedy, running plans and given GPUs to cpsat,
        replan or spread-refined."""
        return None

    def solve(self, problem: Problem) -> Solution:
        """The best plan found, with its bound where GPUs are counted."""
        if problem.objective.fixed_gpus or problem.old_bins:
            return start(problem, _refining(problem))
        timed = replace(problem, max_gpus=None).within(_DEFAULT_S)
        first = solution_that_holds(timed.with_share(START_SHARE), start)
        if counts_gpus(problem) is not None:
            return within_limit(problem, replace(first, details={**first.details, "refined": False}))
        if first.unplaced:
            return within_limit(problem, first)
        searches: list[ExactSearch] = []

        def smaller(posed: Problem) -> Solution:
            search = ExactSearch(posed, first.bins)
            if searches:  # the bound is that of the first, and its patterns are a start
                search.resume(searches[0])
            else:
                search.run()
            searches.append(search)
            # full to the brim in part, which the twin would refuse
            fewer = len(search.bins) < len(first.bins)
            return replace(first, bins=balanced(posed, search.bins) if fewer else first.bins)

        found = solution_that_holds(timed.with_share(_EXACT_SHARE), smaller)
        search = searches[0]
        details: dict[str, object] = {"greedy_gpus": len(first.bins)}
        refused = _refused(timed, found) if len(found.bins) < len(first.bins) else ""
        if refused:
            details[refused] = len(found.bins)
        search.bins, search.problem = first.bins if refused else found.bins, problem
        made = search.solution(first)
        return replace(made, details={**found.details, **made.details, **details})


def _refining(problem: Problem) -> str:
    """The solver for a running plan or a given number of GPUs: cpsat where it gains (benchmarks/solvers)."""
    latency = getattr(problem.objective, "statistic", "mean") == "worst"
    if CpSat().supports(problem) is None and (problem.old_bins or latency):
        return "cpsat"
    return "replan" if problem.old_bins else "spread-refined"


def _refused(problem: Problem, found: Solution) -> str:
    """Why a smaller plan is not taken, "" if it is: searches find the bins about which trained predictors are wrong."""
    evaluator = problem.evaluator
    if not evaluator.imitates_twin:
        return ""
    if problem.out_of_time():
        return "not_confirmed_in_time"
    holds = all_hold(problem, found) if evaluator.confirms else holds_in_twin(problem, found.bins)
    return "" if holds else "refused_by_twin"
