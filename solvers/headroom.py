"""How much the load of each server may grow, by a predictor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packer.bin import Bin
from packer.room import LEVELS
from packer.search import reach
from packer.solvers.evaluator import Evaluator
from packer.workload import Workload

MOST_GPUS = 32  # Plans of more GPUs come without headroom: computing it would take longer than the plan.


def headroom(
    workload: Workload, bins: Sequence[Bin], evaluator: Evaluator, stop: Callable[[], bool] = lambda: False,
    factors: Sequence[float] = LEVELS,
) -> tuple[float | None, ...]:  # fmt: skip
    """For each bin the largest of the `factors` of its rates (ascending) at which it does not starve by the predictor.
    If `stop` ends the search early, the largest factor known to hold, None if none is known. None for a bin that
    starves at the first factor, and for a replayed trace."""
    if workload.arrivals.trace is not None:
        return (None,) * len(bins)

    def found(item: Bin) -> float | None:
        def holds(level: int) -> bool:
            return bool(evaluator.scaled(workload, [item], factors[level]).feasible[0])

        low = -1 if stop() else reach(holds, 0, len(factors) - 1, len(factors) // 2, 0, stop)[0]
        return factors[low] if low >= 0 else None

    return tuple(map(found, bins))
