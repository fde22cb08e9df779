"""How much the load of each server of a plan may grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from packer.bin import Bin
from packer.solvers.evaluator import Evaluator
from packer.workload import Workload

LARGEST = 4.0
"""No larger factor is tried."""

_STEP = 1.04


def headroom(
    workload: Workload,
    bins: Sequence[Bin],
    evaluator: Evaluator,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[float | None, ...]:
    """Factor by which every rate of a bin may grow until it starves, in steps of 4 % up to `LARGEST`.

    All bins are bisected together, one batch a step; stopped early, the largest factors known to hold are returned.
    Below 1 the bin starves already: then the factor is None, as it is for a replayed trace.
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
    return tuple(float(levels[level]) if level >= 0 else None for level in low.tolist())
