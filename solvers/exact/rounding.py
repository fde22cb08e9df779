"""From patterns to a plan: whole numbers, names, and a direct check of every bin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.bin import Bin
from packer.solvers.base import Problem
from packer.solvers.classes import Classes, FloatArray, IntArray
from packer.solvers.exact.pricing import price
from packer.solvers.exact.relaxation import Relaxation
from packer.solvers.feasibility import real_bins

_NOISE = 0.05


def trimmed(patterns: Sequence[IntArray], demand: IntArray) -> list[IntArray]:
    """The same bins with what is covered more than once taken out, from the fullest bins first."""
    rows = np.array(patterns, dtype=np.int64)
    over = rows.sum(axis=0) - demand
    for k in np.flatnonzero(over > 0).tolist():
        while over[k] > 0:
            fullest = int(np.argmax(np.where(rows[:, k] > 0, rows.sum(axis=1), -1)))
            take = min(int(over[k]), max(1, int(rows[fullest, k]) // 4))
            rows[fullest, k] -= take
            over[k] -= take
    return [row for row in rows if row.any()]


def realise(problem: Problem, classes: Classes, patterns: Sequence[IntArray]) -> tuple[Bin, ...] | None:
    """Bins of the real fleet for a cover by patterns, each evaluated directly; None if one can't be repaired.

    A bin that the predictor refuses after all (it is not exactly monotone) gives adapters to the other bins.
    """
    sets = [set(each) for each in classes.assign(trimmed(patterns, classes.demand))]
    bins = real_bins(problem, [tuple(sorted(each)) for each in sets])
    for i in [i for i, each in enumerate(bins) if each is None]:
        if not _relieve(problem, sets, bins, i):
            return None
    return tuple(each for each in bins if each is not None)


def _relieve(problem: Problem, sets: list[set[int]], bins: list[Bin | None], sick: int) -> bool:
    """Move adapters of a refused bin to the others, lightest first, until it is feasible."""
    loads = problem.workload.offered_tok_s_by_adapter
    order = sorted(sets[sick], key=lambda i: (loads[i], i))
    hosts = sorted((j for j in range(len(sets)) if j != sick), key=lambda j: sum(loads[i] for i in sets[j]))
    for adapter in order[: max(1, len(order) // 4)]:
        for j in hosts[:8]:
            moved = real_bins(problem, [tuple(sorted(sets[j] | {adapter}))])[0]
            if moved is not None:
                sets[j].add(adapter)
                sets[sick].discard(adapter)
                bins[j] = moved
                break
        if not sets[sick]:
            return True
        bins[sick] = real_bins(problem, [tuple(sorted(sets[sick]))])[0]
        if bins[sick] is not None:
            return True
    return False


def dive(relaxation: Relaxation, below: int, shake: float) -> list[IntArray] | None:
    """Round the relaxation down, then fill bins for what is left, best value first; None if not < `below`
    bins.

    `shake` is the spread of the noise on the values.
    """
    master, rng, patterns = relaxation.master, relaxation.rng, relaxation.patterns
    if master is None or master.duals.max(initial=0.0) <= 0.0:
        return None
    left = relaxation.demand.copy()
    chosen: list[IntArray] = []
    for j, times in enumerate(np.floor(master.use + 1e-6).astype(np.int64).tolist()):
        for _ in range(times):
            row = np.minimum(patterns[j], left)
            if row.any():
                chosen.append(row)
                left -= row
    while left.any():
        if len(chosen) + int(np.ceil(float(left @ master.duals) - 1e-6)) >= below:
            return None
        row = _best_row(relaxation, left, master.duals * np.exp(rng.normal(0.0, shake, len(left))))
        if row is None:
            return None
        chosen.append(row)
        left -= row
    return chosen if len(chosen) < below else None


def _best_row(relaxation: Relaxation, left: IntArray, weights: FloatArray) -> IntArray | None:
    """The feasible part of what is left that is worth most."""
    weights = np.maximum(weights, 1e-6 * float(weights.max()))
    if relaxation.feasibility.feasible(left[None, :])[0]:
        return left.copy()
    sizes = np.maximum(weights, 1e-4)
    clipped = np.minimum(relaxation.patterns, left)
    best = clipped[np.argsort(-(clipped @ weights), kind="stable")[:8]]
    found = price(relaxation.knapsacks, weights, left, sizes, relaxation.rng, best)
    if not len(found) or not found[0].any():
        return None
    row: IntArray = found[0]
    return row
