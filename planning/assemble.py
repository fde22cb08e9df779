"""Build a plan from a solver's solution: evaluate it again, and add its status, bound and provenance."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.objectives.base import Objective
from packer.plan import Plan, Status
from packer.planning.prove import closed, rounded
from packer.profile import Profile, labelled
from packer.solvers.base import Problem, Solution
from packer.solvers.candidates import beyond_measured
from packer.solvers.confirm import holding
from packer.solvers.headroom import MOST_GPUS
from packer.twin.memory.policy import memory_error
from packer.twin.memory.starts import what_starts
from packer.version import __version__
from packer.words import counted


def assemble(
    problem: Problem, solution: Solution, solver: str, runtime_s: float, *, verify: bool = False
) -> Plan:
    """The plan of a checked solution, evaluated again at the rates as given.

    `verify`: the plan is verified later. Until then the figures of a plan that is `simulated_once` include the margin.
    """
    evaluator, goal = problem.evaluator, problem.objective
    once = verify and not solution.unplaced and simulated_once(problem, solution.bins)
    evaluations = (evaluator.judged if once else evaluator.report)(problem.workload, solution.bins)
    if once and not goal.holds(evaluations).all():
        evaluations = evaluator.report(problem.workload, solution.bins)
    holds = goal.holds(evaluations)
    if not holds.all():  # a bin that holds with the margin may be a percent slower without it
        held = goal.holds(evaluator.judged(problem.workload, solution.bins))
        holds |= held & holding(goal, evaluations)
    limits = dict(goal.limits)
    key = goal.key(problem.workload, solution.bins, evaluations) if solution.bins else ()
    bound = None if solution.lower_bound is None else rounded(problem, solution.lower_bound)
    status = Status.FEASIBLE if all(holds) and not solution.unplaced else Status.INFEASIBLE
    return closed(
        problem,
        Plan(
            workload=problem.workload,
            bins=solution.bins,
            evaluations=evaluations,
            status=status,
            objective=goal.name,
            solver=solver,
            predictor=evaluator.name,
            objective_value=key,
            lower_bound=bound,
            bound_proven=solution.proven and bound is not None,
            bound_source=solution.bound_source,
            margin=evaluator.largest_margin(solution.bins),
            moves=solution.moves,
            interrupted=problem.stop(),
            time_limit_reached=problem.remaining_s() <= 0,
            reasons=(
                *solution.reasons,
                *beyond_measured(problem.workload, solution.bins)[:8],
                *_broken_bins(problem, solution.bins, evaluations, holds.tolist()),
            ),
            unplaced=solution.unplaced,
            runtime_s=runtime_s,
            seed=problem.seed,
            versions=versions(problem.profiles),
            details={**solution.details, **({"limits": limits} if limits else {})},
        ),
    )


def simulated_once(problem: Problem, bins: Sequence[Bin]) -> bool:
    """Whether only the verification simulates a plan's servers at the rates as given, because the plan is large.

    The twin must have admitted the servers with the margin, and the objective must not need their figures.
    """
    goal = problem.objective
    plain = type(goal).key is Objective.key and not (goal.figures or goal.fixed_gpus or goal.spare)
    return plain and problem.evaluator.confirms and len(bins) > MOST_GPUS


def _broken_bins(
    problem: Problem, bins: Sequence[Bin], evaluations: Evaluations, holds: Sequence[bool]
) -> tuple[str, ...]:
    reasons = []
    for k, ok in enumerate(holds):
        if ok:
            continue
        row, bin_ = evaluations[k], bins[k]
        if row.memory_error:
            why = memory_error(bin_.profile, bin_.settings) or "memory error"
            ways = what_starts(bin_.profile, bin_.settings)
            reasons.append(f"server {k} does not start: {why}. What would start: {ways}")
        elif row.starved:
            reasons.append(
                f"server {k} starves: the load of {counted(len(bin_.adapters), 'adapter')} is "
                f"{row.offered_tok_s:,.0f} tok/s, {row.total_token_throughput:,.0f} are served. "
                "What would help: more GPUs"
            )
        else:
            limits = problem.objective.limits.items()
            broken = [
                f"{key} {value:,.{0 if top >= 10.0 else 2}f} > {top:g}"
                for key, top in limits
                if (value := getattr(row, key)) > top
            ]
            broken = [text for text in broken if not text.startswith("slo_used")] or broken
            name = problem.objective.name
            reasons.append(
                f"server {k} breaks a limit of the objective {name!r}{': ' * bool(broken)}{', '.join(broken)}"
            )
    return tuple(reasons)


def versions(profiles: Sequence[Profile]) -> dict[str, str]:
    """The versions that determine a result: packer, Python, and each profile's fingerprint."""
    prints = {f"profile {label}": profile.fingerprint for profile, label in labelled(profiles).items()}
    return {"packer": __version__, "python": platform.python_version(), **prints}
