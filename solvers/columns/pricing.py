"""Pricing: feasible bins of high value, where an adapter of class k is worth `weights[k]`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer.arrays import FloatArray, IntArray, distinct
from packer.solvers.columns.knapsack import Knapsacks
from packer.solvers.feasibility import Feasibility

_DEPTH = 12
_STARTS, _SLOW_STARTS = 24, 3
_SPREADS = (0.003, 0.01, 0.03, 0.1)


@dataclass
class _Search:
    """How many more adapters of one class each of m bins takes: galloping, then bisection, in lockstep."""

    low: IntArray
    high: IntArray
    step: IntArray
    seen_good: IntArray
    seen_bad: IntArray

    @classmethod
    def over(cls, top: IntArray) -> _Search:
        m = len(top)
        none = np.zeros(m, dtype=np.int64)
        return cls(none.copy(), top + 1, np.ones(m, dtype=np.int64), none.copy(), none.copy())

    def next(self, guess: IntArray) -> IntArray:
        """The next count to try, between what works and what does not."""
        gallop = np.where(self.seen_bad > 0, self.high - self.step, self.low + self.step)
        both = (self.seen_good > 0) & (self.seen_bad > 0)
        fresh = (self.seen_good == 0) & (self.seen_bad == 0)
        chosen = np.where(both, (self.low + self.high) // 2, np.where(fresh, guess, gallop))
        return np.clip(chosen, self.low + 1, np.maximum(self.low + 1, self.high - 1))

    def learn(self, rows: IntArray, count: IntArray, good: FloatArray) -> None:
        """Record which of these rows fit with `count` more adapters."""
        works = good.astype(bool)
        yes, no = rows[works], rows[~works]
        self.step[yes] = np.where(self.seen_good[yes] > 0, self.step[yes] * 2, 1)
        self.step[no] = np.where(self.seen_bad[no] > 0, self.step[no] * 2, 1)
        self.low[yes], self.high[no] = count[works], count[~works]
        self.seen_good[yes] += 1
        self.seen_bad[no] += 1


def fill(
    feasibility: Feasibility, bins: IntArray, orders: list[IntArray], limit: IntArray, sizes: FloatArray
) -> IntArray:
    """Fill m feasible bins (m, K), each with as many adapters as fit, class by class in its order. Bisection finds the
    longest prefix of the order that fits with all its adapters; after it, each of the next few classes is filled with
    as many as fit. No count exceeds `limit` (K,); `sizes` (K,) guess an adapter's share of a bin."""
    bins, begin = _longest_start(feasibility, bins, orders, limit)
    ends = [min(len(order), start + _DEPTH) for order, start in zip(orders, begin, strict=True)]
    for depth in range(_DEPTH):
        rows = [i for i in range(len(orders)) if begin[i] + depth < ends[i]]
        if not rows:
            break
        active = np.array(rows, dtype=np.int64)
        added = np.array([orders[i][begin[i] + depth] for i in rows], dtype=np.int64)
        bins[active, added] += _more(feasibility, bins[active], added, limit, sizes)
    return bins


