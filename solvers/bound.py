"""A lower bound on the number of GPUs, and a solution with one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from packer.solvers.base import Problem, Solution
from packer.solvers.limit import within_limit


@dataclass(frozen=True)
class Bound:
    """No plan has fewer than `value` GPUs; `source` is the argument in words.

    `certain`: the argument holds relative to what evaluates bins in the search, whatever a search for the heaviest bin
    may have missed. `provided`: it would be certain under this condition. `always`: it holds whatever evaluates bins.
    """

    value: int
    source: str
    certain: bool = False
    provided: str = ""
    always: bool = False

    def proven(self, problem: Problem) -> bool:
        """Whether it holds relative to what evaluates the plan, which may be another than evaluates the search."""
        return self.always or (self.certain and not problem.evaluator.confirms)

    def words(self, problem: Problem) -> str:
        """The argument, marked as an estimate where it is not proven."""
        if self.proven(problem):
            return self.source
        return f"estimate{f', {self.provided}' if self.provided else ''}: {self.source}"


def limited(problem: Problem, first: Solution, bound: Bound, details: dict[str, object]) -> Solution:
    """The solution with a bound; cut to the GPUs that there may be, and then infeasible."""
    # A bound of one GPU is trivial, and a plan at hand refutes a search that missed a bin.
    known = bound.value > 1 or len(first.bins) <= 1
    known &= bound.value <= len(first.bins) or bool(first.unplaced)
    found = replace(
        first,
        lower_bound=float(bound.value) if known else None,
        bound_source=bound.words(problem) if known else "",
        proven=known and bound.proven(problem),
        details={**first.details, **details},
    )
    cut = within_limit(problem, found)
    if problem.max_gpus is None or cut is found or bound.value <= problem.max_gpus:
        return cut
    necessary = f"At least {bound.value} GPUs are necessary ({bound.words(problem)})"
    return replace(cut, reasons=(*cut.reasons, necessary))
