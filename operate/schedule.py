"""Schedule a day: which servers run in each period, from one plan that holds all day."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from packer import checks
from packer.arrays import FloatArray
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.errors import InfeasibleError, UnknownNameError, ValidationError, shown
from packer.evaluation import WHOLE_GOAL, Evaluations
from packer.goal import GoalLike
from packer.gpu import Kinds, kinds_of, serving, stock_of
from packer.moves import moves_of
from packer.operate.cycle import merged_where_cheaper, with_few_changes
from packer.operate.day import Period, Schedule, keys_of, used_together, with_steady_settings, within_day
from packer.operate.observe import drawn_within
from packer.plan import Plan, Status
from packer.planning.assemble import versions
from packer.planning.follow import many_cut
from packer.planning.frontier import Conditions
from packer.planning.periods import Periods
from packer.planning.recommend import recommend
from packer.profile import Profile
from packer.progress import Progress, silent
from packer.public import public
from packer.solvers.base import used_gpus
from packer.times import DAY_S, HOUR_S
from packer.traces.pattern import begins_at_s, clock, rates_of
from packer.traces.trace import Trace
from packer.traces.trend import DECODE, trend_of, trends_between
from packer.twin.hours import merged
from packer.twin.memory.starts import starting
from packer.workload import Workload

MOVE_COST_S = 10.0  # Cost of moving an adapter to a server that did not hold it, in GPU-seconds.


def periods_of_trace(
    trace: Trace, workload: Workload, period_s: float
) -> tuple[dict[str, FloatArray], dict[str, tuple[float, ...]]]:
    """Rates of the fleet's adapters by period of the day, from the requests of a trace, the mean of several days; and
    how the load changes within each period: length of a part, s, and factors (`packer.traces.trend.trend_of`), () if it
    does not. A trace of part of a day begins after the time without requests, so that its periods follow each other.
    Raises `ValidationError`: the trace names no adapters, or one that is not in the fleet."""
    table = rates_of(trace, period_s).by_time_of_day()
    number = {name: i for i, name in enumerate(workload.names)}
    unknown = [name for name in table.names if name not in number]
    if unknown:
        raise ValidationError(f"Expected a trace of the fleet's adapters, got requests of {shown(unknown[0])}.")
    index = [number[name] for name in table.names]
    found: dict[str, FloatArray] = {}
    trends: dict[str, tuple[float, ...]] = {}
    apart_s = np.diff(table.start_s, append=table.start_s[0] + DAY_S)
    first = int(apart_s.argmax()) + 1 if apart_s.max() > period_s else 0
    starts_s, vectors = np.roll(table.start_s, -first), np.roll(table.rates, -first, axis=0)
    for begin_s, vector in zip(starts_s.tolist(), vectors, strict=True):
        rates = np.zeros(len(workload))
        rates[index] = vector
        found[clock(begin_s)] = rates
        trends[clock(begin_s)] = trend_of(trace, begin_s, period_s, daily=not table.whole)
    return found, trends


def trends_of_rates(fleet: Workload, rates: Mapping[str, FloatArray], period_s: float) -> dict[str, tuple[float, ...]]:
    """How the load changes within each period by the mean rates of its neighbours (`trends_between`), as in
    `periods_of_trace`. A single period has the fleet's own trend."""
    if len(rates) == 1:
        return dict.fromkeys(rates, fleet.arrivals.trend)
    tokens = fleet.mean_input_tokens + DECODE * fleet.mean_output_tokens
    loads = np.array([vector @ tokens for vector in rates.values()])
    return dict(zip(rates, trends_between(loads, period_s), strict=True))


