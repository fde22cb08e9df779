"""Separate servers for groups of similar ranks, so that small ranks do not pay for slots of large ranks, or of similar
limits, so that only adapters of tight limits are on lightly loaded servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from packer.arrays import IntArray, distinct
from packer.bin import Bin
from packer.memo import cached_property
from packer.planning.settle import with_most_slots
from packer.planning.splits import SLOTS, server_of
from packer.search import fewest, reach
from packer.solvers.base import limit_of
from packer.solvers.candidates import slot_ranks
from packer.solvers.order import levelled
from packer.twin.memory.policy import kv_cache_tokens
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.planning.explore import Frontier


T = TypeVar("T")
FAR = 0.75
"""Ranks are separated only if slots of the largest rank leave less than this share of the KV cache that slots of the
smallest rank leave. Closer ranks gain nothing by separate servers."""


def cheapest(count: int, found: Callable[[int, int], T | None], cost: Callable[[T], int]) -> list[T]:
    """The division of kinds 0 to `count` - 1 into two or more runs with the least cost; [] if there is none. `found`:
    what is made of a run, by its first kind and the one after its last; None if nothing can be."""
    # `best[end]`: the runs of the kinds before `end`.
    best: list[list[T] | None] = [[]]
    for end in range(1, count + 1):
        ways = []
        for start in reversed(range(1 if end == count else 0, end)):
            own, before = found(start, end), best[start]
            if own is not None and before is not None:
                ways.append([*before, own])
        best.append(min(ways, key=lambda way: sum(map(cost, way)), default=None))
    return best[-1] or []


@dataclass(eq=False)
class Group:
    """Adapters of similar ranks, as indices of the fleet with its parts.

    `servers`: the fewest servers on which an even split is known to keep the limits; 0: none do.
    `slots`: slots of each server. `whole`: whether all servers were simulated, not only the most loaded one.
    """

    members: IntArray
    servers: int
    slots: int = SLOTS
    whole: bool = False


@dataclass(eq=False)
class Apart:
    """The groups of a search. Hours that are added later can only increase the number of servers that a group needs."""

    job: Frontier
    _known: dict[tuple[int, int], Group] = field(default_factory=dict)
    """Groups by the index of their first kind of adapter and of the kind after their last one."""
    _held: tuple[int, int] = (0, 0)  # The numbers of kept hours and of adapter parts for which `_known` was computed.

    def on(self, n: int) -> Iterator[list[Bin]]:
        """The groups on `n` servers, if these suffice; servers left over go to the group with most load per server."""
        job, each, loads = self.job, self.kinds, self.fleet.offered_tok_s_by_adapter
        kinds = distinct(each)
        if min(n, len(kinds)) < 2 or not job.kept.all_count:
            return
        if self._held != (held := (len(job.kept.hours), len(self.fleet))):
            # New parts change the indices of adapters; new hours only raise what a group needs.
            more_parts, self._held = self._held[1] != held[1], held
            self._known = {} if more_parts else self._known
            for group in self._known.values():
                self._settle(group, group.servers)
        while not job.over():
            groups = self._cheapest(each, kinds, n)
            if not groups or sum(group.servers for group in groups) > n:
                return
            partly = [group for group in groups if not group.whole]
            if not partly:
                break
            partly[0].whole = job.kept.holds(self._servers(partly[0], partly[0].servers))
            if not partly[0].whole:
                self._settle(partly[0], partly[0].servers + 1)
        else:
            return
        counts = np.array([group.servers for group in groups])
        shares = np.array([loads[group.members].sum() for group in groups])
        most = np.array([self._most(group) for group in groups])
        if most.sum() < n:
            return
        while counts.sum() < n:
            counts[np.argmax(np.where(counts < most, shares / counts, 0.0))] += 1
        pairs = zip(groups, counts.tolist(), strict=True)
        yield [item for group, count in pairs for item in self._servers(group, count)]

    @property
    def fleet(self) -> Workload:
        """The fleet whose adapters are grouped."""
        return self.job.parts.fleet

    @property
    def kinds(self) -> IntArray:
        """The kind of each adapter, by which groups are runs of kinds: the slot rank; 0 for all if the ranks do not
        differ enough to be separated (`FAR`), or if servers of all ranks take over from a lost one."""
        ranks, profile = slot_ranks(self.fleet.ranks), self.job.profile
        slots, spare = min(SLOTS, len(self.job.workload)), self.job.spare
        ends = int(ranks.max()), int(ranks.min())
        least, most = (kv_cache_tokens(profile, profile.settings(slots, rank)) for rank in ends)
        return ranks if least < FAR * most and not spare else 0 * ranks

    def left_s(self) -> float:
        """The time, s, in which groups may still be searched."""
        return self.job.remaining_s()

    def _cheapest(self, each: IntArray, kinds: IntArray, n: int) -> list[Group]:
        """The division of the kinds into two or more runs with the fewest servers, about `n`; [] if none is known."""
        loads = self.fleet.offered_tok_s_by_adapter

        def found(start: int, end: int) -> Group | None:
            if (start, end) not in self._known:
                if self.left_s() <= 0.0 or self.job.over():
                    return None
                members = np.flatnonzero((each >= kinds[start]) & (each <= kinds[end - 1]))
                alone = [self._known[k, k + 1].servers for k in range(start, end - 1)]
                near = sum(alone) + self._known[end - 1, end].servers if alone else 0
                near = near or round(n * float(loads[members].sum() / loads.sum()))
                self._known[start, end] = Group(members, 0)
                self._settle(self._known[start, end], max(1, near))
            return self._known[start, end] if self._known[start, end].servers else None

        return cheapest(len(kinds), found, lambda group: group.servers)

    def _settle(self, group: Group, near: int) -> None:
        """Set a group's fewest servers whose most loaded one keeps its limits, searched from `near`."""
        job, slots = self.job, {}

        def breaks(n: int) -> bool:
            if (full := self._full(self._servers(group, n))) is not None:
                slots[n] = full.max_loras
            return full is None

        low = near if group.servers else 1
        found = reach(breaks, low, len(group.members), near, stop=job.over)[1]
        group.whole = False
        group.servers, group.slots = (found, slots[found]) if found in slots else (0, group.slots)

    def _full(self, bins: Sequence[Bin]) -> Bin | None:
        """The most loaded of the servers, with its best slots, if it keeps its limits."""
        tried, used = self.job.fullest(bins)
        return tried if used <= 1.0 and self.job.kept.holds_one(tried) else None

    def _most(self, group: Group) -> int:
        """The most servers that a group can use."""
        return len(group.members)

    def _servers(self, group: Group, n: int) -> Sequence[Bin]:
        """An even split of a group over `n` servers."""
        parts, profile = self.job.parts, self.job.profile
        loads = parts.fleet.offered_tok_s_by_adapter
        split = levelled(group.members[np.argsort(-loads[group.members], kind="stable")], loads, n)
        bins = parts.joined([server_of(parts.fleet, profile, part, SLOTS) for part in split])
        return with_most_slots(bins, group.slots)


