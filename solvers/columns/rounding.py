"""From patterns to a plan: whole numbers, names, and a direct check of every bin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.bin import Bin
from packer.solvers.base import Problem
from packer.solvers.classes import Classes
from packer.solvers.columns.pricing import price
from packer.solvers.columns.relaxation import Relaxation
from packer.solvers.confirm import relieved
from packer.solvers.feasibility import real_bins
from packer.solvers.slots import SlotSearch

_STARTS = 6
"""Fillings tried for each bin of a dive."""


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
    """Bins of the real fleet for a cover by patterns, each evaluated directly; None if they can't be repaired.

    Bins that are refused after all (classes are rounded, the predictor is not exactly monotone) give adapters to the
    others, or to further bins.
    """
    sets = classes.assign(trimmed(patterns, classes.demand))
    found = real_bins(problem, sets)
    refused = [k for k, item in enumerate(found) if item is None]
    usual = int(np.median([item.max_loras for item in found if item is not None] or [1]))
    slots = SlotSearch(problem)
    bins = [
        slots.make(each, min(usual, len(each))) if item is None else item
        for item, each in zip(found, sets, strict=True)
    ]
    searching = replace(problem, evaluator=problem.evaluator.changed(confirms=False))
    return relieved(searching, bins, refused) if refused else tuple(bins)


def dive(relaxation: Relaxation, below: int, shake: float) -> list[IntArray] | None:
    """Round the relaxation down, then fill bins for what is left, best value first; None if not < `below`
    bins.

    `shake` is the spread of the noise on the values.
    """
    master, rng = relaxation.master, relaxation.rng
    if master is None or master.duals.max(initial=0.0) <= 0.0:
        return None
    left = relaxation.demand.copy()
    chosen: list[IntArray] = []
    whole = np.floor(master.use + 1e-6).astype(np.int64).tolist()
    for pattern, times in zip(relaxation.pool, whole, strict=True):
        for _ in range(times):
            row = np.minimum(pattern, left)
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
    found = price(relaxation.knapsacks, weights, left, sizes, relaxation.rng, best, _STARTS)
    if not len(found) or not found[0].any():
        return None
    row: IntArray = found[0]
    return row
