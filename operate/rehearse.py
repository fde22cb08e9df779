"""Compare the controller on the cluster twin, under a trace and failures, with a schedule, rules and hindsight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from packer import checks
from packer.adapter import Adapter
from packer.arrays import FloatArray
from packer.arrival import Arrivals
from packer.change import Change, Controller
from packer.cluster import Cluster, ServerKind
from packer.errors import IncompatibleError
from packer.io.shipped import table
from packer.objectives.headroom import with_rates
from packer.operate.autoscalers import Autoscaler
from packer.operate.capacity import server_kinds
from packer.operate.keeper import Keeper
from packer.operate.replay import changes_of, windows_of
from packer.operate.schedule import schedule
from packer.plan import Plan, Status
from packer.planning.solve import solve
from packer.progress import Progress, silent
from packer.times import DAY_S, HOUR_S
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.run import Run
from packer.workload import Workload

MARGIN = 0.0  # Margin of hindsight, which knows the rates of each hour.
MOST_REPLICAS = 4
LAST = 0.01  # The last hour is left out if the trace covers less than this share of it.
RULES = table("packer.operate", "rules.toml")
"""Autoscaling rules: the metric that each follows, its target for each server, and its source."""


@dataclass(frozen=True, eq=False)
class Rehearsed:
    """One way to run the servers.

    `gpu_hours`: including start-up and draining. `within`: share of all requests that were taken by a server and kept
    their limits. `starts`: of servers. `loads`: of adapters on running servers. `failures`: injected failures.
    """

    name: str
    gpu_hours: float
    within: float
    starts: int
    loads: int
    failures: int


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """What the trace shows.

    `outcomes`: the controller first. `hindsight_gpu_hours`: with the fewest GPUs for each hour alone, without starts
    and failures. `fewest_loads`: adapter loads that hindsight's numbers of servers need, and loads of adapters that
    failures left without a server. `log`: the controller's changes.
    """

    outcomes: tuple[Rehearsed, ...]
    hindsight_gpu_hours: float
    fewest_loads: int
    hours: int
    log: tuple[Mapping[str, Any], ...]

    @property
    def sources(self) -> dict[str, str]:
        """The source of each rule that was compared."""
        names = {each.name for each in self.outcomes}
        return {name: row["source"] for name, row in RULES.items() if name in names}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            **{name: getattr(self, name) for name in ("hours", "hindsight_gpu_hours", "fewest_loads")},
            "outcomes": [vars(each) for each in self.outcomes],
            "sources": self.sources,
            "changes": list(self.log),
        }


@dataclass(eq=False)
class Failing:
    """A controller that loses a random server at each of `times_s`; without `inside` it starts again as it was."""

    times_s: Sequence[float]
    seed: int
    inside: Controller | None = None
    period_s: float = 60.0
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._left = sorted(self.times_s)
        self.period_s = self.period_s if self.inside is None else self.inside.period_s
        self._lost: list[int] = []

    def act(self, now_s: float, view: Any) -> Iterable[Change]:
        """The controller's changes, then the failures that are due."""
        made = list(self.inside.act(now_s, view)) if self.inside is not None else []
        if self.inside is None and self._lost:
            made.append(Change(now_s, start=tuple(self._lost)))
            self._lost = []
        stopping = {s for change in made for s in change.stop}
        while self._left and self._left[0] <= now_s:
            self._left.pop(0)
            on = [s for s in np.flatnonzero(view.on).tolist() if s not in stopping]
            if on:
                s = int(self._rng.choice(on))
                self._lost.append(s)
                made.append(Change(now_s, fail=(s,)))
        self.changes += made
        return made


def keeper_of(plan: Plan, fleet: Workload, servers: int, **given: Any) -> tuple[Keeper, Cluster]:
    """A controller for up to `servers` servers, and the cluster of all of them; the plan's servers run at first."""
    base, kinds = plan.cluster(), server_kinds(plan, servers)
    number = {name: i for i, name in enumerate(fleet.names)}
    placed = [*(base.placement or ()), *({} for _ in range(servers - len(base)))]
    held = [{number[name]: share for name, share in own.items() if name in number} for own in placed]
    on = np.arange(servers) < len(base)
    names = (*base.servers, *(kind.name for kind in kinds[len(base) :]))
    cluster = Cluster(base.kinds, names, tuple({fleet.names[a]: s for a, s in own.items()} for own in held))
    return Keeper(fleet, kinds, held, on, spare=plan.spare, **given), cluster


