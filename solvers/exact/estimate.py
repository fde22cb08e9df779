"""How many GPUs a fleet needs at the least by a search alone: an estimate in tenths of a second."""

from __future__ import annotations

import numpy as np

from packer.solvers.base import Problem
from packer.solvers.bounds import Bound, quick_bound
from packer.solvers.classes import aggregate
from packer.solvers.exact.prices import features
from packer.solvers.exact.relaxation import Relaxation
from packer.solvers.feasibility import Feasibility, OutOfTime


def estimated(problem: Problem) -> Bound:
    """The best of the bounds on load and slots and of a relaxation with few prices, as far as the time goes.

    Nothing is proven: a search found no bins that refute it. It knows the limits of the problem's objective.
    """
    classes = aggregate(problem.workload)
    feasibility = Feasibility(problem, classes)
    if problem.evaluator.confirms:  # beyond, trees know nothing, and simulations would take the whole time
        feasibility.most_adapters = problem.profile.measured_adapters
    relaxation = Relaxation(feasibility, np.random.default_rng(problem.seed))
    quick = Bound(1, "at least one GPU")
    try:
        quick = quick_bound(feasibility, relaxation.rng)
        if relaxation.start(np.zeros((0, len(classes)), dtype=np.int64)):
            relaxation.warm(features(classes))
    except OutOfTime:
        pass
    searched = relaxation.promised if relaxation.priced else 1
    return quick if quick.value >= searched else Bound(searched, "linear relaxation of the pattern model")
