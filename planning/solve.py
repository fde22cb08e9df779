"""From a workload to a verified plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from packer.bin import Bin
from packer.goal import GoalLike
from packer.gpu import Kinds, kinds_of, serving, stock_of
from packer.moves import aligned, most_copies, moves_of
from packer.objectives.base import Objective, load_objective
from packer.plan import Plan, Status
from packer.planning.assemble import assemble, simulated_once, without_idle_slots
from packer.planning.follow import gpus_words, numbered, running
from packer.planning.loop import LITTLE, planned
from packer.planning.prove import bounded, closed
from packer.planning.rooms import with_room
from packer.planning.spare import with_spare
from packer.planning.verify import beyond_limits, twin_failures, verified
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.progress import Progress, silent
from packer.public import public
from packer.room import Room, levels_of
from packer.seeds import fresh
from packer.solvers import by_model
from packer.solvers.base import Problem, Solver, limit_of
from packer.solvers.confirm import solution_that_holds
from packer.solvers.evaluator import Evaluator, Margin, margins_for, raised_words
from packer.solvers.headroom import MOST_GPUS
from packer.solvers.replan import Replan, settled, total
from packer.solvers.support import counts_gpus
from packer.strategies import Predictor
from packer.twin.hours import Hours, of_hours
from packer.twin.margin import HARDENING_STEP, HARDENING_STEPS
from packer.words import listed
from packer.workload import Workload

ESTIMATED_GPUS = 32  # Larger plans of the default predictor get no estimate of the GPUs needed: it would take seconds.
GOAL_ADAPTERS = 2_000  # With more, a plan with too few GPUs does not say how many suffice: that takes as long again.

SEARCHED = 0.7  # Share of the time limit for the search; the rest is for verifying and explaining the plan.
UNVERIFIED = "The search ended before a fresh hour was simulated: a longer --time-limit."


@public
def solve(
    workload: Workload,
    profile: Kinds,
    objective: str | Objective = "gpus",
    *,
    slo: GoalLike | None = None,
    solver: str | Solver | None = None,
    predictor: str | Predictor = "auto",
    max_gpus: int | None = None,
    max_replicas: int | None = None,
    seed: int = 0,
    time_limit_s: float | None = None,
    confidence: float | None = None,
    margin: Margin | None = None,
    old_plan: Plan | None = None,
    verify: bool = True,
    with_headroom: bool = True,
    progress: Progress = silent,
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """Plan a fleet: which adapter on which GPU, with which slots.

    Parameters
    ----------
    workload
        The fleet.
    profile
        The server, or several kinds to choose from: profiles, or `packer.gpu.GpuKind` with a price and the number
        of GPUs at hand. A fleet of several base models needs one for each.
    objective
        Its name, with parameters if it has any ("slo:mean_ttft_ms=500"), or an `Objective`.
    slo
        The latency goal that the plan keeps: a `packer.Goal`, a text that changes the workload's goal, or a mapping of
        limits. None: the objective's own goal.
    solver, predictor
        A registered name, the path of a trained predictor, or an object. The default solver is greedy; replan with a
        running plan; mixed for the lowest price with several kinds of server; spread-refined for objectives on a given
        number of GPUs.
    max_gpus
        Maximum number of GPUs; with an objective that spreads, their exact number. Several base models share them.
    max_replicas
        Maximum number of GPUs over which one adapter may be split. None: as many as in the running plan, or 1.
    seed
        Seed of everything random.
    time_limit_s
        Wall-clock limit of the search; the best plan so far is returned, which depends on the machine.
    confidence
        Confidence with which the plan holds, given the profile's held-out errors: bins must hold with every rate raised
        by `packer.twin.margin.rate_margin` for each kind of server. Figures are reported at the rates as given.
        Without a confidence and a margin it is 95 %, and the margin grows if the twin does not confirm the plan.
    margin
        Share by which every rate is raised, instead of a confidence: 0.05 means 5 %, 0 disables it. Or the share of
        each kind of server, by its profile.
    old_plan
        A running plan to stay close to; `packer.recommend` also keeps its latency limits. The default solver is then
        replan; a reason of the plan says so if that can't be used, because the plan runs on GPUs of another type.
    verify
        Simulate the finished plan with a fresh seed; `Plan.verified` has the result.
    with_headroom
        Also compute how much the load of each server may grow, which takes simulations, and for estimated profiles
        how their error changes the answer (`Plan.estimate_band`).
    progress, stop
        See `packer.solvers.base.Problem`.

    Returns
    -------
    Plan
        `status` is "infeasible", with `reasons`, if some adapter cannot be served.

    Raises
    ------
    UnknownNameError, IncompatibleError, ValidationError
        The choices are unknown or don't fit together.
    VerificationError
        The solver broke the rules of a plan.
    """
    kinds = kinds_of(profile)
    served = serving(workload, tuple(kind.profile for kind in kinds)).values()
    profiles = tuple(kind.profile for kind in kinds if any(kind.profile in each for each in served))
    old_bins = () if old_plan is None else running(old_plan, workload)
    goal = within(load_objective(objective), workload, slo, old_bins)
    workload = goal.fleet(workload)
    margins = margins_for(profiles, confidence=confidence, margin=margin)
    evaluator = Evaluator.load(predictor, profiles, seed=seed, objective=goal, margin=margins)
    problem = Problem(
        workload, profiles, goal, evaluator, max_gpus=max_gpus, stock=stock_of(kinds),
        max_replicas=most_copies(old_bins) if max_replicas is None else max_replicas, seed=seed,
        time_limit_s=time_limit_s, old_bins=old_bins, progress=progress, stop=stop,
    )  # fmt: skip
    solver, notes = (solver, ()) if solver is not None else _usual(problem)
    search = by_model.fitting(problem, solver)
    again = partial(
        solve, profile=profile, solver="greedy", predictor=predictor, confidence=confidence, margin=margin,
        max_replicas=problem.max_replicas, seed=seed, verify=False, with_headroom=False, stop=stop,
    )  # fmt: skip
    hardens = margin is None and confidence is None
    plan = planned(SolverTask(problem, search, again, verify, hardens, with_headroom))
    notes += raised_words(margins, plan.bins, plan.margin)
    notes += _unsplit(plan, profiles) if max_replicas is None and goal.minimises == "price" else ()
    return _decided(numbered(replace(plan, reasons=(*plan.reasons, *notes)), old_plan), old_plan)


def within(objective: Objective, fleet: Workload, slo: GoalLike | None, old_bins: Sequence[Bin]) -> Objective:
    """The objective for these running bins, held to the goal `slo` with the objective's limits; None: to its own.
    Raises `ValidationError`: `slo` has no limits for the `slo_class` of an adapter."""
    goal = objective.goal
    if slo is not None:
        whole = fleet.held_to(slo).slo
        whole.check(fleet)
        own = {} if goal is None else goal.limits.to_dict()
        goal = replace(whole, limits=whole.limits.changed(own))
    return objective.anchored(old_bins).within(goal)


def _decided(plan: Plan, old: Plan | None) -> Plan:
    """The plan with its decision. Without running servers, a plan that does not hold has its reasons instead."""
    if plan.moves is None and (plan.status is Status.INFEASIBLE or plan.verified is False):
        return plan
    slo, breaks = plan.workload.slo, not plan.limits and bool((plan.evaluations.slo_used > 1.0).any())
    more = f"; this breaks the goal: {slo}" if breaks and not slo.is_none else ""
    if plan.moves is None and plan.limits:
        more = f".\nThe goal: {plan.goal.removeprefix(f'{plan.objective}: ')}"
    return replace(plan, decision=f"{gpus_words(plan, old)}{more}.")


def _usual(problem: Problem) -> tuple[str, tuple[str, ...]]:
    """The default solver for a problem, and a note if it can't start from the running plan."""
    goal, workload = problem.objective, problem.workload
    if goal.fixed_gpus:
        return "spread-refined", ()
    refused = by_model.supports(problem, Replan()) if problem.old_bins else None
    if problem.old_bins and refused is None:
        return "replan", ()
    notes = () if refused is None else (f"Planned without the running servers: {refused}.",)
    several = len(problem.profiles) > max(1, len(workload.models)) and problem.max_replicas == 1
    mixes = goal.minimises == "price" and several and workload.arrivals.trace is None
    return "mixed" if mixes else "greedy", notes