@dataclass(eq=False)
class LimitsApart(Apart):
    """Groups of adapters of similar limits, each planned as a fleet of its own."""

    _jobs: dict[int, Frontier] = field(default_factory=dict)  # The search of each group, by its id.
    _on_fewer: dict[tuple[int, int, int], IntArray | None] = field(default_factory=dict)
    """Results of `_fewer`, by the id and the servers of the group, and the number of kept hours."""

    def on(self, n: int) -> Iterator[list[Bin]]:
        """The groups on `n` servers; if these do not suffice, wider limits on one server fewer than they need, which
        hold what they can, and what they leave over, the hottest adapters, beside the tighter limits."""
        found, job, each = list(super().on(n)), self.job, self.kinds
        yield from found
        whole = job.kept.all_count and not job.spare and len(job.parts.fleet) == len(each)
        kinds = distinct(each)
        for start in range(1, len(kinds)) if whole and not found else ():
            group = self._known.get((start, len(kinds)))
            if group is None or not 1 < group.servers <= n or (kept := self._fewer(group)) is None:
                continue
            rest = np.setdiff1d(np.arange(len(each)), kept)
            if len(rest) > n - group.servers:
                bins = self._even(rest, n - group.servers + 1)
                if self._full(bins) is not None:
                    yield [*bins, *self._even(kept, group.servers - 1)]

    def _fewer(self, group: Group) -> IntArray | None:
        """The adapters, all but the hottest, that one server fewer than a group needs can hold; None: no adapters."""
        key = id(group), group.servers, len(self.job.kept.hours)
        if key not in self._on_fewer:
            loads, n = self.fleet.offered_tok_s_by_adapter[group.members], group.servers - 1
            falling = group.members[np.argsort(-loads, kind="stable")]
            gone = fewest(
                lambda gone: self._full(self._even(falling[gone:], n)) is not None, 1, len(falling) - n, self.job.over
            )
            self._on_fewer[key] = None if gone is None else falling[gone:]
        return self._on_fewer[key]

    def _even(self, members: IntArray, n: int) -> Sequence[Bin]:
        """An even split of these adapters over `n` servers."""
        return super()._servers(Group(members, n), n)

    @property
    def fleet(self) -> Workload:
        """The fleet with whole adapters: each search splits its own."""
        return self.job.workload

    @cached_property
    def kinds(self) -> IntArray:
        """The place of each adapter's limits in the order from tight to wide."""
        return self.fleet.slo.order(self.fleet)

    def left_s(self) -> float:
        """The time, s, left of the first half: every group takes as long as a fleet, and even splits need theirs."""
        return self.job.remaining_s() - 0.5 * (self.job.time_limit_s or 0.0)

    def _settle(self, group: Group, near: int) -> None:
        """Set the fewest servers that keep a group's limits in all hours."""
        job, own = self.job, tuple(group.members.tolist())
        if id(group) not in self._jobs:
            search = replace(job, workload=self.fleet.subset(own), log_hour=None, time_limit_s=limit_of(self.left_s()))
            search.apart = search.apart[:1]
            self._jobs[id(group)] = search
        search = self._jobs[id(group)]
        known = {hour.seed for hour in search.kept.added}
        for hour in reversed([hour for hour in job.kept.added if hour.seed not in known]):
            search.keep(hour._replace(fleet=hour.fleet.subset(own)))
        most = search.most(None)
        low = group.servers or min(search.least(), most)
        first = None if search.hopeless else search.first(low, most)
        group.servers = 0 if first is None else first if group.servers else search.lower(first)
        group.whole = True

    def _most(self, group: Group) -> int:
        """The most servers that a group can use."""
        return self._jobs[id(group)].most(None)

    def _servers(self, group: Group, n: int) -> Sequence[Bin]:
        """The servers of the group's own plan."""
        return [item.under(group.members.tolist()) for item in self._jobs[id(group)].at(n).plan.bins]
