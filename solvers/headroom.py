"""How much the load of each server of a plan may grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.adapter import Adapter
from packer.bin import Bin
from packer.predictors.base import Predictor
from packer.workload import Workload

LARGEST = 4.0
"""No larger factor is tried."""

_STEP = 1.04


def headroom(workload: Workload, bins: Sequence[Bin], predictor: Predictor) -> list[float | None]:
    """Factor by which every rate of a bin may grow until it starves, in steps of 4 % up to `LARGEST`.

    All bins are bisected together, one batch of questions a step. Below 1 the bin starves already: then the
    factor is None, as it is for a replayed trace.
    """
    if workload.arrivals.trace is not None or not bins:
        return [None] * len(bins)
    levels = np.append(_STEP ** np.arange(int(np.log(LARGEST) / np.log(_STEP)) + 1), LARGEST)
    low = np.full(len(bins), -1)
    high = np.full(len(bins), len(levels))
    while True:
        open_ = np.flatnonzero(high - low > 1).tolist()
        if not open_:
            break
        middle = (low + high) // 2
        fleet, scaled = _scaled(workload, [bins[k] for k in open_], levels[middle[open_]].tolist())
        feasible = predictor.evaluate(fleet, scaled).feasible
        for k, ok in zip(open_, feasible.tolist(), strict=True):
            low[k], high[k] = (middle[k], high[k]) if ok else (low[k], middle[k])
    return [float(levels[level]) if level >= 0 else None for level in low.tolist()]


def _scaled(workload: Workload, bins: Sequence[Bin], factors: Sequence[float]) -> tuple[Workload, list[Bin]]:
    """A fleet in which every bin has adapters of its own, at its own factor, and the bins in its terms."""
    adapters: list[Adapter] = []
    moved: list[Bin] = []
    for k, (item, factor) in enumerate(zip(bins, factors, strict=True)):
        first = len(adapters)
        for i, share in zip(item.adapters, item.shares, strict=True):
            own = workload.adapters[i]
            adapters.append(replace(own, name=f"{k}.{i}", rate=own.rate * share * factor))
        moved.append(replace(item, adapters=tuple(range(first, len(adapters))), shares=()))
    fleet = replace(workload, adapters=tuple(adapters))
    return fleet, moved