def _outcome(name: str, run: Run, failing: Failing, changes: Sequence[Change] = ()) -> Rehearsed:
    if run.status != "ok":
        raise IncompatibleError(f"The servers of {name!r} do not start: {run.status_reason}.")
    every = [*changes, *failing.changes]
    kept, _ = run.slo_counts
    n = len(run.raw.requests)
    return Rehearsed(
        name, run.gpu_hours, float(kept.sum()) / n if n else math.nan, sum(len(each.start) for each in every),
        sum(len(each.load) for each in every), sum(len(each.fail) for each in every),
    )  # fmt: skip


def hourly_rates(fleet: Workload, hours: int) -> FloatArray:
    """Requests per second of each adapter in each hour of the trace, float64 (hours, adapters)."""
    trace = fleet.arrivals.trace
    assert trace is not None
    hour = np.minimum((trace.time_s // HOUR_S).astype(np.int64), hours - 1)
    flat = np.bincount(hour * len(fleet) + trace.adapter, minlength=hours * len(fleet))
    return flat.reshape(hours, len(fleet)) / HOUR_S


def hindsight(fleet: Workload, kind: ServerKind, rates: FloatArray, seed: int, at_hand: int) -> list[int]:
    """The fewest GPUs for each hour, in order of load; GPUs `at_hand` for one that no number serves."""
    steady = fleet.with_arrivals(Arrivals())
    order = np.argsort(rates @ fleet.mean_tokens)
    found = np.zeros(len(order), dtype=np.int64)

    @cache
    def gpus(place: int) -> int:
        plan = solve(
            with_rates(steady, rates[order[place]]), kind.profile, slo=steady.slo, margin=MARGIN, verify=False,
            with_headroom=False, max_replicas=MOST_REPLICAS, seed=seed,
        )  # fmt: skip
        return plan.n_gpus if plan.status is not Status.INFEASIBLE else at_hand

    def fill(low: int, high: int) -> None:
        found[order[low:high]], found[order[high]] = gpus(low), gpus(high)
        # Between two hours that need the same number, all hours need it.
        if high - low > 1 and gpus(low) != gpus(high):
            middle = (low + high) // 2
            fill(low, middle)
            fill(middle, high)

    fill(0, len(order) - 1)
    return found.tolist()


def fewest_loads(rates: FloatArray, tokens: FloatArray, gpus: Sequence[int]) -> int:
    """The fewest adapter loads with which these numbers of servers serve each hour. Servers that start must take an
    even part of the load from the others: at least as many adapters as the busiest that add up to that part."""
    total = 0
    for before, now, vector in zip(gpus, gpus[1:], rates[1:], strict=False):
        load = np.sort(vector * tokens)[::-1]
        if now > before and load.sum() > 0:
            part = load.sum() * (now - before) / now
            total += int(np.searchsorted(np.cumsum(load), part - 1e-9)) + 1
    return total


def rehearse(
    plan: Plan, fleet: Workload, *, servers: int | None = None, failures_per_day: float = 1.0,
    beside: bool = True, period_s: float = 60.0, seed: int = 0, progress: Progress = silent,
) -> Rehearsal:  # fmt: skip
    """Run a trace through the controller, and through what it is compared with, with the same failures.

    `plan`: the servers that run at the start. Further servers are of its kind with the largest rank and most slots.
    `fleet`: the plan's adapters with the trace as its arrivals, and the goal by which requests are counted.
    `servers`: maximum number of servers at once, at least those of the plan; None: twice as many.
    `failures_per_day`: servers lost per day, at random times. If their number for the whole trace is not an integer,
    chance decides on the last one. The controller, or what restarts servers, notices up to `period_s` later.
    `beside`: also run fixed servers, a schedule and rules. `seed`: seed of failures and routers.
    Raises `IncompatibleError`: the fleet replays no trace; `ValidationError`: fewer servers than the plan has.
    """
    trace, running = fleet.arrivals.trace, len(plan.bins)
    if trace is None:
        raise IncompatibleError("Expected a trace of requests to rehearse with, got a fleet without one.")
    startup_s = max(item.profile.startup_s for item in plan.bins)
    count = 2 * running if servers is None else checks.integer("servers at once", servers, low=running)
    hours = max(1, math.ceil(trace.span_s / HOUR_S - LAST))
    length_s = hours * HOUR_S
    rng = np.random.default_rng((seed, 34))
    expected = failures_per_day * length_s / DAY_S
    lost = int(expected) + int(rng.random() < expected % 1.0)
    times = np.sort(rng.uniform(0.0, length_s, lost)).tolist()
    steady = fleet.with_arrivals(Arrivals())
    given: dict[str, Any] = {"duration_s": length_s, "seed": seed, "timeline_bin_s": 3600.0}
    given["startup_s"] = startup_s

    def run(name: str, cluster: Cluster, inside: Controller | None, **more: Any) -> Rehearsed:
        progress(name, 0, 0)
        failing = Failing(times, seed, inside, period_s)
        found = simulate_cluster(fleet, cluster, controller=failing, **given, **more)
        made = _outcome(name, found, failing, more.get("changes", ()))
        progress(f"{name}: {made.gpu_hours:.0f} GPU-hours, {made.within:.2%} within limits, {made.loads} loads", 1, 1)
        return made

    known = _as_planned(steady, plan.workload)
    keeper, cluster = keeper_of(plan, known, count, period_s=period_s, startup_s=startup_s, seed=seed)
    extra = tuple(range(len(plan.bins), count))
    off = [Change(0.0, stop=extra)] if extra else []
    outcomes = [run("follow", cluster, keeper, router="plan", changes=off)]
    kind = keeper.kinds[-1]
    rates = hourly_rates(fleet, hours)
    progress("hindsight", 0, 0)
    fewest = hindsight(fleet, kind, rates, seed, count * kind.profile.engine.gpus)
    if beside:
        outcomes += _beside(steady, plan, kind, rates, run, count, seed)
    log = [
        {
            "time_s": each.change.time_s, "why": each.why, "loads": each.loads, "start": list(each.change.start),
            "stop": list(each.change.stop),
        }
        for each in keeper.log
    ]  # fmt: skip
    gpus = kind.profile.engine.gpus
    needed = fewest_loads(rates, fleet.mean_tokens, [n // gpus for n in fewest])
    needed += sum(each.forced for each in keeper.log)
    return Rehearsal(tuple(outcomes), float(sum(fewest)), needed, hours, tuple(log))


def _as_planned(fleet: Workload, planned: Workload) -> Workload:
    """The fleet with the plan's lengths: the controller has to learn the true lengths."""
    old = {each.name: each for each in planned.adapters}

    def known(each: Adapter) -> Adapter:
        if (was := old.get(each.name)) is None:
            return each
        inputs, outputs = was.input_tokens or planned.input_tokens, was.output_tokens or planned.output_tokens
        return replace(each, input_tokens=inputs, output_tokens=outputs)

    return replace(fleet, adapters=tuple(map(known, fleet.adapters)))


def _beside(
    fleet: Workload, plan: Plan, kind: ServerKind, rates: FloatArray, run: Callable[..., Rehearsed],
    count: int, seed: int,
) -> list[Rehearsed]:  # fmt: skip
    """Fixed servers for the peak, a schedule by the hour, and autoscalers."""
    peak = with_rates(fleet, rates[int(np.argmax(rates @ fleet.mean_tokens))])
    static = solve(peak, kind.profile, slo=fleet.slo, max_replicas=MOST_REPLICAS, with_headroom=False, seed=seed)
    found = [run("static, for the peak", static.cluster(), None, router="plan")] if static.bins else []
    days = len(rates) // 24
    if days:
        mean = rates[: 24 * days].reshape(days, 24, -1).max(axis=0)
        by_hour = {f"{hour:02d}:00": vector for hour, vector in enumerate(mean)}
        day = schedule(fleet, kind.profile, by_hour, max_replicas=MOST_REPLICAS, seed=seed)
        windows = [
            replace(each, start_s=each.start_s + k * DAY_S, end_s=each.end_s + k * DAY_S)
            for k in range(days + (len(rates) % 24 > 0))
            for each in windows_of(day)
        ]
        cluster, changes = changes_of(windows)
        # Servers start early, so that they serve when their period begins.
        early = [Change(max(0.0, c.time_s - day.startup_s), start=c.start) for c in changes if c.start]
        then = [replace(c, start=()) for c in changes]
        found.append(run("schedule", cluster, None, router="plan", changes=[*early, *then]))
    on = max(1, len(plan.bins))
    unrestricted = Cluster((kind,), (kind.name,) * count)
    off = [Change(0.0, stop=tuple(range(on, count)))] if on < count else []
    for name, row in RULES.items():
        scaler = Autoscaler(row["rule"], row["target"], on)
        found.append(run(name, unrestricted, scaler, router="affinity", changes=off))
    return found