@public
def schedule(
    workload: Workload,
    profile: Kinds,
    rates: Mapping[str, FloatArray],
    *,
    trends: Mapping[str, Sequence[float]] | None = None,
    period_s: float = HOUR_S,
    startup_s: float | None = None,
    slo: GoalLike | None = None,
    margin: float | None = None,
    max_replicas: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
    stop: Callable[[], bool] = lambda: False,
) -> Schedule:
    """Plans for the periods of a day, with few moves between them.

    The static plan keeps the goal at the rates of every period: it is the plan of `packer.recommend` for the busiest
    period, which must also keep the goal in the others. Each period runs the fewest of its servers that keep the goal,
    found in the same way. Adapters stay where the period beside it has them as far as possible; those of servers that
    are off move to others. Successive periods become one if one set of servers holds in all of them and takes no more
    GPU time than separate sets, including starts and moves. A server whose settings do not hold in the next period is
    replaced: the new server is started before the old one stops. Where that takes more GPUs than are at hand, the two
    periods become one.

    An adapter that breaks the goal on one GPU is split into equal parts; the plans have its share of each server.

    `workload`: the fleet; its rates are ignored. Bursts are those within a period; for a replayed trace they are
    measured.
    `profile`: the server, or several kinds: each base model gets the cheapest kind, or mix, for its busiest period.
    `rates`: requests per second of each adapter, float64 (n,), by period, in the order of the day. Periods that are
    all named by times of day (HH:MM) begin then.
    `trends`: how all rates change within a period, by period: length of a part, s; its factor, of each in turn
    (`periods_of_trace`). Periods without one have constant mean rates. None: rates pass through those of a period on
    the way from the period before it to the next one (`trends_of_rates`).
    `period_s`: length of a period. `startup_s`: start-up time of a server; None: the longest of the profiles.
    `slo`: the goal, as for `packer.solve` ("none": servers must only not starve).
    `max_replicas`: maximum number of parts of an adapter; None: as many as it needs.
    `margin`, `seed`, `progress`, `stop`: as for `packer.recommend`.

    Raises `IncompatibleError`: a base model has no profile or no server that starts, or GPUs are limited with several
    kinds of server; `UnknownNameError`: a trend is of no period; `ValidationError`: there is no period, one does not
    begin at the time that names it, or rates are not one number >= 0 per adapter; `InfeasibleError`: no plan serves
    all periods.
    """
    rates = _checked(rates, len(workload))
    checks.real("period_s", period_s, low=1.0)
    first_s = begins_at_s(list(rates), period_s)
    fleet = drawn_within(workload.held_to(slo), period_s)
    asked = Conditions(margin=margin, max_replicas=max_replicas, seed=seed, stop=stop)
    progress("all day", 0, len(rates))
    trends = trends_of_rates(fleet, rates, period_s) if trends is None else trends
    if unknown := trends.keys() - rates.keys():
        raise UnknownNameError("period with a trend", min(unknown), rates)
    own = {name: fleet.arrivals.following(trends.get(name, ())) for name in rates}
    day = _Day(period_s, *_groups(fleet, profile, rates, asked, own))
    static = day.with_figures(day.static())
    start_s = max(item.profile.startup_s for item in static.bins) if startup_s is None else startup_s
    checks.real("startup_s", start_s, low=0.0)
    periods = day.each(static, progress)
    stock, change_s = stock_of(kinds_of(profile)), partial(_change_s, startup_s=start_s)
    merged = merged_where_cheaper(periods, partial(day.together, static), change_s, start_s)
    merged = with_few_changes(merged, periods, day.keeps, change_s)
    steady = with_steady_settings(merged, day.holds)
    while len(merged) > 1 and (over := _over(steady, stock, start_s)) is not None:
        merged = [*merged[over - 1 :], *merged[: over - 1]]
        merged[:2] = [day.together(static, *merged[:2])]
        steady = with_steady_settings(merged, day.holds)
    found = within_day([replace(each, plan=day.with_figures(each.plan)) for each in steady], len(rates) * period_s)
    found = [
        replace(
            each, start_s=first_s + each.start_s, end_s=first_s + each.end_s, moved=tuple(_moves(found[t - 1], each))
        )
        for t, each in enumerate(found)
    ]
    return Schedule(static, _deployed(found, day), tuple(found), start_s)


def _checked(rates: Mapping[str, FloatArray], n: int) -> dict[str, FloatArray]:
    """The rates of each period as an array, if there are periods and each has one rate >= 0 per adapter."""
    if not isinstance(rates, Mapping) or not rates:
        rule = "Expected the rates of at least one period, a mapping of its name to one rate per adapter"
        raise ValidationError(f"{rule}, got {shown(rates)}.")
    found = {name: checks.row(f"the rates of period {name}", each) for name, each in rates.items()}
    for name, vector in found.items():
        if len(vector) != n or vector.min() < 0.0:
            rule = f"Expected the rates of period {name} to be {n:,} numbers >= 0, one per adapter"
            raise ValidationError(f"{rule}, got {shown(vector.tolist())}.")
    return found


@dataclass(frozen=True, eq=False)
class _Group:
    """Adapters that are on one kind of server all day: their indices in the fleet, periods, and the GPUs at hand."""

    adapters: Sequence[int]
    periods: Periods
    max_gpus: int | None = None


