"""`auto`: greedy first, then column generation while the gap is open and time remains."""

from __future__ import annotations

from dataclasses import replace

from packer.solvers.base import Problem, Solution, start, start_refused
from packer.solvers.columns.exact import START_SHARE, ExactSearch
from packer.solvers.confirm import all_hold, holds_in_twin, solution_that_holds
from packer.solvers.cpsat.solver import CpSat
from packer.solvers.greedy.balance import balanced
from packer.solvers.limit import within_limit
from packer.solvers.support import counts_gpus

_DEFAULT_S = 60.0
_EXACT_SHARE = 0.85  # Share of the time after greedy for the exact search; in the rest the twin confirms the plan.


class Auto:
    """Never needs more GPUs than greedy; at the time limit or on Ctrl-C it returns the best plan so far.

    Without a time limit it ends after `_DEFAULT_S` of work (`packer.solvers.work`).
    """

    name = "auto"

    def supports(self, problem: Problem) -> str | None:
        """What greedy takes; of running plans and given numbers of GPUs what cpsat, replan or spread-refined takes."""
        refined = problem.objective.fixed_gpus or problem.old_bins
        return start_refused(problem, _refining(problem)) if refined else None

    def solve(self, problem: Problem) -> Solution:
        """The best plan found, with its bound if the objective counts GPUs."""
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
            if searches:  # keep the bound of the first search, and start from its patterns
                search.resume(searches[0])
            else:
                search.run()
            searches.append(search)
            # even out the load: the twin would refuse the fullest bins
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
    """The solver for a running plan or a fixed number of GPUs: cpsat where it is better (benchmarks/solvers)."""
    latency = getattr(problem.objective, "statistic", "mean") == "worst"
    if CpSat().supports(problem) is None and (problem.old_bins or latency):
        return "cpsat"
    return "replan" if problem.old_bins else "spread-refined"


def _refused(problem: Problem, found: Solution) -> str:
    """Why a smaller plan is rejected, "" if it is not: searches find bins about which trained predictors are wrong."""
    evaluator = problem.evaluator
    if not evaluator.imitates_twin:
        return ""
    if problem.out_of_time():
        return "not_confirmed_in_time"
    holds = all_hold(problem, found) if evaluator.confirms else holds_in_twin(problem, found.bins)
    return "" if holds else "refused_by_twin"
