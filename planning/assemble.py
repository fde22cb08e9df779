"""A plan from what a solver found: evaluated anew, with its status, bound and provenance."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import replace

from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.objectives.base import Objective
from packer.plan import Plan, Status
from packer.profile import Profile
from packer.solvers.backbone import load_bound, mixed_bound
from packer.solvers.base import Problem, Solution
from packer.solvers.by_model import parts
from packer.solvers.candidates import beyond_measured
from packer.solvers.headroom import MOST_GPUS
from packer.solvers.verify import keeps_limits
from packer.twin.memory.policy import memory_error
from packer.twin.memory.starts import what_starts
from packer.version import __version__
from packer.words import counted

ONE_GPU = "at least one GPU"


def assemble(
    problem: Problem, solution: Solution, solver: str, runtime_s: float, *, verify: bool = False
) -> Plan:
    """The plan of a checked solution, evaluated anew at the rates as given.

    `verify`: it will be verified, which gives the figures of `simulated_once`: they are those with the margin so far.
    """
    evaluator, goal = problem.evaluator, problem.objective
    once = verify and not solution.unplaced and simulated_once(problem, solution.bins)
    evaluations = (evaluator.confirmed if once else evaluator.report)(problem.workload, solution.bins)
    if once and not goal.admissible(evaluations).all():
        evaluations = evaluator.report(problem.workload, solution.bins)
    admissible = goal.admissible(evaluations)
    if not admissible.all():  # without the margin, a bin that holds with it may be a percent slower
        held = goal.admissible(evaluator.confirmed(problem.workload, solution.bins))
        admissible |= held & keeps_limits(goal, evaluations)
    limits = dict(goal.limits)
    key = goal.key(problem.workload, solution.bins, evaluations) if solution.bins else ()
    bound = None if solution.lower_bound is None else _rounded(problem, solution.lower_bound)
    status = Status.FEASIBLE if all(admissible) and not solution.unplaced else Status.INFEASIBLE
    return _closed(
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
            margin=evaluator.margin,
            moves=solution.moves,
            interrupted=problem.stop(),
            time_limit_reached=problem.remaining_s() <= 0,
            reasons=(
                *solution.reasons,
                *beyond_measured(problem.workload, solution.bins)[:8],
                *_inadmissible(problem, solution.bins, evaluations, admissible.tolist()),
            ),
            unplaced=solution.unplaced,
            runtime_s=runtime_s,
            seed=problem.seed,
            versions=versions(problem.profiles),
            details={**solution.details, **({"limits": limits} if limits else {})},
        ),
    )


def simulated_once(problem: Problem, bins: Sequence[Bin]) -> bool:
    """Whether a plan is so large that its servers are simulated at the rates as given by its verification alone.

    That is so where the twin admits them with the margin, and the objective needs no figures of them.
    """
    goal = problem.objective
    plain = type(goal).key is Objective.key and not (goal.figures or goal.fixed_gpus or goal.spare)
    return plain and problem.evaluator.confirms and len(bins) > MOST_GPUS


def _closed(problem: Problem, plan: Plan) -> Plan:
    """The plan, "optimal" if it is feasible and attains a proven bound."""
    if plan.status is not Status.FEASIBLE or plan.lower_bound is None or not plan.bound_proven:
        return plan
    optimal = problem.objective.attained(plan.objective_value, plan.lower_bound)
    return replace(plan, status=Status.OPTIMAL) if optimal else plan


def bounded(problem: Problem, plan: Plan) -> Plan:
    """The plan with a bound by load alone, where its solver gave none or an unproven one that it attains.

    The bound is the twin's: it holds for plans that the twin evaluated or confirmed (the latter at the rates as
    given), for those of a predictor that imitates it it is an estimate, and it says nothing about other predictors.
    """
    minimises = problem.objective.minimises
    counts = minimises in ("gpus", "price") and not problem.objective.fixed_gpus
    own, value = plan.lower_bound, next(iter(plan.objective_value), 0.0)
    settled = own is not None and minimises == "gpus" and (plan.bound_proven or own != value)
    if not counts or not plan.bins or settled:
        return plan
    if plan.n_gpus == 1 and minimises == "gpus":
        return _bounded(problem, plan, 1, ONE_GPU, proven=True)
    found = [_by_load(part.problem, plan) for part in parts(problem)]
    bound = float(sum(value for value, _, _ in found))
    source = " + ".join(dict.fromkeys(source for _, source, _ in found))
    # Beyond the plan: trained predictors can be more optimistic than the twin, or adapters are unplaced.
    if bound > value + 1e-9 or (own is not None and bound < own):
        return plan
    return _bounded(problem, plan, bound, source, all(proven for _, _, proven in found))


def _by_load(problem: Problem, plan: Plan) -> tuple[float, str, bool]:
    """A bound by load or by number of adapters for one base model, why, and whether it is proven."""
    evaluator = problem.evaluator
    proven = not evaluator.imitates_twin
    trivial = min(map(problem.objective.weight, problem.profiles)), ONE_GPU, True
    if not evaluator.twin_based:
        return trivial
    bound = _load_bound(problem, evaluator.margin, simulated=plan.verified is not None or proven)
    if bound <= trivial[0]:
        return trivial
    if plan.verified and not proven:  # without the margin, which the twin did not simulate
        proven = _load_bound(problem, 0.0) >= bound
    source = "load alone, by the twin"
    return bound, source if proven else f"estimate: {source}", proven


def _load_bound(problem: Problem, margin: float, *, simulated: bool = True) -> float:
    """By load, in GPUs or price; `simulated`: also with an overloaded twin, else it would take longer than the plan."""
    weights = {profile: problem.objective.weight(profile) for profile in problem.profiles}
    if len(weights) == 1:
        stable = problem.objective.stable
        servers = load_bound(problem.workload, problem.profile, margin, simulated=simulated, stable=stable)
        return servers * weights[problem.profile]
    return _rounded(problem, mixed_bound(problem.workload, weights, margin))


def _bounded(problem: Problem, plan: Plan, bound: float, source: str, proven: bool) -> Plan:
    return _closed(problem, replace(plan, lower_bound=float(bound), bound_source=source, bound_proven=proven))


def _rounded(problem: Problem, bound: float) -> float:
    """A bound on a number of GPUs is a whole number."""
    return float(math.ceil(bound - 1e-6)) if problem.objective.minimises == "gpus" else bound


def _inadmissible(
    problem: Problem, bins: Sequence[Bin], evaluations: Evaluations, admissible: Sequence[bool]
) -> tuple[str, ...]:
    reasons = []
    for k, ok in enumerate(admissible):
        if ok:
            continue
        row, bin_ = evaluations[k], bins[k]
        if row.memory_error:
            why = memory_error(bin_.profile, bin_.settings) or "memory error"
            ways = what_starts(bin_.profile, bin_.settings)
            reasons.append(f"GPU {k} does not start: {why}. What would start: {ways}")
        elif row.starved:
            reasons.append(
                f"GPU {k} starves: the load of {counted(len(bin_.adapters), 'adapter')} is "
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
                f"GPU {k} breaks a limit of the objective {name!r}{': ' * bool(broken)}{', '.join(broken)}"
            )
    return tuple(reasons)


def versions(profiles: Sequence[Profile]) -> dict[str, str]:
    """What decides a result: packer, Python, and each profile's fingerprint."""
    prints = {f"profile {profile.name}": profile.fingerprint for profile in profiles}
    return {"packer": __version__, "python": platform.python_version(), **prints}
