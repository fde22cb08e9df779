"""Evaluate a plan again: with another predictor or seed, higher rates, or adapters added or removed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from packer import seeds
from packer.adapter import Adapter
from packer.bin import Bin
from packer.cluster import Cluster
from packer.errors import IncompatibleError
from packer.evaluation import SIMULATED, WHOLE_GOAL, Evaluations
from packer.failover import without_server
from packer.goal import GoalLike
from packer.objectives.base import limits_of
from packer.operate.changes import Changed, changed_plan
from packer.plan import Plan, Status
from packer.planning.assemble import versions
from packer.planning.chance import beyond, hours_broken
from packer.planning.kept import Hour, KeptHours
from packer.planning.rarely import is_rare, looked_for_rare
from packer.planning.rooms import with_room
from packer.progress import Progress, silent
from packer.public import public
from packer.room import levels_of
from packer.solvers.evaluator import Evaluator
from packer.strategies import Predictor
from packer.twin.hours import Hours, of_hours
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.twin.until_clear import evaluation_of
from packer.words import counted
from packer.workload import Workload

SHOWN = (
    *("offered_tok_s", "total_token_throughput", "starved", "memory_error", "mean_ttft_ms", "mean_itl_ms"),
    *SIMULATED,
)
"""Figures of a server in the JSON result."""


class Worst(NamedTuple):
    """The adapter that uses most of its limits, and its server; `slo_used` is infinite if no request completed."""

    adapter: str
    server: int
    slo_used: float

    def __str__(self) -> str:
        used = f" ({self.slo_used:.0%} of its limits)" if math.isfinite(self.slo_used) else ""
        return f"server {self.server} for adapter {self.adapter!r}{used}"


@dataclass(frozen=True, eq=False)
class PlanEvaluation:
    """The running servers of a plan, under the fleet with which they are evaluated.

    `plan`: the plan with the new fleet and the new figures; status "infeasible" if it does not hold.
    `before`: the figures that the plan carried, one row for each server of `plan`.
    `gpus`: the number of each server in the original plan; servers without an adapter are left out.
    `beyond`: how many adapters are beyond their limits in each hour that was simulated to tell whether breaks are rare;
    infinite if a server uses more than twice its limits; empty if one hour says it all.
    `worst`: the adapter that breaks its limits most in these hours; None if none does.
    `breaks_without`: servers whose loss breaks a plan with a spare server that holds with all of them.
    """

    plan: Plan
    before: Evaluations
    gpus: tuple[int, ...]
    beyond: tuple[float, ...] = ()
    worst: Worst | None = None
    breaks_without: tuple[int, ...] = ()

    @property
    def rarely(self) -> str:
        """In how many hours limits break, for how many adapters, and what breaks them most; "" if none does."""
        if not any(self.beyond):
            return ""
        over = len(self.beyond) * len(self.plan.workload)
        count = sum(self.beyond)
        of = f", for {math.ceil(count):,} of {over:,} adapter-hours" if math.isfinite(count) else ""
        text = f"The latency limits break in {hours_broken(self.beyond)} of {counted(len(self.beyond), 'hour')}{of}"
        most = "" if self.worst is None else f", most on {self.worst}"
        return f"{text}{most}: {self.plan.goal}"

    @property
    def holds(self) -> bool:
        """Whether every adapter has a server, every server starts and serves its load, and a plan that was made to
        keep latency limits keeps them; a plan with a spare server also after the loss of any one."""
        return self.plan.status is not Status.INFEASIBLE

    @property
    def over_limits(self) -> tuple[int, ...]:
        """Numbers of the servers that serve their load, but whose adapters break their latency limits; none if a share
        of the adapters may, and no more do."""
        found = self.plan.evaluations
        if self.holds and self.plan.objective == "recommend" and self.plan.workload.slo.adapter_share < 1.0:
            return ()
        over = [getattr(found, name) > most for name, most in (self.plan.limits or WHOLE_GOAL).items()]
        return tuple(self.gpus[k] for k in np.flatnonzero(found.feasible & np.any(over, axis=0)).tolist())

    @property
    def by_few(self) -> bool:
        """Whether `over_limits` are servers of which no adapter breaks its limits, but those with few requests may."""
        figures, limited = self.plan.adapters, "slo_used" in self.plan.limits and self.plan.workload.slo.of_adapters
        return limited and figures is not None and not (figures.slo_used > 1.0).any()

    @property
    def broken(self) -> tuple[int, ...]:
        """Numbers of the servers that starve or do not start."""
        return tuple(self.gpus[k] for k in np.flatnonzero(~self.plan.evaluations.feasible).tolist())

    @property
    def breaks_first(self) -> int | None:
        """The server with the least room: the broken one that serves the smallest share, else the lowest headroom."""

        def order(k: int) -> tuple[int, float, int]:
            row = self.plan.evaluations[k]
            unknown = 0.0 if self.plan.rooms else float("inf")
            return (1, self.plan.headroom[k] or unknown, k) if row.feasible else (0, row.served_share, k)

        known = not self.holds or any(factor is not None for factor in self.plan.headroom)
        return self.gpus[min(range(len(self.gpus)), key=order)] if self.gpus and known else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        plan = self.plan
        return {
            "holds": self.holds,
            "calibrated": all(item.profile.calibrated for item in plan.bins),
            "predictor": plan.predictor,
            "seed": plan.seed,
            "breaks_first": self.breaks_first,
            "broken_servers": self.broken,
            "over_limits_servers": self.over_limits,
            "breaks_without_servers": self.breaks_without,
            "hours": len(self.beyond) or 1,
            "hours_over_limits": hours_broken(self.beyond) if self.beyond else int(bool(self.over_limits)),
            "worst": None if self.worst is None else self.worst._asdict(),
            "unplaced": [plan.workload.names[i] for i in plan.unplaced],
            "servers": [
                {
                    "server": gpu,
                    "adapters": len(plan.bins[k].adapters),
                    **{name: getattr(row, name) for name in SHOWN},
                    "headroom": self.plan.headroom[k],
                }
                for k, (gpu, row) in enumerate(zip(self.gpus, plan.evaluations, strict=True))
            ],
        }


@public
def evaluate_plan(
    plan: Plan,
    predictor: str | Predictor = "twin",
    *,
    rate_factor: float = 1.0,
    add: Sequence[Adapter] = (),
    remove: Collection[str] = (),
    lose: Collection[int] = (),
    seed: int | None = None,
    duration_s: float | None = None,
    slo: GoalLike | None = None,
    progress: Progress = silent,
) -> PlanEvaluation:
    """Evaluate whether a plan holds: its servers with new figures, at the rates as given, without a margin.

    `plan`: with at least one server. `predictor`: a registered name, the path of a trained predictor, or an object.
    `rate_factor`, `add`, `remove`: factor of every rate; new adapters; names of adapters to remove.
    `lose`: numbers of servers that are lost. Their adapters, and new ones, go where `packer.failover.placed` says.
    Without it, a plan with a spare server (`Plan.spare`) is also evaluated after the loss of each one.
    `seed`: None: a seed that neither the search nor the verification of the plan has used. If that hour breaks the
    limits and further hours do so rarely, or by chance alone, the seed of the first hour that keeps them.
    `duration_s`: simulated time of each server, for the twin only, without headroom; None: an hour (whole cycles of
    piecewise rates), and for starvation as long as a clear result needs.
    `slo`: the goal that the plan is held to, as for `packer.solve`; None: the goal that it was made for.

    Raises `IncompatibleError`: no server has an adapter, or a duration was given for a predictor that does not
    simulate; others as `packer.operate.changes.changed_plan`.
    """
    plan = held_to(plan, slo, add)
    changed = changed_plan(plan, rate_factor=rate_factor, add=add, remove=remove, lose=lose)
    if not changed.bins:
        raise IncompatibleError("No GPU of the plan has an adapter, so there is nothing to evaluate.")
    used = seeds.evaluating(plan.seed) if seed is None else seed
    hours = Hours(used, limits=plan.limits, levels=levels_of(plan.margin))
    judged = partial(_judged, plan, hours=hours, predictor=predictor, looks=seed is None, duration_s=duration_s)
    progress("servers", 0, 2)
    found, evaluator, looked, kept, reasons = judged(changed)
    left = {*changed.unplaced, *(plan.workload.names[i] for i in plan.unplaced)}
    unplaced = [i for i, name in enumerate(changed.workload.names) if name in left]
    shown, lost = hours.seed, list[int]()
    for k, gpu in enumerate(changed.gpus) if kept and not unplaced and plan.spare and not lose else ():
        hours.seed = used
        bins, homeless = without_server(changed.workload, changed.bins, k)
        if homeless or not bins or not judged(replace(changed, bins=bins)).kept:
            lost.append(gpu)
    hours.seed, whole = shown, kept and not unplaced and not lost
    profiles = list(dict.fromkeys(item.profile for item in changed.bins))
    evaluated = Plan(
        changed.workload, changed.bins, found, Status.FEASIBLE if whole else Status.INFEASIBLE,
        plan.objective, plan.solver, evaluator.name, headroom=(None,) * len(changed.bins), reasons=reasons,
        unplaced=tuple(unplaced), verified=whole if evaluator.name == "twin" else None,
        runtime_s=plan.runtime_s, seed=hours.seed, versions=versions(profiles), limits=plan.limits,
        evaluated_s=duration_s or 0.0,
        statistics={"rate_factor": rate_factor, "lost": list(lose), **({"spare": 1} if plan.spare else {})},
    )  # fmt: skip
    if duration_s is None:
        progress("headroom", 1, 2)
        evaluated = with_room(evaluated, evaluator, hours=hours)
    before = Evaluations.of([plan.evaluations[gpu] for gpu in changed.gpus])
    worst = _worst(changed, hours, used, looked) if any(looked) else None
    result = PlanEvaluation(evaluated, before, changed.gpus, tuple(looked), worst, tuple(lost))
    return replace(result, plan=replace(evaluated, reasons=(result.rarely,))) if result.rarely else result


def held_to(plan: Plan, slo: GoalLike | tuple[str, ...] | None, add: Sequence[Adapter] = ()) -> Plan:
    """The plan, held to a latency goal instead of the one that it was made for; unchanged for None. `add`: adapters
    that come to the plan, which may have classes of their own."""
    if slo is None:
        return plan
    every = {each.name: each for each in (*plan.workload.adapters, *add)}
    whole = replace(plan.workload, adapters=tuple(every.values()))
    fleet = replace(plan.workload, slo=whole.held_to(slo).slo)
    return replace(plan, workload=fleet, limits=plan.limits if plan.objective == "recommend" else limits_of(fleet.slo))


def holds_routed(plan: Plan, run: Run) -> bool:
    """Whether the plan's servers do not starve and keep, in a run behind a live router, the limits that the plan was
    made for. Limits of adapters are compared with all requests of the cluster, limits of servers with each server's."""
    return not run.starved and all(
        run.slo_used <= most
        if name == "slo_used"
        else all(getattr(server, name) <= most for server in run.servers if server.completed)
        for name, most in plan.limits.items()
    )


