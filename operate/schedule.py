"""The day: which servers run in each period, from one plan that holds all day."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packer import checks
from packer.arrays import FloatArray
from packer.bin import Bin
from packer.errors import IncompatibleError, ValidationError, shown
from packer.evaluation import FIGURES
from packer.goal import Goal, GoalLike
from packer.gpu import Kinds, kinds_of, serving, stock_of
from packer.objectives.all_day import AllDay
from packer.objectives.headroom import with_rates
from packer.operate.day import HOUR_S, Period, Schedule, keys_of, with_steady_settings
from packer.plan import Plan, Status
from packer.planning.replicas import MOST_REPLICAS, Replicas, fewest_parts, part
from packer.planning.solve import solve
from packer.profile import Profile
from packer.solvers.evaluator import Evaluator, rate_margin_for
from packer.strategies import Predictor
from packer.traces.bursts import bursts_within
from packer.traces.pattern import clock, rates_of
from packer.traces.trace import Trace
from packer.workload import Workload

MOVE_COST_S = 10.0
"""GPU-seconds that an adapter's move counts as: it is loaded on a server that did not hold it."""


def rates_of_trace(trace: Trace, workload: Workload, period_s: float) -> dict[str, FloatArray]:
    """Rates of the fleet's adapters by period of the day, from the requests of a trace; of several days their mean.

    Raises `ValidationError`: the trace names no adapters, or one that is not in the fleet.
    """
    table = rates_of(trace, period_s).by_time_of_day()
    number = {name: i for i, name in enumerate(workload.names)}
    unknown = [name for name in table.names if name not in number]
    if unknown:
        raise ValidationError(
            f"Expected a trace of the fleet's adapters, got requests of {shown(unknown[0])}."
        )
    index = [number[name] for name in table.names]
    found: dict[str, FloatArray] = {}
    for begin_s, vector in zip(table.start_s.tolist(), table.rates, strict=True):
        rates = np.zeros(len(workload))
        rates[index] = vector
        found[clock(begin_s)] = rates
    return found


