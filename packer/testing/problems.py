"""Small problems over the monotone predictor, for tests of solvers and of plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from packer.adapter import Adapter
from packer.objectives.base import Objective
from packer.objectives.gpus import Gpus
from packer.solvers.base import Problem
from packer.solvers.evaluator import Evaluator
from packer.strategies import Predictor
from packer.testing.analytic import small_profile
from packer.testing.monotone import MonotonePredictor
from packer.workload import Workload


def random_fleet(
    n: int, seed: int, rates: Sequence[float] = (1.6, 0.8, 0.4), ranks: Sequence[int] = (8, 16, 32)
) -> Workload:
    """`n` adapters, each with one of the rates and one of the ranks, seeded."""
    rng = np.random.default_rng(seed)
    return Workload(
        [Adapter(f"a{i}", int(rng.choice(ranks)), float(rng.choice(rates))) for i in range(n)], name="random"
    )


def problem(
    workload: Workload,
    *,
    objective: Objective | None = None,
    predictor: Predictor | None = None,
    max_gpus: int | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Problem:
    """A problem over the monotone predictor and the small profile, objective "gpus" unless given."""
    goal = objective if objective is not None else Gpus()
    return Problem(
        workload,
        (small_profile(),),
        goal,
        Evaluator(predictor if predictor is not None else MonotonePredictor(), goal),
        max_gpus=max_gpus,
        time_limit_s=time_limit_s,
        seed=seed,
        stop=stop,
    )