def breaks_without(plan: Plan, run_of: Callable[[Cluster], Run]) -> tuple[int, ...]:
    """The servers whose loss breaks a plan with a spare server, in runs behind a live router."""
    cluster, names, found = plan.cluster(), plan.workload.names, list[int]()
    for lost in range(len(plan.bins) if plan.spare else 0):
        bins, homeless = without_server(plan.workload, plan.bins, lost)
        placed = tuple(dict(zip([names[i] for i in item.adapters], item.shares, strict=True)) for item in bins)
        servers = cluster.servers[:lost] + cluster.servers[lost + 1 :]
        if homeless or not holds_routed(plan, run_of(replace(cluster, servers=servers, placement=placed))):
            found.append(lost)
    return tuple(found)


class _Judged(NamedTuple):
    """Figures in the hour shown, by which predictor, `_looked_at`, whether the servers keep all, and remarks."""

    found: Evaluations
    evaluator: Evaluator
    looked: list[float]
    kept: bool
    reasons: tuple[str, ...]


def _judged(
    plan: Plan, changed: Changed, *, hours: Hours, predictor: str | Predictor, looks: bool, duration_s: float | None
) -> _Judged:
    """Judge servers from the hour of the seed of `hours` on, which becomes that of the hour shown. `looks`: further."""
    fleet, bins, used, looked = changed.workload, changed.bins, hours.seed, list[float]()
    profiles = list(dict.fromkeys(item.profile for item in bins))
    evaluator = Evaluator.load(predictor, profiles, seed=used)
    if duration_s is not None and evaluator.name != "twin":
        raise IncompatibleError(f"A duration needs the predictor 'twin': {evaluator.name!r} does not simulate.")
    simulated = evaluator.name == "twin" and duration_s is None
    # One hour shows whether limits hold, unless chance decides.
    if looks and plan.limits and simulated and fleet.arrivals.trace is None and hours.by_chance(bins, fleet):
        looked = _looked_at(plan, changed, hours)
        if looked[0] and is_rare(looked, len(changed.workload)):  # shown is the first hour that keeps the limits
            place = next((k for k, each in enumerate(looked) if not each), 0)
            hours.seed = seeds.fresh(used, place)
            evaluator = Evaluator.load(predictor, profiles, seed=hours.seed)
    if duration_s is not None:
        found = _simulated(fleet, bins, used, duration_s)
    else:
        found = evaluator.evaluate(fleet, bins)
        if evaluator.name == "twin":
            found = of_hours(found, hours.all(bins, fleet))
    kept, reasons = _limits_kept(plan, changed, found, hours)
    if any(looked):
        kept, reasons = is_rare(looked, len(changed.workload)), ()
    return _Judged(found, evaluator, looked, kept and bool(found.feasible.all()), reasons)


