"""Many adapters, few classes: adapters of equal rank, rate and lengths are interchangeable.

A bin is then a vector of counts, and exact methods stay small with thousands of adapters.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from packer.errors import ValidationError
from packer.lengths import Lengths
from packer.workload import Workload

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MAX_CLASSES = 48
"""Classes that exact methods take on, where ranks and lengths alone don't need more."""


@dataclass(frozen=True, eq=False)
class Classes:
    """Adapters of a fleet in K classes.

    Parameters
    ----------
    workload
        The fleet.
    members
        Indices of the adapters of each class, highest rate first; int64 arrays.
    rates
        The rate that stands for the class, req/s, float64 (K,): its highest (conservative) or, in an
        optimistic grouping, its lowest.
    loss
        Σ |rate of the class − own rate| × tokens / Σ offered load: 0 if no class was rounded.
    """

    workload: Workload
    members: tuple[IntArray, ...]
    rates: FloatArray
    loss: float

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def demand(self) -> IntArray:
        """Adapters of each class, int64 (K,)."""
        return np.array([len(each) for each in self.members], dtype=np.int64)

    @cached_property
    def ranks(self) -> IntArray:
        """LoRA rank of each class, int64 (K,)."""
        return self.workload.ranks[self._first]

    @cached_property
    def loads(self) -> FloatArray:
        """Offered load of one adapter of each class, float64 (K,), tok/s."""
        tokens = self.workload.mean_input_tokens + self.workload.mean_output_tokens
        return self.rates * tokens[self._first]

    @cached_property
    def _first(self) -> IntArray:
        return np.array([each[0] for each in self.members], dtype=np.int64)

    @cached_property
    def fleet(self) -> Workload:
        """The fleet with the rates of the classes; the workload itself if nothing was rounded."""
        if self.loss == 0.0:
            return self.workload
        adapters = list(self.workload.adapters)
        for rate, each in zip(self.rates.tolist(), self.members, strict=True):
            for i in each.tolist():
                adapters[i] = replace(adapters[i], rate=rate)
        old = self.workload
        return Workload(
            adapters, old.input_tokens, old.output_tokens, old.length_correlation, old.arrivals, old.name
        )

    @cached_property
    def class_of(self) -> IntArray:
        """Class of each adapter, int64 (n,)."""
        found = np.empty(len(self.workload), dtype=np.int64)
        for k, each in enumerate(self.members):
            found[each] = k
        return found

    @cached_property
    def dominates(self) -> npt.NDArray[np.bool_]:
        """[i, j] is True if an adapter of class i is at least as heavy as one of class j; bool (K, K)."""
        tokens_in = self.workload.mean_input_tokens[self._first]
        tokens_out = self.workload.mean_output_tokens[self._first]
        heavy = np.ones((len(self), len(self)), dtype=bool)
        for column in (self.ranks, self.rates, tokens_in, tokens_out):
            heavy &= column[:, None] >= column[None, :]
        return heavy

    def counts(self, adapters: Iterable[int]) -> IntArray:
        """How many of each class, int64 (K,)."""
        return np.bincount(self.class_of[list(adapters)], minlength=len(self)).astype(np.int64)

    def representatives(self, counts: IntArray) -> tuple[int, ...]:
        """Indices of adapters that make such a bin: the first of each class.

        Raises
        ------
        ValidationError
            A count exceeds the demand of its class.
        """
        if np.any(counts > self.demand):
            raise ValidationError("Expected no count to exceed the adapters of its class.")
        parts = [each[:count] for each, count in zip(self.members, counts.tolist(), strict=True) if count]
        return tuple(np.concatenate(parts).tolist()) if parts else ()

    def assign(
        self, patterns: Sequence[IntArray], adapters: Iterable[int] | None = None
    ) -> list[tuple[int, ...]]:
        """Names for counts: disjoint sets of adapters, one for each vector of counts.

        Taken from `adapters` (default: all). Classes that hold several rates are dealt out from both ends in
        turn, so that no bin gets all the highest ones.

        Raises
        ------
        ValidationError
            The patterns hold more adapters of a class than there are.
        """
        members = self.members if adapters is None else self._members_of(adapters)
        bins: list[list[int]] = [[] for _ in patterns]
        for k, each in enumerate(members):
            dealt = each[_zigzag(len(each))].tolist()
            start = 0
            for chosen, counts in zip(bins, patterns, strict=True):
                stop = start + int(counts[k])
                chosen.extend(dealt[start:stop])
                start = stop
            if start > len(each):
                raise ValidationError("Expected the patterns to hold no more adapters than there are.")
        return [tuple(sorted(chosen)) for chosen in bins]

    def _members_of(self, adapters: Iterable[int]) -> list[IntArray]:
        chosen = np.zeros(len(self.workload), dtype=bool)
        chosen[list(adapters)] = True
        return [each[chosen[each]] for each in self.members]


