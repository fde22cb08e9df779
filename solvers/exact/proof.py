"""Is there a feasible bin of higher value? A search that is exhaustive up to dominance where it can be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer.solvers.base import MAX_ADAPTERS_PER_GPU
from packer.solvers.classes import FloatArray, IntArray
from packer.solvers.feasibility import Feasibility

_WIDTH = 400_000
"""Partial vectors kept at once by the enumeration, …"""

_ENTRIES = 8_000_000
"""… and entries of those vectors, 64 MB: a few such arrays exist at once."""


@dataclass(frozen=True)
class Certificate:
    """What a search beyond a value found.

    `exhaustive`: every bin beyond the value holds one that is known to be infeasible. `evaluated`: bins looked at.
    `counterexample`: a feasible bin beyond, int64 (K,), or None.
    """

    exhaustive: bool
    evaluated: int
    counterexample: IntArray | None = None


def certify(
    feasibility: Feasibility,
    weights: FloatArray,
    limit: IntArray,
    *,
    above: float,
    slack: float,
    budget: int,
    rng: np.random.Generator,
) -> Certificate:
    """Look for feasible bins c ≤ `limit` with weights · c > `above` + `slack`.

    Counts are rounded down to multiples of a step for each class, the steps chosen such that rounding loses
    at most `slack`: each such bin then holds a rounded one of value > `above`, and by dominance it is
    enough to evaluate the smallest of those. If there are more than `budget`, a seeded sample of them is
    evaluated instead.
    """
    useful = np.flatnonzero((weights > 1e-9) & (limit > 0))
    useful = useful[np.argsort(-weights[useful], kind="stable")]
    units = _steps(weights[useful], slack)
    minimal = _minimal(weights[useful], limit[useful], units, above, budget)
    exhaustive = minimal is not None
    if minimal is None:
        minimal = _sample(weights[useful], limit[useful], above, min(budget, 400), rng)
    rows = np.zeros((len(minimal), len(weights)), dtype=np.int64)
    rows[:, useful] = minimal
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        good = np.flatnonzero(feasibility.feasible(part))
        if good.size:
            best = good[np.argmax(part[good] @ weights)]
            return Certificate(False, start + len(part), part[best])
    return Certificate(exhaustive, len(rows))


def _steps(weights: FloatArray, slack: float) -> IntArray:
    """Steps of the counts with Σ weight × (step − 1) ≤ slack, the coarsest where adapters are worth
    little."""
    steps = np.ones(len(weights), dtype=np.int64)
    coarse = np.ones(len(weights), dtype=bool)
    while coarse.any():
        share = (slack + float(weights[coarse].sum())) / int(coarse.sum())
        fine = coarse & (weights > share)
        if not fine.any():
            steps[coarse] = np.maximum(1, np.floor(share / weights[coarse] + 1e-12)).astype(np.int64)
            break
        coarse &= ~fine
    return steps


def _minimal(
    weights: FloatArray, limit: IntArray, steps: IntArray, above: float, budget: int
) -> IntArray | None:
    """The vectors of multiples of the steps with value > `above` that no such vector lies under; None if >
    budget.

    Class by class, heaviest first: a partial vector either stays at most `above` and is continued, or takes
    the first multiple beyond it and is complete.
    """
    top = limit // steps
    rest = np.concatenate([np.cumsum((weights * steps * top)[::-1])[::-1][1:], [0.0]])
    partial = np.zeros((1, len(weights)), dtype=np.int64)
    complete: list[IntArray] = []
    found = 0
    for k in range(len(weights)):
        value = partial @ weights
        unit = float(weights[k] * steps[k])
        fitting = np.minimum(top[k], np.floor((above - value) / unit + 1e-12).astype(np.int64))
        crossing = partial[fitting < top[k]].copy()
        crossing[:, k] = (fitting[fitting < top[k]] + 1) * steps[k]
        crossing = crossing[crossing.sum(axis=1) <= MAX_ADAPTERS_PER_GPU]
        complete.append(_smallest(crossing, weights, steps, above))
        found += len(complete[-1])
        width = int((fitting + 1).sum())
        if found > budget or width > min(_WIDTH, _ENTRIES // len(weights)):
            return None
        repeated = np.repeat(partial, fitting + 1, axis=0)
        start = np.repeat(np.cumsum(fitting + 1) - (fitting + 1), fitting + 1)
        repeated[:, k] = (np.arange(width) - start) * steps[k]
        alive = repeated @ weights + rest[k] > above
        partial = repeated[alive & (repeated.sum(axis=1) < MAX_ADAPTERS_PER_GPU)]
    return np.concatenate(complete)


def _smallest(rows: IntArray, weights: FloatArray, steps: IntArray, above: float) -> IntArray:
    """Rows that fall to at most `above` with one step less of any class that they hold."""
    value = rows @ weights
    least = np.where(rows > 0, weights * steps, np.inf).min(axis=1, initial=np.inf)
    kept: IntArray = rows[value - least <= above + 1e-12]
    return kept


def _sample(weights: FloatArray, limit: IntArray, above: float, n: int, rng: np.random.Generator) -> IntArray:
    """Random vectors just beyond the value: random directions, cut to the smallest count that crosses it."""
    rows: list[IntArray] = []
    for _ in range(n):
        share = rng.dirichlet(np.full(len(weights), rng.choice([0.2, 1.0])))
        row = np.minimum(limit, (share * above / weights).astype(np.int64))
        order = rng.permutation(len(weights))
        for k in order.tolist():
            lacking = above - float(row @ weights)
            if lacking < 0.0:
                break
            row[k] = min(limit[k], row[k] + int(lacking / weights[k] + 1e-9) + 1)
        if row @ weights > above and row.sum() <= MAX_ADAPTERS_PER_GPU:
            rows.append(row)
    return np.array(rows, dtype=np.int64).reshape(-1, len(weights))