UNJUDGED = "The latency limits are not evaluated, which the twin does"


def _limits_kept(plan: Plan, changed: Changed, found: Evaluations, hours: Hours) -> tuple[bool, tuple[str, ...]]:
    """Whether no limit that the plan was made for is known to break, and a remark on the limits, if any."""
    figures = [(getattr(found, name), most) for name, most in plan.limits.items()]
    over = any((values > most).any() for values, most in figures)
    # The share of adapters that must keep their limits is the fleet's: on a server with few adapters it may be lower.
    if over and not (_shared(plan, changed) and not _beyond(plan, changed, hours, hours.seed)):
        return False, (f"The latency limits break: {plan.goal}",)
    if any((np.isnan(values) & found.feasible & ~found.idle).any() for values, _ in figures):
        return True, (f"{UNJUDGED}: {plan.goal}",)
    return True, ()


def _looked_at(plan: Plan, changed: Changed, hours: Hours) -> list[float]:
    """How many adapters are beyond their limits in the first hour and in further ones (`looked_for_rare`). If the first
    hour keeps the limits, servers draw their own random numbers in the further ones, which are not shown."""
    first = _beyond(plan, changed, hours, hours.seed)

    def further(place: int) -> float:
        return _beyond(plan, changed, hours, seeds.fresh(hours.seed, place), apart=not first)

    return looked_for_rare([first], len(changed.workload), further)


