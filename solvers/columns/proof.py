"""Search for a feasible bin beyond a value: exhaustive up to dominance if there are not too many candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer.arrays import FloatArray, IntArray, distinct
from packer.solvers.base import MAX_ADAPTERS_PER_GPU
from packer.solvers.feasibility import Feasibility

_WIDTH = 1_000_000  # Most partial vectors that the enumeration keeps at once.
_ENTRIES = 16_000_000  # Most entries of these vectors, 64 MB: a few such arrays exist at once.
_BEST = 4  # Number of known bins from which bins beyond the value are made, if these are too many to enumerate.


@dataclass(frozen=True)
class Certificate:
    """The result of a search for feasible bins beyond a value.

    `exhaustive`: every bin beyond the value is at least as heavy as a bin known to be infeasible.
    `evaluated`: number of bins evaluated.
    `counterexample`: a feasible bin beyond the value, int64 (K,), or None.
    """

    exhaustive: bool
    evaluated: int
    counterexample: IntArray | None = None


def certify(
    feasibility: Feasibility, weights: FloatArray, *, above: float, slack: float, budget: int, known: IntArray
) -> Certificate:
    """Search for feasible bins c, within the demand, with weights · c > `above` + `slack`.

    By dominance it is enough to evaluate the lightest such bins, in the order of `Classes.chains`. If there are more
    than `budget`, counts are rounded down to multiples of a step for each class. The steps are chosen so that rounding
    loses at most `slack`: each bin then contains a rounded bin of value > `above`. If there are too many rounded bins
    as well, bins beyond the value are made from the best of the `known` bins (m, K).
    """
    limit = feasibility.classes.demand
    useful = np.flatnonzero((weights > 1e-9) & (limit > 0))
    useful = useful[np.argsort(-weights[useful], kind="stable")]
    worth, most, chains = weights[useful], limit[useful], feasibility.classes.chains[np.ix_(useful, useful)]
    minimal = _minimal(worth, most, np.ones_like(most), above + slack, budget, _lighter(chains))
    if minimal is None:
        none = np.full(len(useful), -1)
        minimal = _minimal(worth, most, _steps(worth, slack), above, budget, none)
    exhaustive = minimal is not None
    if minimal is None:
        minimal = _beyond(known[:, useful], worth, most, above)
    rows = np.zeros((len(minimal), len(weights)), dtype=np.int64)
    rows[:, useful] = minimal
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        good = np.flatnonzero(feasibility.feasible(part))
        if good.size:
            best = good[np.argmax(part[good] @ weights)]
            return Certificate(False, start + len(part), part[best])
    return Certificate(exhaustive, len(rows))


def _lighter(chains: IntArray) -> IntArray:
    """For each class, the next lighter class of its chain, int64 (K,); -1: none."""
    depth = chains.sum(axis=0)
    below = np.where(chains & (depth[None, :] > depth[:, None]), depth[None, :], len(depth) + 1)
    return np.where(below.min(axis=1, initial=len(depth) + 1) > len(depth), -1, below.argmin(axis=1))


def _steps(weights: FloatArray, slack: float) -> IntArray:
    """Steps of counts with Σ weight × (step − 1) ≤ slack, coarsest for classes of adapters worth little."""
    steps = np.ones(len(weights), dtype=np.int64)
    coarse = np.ones(len(weights), dtype=bool)
    while coarse.any():
        # With steps of `share` / weight, Σ weight × (step − 1) of the coarse classes is just `slack`.
        share = (slack + float(weights[coarse].sum())) / int(coarse.sum())
        fine = coarse & (weights > share)
        if not fine.any():
            steps[coarse] = np.maximum(1, np.floor(share / weights[coarse] + 1e-12)).astype(np.int64)
            break
        coarse &= ~fine
    return steps


def _minimal(
    weights: FloatArray, limit: IntArray, steps: IntArray, above: float, budget: int, lighter: IntArray
) -> IntArray | None:
    """The lightest vectors of multiples of the steps with value > `above`, see `_lightest`; None if > `budget`. Class
    by class, most valuable first: a partial vector either stays at most `above` and is continued, or takes the first
    multiple beyond it and is complete."""
    top = limit // steps
    rest = np.concatenate([np.cumsum((weights * steps * top)[::-1])[::-1][1:], [0.0]])
    partial, value, held = np.zeros((1, 0), dtype=np.int32), np.zeros(1), np.zeros(1, dtype=np.int64)
    complete: list[IntArray] = []
    found = 0
    for k in range(len(weights)):
        unit = float(weights[k] * steps[k])
        fitting = np.minimum(top[k], np.floor((above - value) / unit + 1e-12).astype(np.int64))
        beyond = value + (fitting + 1) * unit
        crossing = (fitting < top[k]) & (held + (fitting + 1) * steps[k] <= MAX_ADAPTERS_PER_GPU)
        if lighter[k] > k and limit[lighter[k]] > 0:  # none of them is held yet
            # A vector is minimal only if it is not beyond `above` with a lighter adapter in place of one.
            crossing &= beyond - (weights[k] - weights[lighter[k]]) <= above + 1e-12
        rows = np.zeros((int(crossing.sum()), len(weights)), dtype=np.int64)
        rows[:, :k], rows[:, k] = partial[crossing], (fitting[crossing] + 1) * steps[k]
        complete.append(_lightest(rows, weights, limit, steps, above, lighter))
        found += len(complete[-1])
        longer = None if found > budget else extended(fitting, len(weights))
        if longer is None:
            return None
        owner, count = longer[0], longer[1] * steps[k]
        value, held = value[owner] + count * weights[k], held[owner] + count
        # Drop vectors that even all adapters of the remaining classes do not bring beyond `above`.
        alive = (value + rest[k] > above) & (held < MAX_ADAPTERS_PER_GPU)
        partial = np.column_stack([partial[owner[alive]], count[alive].astype(np.int32)])
        value, held = value[alive], held[alive]
    return np.concatenate(complete)


def extended(most: IntArray, n_classes: int) -> tuple[IntArray, IntArray] | None:
    """Index of each partial vector (p,) and counts 0 to `most` (p,) that extend it; None: too many."""
    each = most + 1
    width = int(each.sum())
    if width > min(_WIDTH, _ENTRIES // n_classes):
        return None
    owner = np.repeat(np.arange(len(most)), each)
    return owner, np.arange(width) - np.repeat(np.cumsum(each) - each, each)


def _lightest(
    rows: IntArray, weights: FloatArray, limit: IntArray, steps: IntArray, above: float, lighter: IntArray
) -> IntArray:
    """Rows whose value falls to at most `above` with one step less of any class that they hold, or with any adapter
    replaced by a `lighter` one."""
    least = np.where(rows > 0, weights * steps, np.inf).min(axis=1, initial=np.inf)
    for k in np.flatnonzero(lighter >= 0).tolist():
        room = (rows[:, k] > 0) & (rows[:, lighter[k]] < limit[lighter[k]])
        least[room] = np.minimum(least[room], weights[k] - weights[lighter[k]])
    kept: IntArray = rows[rows @ weights - least <= above + 1e-12]
    return kept


def _beyond(known: IntArray, weights: FloatArray, limit: IntArray, above: float) -> IntArray:
    """The best bins, whole or without half of a class, with as many adapters of one class as exceed `above`."""
    rows = [np.zeros((0, len(weights)), dtype=np.int64)]
    one = np.eye(len(weights), dtype=np.int64)
    for best in known[np.argsort(-(known @ weights), kind="stable")[:_BEST]]:
        starts = np.concatenate([best[None, :], best - one * ((best + 1) // 2)])
        lacking = np.maximum(0.0, above - starts @ weights)
        added = (lacking[:, None] / weights[None, :] + 1e-9).astype(np.int64) + 1
        start, k = np.nonzero(starts + added <= limit)
        rows.append(starts[start] + one[k] * added[start, k][:, None])
    return distinct(np.concatenate(rows), axis=0)
