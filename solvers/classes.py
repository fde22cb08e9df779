"""Classes of adapters: adapters of equal rank, rate, lengths and limits are interchangeable. A bin is then a vector of
counts by class, so exact methods stay small with thousands of adapters."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from types import MappingProxyType

import numpy as np

from packer.adapter import Adapter
from packer.arrays import BoolArray, FloatArray, IntArray, distinct
from packer.bin import Bin
from packer.errors import ValidationError
from packer.lengths import MAX_TOKENS, Lengths
from packer.memo import cached_property
from packer.sessions import Sessions
from packer.solvers.candidates import slot_ranks
from packer.workload import Workload

MAX_CLASSES = 48  # Most classes for exact methods, unless ranks, limits, priorities and acceptances need more.

FEW_BINS = 17_000  # Up to so many different bins, every bin is evaluated: 14 different adapters make 16,383 bins.

_CUTS = 8  # Places at which a cut is tried in each dimension.


@dataclass(frozen=True, eq=False)
class Classes:
    """Adapters of a fleet in K classes.

    `workload`: the fleet.
    `members`: indices of the adapters of each class, highest rate first; int64 arrays.
    `kinds`: the adapter that represents each class. It has the rank, limits and priority of the members, their mean
    rate, and mean lengths that keep their input and output tok/s; in an optimistic grouping, the lowest rate and
    lengths.
    `loss`: Σ |load of the class − own load| / Σ offered load: 0 if no class was rounded. Results for rounded classes
    are estimates for the fleet: mean loads add up to the members' loads, but a class is lighter than some members.
    """

    workload: Workload
    members: tuple[IntArray, ...]
    kinds: tuple[Adapter, ...]
    loss: float

    def __len__(self) -> int:
        return len(self.members)

    demand = cached_property(lambda self: np.array([len(each) for each in self.members], dtype=np.int64))
    """Adapters of each class, int64 (K,)."""

    @cached_property
    def exact(self) -> bool:
        """Whether an optimistic class is no heavier than any member: lengths of different shapes have no order."""
        return self.loss == 0.0 or all(_one_shape(self.workload, each) for each in self.members)

    ranks = cached_property(lambda self: np.array([kind.rank for kind in self.kinds], dtype=np.int64))
    """LoRA rank of each class, int64 (K,)."""
    rates = cached_property(lambda self: np.array([kind.rate for kind in self.kinds], dtype=np.float64))
    """Rate of one adapter of each class, float64 (K,), req/s."""

    @cached_property
    def _as_fleet(self) -> Workload:
        """One adapter of each class."""
        adapters = tuple(replace(kind, name=str(k)) for k, kind in enumerate(self.kinds))
        return replace(self.workload, adapters=adapters)

    tokens_in = cached_property(lambda self: np.asarray(self._as_fleet.mean_input_tokens))
    """Mean input tokens of a request of each class, float64 (K,)."""
    tokens_out = cached_property(lambda self: np.asarray(self._as_fleet.mean_output_tokens))
    """Mean output tokens of a request of each class, float64 (K,)."""
    loads = cached_property(lambda self: np.asarray(self._as_fleet.offered_tok_s_by_adapter))
    """Offered load of one adapter of each class, float64 (K,), tok/s."""

    @cached_property
    def features(self) -> FloatArray:
        """What takes room on a GPU, by an adapter of each class, float64 (K, D), all >= 0: weights that are sums of D
        prices are easier to find than K weights.

        Input tok/s, output tok/s, and 1; then 1 and the load for each slot rank above the smallest that the adapter
        reaches: large slots leave less KV cache, and steps of large ranks take longer.
        """
        slots = slot_ranks(self.ranks)
        columns = [self.rates * self.tokens_in, self.rates * self.tokens_out, np.ones(len(self))]
        for rank in distinct(slots)[1:].tolist():
            reaches = (slots >= rank).astype(np.float64)
            columns += [reaches, reaches * self.loads]
        return np.stack(columns, axis=1)

    @cached_property
    def chains(self) -> IntArray:
        """1 at [j, k] if class j is class k, or differs from it by a higher rate alone; int64 (K, K). `counts @ chains`
        counts, for each class, the adapters of a bin that are at least as heavy. If none of these numbers is smaller
        than that of another bin, the bin is at least as heavy, adapter by adapter."""
        alike = [_content(self.workload, replace(kind, rate=1.0)) for kind in self.kinds]
        first = np.array([alike.index(each) for each in alike])
        place = np.argsort(np.argsort(-self.rates, kind="stable"))
        return np.asarray(np.equal.outer(first, first) & np.less_equal.outer(place, place), dtype=np.int64)

    @cached_property
    def fleet(self) -> Workload:
        """The fleet with the rates and lengths of the classes; the workload itself if nothing was rounded."""
        if self.loss == 0.0:
            return self.workload
        adapters = list(self.workload.adapters)
        for kind, each in zip(self.kinds, self.members, strict=True):
            for i in each.tolist():
                adapters[i] = replace(kind, name=adapters[i].name)
        return replace(self.workload, adapters=tuple(adapters))

    @cached_property
    def class_of(self) -> IntArray:
        """Class of each adapter, int64 (n,)."""
        found = np.empty(len(self.workload), dtype=np.int64)
        for k, each in enumerate(self.members):
            found[each] = k
        return found

    def every_bin(self, most: int = FEW_BINS) -> IntArray | None:
        """Every non-zero vector of counts, int64 (m, K); None if there are more than `most`, or a class is rounded."""
        if self.loss > 0.0 or np.log1p(self.demand).sum() > np.log(most):
            return None
        return np.array(list(product(*(range(d + 1) for d in self.demand.tolist()))), dtype=np.int64)[1:]

    def rows(self, bins: Iterable[Bin]) -> IntArray:
        """The counts of the servers that hold whole adapters only, int64 (m, K); other servers are skipped."""
        held = [self.counts(each.adapters) for each in bins if not each.is_split]
        return np.array(held, dtype=np.int64).reshape(-1, len(self))

    def counts(self, adapters: Iterable[int]) -> IntArray:
        """Number of these adapters in each class, int64 (K,)."""
        return np.bincount(self.class_of[list(adapters)], minlength=len(self)).astype(np.int64)

    def representatives(self, counts: IntArray) -> tuple[int, ...]:
        """Indices of adapters that make a bin with these counts: the first members of each class. Raises
        `ValidationError`: a count exceeds the demand of its class."""
        if np.any(counts > self.demand):
            raise ValidationError("Expected no count to exceed the adapters of its class.")
        parts = [each[:count] for each, count in zip(self.members, counts.tolist(), strict=True) if count]
        return tuple(np.concatenate(parts).tolist()) if parts else ()

    def assign(
        self, patterns: Sequence[IntArray], home: Mapping[int, int] = MappingProxyType({})
    ) -> list[tuple[int, ...]]:
        """Disjoint sets of adapters, one for each vector of counts.

        `home`: the set to which an adapter belongs, as far as the counts allow. The others of each class are dealt out
        from its highest and lowest rates in turn, so that no bin gets all of the highest rates.

        Raises `ValidationError`: the patterns hold more adapters of a class than there are.
        """
        bins: list[list[int]] = [[] for _ in patterns]
        for k, each in enumerate(self.members):
            open_, rest = [int(counts[k]) for counts in patterns], []
            for i in each.tolist():
                s = home.get(i)
                if s is not None and open_[s] > 0:
                    bins[s].append(i)
                    open_[s] -= 1
                else:
                    rest.append(i)
            if sum(open_) > len(rest):
                raise ValidationError("Expected the patterns to hold no more adapters than there are.")
            dealt = iter([rest[p] for p in zigzag(len(rest)).tolist()])
            for chosen, count in zip(bins, open_, strict=True):
                chosen += islice(dealt, count)
        return [tuple(sorted(chosen)) for chosen in bins]


def aggregate(
    workload: Workload, *, max_classes: int = MAX_CLASSES, unmerged: int = 0, optimistic: bool = False
) -> Classes:
    """Group a fleet into at most about `max_classes` classes (more if `boxes` needs more).

    Equal adapters share a class. If that makes more than `max_classes` and `unmerged` classes, adapters of similar
    rates and lengths share a class, see `boxes`. Their mean represents it or, with `optimistic`, their lowest rate and
    lengths, so that a lower bound for the classes also holds for the fleet.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, adapter in enumerate(workload.adapters):
        alike.setdefault(_content(workload, adapter), []).append(i)
    merged = list(alike.values()) if len(alike) <= max(max_classes, unmerged) else boxes(workload, max_classes)
    members = tuple(np.array(each, dtype=np.int64) for each in merged)
    classes = Classes(workload, members, tuple(_kind(workload, each, optimistic) for each in members), 0.0)
    own = workload.offered_tok_s_by_adapter
    loads = zip(members, classes.loads.tolist(), strict=True)
    moved = sum(float(np.abs(own[each] - load).sum()) for each, load in loads)
    rounded = any(len(each) > 1 and not _alike(workload, each) for each in members)
    # A class of unequal adapters is rounded even if their loads happen to be equal.
    return replace(classes, loss=max(moved / workload.offered_tok_s, 1e-15) if rounded else 0.0)


