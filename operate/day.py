"""Periods of a day, the servers that run in them, and their settings. A server that keeps its settings goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

from packer.bin import Bin
from packer.moves import by_adapter
from packer.plan import Plan
from packer.settings import Settings
from packer.times import HOUR_S, joined


@dataclass(frozen=True, eq=False)
class Period:
    """Successive periods in which the same servers run.

    `names`: the periods.
    `start_s`, `end_s`: from midnight before the first period, beyond 24 h for periods after the next midnight; from
    the start of the first period if the periods are not named by times of day (HH:MM).
    `plan`: the servers, with evaluations at the rates of the busiest of these periods.
    `servers`: the number of each of the plan's servers in the day. A number stands for one deployment, which has the
    same settings all day.
    `moved`: adapters that are on a server that did not hold them in the previous period (for the first period: the
    last one).
    """

    names: tuple[str, ...]
    start_s: float
    end_s: float
    plan: Plan
    servers: tuple[int, ...]
    moved: tuple[str, ...] = ()

    @property
    def hours(self) -> float:
        """Length of the period, h."""
        return (self.end_s - self.start_s) / HOUR_S

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.plan.n_gpus

    def home(self) -> dict[str, set[int]]:
        """The servers of each adapter."""
        names, placed = self.plan.workload.names, zip(self.servers, self.plan.bins, strict=True)
        places = by_adapter((k, dict.fromkeys((names[i] for i in item.adapters), 1.0)) for k, item in placed)
        return {name: set(servers) for name, servers in places.items()}


@dataclass(frozen=True, eq=False)
class Schedule:
    """Servers by period.

    `static`: the plan that holds in every period without any change, at the rates of the busiest period.
    `deployed`: every server of the day, to be deployed once and scaled to 0 or 1, at the rates of the quietest period:
    one for each place in the static plan and each of its settings. An adapter has equal shares on all servers that
    ever hold it.
    `periods`: in order; together they cover the whole day, which repeats.
    `startup_s`: time from the start of a server until it serves; servers are started that much earlier.
    """

    static: Plan
    deployed: Plan
    periods: tuple[Period, ...]
    startup_s: float

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of a day, including start-up."""
        return self._hours([item.gpus for item in self.servers])

    @property
    def price(self) -> float | None:
        """Price of a day, including start-up, US dollars; None if a server has no price."""
        prices = [item.profile.gpu.price_per_hour for item in self.servers]
        return None if None in prices else self._hours([each or 0.0 for each in prices])

    def _hours(self, weights: Sequence[float]) -> float:
        """Hours of a day in which servers run or start; hours of server k count `weights[k]` times."""
        needed = needed_s(self.periods, self.startup_s)
        return sum(weights[k] * sum(length_s for _, length_s in spans) for k, spans in needed.items()) / HOUR_S

    @property
    def most_gpus(self) -> int:
        """The most GPUs in use at once, also while servers start and those of earlier periods still run."""
        return max(sum(self.servers[k].gpus for k in used) for _, used in used_together(self.periods, self.startup_s))

    @property
    def static_gpu_hours(self) -> float:
        """GPU-hours of the static plan."""
        return self.static.n_gpus * sum(each.hours for each in self.periods)

    @property
    def static_price(self) -> float | None:
        """Price of a day of the static plan, US dollars; None if a server has no price."""
        price = self.static.price_per_hour
        return None if price is None else price * sum(each.hours for each in self.periods)

    @property
    def regret(self) -> float:
        """Share by which the static plan takes more GPU-hours than the schedule."""
        return self.static_gpu_hours / self.gpu_hours - 1.0

    @property
    def moves(self) -> int:
        """Adapters moved in a day."""
        return sum(len(each.moved) for each in self.periods)

    @property
    def servers(self) -> tuple[Bin, ...]:
        """Every server of the day, by number, with the adapters that it holds in any period."""
        return self.deployed.bins

    def starts(self) -> list[tuple[int, int]]:
        """(period, server) of each start in a day. A server that is off for no longer than it takes to start goes on
        instead."""
        return [(t, k) for t, k, _ in starts_of(self.periods, self.startup_s)]

    def running(self, server: int) -> list[tuple[float, float]]:
        """When a server must serve, as (start, end) as in `Period`, s, without its start-up time."""
        found: list[tuple[float, float]] = []
        for each in self.periods:
            if server in each.servers:
                if found and found[-1][1] == each.start_s:
                    found[-1] = (found[-1][0], each.end_s)
                else:
                    found.append((each.start_s, each.end_s))
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: the figures and, by period, servers with their adapters; moves by name."""
        return {
            "gpu_hours": self.gpu_hours,
            "most_gpus": self.most_gpus,
            "static_gpus": self.static.n_gpus,
            "static_gpu_hours": self.static_gpu_hours,
            "static_regret": self.regret,
            "price": self.price,
            "static_price": self.static_price,
            "startup_s": self.startup_s,
            "starts": len(self.starts()),
            "moves": self.moves,
            "periods": [
                {
                    "periods": list(each.names),
                    **{name: getattr(each, name) for name in ("start_s", "end_s", "gpus")},
                    "moved": list(each.moved),
                    "servers": [
                        {
                            "server": k,
                            "profile": item.profile.name,
                            "max_loras": item.max_loras,
                            "max_lora_rank": item.max_lora_rank,
                            "adapters": [each.plan.workload.names[i] for i in item.adapters],
                            "shares": list(item.shares),
                        }
                        for k, item in zip(each.servers, each.plan.bins, strict=True)
                    ],
                }
                for each in self.periods
            ],
        }


def needed_s(periods: Sequence[Period], startup_s: float) -> dict[int, list[tuple[float, float]]]:
    """When each server is in use, of periods that repeat: the time at which it starts, s from the start of the first
    period, and how long it starts and serves then. It goes on where it would be off for no longer than a start."""
    ends_s = list(accumulate(each.end_s - each.start_s for each in periods))
    day_s = ends_s[-1]
    serving: dict[int, list[tuple[float, float]]] = {}
    for each, start_s, end_s in zip(periods, [0.0, *ends_s], ends_s, strict=False):
        for k in each.servers:
            serving.setdefault(k, []).append((start_s, end_s))
    found = {}
    for k, own in serving.items():
        spans = joined(own, startup_s, day_s)
        whole = spans == [(0.0, day_s)]
        found[k] = spans if whole else [((b - startup_s) % day_s, (e - b) % day_s + startup_s) for b, e in spans]
    return found


def starts_of(periods: Sequence[Period], startup_s: float) -> Iterator[tuple[int, int, set[int]]]:
    """(period, server, all servers in use then) of each start, of periods that repeat."""
    needed, day_s = needed_s(periods, startup_s), sum(each.end_s - each.start_s for each in periods)
    begin_s = 0.0
    for t, each in enumerate(periods):
        at_s = (begin_s - startup_s) % day_s
        used = {k for k, spans in needed.items() if any((at_s - s) % day_s <= length_s for s, length_s in spans)}
        for k in each.servers:
            if any(s == at_s and length_s < day_s for s, length_s in needed[k]):
                yield t, k, used
        begin_s += each.end_s - each.start_s


def used_together(periods: Sequence[Period], startup_s: float) -> list[tuple[int, set[int]]]:
    """The servers in use when one starts, and the period for which it does; if none does, those of the whole day."""
    starting = [(t, used) for t, _, used in starts_of(periods, startup_s)]
    return starting or [(0, {k for each in periods for k in each.servers})]


def within_day(periods: Sequence[Period], day_s: float) -> list[Period]:
    """The periods in the order of the day; a period over midnight is split into two."""
    found = []
    for each in periods:
        late = round(len(each.names) * (each.end_s - day_s) / (each.end_s - each.start_s))
        if late > 0:
            found.append(replace(each, names=each.names[-late:], start_s=0.0, end_s=each.end_s - day_s))
        if late < len(each.names):
            early = len(each.names) - max(late, 0)
            found.append(replace(each, names=each.names[:early], end_s=min(each.end_s, day_s)))
    return sorted(found, key=lambda each: each.start_s)


def with_steady_settings(
    periods: Sequence[Period], holds: Callable[[Period, Sequence[Bin]], Sequence[bool]]
) -> list[Period]:
    """Periods of a day that repeats, with as few changes of a server's settings as possible; servers are renumbered.

    For each place (`Period.servers`), every pair of the `max_loras` and ranks that it has is tried. If no pair holds
    in two successive periods, a new server takes the place.

    `holds`: which of these servers hold in a period.
    """
    bins = [list(each.plan.bins) for each in periods]
    at: dict[int, dict[int, int]] = {}
    for t, each in enumerate(periods):
        for j, place in enumerate(each.servers):
            at.setdefault(place, {})[t] = j
    for rows in at.values():
        own = {t: bins[t][j].settings for t, j in rows.items()}
        pairs = set(product({s.max_loras for s in own.values()}, {s.max_lora_rank for s in own.values()}))
        options: dict[int, Set[Settings]] = {}
        for t, j in rows.items():
            item, ranks = bins[t][j], periods[t].plan.workload.ranks
            least = int(ranks[list(item.adapters)].max())
            tried = [item.profile.settings(*pair) for pair in pairs if pair[1] >= least]
            made = [replace(item, settings=each) for each in tried]
            kept = holds(periods[t], made) if len(pairs) > 1 else [False] * len(made)
            options[t] = {own[t]} | {each for each, fits in zip(tried, kept, strict=True) if fits}
        for t, settings in _chosen(own, options, len(periods)).items():
            bins[t][rows[t]] = replace(bins[t][rows[t]], settings=settings)
    keys = {key for each, made in zip(periods, bins, strict=True) for key in keys_of(each, made)}
    servers = sorted(keys, key=lambda key: (key[0], key[1].max_loras, key[1].max_lora_rank))
    number = {key: k for k, key in enumerate(servers)}
    return [
        replace(
            each, plan=replace(each.plan, bins=tuple(made)), servers=tuple(number[key] for key in keys_of(each, made))
        )
        for each, made in zip(periods, bins, strict=True)
    ]


def keys_of(each: Period, bins: Sequence[Bin]) -> list[tuple[int, Settings]]:
    """Place and settings of each server of a period with these bins."""
    return [(place, item.settings) for place, item in zip(each.servers, bins, strict=True)]


def _chosen(own: Mapping[int, Settings], options: Mapping[int, Set[Settings]], periods: int) -> dict[int, Settings]:
    """Settings by period: successive periods share one if their `options` do, the one that most of them had."""
    nothing: Set[Settings] = frozenset()
    # Begin where no settings are shared with the period before, so that no run is cut at midnight.
    first = next((t for t in options if not options[t] & options.get((t - 1) % periods, nothing)), 0)
    runs: list[tuple[list[int], Set[Settings]]] = []
    for t in (*range(first, periods), *range(first)):
        goes_on = runs and runs[-1][0][-1] == (t - 1) % periods
        if t in options and goes_on and (both := runs[-1][1] & options[t]):
            runs[-1] = ([*runs[-1][0], t], both)
        elif t in options:
            runs.append(([t], options[t]))
    found: dict[int, Settings] = {}
    for members, common in runs:
        had = Counter(own[t] for t in members)
        best = max(common, key=lambda each: (had[each], each.max_loras, each.max_lora_rank))
        found |= dict.fromkeys(members, best)
    return found
