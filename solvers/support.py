"""Why a solver can't take a problem, in words for people, and how many GPUs a solver spreads over."""

from __future__ import annotations

import math

from packer.solvers.backbone import backbone_tok_s
from packer.solvers.base import MAX_ADAPTERS_PER_GPU, Problem


def one_type(problem: Problem) -> str | None:
    """Why a solver for one GPU type can't take the problem, or None if it can."""
    return "it supports one GPU type only" if len(problem.profiles) > 1 else None


def plain(problem: Problem) -> str | None:
    """Why adapters can't be counted in classes on GPUs of one kind, or None if they can."""
    if len(problem.profiles) > 1:
        return one_type(problem)
    if problem.max_replicas > 1:
        return "it does not split adapters over several GPUs (--max-replicas 1)"
    if problem.workload.arrivals.trace is not None:
        return "a replayed trace has no classes of equal adapters; use Poisson arrivals"
    return None


def counts_gpus(problem: Problem) -> str | None:
    """Why a solver that minimises the number of GPUs can't take the problem, or None if it can."""
    objective = problem.objective
    if objective.fixed_gpus:
        return "it minimises the number of GPUs; for a fixed number take spread-refined"
    if objective.minimises != "gpus":
        return f"it minimises the number of GPUs, and the objective {objective.name!r} minimises {objective.minimises}"
    if not objective.symmetric:
        said = "it counts adapters of equal rank, rate and lengths as one kind,"
        return f"{said} and the objective {objective.name!r} may distinguish them; take the solver greedy"
    return plain(problem)


def chooses_gpus(problem: Problem) -> str | None:
    """Why a solver that chooses how many GPUs to use can't take the problem, or None if it can."""
    if problem.objective.fixed_gpus:
        return "it chooses how many GPUs to use; for a fixed number take the solver spread"
    return None


def gpus_to_use(problem: Problem, copies: int = 1) -> int:
    """`max_gpus`, else the GPUs that the load needs if adapters cost nothing; at most `copies` for each adapter."""
    n = len(problem.workload) * copies
    if problem.max_gpus is not None:
        return min(problem.max_gpus, n)
    by_load = problem.workload.offered_tok_s / backbone_tok_s(problem.workload, problem.profile)
    return max(1, min(n, math.ceil(max(by_load, n / MAX_ADAPTERS_PER_GPU))))
