"""A lower bound on the number of GPUs, and a solution with one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from packer.solvers.base import Problem, Solution
from packer.solvers.limit import within_limit


@dataclass(frozen=True)
class Bound:
    """No plan has a smaller first entry of the objective's key than `value`: GPUs, or their price per hour.

    `source`: the argument in words. `proven`: it holds relative to what evaluates the plan; else it is an estimate.
    """

    value: float
    source: str
    proven: bool = False


def limited(problem: Problem, first: Solution, bound: Bound, details: dict[str, object]) -> Solution:
    """The solution with its bound, cut down to the GPUs available; a solution that is cut down is infeasible."""
    weight = problem.objective.weight(problem.profile)
    # A bound of one GPU is trivial. A bound above the plan is wrong: its search missed a bin.
    known = bound.value > weight or len(first.bins) <= 1
    known &= bound.value <= len(first.bins) * weight
    found = replace(
        first,
        lower_bound=bound.value if known else None,
        bound_source=bound.source if known else "",
        proven=known and bound.proven,
        details={**first.details, **details},
    )
    cut = within_limit(problem, found)
    if problem.max_gpus is None or cut is found or problem.objective.minimises != "gpus":
        return cut
    if bound.value <= problem.max_gpus:
        return cut
    necessary = f"At least {bound.value:.0f} GPUs are necessary ({bound.source})"
    return replace(cut, reasons=(*cut.reasons, necessary))
