"""GPUs against latency: from the fewest on which nothing starves to the point of no further gain."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.errors import ModelError
from packer.evaluation import Evaluation, Evaluations
from packer.operate.goal import adapter_p95_ttft_ms, used_of_slo
from packer.plan import Plan, Status
from packer.predictors.api import load_predictor
from packer.profile import Profile
from packer.slo import Slo
from packer.solvers.api import HEADROOM_GPUS, solve
from packer.solvers.assemble import versions
from packer.solvers.evaluator import rate_margin_for
from packer.solvers.verify import FRESH_SEED
from packer.strategies import Predictor
from packer.twin.simulate import simulate
from packer.twin.until_clear import evaluation_of
from packer.workload import Workload

GAIN = 0.1
"""A GPU more that lowers the p95 TTFT by less than this share, and the ITL by less than half of it, is no gain."""
MOST_POINTS = 12
TIGHT = 0.5
"""A server that uses more than this of the goal is tried with more slots."""
SOLVERS = ("spread-refined", "spread")
HOUR_S = 3600.0
LEVELS = tuple(round(1.1**k, 4) for k in range(1, 15))
"""Factors at which headroom is looked for."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class FrontierPoint:
    """A plan on some number of GPUs, with its figures at the rates as given.

    Parameters
    ----------
    n_gpus
        GPUs used.
    p95_ttft_ms, mean_itl_ms
        Over all requests.
    worst_adapter, worst_adapter_ttft_ms
        The adapter with the highest p95 TTFT, and that.
    price_per_hour
        Of all GPUs, by the profile's price; None where it has none.
    holds
        Whether every adapter keeps the goal with every rate raised by the margin.
    starving, queueing
        Numbers of the GPUs that starve or do not start; of those that serve their load, but have a queue that
        grows or an adapter beyond the goal.
    plan
        The plan.
    """

    n_gpus: int
    p95_ttft_ms: float
    worst_adapter: str
    worst_adapter_ttft_ms: float
    mean_itl_ms: float
    price_per_hour: float | None
    holds: bool
    starving: tuple[int, ...]
    queueing: tuple[int, ...]
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """The figures without the plan, JSON-able."""
        return {key: value for key, value in vars(self).items() if key != "plan"}


@dataclass(frozen=True, eq=False)
class ServerHour:
    """What a simulated hour of one server shows.

    `used`: how much of the goal the worst adapter uses; `worst_adapter`, `worst_ttft_ms`: the highest p95 TTFT of
    an adapter; `ttft_ms`: that of every completed request, float32, at the rates as given only.
    """

    figures: Evaluation
    used: float
    worst_adapter: str
    worst_ttft_ms: float
    ttft_ms: npt.NDArray[np.float32]


