"""The plan to deploy for several base models and several kinds of server: the cheapest kind, or mix of kinds, of each
model on which every adapter keeps its limits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from packer import checks
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.evaluation import WHOLE_GOAL, AdapterFigures, Evaluations
from packer.gpu import serving
from packer.plan import Plan, Status
from packer.planning.assemble import versions
from packer.planning.explore import Frontier
from packer.planning.frontier import Conditions
from packer.planning.kept import KeptHours
from packer.planning.loop import completed, judged, planned
from packer.planning.recommend import Deployment
from packer.planning.replicas import Replicas
from packer.planning.settle import with_best_slots
from packer.planning.solve import solve
from packer.profile import Profile, labelled
from packer.solvers.base import limit_of
from packer.solvers.columns.mixed import Mixed
from packer.solvers.evaluator import raised_words
from packer.twin.margin import MIXED
from packer.twin.memory.starts import starting
from packer.words import counted, listed, money
from packer.workload import Workload

TRIES = 6  # Servers of a mix that are tried to leave it, and others that are tried to take the adapters of each.
_MIXED_S = 10.0  # Work of a search for a mix, s; with a time limit, the most that it takes of it.


@dataclass(frozen=True, eq=False)
class Option:
    """A way to serve one model: a kind of server alone, or several together. `told`: what the plan gives, as text that
    follows the names of its servers."""

    model: str | None
    kinds: str
    plan: Plan
    holds: bool
    told: str

    @property
    def rank(self) -> tuple[bool, bool, float, int, float]:
        """Sort key, smaller is better: whether the limits are broken, whether the search ended before fresh hours were
        simulated, price (0 if unknown: `cheapest` then ignores prices), GPUs, negative room to grow."""
        plan = self.plan
        price = plan.price_per_hour
        unsure = plan.verified is None and (plan.interrupted or plan.time_limit_reached)
        room = min((each.headroom or 0.0 for each in plan.rooms), default=0.0)
        return (not self.holds, unsure, 0.0 if price is None else price, plan.n_gpus, -room)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        figures = {"gpus": self.plan.n_gpus, "price_per_hour": self.plan.price_per_hour}
        return {"model": self.model, "kinds": self.kinds, **figures, "holds": self.holds}


def _kinds(bins: Sequence[Bin]) -> set[Profile]:
    return {item.profile for item in bins}


def cheapest(found: Sequence[Option]) -> Option:
    """The best option by `rank`, without regard to prices if an option that keeps the limits has none."""
    if any(option.holds and option.plan.price_per_hour is None for option in found):
        return min(found, key=lambda option: (*option.rank[:2], *option.rank[3:]))
    return min(found, key=lambda option: option.rank)


def unpriced(options: Sequence[Option]) -> tuple[str, ...]:
    """A sentence that names the kinds without a price; () if all kinds have a price, or none has."""
    without = sorted({option.kinds for option in options if option.plan.price_per_hour is None})
    if not without or len(without) == len({option.kinds for option in options}):
        return ()
    return (f"No price is known for {listed(without)}: fewest GPUs decide. --price {without[0]}=… sets one.",)


def recommend_kinds(workload: Workload, profiles: Sequence[Profile], asked: Conditions) -> Plan:
    """As `packer.recommend`, for each base model with each kind of server alone and with all of them mixed.

    Each search gets an equal part of the time that is left. Each kind has its own margin.
    `Plan.decision` has the totals, then a decision for each model.
    `Plan.margin` is the largest margin of the servers in the plan; the decision has all if they differ.
    """
    started = time.monotonic()
    end_s = started + checks.time_limit(asked.time_limit_s)
    by_model, labels = serving(workload, profiles), labelled(profiles)
    margins = {each: asked.margin_of(each) for offered in by_model.values() for each in offered}
    # Searches that are left, the next one included: it gets that part of the time.
    left = count(sum(len(offered) + (len(offered) > 1) for offered in by_model.values()), -1)

    def begun(own: Workload, profile: Profile, **changed: Any) -> Frontier:
        part_s = limit_of((end_s - time.monotonic()) / next(left))
        logged = asked.log_hour
        if logged is not None:
            logged = workload.replaying(logged).of_model(own.adapters[0].model)[1].arrivals.trace
        given = {**vars(asked), "time_limit_s": part_s, "log_hour": logged, **changed}
        return Frontier(own, profile, before=sum(len(option.plan.bins) for _, option in chosen), **given)

    chosen: list[tuple[tuple[int, ...], Option]] = []
    options: list[Option] = []
    for model, offered in by_model.items():
        index, own = workload.of_model(model)
        offered = tuple(starting(own, offered))
        found, parts = [], dict[int, int | None]()
        for profile in offered:
            task = Deployment(begun(own, profile))
            plan = planned(task)
            parts |= {i: max(n or 1, parts.get(i) or 1) for i, n in task.job.parts.parts.items()}
            found.append(Option(model, labels[profile], plan, plan.status is not Status.INFEASIBLE, task.told))
        if len(offered) > 1:
            kinds = sorted(offered, key=lambda each: (each.name, each.fingerprint))
            mine = {each: margins[each] for each in kinds}
            job = begun(own, kinds[0], margin=max(mine.values()), confidence=None)
            kept = [option.plan.bins for option in found if option.holds]
            mix = Mix(job, profiles=kinds, margins=mine, parts=parts, kept=kept)
            mixed = judged(mix)
            if mixed is not None and mixed.verified:
                names = " + ".join(sorted({labels[item.profile] for item in mixed.bins}))
                found.append(Option(model, names, completed(mix, mixed), holds=True, told=mix.told))
        options += found
        chosen.append((index, cheapest(found)))
    plan = _merged(workload, chosen, options, margins, time.monotonic() - started)
    late = time.monotonic() >= end_s or any(option.plan.time_limit_reached for option in options)
    stopped, told = asked.stop(), {"spare": 1} if asked.spare else {}
    return replace(plan, interrupted=stopped, time_limit_reached=late and not stopped, statistics=told)


@dataclass(eq=False)
class Mix(Deployment):
    """The cheapest mix of kinds whose servers keep the limits in a simulated hour and in fresh ones.

    `parts`: number of equal parts of each adapter that is too hot for a server of some kind.
    `kept`: the servers of each kind that keeps the limits alone.
    """

    profiles: Sequence[Profile] = ()
    parts: Mapping[int, int | None] = field(default_factory=dict)
    kept: Sequence[Sequence[Bin]] = ()
    banded = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.split = Replicas(self.workload, self.parts)
        self.rounds = 1 + len(MIXED) + (len({each.slo_class for each in self.workload.adapters}) > 1)
        self._left = self._further()

    def propose(self) -> Plan | None:
        """The mix that the solver `mixed` finds for throughput alone: no mix that keeps the goal is cheaper. If a kind
        alone keeps the goal for as little, there is no mix to look for; if it is one kind, those for `repair`."""
        bins = self._mixed(MIXED[0], [range(len(self.split.fleet))])
        if not bins or any(self._cost(servers) <= self._cost(bins) for servers in self.kept):
            return None
        return self._tried(bins) or next(self._left, None)

    def hardened(self, plan: Plan) -> Plan:
        """The plan: its busy hours are not simulated."""
        return plan

    def repair(self, plan: Plan, number: int) -> Plan | None:
        """First mixes within the goal; then mixes for throughput with larger margins (`MIXED`)."""
        return next(self._left, None)

    def _further(self) -> Iterator[Plan | None]:
        """The mixes for `repair`. Those within the goal are one of the whole fleet and, where adapters are of several
        classes, one in which no class shares a server with another, which finds the cheapest kind for each; the cheaper
        one comes first."""
        if self.job.replayed:
            return
        whole, classes = range(len(self.split.fleet)), dict[str | None, list[int]]()
        for i, adapter in enumerate(self.split.fleet.adapters):
            classes.setdefault(adapter.slo_class, []).append(i)
        ways: list[list[Sequence[int]]] = [[whole], [*classes.values()]]
        found = [self._mixed(MIXED[0], each, within=True) for each in ways[: len(classes)]]
        found = [bins for bins in found if len(_kinds(bins)) > 1]
        found.sort(key=self._cost)
        yield from map(self._tried, found)
        for tighter in MIXED[1:] if found else ():
            yield self._tried(self._mixed(tighter, [whole]))

    @property
    def _priced(self) -> bool:
        return all(profile.gpu.price_per_hour is not None for profile in self.profiles)

    def _cost(self, bins: Sequence[Bin]) -> float:
        """Price of servers per hour, or their GPUs if a kind has no price."""
        priced = self._priced
        return math.fsum(
            (item.profile.gpu.price_per_hour or 0.0) if priced else item.profile.engine.gpus for item in bins
        )

    def _mixed(self, tighter: float, groups: Sequence[Sequence[int]], *, within: bool = False) -> list[Bin]:
        """The servers of a mix, with each group of adapters on servers of its own; none if no plan was found."""
        job, bins = self.job, list[Bin]()
        job.progress("searching for a cheaper mix of kinds", 0, 0)
        fleet = self.split.fleet if within else self.split.fleet.with_arrivals(Arrivals())
        margins = {profile: own + tighter for profile, own in self.margins.items()}
        part = min(1.0, 2.0 / len(groups))
        for members in () if job.over() else groups:
            own, left_s = fleet.subset(members), job.remaining_s()
            plan = solve(
                own, self.profiles, "cost" if self._priced else "gpus", solver=Mixed(part * _MIXED_S),
                slo=own.slo if within else None, margin=margins, seed=job.seed, stop=job.stop, verify=False,
                with_headroom=False,
                time_limit_s=limit_of(left_s if math.isinf(left_s) else part * min(_MIXED_S, left_s)),
            )  # fmt: skip
            if plan.status is Status.INFEASIBLE:
                return []
            bins += [replace(item, adapters=tuple(members[i] for i in item.adapters)) for item in plan.bins]
        return bins

    def _tried(self, bins: Sequence[Bin]) -> Plan | None:
        """The plan with these servers, whose adapters the job judges at the rates of their kinds; None if they are of
        one kind, because that is an option of its own already."""
        if len(_kinds(bins)) < 2:
            return None
        bins = self.split.joined(bins)
        self.first = len(bins)
        self._raise_rates(bins)
        return self.job.put(bins).plan

    def _raise_rates(self, bins: Sequence[Bin]) -> None:
        """Let the job judge plans at the rates raised by the margin of the kind on which each adapter is in `bins`."""
        job = self.job
        if job.replayed or len(set(self.margins.values())) < 2:
            return
        # The last server of a split adapter counts.
        rising = sorted(bins, key=lambda item: self.margins[item.profile])
        factors = {i: 1.0 + self.margins[item.profile] for item in rising for i in item.adapters}
        adapters = (each.at_rate(each.rate * factors[i]) for i, each in enumerate(job.workload.adapters))
        job.raised = replace(job.workload, adapters=tuple(adapters))
        job.kept = KeptHours(job.workload, job.raised, job.seed, job.hours, job.kept.others)

    def judge(self, plan: Plan, number: int) -> Plan:
        """Verify the mix in the hours in which plans must keep the limits, and in fresh hours. Servers without which
        the others keep the goal, too, leave it: the search places the parts of adapters that are hot for some kind."""
        if not self._keeps(plan.bins, number):
            return replace(plan, verified=False)
        bins: Sequence[Bin] = plan.bins
        while (fewer := next((each for each in self._fewer(bins) if self._keeps(each, number)), None)) is not None:
            bins = fewer
        self._raise_rates(bins)
        return replace(plan if bins == plan.bins else self.put(bins), verified=True)

    def _keeps(self, bins: Sequence[Bin], number: int) -> bool:
        kept = self.job.kept
        return kept.holds(bins, self.job.spare) and not kept.broken_later(bins, number)

    def _fewer(self, bins: Sequence[Bin]) -> Iterator[Sequence[Bin]]:
        """Yield mixes on one server less: one of those with least load gives its adapters to one of those that hold
        most more, by the share of their limits that they use. If that one then breaks its limits, others take part."""
        if len(bins) < 3:  # one kind would be left
            return
        job, used = self.job, self.job.kept.used(bins, self.job.kept.hours[:1])
        load = [item.offered_tok_s(self.workload) for item in bins]
        room = [each / max(share, 1e-3) - each for each, share in zip(load, used, strict=True)]
        for k in sorted(range(len(bins)), key=load.__getitem__)[:TRIES]:
            left = sorted((j for j in range(len(bins)) if j != k), key=lambda j: -room[j])
            for j in left[:TRIES] if len(_kinds([bins[j] for j in left])) > 1 else ():
                if job.over():
                    return
                both, others = _together(bins[j], bins[k]), [bins[n] for n in left if n != j]
                self._raise_rates([both, *others])
                made = [*with_best_slots(job.kept, [both], job.kept.hours, job.over), *others]
                if job.kept.holds_one(made[0]):
                    yield made
                elif (mended := job.mended([made])) is not None:
                    yield mended

    def look_around(self, _plan: Plan | None = None) -> None:
        """Do nothing: no points are made besides a mix."""

    def prove(self, plan: Plan) -> Plan:
        """The plan unchanged: a bound for one kind of server does not hold for a mix."""
        return plan

    def explain(self, plan: Plan) -> Plan:
        """The plan with its decision, and the largest margin of its servers instead of all kinds."""
        plan = super().explain(plan)
        own = [self.margins[item.profile] for item in plan.bins if item.profile in self.margins]
        return plan if plan.margin is None else replace(plan, margin=max(own, default=plan.margin))


def _together(item: Bin, other: Bin) -> Bin:
    """A server with the adapters of another one, too."""
    shares = dict(zip(item.adapters, item.shares, strict=True))
    for i, share in zip(other.adapters, other.shares, strict=True):
        shares[i] = min(1.0, shares.get(i, 0.0) + share)
    settings = item.profile.settings(item.max_loras, max(item.max_lora_rank, other.max_lora_rank))
    return replace(item, adapters=tuple(shares), shares=tuple(shares.values()), settings=settings)


def _merged(
    workload: Workload, chosen: Sequence[tuple[tuple[int, ...], Option]], options: Sequence[Option],
    margins: Mapping[Profile, float], runtime_s: float,
) -> Plan:  # fmt: skip
    """One plan of the best option of each model."""
    plans = [option.plan for _, option in chosen]
    first = plans[0]
    bins = tuple(item.under(index) for index, option in chosen for item in option.plan.bins)
    holds = all(option.holds for _, option in chosen)
    raised = [item for plan in plans if plan.margin is not None for item in plan.bins]
    verified = [plan.verified for plan in plans]
    return replace(
        first,
        lower_bound=None,  # a bound holds for one model on one kind of server only
        bound_proven=False,
        bound_source="",
        workload=workload,
        bins=bins,
        evaluations=Evaluations.of([row for plan in plans for row in plan.evaluations]),
        status=Status.FEASIBLE if holds else Status.INFEASIBLE,
        objective="recommend",
        objective_value=(float(sum(plan.n_gpus for plan in plans)),),
        margin=max((plan.margin for plan in plans if plan.margin is not None), default=None),
        rooms=tuple(room for plan in plans for room in plan.rooms) if all(plan.rooms for plan in plans) else (),
        headroom=tuple(factor for plan in plans for factor in plan.headroom or (None,) * len(plan.bins)),
        reasons=(*unpriced(options), *(reason for plan in plans for reason in plan.reasons)),
        unplaced=tuple(sorted(index[i] for index, option in chosen for i in option.plan.unplaced)),
        verified=False if False in verified else None if None in verified else True,
        adapters=_adapters(len(workload), chosen),
        runtime_s=runtime_s,
        versions={key: value for plan in plans for key, value in plan.versions.items()}
        | versions([item.profile for item in bins]),
        limits=WHOLE_GOAL,
        decision="\n".join(
            [
                *_total([option for _, option in chosen]),
                *(_said(option, options) for _, option in chosen),
                *raised_words(margins, raised),
            ]
        ),
        frontier=(),
        kinds=tuple(option.to_dict() | {"chosen": any(option is each for _, each in chosen)} for option in options),
        estimate_band=first.estimate_band if len(plans) == 1 else {},
        within_goal={},
        statistics={},
    )


def _adapters(n: int, chosen: Sequence[tuple[tuple[int, ...], Option]]) -> AdapterFigures | None:
    """The figures of each of the `n` adapters; None if a plan has none."""
    columns = np.full((len(AdapterFigures._fields), n), np.nan)
    for index, option in chosen:
        if option.plan.adapters is None:
            return None
        columns[:, list(index)] = option.plan.adapters
    return AdapterFigures(*columns)


def _total(chosen: Sequence[Option]) -> list[str]:
    """GPUs and price of all models together; [] for a single model."""
    gpus = sum(option.plan.n_gpus for option in chosen)
    prices = [option.plan.price_per_hour for option in chosen]
    price = "" if None in prices else f", {money(sum(each or 0.0 for each in prices))} per hour"
    return [f"{gpus} GPUs{price}."] if len(chosen) > 1 else []


def _said(best: Option, options: Sequence[Option]) -> str:
    """Lines that say what to deploy for one model, what fewer servers would give, and what other kinds would take."""
    others = [
        f"{each.kinds} {'would take' if each.holds else 'does not keep the goal with'} {_gpus(each.plan)}"
        for each in options
        if each.model == best.model and each is not best
    ]
    return "\n".join([f"{best.plan.hardware}: {best.told}", *(f"{each}." for each in others)])


def _gpus(plan: Plan) -> str:
    price = "" if plan.price_per_hour is None else f", {money(plan.price_per_hour)} per hour"
    return f"{counted(plan.n_gpus, 'GPU')}{price}"
