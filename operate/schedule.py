"""The day: which servers run in each period, from one plan that holds all day."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.bin import Bin
from packer.errors import IncompatibleError, ValidationError, shown
from packer.evaluation import FIGURES, Evaluations
from packer.gpu import Kinds, kinds_of, serving
from packer.objectives.all_day import AllDay
from packer.objectives.base import Objective
from packer.objectives.headroom import with_rates
from packer.operate.day import HOUR_S, Period, Schedule
from packer.operate.replicas import Replicas, fewest_parts, part
from packer.plan import Plan, Status
from packer.profile import Profile
from packer.solvers.api import solve
from packer.solvers.evaluator import Evaluator, rate_margin_for
from packer.strategies import Predictor
from packer.traces.pattern import clock, rates_of
from packer.traces.trace import Trace
from packer.workload import Workload

FloatArray = npt.NDArray[np.float64]
MOVE_COST_S = 10.0
"""GPU-seconds that an adapter's move counts as: it is loaded on a server that did not hold it."""

LIMITS = {"p99_ttft_ms": 2000.0, "mean_itl_ms": 100.0}
"""Latencies that every server keeps in every period."""

FURTHER_MARGINS = (0.0, 0.05, 0.12, 0.25)
"""By how much rates are raised beyond the margin, in turn, until the twin keeps the limits of a period's plan: near its
limits, a server's latency is predicted well by simulation only."""

_SMALLEST_RATE = 1e-9


def rates_of_trace(
    trace: Trace, workload: Workload, period_s: float, *, start_s: float = 0.0
) -> dict[str, FloatArray]:
    """Rates of the fleet's adapters by period of the day, from the requests of a trace; of several days their mean.

    Parameters
    ----------
    start_s
        Time of the first request, s since 1970 (UTC).

    Raises
    ------
    ValidationError
        The trace names no adapters, or one that the fleet lacks.
    """
    table = rates_of(trace, period_s, start_s=start_s).by_time_of_day()
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
    limits: Mapping[str, float] | None = None,
    predictor: str | Predictor = "auto",
    margin: float | None = None,
    max_replicas: int = 1,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Schedule:
    """Plans for the periods of a day, with few moves between them.

    A static plan holds at the rates of every period. Each period runs as few of its servers as hold there, their
    adapters where they are in the static plan as far as possible; adapters of servers that are off are on others. So
    a server is one deployment that is started and stopped, and an adapter moves only when its server does. Successive
    periods with as many servers become one if one set of servers holds in all of them, which saves moves; shorter ones
    also where starting servers would take more GPU time than keeping them.

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
    limits
        Largest value of latencies of a server, by the names of `Evaluations`; None: `LIMITS`, {}: none, so that
        servers only must not starve.
    max_replicas
        Most parts of an adapter.
    predictor, margin, seed, progress, stop
        As for `packer.solve`.

    Raises
    ------
    ValidationError
        There is no period, or no plan serves all of them.
    """
    if not rates:
        raise ValidationError("Expected the rates of at least one period, got none.")
    checks.real("period_s", period_s, low=1.0)
    checks.integer("max_replicas", max_replicas, low=1)
    common: dict[str, Any] = {
        "predictor": predictor,
        "margin": margin,
        "seed": seed,
        "verify": False,
        "with_headroom": False,
        "stop": stop,
    }
    most_ms = _checked(LIMITS if limits is None else limits)
    progress("all day", 0, len(rates))

    def evaluator_of(profiles: Sequence[Profile]) -> Evaluator:
        # Learned predictors evaluate the search; the twin confirms its result.
        name = "twin" if predictor == "auto" else predictor
        raised = rate_margin_for(profiles, margin=margin)
        return Evaluator.load(name, tuple(dict.fromkeys(profiles)), seed=seed, margin=raised)

    whole = AllDay(rates=_by_name(workload, rates), most_ms=most_ms)
    parts: dict[int, int] = {}
    if max_replicas > 1:
        profiles = tuple(kind.profile for kind in kinds_of(profile))
        parts = _parts(workload, profiles, evaluator_of(profiles).of(whole), max_replicas)
    split = Replicas(workload, parts)
    workload = split.fleet
    rates = {name: split.rates_of_parts(vector) for name, vector in rates.items()}
    by_name = _by_name(workload, rates)
    tokens = workload.mean_input_tokens + workload.mean_output_tokens

    def busiest(names: Iterable[str]) -> FloatArray:
        return max((rates[name] for name in names), key=lambda vector: float(vector @ tokens))

    peak = with_rates(workload, busiest(rates))
    static = solve(peak, profile, AllDay(rates=by_name, most_ms=most_ms), solver="greedy", **common)
    if static.status is Status.INFEASIBLE:
        raise ValidationError(f"No plan holds in every period: {' '.join(static.reasons[:3])}")
    start_s = max(item.profile.startup_s for item in static.bins) if startup_s is None else startup_s
    checks.real("startup_s", start_s, low=0.0)
    used = [item.profile for item in static.bins]
    evaluator = evaluator_of(used)

    def admits(each: Period) -> Evaluations | None:
        goal = replace(whole, rates={name: whole.rates[name] for name in each.names})
        return _kept(evaluator, goal, each.plan)

    def plan_for(names: Sequence[str]) -> Period:
        goal: Objective = AllDay(rates={name: by_name[name] for name in names}, most_ms=most_ms)
        fleet = with_rates(workload, busiest(names))
        first, last = order[names[0]], order[names[-1]]
        for further in FURTHER_MARGINS:
            raised = {**common, "margin": evaluator.margin + further}
            found = solve(fleet, list(dict.fromkeys(used)), goal, solver="replan", old_plan=static, **raised)
            period = _of_static(static, found, tuple(names), first * period_s, (last + 1) * period_s)
            if len(period.servers) == len(static.bins) or _kept(evaluator, goal, period.plan) is not None:
                break
        return period

    order = {name: k for k, name in enumerate(rates)}
    periods = []
    for k, name in enumerate(rates):
        progress(f"period {name}", k, len(rates))
        periods.append(plan_for([name]))
    merged = [replace(each, plan=_joined(split, each.plan)) for each in _merged(periods, plan_for, start_s)]
    static, settled = _settled(_joined(split, static), merged, admits)
    return Schedule(static, _with_moves(settled), start_s)


