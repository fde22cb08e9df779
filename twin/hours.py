"""Simulated hours of servers: each once, several at a time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from packer import seeds
from packer.arrays import Float32Array
from packer.bin import Bin
from packer.errors import ValidationError
from packer.evaluation import SIMULATED, AdapterFigures, Evaluation, Evaluations
from packer.plan import Plan
from packer.room import LEVELS, Room
from packer.search import reach
from packer.twin.limits import USED_UP, limit_of
from packer.twin.override import with_engine
from packer.twin.parts import parts_s
from packer.twin.per_adapter import requests_used
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.twin.threads import Workers, in_threads
from packer.twin.until_clear import evaluation_of, is_idle
from packer.twin.watch import BrokenError, Watch
from packer.workload import Workload

MOST_REQUESTS = 20_000_000  # Stored hours keep the TTFT of so many requests (4 bytes each); beyond, the oldest drop it.
TOGETHER = 4  # Number of servers whose rooms are searched at once; a search begins at the last room found before.
MOST_AHEAD = 32  # Most hours that are begun, or kept, before they are asked for.
FRESH_HOURS = 3  # Further hours in which servers that may break their limits by chance are simulated.
MOST_SERVED = 512  # Number of servers whose part of a fleet is kept.
SLO = {"slo_used": 1.0}  # The limits of adapters (`Workload.slo`) as the limit of a figure.
UNCHECKED: Callable[..., Run] = inspect.unwrap(simulate)  # Checks of types take 0.25 ms of the 8 ms of an hour.
Job = tuple[Bin, Workload, int]  # A server, the fleet, and the seed of an hour.
Help = Callable[..., bool] | None  # See `packer.twin.limits.limit_of`.


@dataclass(frozen=True, eq=False)
class ServerHour:
    """Results of a simulated hour of one server.

    `used`: `Run.slo_used`. `adapters`: figures of each of its adapters. `slowest_ms`: the highest TTFT, 0 without
    requests. `ttft_ms`: TTFT of every completed request, float32, None if it was dropped. `late`: send times (s) and
    TTFT (ms) of requests that waited longer than their limit, float32 (2, late), none if `used` is infinite. `holds`:
    whether its limits are kept, its queue does not grow, and it does not starve. `short_of_cache`: the KV cache is
    mostly in use, or too small for the server to start, so that fewer slots may help. `of_server`: the share of limits
    of servers and of requests that it uses.
    """

    figures: Evaluation
    used: float
    adapters: AdapterFigures
    slowest_ms: float
    ttft_ms: Float32Array | None
    late: Float32Array
    holds: tuple[bool, bool, bool]
    short_of_cache: bool = False
    of_server: float = 0.0

    @property
    def serves(self) -> bool:
        """Whether it serves its load, without a queue that grows, within the limits of servers and of requests."""
        return all(self.holds[1:]) and self.of_server <= 1.0


@dataclass(eq=False)
class Hours:
    """Hours of servers under a fleet (whole cycles of piecewise rates, all of a replayed trace), simulated when first
    needed.

    `stop`: once it is true, no further simulation is started. `limits`: figures and their limits, which `rooms` keep;
    empty: the limits of the adapters. `levels`: factors on the rates at which `rooms` looks.
    """

    seed: int = 0
    stop: Callable[[], bool] = lambda: False
    limits: Mapping[str, float] = field(default_factory=dict)
    levels: Sequence[float] = LEVELS
    _stored: dict[Any, tuple[Workload, ServerHour]] = field(default_factory=dict)
    """With the fleet, so that no other fleet gets its id."""
    _broken: dict[Any, tuple[Workload, BrokenError]] = field(default_factory=dict)
    """Hours that were ended because they broke their limits, with the fleet, too."""
    _sizes: dict[Any, int] = field(default_factory=dict)  # Requests of hours that keep their TTFT, the oldest first.
    _workers: Workers = field(default_factory=Workers)
    _ahead: dict[Any, tuple[Workload, Future[ServerHour | BrokenError]]] = field(default_factory=dict)
    """Hours that were begun before they are asked for, the oldest first; results do not depend on them."""
    _lock: Lock = field(default_factory=Lock, repr=False)  # Held while `_ahead` changes: several threads ask for hours.
    _growth: dict[Any, Growth] = field(default_factory=dict)
    _scaled: dict[Any, tuple[Workload, Workload]] = field(default_factory=dict)
    _served: dict[Any, tuple[Workload, Workload]] = field(default_factory=dict)
    """Fleets, and the servers' parts of their traffic, whose figures are computed once."""

    def all(
        self, items: Sequence[Bin], fleet: Workload, *, seed: int | None = None, requests: bool = False
    ) -> list[ServerHour]:
        """Return one hour of each server; `requests`: with the TTFT of all requests."""
        return self.each([(item, fleet, self.seed if seed is None else seed) for item in items], requests)

    def each(self, jobs: Sequence[Job], requests: bool = False) -> list[ServerHour]:
        """Return hours of servers, of any fleets and seeds; `requests`: with the TTFT of all requests."""
        keys, known = [_key(job) for job in jobs], self._stored
        held = self._sizes if requests else known
        missing = {key: (job, None) for key, job in zip(keys, jobs, strict=True) if key not in held}
        self._simulate(missing)
        hours = [known[key][1] for key in keys]
        kept = sum(self._sizes.values()) if missing else 0
        while kept > MOST_REQUESTS and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            kept -= self._sizes.pop(oldest)
            known[oldest] = known[oldest][0], replace(known[oldest][1], ttft_ms=None)
        return hours

    def judged(
        self, jobs: Sequence[Job], most: Sequence[float], then: Sequence[tuple[Job, float]] = ()
    ) -> list[ServerHour | BrokenError]:
        """Return hours of servers, each ended once it is certain that more than `most` of its limits is used. `then`:
        hours that are likely to be judged next, begun if a thread is idle."""
        keys = [_key(job) for job in jobs]
        missing = {
            key: (job, enough)
            for key, job, enough in zip(keys, jobs, most, strict=True)
            if not self._knows(key, enough)
        }
        self._simulate(missing, then)
        return [self._stored[key][1] if key in self._stored else self._broken[key][1] for key in keys]

    def ahead(self, jobs: Sequence[tuple[Job, float]]) -> None:
        """Begin hours that are likely to be judged, each with the share of its limits at which it ends."""
        for job, most in jobs if self._workers.jobs > 1 and not self.stop() else ():
            with self._lock:
                if (key := (_key(job), most)) not in self._ahead and not self._knows(*key):
                    begun = self._workers.begin(partial(self._hour_of, job, most), later=True)
                    self._ahead[key] = job[1], begun
        self.forget(MOST_AHEAD)

    def forget(self, most: int = 0) -> None:
        """Keep at most this number of hours that were begun before they are asked for."""
        with self._lock:
            while len(self._ahead) > most:
                self._ahead.pop(next(iter(self._ahead)))[1].cancel()

    def _knows(self, key: Any, most: float | None) -> bool:
        """Whether an hour is stored, or known to use more than `most` of its limits."""
        return key in self._stored or (most is not None and key in self._broken and self._broken[key][1].most >= most)

    def _simulate(self, asked: Mapping[Any, tuple[Job, float | None]], then: Sequence[tuple[Job, float]] = ()) -> None:
        begun = {}
        for key, (job, most) in asked.items():
            with self._lock:
                _, future = self._ahead.pop((key, most), (None, None))
            # A task that was begun ahead and still waits is begun anew, before all that nobody waits for.
            if future is None or future.cancel():
                future = self._workers.begin(partial(self._hour_of, job, most))
            begun[key] = future
        self.ahead(then)
        try:
            for key, future in begun.items():
                found = future.result()
                if isinstance(found, BrokenError):
                    self._broken[key] = asked[key][0][1], found
                else:
                    self._stored[key] = asked[key][0][1], found
                    self._sizes[key] = 0 if found.ttft_ms is None else found.ttft_ms.size
        finally:  # an error or an interrupt leaves nothing to begin
            for future in begun.values():
                future.cancel()

    def _hour_of(self, job: Job, most: float | None) -> ServerHour | BrokenError:
        try:
            item, fleet, seed = job
            watch = None if most is None else Watch(most)
            return self._hour(_run(item, self._workload(item, fleet), seed, watch))
        except BrokenError as broken:
            # The error is kept: the frames of its traceback would keep the simulated server in memory.
            return broken.with_traceback(None)

    def _workload(self, item: Bin, fleet: Workload) -> Workload:
        """Return a server's part of a fleet's traffic, made once for its next hours."""
        key = item, id(fleet)
        if (found := self._served.get(key)) is None:
            found = fleet, item.workload(fleet)
            if len(self._served) >= MOST_SERVED:
                self._served.clear()
            self._served[key] = found
        return found[1]

    def rooms(self, items: Sequence[Bin], fleet: Workload) -> tuple[Room, ...]:
        """Return how far the rates of each server may grow, by bisection over `levels`, and what limits it then. If
        stopped early, return the largest factors known to hold, or nothing if a server has none. A replayed trace is
        not scaled: the result is empty."""
        if fleet.arrivals.trace is not None:
            return ()
        alike = [self.growth(item, fleet) for item in items]
        grown = list(dict.fromkeys(alike))  # equal servers have one
        # A plan has as few servers as possible: halfway to the load with one server fewer is a good guess.
        guess = math.sqrt(len(items) / max(0.25, len(items) - 1.0))
        usual = Room(min(self.levels, key=lambda level: abs(level - guess)))
        found = [usual]
        for k in range(0, len(grown), TOGETHER):  # neighbouring servers are often alike
            found += in_threads(partial(Growth.room, like=found[-1]), grown[k : k + TOGETHER], TOGETHER)
        known = dict(zip(grown, found[1:], strict=True))
        unknown = self.stop() and any(room.headroom is None for room in found)
        return () if unknown else tuple(known[each] for each in alike)

    def checked(self, rooms: Sequence[Room], items: Sequence[Bin], fleet: Workload) -> tuple[Room, ...]:
        """Return the rooms, checked in further hours if limits may break by chance, with advice that was tried."""
        if not rooms:
            return ()
        grown = [(self.growth(item, fleet), room) for item, room in zip(items, rooms, strict=True)]
        once, chance = dict.fromkeys(grown), self.by_chance(items, fleet)

        def final(job: tuple[Growth, Room]) -> Room:
            growth, room = job
            return growth.advised(growth.checked(room) if chance else room)

        known = dict(zip(once, in_threads(final, once, TOGETHER), strict=True))
        return tuple(known[job] for job in grown)

    def at(self, fleet: Workload, factor: float) -> Workload:
        """Return the fleet with rates multiplied by `factor`, made once."""
        if factor == 1.0 or (id(fleet), factor) in self._scaled:
            return fleet if factor == 1.0 else self._scaled[id(fleet), factor][1]
        return self._scaled.setdefault((id(fleet), factor), (fleet, fleet.scaled(factor)))[1]

    def by_chance(self, items: Sequence[Bin], fleet: Workload) -> bool:
        """Whether the servers may break limits in another hour that they keep in this one: their arrivals vary, or some
        requests wait longer than a limit, and the number of such requests of an adapter differs from hour to hour."""
        least_ms = fleet.slo.columns(fleet)[0].min()
        return fleet.arrivals.varies or any(hour.slowest_ms > least_ms for hour in self.all(items, fleet))

    def growth(self, item: Bin, fleet: Workload) -> Growth:
        """Return the known levels of a server at higher rates."""
        return self._growth.setdefault((item, id(fleet)), Growth(self, item, fleet, self._workers))

    def holds(self, sim: Run) -> tuple[bool, bool, bool]:
        """See `ServerHour.holds`."""
        served = sim.status == "ok" and not sim.starved
        inside = is_idle(sim) or all(getattr(sim, name) <= most for name, most in (self.limits or SLO).items())
        return inside, served and sim.stable, served

    def _hour(self, sim: Run) -> ServerHour:
        holds = self.holds(sim)
        return ServerHour(
            evaluation_of([sim]),
            sim.slo_used,
            AdapterFigures(
                sim.adapter_mean_ttft_ms, sim.adapter_pooled_p95_ttft_ms, sim.adapter_mean_itl_ms,
                sim.adapter_slo_attainment, sim.adapter_slo_used,
            ),
            float(sim.ttft_ms.max(initial=0.0)),
            sim.ttft_ms.astype(np.float32),
            sim.late[:, : None if math.isfinite(sim.slo_used) else 0].astype(np.float32),
            holds,
            sim.status != "ok" or sim.mean_kv_usage >= USED_UP,
            max(sim.server_slo_used, requests_used(sim)) if holds[2] else 0.0,
        )  # fmt: skip


