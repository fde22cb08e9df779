"""From a workload to a verified plan."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from packer import registry
from packer.bin import Bin, Evaluations
from packer.errors import IncompatibleError
from packer.objectives.api import load_objective
from packer.objectives.base import Objective
from packer.plan import Plan, Status
from packer.predictors.base import Predictor
from packer.profile import Profile
from packer.solvers.backbone import load_bound
from packer.solvers.base import Problem, Solution, Solver
from packer.solvers.judges import Judges, judges, rate_margin_for
from packer.solvers.start import COUNTING
from packer.solvers.verify import ask_twin, check
from packer.twin.memory.policy import memory_error
from packer.workload import Workload


def solve(
    workload: Workload,
    profile: Profile | Sequence[Profile],
    objective: str | Objective = "gpus",
    solver: str | Solver | None = None,
    predictor: str | Predictor = "twin",
    max_gpus: int | None = None,
    seed: int = 0,
    time_limit_s: float | None = None,
    max_replicas: int = 1,
    confidence: float | None = None,
    *,
    margin: float | None = None,
    old_plan: Plan | None = None,
    verify: bool = True,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """Plan a fleet: which adapter on which GPU, with which slots.

    Parameters
    ----------
    workload
        The fleet.
    profile
        The server, or several GPU types to choose from (objective "cost").
    objective
        Its name, with parameters where it has some ("slo:mean_ttft_ms=500"), or an `Objective`.
    solver, predictor
        A registered name, the path of a trained predictor, or an object. Without a solver: greedy, and
        spread-refined for objectives on a given number of GPUs.
    max_gpus
        Most GPUs that may be used; with an objective that spreads, their exact number.
    seed
        Of everything random.
    time_limit_s
        Wall-clock limit of the search; the best plan so far is returned.
    max_replicas
        Over how many GPUs one adapter may be split.
    confidence
        How sure the plan is to hold, given the profile's held-out errors: bins must stand every rate
        raised by `packer.twin.margin.rate_margin`. Figures are reported at the rates as given. With neither
        this nor a margin, 95 %, and more if the twin does not confirm the plan.
    margin
        That raise itself, instead of a confidence: 0.05 means 5 %, 0 takes the predictor at its word.
    old_plan
        A running plan to stay close to (objective "moves").
    verify
        Ask the twin with a fresh seed about the finished plan; `Plan.verified` has the answer.
    progress, stop
        See `packer.solvers.base.Problem`.

    Returns
    -------
    Plan
        `status` "infeasible", with `reasons`, when not every adapter could be served.

    Raises
    ------
    UnknownNameError, IncompatibleError, ValidationError
        The choices are unknown or don't fit together.
    VerificationError
        The solver broke the rules of a plan.
    """
    profiles = (profile,) if isinstance(profile, Profile) else tuple(profile)
    goal = load_objective(objective) if isinstance(objective, str) else objective
    if solver is None:
        solver = "spread-refined" if goal.fixed_gpus else "greedy"
    search: Solver = registry.load("solver", solver)() if isinstance(solver, str) else solver
    if old_plan is not None and hasattr(goal, "anchored"):
        goal = goal.anchored(_same_fleet_bins(old_plan, workload))
    chosen = rate_margin_for(profiles, confidence=confidence, margin=margin)
    judge = judges(predictor, profiles, goal, seed=seed, margin=chosen)
    problem = Problem(
        workload,
        profiles,
        goal,
        judge.search,
        max_gpus=max_gpus,
        max_replicas=max_replicas,
        seed=seed,
        time_limit_s=time_limit_s,
        old_bins=() if old_plan is None else _same_fleet_bins(old_plan, workload),
        progress=progress,
        stop=stop,
    )
    _check_fit(problem, search)
    plan = _planned(problem, search, judge)
    if not verify or plan.status is Status.INFEASIBLE:
        return plan
    plan = verified(plan, goal)
    if plan.verified or confidence is not None or margin is not None:
        return plan
    return _hardened(problem, search, judge, plan)


def _planned(problem: Problem, search: Solver, judge: Judges) -> Plan:
    """One search, checked and evaluated."""
    solution = search.solve(problem)
    check(problem, solution)
    return assemble(problem, solution, judge, search.name, time.monotonic() - problem.started)


def _hardened(problem: Problem, search: Solver, judge: Judges, first: Plan) -> Plan:
    """A plan that the twin confirms, found with a larger margin; the first one if there is none.

    Only where the margin was left to packer: predictors err, and who judges a plan is the twin. The bound
    stays that of the first margin, which is the weaker claim.
    """
    for k in range(1, HARDENING_STEPS + 1):
        if problem.out_of_time():
            break
        raised = judge.with_margin(judge.margin + k * HARDENING_STEP)
        plan = _planned(replace(problem, predictor=raised.search), search, raised)
        if plan.status is Status.INFEASIBLE:
            break
        plan = verified(plan, problem.objective)
        if plan.verified:
            bound, certain = first.lower_bound, first.bound_proven
            optimal = certain and _attained(problem, plan.objective_value, bound)
            return replace(
                plan,
                lower_bound=bound,
                bound_proven=certain,
                bound_source=first.bound_source,
                status=Status.OPTIMAL if optimal else Status.FEASIBLE,
                details={**plan.details, "margin_at_first": judge.margin},
            )
    return first


def _check_fit(problem: Problem, solver: Solver) -> None:
    supports = getattr(problem.objective, "supports", None)
    models = sorted({profile.model.name for profile in problem.profiles})
    if len(models) > 1:
        raise IncompatibleError(
            f"Expected GPU types that serve one base model, got profiles of {', '.join(models)}."
        )
    reason = supports(problem.profiles) if supports is not None else None
    if reason is not None:
        raise IncompatibleError(f"The objective {problem.objective.name!r} can't be used here: {reason}.")
    reason = solver.supports(problem)
    if reason is not None:
        raise IncompatibleError(
            f"The solver {solver.name!r} can't take this problem (objective "
            f"{problem.objective.name!r}): {reason}."
        )


def assemble(problem: Problem, solution: Solution, judge: Judges, solver: str, runtime_s: float) -> Plan:
    """The plan of a checked solution, evaluated anew at the nominal rates."""
    evaluations = judge.report(problem.workload, solution.bins)
    reasons = (*solution.reasons, *_inadmissible(problem, solution.bins, evaluations))
    whole = not solution.unplaced and bool(problem.objective.admissible(evaluations).all())
    key = problem.objective.key(problem.workload, solution.bins, evaluations) if solution.bins else ()
    solution = _bounded(problem, solution, judge.margin)
    bound = None if solution.lower_bound is None else _rounded(problem, solution.lower_bound)
    optimal = solution.proven and _attained(problem, key, bound)
    status = Status.INFEASIBLE if not whole else Status.OPTIMAL if optimal else Status.FEASIBLE
    return Plan(
        workload=problem.workload,
        bins=solution.bins,
        evaluations=evaluations,
        status=status,
        objective=problem.objective.name,
        solver=solver,
        predictor=judge.nominal.name,
        objective_value=key,
        lower_bound=bound,
        bound_proven=solution.proven and bound is not None,
        bound_source=solution.bound_source,
        margin=judge.margin,
        moves=solution.moves,
        interrupted=problem.stop(),
        time_limit_reached=problem.remaining_s() <= 0,
        reasons=reasons,
        unplaced=solution.unplaced,
        runtime_s=runtime_s,
        seed=problem.seed,
        versions=versions(problem.profiles),
        details=solution.details,
    )


def _attained(problem: Problem, key: tuple[float, ...], bound: float | None) -> bool:
    """Whether nothing is better than the key if the bound holds: later entries, too, are as low as can be."""
    # Where GPUs are counted, later entries count something, too: 0 can't be beaten.
    least = len(key) == 1 or (problem.objective.name in COUNTING and not any(key[1:]))
    return bound is not None and bool(key) and key[0] <= bound + 1e-9 and least


def _bounded(problem: Problem, solution: Solution, margin: float) -> Solution:
    """The solution with a bound by load alone, if its solver gave none and the objective counts GPUs.

    Also where the solver's own bound meets the plan without being certain: the load may settle it.
    """
    counts = problem.objective.name in COUNTING and len(problem.profiles) == 1
    if not counts or not solution.bins:
        return solution
    own, gpus = solution.lower_bound, len(solution.bins)
    if own is not None and (solution.proven or _rounded(problem, own) != gpus):
        return solution
    if gpus == 1:
        return replace(solution, lower_bound=1.0, bound_source=ONE_GPU, proven=True)
    bound = load_bound(problem.workload, problem.profile, margin)
    # Beyond the plan: the predictor is more hopeful than the twin, or adapters are unplaced.
    if bound > gpus or (own is not None and bound < gpus):
        return solution
    source = "load on GPUs without adapters, by the twin" if bound > 1 else ONE_GPU
    return replace(solution, lower_bound=float(bound), bound_source=source, proven=True)


def _rounded(problem: Problem, bound: float) -> float:
    """A bound on a number of GPUs is a whole number."""
    counts = not problem.objective.fixed_gpus and problem.objective.name in COUNTING
    return float(math.ceil(bound - 1e-6)) if counts else bound


HARDENING_STEP = 0.03
HARDENING_STEPS = 3
"""By how much the margin is raised, and how often, until the twin confirms the plan."""

ONE_GPU = "at least one GPU"


def _inadmissible(problem: Problem, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[str, ...]:
    reasons = []
    for k, ok in enumerate(problem.objective.admissible(evaluations).tolist()):
        row, bin_ = evaluations[k], bins[k]
        if ok:
            continue
        if row.memory_error:
            why = memory_error(bin_.profile, bin_.settings) or "memory error"
            reasons.append(f"GPU {k} does not start: {why}")
        elif row.starved:
            reasons.append(
                f"GPU {k} starves: {len(bin_.adapters)} adapters offer {row.offered_tok_s:,.0f} tok/s, "
                f"{row.total_token_throughput:,.0f} are served. What would help: more GPUs"
            )
        else:
            reasons.append(f"GPU {k} breaks a limit of the objective {problem.objective.name!r}")
    return tuple(reasons)


def verified(plan: Plan, objective: Objective | None = None, seed: int | None = None) -> Plan:
    """The plan with the twin's verdict with a fresh seed: at the nominal rates, and as the objective says.

    A plan in a file knows its objective by name only: without the objective, starvation and memory are checked.
    """
    chosen = plan.seed if seed is None else seed
    failures = ask_twin(plan.workload, plan.bins, seed=chosen, objective=objective)
    return replace(plan, verified=not failures, reasons=(*plan.reasons, *failures.values()))


def versions(profiles: Sequence[Profile]) -> dict[str, str]:
    """What decides a result: packer, Python, and each profile's fingerprint."""
    prints = {f"profile {profile.name}": profile.fingerprint for profile in profiles}
    return {"packer": _own_version(), "python": platform.python_version(), **prints}


@lru_cache(maxsize=1)
def _own_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("adapter-packer")
    except PackageNotFoundError:
        return "0+unknown"


def _same_fleet_bins(old: Plan, workload: Workload) -> tuple[Bin, ...]:
    """The old plan's bins in indices of the new workload; adapters that are gone are left out."""
    number = {name: i for i, name in enumerate(workload.names)}
    bins = []
    for bin_ in old.bins:
        names = [old.workload.names[i] for i in bin_.adapters]
        kept = [
            (number[name], share) for name, share in zip(names, bin_.shares, strict=True) if name in number
        ]
        if kept:
            adapters, parts = zip(*kept, strict=True)
            bins.append(replace(bin_, adapters=adapters, shares=parts))
    return tuple(bins)
