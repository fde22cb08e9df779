"""The plan to deploy: fewest GPUs on which every adapter keeps a latency goal, and what fewer or more would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from packer import checks
from packer.arrival import RequestTrace
from packer.bin import Bin
from packer.errors import IncompatibleError
from packer.goal import Goal, GoalLike
from packer.gpu import Kinds, kinds_of, serving
from packer.moves import aligned, as_running, moved, moves_of
from packer.objectives.slo import Slo
from packer.plan import Plan, Status
from packer.planning.behind import fewer_behind_router
from packer.planning.beyond import others_kept
from packer.planning.explain import breaks_later, by_luck, caveats, finished, missed
from packer.planning.explore import Frontier
from packer.planning.follow import gpus_words, homeward, nearby, numbered, refitted, running
from packer.planning.frontier import Conditions, FrontierPoint
from packer.planning.fullest import by_full_servers
from packer.planning.loop import LITTLE, judged, planned
from packer.planning.overload import Overload
from packer.planning.prove import bounded, told
from packer.planning.rarely import broken_last, by_chance, often_broken
from packer.planning.shortfall import busy_words
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.progress import Progress, silent
from packer.public import public
from packer.room import Room
from packer.solvers.base import Problem, limit_of
from packer.solvers.evaluator import Evaluator
from packer.solvers.headroom import MOST_GPUS
from packer.twin.memory.starts import starting
from packer.workload import Workload

UNCONFIRMED = "The search ended before fresh hours were simulated, which may take more GPUs: a longer --time-limit."
ROUNDS = 6  # Maximum number of times that a set of fresh hours is simulated, each time a new set.
BEYOND_SERVERS = 5  # Plans with more GPUs than needed are made until their servers add up to this number.


@public
def recommend(
    workload: Workload, profile: Kinds, *,
    slo: GoalLike | None = None, margin: float | None = None, confidence: float | None = None,
    max_gpus: int | None = None, min_gpus: int | None = None, max_replicas: int | None = None,
    spare: int | None = None, old_plan: Plan | None = None, seed: int = 0, verify: bool = True,
    progress: Progress = silent, stop: Callable[[], bool] = lambda: False, time_limit_s: float | None = None,
    log_hour: RequestTrace | None = None,
) -> Plan:  # fmt: skip
    """The fewest GPUs on which every adapter keeps the goal with every rate raised by the margin.

    The plan's servers are simulated again in fresh hours. `rooms` says how far rates may grow and what limits each
    server, `adapters` what every adapter gets. `lower_bound` is how many GPUs any plan needs (`packer.planning.prove`).
    `decision` has a few lines of which the first is the answer, `frontier` the rows of `FrontierPoint.to_dict`, and for
    estimated profiles `estimate_band` how their error changes the answer. `statistics` has the "weaker_goals" that
    fewer GPUs keep, with how many.

    Parameters
    ----------
    workload, profile
        The fleet and the server. With several base models or kinds of server, the cheapest kind or mix of kinds of
        each model (`packer.planning.kinds`).
    slo
        The latency goal: a `packer.Goal`, a text that changes the workload's goal ("p95_ttft_ms=500"), or a mapping of
        limits. None: the workload's goal, which is p95 TTFT <= 2 s and mean ITL <= 100 ms for every adapter unless the
        workload says otherwise.
    margin
        Share by which every rate is raised; None takes the default of each server's profile.
    confidence
        Confidence with which the plan holds, instead of a margin: rates are raised by what it requires of each server's
        profile (`packer.twin.margin.rate_margin`).
    max_gpus, min_gpus
        GPUs at hand: if they do not suffice, the plan on them is infeasible and says how many would. Fewest GPUs of the
        plan, for more room than the goal takes; where `max_replicas`, or a trace, which splits no adapter, leaves
        fewer, the plan says so.
    verify
        Simulate the plan again in fresh hours: one, three if limits may break by chance, more for few or equal
        servers. If one breaks the goal by more than chance (`packer.planning.chance`), plan again with that hour
        included.
    max_replicas
        Maximum number of GPUs over which one adapter may be split; None: as many as the hottest one needs, up to 1,024.
    spare
        GPUs that may be lost, 0 or 1: with 1, the limits are kept at the rates as given on the GPUs that are left.
        None: as many as of `old_plan`, else 0.
    old_plan
        A running plan of one kind of server. The plan still has the fewest GPUs, but moves few of its adapters.
    seed, progress, stop, time_limit_s
        As for `packer.solve`.
    log_hour
        Requests of an hour as they were, for a fleet that was measured from a log. The plan must keep the limits when
        they are replayed, too, if it can on any number of GPUs. Only with `verify`.

    Raises
    ------
    IncompatibleError
        A base model has no profile or no server that starts for each of its adapters, GPUs are limited with several
        kinds of server or models, or a profile has no errors from which a margin follows for the confidence.
    ValidationError
        A parameter is out of range, or both a confidence and a margin are given.
    """
    kinds = kinds_of(profile)
    serving(workload, [kind.profile for kind in kinds])
    fleet = workload.held_to(slo)
    spare = (0 if old_plan is None else old_plan.spare) if spare is None else spare
    asked = Conditions(
        margin=margin, confidence=confidence, max_replicas=max_replicas, spare=spare, seed=seed, verify=verify,
        progress=progress, stop=stop, time_limit_s=time_limit_s, log_hour=log_hour,
    )  # fmt: skip
    max_gpus = None if max_gpus is None else checks.integer("max_gpus", max_gpus, low=1)
    at_hand = [n for n in (max_gpus, *(kind.available for kind in kinds)) if n is not None]
    old_bins = () if old_plan is None else running(old_plan, fleet)
    if old_bins and {item.profile for item in old_bins} != {kind.profile for kind in kinds}:
        raise IncompatibleError("Expected a running plan on servers of the one kind that is planned with.")
    if len(kinds) > 1 or len(workload.models) > 1:
        from packer.planning.kinds import recommend_kinds

        if min_gpus is not None or at_hand:
            raise IncompatibleError(
                "Limits on GPUs of several kinds of server or models go with an objective, such as packer solve "
                "--objective cost --slo p95_ttft_ms=2000,mean_itl_ms=100. --min-gpus goes with one kind and model."
            )
        return recommend_kinds(fleet, [kind.profile for kind in kinds], asked)
    most, size = min(at_hand, default=None), kinds[0].profile.engine.gpus
    high = None if most is None else max(1, most // size) * size  # those of whole servers
    fewest = 1 if min_gpus is None else checks.integer("min_gpus", min_gpus, low=1, high=high)
    starting(fleet, [kinds[0].profile])
    job = Frontier(fleet, kinds[0].profile, **vars(asked))
    task = Deployment(job, most, old_bins, fewest=-(-fewest // size))
    plan = numbered(planned(task), old_plan)
    lead = plan.hardware if plan.moves is None else f"{gpus_words(plan, old_plan)}: {plan.hardware}"
    return replace(plan, decision=f"{lead}: {task.told}")


@dataclass(eq=False)
class Deployment:
    """The fewest GPUs of one kind on which the goal is kept.

    `job`: the plans by number of GPUs.
    `running`: running servers that the plan stays close to, with adapters as indices of the fleet.
    `beyond`: plans with more GPUs than needed are made until their servers add up to this number.
    `fewest`: the plan has at least so many servers, of those at hand.
    `margins`: the margin of each kind, if there are several; that of the job is the largest.
    """

    job: Frontier
    max_gpus: int | None = None
    running: tuple[Bin, ...] = ()
    beyond: float = BEYOND_SERVERS
    fewest: int = 1
    margins: Mapping[Profile, float] = field(default_factory=dict)
    first: int | None = field(init=False, default=None)  # Fewest servers that keep the goal in all hours so far.
    least: int | None = field(init=False, default=None)  # Fewer are not tried: fresh hours broke their plan.
    verified: tuple[Bin, ...] = field(init=False, default=())  # Servers that fresh hours confirmed.
    late: tuple[int, ...] = field(init=False, default=())  # Adapters apart from those that keep the goal.
    widens, banded = LITTLE, True
    told: str = field(init=False, default="")  # The text of the decision that follows the servers.

    def __post_init__(self) -> None:
        self.workload, self.hours, self.over = self.job.workload, self.job.hours, self.job.over
        self.rounds = ROUNDS * (self.job.verify and not self.job.replayed)
        self.job.sets = 0  # a search that reuses the plans of another is judged in the same fresh hours

    def explored(self) -> FrontierPoint | None:
        """Make all points and return the one with the fewest GPUs that holds; None if none holds."""
        found = judged(self)
        self.look_around()
        self.hours.forget()
        return None if found is None or self.first is None else self.job.at(self.first)

    def propose(self) -> Plan | None:
        """The plan on the fewest GPUs that keep the limits, searched upwards from those on which nothing starves."""
        job, most = self.job, self.job.most(self.max_gpus)
        bins, late = others_kept(job, self.max_gpus) if job.parts.too_hot else ([], ())
        if bins and (job.hopeless or job.kept.holds(bins, job.spare)):
            most = job.put(bins).n_gpus
            if job.hopeless:
                self.late = late
                return None
        self.low = min(job.least() + job.spare, most)
        first = self._first(most)
        if first is not None and first < self.fewest:  # more room than the goal takes
            if not job.replayed:
                self.widens, job.roomy = math.inf, self.fewest
                job.split(first)
            most = most if bins else job.most(self.max_gpus)
            self.low = min(self.fewest, most)
            first = self._first(most, self.fewest)
        return self._plan(first if first is None or not job.workload.slo.is_none else self._served_by(first))

    def _first(self, most: int, least: int = 1) -> int | None:
        """The fewest servers from `low` to `most` (from `least`, if plans are not verified) that keep the limits."""
        found = None if self.job.hopeless else self.job.first(self.low, most, fresh=self.rounds > 0)
        return found if found is None or self.rounds else self.job.lower(found, least)

    def _served_by(self, first: int) -> int:
        """The fewest servers, up to `first`, that serve the load with the slots that suit an overloaded server best."""
        job = self.job
        while first > self.fewest and not job.over():
            Overload(job).reslotted(job.at(first - 1))
            if not job.at(first - 1).holds:
                break
            first -= 1
        return first

    def _plan(self, first: int | None) -> Plan | None:
        self.first = first
        return None if first is None else self.job.at(first).plan

    def judge(self, plan: Plan, number: int) -> Plan:
        """Verify the plan in a new set of fresh hours. Once a set confirms a plan, go on with fewer GPUs if any do."""
        job = self.job
        if self.first is None:
            return plan
        if plan.bins == self.verified:
            return replace(plan, verified=True)
        job.progress("simulating fresh hours", number + 1, ROUNDS)
        job.sets += 1
        job.broken = job.kept.broken_later(plan.bins, job.number)
        last = number + 1 == ROUNDS
        if not job.broken:
            self.verified = plan.bins
            if not last and (lower := job.lower(self.first, max(self.fewest, self.least or 1))) < self.first:
                return self._plan(lower) or plan
        elif last and self.verified:
            return replace(self.put(self.verified), verified=True)
        if last and job.broken:
            return broken_last(self, plan)
        return replace(plan, verified=not job.broken)

    def repair(self, plan: Plan, _number: int) -> Plan | None:
        """The plan with adapters redistributed from the servers that broke the goal; failing that, the plan on the
        fewest GPUs that also keep the goal in the worst of the hours that broke it."""
        job, low = self.job, self.first
        assert low is not None
        job.keep(job.kept.worst(plan.bins, job.broken))
        self.least = low
        if (mended := job.mended([plan.bins], job.broken)) is not None:
            return self.put(mended)
        found = None if job.hopeless else job.first(low, job.most(self.max_gpus))
        return by_chance(self, low, found) or self._plan(found) or self._without_log(plan)

    def _without_log(self, plan: Plan) -> Plan | None:
        """The plan whose goal only the replayed hour of the log breaks, as it does on any number of GPUs; else None."""
        job, logged = self.job, self.job.kept.others
        if not logged or not job.log_hour or job.over() or any(hour not in logged for hour in job.broken):
            return None
        job.kept.drop(logged)
        job.kept.others = ()
        return self.put(plan.bins)

    def hardened(self, plan: Plan) -> Plan:
        """The plan, or one that fresh hours confirm, too, on more GPUs or as many, if busy hours break it too often."""
        job, first, hours = self.job, self.first, self.job.kept.hours
        broken = often_broken(job.kept, plan) if plan.verified and self.rounds and not self.over() else []
        if not broken:
            return plan
        self.verified, job.broken = (), broken
        job.kept.refused.add(tuple(plan.bins))
        if (other := self.near(judged(self, plan))) is not None and other.verified:
            return other
        self.first, job.kept.hours = first, hours
        self.put(plan.bins)
        return plan

    def look_around(self, plan: Plan | None = None) -> None:
        """Make points with more GPUs until one more GPU gains little, or their servers add up to `beyond`. The next
        smaller number of GPUs than a plan's gets its best slots."""
        self.job.extend(self.first or self.low, self.job.most(self.max_gpus), self.beyond)
        if fewer := [each for each in self.job.points if plan is not None and each.n_gpus < len(plan.bins)]:
            Overload(self.job).reslotted(fewer[-1])

    def near(self, plan: Plan | None) -> Plan | None:
        """The running servers with few changes, on no more GPUs and with no more moves than `plan` takes, if they hold
        in kept and fresh hours; else `plan`. Servers that go on keep their settings if they hold with these."""
        job, kept = self.job, self.job.kept
        if not self.running or (plan is not None and self.over()):
            return plan
        most = min(len(self.running), job.most(self.max_gpus)) if plan is None else len(plan.bins)
        parts = {i: n for i, n in job.parts.parts.items() if n is not None}
        few = math.inf if plan is None or plan.verified is False else len(moved(self.running, plan.bins))
        for bins in nearby(self.workload, self.running, most, kept.holds_one, parts, job.copies):
            for made in refitted(kept, self.running, aligned(self.running, bins), self.over):
                if len(made) >= self.fewest and len(moved(self.running, made)) <= few and self._lasts(made):
                    return self._close(made, True if self.rounds else None)
        if plan is None:
            return None
        bins = aligned(self.running, plan.bins)
        home = homeward(self.workload, self.running, bins, kept.holds_one) if plan.verified is not False else bins
        for each in (home, bins):
            made = [
                new if new == item or kept.holds_one(new) else item
                for new, item in zip(as_running(self.running, each), each, strict=True)
            ]
            if made != bins and plan.verified is not False and self._lasts(made):
                return self._close(made, plan.verified)
        return replace(self.put(bins), verified=plan.verified)

    def _lasts(self, bins: Sequence[Bin]) -> bool:
        """Whether the servers keep the goal in all kept hours and, if plans are verified, in the last fresh ones."""
        job = self.job
        return job.kept.holds(bins, job.spare) and not (self.rounds and job.kept.broken_later(bins, job.number))

    def _close(self, bins: Sequence[Bin], verified: bool | None) -> Plan:
        """The plan with these servers, whose settings are not changed any more."""
        self.widens = 0.0
        return replace(self.put(bins), verified=verified)

    def put(self, bins: Sequence[Bin]) -> Plan:
        """The plan with these servers, which becomes that of as many GPUs."""
        self.first = len(bins)
        return self.job.put(bins).plan

    def missed(self) -> Plan:
        """The plan on which the fewest adapters break the goal, with what would keep it."""
        if not self.late:
            self.look_around()
        plan, self.told = missed(self.job, self.max_gpus, self.late)
        return self._with_moves(plan)

    def _with_moves(self, plan: Plan) -> Plan:
        return replace(plan, moves=moves_of(self.running, plan.bins)) if self.running else plan

    def holds(self, item: Bin) -> bool:
        """Whether the server keeps its limits in all hours so far."""
        return self.job.kept.holds_one(item)

    def changed(self, plan: Plan, bins: Sequence[Bin]) -> Plan | None:
        """The plan with these servers if they keep the goal in all kept and fresh hours; else None."""
        kept = self.job.kept
        if not kept.holds(bins, self.job.spare) or kept.broken_later(bins, self.job.number):
            return None
        point = self.job.put(bins)
        return replace(
            point.plan, verified=plan.verified, status=plan.status, lower_bound=plan.lower_bound,
            bound_proven=plan.bound_proven, bound_source=plan.bound_source,
        )  # fmt: skip

    def rooms(self, plan: Plan) -> tuple[Room, ...]:
        """The room of each server; () for more than `MOST_GPUS`, or if the time ended before each had a factor."""
        few = len(plan.bins) <= MOST_GPUS and not self.over()
        return self.hours.rooms(plan.bins, self.workload) if few else ()

    def prove(self, plan: Plan) -> Plan:
        """The plan with a bound by load, relative to the twin, or with an estimate: by full servers of each slot rank,
        or for small plans by a search with trained trees and Poisson arrivals for the fullest servers that keep median
        TTFT and mean ITL within the goal."""
        job = self.job
        ttft_ms, itl_ms = (float(each.max()) for each in job.workload.slo.columns(job.workload))
        goal = Slo(stable=True).within(Goal.only({"server.median_ttft_ms": ttft_ms, "server.mean_itl_ms": itl_ms}))
        margin = job.margin or 0.0
        posed = Problem(
            job.workload, (job.profile,), goal, Evaluator(TwinPredictor(seed=job.seed), goal, margin), seed=job.seed,
            stop=job.stop, time_limit_s=limit_of(job.remaining_s()),
        )  # fmt: skip
        plan = bounded(posed, plan, simulated=False)
        if (full := by_full_servers(job, plan)) is not None:
            return told(posed, plan, full)
        if not job.kept.all_count or job.over():
            return plan
        fleet = job.as_learned(job.parts)
        search = replace(posed, workload=fleet, evaluator=Evaluator(job.predictor, goal, margin))
        return bounded(posed, plan, simulated=False, search=search)

    def at_rates(self, workload: Workload) -> Plan | None:
        """The plan at other rates, not verified in fresh hours; None if there is none."""
        if self.over():
            return None
        job = replace(self.job, workload=workload, verify=False, time_limit_s=limit_of(self.job.remaining_s()))
        found = Deployment(job, beyond=0).explored()
        return None if found is None else found.plan

    def explain(self, plan: Plan) -> Plan:
        """The plan with its decision, and what fewer and more GPUs would give."""
        assert self.first is not None
        reasons: tuple[str, ...] = ()
        if plan.verified is False:
            reasons = (breaks_later(self.job, plan),)
            self.job.break_later(self.first)
        if self.rounds and plan.verified is None:
            plan, reasons = replace(plan, status=Status.FEASIBLE), (UNCONFIRMED,)
        reasons += by_luck(self.job, plan) or (
            busy_words(self.job.kept, plan, self.max_gpus or math.inf) if plan.verified else ()
        )
        reasons += (*caveats(self.job, plan, self.fewest, self.margins), *fewer_behind_router(self.job, plan))
        plan = replace(plan, reasons=reasons)
        plan, self.told = finished(self.job, plan, self.job.at(self.first), holds=plan.verified is not False)
        return self._with_moves(plan)