def _kept(evaluator: Evaluator, goal: Objective, plan: Plan) -> Evaluations | None:
    """Figures of a plan whose servers all meet the goal; None for others."""
    evaluator = evaluator.of(goal)
    if not goal.admissible(evaluator.confirmed(plan.workload, plan.bins)).all():
        return None
    return evaluator.report(plan.workload, plan.bins)


def _checked(limits: Mapping[str, float]) -> dict[str, float]:
    """The limits, if they are numbers and of known latencies."""
    known = [key for key in FIGURES if key.endswith("_ms")]
    unknown = [key for key in limits if key not in known]
    if unknown:
        raise ValidationError(f"Expected limits among {', '.join(known)}, got {shown(unknown[0])}.")
    return {key: checks.real(key, value, low=0.0) for key, value in limits.items()}


def _by_name(workload: Workload, rates: Mapping[str, FloatArray]) -> dict[str, dict[str, float]]:
    """Rates by period and adapter; idle adapters keep a rate near 0."""
    return {
        period: dict(zip(workload.names, np.maximum(vector, _SMALLEST_RATE).tolist(), strict=True))
        for period, vector in rates.items()
    }


def _parts(
    workload: Workload, profiles: Sequence[Profile], evaluator: Evaluator, allowed: int
) -> dict[int, int]:
    """Fewest equal parts, at most `allowed`, that hold on a GPU each, of the adapters that no GPU serves alone.

    Of each base model, adapters are tried by falling load until one needs no parts.
    """
    if workload.arrivals.trace is not None:
        raise IncompatibleError("A replayed trace says nothing of parts: max_replicas needs random arrivals.")
    offered = serving(workload, profiles)
    busiest = np.max(
        [each.workload.offered_tok_s_by_adapter for each in evaluator.scenarios(workload)], axis=0
    )

    def holds(i: int, parts: int) -> bool:
        alone = [part(workload, each, i, parts) for each in offered[workload.adapters[i].model]]
        return bool(evaluator.admissible(workload, alone).any())

    found = fewest_parts(busiest, [adapter.model for adapter in workload.adapters], holds, allowed)
    # What `allowed` parts do not carry is split all the same: the static plan says what is missing.
    return {i: allowed if parts is None else parts for i, parts in found.items()}


def _joined(split: Replicas, plan: Plan) -> Plan:
    """A plan of parts as one of the adapters with their shares; bounds on parts are none on adapters."""
    if not split.parts:
        return plan
    fleet = with_rates(split.workload, split.rates_of_whole(plan.workload.rates))
    return replace(
        plan,
        workload=fleet,
        bins=split.joined(plan.bins),
        status=Status.FEASIBLE,
        lower_bound=None,
        bound_proven=False,
        bound_source="",
        moves=None,
    )


