"""How many GPUs a fleet needs at the least by a search alone: an estimate in tenths of a second."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from packer.plan import Plan
from packer.solvers.base import Problem
from packer.solvers.bounds import Bound, quick_bound
from packer.solvers.classes import aggregate
from packer.solvers.exact.prices import features
from packer.solvers.exact.relaxation import Relaxation
from packer.solvers.feasibility import Feasibility, OutOfTime

SECONDS = 5.0
"""At most so long; it takes tenths of a second for hundreds of adapters. Whatever is cut depends on the machine."""


def with_estimate(problem: Problem, plan: Plan) -> Plan:
    """The plan with an estimate of the GPUs needed where that is above its bound and no more than it has."""
    size = problem.profile.engine.tensor_parallel_size
    known = plan.lower_bound or 0.0
    if known >= plan.n_gpus or problem.out_of_time():
        return plan
    elapsed_s = time.monotonic() - problem.started
    limit_s = elapsed_s + min(SECONDS, problem.remaining_s())
    unlimited = replace(problem, max_gpus=None, time_limit_s=limit_s)
    gpus = float(estimated(unlimited, int(known) // size).value * size)
    if not known < gpus <= plan.n_gpus:
        return plan
    source = "estimate: trained trees find no fuller servers"
    return replace(plan, lower_bound=gpus, bound_proven=False, bound_source=source)


def estimated(problem: Problem, known: int = 0) -> Bound:
    """The best of the bounds on load and slots and of a relaxation with few prices, as far as the time goes.

    Nothing is proven: a search found no bins that refute it. It knows the limits of the problem's objective. The
    search ends where it can't promise more than the `known` bound.
    """
    classes = aggregate(problem.workload)
    feasibility = Feasibility(problem.learned(), classes)
    relaxation = Relaxation(feasibility, np.random.default_rng(problem.seed))
    quick = Bound(1, "at least one GPU")
    try:
        quick = quick_bound(feasibility, relaxation.rng)
        if relaxation.start(np.zeros((0, len(classes)), dtype=np.int64)):
            relaxation.warm(features(classes), max(known, quick.value))
    except OutOfTime:
        pass
    searched = relaxation.promised if relaxation.priced else 1
    return quick if quick.value >= searched else Bound(searched, "linear relaxation of the pattern model")
