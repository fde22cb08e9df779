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


class _Worth(NamedTuple):
    """What plans, or one server with different slots, are compared by: first the answers, then the requests per second
    within their limits.

    `answers`: 0 if each adapter is served, if only late; else the lower, the more adapters get no answer.
    """

    answers: int
    within_s: float


class _Kept(NamedTuple):
    """What a server gives: whether each of its adapters is served, if only late; how many of them get no answer; its
    requests per second, and the share of these within their limits; without limits, the share of its load served."""

    all_served: bool
    silent: int
    requests_s: float
    share: float


def _worth(servers: Sequence[_Kept], adapters: int) -> _Worth:
    """The worth of servers with so many adapters, the same in any order. Adapters without an answer count in `PARTS` of
    all, since it is chance which of those with few requests get none while a queue grows."""
    served, silent = all(each.all_served for each in servers), sum(each.silent for each in servers)
    within_s = math.fsum(each.requests_s * each.share for each in servers)
    return _Worth(0 if served else -1 - silent * PARTS // adapters, within_s)


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

    def with_few_slots(self, point: FrontierPoint) -> tuple[float, int]:
        """The share of the requests within limits if each server of a plan far beyond the limits had the fewer slots
        with which its share is largest, and how many adapters would get no answer; NaN and 0 for another plan."""
        if not self._late(point):
            return math.nan, 0
        tried = (
            [item.with_slots(item.max_loras >> k) for k in range(item.max_loras.bit_length())]
            for item in point.plan.bins
        )
        best = [max(self._kept(some), key=lambda each: each.share) for some in tried]
        within_s = math.fsum(each.requests_s * each.share for each in best)
        return within_s / math.fsum(each.requests_s for each in best), sum(each.silent for each in best)

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
        fleet = self.job.workload
        return [
            _Kept(
                all(hour.holds[1:]) and not np.isnan(hour.adapters.p95_ttft_ms).any(),
                int(hour.adapters.silent.sum()), item.requests_s(fleet),
                float(np.nan_to_num(hour.figures.served_share if fleet.slo.is_none else hour.figures.slo_attainment)),
            )
            for item, hour in zip(bins, self.job.hours.all(bins, fleet), strict=True)
        ]  # fmt: skip

    def _worth(self, bins: Sequence[Bin]) -> _Worth:
        return _worth(self._kept(bins), len(self.job.workload))

    def _enough(self, bins: Sequence[Bin]) -> _Worth:
        """What the worth of a plan must exceed for it to replace this one."""
        answers, within_s = self._worth(bins)
        return _Worth(answers, (1.0 + GAIN) * within_s)

    def _slotted(self, bins: Sequence[Bin]) -> list[Bin]:
        """Each server with the slots of the most worth. On an overloaded server with very few slots, the adapters that
        have one keep it, and their requests keep their limits, while the others get no answer."""

        def judged(some: Sequence[Bin]) -> list[_Worth]:
            found = zip(some, self._kept(some), strict=True)
            return [_worth([each], len(item.adapters)) for item, each in found]

        best = [item.with_slots(likely_slots(self.job.workload, item)) for item in bins]
        found = judged(best)
        enough = [_Worth(0, self.job.workload.slo.share * item.requests_s(self.job.workload)) for item in bins]
        for step in (-1, 1):
            open_ = {k for k, worth in enumerate(found) if worth < enough[k]}
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