def aggregate(workload: Workload, *, max_classes: int = MAX_CLASSES, optimistic: bool = False) -> Classes:
    """Group a fleet into at most about `max_classes` classes (more if ranks and lengths alone need more).

    Equal adapters share a class. If there are too many, neighbouring rates of equal rank and lengths are
    merged, always the pair that changes the offered load least; the class takes the highest of its rates,
    so that what is feasible for the classes is feasible for the adapters, or with `optimistic` the lowest,
    so that a bound for the classes is one for the adapters.
    """
    groups: dict[tuple[int, Lengths | None, Lengths | None], dict[float, list[int]]] = {}
    for i, adapter in enumerate(workload.adapters):
        alike = groups.setdefault((adapter.rank, adapter.input_tokens, adapter.output_tokens), {})
        alike.setdefault(adapter.rate, []).append(i)
    merged = _merge(workload, list(groups.values()), max_classes)
    members = tuple(np.array(each, dtype=np.int64) for each in merged)
    rates = np.array([workload.rates[each[-1 if optimistic else 0]] for each in members])
    tokens = workload.mean_input_tokens + workload.mean_output_tokens
    moved = sum(
        float(np.abs(workload.rates[each] - rate) @ tokens[each])
        for each, rate in zip(members, rates, strict=True)
    )
    return Classes(workload, members, rates, moved / workload.offered_tok_s)


def _merge(workload: Workload, groups: list[dict[float, list[int]]], limit: int) -> list[list[int]]:
    """Buckets of adapters, each with its highest rate first."""
    tokens = workload.mean_input_tokens + workload.mean_output_tokens
    buckets: list[list[int]] = []
    after: dict[int, int] = {}
    before: dict[int, int] = {}
    for group in groups:
        for position, rate in enumerate(sorted(group, reverse=True)):
            if position:
                after[len(buckets) - 1], before[len(buckets)] = len(buckets), len(buckets) - 1
            buckets.append(group[rate])
    alive = [True] * len(buckets)
    rates = workload.rates

    def cost(left: int) -> float:
        low = buckets[after[left]]
        return float((rates[buckets[left][0]] - rates[low[0]]) * tokens[low[0]] * len(low))

    heap = [(cost(left), left, after[left]) for left in after] if len(buckets) > limit else []
    heapq.heapify(heap)
    remaining = len(buckets)
    while heap and remaining > limit:
        expected, left, right = heapq.heappop(heap)
        if not alive[left] or after.get(left) != right or expected != cost(left):
            continue  # an older entry: one of the two has changed since
        buckets[left] = buckets[left] + buckets[right]
        alive[right] = False
        remaining -= 1
        follower = after.pop(right, None)
        if follower is None:
            del after[left]
        else:
            after[left], before[follower] = follower, left
            heapq.heappush(heap, (cost(left), left, follower))
        if left in before:
            heapq.heappush(heap, (cost(before[left]), before[left], left))
    return [bucket for bucket, kept in zip(buckets, alive, strict=True) if kept]


def _zigzag(n: int) -> IntArray:
    """First, last, second, second last, …"""
    order = np.empty(n, dtype=np.int64)
    half = (n + 1) // 2
    order[0::2] = np.arange(half)
    order[1::2] = np.arange(n - 1, half - 1, -1)
    return order
