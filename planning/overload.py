"""Plan on fewer servers than the goal needs: answer every adapter, and keep most requests within their limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.planning.frontier import FrontierPoint
from packer.planning.kept import FAR_BEYOND
from packer.planning.replicas import Replicas
from packer.planning.settle import likely_slots, with_most_slots
from packer.solvers.base import MAX_ADAPTERS_PER_GPU
from packer.solvers.candidates import neighbours

if TYPE_CHECKING:
    from packer.planning.explore import Frontier

STEPS = 5  # The share of the load that all servers but one can carry is found to one part in 2^STEPS.
GAIN = 0.02  # Share of the requests within limits by which a plan must be better than the one of least latency.
PARTS = 50  # Numbers of adapters without an answer differ if they are so many parts of the adapters apart.


class _Kept(NamedTuple):
    """What servers give: whether each of their adapters is served, if only late; how many of their adapters get no
    answer; and the share, or the rate, of the requests within their limits."""

    all_served: bool
    silent: int
    adapters: int
    share: float

    @property
    def worth(self) -> tuple[int, float]:
        """What is compared. Adapters without an answer count in `PARTS` of all, since it is chance which of those with
        few requests get none while a queue grows."""
        return (0 if self.all_served else -1 - self.silent * PARTS // self.adapters), self.share


@dataclass(frozen=True)
class Overload:
    """Plans of a search on too few servers to keep the goal."""

    job: Frontier

    def at(self, n_gpus: int) -> FrontierPoint:
        """The point of a number of GPUs; if its plan uses far more than the limits, the best one."""
        job, point = self.job, self.job.at(n_gpus)
        if not self._late(point):
            return point
        return job.put(self.best([point.plan.bins, *job.proposed(n_gpus), *job.on_all(n_gpus)], n_gpus))

    def reslotted(self, point: FrontierPoint) -> None:
        """If a point's plan uses far more than the limits, give all servers the slots that suit the fullest one best,
        if that makes a better plan."""
        if self._late(point):
            bins = point.plan.bins
            (full,) = self._slotted([max(bins, key=lambda item: item.offered_tok_s(self.job.workload))])
            made = with_most_slots(bins, full.max_loras)
            if self._worth(made) > self._enough(bins):
                self.job.put(made)

    def _late(self, point: FrontierPoint) -> bool:
        job = self.job
        if point.holds or job.spare or point.slo_attainment >= job.workload.slo.share or job.over():
            return False
        return max(job.kept.used(point.plan.bins, [job.kept.given])) >= FAR_BEYOND

    def best(self, proposals: Sequence[Sequence[Bin]], n: int) -> Sequence[Bin]:
        """The plan on which all adapters are served, if only late; failing that, on which the fewest get no answer; of
        these plans the one with the most requests within their limits, of `proposals` and the plans of `_all_but_one`.
        All get the slots that suit them best; the first proposal is also considered as it is, and stays where others
        gain less than `GAIN`: its requests wait least."""
        best, most = proposals[0], self._enough(proposals[0])
        for bins in (*proposals, *self._all_but_one(n)):
            made = self._slotted(bins)
            if (worth := self._worth(made)) > most:
                best, most = made, worth
        return best

    def _kept(self, bins: Sequence[Bin]) -> list[_Kept]:
        return [
            _Kept(
                all(hour.holds[1:]) and not np.isnan(hour.adapters.p95_ttft_ms).any(),
                int(hour.adapters.silent.sum()), len(item.adapters),
                float(np.nan_to_num(hour.figures.slo_attainment)),
            )
            for item, hour in zip(bins, self.job.hours.all(bins, self.job.workload), strict=True)
        ]  # fmt: skip

    def _worth(self, bins: Sequence[Bin]) -> tuple[int, float]:
        """The worth of a plan, the same for the same servers in any order."""
        fleet, kept = self.job.workload, self._kept(bins)
        rates = (item.requests_s(fleet) * each.share for item, each in zip(bins, kept, strict=True))
        all_served, silent = all(each.all_served for each in kept), sum(each.silent for each in kept)
        return _Kept(all_served, silent, len(fleet), math.fsum(rates)).worth

    def _enough(self, bins: Sequence[Bin]) -> tuple[int, float]:
        """What the worth of a plan must exceed for it to replace this one."""
        served, share = self._worth(bins)
        return served, (1.0 + GAIN) * share

    def _slotted(self, bins: Sequence[Bin]) -> list[Bin]:
        """Each server with the slots of the most worth. On an overloaded server with very few slots, the adapters that
        have one keep it, and their requests keep their limits, while the others get no answer."""

        def judged(some: Sequence[Bin]) -> list[tuple[int, float]]:
            return [each.worth for each in self._kept(some)]

        best = [item.with_slots(likely_slots(self.job.workload, item)) for item in bins]
        found, enough = judged(best), (0, self.job.workload.slo.share)
        for step in (-1, 1):
            open_ = {k for k, worth in enumerate(found) if worth < enough}
            now = dict(enumerate(best))
            while open_ and not self.job.over():
                next_ = {k: near[0] for k in open_ if (near := neighbours(now[k], step))}
                now |= {k: now[k].with_slots(slots) for k, slots in next_.items()}
                after = judged([now[k] for k in next_])
                # An equal share is no reason to stop: a better number may follow.
                open_ = {k for k, worth in zip(next_, after, strict=True) if worth >= found[k]}
                for k, worth in zip(next_, after, strict=True):
                    if worth > found[k]:
                        best[k], found[k] = now[k], worth
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
                if (
                    bins
                    and min(each.share for each in self._kept(bins[:-1])) >= fleet.slo.share
                    and not self.job.over()
                ):
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
