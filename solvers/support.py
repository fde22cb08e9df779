"""Why a solver can't take a problem, in words for people."""

from __future__ import annotations

from packer.solvers.base import Problem


def one_type(problem: Problem) -> str | None:
    """Why a solver that knows one GPU type can't take the problem, or None if it can."""
    return "it knows one GPU type only" if len(problem.profiles) > 1 else None


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
        return (
            f"it counts adapters of equal rank, rate and lengths as one kind, and the objective {objective.name!r} "
            "may tell them apart; take the solver greedy"
        )
    return plain(problem)


def chooses_gpus(problem: Problem) -> str | None:
    """Why a solver that chooses how many GPUs to use can't take the problem, or None if it can."""
    if problem.objective.fixed_gpus:
        return "it chooses how many GPUs to use; for a fixed number take the solver spread"
    return None
