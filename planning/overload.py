"""Plan on fewer servers than the goal needs: keep as many requests as possible within their limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.planning.replicas import Replicas
from packer.planning.settle import likely_slots
from packer.solvers.base import MAX_ADAPTERS_PER_GPU
from packer.solvers.candidates import neighbours

if TYPE_CHECKING:
    from packer.planning.explore import Frontier

STEPS = 5  # The share of the load that all servers but one can carry is found to one part in 2^STEPS.


@dataclass(frozen=True)
class Overload:
    """Plans of a search on too few servers to keep the goal."""

    job: Frontier

    def most_attained(self, proposals: Sequence[Sequence[Bin]], n: int) -> Sequence[Bin]:
        """The plan with the most requests within their limits, of `proposals` and the plans of `_all_but_one`. All get
        the slots that suit them best; the first proposal is also considered as it is."""
        best, most = proposals[0], self._attainment(proposals[0])
        for bins in (*proposals, *self._all_but_one(n)):
            made = self._slotted(bins)
            if (attained := self._attainment(made)) > most:
                best, most = made, attained
        return best

    def _shares(self, bins: Sequence[Bin]) -> list[float]:
        """Share of the requests of each server that keep their limits."""
        hours = self.job.hours.all(bins, self.job.workload)
        return [float(np.nan_to_num(hour.figures.slo_attainment)) for hour in hours]

    def _attainment(self, bins: Sequence[Bin]) -> float:
        """Rate of requests within their limits, req/s; the same for the same servers in any order."""
        pairs = zip(bins, self._shares(bins), strict=True)
        return math.fsum(item.requests_s(self.job.workload) * share for item, share in pairs)

    def _slotted(self, bins: Sequence[Bin]) -> list[Bin]:
        """Each server with the slots that keep most of its requests within their limits. On an overloaded server with
        few slots, adapters that have a slot keep it, and their requests keep their limits."""
        best = [item.with_slots(likely_slots(self.job.workload, item)) for item in bins]
        found = self._shares(best)
        for step in (-1, 1):
            open_ = {k for k, share in enumerate(found) if share < self.job.workload.slo.share}
            now = dict(enumerate(best))
            while open_ and not self.job.over():
                next_ = {k: near[0] for k in open_ if (near := neighbours(now[k], step))}
                now |= {k: now[k].with_slots(slots) for k, slots in next_.items()}
                shares = self._shares([now[k] for k in next_])
                # An equal share is no reason to stop: a better number may follow.
                open_ = {k for k, share in zip(next_, shares, strict=True) if share >= found[k]}
                for k, share in zip(next_, shares, strict=True):
                    if share > found[k]:
                        best[k], found[k] = now[k], share
        return best

    def _all_but_one(self, n: int) -> Iterator[Sequence[Bin]]:
        """Plans in which all servers but one carry as many adapters as keep the goal, and one carries all others.
        Adapters come in order of requests per token, then of rate; for several ranks, also by rank first."""
        fleet = self.job.workload
        # Rounded, so that adapters of equal lengths stay together in spite of rounding errors.
        per_token = -np.round(fleet.rates / np.maximum(fleet.offered_tok_s_by_adapter, 1e-12), 6)
        orders = [np.lexsort((-fleet.rates, per_token))]
        if len(set(fleet.ranks.tolist())) > 1:
            orders.append(np.lexsort((-fleet.rates, per_token, fleet.ranks)))
        for order in orders if n > 1 else ():
            load = np.cumsum(fleet.offered_tok_s_by_adapter[order]) / fleet.offered_tok_s
            low, best = 0.0, None
            for step in range(1, STEPS + 1):
                count = int(np.searchsorted(load, low + 0.5**step, side="right"))
                bins = self._divided(order[:count].tolist(), order[count:].tolist(), n)
                if bins and min(self._shares(bins[:-1])) >= fleet.slo.share and not self.job.over():
                    low, best = low + 0.5**step, bins
            if best:
                yield best

    def _divided(self, first: list[int], rest: list[int], n: int) -> list[Bin]:
        """The adapters `first` on n - 1 servers, and `rest` on one server; empty if some have no place."""
        job = self.job
        if not first or not 0 < len(rest) <= MAX_ADAPTERS_PER_GPU:
            return []
        split = {k: job.parts.parts[i] for k, i in enumerate(first) if i in job.parts.parts}
        parts = Replicas(job.workload.subset(tuple(first)), split).spread_over(n - 1, job.max_replicas)
        found = [item.under(first) for item in parts.joined(job.placed(parts.fleet, n - 1))]
        rank = slot_rank_for(int(job.workload.ranks[rest].max()))
        found.append(Bin(tuple(rest), job.profile.settings(1, rank), job.profile))
        return [item.with_slots(likely_slots(job.workload, item)) for item in found] if found[:-1] else []