def _of_static(static: Plan, found: Plan, names: tuple[str, ...], start_s: float, end_s: float) -> Period:
    """The plan as servers of the static one; the static plan itself where it takes other servers."""
    continued = [] if found.moves is None else [k for k in found.moves.servers if k is not None]
    if len(continued) == len(found.bins) and found.status is not Status.INFEASIBLE:
        return Period(names, start_s, end_s, found, tuple(continued))
    same = replace(static, workload=found.workload)
    return Period(names, start_s, end_s, same, tuple(range(len(static.bins))))


def _settled(
    static: Plan, periods: Sequence[Period], admits: Callable[[Period], Evaluations | None]
) -> tuple[Plan, list[Period]]:
    """The same settings of a server in all periods, which it could not change without a start.

    As many and as large slots as it has in any period; where a period does not hold with these, all servers run in
    it, and if they do not either, every server keeps the settings of the static plan.
    """
    largest = {k: (item.max_loras, item.max_lora_rank) for k, item in enumerate(static.bins)}
    for each in periods:
        for k, item in zip(each.servers, each.plan.bins, strict=True):
            largest[k] = (max(largest[k][0], item.max_loras), max(largest[k][1], item.max_lora_rank))
    everyone = tuple(range(len(static.bins)))
    for chosen in (largest, {k: (item.max_loras, item.max_lora_rank) for k, item in enumerate(static.bins)}):
        whole = replace(static, bins=_with_settings(everyone, static.bins, chosen))
        found = []
        for each in periods:
            same = replace(each.plan, bins=_with_settings(each.servers, each.plan.bins, chosen))
            options = (
                replace(each, plan=same),
                replace(each, plan=replace(whole, workload=each.plan.workload), servers=everyone),
            )
            for option in options:
                fits = all(
                    item.max_lora_rank >= int(each.plan.workload.ranks[list(item.adapters)].max())
                    for item in option.plan.bins
                )
                evaluations = admits(option) if fits else None
                if evaluations is not None:
                    found.append(replace(option, plan=replace(option.plan, evaluations=evaluations)))
                    break
        names = tuple(name for each in periods for name in each.names)
        always = admits(Period(names, periods[0].start_s, periods[-1].end_s, whole, everyone))
        if len(found) == len(periods) and always is not None:
            return replace(whole, evaluations=always), found
    raise ValidationError("No settings of the servers hold in every period.")


def _with_settings(
    servers: Sequence[int], bins: Sequence[Bin], chosen: Mapping[int, tuple[int, int]]
) -> tuple[Bin, ...]:
    pairs = zip(servers, bins, strict=True)
    return tuple(replace(item, settings=item.profile.settings(*chosen[k])) for k, item in pairs)


def _merged(
    periods: Sequence[Period], plan_for: Callable[[Sequence[str]], Period], startup_s: float
) -> list[Period]:
    """Neighbours with one set of servers where that takes less GPU time, moves and starts included."""
    found = list(periods)
    k = 0
    while k + 1 < len(found):
        one, other = found[k], found[k + 1]
        apart = _gpu_s(one) + _gpu_s(other) + _change_s(one, other, startup_s)
        least = max(one.gpus, other.gpus) * (other.end_s - one.start_s)
        together = plan_for((*one.names, *other.names)) if least <= apart else None
        if together is not None and _gpu_s(together) <= apart:
            found[k : k + 2] = [together]
        else:
            k += 1
    return found


def _gpu_s(each: Period) -> float:
    return each.gpus * (each.end_s - each.start_s)


def _change_s(one: Period, other: Period, startup_s: float) -> float:
    """GPU-seconds of a change: servers that start, before or after it, and adapters that move."""
    changed = set(one.servers) ^ set(other.servers)
    return startup_s * len(changed) / 2.0 + MOVE_COST_S * len(_moves(one, other))


def _moves(one: Period, other: Period) -> list[str]:
    before, after = one.home(), other.home()
    return sorted(name for name, servers in after.items() if not servers <= before.get(name, servers))


def _with_moves(periods: Sequence[Period]) -> tuple[Period, ...]:
    return tuple(replace(each, moved=tuple(_moves(periods[t - 1], each))) for t, each in enumerate(periods))
