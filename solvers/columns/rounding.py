"""Turn patterns into a plan: assign the adapters, and evaluate every bin directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.solvers.base import Problem
from packer.solvers.classes import Classes
from packer.solvers.confirm import repaired
from packer.solvers.slots import SlotSearch, real_bins


def trimmed(patterns: Sequence[IntArray], demand: IntArray) -> list[IntArray]:
    """Remove adapters that are covered more than once, from the fullest bins first."""
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
    """Bins of the real fleet for a cover by patterns, each evaluated directly; None if they can't be repaired. Bins
    that the predictor refuses (classes are rounded, or the predictor is not exactly monotone) give adapters to other
    bins, or to new ones."""
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
    return repaired(searching, bins, refused) if refused else tuple(bins)