@dataclass(eq=False)
class Frontier:
    """Plans of one fleet by number of GPUs, each made when it is first needed.

    A learned predictor proposes which adapters share a GPU, for Poisson arrivals; the twin simulates each GPU
    with the fleet's own arrivals and every rate raised by the margin, and gives more slots to those that break
    the goal.

    Parameters
    ----------
    workload, profile
        The fleet, with its latency limits (`Workload.slo`), and the server.
    margin
        Share by which every rate is raised; the default margin of the profile if None.
    max_replicas, seed, stop, time_limit_s
        As for `packer.solve`.
    """

    workload: Workload
    profile: Profile
    margin: float | None = None
    max_replicas: int = 1
    seed: int = 0
    progress: Progress = lambda _what, _done, _total: None
    stop: Callable[[], bool] = lambda: False
    time_limit_s: float | None = None
    _points: dict[int, FrontierPoint] = field(default_factory=dict)
    _hours: dict[Any, ServerHour] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workload.slo.check(self.workload)
        checks.integer("max_replicas", self.max_replicas, low=1)
        checks.integer("seed", self.seed, low=0)
        if self.time_limit_s is not None:
            checks.real("the time limit (s)", self.time_limit_s, low=0, open_low=True)
        self.margin = rate_margin_for((self.profile,), margin=self.margin)
        replayed = self.workload.arrivals.trace is not None
        self._raised = self.workload if replayed else self.workload.scaled(1.0 + self.margin)
        self._calm = self.workload.with_arrivals(Arrivals())
        self._predictor = search_predictor(self.profile, self.seed)
        self.started = time.monotonic()

    def over(self) -> bool:
        """Whether to end with the best plan so far."""
        limit = math.inf if self.time_limit_s is None else self.time_limit_s
        return self.stop() or time.monotonic() - self.started > limit

    def fewest(self) -> int:
        """GPUs of a plan on which nothing starves with Poisson arrivals: where the frontier begins."""
        plan = solve(
            self._calm,
            self.profile,
            "gpus",
            predictor=self._predictor,
            max_replicas=self.max_replicas,
            margin=self.margin,
            seed=self.seed,
            verify=False,
        )
        return max(1, plan.n_gpus)

    @property
    def points(self) -> list[FrontierPoint]:
        """The points made so far, fewest GPUs first."""
        return [self._points[n] for n in sorted(self._points)]

    def at(self, n_gpus: int) -> FrontierPoint:
        """The plan on that many GPUs."""
        if n_gpus not in self._points:
            self.progress(f"{n_gpus} GPUs", 0, 0)
            plans = [bins for name in SOLVERS if (bins := self._proposed(n_gpus, name))]
            settled = [[self._settled(item) for item in bins] for bins in plans]
            best = min(settled, key=lambda bins: sum(max(1.0, min(self._used(b), 1e6)) for b in bins))
            self._points[n_gpus] = self._point(best)
        return self._points[n_gpus]

    def first_that_holds(self, low: int, high: int) -> int | None:
        """Fewest GPUs from `low` to `high` on which every adapter keeps the goal; None if none does."""
        step, below, n = 1, low - 1, low
        while not self.at(n).holds:
            if n >= high or self.over():
                return None
            below, n, step = n, min(high, n + step), 2 * step
        while n - below > 1 and not self.over():
            middle = (n + below) // 2
            below, n = (below, middle) if self.at(middle).holds else (middle, n)
        return n

    def extend(self, low: int, high: int) -> None:
        """Add points upward from `low` until one more GPU gains little, and fill the gaps below."""
        n = low
        while n < high and len(self._points) < MOST_POINTS and not self.over():
            step = max(1, round(0.1 * n))
            here, there = self.at(n), self.at(min(high, n + step))
            ttft, itl = there.p95_ttft_ms / here.p95_ttft_ms, there.mean_itl_ms / here.mean_itl_ms
            if here.holds and ttft > 1.0 - GAIN and itl > 1.0 - GAIN / 2:
                return
            n = there.n_gpus

    def explore(self, max_gpus: int | None = None) -> FrontierPoint | None:
        """Fill the points; the one with the fewest GPUs that holds, or None up to `max_gpus`."""
        most = len(self.workload) * self.max_replicas
        high = most if max_gpus is None else min(max_gpus, most)
        low = min(self.fewest(), high)
        while low > 1 and self.at(low - 1).holds and not self.over():
            low = max(1, low // 2)  # the solver's limits are narrower than the twin's
        if not self._hottest_holds():
            self.at(low)
            return None
        first = self.first_that_holds(low, high)
        self.extend(first or low, high)
        return None if first is None else self.at(first)

    def hottest(self) -> int:
        """The adapter with the largest offered load."""
        return int(self.workload.offered_tok_s_by_adapter.argmax())

    def _hottest_holds(self) -> bool:
        """Whether the adapter with the largest load keeps the goal on GPUs of its own."""
        index = self.hottest()
        rank = checks.slot_rank_for(self.workload.adapters[index].rank)
        share = () if self.max_replicas == 1 else (1.0 / self.max_replicas,)
        alone = Bin((index,), self.profile.settings(1, rank), self.profile, share)
        return self.hour(alone, self._raised).used <= 1.0

    def _proposed(self, n_gpus: int, solver: str) -> tuple[Bin, ...]:
        plan = solve(
            self._calm,
            self.profile,
            "latency",
            solver=solver,
            predictor=self._predictor,
            max_gpus=n_gpus,
            max_replicas=self.max_replicas,
            margin=self.margin,
            time_limit_s=2.0,
            seed=self.seed,
            verify=False,
        )
        return () if plan.unplaced else plan.bins

    def _settled(self, item: Bin) -> Bin:
        """The server with the number of slots that keeps the goal best; more are tried where it is tight."""
        best, used = item, self._used(item)
        slots = item.max_loras
        while used > TIGHT and slots < len(item.adapters):
            slots = min(len(item.adapters), 2 * slots)
            other = replace(item, settings=self.profile.settings(slots, item.max_lora_rank))
            found = self._used(other)
            if found >= used and math.isfinite(used):
                break
            best, used = (other, found) if found < used else (best, used)
        return best

    def _used(self, item: Bin) -> float:
        """How much of the goal the worst adapter of a server uses at the raised rates."""
        hour = self.hour(item, self._raised)
        if hour.figures.memory_error or math.isfinite(hour.used):
            return hour.used
        # Among servers that starve or queue, less delay is still better.
        return 1e3 + hour.figures.mean_ttft_ms / self.workload.slo.limits.p95_ttft_ms

    def hour(self, item: Bin, fleet: Workload, *, seed: int | None = None) -> ServerHour:
        """One hour (or the trace) of a server, remembered."""
        chosen = self.seed if seed is None else seed
        key = (item.adapters, item.shares, item.settings, id(fleet), chosen)
        if key not in self._hours:
            self._hours[key] = self._simulated(item, fleet, chosen)
        return self._hours[key]

    def _simulated(self, item: Bin, fleet: Workload, seed: int) -> ServerHour:
        sim = simulate(
            item.workload(fleet),
            item.profile,
            max_loras=item.max_loras,
            max_lora_rank=item.max_lora_rank,
            duration_s=None if fleet.arrivals.trace is not None else HOUR_S,
            seed=seed,
        )
        slowest = np.nan_to_num(adapter_p95_ttft_ms(sim), nan=math.inf)
        worst = int(slowest.argmax())
        ttft_ms = sim.ttft_ms.astype(np.float32) if fleet is self.workload else np.zeros(0, np.float32)
        return ServerHour(
            evaluation_of([sim]),
            float(used_of_slo(sim).max()),
            fleet.names[item.adapters[worst]],
            float(slowest[worst]),
            ttft_ms,
        )

    def confirmed(self, bins: Sequence[Bin]) -> bool:
        """Whether every adapter keeps the goal in another hour, at the rates as given."""
        fresh = self.seed + FRESH_SEED
        return all(self.hour(item, self.workload, seed=fresh).used <= 1.0 for item in bins)

    def headroom(self, bins: Sequence[Bin]) -> tuple[float | None, ...]:
        """Factor by which the rates of each server may grow until the goal breaks, up to `LEVELS[-1]`."""
        if self.workload.arrivals.trace is not None or len(bins) > HEADROOM_GPUS:
            return ()
        fleets = {factor: self.workload.scaled(factor) for factor in LEVELS}
        found: list[float | None] = []
        for item in bins:
            low, high = -1, len(LEVELS)
            while high - low > 1 and not self.over():
                middle = (low + high) // 2
                holds = self._simulated(item, fleets[LEVELS[middle]], self.seed).used <= 1.0
                low, high = (middle, high) if holds else (low, middle)
            found.append(LEVELS[low] if low >= 0 else None)
        return tuple(found)

    def _point(self, bins: Sequence[Bin]) -> FrontierPoint:
        hours = [self.hour(item, self.workload) for item in bins]
        raised = [self.hour(item, self._raised) for item in bins]
        slowest = max(hours, key=lambda hour: hour.worst_ttft_ms)
        requests = np.concatenate([hour.ttft_ms for hour in hours])
        figures = Evaluations.of([hour.figures for hour in hours])
        itl = np.nan_to_num(figures.mean_itl_ms, nan=0.0)
        weights = figures.total_token_throughput
        starving = tuple(k for k, hour in enumerate(raised) if not hour.figures.feasible)
        price = self.profile.gpu.price_per_hour
        plan = Plan(
            self.workload,
            tuple(bins),
            figures,
            Status.INFEASIBLE if starving else Status.FEASIBLE,
            objective="gpus",
            solver="frontier",
            predictor="twin",
            objective_value=(float(len(bins)),),
            margin=self.margin,
            runtime_s=time.monotonic() - self.started,
            seed=self.seed,
            versions=versions((self.profile,)),
        )
        return FrontierPoint(
            len(bins),
            float(np.quantile(requests, 0.95)) if len(requests) else math.nan,
            slowest.worst_adapter,
            slowest.worst_ttft_ms,
            float(np.average(itl, weights=weights)) if weights.sum() > 0 else math.nan,
            None if price is None else price * len(bins),
            all(hour.used <= 1.0 for hour in raised),
            starving,
            tuple(k for k, hour in enumerate(raised) if hour.used > 1.0 and k not in starving),
            plan,
        )


def search_predictor(profile: Profile, seed: int) -> Predictor:
    """The fastest predictor for a profile: a trained tree where one is shipped, else the twin."""
    try:
        return load_predictor("tree", profile, seed=seed)
    except ModelError:
        return load_predictor("twin", profile, seed=seed)


def frontier(
    workload: Workload,
    profile: Profile,
    *,
    slo: Slo | None = None,
    margin: float | None = None,
    max_gpus: int | None = None,
    max_replicas: int = 1,
    seed: int = 0,
    progress: Progress = lambda _what, _done, _total: None,
) -> list[FrontierPoint]:
    """GPUs against latency and price, from the fewest on which nothing starves to the point of no further gain.

    Parameters
    ----------
    workload, profile
        The fleet and the server.
    slo
        What `FrontierPoint.holds` refers to; None: the workload's, which is p95 TTFT <= 2 s and mean ITL <= 100 ms
        for every adapter unless it says otherwise.
    margin
        Share by which every rate is raised for the goal; None takes the profile's default.
    max_gpus
        No more GPUs than this.
    max_replicas, seed
        As for `packer.solve`.
    """
    fleet = workload if slo is None else replace(workload, slo=slo)
    job = Frontier(fleet, profile, margin, max_replicas, seed, progress=progress)
    job.explore(max_gpus)
    return [point for point in job.points if not point.starving]