def _content(workload: Workload, adapter: Adapter) -> tuple[object, ...]:
    """The attributes of an adapter that decide how much it takes of a server, and what it asks of it."""
    lengths = adapter.input_tokens or workload.input_tokens, adapter.output_tokens or workload.output_tokens
    own = adapter.shared_prefix_tokens, adapter.sessions, adapter.acceptance
    return (*_unmerged(workload, adapter), adapter.rate, *lengths, *own)


def _unmerged(workload: Workload, adapter: Adapter) -> tuple[object, ...]:
    """The attributes in which the adapters of a class never differ: a mean of limits or of priorities means nothing."""
    goal = workload.slo
    limits = goal.limits_of(adapter.slo_class) if goal.classes else None
    return adapter.rank, limits, adapter.priority


def _alike(workload: Workload, members: IntArray) -> bool:
    """Whether these adapters differ in nothing but their names."""
    return len({_content(workload, workload.adapters[i]) for i in members.tolist()}) == 1


def _kind(workload: Workload, members: IntArray, optimistic: bool) -> Adapter:
    """The adapter that represents a class: its first member, with the mean rate and lengths (optimistic: the lowest)
    and the mean acceptance of drafts (optimistic: the highest). Sessions of several kinds become independent requests.
    Prefix caching then saves nothing (optimistic: all but the last block of the prompt)."""
    first = workload.adapters[int(members[0])]
    if _alike(workload, members):
        return first
    rates = workload.rates[members]
    lengths: list[Lengths] = []
    for name, tokens in (("input_tokens", workload.mean_input_tokens), ("output_tokens", workload.mean_output_tokens)):
        mean_tokens = tokens[members]
        shortest = int(mean_tokens.argmin()) if optimistic else 0
        chosen = workload.adapters[int(members[shortest])]
        own: Lengths = getattr(chosen, name) or getattr(workload, name)
        # Prompts grow over a session's turns: independent requests have the mean over all turns.
        grows = name == "input_tokens" and workload.has_sessions
        if grows or (not optimistic and not np.all(mean_tokens == mean_tokens[0])):
            mean = float(mean_tokens.min() if optimistic else np.average(mean_tokens, weights=rates))
            own = own.scaled(mean if grows else own.mean * mean / float(mean_tokens[0]))
        lengths.append(own)
    rate = float(rates.min() if optimistic else rates.mean())
    shared = workload.shared_prefix_tokens[members]
    prefix = int(shared.max() if optimistic else shared.min())
    if workload.has_sessions:
        first = replace(first, sessions=Sessions(turns=1.0))
        prefix = MAX_TOKENS if optimistic else 0
    given = [workload.adapters[i].acceptance for i in members.tolist()]
    accepted = [share for share in given if share is not None]
    kept = (max(accepted) if optimistic else float(np.mean(accepted))) if accepted else None
    return replace(
        first, rate=rate, input_tokens=lengths[0], output_tokens=lengths[1], shared_prefix_tokens=prefix,
        acceptance=kept,
    )  # fmt: skip


