"""Separate servers for groups of similar ranks, so that small ranks do not pay for slots of large ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from packer.arrays import IntArray, distinct
from packer.bin import Bin
from packer.planning.settle import with_most_slots
from packer.planning.splits import SLOTS, server_of
from packer.search import reach
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


def full(job: Frontier, bins: Sequence[Bin]) -> Bin | None:
    """The last of `Frontier.fullest`, with its best slots, if they keep the limits, the first in all kept hours."""
    made, used = job.fullest(bins)
    return made[-1] if used <= 1.0 and job.kept.holds_one(made[0]) else None


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
            if (loaded := full(job, self._servers(group, n))) is not None:
                slots[n] = loaded.max_loras
            return loaded is None

        low = near if group.servers else 1
        found = reach(breaks, low, len(group.members), near, stop=job.over)[1]
        group.whole = False
        group.servers, group.slots = (found, slots[found]) if found in slots else (0, group.slots)

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