def _unsplit(plan: Plan, profiles: Sequence[Profile]) -> tuple[str, ...]:
    """A note on adapters that have a dearer server to themselves: parts of them may fit on cheaper ones."""
    offered = serving(plan.workload, profiles).values()
    prices = [{each: each.gpu.price_per_hour or 0.0 for each in kinds} for kinds in offered]
    cheapest = {kind for own in prices for kind, price in own.items() if price == min(own.values())}
    dear = [item for item in plan.bins if item.profile not in cheapest]
    alone = [plan.workload.names[item.adapters[0]] for item in dear if len(item.adapters) == 1]
    said = f"Alone on a dearer server: {listed(alone)}. --max-replicas 2 or more splits them, which may be cheaper."
    return (said,) if alone else ()


@dataclass(eq=False)
class SolverTask:
    """A plan for an objective by one solver.

    `again`: `solve` for other rates or objectives with the solver greedy. `verify`: simulate fresh hours. `hardens`:
    repairs may raise the margin. `with_headroom`: also compute headroom and estimates.
    """

    problem: Problem
    solver: Solver
    again: Callable[..., Plan]
    verify: bool
    hardens: bool
    with_headroom: bool
    within: dict[str, Any] = field(init=False, default_factory=dict)
    """An objective that keeps the fleet's goal, and the GPUs that it takes, if `look_around` found one."""
    first: Plan = field(init=False)  # The plan of the first search, which is returned if no plan is confirmed.

    def __post_init__(self) -> None:
        problem, goal = self.problem, self.problem.objective
        self.workload, self.over, self.hours = problem.workload, problem.out_of_time, Hours()
        self.rounds = (1 + HARDENING_STEPS * self.hardens) * self.verify
        counts = self.with_headroom and goal.minimises in ("gpus", "price")
        self.counts = counts and not problem.old_bins
        self.widens = LITTLE * (self.counts and not goal.spare)  # slots chosen for the loss of a server stay
        self.banded = self.counts and not goal.fixed_gpus

    def propose(self) -> Plan | None:
        """The plan that the solver finds with the margin; None if it is infeasible."""
        self.first = self._found(self.problem, SEARCHED if self.verify else 1.0)
        self.hours = Hours(self.problem.seed, self.over, self.first.limits, levels_of(self.first.margin))
        return None if self.first.status is Status.INFEASIBLE else self.first

    def _found(self, problem: Problem, share: float = 1.0) -> Plan:
        """The checked and evaluated plan of one search in this share of the time left, with a spare server if the
        objective wants one; the whole predictor admits its bins."""
        timed = problem.with_share(share)
        solution = solution_that_holds(timed, lambda posed: by_model.solved(posed, self.solver))
        if not (problem.objective.spare or problem.old_bins):  # these may need slots for other adapters
            solution = replace(solution, bins=without_idle_slots(problem, solution.bins))
        plan = assemble(timed, solution, self.solver.name, timed.elapsed_s(), verify=self.verify)
        spare = problem.objective.spare and plan.status is not Status.INFEASIBLE
        return with_spare(problem, plan, spread=getattr(self.solver, "spreads", False)) if spare else plan

    def judge(self, plan: Plan, number: int) -> Plan:
        """The plan, verified in a fresh hour; if the last one fails, the first plan, whose bound claims the least."""
        figures = simulated_once(self.problem, plan.bins)
        plan = verified(plan, self.problem.objective, figures=figures, number=number)
        if plan.verified and (broken := self._broken_as_shown(plan)):
            plan = replace(plan, verified=False, reasons=(*plan.reasons, *broken.values()))
        self.first = self.first if number else plan
        return plan if plan.verified or number + 1 < self.rounds else self.first

    def _broken_as_shown(self, plan: Plan) -> dict[int, str]:
        """Servers that break their limits by figures that the plan will show, with why: parts of adapters are shown for
        as many hours as there are parts (`packer.twin.parts`)."""
        if not (self.problem.objective.limits and self._is_simulated(plan)):
            return {}
        shown = of_hours(plan.evaluations, self.hours.all(plan.bins, self.workload))
        return beyond_limits(self.problem.objective, shown, "in the hours that its figures come from")

    def repair(self, plan: Plan, number: int) -> Plan:
        """The plan that the solver finds with a larger margin, with the first plan's bound, which is the weaker claim;
        the first plan if the search fails or the time is over."""
        evaluator, first = self.problem.evaluator, self.first
        if self.over():
            return first
        plan = self._found(replace(self.problem, evaluator=evaluator.with_more_margin(number * HARDENING_STEP)))
        if plan.status is Status.INFEASIBLE:
            return first
        bound = {name: getattr(first, name) for name in ("lower_bound", "bound_proven", "bound_source")}
        told = {**plan.statistics, "margin_at_first": evaluator.largest_margin(plan.bins)}
        return closed(self.problem, replace(plan, **bound, status=Status.FEASIBLE, statistics=told))

    def near(self, plan: Plan | None) -> Plan | None:
        """A plan made without the running servers, matched to them, if `plan` fails or has more GPUs, or a higher price
        if the objective minimises it; else `plan`, which says if it is not verified."""
        problem, goal = self.problem, self.problem.objective
        if plan is not None and plan.verified is None and self.rounds:
            return replace(plan, reasons=(*plan.reasons, UNVERIFIED))
        if self.solver.name != "replan" or self.over():
            return plan
        free = load_objective("gpus").within(goal.goal) if goal.name == "moves" else goal
        other = self.again(
            self.workload, objective=free, solver=None, verify=self.verify, max_gpus=problem.max_gpus,
            time_limit_s=limit_of(problem.remaining_s()),
        )  # fmt: skip
        worse = plan is None or plan.verified is False or total(goal, other.bins) < total(goal, plan.bins)
        if other.status is Status.INFEASIBLE or other.verified is False or not worse:
            return plan
        bins = aligned(problem.old_bins, other.bins)
        found = problem.evaluator.report(self.workload, bins)
        key = goal.key(self.workload, bins, found)
        matched = replace(
            other, bins=tuple(bins), evaluations=found, objective=goal.name, solver=self.solver.name,
            objective_value=key, moves=moves_of(problem.old_bins, bins), status=Status.FEASIBLE,
        )  # fmt: skip
        staying = settled(problem, bins)
        return closed(problem, (staying != bins and self.changed(matched, staying)) or matched)

    def look_around(self, plan: Plan) -> None:
        """Find how many GPUs keep the fleet's goal, if the plan has only the fewest GPUs on which nothing starves."""
        goal, evaluator = self.problem.objective, self.problem.evaluator
        usual = self.counts and goal.name == "gpus" and goal.goal is None and not self.over()
        few = plan.n_gpus <= ESTIMATED_GPUS and len(self.workload) <= GOAL_ADAPTERS
        if usual and few and evaluator.confirms and self._late(plan):
            self.within = self._within_goal(plan)

    def missed(self) -> Plan:
        """The first plan, which has unplaced adapters or servers that do not hold, with its explanation."""
        plan = self.prove(self.first)
        return self.explain(replace(plan, rooms=self.rooms(plan)))

    def holds(self, item: Bin) -> bool:
        """Whether the whole predictor admits the server with the margin."""
        return bool(self.problem.objective.holds(self.problem.evaluator.judged(self.workload, [item])).all())

    def changed(self, plan: Plan, bins: Sequence[Bin]) -> Plan | None:
        """The plan with these servers; None if the plan was verified and the twin refuses one of the new servers."""
        goal, more = self.problem.objective, [item for item in bins if item not in plan.bins]
        twin = TwinPredictor(seed=fresh(plan.seed))
        if plan.verified and twin_failures(self.workload, more, twin=twin, objective=goal):
            return None
        evaluations = self.problem.evaluator.report(self.workload, bins)
        key = goal.key(self.workload, bins, evaluations)
        made = replace(plan, bins=tuple(bins), evaluations=evaluations, objective_value=key)
        return None if plan.verified and self._broken_as_shown(made) else made

    def rooms(self, plan: Plan) -> tuple[Room, ...]:
        """The room of each server from simulated hours; () if the twin does not confirm plans, or for large plans."""
        detailed = self.with_headroom and self._is_simulated(plan)
        return self.hours.rooms(plan.bins, self.workload) if detailed else ()

    def _is_simulated(self, plan: Plan) -> bool:
        """Whether simulated hours give the plan's figures: the twin confirms it, and it is not too large."""
        few = not self.over() and 0 < len(plan.bins) <= MOST_GPUS
        return few and all(self.problem.evaluator.twin_of(item.profile) is not None for item in plan.bins)

    def hardened(self, plan: Plan) -> Plan:
        """The plan: its busy hours are not simulated."""
        return plan

    def prove(self, plan: Plan) -> Plan:
        """The plan with a bound by the solver or by load, or with an estimate if one is wanted and quick to make."""
        quick = self.problem.evaluator.confirms and plan.n_gpus <= ESTIMATED_GPUS
        wanted = self.counts and quick and counts_gpus(self.problem) is None
        return bounded(self.problem, plan, search=self.problem if wanted else None)

    def at_rates(self, workload: Workload) -> Plan:
        """The plan at other rates, by the solver greedy."""
        return self.again(workload, objective=self.problem.objective)

    def explain(self, plan: Plan) -> Plan:
        """The plan with the room of each server; infeasible if verification finds that it breaks its limits."""
        goal, evaluator = self.problem.objective, self.problem.evaluator
        if plan.verified is False and goal.limits:
            plan = replace(plan, status=Status.INFEASIBLE)
        if self.within and self._late(plan):
            plan = replace(plan, within_goal=self.within)
        return with_room(plan, evaluator, self.over, self.hours) if self.with_headroom else plan

    def _late(self, plan: Plan) -> bool:
        """Whether the plan is feasible but a server's mean TTFT exceeds the fleet's tightest TTFT limit."""
        ttft_ms = float(plan.workload.slo.columns(plan.workload)[0].min())
        return plan.status is not Status.INFEASIBLE and bool((plan.evaluations.mean_ttft_ms > ttft_ms).any())

    def _within_goal(self, plan: Plan) -> dict[str, Any]:
        """An objective that keeps the fleet's tightest limits on every server, and the GPUs that it takes; {} if no
        plan is found in time."""
        ttft_ms, itl_ms = (float(each.min()) for each in plan.workload.slo.columns(plan.workload))
        objective = f"slo:server.p99_ttft_ms={ttft_ms:g},server.mean_itl_ms={itl_ms:g}"
        limit_s = limit_of(self.problem.remaining_s())
        found = self.again(plan.workload, objective=objective, time_limit_s=limit_s)
        if found.status is Status.INFEASIBLE or found.time_limit_reached:
            return {}
        return {"objective": objective, "gpus": found.n_gpus}
