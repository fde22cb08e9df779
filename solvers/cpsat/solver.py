"""`cpsat`: large-neighbourhood search with OR-Tools CP-SAT, starting from the plan of another solver."""

from __future__ import annotations

from dataclasses import dataclass, replace

from packer.moves import aligned, moves_of
from packer.solvers.base import Problem, Solution, start, start_refused
from packer.solvers.confirm import solution_that_holds
from packer.solvers.cpsat.search import NeighbourhoodSearch
from packer.solvers.limit import within_limit
from packer.solvers.support import plain

DEFAULT_S = 30.0  # Work of a search without a time limit, s.
_START_SHARE = 0.4
_WORK_PER_S = 0.06
"""Deterministic work of CP-SAT for each second of the limit; without other load, it takes about half of the limit."""


@dataclass(frozen=True)
class CpSat:
    """Free a few servers at a time, let CP-SAT pack their adapters again, and keep what the predictor admits.

    `first`: the solver whose plan is the start; the result is never worse. "": spread-refined for a fixed number of
    GPUs, replan for a running plan, mixed for several kinds of server, else greedy.
    """

    first: str = ""

    name = "cpsat"

    def supports(self, problem: Problem) -> str | None:
        """Objectives that minimise GPUs, prices, moves or latency; adapters stay whole. The solver whose plan is the
        start must take the problem, too."""
        minimises = problem.objective.minimises
        if minimises not in ("gpus", "price", "latency"):
            return f"it packs for GPUs, prices or latency, and the objective minimises {minimises}"
        refused = plain(replace(problem, profiles=problem.profiles[:1]))
        return refused or start_refused(problem, self.first or _usual(problem))

    def solve(self, problem: Problem) -> Solution:
        """The start, or a better plan."""
        timed = problem.within(DEFAULT_S)
        free = timed if problem.objective.fixed_gpus else replace(timed, max_gpus=None)
        name = self.first or _usual(problem)
        first = solution_that_holds(free.with_share(_START_SHARE), lambda posed: start(posed, name))
        if first.unplaced or not first.bins:
            return within_limit(problem, first)
        search = NeighbourhoodSearch(timed, first.bins)
        bins = search.run(_WORK_PER_S * (timed.time_limit_s or DEFAULT_S))
        details = {
            "first": name,
            "first_key": list(search.first.key[1:]),
            "neighbourhoods": search.neighbourhoods,
            "improvements": search.improvements,
            "servers_refused": search.cuts,
        }
        moves = None
        if problem.old_bins:
            bins = tuple(aligned(problem.old_bins, bins))
            moves = moves_of(problem.old_bins, bins)
        found = replace(first, bins=bins, moves=moves, details={**first.details, **details})
        if bins != first.bins and first.lower_bound is not None and not first.proven:
            found = replace(found, lower_bound=None, bound_source="")
        return within_limit(problem, found)


def _usual(problem: Problem) -> str:
    """The solver whose plan is the start if `first` names none."""
    if problem.objective.fixed_gpus:
        return "spread-refined"
    if problem.old_bins:
        return "replan"
    return "mixed" if len(problem.profiles) > 1 else "greedy"