@dataclass(eq=False)
class Growth:
    """How far the rates of a server may grow: the levels of `Hours.levels` that were simulated."""

    hours: Hours
    item: Bin
    fleet: Workload
    workers: Workers
    _found: dict[int, bool] = field(default_factory=dict)  # Whether a level holds.
    _used: dict[tuple[int, int], float] = field(default_factory=dict)  # By level and seed.
    _broken: tuple[int, Run | None] = (len(LEVELS) + 1, None)  # The lowest level that breaks the limits, and its run.

    def holds(self, level: int) -> bool:
        """Whether `ServerHour.holds` is true in the given hour at a level, in each part."""
        if level not in self._found:
            self._found[level] = self.hour_holds(level, self.hours.seed)
        return self._found[level]

    def hour_holds(self, level: int, seed: int) -> bool:
        """Whether `ServerHour.holds` is true in an hour at a level, in each part."""
        served = self.item.workload(self.hours.at(self.fleet, self.hours.levels[level]))
        run = self.workers.begin(partial(_run, self.item, served, seed)).result()
        holds, self._used[level, seed] = all(self.hours.holds(run)), run.slo_used
        if not holds and level < self._broken[0]:
            self._broken = level, run
        return holds

    def used(self, level: int, seed: int) -> float:
        """Return the share of the limits that is used in an hour at a level."""
        if (level, seed) not in self._used:
            self.hour_holds(level, seed)
        return self._used[level, seed]

    def reach(self, near: float | None) -> float | None:
        """Return the highest factor that holds, searched `near` another one first; None: no factor does."""
        start, stop = 0 if near is None else self.hours.levels.index(near) + 1, self.hours.stop
        # Searches for more slots have simulated some levels.
        good = max((level for level in self._found if self.holds(level)), default=-1)
        bad = min((level for level in self._found if level > good), default=len(self.hours.levels))
        late = stop() and not self._found
        low = -1 if late else reach(self.holds, good + 1, bad - 1, start, stop=stop)[0]
        return self.hours.levels[low] if low >= 0 else None

    def room(self, like: Room) -> Room:
        """Return the headroom, and what limits the server first; `like`: room of a similar server."""
        return self._room(self.reach(like.headroom))

    def checked(self, room: Room) -> Room:
        """Return the room with the highest factor, up to its own, at which further hours hold, too: one hour if hours
        are alike, else `FRESH_HOURS`. Hours at the given rates are checked where the plan is made or
        evaluated."""
        levels = self.hours.levels
        level = 0 if room.headroom is None else levels.index(room.headroom)
        # Each further hour begins at the level that the hours before it have kept.
        for seed in self._further():
            while level > 0 and not self.hours.stop() and not self.hour_holds(level, seed):
                level -= 1
        return room if room.headroom in (None, levels[level]) else self._room(levels[level])

    def _further(self) -> list[int]:
        """Return the seeds of further hours: of one if hours are alike, else of `FRESH_HOURS`."""
        places = range(1, 1 + (FRESH_HOURS if self.fleet.arrivals.varies else 1))
        return [seeds.of_server(seeds.fresh(self.hours.seed, place), self.item.adapters[0]) for place in places]

    def advised(self, room: Room) -> Room:
        """Return the room with advice that was tried, unless searches are to stop: a setting is advised if with it the
        hour that breaks the limits keeps them, and most further hours use no more of the limits than without it."""
        (level, sim), further = self._broken, self._further()

        def help_(max_loras: int = self.item.max_loras, **engine: int) -> bool:
            try:
                item = replace(self.item.with_slots(max_loras), profile=with_engine(self.item.profile, **engine))
            except ValidationError:  # a rule of the engine
                return False
            other = self.hours.growth(item, self.fleet)
            more = 0 if sim is not None and other.hour_holds(level, sim.seed) else len(further)
            for seed in further:
                more += 2 * more < len(further) and other.used(level, seed) > self.used(level, seed)
            return 2 * more < len(further)

        return room if self.hours.stop() else self._room(room.headroom, help_)

    def _room(self, headroom: float | None, help_: Help = None) -> Room:
        """Return the room with what limits the server first; `help_`: see `limit_of`."""
        level, sim = self._broken
        if sim is None:
            return Room(headroom)
        limit = limit_of(sim, help_)
        growth = "" if level == 0 else f" at {self.hours.levels[level] - 1.0:+.0%}"
        return Room(headroom, limit.name, limit.usage + growth, limit.advice)