def _one_shape(workload: Workload, members: IntArray) -> bool:
    """Whether the lengths of these adapters differ by their means alone, in families that the mean orders."""
    if workload.has_sessions:
        return False
    shapes = set()
    for adapter in (workload.adapters[i] for i in members.tolist()):
        own = (adapter.input_tokens or workload.input_tokens, adapter.output_tokens or workload.output_tokens)
        shapes.add(tuple((each.kind, each.cv, each.low, each.high, each.values) for each in own))
    return len(shapes) == 1


def zigzag(n: int) -> IntArray:
    """First, last, second, second last, …"""
    order = np.empty(n, dtype=np.int64)
    half = (n + 1) // 2
    order[0::2] = np.arange(half)
    order[1::2] = np.arange(n - 1, half - 1, -1)
    return order


def boxes(workload: Workload, limit: int) -> list[list[int]]:
    """At most `limit` groups of adapters of equal rank, limits and priority, and of similar acceptance of drafts (one
    for each combination of these if there are more).

    The mean load represents a group. The group with the largest rounding error is split next, in the dimension (rate,
    input or output tokens) and at the place where the error falls most. Each group is sorted by falling rate.
    """
    points = np.stack([workload.rates, workload.mean_input_tokens, workload.mean_output_tokens], axis=1)
    apart: dict[tuple[object, ...], list[int]] = {}
    for i in np.argsort(workload.ranks, kind="stable").tolist():
        adapter = workload.adapters[i]
        share = adapter.acceptance
        tenth = None if share is None else round(share, 1)
        apart.setdefault((*_unmerged(workload, adapter), tenth), []).append(i)
    heap: list[tuple[float, int, IntArray]] = []
    for k, own in enumerate(apart.values()):
        group = np.array(own, dtype=np.int64)
        # The unique second value keeps the heap from comparing groups.
        heap.append((-_rounding(points[group]), k, group))
    heapq.heapify(heap)
    made = len(heap)
    while len(heap) < limit and heap[0][0] < 0.0:
        _, _, group = heapq.heappop(heap)
        for part in _cut(points, group):
            heapq.heappush(heap, (-_rounding(points[part]), made, part))
            made += 1
    groups = [group.tolist() for _, _, group in sorted(heap, key=lambda item: item[1])]
    return [sorted(group, key=lambda i: (-workload.rates[i], i)) for group in groups]


