"""Split adapters that one server can't carry into equal parts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count

import numpy as np

from packer.adapter import changed
from packer.arrays import FloatArray, IntArray
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.goal import metric
from packer.memo import cached_property
from packer.planning.kept import KeptHours
from packer.planning.lone import unreachable
from packer.planning.starving import servers_by_load
from packer.profile import Profile
from packer.search import fewest
from packer.solvers.candidates import most_slots_of, slot_ranks
from packer.workload import Workload

MOST_REPLICAS = 64  # Default maximum number of parts of an adapter whose load takes fewer.
MOST_SPLIT = 1_024  # Default maximum number of parts of any adapter.
CALM = 0.5  # An adapter that uses no more of its limits in an hour alone keeps them one request at a time, too.
FURTHER = 8  # Number of adapters examined beyond the first, by length, that keeps the goal on an idle server.
SPARE_PARTS = 8  # Default maximum number of parts, as a multiple of those that the load takes (`least_parts`).


def part(fleet: Workload, profile: Profile, i: int, parts: int) -> Bin:
    """A server of its own for one of the equal parts of an adapter."""
    return Bin((i,), profile.settings(1, slot_rank_for(fleet.adapters[i].rank)), profile, (1.0 / parts,))


def least_parts(fleet: Workload, profile: Profile, i: int) -> int:
    """The fewest equal parts of an adapter with which servers may keep up, by load alone."""
    return 1 if fleet.arrivals.trace is not None else servers_by_load(fleet.subset([i]), profile)


def most_parts(least: int, allowed: int | None, times: int = SPARE_PARTS) -> int:
    """The maximum number of parts: `allowed`, or by default up to `times` the `least`."""
    return min(max(MOST_REPLICAS, times * least), MOST_SPLIT) if allowed is None else allowed


def fewest_parts(
    loads: FloatArray,
    ranks: IntArray,
    groups: Sequence[str | None],
    holds: Callable[[int, int], bool],
    most: Callable[[int], int],
    enough: Callable[[Mapping[int, int | None]], bool] = lambda _found: False,
    stop: Callable[[], bool] = lambda: False,
) -> dict[int, int | None]:
    """The fewest equal parts of each adapter that must be split; None: even the most parts do not suffice.

    In each group, adapters are tried by decreasing load. Once one holds whole, adapters of no larger rank do, too.

    `loads`, `ranks`, `groups`: of each adapter, in order.
    `holds(i, parts)`: whether adapter i holds if each of `parts` equal parts has a GPU of its own.
    `most(i)`: the maximum number of parts of adapter i.
    `enough`: whether to stop, given the parts found so far.
    `stop`: once it is true, an adapter gets the fewest parts that were found to hold. If there are none, the fewest
    that then hold by `holds`, which no longer simulates.
    """
    found: dict[int, int | None] = {}
    done: dict[str | None, int] = {}
    for i in np.argsort(-loads, kind="stable").tolist():
        if ranks[i] <= done.get(groups[i], -1):
            continue
        if enough(found):
            break
        parts = fewest(partial(holds, i), 1, most(i), stop)
        if parts is None and stop():
            parts = fewest(partial(holds, i), 1, most(i))
        if parts == 1:
            done[groups[i]] = int(ranks[i])
        else:
            found[i] = parts
    return found


def above_share(fleet: Workload, servers: int) -> dict[int, int | None]:
    """The adapters with more load than an equal share of the servers, which have more room if these are split, too; as
    one part, of which `Replicas.spread_over` makes as many as that takes."""
    loads = fleet.offered_tok_s_by_adapter
    return dict.fromkeys(np.flatnonzero(loads * servers > loads.sum() * (1.0 + 1e-9)).tolist(), 1)


def needed(kept: KeptHours, profile: Profile, allowed: int | None, *, every: bool = False) -> dict[int, int | None]:
    """The fewest equal parts of each adapter that breaks its limits on a GPU of its own; None: `allowed` parts do not
    suffice, or its requests break the limits even one at a time.

    In each class of limits, the hottest adapters are tried first, and colder ones if their ranks are larger; if the
    time of whole answers has a limit, also those with the longest ones first. Requests one at a time are simulated for
    the adapters with the longest prompts. Once the time is over nothing is simulated, and adapters get at least the
    parts that their load takes.

    `kept`: the hours in which the limits must be kept.
    `allowed`: maximum number of parts; None: see `most_parts`.
    `every`: go on once too many adapters have no number of parts for the goal to be kept.
    """
    fleet, stop = kept.workload, kept.simulated.stop

    @cache
    def least(i: int) -> int:
        return least_parts(kept.raised, profile, i)

    def alone(i: int, parts: int = 1) -> bool:
        if parts < least(i):
            return False
        return stop() or kept.holds_one(part(fleet, profile, i, parts))

    def kept_idle(i: int) -> bool:
        return stop() or not any(unreachable(kept.lone(part(fleet, profile, i, 1))))

    def reachable(i: int, _parts: int = 1) -> bool:
        # Few requests may keep by luck a limit that an idle server breaks.
        known = not stop() and least(i) == 1 and not fleet.slo.is_none
        calm = known and kept.used([part(fleet, profile, i, 1)], most=[1.0])[0] <= CALM
        return fleet.slo.is_none or calm or kept_idle(i)

    found: dict[int, int | None] = {}

    def holds(i: int, parts: int) -> bool:
        if found.get(i, parts) is None:
            return False
        return parts >= least(i) and (parts == 1 or reachable(i)) and alone(i, parts)

    def enough(more: Mapping[int, int | None]) -> bool:
        none = sum(parts is None for parts in {**found, **more}.values())
        return none > len(fleet) - kept.required and not every

    def most(i: int) -> int:
        return most_parts(least(i), allowed)

    classes = [adapter.slo_class for adapter in fleet.adapters]
    slots, of_adapters = slot_ranks(fleet.ranks), fleet.slo.of_adapters
    whole = any(metric(key) == "e2e" for key in fleet.slo.every_key)
    lengths = (fleet.mean_output_tokens, fleet.mean_input_tokens)[not whole :]
    late = _longest(lengths, classes, kept_idle) if every and of_adapters else []
    # An order by one length may take in adapters that the other length lets keep the goal.
    found |= {i: None for i in late if len(late) == len(fleet) or not (alone(i) and kept_idle(i))}
    # Long answers break a limit of whole ones at little load.
    for size in (fleet.offered_tok_s_by_adapter, *lengths[:-1]):
        found |= fewest_parts(size, slots, classes, holds, most, enough, stop)
    # Limits of servers and of requests an adapter may break alone. Ranks count as equal here: if one adapter is
    # reachable, those of its class with shorter lengths are.
    for length in lengths if of_adapters and not every else ():
        found |= fewest_parts(_places(length, fleet.rates), 0 * slots, classes, reachable, lambda _i: 1, enough)
    return found


def _places(length: FloatArray, rates: FloatArray) -> FloatArray:
    """Numbers that fall with the place of each adapter in the order of falling lengths. Of equal lengths the hottest
    comes first: the fewer requests, the more is luck."""
    return -np.argsort(np.lexsort((-rates, -length))).astype(np.float64)


def _longest(
    lengths: Sequence[FloatArray], groups: Sequence[str | None], keeps: Callable[[int], bool]
) -> list[int]:  # fmt: skip
    """The adapters of each group that come before the first that `keeps` the goal, the longest first, in one of the
    orders by length; and those of the next `FURTHER` that do not keep it."""
    found: list[int] = []
    for length in lengths:
        order = np.argsort(-length, kind="stable").tolist()
        for name in set(groups):
            own = [i for i in order if groups[i] == name and i not in found]
            first = bisect_left(own, True, key=keeps)
            found += [*own[:first], *(i for i in own[first : first + FURTHER] if not keeps(i))]
    return found


def hot_alone(
    fleet: Workload, profile: Profile, parts: Mapping[int, int | None], n_gpus: int, allowed: int | None,
    placed: Callable[[Workload, int], Sequence[Bin]],
) -> Iterator[tuple[Bin, ...]]:  # fmt: skip
    """Yield servers with one part each of the adapters that have `parts`, and the other adapters on the servers left.
    Servers that the others do not need get further parts. Nothing if no adapter has parts, if there are too few
    servers, or if `placed` has no place for the others on them. `allowed`: maximum number of parts, as in `needed`."""
    hot = {i: n for i, n in parts.items() if n}
    cool = tuple(i for i in range(len(fleet)) if i not in hot)
    left = n_gpus - sum(hot.values())
    if not hot or left < bool(cool):
        return
    bins = placed(fleet.subset(cool), left) if cool else ()
    if cool and not bins:
        return
    more = dict(hot)
    for _ in range(left - len(bins)):
        able = [i for i, n in hot.items() if more[i] < most_parts(n, allowed, 2)]
        for i in sorted(able, key=lambda i: more[i] / hot[i])[:1]:
            more[i] += 1
    own = [part(fleet, profile, i, n) for i, n in more.items() for _ in range(n)]
    yield (*own, *(item.under(cool) for item in bins))


def on_all(
    fleet: Workload, profile: Profile, n_gpus: int, least: float,
    placed: Callable[[Workload, int], Sequence[Bin]], *, all_slots: bool = False,
) -> Iterator[tuple[Bin, ...]]:  # fmt: skip
    """Yield servers that each have an equal part of every adapter with a load of at least `least` tok/s. Nothing if
    there is no such adapter, or if `placed` has no place for some of the others. `all_slots`: a slot for each adapter,
    up to the most with which a server starts; otherwise one slot, to be increased later."""
    is_hot = fleet.offered_tok_s_by_adapter >= least * (1.0 - 1e-9)
    hot, cool = (tuple(np.flatnonzero(each).tolist()) for each in (is_hot, ~is_hot))
    bins = placed(fleet.subset(cool), n_gpus) if hot and cool else ()
    whole = [tuple(cool[i] for i in item.adapters) for item in bins]
    if not hot or sum(map(len, (hot, *whole))) < len(fleet):
        return
    rank = slot_rank_for(int(fleet.ranks.max()))
    most = most_slots_of(profile, rank) if all_slots else 1
    yield tuple(
        Bin(
            hot + own,
            profile.settings(min(most, len(hot) + len(own)), rank),
            profile,
            (1.0 / n_gpus,) * len(hot) + (1.0,) * len(own),
        )
        for own in [*whole, *[()] * (n_gpus - len(whole))]
    )


@dataclass(eq=False)
class Replicas:
    """A fleet whose hot adapters are split: in `fleet`, each part is an adapter; `joined` converts parts to shares.

    `workload`: the original fleet.
    `parts`: number of equal parts by adapter; None: no number suffices, the adapter stays whole.
    """

    workload: Workload
    parts: Mapping[int, int | None]
    fleet: Workload = field(init=False)
    too_hot: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.too_hot = tuple(i for i, parts in self.parts.items() if parts is None)
        names = set(self.workload.names)
        adapters = []
        self._whole: list[int] = []
        for i, adapter in enumerate(self.workload.adapters):
            parts = self.parts.get(i) or 1
            self._whole += [i] * parts
            for k in range(parts):
                name = adapter.name
                if k and name in names:
                    numbered = (f"{adapter.name[:200]} {number}" for number in count(k))
                    name = next(other for other in numbered if other not in names)
                names.add(name)
                adapters.append(changed(adapter, name=name, rate=adapter.rate / parts))
        # Parts are placed for random arrivals, because a trace has no requests for parts.
        self.fleet = self.workload if not self.parts else replace(self.workload, adapters=tuple(adapters))

    @cached_property
    def calm(self) -> Workload:
        """`fleet` in the form on which trees were trained: Poisson arrivals, and servers that train nothing."""
        return replace(self.fleet, arrivals=Arrivals(), fine_tuning=None)

    def spread_over(self, n_gpus: int, allowed: int | None, *, on_each: bool = False) -> Replicas:
        """The same fleet with enough parts of each split adapter that none has more load than a GPU's fair share;
        `on_each`: with one for each GPU, if so many are allowed."""
        parts = self._parts_on(n_gpus, allowed, on_each=on_each)
        return self if parts == self.parts else Replicas(self.workload, parts)

    def most_gpus(self, allowed: int | None) -> int:
        """The largest number of GPUs on which each GPU gets at least one adapter or part."""
        n = len(self.workload)
        while n < self._number(self._parts_on(n + 1, allowed)):
            n += 1
        return n

    def _parts_on(self, n_gpus: int, allowed: int | None, *, on_each: bool = False) -> dict[int, int | None]:
        loads = self.workload.offered_tok_s_by_adapter
        fair = float(loads.sum()) / n_gpus
        wanted = {i: n_gpus if on_each else math.ceil(loads[i] / fair - 1e-9) for i in self.parts}
        return {
            i: None if count is None else max(count, min(most_parts(count, allowed, 2), wanted[i]))
            for i, count in self.parts.items()
        }

    def _number(self, parts: Mapping[int, int | None]) -> int:
        return len(self.workload) + sum((count or 1) - 1 for count in parts.values())

    def joined(self, bins: Sequence[Bin]) -> tuple[Bin, ...]:
        """The bins of `fleet`, with shares of the adapters of `workload` instead of parts."""
        if not self.parts:
            return tuple(bins)
        found = []
        for item in bins:
            shares: dict[int, int] = {}
            for part in item.adapters:
                # A server may have several parts of one adapter, which take one slot.
                shares[self._whole[part]] = shares.get(self._whole[part], 0) + 1
            exact = tuple(count / (self.parts.get(i) or 1) for i, count in shares.items())
            settings = item.profile.settings(min(item.max_loras, len(shares)), item.max_lora_rank)
            found.append(replace(item, adapters=tuple(shares), shares=exact, settings=settings))
        return tuple(found)
