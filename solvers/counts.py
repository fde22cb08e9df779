"""How many GPUs a solver spreads over that does not find the number itself."""

from __future__ import annotations

import math

from packer.solvers.backbone import backbone_tok_s
from packer.solvers.base import Problem
from packer.solvers.candidates import MAX_ADAPTERS_PER_GPU


def gpus_to_use(problem: Problem, copies: int = 1) -> int:
    """The GPUs given, else what the load needs if adapters cost nothing; never more than adapters, `copies` of each."""
    n = len(problem.workload) * copies
    if problem.max_gpus is not None:
        return min(problem.max_gpus, n)
    by_load = problem.workload.offered_tok_s / backbone_tok_s(problem.workload, problem.profile)
    return max(1, min(n, math.ceil(max(by_load, n / MAX_ADAPTERS_PER_GPU))))
