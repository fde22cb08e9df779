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
    """Factor by which every rate of a bin may grow, up to `LARGEST`.

    Where the twin has the last word, until the bin starves or queues without end in 5 % of all hours
    (`packer.twin.cliff`), but at least 1 for a bin that holds; else until the predictor says that it starves, in steps
    of 4 %. All bins are bisected together, one batch a step; stopped early, the largest factors known to hold are
    returned, None where the twin did not come to its word. Below 1 the bin starves already: then the factor is None,
    as it is for a replayed trace.
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
    return tuple(
        _last_word(workload, item, evaluator, factor, stop) for item, factor in zip(bins, known, strict=True)
    )


def _last_word(
    workload: Workload, item: Bin, evaluator: Evaluator, near: float | None, stop: Callable[[], bool]
) -> float | None:
    """The load factor of the twin, where it has the last word, near that of the search."""
    twin = evaluator.twin_of(item.profile)
    if near is None or twin is None:
        return near
    found = twin.cliff(workload, item, near=near, stop=stop)
    return None if found is None else max(1.0, found.load_factor)
