"""`auto`: greedy first, then proofs and refinements while the gap is open and time remains."""

from __future__ import annotations

from dataclasses import asdict, replace

from packer.solvers.base import Problem, Solution
from packer.solvers.cpsat.solver import CpSat, refine
from packer.solvers.exact.solver import ExactSearch
from packer.solvers.last_word import LEARNED, confirmed
from packer.solvers.start import counts_gpus, plain, start

_DEFAULT_S = 60.0
_EXACT_SHARE = 0.7


class Auto:
    """Never more GPUs than greedy; with a time limit, or Ctrl-C, the best plan so far.

    Without a time limit it takes at most about a minute beyond greedy.
    """

    name = "auto"

    def supports(self, problem: Problem) -> str | None:
        """Everything: what the refinements can't take is left to greedy or, spread, to spread-refined."""
        return None

    def solve(self, problem: Problem) -> Solution:
        """The best plan found, with its bound where GPUs are counted."""
        if problem.objective.fixed_gpus:
            if plain(problem) is not None:
                return start(problem, "spread-refined")
            return CpSat().solve(_limited(problem))
        if counts_gpus(problem) is not None:
            return replace(start(replace(problem)), details={"refined": False})
        first = start(problem)
        if first.unplaced:
            return first
        timed = _limited(replace(problem, max_gpus=None))
        # Column generation has its share of the time; what it leaves goes to the large neighbourhoods.
        elapsed = (timed.time_limit_s or _DEFAULT_S) - timed.remaining_s()
        share = elapsed + _EXACT_SHARE * max(0.0, timed.remaining_s())
        search = ExactSearch(replace(timed, time_limit_s=max(1e-3, share)), first.bins)
        search.run()
        details: dict[str, object] = {"greedy_gpus": len(first.bins)}
        if not search.closed and not timed.out_of_time():
            search.bins, statistics = refine(timed, search.bins, enough=search.bound.value)
            details.update(asdict(statistics))
        # A search finds the bins about which a learned judge is wrong: the twin has the last word on them.
        fewer = len(search.bins) < len(first.bins)
        if fewer and timed.predictor.name in LEARNED and not confirmed(timed, search.bins):
            details["refused_by_twin"] = len(search.bins)
            search.bins = first.bins
        search.problem = problem
        found = search.solution(first)
        return replace(found, details={**found.details, **details})


def _limited(problem: Problem) -> Problem:
    if problem.time_limit_s is not None:
        return problem
    elapsed = _DEFAULT_S - replace(problem, time_limit_s=_DEFAULT_S).remaining_s()
    return replace(problem, time_limit_s=elapsed + _DEFAULT_S)
