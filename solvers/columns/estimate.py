"""An estimate of the fewest GPUs that a fleet needs, by a search that takes tenths of a second."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from packer.solvers.base import Bound, Problem
from packer.solvers.classes import aggregate
from packer.solvers.columns.generation import Columns
from packer.solvers.columns.source import Source
from packer.solvers.feasibility import Feasibility, OutOfTime

MOST_EVALUATED = 20_000  # The search ends after so many servers: 200 adapters take 1,300, 5,000 some 10,000.


def estimated(problem: Problem, known: float, most: float) -> Bound | None:
    """Estimate the GPUs needed; None unless the estimate is above the bound `known` and at most `most`.

    Nothing is proven: a search found no bins that violate the estimate. It uses the limits of the problem's objective,
    and ends once it can't exceed `known`. None also if the search would simulate bins on which no trees were trained.
    """
    size = problem.profile.engine.gpus
    if known >= most or problem.out_of_time() or problem.evaluator.simulates:
        return None
    unlimited = replace(problem, max_gpus=None).learned()
    classes = aggregate(problem.workload)
    feasibility = Feasibility(unlimited, classes)
    feasibility.problem = replace(unlimited, stop=lambda: feasibility.evaluated > MOST_EVALUATED or problem.stop())
    columns = Columns([Source(1.0, feasibility, feasibility, np.random.default_rng(problem.seed))])
    with suppress(OutOfTime):
        if columns.start([classes.rows(())]):
            columns.warm(int(known) // size)
    gpus = float(columns.promised * size) if columns.priced else 0.0
    if not known < gpus <= most:
        return None
    source = "estimate: trained trees find no fuller servers"
    if unlimited.most_adapters < len(problem.workload):
        source += f" of at most {unlimited.most_adapters:,} adapters"
    return Bound(gpus, source)
