"""Separate servers for classes of adapters, so that only those of tight limits are on lightly loaded servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from packer.arrays import IntArray, distinct
from packer.bin import Bin
from packer.memo import cached_property
from packer.planning.apart import Apart, Group, full
from packer.search import fewest
from packer.solvers.base import limit_of
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.planning.explore import Frontier


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
                if full(self.job, bins) is not None:
                    yield [*bins, *self._even(kept, group.servers - 1)]

    def _fewer(self, group: Group) -> IntArray | None:
        """The adapters, all but the hottest, that one server fewer than a group needs can hold; None: no adapters."""
        key = id(group), group.servers, len(self.job.kept.hours)
        if key not in self._on_fewer:
            loads, n = self.fleet.offered_tok_s_by_adapter[group.members], group.servers - 1
            falling = group.members[np.argsort(-loads, kind="stable")]
            gone = fewest(
                lambda gone: bool(full(self.job, self._even(falling[gone:], n))), 1, len(falling) - n, self.job.over
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
