"""How much the load of each server of a plan may grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from packer.bin import Bin
from packer.solvers.evaluator import Evaluator
from packer.workload import Workload

LARGEST = 4.0
"""No larger factor is tried."""

SIMULATED = 4
"""Servers of a plan whose load factor is simulated: each takes 15 hours."""

SEEDS = 3
_STEP = 1.04


def headroom(
    workload: Workload,
    bins: Sequence[Bin],
    evaluator: Evaluator,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[float | None, ...]:
    """Factor by which every rate of a bin may grow, up to `LARGEST`.

    Until the predictor says that the bin starves, in steps of 4 %. Where the twin has the last word, until it starves
    or queues without end in 5 % of all hours (`packer.twin.cliff`), but at least 1 for a bin that holds: simulated for
    the weakest bins, one of them if trees led the search and `SIMULATED` if the twin did; the factors of the others are
    lowered as much as the most lowered of these. All bins are bisected together, one batch a step; stopped early, the
    largest factors known to hold are returned. Below 1 the bin starves already: then the factor is None, as it is for a
    replayed trace.
    """
    if workload.arrivals.trace is not None or not bins:
        return (None,) * len(bins)
    levels = np.append(_STEP ** np.arange(int(np.log(LARGEST) / np.log(_STEP)) + 1), LARGEST)
    low = np.full(len(bins), -1)
    high = np.full(len(bins), len(levels))
    while True:
        open_ = np.flatnonzero(high - low > 1)
        if not open_.size or stop():
            break
        middle = (low[open_] + high[open_]) // 2
        found = evaluator.scaled(workload, [bins[k] for k in open_.tolist()], levels[middle])
        low[open_] = np.where(found.feasible, middle, low[open_])
        high[open_] = np.where(found.feasible, high[open_], middle)
    known = [float(levels[level]) if level >= 0 else None for level in low.tolist()]
    return _confirmed(workload, bins, evaluator, known, stop)


def _confirmed(
    workload: Workload,
    bins: Sequence[Bin],
    evaluator: Evaluator,
    known: list[float | None],
    stop: Callable[[], bool],
) -> tuple[float | None, ...]:
    """The factors as the twin has them, where it has the last word."""
    weakest = sorted((factor, k) for k, factor in enumerate(known) if factor is not None)
    ratio, found = 1.0, dict[int, float]()
    for near, k in weakest[: 1 if evaluator.confirms else SIMULATED]:
        twin = evaluator.twin_of(bins[k].profile)
        cliff = None if twin is None else twin.cliff(workload, bins[k], near=near, stop=stop, seeds=SEEDS)
        if cliff is not None:
            found[k] = max(1.0, cliff.load_factor)
            ratio = min(ratio, cliff.load_factor / near)
    rest = (None if factor is None else max(1.0, factor * ratio) for factor in known)
    return tuple(found.get(k, factor) for k, factor in enumerate(rest))
