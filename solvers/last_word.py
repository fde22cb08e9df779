"""The twin has the last word where a learned judge led the search: a search finds the bins a judge is wrong about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packer.bin import Bin, Evaluations
from packer.predictors.twin import TwinPredictor
from packer.solvers.base import Problem
from packer.solvers.margin import MarginPredictor
from packer.solvers.verify import FRESH_SEED, judge_for, keeps_limits

LEARNED = ("auto", "boosting", "forest", "knn", "svm", "tree")
"""Predictors that imitate the twin."""

RAISED_RATES = 1.02
"""Two hours of one fleet differ by a percent or so: a bin that holds by less is not confirmed."""

_SEED = 17
_HOURS = 3
"""Latencies of one fleet differ by half a percent between hours: plans are compared over several."""


def confirmed(problem: Problem, bins: Sequence[Bin]) -> bool:
    """Whether the twin, too, finds every bin admissible, at slightly raised rates and on an hour of its own.

    Admissible as the objective says, at its loads, with the slack for latency limits that every verdict has.
    """
    found = _asked(problem, bins, RAISED_RATES)
    return bool(keeps_limits(problem.objective, found).all())


def lowest_latency(problem: Problem, plans: Sequence[tuple[Bin, ...]], rivals: int) -> int:
    """Which of some plans the twin likes best; the last `rivals` of them are what the others must not fall behind.

    A plan that is no worse than every admissible rival in mean TTFT and mean ITL over requests comes before one that
    is; among those the objective decides, among the others how far they fall behind.
    """
    pairs, ranks, bad = [], [], []
    for bins in plans:
        hours = [_asked(problem, bins, 1.0, hour) for hour in range(_HOURS)]
        pairs.append(np.mean([_latencies(problem, bins, found) for found in hours], axis=0))
        keys = [problem.objective.key(problem.workload, bins, found) for found in hours]
        ranks.append(tuple(np.mean(keys, axis=0).tolist()))
        bad.append(max(int((~problem.objective.admissible(found)).sum()) for found in hours))
    sound = [k for k in range(len(plans) - rivals, len(plans)) if bad[k] == 0]
    behind = [1.0] * len(plans)
    if sound:
        best = np.min([pairs[k] for k in sound], axis=0)
        behind = [max(float(np.max(pair / best)), 1.0) for pair in pairs]
    return min(range(len(plans)), key=lambda k: (bad[k], behind[k], ranks[k]))


def _latencies(problem: Problem, bins: Sequence[Bin], found: Evaluations) -> npt.NDArray[np.float64]:
    """Mean TTFT and mean ITL over requests, ms; infinite where a server does not start."""
    weights = [bin_.rates(problem.workload).sum() for bin_ in bins]
    columns = np.stack([found.mean_ttft_ms, found.mean_itl_ms])
    return np.average(np.nan_to_num(columns, nan=np.inf), weights=weights, axis=1)


def _asked(problem: Problem, bins: Sequence[Bin], factor: float, hour: int = 0) -> Evaluations:
    twin = TwinPredictor(seed=problem.seed + FRESH_SEED + _SEED + hour)
    judge = judge_for(problem.objective, MarginPredictor(twin, factor))
    return judge.evaluate(problem.workload, bins)