def _worst(changed: Changed, hours: Hours, seed: int, looked: Sequence[float]) -> Worst | None:
    """The adapter that breaks its limits most in the hours from `seed` on that break them; None if only servers do."""
    fleet = changed.workload
    kept, found = KeptHours(fleet, fleet, seed, hours), list[tuple[Worst, bool]]()
    for place in np.flatnonzero(looked).tolist():
        hour = Hour(fleet, seeds.fresh(seed, place), place > 0 and not looked[0])
        for k, each in enumerate(kept.all(changed.bins, hour)):
            used = np.nan_to_num(each.adapters.slo_used, nan=0.0, posinf=np.inf)
            silent = np.isnan(each.adapters.p95_ttft_ms)  # without an answer: the worst of those with infinite use
            most = int(np.lexsort((silent, used))[-1])
            name = fleet.names[changed.bins[k].adapters[most]]
            found.append((Worst(name, changed.gpus[k], float(used[most])), bool(silent[most])))
    most_used, _ = max(found, key=lambda each: (each[0].slo_used, each[1]))
    return most_used if most_used.slo_used > 1.0 else None


def _beyond(plan: Plan, changed: Changed, hours: Hours, seed: int, *, apart: bool = False) -> float:
    """Adapters beyond their limits in an hour (`apart`: see `kept.Hour`); infinite for limits of servers."""
    fleet = changed.workload
    kept, hour = KeptHours(fleet, fleet, seed, hours), Hour(fleet, seed, apart)
    if _shared(plan, changed):
        return 0.0 if kept.holds_in(changed.bins, hour) else math.inf
    found = kept.all(changed.bins, hour)
    if all(hour.holds[0] for hour in found):
        return 0.0
    return beyond(changed.bins, found, fleet) or math.inf


def _shared(plan: Plan, changed: Changed) -> bool:
    """Whether only a share of the fleet's adapters must keep their limits."""
    return plan.objective == "recommend" and changed.workload.slo.adapter_share < 1.0


def _simulated(workload: Workload, bins: Sequence[Bin], seed: int, duration_s: float) -> Evaluations:
    given: dict[str, Any] = {"duration_s": duration_s, "seed": seed, "timeline_bin_s": duration_s}
    runs = (simulate(b.workload(workload), b.profile, **asdict(b.settings), **given) for b in bins)
    return Evaluations.of([evaluation_of([run]) for run in runs])
