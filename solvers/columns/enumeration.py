"""Whether a plan of n bins exists: integer programs over every bin that such a plan may contain.

If no feasible bin weighs more than 1 and the fleet weighs V, no bin of a plan of n bins weighs less than V - (n - 1).
If n is V rounded up, few bins are left: an integer program over them is exact (R. Baldacci, N. Christofides, A.
Mingozzi: An exact algorithm for the vehicle routing problem based on the set partitioning formulation, 2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.solvers.columns.master import solve_integer
from packer.solvers.columns.proof import certify, extended
from packer.solvers.feasibility import Feasibility

TOLERANCE = 1e-6  # Bins that exceed 1 by less than this are not searched for; the bounds allow for them.
_BATCH, _NOTHING = 256, 1e-9


@dataclass(frozen=True)
class Cover:
    """The cheapest bins that hold every adapter: counts, int64 (m, K), the kind of each, and whether it is proven."""

    rows: IntArray
    kinds: IntArray
    proven: bool


def cheapest_cover(kinds: Sequence[Feasibility], prices: FloatArray, *, most: int, time_limit_s: float) -> Cover | None:
    """The cheapest cover by bins on these kinds (S,) of server, from every possible bin of each kind. None if there are
    more than `most` bins, or nothing was found. Does not rely on dominance. Raises `OutOfTime`."""
    classes = kinds[0].classes
    rows = classes.every_bin(most // len(kinds))
    if rows is None:
        return None
    held = [rows[kind.evaluate(rows)] for kind in kinds]
    owner = np.repeat(np.arange(len(kinds)), [len(each) for each in held])
    bins = np.concatenate(held)
    use, proven = solve_integer(
        bins, classes.demand, time_limit_s=time_limit_s, prices=prices[owner], exact_cover=True,
        work=kinds[0].problem.evaluator.work,
    )  # fmt: skip
    return None if use is None else Cover(np.repeat(bins, use, axis=0), np.repeat(owner, use), proven)


@dataclass(frozen=True)
class Packed:
    """The result of a search for a plan with a given number of bins.

    `bins`: a plan, int64 (m, K), that covers every class of non-zero weight; None if none was found.
    `excluded`: it is certain, up to dominance, that no plan exists. `heavier`: a feasible bin of a weight above 1,
    int64 (K,), so that the weights must be scaled first; None if none was found.
    """

    bins: IntArray | None = None
    excluded: bool = False
    heavier: IntArray | None = None


def packed(feasibility: Feasibility, weights: FloatArray, n_bins: int, *, budget: int, time_limit_s: float) -> Packed:
    """Find a plan of at most `n_bins` bins, or show that there is none, if at most `budget` bins must be evaluated.
    `weights` (K,): weight of an adapter of each class. Classes of weight 0 are left out: if the other classes need more
    bins, the fleet does. Raises `OutOfTime`."""
    weights = np.where(weights > _NOTHING, weights, 0.0)
    demand, none = feasibility.classes.demand, np.zeros((0, len(weights)), dtype=np.int64)
    beyond = certify(feasibility, weights, above=1.0, slack=TOLERANCE, budget=budget, known=none)
    if not beyond.exhaustive:
        return Packed(heavier=beyond.counterexample)
    # No bin weighs more than 1, so in a plan of `n_bins` bins each one weighs at least `low`.
    low = float(weights @ demand) - (n_bins - 1) * (1.0 + TOLERANCE)
    rows = every_bin_within(weights, demand, low - TOLERANCE, 1.0 + TOLERANCE, budget)
    if rows is None:
        return Packed()
    parts = [rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH)]
    feasible = np.concatenate([none, *(part[feasibility.feasible(part)] for part in parts)])
    useful = weights > 0.0
    use, proven = solve_integer(
        feasible[:, useful], demand[useful], time_limit_s=time_limit_s, most_bins=n_bins,
        work=feasibility.problem.evaluator.work,
    )  # fmt: skip
    return Packed(None if use is None else np.repeat(feasible, use, axis=0), proven and use is None)


def every_bin_within(weights: FloatArray, limit: IntArray, low: float, high: float, most: int) -> IntArray | None:
    """Every vector of at most `limit` (K,) that weighs `low` to `high`, heaviest first, int64 (m, K); None if > `most`.
    Branch and bound over classes, the heaviest first: a branch ends if it can't reach `low`, or if the lightest class
    does not fit. Counts of classes without weight are 0."""
    useful = np.flatnonzero((weights > 0.0) & (limit > 0))
    useful = useful[np.argsort(-weights[useful], kind="stable")]
    worth, top = weights[useful], limit[useful]
    rest = np.concatenate([np.cumsum((worth * top)[::-1])[::-1][1:], [0.0]])
    partial, value = np.zeros((1, 0), dtype=np.int32), np.zeros(1)
    complete: list[IntArray] = []
    found = 0
    for k in range(len(useful)):
        fitting = np.minimum(top[k], np.floor((high - value) / worth[k] + 1e-12).astype(np.int64))
        longer = extended(fitting, len(useful))
        if longer is None:
            return None
        owner, count = longer
        value = value[owner] + count * worth[k]
        # The last class is the lightest: a vector into which it does not fit is complete.
        open_ = value + worth[-1] <= high if k + 1 < len(useful) else np.zeros(len(value), dtype=bool)
        alive = open_ & (value + rest[k] >= low)
        whole = ~open_ & (value >= low)
        rows = np.zeros((int(whole.sum()), len(weights)), dtype=np.int64)
        rows[:, useful[:k]], rows[:, useful[k]] = partial[owner[whole]], count[whole]
        complete.append(rows)
        found += len(rows)
        if found > most:
            return None
        partial = np.column_stack([partial[owner[alive]], count[alive].astype(np.int32)])
        value = value[alive]
    every = np.concatenate([np.zeros((0, len(weights)), dtype=np.int64), *complete])
    return every[np.argsort(-(every @ weights), kind="stable")]