def _groups(
    fleet: Workload, profile: Kinds, rates: Mapping[str, FloatArray], asked: Conditions, own: Mapping[str, Arrivals]
) -> tuple[Periods, list[_Group]]:
    """The periods of the whole fleet, and the adapters of each kind of server; with several kinds, as in the plan for
    the busiest period."""
    kinds = kinds_of(profile)
    profiles = [kind.profile for kind in kinds]
    (_, *more) = serving(fleet, profiles)
    whole = Periods(fleet, profiles[0], rates, asked, own)
    if len(kinds) == 1 and not more:
        starting(fleet, profiles)
        return whole, [_Group(range(len(fleet)), whole, kinds[0].available)]
    plan = recommend(whole.busiest(rates), kinds, **vars(asked))
    if plan.status is Status.INFEASIBLE:
        raise _none_holds(plan)
    held: dict[Profile, set[int]] = {}
    for item in plan.bins:
        held.setdefault(item.profile, set()).update(item.adapters)
    return whole, [_Group(sorted(own), whole.of(sorted(own), each)) for each, own in held.items()]


def _none_holds(plan: Plan) -> InfeasibleError:
    why = [each for each in plan.reasons if not each.startswith("server ")] or plan.reasons  # numbers of no use here
    reasons = ". ".join(each.rstrip(".") for each in why[:3])
    reasons = re.sub(r"--gpus \d+, or ", "", reasons)  # an option of `packer solve` alone
    return InfeasibleError(f"No plan holds in every period: {reasons}.")


@dataclass(frozen=True, eq=False)
class _Day:
    """The periods of the whole fleet, and the search for servers that hold in some of them."""

    period_s: float
    whole: Periods
    groups: Sequence[_Group]
    _fewer: dict[Any, Sequence[Bin]] = field(default_factory=dict, init=False)
    """Servers found so far, by kind, rates and arrivals: many hours of a table are equal."""

    def static(self) -> Plan:
        """The plan that keeps the goal in every period."""
        bins: list[Bin] = []
        for group in self.groups:
            if (found := group.periods.plan(self.whole.rates, group.max_gpus)) is None:
                raise _none_holds(group.periods.missed(self.whole.rates, group.max_gpus))
            bins += [item.under(group.adapters) for item in found.bins]
        return self._plan(list(self.whole.rates), bins)

    def each(self, static: Plan, progress: Progress) -> list[Period]:
        """The servers of each period, from the busiest one on: each next period is the busiest of those beside the
        ones that have servers, and stays close to that neighbour."""
        names, found = list(self.whole.rates), dict[int, Period]()
        heights = [each.offered_tok_s * each.arrivals.height for each in (self.whole.busiest([n]) for n in names)]
        while len(found) < len(names):
            near = {(t + step) % len(names): t for t in found for step in (1, -1)}
            left = [t for t in (near or range(len(names))) if t not in found]
            t = max(left, key=heights.__getitem__)
            progress(f"period {names[t]}", len(found), len(names))
            found[t] = self._period([names[t]], static, found.get(near.get(t, -1)))
        return [found[t] for t in range(len(names))]

    def together(self, static: Plan, one: Period, other: Period) -> Period:
        """Servers for two successive periods: those of one of them if they hold in both."""
        names = [*one.names, *other.names]
        names = names if len(names) < len(self.whole.rates) else list(self.whole.rates)
        return self._period(names, static, max(one, other, key=lambda each: each.gpus), [one, other])

    def _period(
        self, names: Sequence[str], static: Plan, beside: Period | None, alone: Sequence[Period] = ()
    ) -> Period:
        """The fewest servers for successive periods, close to those of the period `beside`, in the places that these
        have; None: those of the static plan."""
        bins: list[Bin] = []
        places: list[int] = []
        for group in self.groups:
            own = [k for k, item in enumerate(static.bins) if item.profile == group.periods.profile]
            kept, running, at = _of(group, static.bins), _of(group, static.bins), own
            if beside is not None:
                pairs = zip(beside.servers, beside.plan.bins, strict=True)
                running = _of(group, beside.plan.bins)
                at = [k for k, item in pairs if item.profile == group.periods.profile]
            made = self._servers(group, names, kept, running, [_of(group, each.plan.bins) for each in alone])
            places += _places(running, made, at, own)
            bins += [item.under(group.adapters) for item in made]
        begin_s = list(self.whole.rates).index(names[0]) * self.period_s
        end_s = begin_s + len(names) * self.period_s
        return Period(tuple(names), begin_s, end_s, self._plan(names, bins), tuple(places))

    def _servers(
        self, group: _Group, names: Collection[str], static: Sequence[Bin], running: Sequence[Bin],
        alone: Sequence[Sequence[Bin]],
    ) -> Sequence[Bin]:  # fmt: skip
        """The fewest servers that keep the goal in some periods; those of one of the periods `alone` if these keep
        the goal in all of them; the static ones if no smaller number does."""
        fewer = (len(static) - 1) * group.periods.profile.engine.gpus
        if not fewer or self.whole.asked.stop():
            return static
        if alone and all(list(bins) == list(alone[0]) for bins in alone):
            return alone[0]  # each period has been judged with these
        key = group.periods.profile, frozenset(map(self.whole.key, names))
        if key not in self._fewer:
            most = max(map(len, alone), default=0)
            held = (bins for bins in alone if len(bins) == most and group.periods.hold(names, bins))
            if (bins := next(held, None)) is None:
                bins = static
                if len(running) == 1 and group.periods.hold(names, running):
                    bins = running
                elif most < len(static) and (found := group.periods.plan(names, fewer, running, static)) is not None:
                    bins = found.bins
            self._fewer[key] = bins
        return self._fewer[key]

    def keeps(self, each: Period) -> bool:
        """Whether the servers of a period keep the goal in it."""
        return all(group.periods.hold(each.names, _of(group, each.plan.bins)) for group in self.groups)

    def holds(self, each: Period, bins: Sequence[Bin]) -> list[bool]:
        """Which of these servers, of one kind, hold in a period."""
        group = next(group for group in self.groups if group.periods.profile == bins[0].profile)
        return group.periods.keeping(each.names, _of(group, bins))

    def _plan(self, names: Collection[str], bins: Sequence[Bin]) -> Plan:
        """Servers at the rates of the busiest of these periods, without their figures."""
        fleet, asked = self.whole.busiest(names), self.whole.asked
        margin = max(asked.margin_of(group.periods.profile) for group in self.groups)
        plan = Plan(
            fleet, tuple(bins), Evaluations.of([]), Status.FEASIBLE, "recommend", "schedule", "twin",
            objective_value=(float(sum(item.gpus for item in bins)),), margin=margin, seed=asked.seed,
            versions=versions([group.periods.profile for group in self.groups]), limits=WHOLE_GOAL,
        )  # fmt: skip
        every = " in every period" if len(names) == len(self.whole.rates) else ""
        return replace(plan, decision=f"{plan.hardware}: the goal holds{every}{many_cut(plan)}.")

    def with_figures(self, plan: Plan) -> Plan:
        """The plan with the figures of its servers and adapters from a simulated hour."""
        hours = self.whole.hours.all(plan.bins, plan.workload)
        figures = Evaluations.of([hour.figures for hour in hours])
        return replace(plan, evaluations=figures, adapters=merged(plan.workload, plan.bins, hours))


