"""Groups of near ranks on servers of their own: small ranks do not pay for slots of large ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.planning.settle import with_most_slots
from packer.planning.splits import SLOTS, dealt, server_of
from packer.search import reach
from packer.solvers.candidates import slot_ranks
from packer.twin.memory.policy import kv_cache_tokens

if TYPE_CHECKING:
    from packer.planning.explore import Frontier

FAR = 0.75
"""Ranks are far from each other where slots of the largest leave less than this part of the KV cache that slots of the
smallest leave; nearer ones gain nothing by servers of their own."""


@dataclass(eq=False)
class Group:
    """Adapters of near ranks, in indices of the fleet with its parts.

    `servers`: the fewest over which an even split keeps the limits, so far as is known; 0: none do.
    `slots`: of these servers. `whole`: all of them were simulated, not the most loaded one alone.
    """

    members: IntArray
    servers: int
    slots: int = SLOTS
    whole: bool = False


@dataclass(eq=False)
class Apart:
    """The groups of a search. Further hours in which the limits are to be kept only make them need more servers."""

    job: Frontier
    _known: dict[tuple[int, int], Group] = field(default_factory=dict)
    """By the first of the ranks and the one after the last."""
    _held: tuple[int, int] = (0, 0)
    """The number of hours, and of parts of adapters, for which they are known."""

    def on(self, n: int) -> Iterator[list[Bin]]:
        """Servers of groups on `n` servers, where these are enough; those left over go where servers have most load."""
        job, ranks = self.job, slot_ranks(self.job.parts.fleet.ranks)
        kinds, loads = np.unique(ranks), job.parts.fleet.offered_tok_s_by_adapter
        if n < len(kinds) or job.spare or not job.kept.all_count or not self._far(kinds):
            return
        if self._held != (held := (len(job.kept.hours), len(job.parts.fleet))):
            more_parts, self._held = self._held[1] != held[1], held
            self._known = {} if more_parts else self._known
            for group in self._known.values():
                self._settle(group, group.servers)
        while not job.over():
            groups = self._cheapest(ranks, kinds, n)
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
        most = np.array([len(group.members) for group in groups])
        if most.sum() < n:
            return
        while counts.sum() < n:
            counts[np.argmax(np.where(counts < most, shares / counts, 0.0))] += 1
        pairs = zip(groups, counts.tolist(), strict=True)
        yield [item for group, count in pairs for item in self._servers(group, count)]

    def _far(self, kinds: IntArray) -> bool:
        """See `FAR`."""
        slots, profile = min(SLOTS, len(self.job.workload)), self.job.profile
        least, most = (kv_cache_tokens(profile, profile.settings(slots, int(kinds[k]))) for k in (-1, 0))
        return least < FAR * most

    def _cheapest(self, ranks: IntArray, kinds: IntArray, n: int) -> list[Group]:
        """Of all ways to cut the ranks into two runs and more, that which takes the fewest servers, about `n`."""
        loads = self.job.parts.fleet.offered_tok_s_by_adapter
        best: list[list[Group] | None] = [[]]
        for end in range(1, len(kinds) + 1):
            ways = []
            for start in reversed(range(1 if end == len(kinds) else 0, end)):
                before = best[start]
                if (start, end) not in self._known:
                    members = np.flatnonzero((ranks >= kinds[start]) & (ranks <= kinds[end - 1]))
                    alone = [self._known[k, k + 1].servers for k in range(start, end - 1)]
                    near = sum(alone) + self._known[end - 1, end].servers if alone else 0
                    near = near or round(n * float(loads[members].sum() / loads.sum()))
                    self._known[start, end] = Group(members, 0)
                    self._settle(self._known[start, end], max(1, near))
                group = self._known[start, end]
                if before is not None and group.servers:
                    ways.append([*before, group])
            best.append(min(ways, key=lambda way: sum(group.servers for group in way), default=None))
        return best[-1] or []

    def _settle(self, group: Group, near: int) -> None:
        """The fewest servers of a group by the most loaded one, not fewer than are known to be needed; from `near`."""
        job, slots = self.job, {}

        def breaks(n: int) -> bool:
            tried, used = job.fullest(self._servers(group, n))
            if used <= 1.0 and job.kept.used([tried], most=[1.0])[0] <= 1.0:
                slots[n] = tried.max_loras
            return n not in slots

        low = near if group.servers else 1
        found = reach(breaks, low, len(group.members), near, stop=job.over)[1]
        group.whole = False
        group.servers, group.slots = (found, slots[found]) if found in slots else (0, group.slots)

    def _servers(self, group: Group, n: int) -> Sequence[Bin]:
        """An even split of a group over `n` servers."""
        parts, profile = self.job.parts, self.job.profile
        falling = group.members[
            np.argsort(-parts.fleet.offered_tok_s_by_adapter[group.members], kind="stable")
        ]
        bins = parts.joined([server_of(parts.fleet, profile, part, SLOTS) for part in dealt(falling, n)])
        return with_most_slots(bins, group.slots)