def _key(job: Job) -> Any:
    item, fleet, seed = job
    return item, id(fleet), seed


def _run(item: Bin, workload: Workload, seed: int, watch: Watch | None = None) -> Run:
    long_s = parts_s(item, workload)
    return UNCHECKED(workload, item.profile, **asdict(item.settings), seed=seed, watch=watch, duration_s=long_s)


def of_hours(known: Evaluations, found: Sequence[ServerHour]) -> Evaluations:
    """Return the figures of the hours; servers that starve or do not start, there or in `known`, keep known ones."""
    pairs = zip(known, (hour.figures for hour in found), strict=True)
    return Evaluations.of([new if old.feasible and new.feasible else old for old, new in pairs])


def with_adapters(plan: Plan, hours: Hours | None = None) -> Plan:
    """The plan with figures of its adapters, and `SIMULATED` ones of its servers, from a simulated hour."""
    if plan.adapters is not None or not plan.bins:
        return plan
    found = (hours or Hours(plan.seed)).all(plan.bins, plan.workload)
    simulated = Evaluations.of([hour.figures for hour in found])
    known = {name: (getattr(plan.evaluations, name), getattr(simulated, name)) for name in SIMULATED}
    new: dict[str, Any] = {name: np.where(np.isnan(had), seen, had) for name, (had, seen) in known.items()}
    return replace(plan, adapters=merged(plan.workload, plan.bins, found), evaluations=replace(plan.evaluations, **new))


def merged(workload: Workload, items: Sequence[Bin], hours: Sequence[ServerHour]) -> AdapterFigures:
    """Each adapter's figures over its servers: the worst, the attainment by shares; NaN if none completed."""
    n = len(workload)
    columns = {name: np.full(n, np.nan) for name in AdapterFigures._fields}
    kept, weight = np.zeros(n), np.zeros(n)
    for item, hour in zip(items, hours, strict=True):
        index = list(item.adapters)
        for name, column in columns.items():
            column[index] = np.fmax(column[index], getattr(hour.adapters, name))
        known = ~np.isnan(hour.adapters.slo_attainment)
        kept[index] += np.where(known, hour.adapters.slo_attainment, 0.0) * np.array(item.shares)
        weight[index] += np.where(known, item.shares, 0.0)
    with np.errstate(invalid="ignore"):
        columns["slo_attainment"] = np.where(weight > 0, kept / weight, math.nan)
    return AdapterFigures(**columns)