def _of(group: _Group, bins: Sequence[Bin]) -> list[Bin]:
    """The servers of a group, with adapters as indices of it instead of the fleet."""
    number = {i: k for k, i in enumerate(group.adapters)}
    return [item.under(number) for item in bins if item.profile == group.periods.profile]


def _places(running: Sequence[Bin], bins: Sequence[Bin], at: Sequence[int], places: Sequence[int]) -> list[int]:
    """For each server, the place of the running one that it continues, else a free one of all `places`; `at`: those of
    the running servers."""
    continued = [None if j is None else at[j] for j in moves_of(running, bins).servers]
    free = (k for k in places if k not in continued)
    return [next(free) if k is None else k for k in continued]


def _over(periods: Sequence[Period], stock: Mapping[str, int], startup_s: float) -> int | None:
    """The first period for which a server starts while more GPUs are in use than are at hand, by name; None: none."""
    item_of = {k: item for each in periods for k, item in zip(each.servers, each.plan.bins, strict=True)}
    for t, servers in used_together(periods, startup_s):
        used = used_gpus([item_of[k] for k in servers])
        if any(used.get(name, 0) > most for name, most in stock.items()):
            return t
    return None


def _deployed(periods: Sequence[Period], day: _Day) -> Plan:
    """Every server of the day with all adapters that it ever holds, at the rates of the quietest period."""
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
    why = ("The servers of a day's schedule, which says when each of them runs.",)
    value = (float(sum(item.gpus for item in bins)),)
    plan = day.with_figures(replace(quiet, bins=bins, objective_value=value, reasons=why, decision=""))
    status = Status.FEASIBLE if plan.evaluations.feasible.all() else Status.INFEASIBLE
    return replace(plan, status=status)


def _change_s(one: Period, other: Period, startup_s: float) -> float:
    """GPU-seconds of a change: half a start for each GPU whose server starts or stops, and the moves of adapters."""
    gpus = [
        {key: item.gpus for key, item in zip(keys_of(p, p.plan.bins), p.plan.bins, strict=True)} for p in (one, other)
    ]
    changed = sum(number for key, number in (gpus[0] | gpus[1]).items() if (key in gpus[0]) != (key in gpus[1]))
    return startup_s * changed / 2.0 + MOVE_COST_S * len(_moves(one, other))


def _moves(one: Period, other: Period) -> list[str]:
    before, after = one.home(), other.home()
    return sorted(name for name, servers in after.items() if not servers <= before.get(name, servers))
