"""Lower bounds on the GPUs, or the price, of any plan. This is the only place where a plan gets its bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from packer.plan import Plan, Status
from packer.profile import Profile
from packer.solvers.backbone import load_bound, mixed_bound
from packer.solvers.base import Bound, Problem
from packer.solvers.by_model import parts
from packer.solvers.columns.estimate import estimated

ONE_GPU = "at least one server"
TWO = "at least two servers, of which one may be lost"


def prove(
    problem: Problem, plan: Plan, *, known: Bound | None = None, simulated: bool = True, search: Problem | None = None
) -> Bound | None:
    """The best bound on GPUs, or on their price per hour: from a solver, by load alone, or from a search.

    The bound by load is the twin's. It holds for plans that the twin evaluated, or confirmed at the rates as given. For
    plans of a predictor that imitates the twin it is an estimate. It says nothing about other predictors.
    If the objective counts neither GPUs nor prices, only a known bound is returned. None if no bound is known.

    `plan`: a plan at hand, whose GPUs or price refute higher bounds. `known`: a solver's bound.
    `simulated`: also simulate an overloaded server, if the twin simulated the plan.
    `search`: the problem in which a search for fuller servers gives an estimate; None: no search.
    """
    counts = problem.objective.minimises == "gpus"
    if problem.objective.fixed_gpus or not (counts or problem.objective.minimises == "price"):
        return known
    best, most = known, next(iter(plan.objective_value), 0.0)
    if known is None or not counts or (not known.proven and known.value == most):
        found = [_by_load(part.problem, plan, most, simulated) for part in parts(problem)]
        source = " + ".join(dict.fromkeys(each.source for each in found))
        load = Bound(float(sum(each.value for each in found)), source, all(each.proven for each in found))
        # It is above the plan if trained predictors are more optimistic than the twin, or adapters are unplaced.
        if load.value <= most + 1e-9 and (known is None or load.value >= known.value):
            best = load
    low = 0.0 if best is None else best.value
    return (None if search is None else estimated(search, low, most)) or best


def bounded(problem: Problem, plan: Plan, *, simulated: bool = True, search: Problem | None = None) -> Plan:
    """The plan with the bound that `prove` finds, "optimal" if it attains a proven one."""
    if not plan.bins:
        return plan
    own = plan.lower_bound
    known = None if own is None else Bound(own, plan.bound_source, plan.bound_proven)
    found = prove(problem, plan, known=known, simulated=simulated, search=search)
    return plan if found == known else told(problem, plan, found)


def told(problem: Problem, plan: Plan, bound: Bound | None) -> Plan:
    """The plan with this bound, "optimal" if it attains a proven one; unchanged without a bound."""
    if bound is None:
        return plan
    new = replace(plan, lower_bound=bound.value, bound_source=bound.source, bound_proven=bound.proven)
    return closed(problem, new)


def _by_load(problem: Problem, plan: Plan, most: float, simulated: bool) -> Bound:
    """A bound for one base model: by load alone, or else the trivial bound of one server. If one may be lost, it comes
    on top of what the load takes then: `recommend` keeps the limits without the margin."""
    evaluator = problem.evaluator
    proven = not evaluator.imitates_twin
    least = min(map(problem.objective.weight, problem.profiles))
    more = plan.spare * least
    trivial = Bound(least + more, TWO if more else ONE_GPU, proven=True)
    if not evaluator.twin_based or most <= trivial.value:
        return trivial
    margins = {profile: evaluator.margin_of(profile) for profile in problem.profiles}
    none, simulated = dict.fromkeys(margins, 0.0), simulated and (plan.verified is not None or proven)
    value = _load_bound(problem, margins, simulated=simulated)
    if more:
        left = margins if problem.objective.spare else none
        value = max(value, more + _load_bound(problem, left, simulated=simulated))
    if value <= trivial.value:
        return trivial
    if plan.verified and not proven:  # without the margin and the loss, which the twin did not simulate
        proven = _load_bound(problem, none) >= value
    source = "load alone, by the twin"
    return Bound(value, source if proven else f"estimate: {source}", proven)


def _load_bound(problem: Problem, margins: Mapping[Profile, float], *, simulated: bool = True) -> float:
    """The bound by load, in GPUs or price. `simulated`: also simulate an overloaded server."""
    weights = {profile: problem.objective.weight(profile) for profile in problem.profiles}
    if len(weights) == 1:
        profile, stable = problem.profile, problem.objective.stable
        servers = load_bound(problem.workload, profile, margins[profile], simulated=simulated, stable=stable)
        return servers * weights[profile]
    return rounded(problem, mixed_bound(problem.workload, weights, margins))


def rounded(problem: Problem, bound: float) -> float:
    """The bound, rounded up to a whole number if the objective counts GPUs."""
    return float(math.ceil(bound - 1e-6)) if problem.objective.minimises == "gpus" else bound


def closed(problem: Problem, plan: Plan) -> Plan:
    """The plan, "optimal" if it is feasible and attains a proven bound."""
    if plan.status is not Status.FEASIBLE or plan.lower_bound is None or not plan.bound_proven:
        return plan
    optimal = problem.objective.attained(plan.objective_value, plan.lower_bound)
    return replace(plan, status=Status.OPTIMAL) if optimal else plan
