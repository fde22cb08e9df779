"""How many GPUs, or which price, any plan takes at the least: the one place where a plan gets its bound."""

from __future__ import annotations

import math
from dataclasses import replace

from packer.plan import Plan, Status
from packer.solvers.backbone import load_bound, mixed_bound
from packer.solvers.base import Problem
from packer.solvers.by_model import parts

ONE_GPU = "at least one GPU"


def bounded(problem: Problem, plan: Plan, *, simulated: bool = True) -> Plan:
    """The plan with a bound by load alone, where its solver gave none or an unproven one that it attains.

    The bound is the twin's: it holds for plans that the twin evaluated or confirmed (the latter at the rates as
    given), for those of a predictor that imitates it it is an estimate, and it says nothing about other
    predictors. `simulated`: also by an overloaded twin, where that does not take longer than the plan.
    """
    minimises = problem.objective.minimises
    counts = minimises in ("gpus", "price") and not problem.objective.fixed_gpus
    own, value = plan.lower_bound, next(iter(plan.objective_value), 0.0)
    settled = own is not None and minimises == "gpus" and (plan.bound_proven or own != value)
    if not counts or not plan.bins or settled:
        return plan
    if plan.n_gpus == 1 and minimises == "gpus":
        return _with(problem, plan, 1.0, ONE_GPU, proven=True)
    found = [_by_load(part.problem, plan, simulated) for part in parts(problem)]
    bound = float(sum(value for value, _, _ in found))
    source = " + ".join(dict.fromkeys(source for _, source, _ in found))
    # Beyond the plan: trained predictors can be more optimistic than the twin, or adapters are unplaced.
    if bound > value + 1e-9 or (own is not None and bound < own):
        return plan
    return _with(problem, plan, bound, source, proven=all(proven for _, _, proven in found))


def _by_load(problem: Problem, plan: Plan, simulated: bool) -> tuple[float, str, bool]:
    """A bound by load or by number of adapters for one base model, why, and whether it is proven."""
    evaluator = problem.evaluator
    proven = not evaluator.imitates_twin
    trivial = min(map(problem.objective.weight, problem.profiles)), ONE_GPU, True
    if not evaluator.twin_based:
        return trivial
    bound = _load_bound(
        problem, evaluator.margin, simulated=simulated and (plan.verified is not None or proven)
    )
    if bound <= trivial[0]:
        return trivial
    if plan.verified and not proven:  # without the margin, which the twin did not simulate
        proven = _load_bound(problem, 0.0) >= bound
    source = "load alone, by the twin"
    return bound, source if proven else f"estimate: {source}", proven


def _load_bound(problem: Problem, margin: float, *, simulated: bool = True) -> float:
    """By load, in GPUs or price; `simulated`: also with an overloaded twin."""
    weights = {profile: problem.objective.weight(profile) for profile in problem.profiles}
    if len(weights) == 1:
        stable = problem.objective.stable
        servers = load_bound(problem.workload, problem.profile, margin, simulated=simulated, stable=stable)
        return servers * weights[problem.profile]
    return rounded(problem, mixed_bound(problem.workload, weights, margin))


def _with(problem: Problem, plan: Plan, bound: float, source: str, *, proven: bool) -> Plan:
    return closed(problem, replace(plan, lower_bound=bound, bound_source=source, bound_proven=proven))


def rounded(problem: Problem, bound: float) -> float:
    """A bound on a number of GPUs is a whole number."""
    return float(math.ceil(bound - 1e-6)) if problem.objective.minimises == "gpus" else bound


def closed(problem: Problem, plan: Plan) -> Plan:
    """The plan, "optimal" if it is feasible and attains a proven bound."""
    if plan.status is not Status.FEASIBLE or plan.lower_bound is None or not plan.bound_proven:
        return plan
    optimal = problem.objective.attained(plan.objective_value, plan.lower_bound)
    return replace(plan, status=Status.OPTIMAL) if optimal else plan