def _longest_start(
    feasibility: Feasibility, bins: IntArray, orders: list[IntArray], limit: IntArray
) -> tuple[IntArray, list[int]]:
    """Fill each bin with the longest prefix of its order that is feasible at the limit; also returns its length."""
    low, high = [0] * len(orders), [len(order) + 1 for order in orders]

    def filled(i: int, length: int) -> IntArray:
        row: IntArray = bins[i].copy()
        taken = orders[i][:length]
        row[taken] = np.maximum(row[taken], limit[taken])
        return row

    while rows := [i for i in range(len(orders)) if high[i] - low[i] > 1]:
        middle = [(low[i] + high[i]) // 2 for i in rows]
        good = feasibility.feasible(np.array([filled(i, j) for i, j in zip(rows, middle, strict=True)]))
        for i, j, works in zip(rows, middle, good.tolist(), strict=True):
            low[i], high[i] = (j, high[i]) if works else (low[i], j)
    return np.array([filled(i, low[i]) for i in range(len(orders))]), low


def _more(feasibility: Feasibility, held: IntArray, added: IntArray, limit: IntArray, sizes: FloatArray) -> IntArray:
    """How many more adapters of class `added` (m,) each of the bins `held` (m, K) can take."""
    room = feasibility.problem.most_adapters - held.sum(axis=1)
    top = np.maximum(0, np.minimum(limit[added] - held[np.arange(len(held)), added], room))
    free = np.maximum(0.0, 1.0 - held @ sizes)
    guess = np.minimum(top, (free / np.maximum(sizes[added], 1e-12) + 1e-9).astype(np.int64))
    search = _Search.over(top)
    while (rows := np.flatnonzero(search.high - search.low > 1)).size:
        count = search.next(guess)[rows]
        tried = held[rows].copy()
        tried[np.arange(len(rows)), added[rows]] += count
        search.learn(rows, count, feasibility.feasible(tried).astype(np.float64))
    return search.low


def price(
    knapsacks: Knapsacks, weights: FloatArray, limit: IntArray, sizes: FloatArray, rng: np.random.Generator,
    bases: IntArray, n_starts: int = _STARTS,
) -> IntArray:  # fmt: skip
    """Feasible bins (m, K) of high value, best first; none of more than `limit` (K,) of a class.

    Two methods: knapsacks at weights with noise from the seeded `rng`; and bins filled in order of value per size, from
    empty or from one of the feasible `bases` with a part removed. The method that was better the last time gets
    `n_starts` starts, the other a few. The best bin may be missed: `packer.solvers.columns.proof` checks.
    """
    feasibility = knapsacks.feasibility
    useful = np.flatnonzero((weights > 1e-9) & (limit > 0))
    if not useful.size:
        return np.zeros((0, len(weights)), dtype=np.int64)
    few = min(n_starts, _SLOW_STARTS)
    n_starts = few if feasibility.problem.evaluator.simulates else n_starts
    ratio = np.log(weights[useful] / sizes[useful])
    starts, orders = [], []
    for i in range(few if knapsacks.lead else n_starts):
        noise = 0.0 if i == 0 else rng.normal(0.0, 0.02 * 4.0 ** (i % 4), len(useful))
        order = useful[np.argsort(-(ratio + noise), kind="stable")]
        base = np.zeros(len(weights), dtype=np.int64)
        if len(bases) and i % 2:
            base = np.minimum(bases[rng.integers(len(bases))], limit)
            taken_out = rng.random(len(base)) < rng.choice([0.2, 0.5])
            base = np.where(taken_out, base // rng.integers(2, 4), base)
        starts.append(base)
        orders.append(order)
    filled = fill(feasibility, np.array(starts), orders, limit, sizes)
    carried = float((np.concatenate([filled, bases]) @ feasibility.classes.loads).max())
    best = knapsacks.best(weights, limit, carried)
    spreads = np.array([_SPREADS[i % len(_SPREADS)] for i in range(n_starts if knapsacks.lead else few)])
    shaken = weights * np.exp(rng.normal(0.0, 1.0, (len(spreads), len(weights))) * spreads[:, None])
    packed = np.concatenate([best, knapsacks.alike(shaken, limit, [None] * len(spreads))])
    knapsacks.lead = float((packed @ weights).max(initial=0.0)) >= float((filled @ weights).max())
    found = distinct(np.concatenate([filled, packed]), axis=0)
    return found[np.argsort(-(found @ weights), kind="stable")]


def singles(feasibility: Feasibility, limit: IntArray) -> IntArray:
    """The fullest bin of each class alone (K, K); a class that no bin takes has a row of zeros."""
    loads = feasibility.classes.loads
    empty = np.zeros((len(loads), len(loads)), dtype=np.int64)
    orders = [np.array([k]) for k in range(len(loads))]
    return fill(feasibility, empty, orders, limit, loads / max(float(loads.max()), 8.0 * float(loads.mean())))