def schedule(
    workload: Workload,
    profile: Kinds,
    rates: Mapping[str, FloatArray],
    *,
    period_s: float = HOUR_S,
    startup_s: float | None = None,
    slo: GoalLike | None = None,
    predictor: str | Predictor = "auto",
    margin: float | None = None,
    max_replicas: int | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Schedule:
    """Plans for the periods of a day, with few moves between them.

    A static plan holds at the rates of every period. Each period runs as few of its servers as hold there, their
    adapters where they are in the static plan as far as possible; adapters of servers that are off are on others.
    Successive periods with as many servers become one if one set of servers holds in all of them, which saves moves;
    shorter ones also where starting servers would take more GPU time than keeping them. A server whose settings do not
    hold in the next period is replaced: another one is started before it stops.

    An adapter that one GPU does not serve in every period is planned as equal parts. Parts on one server are one
    replica, so its replicas follow its load; its share of each server is in the plans.

    Parameters
    ----------
    workload
        The fleet; its rates do not count.
    profile
        The server, or several kinds.
    rates
        Requests per second of each adapter, float64 (n,), by period, in the order of the day.
    period_s
        Length of a period.
    startup_s
        From the start of a server until it serves; None takes the longest of the profiles.
    slo
        The latency goal: a `packer.Goal`, its text (which changes the workload's; "none": servers only must not
        starve) or a mapping of limits; None: the workload's. Servers keep it by `server_goal`.
    max_replicas
        Most parts of an adapter; None: as many as it needs, but for a replayed trace.
    predictor, margin, seed, progress, stop
        As for `packer.solve`.

    Raises
    ------
    IncompatibleError
        A limit of the goal has no figure of a server.
    ValidationError
        There is no period, no plan serves all of them, or more GPUs than are at hand run while servers are replaced.
    """
    if not rates:
        raise ValidationError("Expected the rates of at least one period, got none.")
    checks.real("period_s", period_s, low=1.0)
    if max_replicas is None:
        max_replicas = 1 if workload.arrivals.trace is not None else MOST_REPLICAS
    checks.integer("max_replicas", max_replicas, low=1)
    within = server_goal(workload.held_to(slo).slo)
    profiles = tuple(dict.fromkeys(kind.profile for kind in kinds_of(profile)))
    raised = rate_margin_for(profiles, margin=margin)
    workload = workload.with_arrivals(bursts_within(workload.arrivals, period_s))
    evaluator = Evaluator.load(predictor, profiles, seed=seed, margin=raised)
    progress("all day", 0, len(rates))
    goal = AllDay(rates=_by_name(workload, rates)).within(within)
    day = _Day(Replicas(workload, {}), rates, within, period_s, evaluator)
    day = day.in_parts(profiles, evaluator.of(goal).whole(), max_replicas)
    common = {"predictor": predictor, "margin": raised, "seed": seed, "stop": stop}
    common |= {"verify": False, "with_headroom": False}
    static = day.held(list(rates), profile, solver="greedy", **common)
    if static.status is Status.INFEASIBLE:
        raise ValidationError(f"No plan holds in every period: {' '.join(static.reasons[:3])}")
    start_s = max(item.profile.startup_s for item in static.bins) if startup_s is None else startup_s
    checks.real("startup_s", start_s, low=0.0)
    given = {**common, "solver": "replan", "old_plan": static}
    periods = []
    for k, name in enumerate(rates):
        progress(f"period {name}", k, len(rates))
        periods.append(day.period([name], static, given))
    # from where the number of GPUs changes, so that midnight alone ends no period
    cut = next((t for t, each in enumerate(periods) if each.gpus != periods[t - 1].gpus), 0)
    turned = [*periods[cut:], *periods[:cut]]
    merged = _merged(turned, lambda names: day.period(names, static, given), start_s)
    joined = [replace(each, plan=_joined(day.split, each.plan)) for each in merged]
    steady = with_steady_settings(joined, day.holds)
    reported = [replace(each, plan=day.reported(each.names, each.plan)) for each in steady]
    found = _within_day(reported, len(rates) * period_s)
    found = [replace(each, moved=tuple(_moves(found[t - 1], each))) for t, each in enumerate(found)]
    static = day.reported(list(rates), _joined(day.split, static))
    result = Schedule(static, _deployed(found, evaluator), tuple(found), start_s)
    for gpu, at_hand in stock_of(kinds_of(profile)).items():
        most = result.at_once([item.gpus * (item.profile.gpu.name == gpu) for item in result.servers])
        if most > at_hand:
            raise ValidationError(
                f"Expected at least {most} GPUs {gpu} while servers are replaced, got {at_hand}: the plan that holds "
                f"all day takes {static.n_gpus} GPUs and no changes (packer solve --objective headroom:rates=FILE)."
            )
    return result


@dataclass(frozen=True, eq=False)
class _Day:
    """Rates by period, and which plans hold in some of them."""

    split: Replicas
    rates: Mapping[str, FloatArray]
    within: Goal
    period_s: float
    evaluator: Evaluator

    def _goal(self, names: Sequence[str], *, whole: bool) -> AllDay:
        """The rates of these periods, of whole adapters or of their parts."""
        fleet = self.split.workload if whole else self.split.fleet
        rates = {name: self.rates[name] for name in names}
        if not whole:
            rates = {name: self.split.rates_of_parts(vector) for name, vector in rates.items()}
        return AllDay(rates=_by_name(fleet, rates)).within(self.within)

    def fleet(self, names: Sequence[str]) -> Workload:
        """The parts of adapters at the rates of the busiest of these periods."""
        tokens = self.split.workload.mean_tokens
        busiest = max((self.rates[name] for name in names), key=lambda vector: float(vector @ tokens))
        return with_rates(self.split.fleet, self.split.rates_of_parts(busiest))

    def in_parts(self, profiles: Sequence[Profile], evaluator: Evaluator, allowed: int) -> _Day:
        """With the parts of adapters that no GPU serves alone at the rates at which plans are looked for."""
        fleet = self.split.workload
        parts = _parts(self.fleet(list(self.rates)), profiles, evaluator, allowed) if allowed > 1 else {}
        return replace(self, split=Replicas(fleet, parts))

    def held(self, names: Sequence[str], kinds: Kinds, **given: Any) -> Plan:
        """A plan of the parts of adapters that holds in these periods."""
        return solve(self.fleet(names), kinds, self._goal(names, whole=False), **given)

    def period(self, names: Sequence[str], static: Plan, given: Mapping[str, Any]) -> Period:
        """The fewest servers for successive periods, in places of the static plan's; all of these if that fails."""
        found = static
        if len(static.bins) > 1:  # no fewer servers than one hold, and it holds all day
            found = self.held(names, list(dict.fromkeys(item.profile for item in static.bins)), **given)
        places = [] if found.moves is None else [k for k in found.moves.servers if k is not None]
        if found.status is Status.INFEASIBLE or len(places) < len(found.bins):
            # a bound for all periods is none for these
            found = static.without_bound(workload=self.fleet(names), status=Status.FEASIBLE)
            places = list(range(len(static.bins)))
        begin_s = list(self.rates).index(names[0]) * self.period_s
        return Period(tuple(names), begin_s, begin_s + len(names) * self.period_s, found, tuple(places))

    def holds(self, each: Period, bins: Sequence[Bin]) -> list[bool]:
        """Which of these servers hold in a period."""
        goal = self._goal(each.names, whole=True)
        rows = self.evaluator.of(goal).judged(each.plan.workload, bins)
        return [bool(fits) for fits in goal.holds(rows)]

    def reported(self, names: Sequence[str], plan: Plan) -> Plan:
        """The plan with its figures."""
        evaluator = self.evaluator.of(self._goal(names, whole=True))
        return replace(plan, evaluations=evaluator.report(plan.workload, plan.bins))


STANDS_FOR = {"p90_ttft_ms": "p99_ttft_ms", "p95_ttft_ms": "p99_ttft_ms"}
"""Statistics over all requests of a server that stand for the statistics of each adapter."""


def server_goal(goal: Goal) -> Goal:
    """The goal of each server that stands for one of adapters: its own figures keep the limits of every class.

    Predictors give these in each period; that each adapter keeps its limits is left to the simulation of the day.

    Raises `IncompatibleError`: a limit has no such figure.
    """
    found: dict[str, float] = {}
    for key in (*goal.keys("request"), *goal.keys("adapter"), *goal.keys("server")):
        name = key.removeprefix("server.")
        name = name if key in goal.keys("server") else STANDS_FOR.get(name, name)
        if name not in FIGURES:
            raise IncompatibleError(
                f"A day can't be planned for a limit of {key}: no predictor gives it for a server."
            )
        each = (goal.limits, *dict(goal.classes).values())
        least = min(limits.to_dict().get(key, math.inf) for limits in each)
        found[f"server.{name}"] = min(least, found.get(f"server.{name}", math.inf))
    return Goal.only(found)


def _by_name(workload: Workload, rates: Mapping[str, FloatArray]) -> dict[str, dict[str, float]]:
    """Rates by period and adapter."""
    names = workload.names
    return {period: dict(zip(names, vector.tolist(), strict=True)) for period, vector in rates.items()}


def _parts(
    workload: Workload, profiles: Sequence[Profile], evaluator: Evaluator, allowed: int
) -> dict[int, int]:
    """Fewest equal parts, at most `allowed`, that hold on a GPU each, of the adapters that no GPU serves alone.

    Of each base model, adapters are tried by falling load, of larger ranks colder ones, too.
    """
    if workload.arrivals.trace is not None:
        raise IncompatibleError("A replayed trace says nothing of parts: max_replicas needs random arrivals.")
    offered = serving(workload, profiles)
    loads = [each.workload.offered_tok_s_by_adapter for each in evaluator.scenarios(workload)]
    busiest = np.max(loads, axis=0)

    def holds(i: int, parts: int) -> bool:
        alone = [part(workload, each, i, parts) for each in offered[workload.adapters[i].model]]
        return bool(evaluator.holds(workload, alone).any())

    models = [adapter.model for adapter in workload.adapters]
    found = fewest_parts(busiest, workload.ranks, models, holds, allowed)
    # What `allowed` parts do not carry is split all the same: the static plan says what is missing.
    return {i: allowed if parts is None else parts for i, parts in found.items()}


def _joined(split: Replicas, plan: Plan) -> Plan:
    """A plan of parts as one of the adapters with their shares; bounds on parts are none on adapters."""
    if not split.parts:
        return plan
    fleet, bins = (
        with_rates(split.workload, split.rates_of_whole(plan.workload.rates)),
        split.joined(plan.bins),
    )
    return plan.without_bound(workload=fleet, bins=bins, status=Status.FEASIBLE, moves=None)


def _merged(
    periods: Sequence[Period], plan_for: Callable[[Sequence[str]], Period], startup_s: float
) -> list[Period]:
    """Neighbours with one set of servers where that takes less GPU time, moves and starts included."""
    found = list(periods)
    k = 0
    while k + 1 < len(found):
        one, other = found[k], found[k + 1]
        apart = _gpu_s(one) + _gpu_s(other) + _change_s(one, other, startup_s)
        least = max(one.gpus, other.gpus) * (one.end_s - one.start_s + other.end_s - other.start_s)
        together = plan_for((*one.names, *other.names)) if least <= apart else None
        if together is not None and _gpu_s(together) <= apart:
            found[k : k + 2] = [together]
        else:
            k += 1
    return found


def _deployed(periods: Sequence[Period], evaluator: Evaluator) -> Plan:
    """Every server of the day with all adapters that it holds, at the rates of the quietest period."""
    first: dict[int, Bin] = {}
    held: dict[int, set[int]] = {}
    for each in periods:
        for k, item in zip(each.servers, each.plan.bins, strict=True):
            first.setdefault(k, item)
            held.setdefault(k, set()).update(item.adapters)
    number = Counter(i for adapters in held.values() for i in adapters)
    bins: tuple[Bin, ...] = ()
    for k, adapters in sorted(held.items()):
        shares = tuple(1.0 / number[i] for i in sorted(adapters))
        bins += (replace(first[k], adapters=tuple(sorted(adapters)), shares=shares),)
    quiet = min((each.plan for each in periods), key=lambda plan: plan.workload.offered_tok_s)
    rows = evaluator.report(quiet.workload, bins)
    status = Status.FEASIBLE if rows.feasible.all() else Status.INFEASIBLE
    value = (float(sum(item.gpus for item in bins)),)
    why = ("The servers of a day's schedule, which says when each of them runs.",)
    given = {"bins": bins, "evaluations": rows, "status": status, "objective_value": value}
    return quiet.without_bound(**given, moves=None, reasons=why)


def _gpu_s(each: Period) -> float:
    return each.gpus * (each.end_s - each.start_s)


def _change_s(one: Period, other: Period, startup_s: float) -> float:
    """GPU-seconds of a change: servers that start, before or after it, and adapters that move."""
    before, after = (set(keys_of(each, each.plan.bins)) for each in (one, other))
    return startup_s * len(before ^ after) / 2.0 + MOVE_COST_S * len(_moves(one, other))


def _moves(one: Period, other: Period) -> list[str]:
    before, after = one.home(), other.home()
    return sorted(name for name, servers in after.items() if not servers <= before.get(name, servers))


def _within_day(periods: Sequence[Period], day_s: float) -> list[Period]:
    """In the order of the day; a period over midnight becomes two."""
    found = []
    for each in periods:
        late = round(len(each.names) * (each.end_s - day_s) / (each.end_s - each.start_s))
        if late > 0:
            found.append(replace(each, names=each.names[-late:], start_s=0.0, end_s=each.end_s - day_s))
        if late < len(each.names):
            early = len(each.names) - max(late, 0)
            found.append(replace(each, names=each.names[:early], end_s=min(each.end_s, day_s)))
    return sorted(found, key=lambda each: each.start_s)
