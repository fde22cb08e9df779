"""The simulated hours in which plans must keep the latency limits, and the share of the limits that servers use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from packer import seeds
from packer.adapter import changed
from packer.bin import Bin
from packer.evaluation import AdapterFigures
from packer.failover import without_server
from packer.lengths import Lengths, length_moments
from packer.planning.busiest import busiest
from packer.planning.chance import HOURS, MOST, at_most, beyond, by_chance, looked_at
from packer.planning.lone import lone_run
from packer.solvers.candidates import gains_cache
from packer.twin.hours import FRESH_HOURS, Hours, Job, ServerHour, merged
from packer.twin.limits import USED_UP
from packer.twin.parts import parts_s
from packer.twin.run import Run
from packer.twin.watch import BrokenError
from packer.workload import Workload


class Hour(NamedTuple):
    """An hour in which a fleet is simulated. `apart`: every server draws random numbers of its own. `drawn`: so many
    hours are drawn for each server, and the busiest one is simulated (`packer.planning.busiest`)."""

    fleet: Workload
    seed: int
    apart: bool = False
    drawn: int = 1


SERVER_HOURS = 12
"""Minimum number of server-hours in a set of fresh hours if arrivals or lengths vary much, or if all servers have only
parts of adapters and may break by chance. If none of 12 breaks its limits, less than 22 % of all hours do, with a
confidence of 95 % (0.78^12 = 0.05)."""
UNEVEN = 4.0
"""Mean of the squared tokens of requests, relative to their squared mean, from which on hours differ much. Of ten
fleets at 5.2, two plans that used 0.3 of their limits broke in a quarter of other hours; logs of chats have 2."""
DRAWN = 4
"""Hours that are drawn for a server if arrivals vary; the busiest is simulated to tell what a plan risks. Of the hours
that break a plan, rare as they are, most are the busiest, so that 12 server-hours find about as many as 48. A plan is
made again only if most break a server: else it would take a GPU or two more for hours of which one in 100 breaks."""
NEARLY = 0.95  # Share of its limits from which on a server may break them in another hour of the same load.
TIGHTEST = 4  # Number of servers near their limits that are simulated in `HOURS` fresh hours.
FURTHER = 100  # First number of the hours that tell whether a plan breaks its limits by chance.
MANY = 1_000  # Hours of the n-th set (from 0) beyond its first `FRESH_HOURS` have numbers from n + 1 times this.
STARVING = 1e3  # A server that starves or queues counts as using at least this multiple of its limits.
MOST_LONE = 8  # Runs of adapters alone that are kept: those of adapters that need many servers take 30 MB each.
AT_ONCE = 2  # Number of servers of a plan that are judged at a time.
FAR_BEYOND = 8.0
"""An hour ends once the server certainly uses more than this multiple of its limits. The later that is certain, the
less the server counts as using."""


@dataclass(eq=False)
class KeptHours:
    """The hours in which the limits of a fleet must be kept.

    `workload`, `raised`: the fleet at the rates as given, and raised by the margin.
    `seed`: seed of the first hour.
    `simulated`: the store of simulated server hours.
    """

    workload: Workload
    raised: Workload
    seed: int
    simulated: Hours
    others: Sequence[Hour] = ()
    """Other hours in which plans must keep the limits: those of the fleet's other periods, or that of the log from
    which it was measured. They are simulated with the fresh hours; one that breaks a plan is kept from then on."""
    hours: list[Hour] = field(init=False)
    unlucky: dict[tuple[Bin, ...], tuple[list[float], list[Hour]]] = field(default_factory=dict, init=False)
    """For each plan that breaks its limits by chance alone (`packer.planning.chance`): the number of adapters beyond
    their limits in each hour examined, and the hours that break the limits."""
    refused: set[tuple[Bin, ...]] = field(default_factory=set, init=False)
    """Plans that break their limits in fresh hours by more than chance."""
    _busiest: dict[tuple[tuple[int, ...], tuple[float, ...], int], int] = field(default_factory=dict, init=False)
    """The seed of the busiest hour that was drawn for adapters, shares of them, and a seed."""
    _lone: dict[Any, Run] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.hours = [self.planned]
        self._varies, self._uneven = self.workload.arrivals.varies, _uneven(self.workload)
        if self._varies:
            self.hours.append(self.given)

    @property
    def planned(self) -> Hour:
        """The hour that plans are made for: the rates raised by the margin."""
        return Hour(self.raised, self.seed)

    @property
    def given(self) -> Hour:
        """The hour at the rates as given, whose figures are shown."""
        return Hour(self.workload, self.seed)

    @property
    def required(self) -> int:
        """How many adapters must keep their limits."""
        return math.ceil(self.workload.slo.adapter_share * len(self.workload) - 1e-9)

    @property
    def all_count(self) -> bool:
        """Whether each adapter must keep its limits."""
        return self.required == len(self.workload)

    def lone(self, alone: Bin) -> Run:
        """The run of a server with one adapter whose requests come one at a time (`lone_run`). Adapters that differ by
        name and rate alone have the same one: another draw would let some of them keep a limit by luck."""
        adapter = self.workload.adapters[alone.adapters[0]]
        alike: Any = alone if self.workload.arrivals.trace else (changed(adapter, name="", rate=1.0), alone.settings)
        if alike not in self._lone:
            if len(self._lone) >= MOST_LONE:
                self._lone.pop(next(iter(self._lone)))
            self._lone[alike] = lone_run(self.workload, alone, self.seed)
        return self._lone[alike]

    def at_first(self) -> KeptHours:
        """The initial hours only, without the hours that broke a plan."""
        return KeptHours(self.workload, self.raised, self.seed, self.simulated)

    @property
    def added(self) -> list[Hour]:
        """The hours that broke a plan."""
        return [hour for hour in self.hours if hour not in (self.given, self.planned)]

    def job(self, item: Bin, hour: Hour) -> Job:
        """Return the job that simulates a server in an hour. Servers that share random numbers are compared by them,
        and they are drawn once. In a fresh hour each server has its own, so that an unlucky draw breaks one server and
        not all, and each hour tells more about the plan."""
        return item, hour.fleet, self._own_seed(item, hour) if hour.apart else hour.seed

    def _own_seed(self, item: Bin, hour: Hour) -> int:
        """The seed of a server in an hour in which each has its own: that of the busiest of the hours drawn."""
        seed, key = seeds.of_server(hour.seed, item.adapters[0]), (item.adapters, item.shares, hour.seed)
        if hour.drawn > 1 and key not in self._busiest:
            tried = [seeds.further(seed, number) for number in range(hour.drawn)]
            self._busiest[key] = busiest(item.workload(hour.fleet), tried)
        return self._busiest[key] if hour.drawn > 1 else seed

    def worst(self, bins: Sequence[Bin], hours: Sequence[Hour]) -> Hour:
        """Return, of the hours that break the limits, the one in which a server uses most of them, with the random
        numbers of that server for all servers."""
        most_loaded = max(bins, key=lambda item: item.offered_tok_s(self.workload))
        breaking = self._breaking(bins, hours) if self.all_count else {}
        pairs = [(breaking.get(hour, most_loaded), hour) for hour in hours]
        item, hour = max(pairs, key=lambda pair: self.used([pair[0]], [pair[1]])[0])
        return Hour(*self.job(item, hour)[1:])

    def all(self, items: Sequence[Bin], hour: Hour) -> list[ServerHour]:
        """Simulate servers in an hour to its end."""
        return self.simulated.each([self.job(item, hour) for item in items])

    def drop(self, hours: Sequence[Hour]) -> None:
        """Stop requiring that plans keep the limits in these hours."""
        self.hours = [hour for hour in self.hours if hour not in hours]

    def add(self, hour: Hour) -> None:
        """Require that plans keep the limits in this hour, too, and simulate it first: it breaks the most plans."""
        self.hours.insert(0, hour)

    def used(
        self, bins: Sequence[Bin], hours: Sequence[Hour] | None = None, most: Sequence[float] | None = None,
        then: Sequence[tuple[Job, float]] = (),
    ) -> list[float]:  # fmt: skip
        """The share of its limits that each server uses in the worst of `hours` (None: all kept hours). A server that
        uses `most` of its limits in one hour, or starves or queues, is not simulated in the next hour. Without `most`,
        all hours but the first are simulated at once. `then`: see `Hours.judged`."""
        worst = [0.0] * len(bins)
        enough = [min(FAR_BEYOND, used) for used in most or [FAR_BEYOND] * len(bins)]
        order = list(self.hours if hours is None else hours)
        groups = [order[:1], order[1:]] if most is None else [[hour] for hour in order]
        for together, later in zip(groups, [*groups[1:], []], strict=True):
            jobs = [(k, hour) for hour in together for k in range(len(bins)) if worst[k] < enough[k]]
            next_ = [(self.job(bins[k], hour), enough[k]) for hour in later for k, _ in jobs]
            found = self._used(
                [self.job(bins[k], hour) for k, hour in jobs], [enough[k] for k, _ in jobs], next_ or then
            )
            for (k, _), used in zip(jobs, found, strict=True):
                worst[k] = max(worst[k], used)
        return worst

    def _used(self, jobs: Sequence[Job], most: Sequence[float], then: Sequence[tuple[Job, float]] = ()) -> list[float]:
        """The share of its limits that each server uses in its hour, which ends beyond `most`; `then`: as in `used`."""
        found = []
        for hour in self.simulated.judged(jobs, most, then):
            if isinstance(hour, BrokenError):
                # The earlier it was certain, the more the server counts as using: one to two times `most`.
                found.append(hour.most * (2.0 - hour.part))
            elif math.isfinite(hour.used) or hour.figures.memory_error:
                found.append(hour.used)
            else:  # among servers that starve or queue, less delay is still better
                found.append(STARVING + hour.figures.mean_ttft_ms / self.workload.slo.limits.p95_ttft_ms)
        return found

    def holds_one(self, item: Bin) -> bool:
        """Whether a server keeps its limits in all kept hours."""
        return self.used([item], most=[1.0])[0] <= 1.0

    def short_of_cache(self, bins: Sequence[Bin], hour: Hour) -> list[bool]:
        """Which servers run short of KV cache in an hour and would have much more of it with fewer slots."""
        shown = self.simulated.judged([self.job(item, hour) for item in bins], [FAR_BEYOND] * len(bins))
        short = [each.kv_usage >= USED_UP if isinstance(each, BrokenError) else each.short_of_cache for each in shown]
        return [full and gains_cache(item) for full, item in zip(short, bins, strict=True)]

    def holds(self, bins: Sequence[Bin], spare: int = 0) -> bool:
        """Whether the limits are kept in all kept hours, at the given rates and, with `spare`, after any one loss."""
        held = all(self.holds_in(bins, hour) for hour in (*self.hours, self.given))
        order = sorted(range(len(bins)), key=lambda k: -bins[k].offered_tok_s(self.workload))
        for lost in order if held and spare else ():
            left, unplaced = without_server(self.workload, bins, lost)
            if not left or unplaced or not self.holds_in(left, self.given):
                return False
        return held

    def holds_in(self, bins: Sequence[Bin], hour: Hour) -> bool:
        """Whether no server starves or has a growing queue in an hour, and enough adapters keep their limits."""
        return not self.broken_in(bins, [hour])

    def broken_in(self, bins: Sequence[Bin], hours: Sequence[Hour]) -> list[Hour]:
        """The hours, of these, in which the servers break the limits."""
        if not hours or not self.all_count:
            return [hour for hour in hours if not self._enough_keep(bins, hour)]
        return list(self._breaking(bins, hours))

    def _breaking(self, bins: Sequence[Bin], hours: Sequence[Hour]) -> dict[Hour, Bin]:
        """Return the hours in which a server breaks its limits, in order, with the server found to do so."""
        # The most loaded servers first, a few at a time: the first that breaks its limits decides the hour.
        order, open_ = sorted(bins, key=lambda item: -item.offered_tok_s(hours[0].fleet)), list(hours)
        found: dict[Hour, Bin] = {}
        groups = [order[k : k + AT_ONCE] for k in range(0, len(order), AT_ONCE)]
        for group, later in zip(groups, [*groups[1:], []], strict=True):
            jobs, next_ = ([self.job(item, hour) for item in some for hour in open_] for some in (group, later))
            used = self._used(jobs, [1.0] * len(jobs), [(job, 1.0) for job in next_])
            # `used` goes through the servers of the group, and for each through the open hours.
            n = len(open_)
            for k, hour in enumerate(open_):
                most, item = max(zip(used[k::n], group, strict=True), key=itemgetter(0))
                if most > 1.0:
                    found[hour] = item
            open_ = [hour for hour in open_ if hour not in found]
        return {hour: found[hour] for hour in hours if hour in found}

    def _enough_keep(self, bins: Sequence[Bin], hour: Hour) -> bool:
        order = sorted(bins, key=lambda item: -item.offered_tok_s(hour.fleet))
        jobs, late = [self.job(item, hour) for item in order], set[int]()
        for k in range(0, len(order), AT_ONCE):
            here, after = (jobs[j : j + AT_ONCE] for j in (k, k + AT_ONCE))
            found = self.simulated.judged(here, [1.0] * len(here), [(job, 1.0) for job in after])
            for (item, *_), each in zip(here, found, strict=True):
                if not (isinstance(each, BrokenError) or each.serves):
                    return False
                own = each.late if isinstance(each, BrokenError) else np.flatnonzero(~(each.adapters.slo_used <= 1.0))
                late |= {item.adapters[i] for i in own}
            if len(late) > len(self.workload) - self.required:
                return False
        # Servers that were ended early may do worse in the rest of the hour.
        hours = self.all(bins, hour)
        if not all(each.serves for each in hours):
            return False
        return int((merged(hour.fleet, bins, hours).slo_used <= 1.0).sum()) >= self.required

    def fresh(self, bins: Sequence[Bin], number: int = 0) -> list[Hour]:
        """The `number`-th set of fresh hours for these servers: one hour, `FRESH_HOURS` if the limits may break by
        chance (for each of several equal servers), or more (`SERVER_HOURS`)."""
        chance, different = self.simulated.by_chance(bins, self.workload), len(set(bins))
        first = 1 + number * FRESH_HOURS
        parts = all(parts_s(item, self.workload) is not None for item in bins)  # a longer hour for all
        more = 0 if parts else FRESH_HOURS * (len(bins) // different - 1)  # for equal servers
        if self._varies or self._uneven or (parts and chance):
            more = max(more, -(-SERVER_HOURS // different) - FRESH_HOURS)
        places = [*range(first, first + (FRESH_HOURS if chance or more > 0 else 1))]
        places += range(number * MANY + MANY, number * MANY + MANY + more)
        return [self.fresh_hour(place) for place in places]

    def busy(self, bins: Sequence[Bin]) -> list[Hour]:
        """As many hours as the first fresh set has, each the busiest of `DRAWN`, if arrivals vary; else none."""
        drawn = self._varies and not self.workload.has_sessions
        return [hour._replace(fleet=self.workload, drawn=DRAWN) for hour in self.fresh(bins)] if drawn else []

    def tried(self, bins: Sequence[Bin], number: int) -> list[Hour]:
        """The `number`-th set of fresh hours; if hours differ much, with the sets before: of several plans, each tried
        in one set, one would keep the limits by luck."""
        last = 0 if self._varies or self._uneven else number
        return [hour for n in range(number, last - 1, -1) for hour in self.fresh(bins, n)]

    def by_luck(self, bins: Sequence[Bin]) -> tuple[Sequence[float], Sequence[Hour]]:
        """For a plan that breaks its limits by chance alone, return the number of adapters beyond them in each hour,
        and the hours that break them; for other plans, two empty sequences."""
        return self.unlucky.get(tuple(bins), ((), ()))

    def fresh_hour(self, place: int) -> Hour:
        """Return the hour that has this number, at the rates as given, or raised by the margin if lengths differ much
        (`UNEVEN`): a few long requests can start a queue that does not end."""
        fleet = self.raised if self._uneven else self.workload
        return Hour(fleet, seeds.fresh(self.seed, place), apart=True)

    def further_hour(self, place: int, number: int) -> Hour:
        """Return the hour with this number of those that tell more about a plan than the `number`-th fresh set."""
        return self.fresh_hour(FURTHER + number * HOURS + place)

    def _tight(self, bins: Sequence[Bin]) -> list[Bin]:
        """The `TIGHTEST` of the servers that use nearly all of their limits at the rates as given, if each adapter must
        keep its limits and time is left."""
        if not self.all_count or self.simulated.stop():
            return []
        used = {item: hour.used for item, hour in zip(bins, self.all(bins, self.given), strict=True)}
        near = [item for item, share in used.items() if NEARLY < share <= 1.0]
        return sorted(near, key=lambda item: -used[item])[:TIGHTEST]

    def broken_later(self, bins: Sequence[Bin], number: int = 0) -> list[Hour]:
        """The hours of `tried` and further ones for servers near their limits that break the limits, none if chance
        explains them; and the `others` that break them. All are tried: plans are then made for the worst."""
        hours = self.tried(bins, number)
        broken = self.broken_in(bins, hours)
        if not broken and (tight := self._tight(bins)):
            more = [self.further_hour(place, number) for place in range(len(hours), HOURS)]
            broken, hours = self.broken_in(tight, more), hours + more
        if broken and self.all_count and self._is_chance(bins, number, hours, broken):
            broken = []
        broken += self.broken_in(bins, self.others)
        if broken:
            self.refused.add(tuple(bins))
        return broken

    def _is_chance(self, bins: Sequence[Bin], number: int, looked: Sequence[Hour], broken: list[Hour]) -> bool:
        """Whether chance alone explains the `broken` ones of the hours `looked` at, with the `number`-th fresh set."""
        adapters = len({i for item in bins for i in item.adapters})

        def further(first: int, count: int) -> list[float]:
            hours = [self.further_hour(place, number) for place in range(first, first + count)]
            return [math.inf] if self.simulated.stop() else self._beyond(bins, hours, most)

        most = at_most(adapters, len(looked))
        order = sorted(looked, key=lambda hour: hour not in broken)  # one that is not chance is the last
        found = looked_at(self._beyond(bins, order, most), adapters, further)
        if chance := by_chance(found, adapters):
            self.unlucky[tuple(bins)] = found, broken
        return chance

    def _beyond(self, bins: Sequence[Bin], hours: Sequence[Hour], most: float) -> list[float]:
        """Count the adapters beyond their limits in each hour (`packer.planning.chance.beyond`). The last count is
        infinite if a server uses more than `MOST` of its limits or the sum exceeds `most`."""
        found = list[float]()
        for hour in hours:
            judged, count = list[ServerHour](), 0.0
            breaking = self._breaking(bins, [hour]).get(hour)
            order = sorted(bins, key=lambda item: item is not breaking)  # the one that breaks first
            for k in range(0, len(bins), AT_ONCE):
                jobs = [self.job(item, hour) for item in order[k : k + AT_ONCE]]
                for each in self.simulated.judged(jobs, [MOST] * len(jobs)):
                    if isinstance(each, BrokenError) or each.used > MOST:
                        return [*found, math.inf]
                    judged.append(each)
                count = beyond(order[: len(judged)], judged, self.workload)
                if sum(found) + count > most:
                    return [*found, math.inf]
            found.append(count)
        return found

    def breaking(self, bins: Sequence[Bin], further: Sequence[Hour] = ()) -> int:
        """The number of adapters that break their limits in a kept hour, at the given rates, or in a further hour."""
        used = [self.adapters(bins, hour).slo_used for hour in (*self.hours, self.given, *further)]
        return int((np.nan_to_num(np.array(used), nan=np.inf).max(axis=0) > 1.0).sum())

    def adapters(self, bins: Sequence[Bin], hour: Hour) -> AdapterFigures:
        """What each adapter gets in an hour."""
        return merged(hour.fleet, bins, self.all(bins, hour))


def _uneven(fleet: Workload) -> bool:
    """Whether the requests' lengths differ so much that latencies do from hour to hour (`UNEVEN`): without limits, no
    server of nine such fleets starved in 98 other server-hours. In sessions the lengths of first prompts say little
    about those of later ones: a plan on a GPU less kept the goal in 24 other server-hours."""
    if fleet.arrivals.trace is not None or fleet.slo.is_none or fleet.has_sessions:
        return False
    own = [(a.input_tokens or fleet.input_tokens, a.output_tokens or fleet.output_tokens) for a in fleet.adapters]
    means, squares = np.array([[_moments(each) for each in pair] for pair in own]).T  # by length and adapter
    tokens, rates = means.sum(axis=0), fleet.rates
    squares = squares.sum(axis=0) + 2.0 * means.prod(axis=0)
    return bool((rates @ squares) * rates.sum() > UNEVEN * (rates @ tokens) ** 2)


def _moments(lengths: Lengths) -> tuple[float, float]:
    """E[L] and E[L²] of a length L, tokens: those of the distribution unless it is cut, which takes long."""
    whole = lengths.mean, lengths.mean**2 * (1.0 + lengths.cv**2)
    return whole if lengths.high is None else length_moments(lengths)