def _rounding(points: FloatArray) -> float:
    """Σ |mean − own| of input and of output tok/s; 0 where all points are equal."""
    if (points == points[0]).all():
        return 0.0
    loads = points[:, :1] * points[:, 1:]
    return max(float(_roundings(loads, np.ones((1, len(loads)), dtype=np.bool_))[0]), 1e-12)


def _cut(points: FloatArray, group: IntArray) -> tuple[IntArray, IntArray]:
    """Split a group of unequal adapters into the two parts with the smallest total rounding error."""
    own = points[group]
    loads = own[:, :1] * own[:, 1:]
    best, error = None, np.inf
    for column in own.T:
        values = distinct(column)
        if len(values) > 1:
            places = np.linspace(1, len(values) - 1, min(_CUTS, len(values) - 1)).astype(np.int64)
            below = column < values[places][:, None]
            errors = _roundings(loads, below) + _roundings(loads, ~below)
            if errors.min() < error:
                best, error = below[errors.argmin()], errors.min()
    assert best is not None, "a group of unequal adapters can be cut"
    return group[best], group[~best]


def _roundings(loads: FloatArray, parts: BoolArray) -> FloatArray:
    """Σ |mean − own| of each part of a group, bool (cuts, n), none empty; `loads`: input and output tok/s, (n, 2)."""
    inside = parts[:, :, None]
    means = (loads * inside).sum(axis=1, keepdims=True) / parts.sum(axis=1)[:, None, None]
    errors: FloatArray = (np.abs(loads - means) * inside).sum(axis=(1, 2))
    return errors
