"""Spread, improved: better slots, then adapters moved and swapped while the objective improves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from packer.arrays import FloatArray, distinct
from packer.bin import Bin
from packer.evaluation import FIGURES, Evaluations
from packer.solvers.base import MAX_ADAPTERS_PER_GPU, Problem, Solution
from packer.solvers.baselines.dlora import DLora
from packer.solvers.baselines.spread import spread_parts
from packer.solvers.candidates import nearest
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.balance import even_parts
from packer.solvers.headroom import MOST_GPUS
from packer.solvers.slots import SlotSearch
from packer.solvers.support import gpus_to_use, one_type

_ROUNDS = 60
_TARGETS = 3
_TRIES = 4


@dataclass(frozen=True)
class _Bins:
    """Bins with their evaluations and requests per second; `rank` compares states: smaller is better."""

    bins: tuple[Bin, ...]
    found: Evaluations
    rates: FloatArray
    rank: tuple[float, ...]


class SpreadRefined:
    """Local search over a fixed number of GPUs.

    Starts from the best of `spread`, `dlora` and an even split that keeps ranks together, each with the slots that
    serve it best. Then the worst GPU gives an adapter to another one, or swaps one, as long as the objective improves.
    """

    name = "spread-refined"
    spreads = True
    supports = staticmethod(one_type)

    def solve(self, problem: Problem) -> Solution:
        """One bin per GPU."""
        search = _Refinement(problem)
        return Solution(_simulated_slots(problem, search.refine(search.start()).bins))


def _simulated_slots(problem: Problem, bins: tuple[Bin, ...]) -> tuple[Bin, ...]:
    """After a search led by trees, choose the slots by simulation, and keep them if the objective improves: trees don't
    rank the waits of servers with barely enough slots. Plans of more than `MOST_GPUS` bins stay as they are."""
    twin = problem.evaluator.twin_of(problem.profile)
    if twin is None or not problem.evaluator.confirms or len(bins) > MOST_GPUS:
        return bins
    by_twin = Evaluator(twin, problem.objective).changed(margins=problem.evaluator.margins)
    search = _Refinement(replace(problem, evaluator=by_twin))
    slotted = tuple(item if problem.out_of_time() else search.slots.best(item) for item in bins)
    return slotted if problem.out_of_time() else min(bins, slotted, key=lambda each: search.state(each).rank)


class _Refinement:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.slots = problem, SlotSearch(problem)
        fleet = problem.workload
        self.kinds = list(zip(fleet.ranks.tolist(), fleet.offered_tok_s_by_adapter.tolist(), strict=True))
        self.single = lru_cache(512)(self._single)

    def start(self) -> _Bins:
        """The best starting plan, with the best slots; the first one once the time is over."""
        n, states = gpus_to_use(self.problem), list[_Bins]()
        for parts in (spread_parts(self.problem), [p for p in even_parts(self.problem, n) if p]):
            if not states or not self.problem.out_of_time():
                states.append(self._with_slots([self.slots.make(p, len(p)) for p in parts]))
        if not self.problem.out_of_time():
            other = DLora().solve(self.problem)
            if not other.unplaced and all(len(b.adapters) <= MAX_ADAPTERS_PER_GPU for b in other.bins):
                states.append(self._with_slots(other.bins))
        return min(states, key=lambda state: (-len(state.bins), state.rank))

    def _with_slots(self, bins: Sequence[Bin]) -> _Bins:
        """The bins with the best slots; once the time is over, with about the slots of the bin before."""
        hint: int | None = None
        chosen = []
        for bin_ in bins:
            if hint is not None and self.problem.out_of_time():
                chosen.append(bin_.with_slots(nearest(bin_, hint)[0]))
            else:
                found = self.slots.feasible(bin_.adapters, bin_.profile, bin_.shares, hint)
                chosen.append(self.slots.best(found) if found is not None else bin_)
            hint = chosen[-1].max_loras
        return self.state(chosen)

    def state(self, bins: Sequence[Bin]) -> _Bins:
        """Bins with their evaluations."""
        found, holds = self.slots.evaluate(bins)
        key = self.problem.objective.key(self.problem.workload, bins, found)
        return self._rated(tuple(bins), found, self._rates(bins), _rounded((int((~holds).sum()), *key)))

    def _rates(self, bins: Sequence[Bin]) -> FloatArray:
        return np.array([bin_.rates(self.problem.workload).sum() for bin_ in bins])

    def _rated(self, bins: tuple[Bin, ...], found: Evaluations, rates: FloatArray, key: tuple[float, ...]) -> _Bins:
        # Objectives that count GPUs don't distinguish states: then the time of a request decides.
        ttft_ms, itl_ms = (
            np.average(np.where(found.idle, 0.0, np.where(np.isnan(ms), np.inf, ms)), weights=rates)
            for ms in (found.mean_ttft_ms, found.mean_itl_ms)
        )
        return _Bins(bins, found, rates, (*key, *_rounded((ttft_ms + 100.0 * itl_ms,))))

    def refine(self, state: _Bins) -> _Bins:
        """Take improving neighbours until there is none, for at most `_ROUNDS` rounds or until the time is up."""
        for done in range(_ROUNDS):
            self.problem.progress("refining", done, _ROUNDS)
            better = None if self.problem.out_of_time() else self._improve(state)
            if better is None:
                break
            state = better
        return state

    def _improve(self, state: _Bins) -> _Bins | None:
        """The best neighbour that improves the state, among moves from the worst GPU and swaps with it. If the
        objective does not balance loads (`balances`), also among moves from the best GPU and swaps with it."""
        order = _worst_last(state.found)
        pairs = [(order[-1], target) for target in order[:-1][:_TARGETS]]
        if not self.problem.objective.balances:
            pairs += [(order[0], target) for target in order[1:][-_TARGETS:]]
        options = [
            option
            for source, target in pairs
            for option in (*self._moves(state, source, target), *self._swaps(state, source, target))
        ]
        if not options:
            return None
        found, holds = self.slots.evaluate([bin_ for _, _, pair in options for bin_ in pair])
        place, after = np.array([option[:2] for option in options]), 2 * np.arange(len(options))[:, None] + [0, 1]
        bad = ~self.problem.objective.holds(state.found)
        now_bad = bad.sum() + (~holds[after]).sum(axis=1) - bad[place].sum(axis=1)
        # The rank begins with the number of refused servers, which must not grow.
        kept = np.flatnonzero(now_bad <= state.rank[0])
        if not kept.size:
            return None
        place, after, exchanged = place[kept], after[kept], [options[k][2] for k in kept.tolist()]
        plans, columns = [], {}
        for (one, other), pair in zip(place.tolist(), exchanged, strict=True):
            bins = list(state.bins)
            bins[one], bins[other] = pair
            plans.append(tuple(bins))
        for name in FIGURES:
            columns[name] = np.tile(getattr(state.found, name), (len(kept), 1))
            columns[name][np.arange(len(kept))[:, None], place] = getattr(found, name)[after]
        keys = self.problem.objective.keys(self.problem.workload, plans, Evaluations(**columns))
        neighbours = []
        for k, (refused, key) in enumerate(zip(now_bad[kept].tolist(), keys, strict=True)):
            rank = _rounded((refused, *key))
            if rank <= state.rank[:-1]:
                rates = state.rates.copy()
                rates[place[k]] = self._rates(exchanged[k])
                rows = Evaluations(**{name: column[k] for name, column in columns.items()})
                rated = self._rated(plans[k], rows, rates, rank)
                neighbours += [rated] if rated.rank < state.rank else []
        return min(neighbours, key=lambda other: other.rank, default=None)

    def _single(self, adapters: tuple[int, ...], shares: tuple[float, ...]) -> list[int]:
        """Positions of whole adapters of a bin, one for each rank and load, at most `_TRIES`."""
        seen: dict[tuple[int, float], int] = {}
        for position, (i, share) in enumerate(zip(adapters, shares, strict=True)):
            if share == 1.0:
                seen.setdefault(self.kinds[i], position)
        kinds = sorted(seen, reverse=True)
        if not kinds:
            return []
        picked = distinct(np.linspace(0, len(kinds) - 1, _TRIES).round().astype(int))
        return [seen[kinds[k]] for k in picked.tolist()]

    def _moves(self, state: _Bins, worst: int, target: int) -> list[tuple[int, int, tuple[Bin, Bin]]]:
        source, sink = state.bins[worst], state.bins[target]
        if len(source.adapters) < 2 or len(sink.adapters) >= MAX_ADAPTERS_PER_GPU:
            return []
        return [
            (worst, target, (self._without(source, p), self._plus(sink, source.adapters[p])))
            for p in self.single(source.adapters, source.shares)
            if source.adapters[p] not in sink.adapters
        ]

    def _swaps(self, state: _Bins, worst: int, target: int) -> list[tuple[int, int, tuple[Bin, Bin]]]:
        source, sink = state.bins[worst], state.bins[target]
        if len(source.adapters) == len(sink.adapters) == 1:  # the same bins, in another order
            return []
        options = []
        for p in self.single(source.adapters, source.shares):
            for q in self.single(sink.adapters, sink.shares):
                i, j = source.adapters[p], sink.adapters[q]
                (rank, load), (other, less) = self.kinds[i], self.kinds[j]
                # Against one of the same rank, only a heavier adapter of the source relieves it.
                heavier = load > less or rank != other
                if heavier and i not in sink.adapters and j not in source.adapters:
                    pair = self._plus(source, j, without=p), self._plus(sink, i, without=q)
                    options.append((worst, target, pair))
        return options

    def _without(self, bin_: Bin, position: int) -> Bin:
        adapters = bin_.adapters[:position] + bin_.adapters[position + 1 :]
        shares = bin_.shares[:position] + bin_.shares[position + 1 :]
        return self.slots.make(adapters, min(bin_.max_loras, len(adapters)), bin_.profile, shares)

    def _plus(self, bin_: Bin, adapter: int, *, without: int | None = None) -> Bin:
        """The bin with one more adapter, or with that adapter instead of the one at position `without`."""
        end = len(bin_.adapters) if without is None else without
        adapters = (*bin_.adapters[:end], *bin_.adapters[end + 1 :], adapter)
        shares = (*bin_.shares[:end], *bin_.shares[end + 1 :], 1.0) if bin_.is_split else ()
        # A server with a slot for each adapter gets one for the new adapter, too.
        every = bin_.max_loras == len(adapters) - 1
        return self.slots.make(adapters, len(adapters) if every else bin_.max_loras, bin_.profile, shares)


def _rounded(rank: Sequence[float]) -> tuple[float, ...]:
    """The numbers to twelve digits: which of two equal plans is better must not depend on how a processor adds."""
    return tuple(float(f"{each:.12g}") for each in rank)


def _worst_last(found: Evaluations) -> list[int]:
    """Indices of the servers, worst last: feasible servers by latency, then the others by falling share served."""
    latency_ms = np.nan_to_num(found.mean_ttft_ms + 100.0 * found.mean_itl_ms, nan=np.inf)
    latency_ms[found.idle] = 0.0
    missing = np.where(found.feasible, -2.0, -found.total_token_throughput / np.maximum(found.offered_tok_s, 1e-9))
    order: list[int] = np.lexsort((latency_ms, missing)).tolist()
    return order
