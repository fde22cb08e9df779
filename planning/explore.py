"""Search for plans by number of GPUs: trained trees propose plans, the twin sets their slots and simulates them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from packer import checks
from packer.bin import Bin
from packer.errors import IncompatibleError, ModelError
from packer.plan import Plan
from packer.planning.apart import Apart, full
from packer.planning.frontier import Conditions, FrontierPoint, point_of
from packer.planning.kept import FAR_BEYOND, Hour, KeptHours
from packer.planning.limits_apart import LimitsApart
from packer.planning.redeal import dealt_anew
from packer.planning.replicas import MOST_REPLICAS, Replicas, above_share, hot_alone, needed, on_all
from packer.planning.settle import TIGHT, likely_slots, with_best_slots, with_most_slots
from packer.planning.solve import solve
from packer.planning.splits import EVENER, SLOTS, even_in_time, even_splits, most_even
from packer.planning.starving import PlannedHours
from packer.planning.trial import Trial
from packer.predictors.learned import TreePredictor
from packer.profile import Profile
from packer.room import levels_of
from packer.search import fewest
from packer.solvers.base import Clock, limit_of
from packer.twin.engine.compile import is_compiled
from packer.twin.engine_rules import caches_prefixes
from packer.twin.hours import Hours
from packer.words import counted
from packer.workload import Workload

GAIN = 0.1  # One more GPU must lower the p95 TTFT or the ITL by this share to be a gain.
MOST_POINTS = 12
FAR = 2.0  # After an even split that uses more than this multiple of its limits, only more even splits are tried.
LOST = 6  # After so many numbers of GPUs that break the limits, the largest is tried: none holds if that does not.
WIDE = 100  # With more adapters per server than this, even splits are tried before the solvers' plans.
SOLVERS = ("spread-refined", "spread")
"""Solvers that propose which adapters share a GPU. The next solver is tried if a proposal breaks the limits."""


@dataclass(eq=False)
class Frontier(Clock, Conditions):
    """Plans of one fleet by number of GPUs, each made when it is first needed.

    A learned predictor proposes which adapters share a GPU, for Poisson arrivals. The twin simulates each GPU with the
    fleet's own arrivals and rates raised by the margin; GPUs that break their limits get more slots. An adapter that
    breaks them alone is split into equal parts. Plans are simulated in fresh hours; one that breaks a plan is kept.

    `workload`, `profile`: the fleet, with its latency limits (`Workload.slo`), and the server.
    `before`: number of servers of other models that come before those of this fleet, for reasons that name servers.
    `known`: hours that other searches with this seed simulated; None: there are none.
    """

    workload: Workload
    profile: Profile
    before: int = 0
    known: Hours | None = None
    broken: list[Hour] = field(default_factory=list, init=False)  # Fresh hours that break the plan judged last.
    _points: dict[int, FrontierPoint] = field(default_factory=dict, init=False)
    _plans: dict[Any, Future[Plan]] = field(default_factory=dict, init=False)
    """Proposals, by parts of adapters, objective and solver; some are made while servers are simulated."""
    _begun: set[int] = field(default_factory=set, init=False)
    _slots: int = field(default=SLOTS, init=False)  # Slots of the last even split that was found to keep the limits.
    fewest: int = field(default=1, init=False)
    """Fewest servers on which nothing starves, by the trees. On fewer, one proposal is enough if the twin agrees."""
    tight: float = field(default=TIGHT, init=False)  # More slots are tried where more of the limits is used.
    roomy: int = field(default=1, init=False)  # No adapter has more load than an equal share of so many servers.
    sets: int = field(default=0, init=False)  # Number of the next set of fresh hours.

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.workload.slo.check(self.workload)
        if self.max_replicas is not None:
            checks.integer("max_replicas", self.max_replicas, low=1)
        checks.integer("spare", self.spare, low=0, high=1)
        checks.integer("seed", self.seed, low=0)
        checks.time_limit(self.time_limit_s)
        self.margin, self.confidence = self.margin_of(self.profile), None
        self.copies = self.max_replicas or MOST_REPLICAS
        self.replayed = self.workload.arrivals.trace is not None
        self.hours = self.known or PlannedHours(self.seed, self.over, levels=levels_of(self.margin))
        self.raised = self.workload if self.replayed else self.hours.at(self.workload, 1.0 + self.margin)
        try:  # the fastest one; a profile without a shipped tree is searched with another profile's
            self.predictor = TreePredictor.for_profile(self.profile)
        except ModelError:
            self.predictor = TreePredictor.guide(self.profile)
        logged = [Hour(self.workload.replaying(each), self.seed) for each in (self.log_hour,) if each]
        self.kept = KeptHours(self.workload, self.raised, self.seed, self.hours, logged)
        self._beside, self.parts = ThreadPoolExecutor(1), Replicas(self.workload, {})
        self.apart: tuple[Apart, ...] = Apart(self), LimitsApart(self)
        _ = self.workload.offered_tok_s_by_adapter  # tables of the lengths of all adapters at once
        self._beside.submit(self.predictor.begin_compiling, self.workload)
        if is_compiled():  # else trees are interpreted, which slows the compiler down
            self._plan(self.parts, "gpus")
        self.split()

    def split(self, first: int = 0) -> None:
        """Split the adapters of `roomy`, and those that break their limits on GPUs of their own in a kept hour. If that
        changes parts, plans on more than `first` GPUs are made again."""
        self.progress("simulating the hottest adapters alone", 0, 0)
        parts = above_share(self.workload, self.roomy) | needed(self.kept, self.profile, self.max_replicas)
        if parts != self.parts.parts:
            self.parts = Replicas(self.workload, parts)
            self._points = {n: point for n, point in self._points.items() if n <= first}

    @property
    def hopeless(self) -> bool:
        """Whether too many adapters break their limits even on GPUs of their own."""
        return len(self.workload) - len(self.parts.too_hot) < self.kept.required

    over = Clock.out_of_time

    @property
    def size(self) -> int:
        """GPUs per server. The number of a point counts servers."""
        return self.profile.engine.gpus

    @property
    def points(self) -> list[FrontierPoint]:
        """The points made so far, fewest GPUs first; one for each number of GPUs that is used. There is none of a mix
        of kinds, which says nothing about so many GPUs of one kind."""
        alone = (each for each in self._points.values() if len({item.profile for item in each.plan.bins}) < 2)
        found = sorted(alone, key=lambda p: (p.n_gpus, not p.holds, p.p95_ttft_ms))
        return list({each.n_gpus: each for each in reversed(found)}.values())[::-1]

    def at(self, n_gpus: int, following: int | None = None) -> FrontierPoint:
        """The plan on `n_gpus` GPUs. `following`: the number that is likely to be needed next."""
        if n_gpus not in self._points:
            self.progress(f"simulating a plan on {counted(n_gpus, 'GPU')}", 0, 0)
            trial = Trial(self.kept, self.spare, self.over, self._wide(n_gpus), self.tight)
            proposals, mended = self._proposals(n_gpus, following), None
            # Splits of a wide fleet are much alike: redistribute each one before trying the next.
            for some in ([bins] for bins in proposals) if self._wide(n_gpus) else [proposals]:
                before = len(trial.tried)
                trial.go_on(some)
                if not trial.holds and len(trial.tried) > before:
                    mended = self.mended(trial.tried[before:])
                if trial.holds or mended or self.over():
                    break
            self._points[n_gpus] = point_of(self, mended or trial.best)
        return self._points[n_gpus]

    def mended(self, plans: Sequence[Sequence[Bin]], further: Sequence[Hour] = ()) -> list[Bin] | None:
        """One of the plans with adapters redistributed so that no server breaks its limits in the kept and `further`
        hours (`packer.planning.redeal`); None if none is found."""
        hours = [*self.kept.hours, self.kept.given, *further]
        fits = not self.spare and not self.replayed and self.kept.all_count
        return dealt_anew(self.kept, plans, hours, self.over, self.copies) if fits else None

    def fullest(self, bins: Sequence[Bin]) -> tuple[list[Bin], float]:
        """The most loaded server and, if that has a single adapter and thus one slot, the most loaded one with several,
        with their best slots; and the largest share of their limits that they use in the first hour."""
        first, falling = self.kept.hours[:1], sorted(bins, key=lambda item: -item.offered_tok_s(self.workload))
        several = [item for item in falling if len(item.adapters) > 1]
        most = [falling[0], *several[:1]] if len(falling[0].adapters) == 1 else falling[:1]
        made = with_best_slots(self.kept, most, first, self.over)
        return made, max(self.kept.used(made, first))

    def first(self, low: int, high: int, *, fresh: bool = False) -> int | None:
        """The fewest GPUs from `low` (in wide fleets: where even splits do) to `high` that keep the limits; or None.
        `fresh`: simulate the most loaded server of an even split in the next fresh hours. An hour that breaks it would
        break the whole plan, so it is kept before the plan is made."""
        if self._wide(low) and high > 1 and self.kept.all_count:
            if low == 1 and self.at(1).holds:  # one server is no split
                return 1
            even = self.first_even(max(2, low), high)
            if even is not None and fresh and (broken := self._broken_at(even)):
                self.keep(broken)
                self.sets += 1
                even = self.first_even(even, high)
            low = low if even is None else even
        return self.first_that_holds(low, high)

    def _splits(self, n: int) -> Iterator[Sequence[Bin]]:
        """Splits of the fleet, or of groups of ranks or limits, on `n` servers whose most loaded keeps its limits."""
        return chain(self._even(n), *(apart.on(n) for apart in self.apart))

    def first_even(self, low: int, high: int) -> int | None:
        """The fewest servers from `low` to `high` of which the fullest ones of a split keep the limits, or None."""
        return fewest(lambda n: any(full(self, bins) for bins in self._splits(n)), low, high, self.over)

    def _broken_at(self, n: int) -> Hour | None:
        """The hour of the next fresh set that breaks the most loaded server of an even split most, or None."""
        bins = next(self._splits(n), None)
        if bins is None or not self.kept.all_count or self.over():
            return None
        loaded, _ = self.fullest(bins)
        broken = self.kept.broken_later(loaded, self.sets)
        return self.kept.worst(loaded, broken) if broken else None

    @property
    def number(self) -> int:
        """Number of the set of fresh hours that was simulated last; 0 before the first."""
        return max(0, self.sets - 1)

    def lower(self, n: int, least: int | None = None) -> int:
        """The fewest GPUs from `least` to `n` that keep the limits: fewer than `n` may do, since trees are stricter."""
        low, least = n, max(1 + self.spare, least or 1)
        while low > least and not self.over() and self.at(low - 1, low).holds:
            low = low - 1 if self._wide(low) else max(least, low // 2)
        return self.first_that_holds(low, n) or n

    def first_that_holds(self, low: int, high: int) -> int | None:
        """The fewest GPUs from `low` to `high` that keep the limits, or None. After the time, one plan is made."""
        few = low < high and not self.over() and not self.at(low, low + 1).holds
        start = self.first_even(low + 1, high) if few else low
        made = [n for n in self._points if low <= n <= high]
        if made and self.over():
            return min((n for n in made if self._points[n].holds), default=None)
        # Steps grow slowly: the number is near, and plans on more GPUs need more simulated hours.
        found = fewest(lambda n: self.at(n, n + 1 if n < high else None).holds, low, high, self.over, 2, start, LOST)
        if high not in made and (found or high) < high:
            self._points.pop(high, None)  # it only told whether any number holds
        return found

    def extend(self, low: int, high: int, servers: float = math.inf) -> None:
        """Add points upwards from `low` until one more GPU gains little, or their servers add up to `servers`."""
        if self._points and self.over():
            return
        beyond = copy(self)  # hours that broke smaller plans, and more slots, matter little here
        beyond.kept, beyond.tight = self.kept.at_first(), 1.0
        n = self.at(low).n_gpus
        while n < high and len(self._points) < MOST_POINTS and servers > 0 and not self.over():
            here = self.at(n)
            there = (beyond if here.holds else self).at(min(high, n + max(1, round(0.1 * n))))
            pairs = ((here.p95_ttft_ms, there.p95_ttft_ms), (here.mean_itl_ms, there.mean_itl_ms))
            little = not any(after < (1.0 - GAIN) * before for before, after in pairs)
            if there.n_gpus <= n or (little and (here.holds or self.hopeless)):
                return
            n = there.n_gpus
            servers -= n

    def least(self) -> int:
        """The fewest servers on which nothing starves, according to the trees with Poisson arrivals."""
        self.progress("looking for the fewest GPUs", 0, 0)
        self.fewest = max(1, len(self._plan(self.parts, "gpus").result().bins))
        return self.fewest

    def most(self, max_gpus: int | None) -> int:
        """The largest number of servers that is useful and at hand."""
        most = self.parts.most_gpus(self.max_replicas) + self.spare
        if max_gpus is not None and max_gpus < self.size:
            rule = f"Expected at least {counted(self.size, 'GPU')} for a server of {self.profile.name},"
            raise IncompatibleError(f"{rule} got {max_gpus}.")
        return most if max_gpus is None else min(max_gpus // self.size, most)

    def keep(self, hour: Hour) -> None:
        """Require that plans keep a further hour; plans that kept the limits until then are made again if needed."""
        self.kept.add(hour)
        first = min((n for n, point in self._points.items() if point.holds), default=0)
        self.split(first)
        for n, point in list(self._points.items()):
            if n == first or (n > first and point.holds and not self.kept.holds(point.plan.bins, self.spare)):
                del self._points[n]

    def as_learned(self, parts: Replicas) -> Workload:
        """The fleet in the form of the trees' training data: Poisson arrivals, prompts without what a prefix cache
        spares, and requests to the base model as requests to an adapter of the smallest rank."""
        fleet = parts.calm.as_independent(cached=caches_prefixes(parts.calm, self.profile))
        if fleet.n_loras == len(fleet):
            return fleet
        rank = min((adapter.rank for adapter in fleet.adapters if adapter.rank), default=1)
        return replace(fleet, adapters=tuple(replace(a, rank=a.rank or rank) for a in fleet.adapters))

    def _solved(self, parts: Replicas, objective: str, **given: Any) -> Plan:
        return solve(  # ends after its rounds, so that a slow machine finds the same plan
            self.as_learned(parts), self.profile, objective, predictor=self.predictor, margin=self.margin,
            seed=self.seed, verify=False, with_headroom=False, time_limit_s=limit_of(self.remaining_s()),
            stop=self.stop, **given,
        )  # fmt: skip

    def _plan(self, parts: Replicas, objective: str, **given: Any) -> Future[Plan]:
        """The plan of `_solved`, made once, in a thread."""
        key = tuple(parts.parts.items()), objective, *given.values()
        if key not in self._plans:
            self._plans[key] = self._beside.submit(self._solved, parts, objective, **given)
        return self._plans[key]

    def _begin(self, n_gpus: int) -> None:
        """Begin, in a thread, the plan that is proposed first for `n_gpus` GPUs, and simulate its servers."""
        parts, hour = self.parts.spread_over(n_gpus, self.max_replicas), self.kept.hours[0]
        plan = self._plan(parts, "latency", solver=SOLVERS[0], max_gpus=n_gpus * self.size)

        def simulate() -> None:
            bins = () if plan.result().unplaced or self.spare else parts.joined(plan.result().bins)
            slotted = [item.with_slots(likely_slots(self.workload, item)) for item in bins]
            self.hours.ahead([(self.kept.job(item, hour), FAR_BEYOND) for item in slotted])

        if n_gpus not in self._points and n_gpus not in self._begun:
            self._begun.add(n_gpus)
            self._beside.submit(simulate)

    def _wide(self, n_gpus: int) -> bool:
        """Whether `n_gpus` servers get more than `WIDE` adapters each."""
        return len(self.workload) > WIDE * n_gpus

    def _proposals(self, n_gpus: int, following: int | None = None) -> Iterator[Sequence[Bin]]:
        """Yield the solvers' plans, a plan with the parts of hot adapters on servers of their own, even splits, splits
        by rank or by time, and plans with a part of every adapter on each server. Wide fleets get even splits and those
        by rank alone, or the most even one if no split keeps the limits. With a spare GPU, slots fit every rank.

        On fewer servers than the trees ask for, the first proposal is the only one if it starves in the twin, too.
        """
        wide = self._wide(n_gpus)
        usual = self.proposed(n_gpus), self._hot_alone(n_gpus), self._splits(n_gpus), self._in_time(n_gpus)
        found = self._any_splits(n_gpus) if wide else chain(*usual)
        for number, bins in enumerate(found):
            if following is not None and not wide:
                self._begin(following)
            if self.spare:  # slots for every adapter that may come
                rank, make = max(item.max_lora_rank for item in bins), self.profile.settings
                bins = tuple(replace(item, settings=make(item.max_loras, rank)) for item in bins)
            yield bins
            if number == 0 and n_gpus < self.fewest and self.fullest(bins)[1] >= FAR_BEYOND:
                break
        yield from () if wide else self.on_all(n_gpus)

    def _in_time(self, n_gpus: int) -> Iterator[Sequence[Bin]]:
        """Splits whose servers take equal engine time."""
        spread = self.parts.spread_over(n_gpus, self.max_replicas)
        yield from map(spread.joined, even_in_time(spread.fleet, self.profile, n_gpus, self.spare, self.seed))

    def _hot_alone(self, n_gpus: int) -> Iterator[tuple[Bin, ...]]:
        """The plan with each part of a hot adapter on a server of its own."""
        parts = {} if self.spare else self.parts.parts
        return hot_alone(self.workload, self.profile, parts, n_gpus, self.max_replicas, self.placed)

    def _spreads(self, n_gpus: int) -> Iterator[Replicas]:
        """Yield the parts of hot adapters in even splits: as many as their load takes, then one for each server."""
        if n_gpus > 1 and not self.spare:
            yield (few := self.parts.spread_over(n_gpus, self.max_replicas))
            each = self.parts.spread_over(n_gpus, self.max_replicas, on_each=True)
            yield from [] if each.parts == few.parts else [each]

    def _even(self, n_gpus: int) -> Iterator[Sequence[Bin]]:
        """Even splits whose most loaded server keeps its limits; all servers get the slots that suit that server."""
        for parts in self._spreads(n_gpus):
            lost = math.inf
            for bins in map(parts.joined, even_splits(parts.fleet, self.profile, n_gpus, self._slots)):
                most = max(item.offered_tok_s(self.workload) for item in bins)
                # A split that is hardly more even than one that failed by far would fail as well.
                if most > (1.0 - EVENER) * lost:
                    continue
                tried, used = self.fullest(bins)
                if self.over():
                    return
                if self.kept.all_count and used > FAR:
                    lost = most
                elif not self.kept.all_count or full(self, bins):
                    self._slots = tried[-1].max_loras
                    yield with_most_slots(bins, self._slots)

    def _any_splits(self, n_gpus: int) -> Iterator[Sequence[Bin]]:
        """Splits that may keep the limits; if there are none, the most even one with the last good split's slots."""
        found = None
        for found in self._splits(n_gpus):
            yield found
        if found is None:
            few = islice(self._spreads(n_gpus), 1)
            even = [(parts, most_even(parts.fleet, self.profile, n_gpus, self._slots)) for parts in few]
            yield from [parts.joined(bins) for parts, bins in even if bins] or self.proposed(n_gpus)

    def proposed(self, n_gpus: int) -> Iterator[tuple[Bin, ...]]:
        """The solvers' plans on `n_gpus` GPUs, first with the parts for so many, then with the fewest parts."""
        spread = self.parts.spread_over(n_gpus, self.max_replicas)
        ways = [(spread, solver) for solver in SOLVERS[: 1 if self._wide(n_gpus) else None]]
        for parts, solver in ways + [(self.parts, SOLVERS[0])] * (spread is not self.parts):
            plan = self._plan(parts, "latency", solver=solver, max_gpus=n_gpus * self.size).result()
            if not plan.unplaced:
                yield parts.joined(plan.bins)

    def placed(self, fleet: Workload, n_gpus: int) -> Sequence[Bin]:
        """The servers with the lowest latency for these adapters; empty if some have no place."""
        plan = self._solved(Replicas(fleet, {}), "latency", solver=SOLVERS[0], max_gpus=n_gpus * self.size)
        return () if plan.unplaced else plan.bins

    def on_all(self, n_gpus: int) -> Iterator[tuple[Bin, ...]]:
        """Plans with a part of every adapter on every server. With a spare GPU, first split only adapters with more
        load than a GPU's share: if a server is lost, its parts go to all others."""
        fair = self.workload.offered_tok_s / n_gpus
        few = 1 < n_gpus <= self.copies and not self.replayed
        for least in ((fair, 0.0) if self.spare else (0.0,)) if few else ():
            yield from on_all(self.workload, self.profile, n_gpus, least, self.placed, all_slots=bool(self.spare))

    def break_later(self, n_gpus: int) -> None:
        """Note that fresh hours, which no further plan must keep, break the plan on `n_gpus` GPUs."""
        self._points[n_gpus] = replace(self.at(n_gpus), holds=False, broken_later=True)

    def put(self, bins: Sequence[Bin]) -> FrontierPoint:
        """Make the point of these servers, which replaces the one with as many servers."""
        point = self._points[len(bins)] = point_of(self, bins)
        return point
