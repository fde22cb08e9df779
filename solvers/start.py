"""The plan that exact and refining solvers start from."""

from __future__ import annotations

from dataclasses import replace

from packer import registry
from packer.solvers.base import Problem, Solution, Solver


def start(problem: Problem, solver: str = "greedy") -> Solution:
    """The solution of another solver, without a limit on the GPUs where their number is to be chosen."""
    first: Solver = registry.load("solver", solver)()
    if not problem.objective.fixed_gpus:
        problem = replace(problem, max_gpus=None)
    return first.solve(problem)


def counts_gpus(problem: Problem) -> str | None:
    """Why a solver that counts bins of one kind can't take the problem, or None if it can."""
    if problem.objective.fixed_gpus:
        return "it minimises the number of GPUs; for a fixed number take cpsat or spread-refined"
    if len(problem.profiles) > 1:
        return "it knows one GPU type only"
    if problem.max_replicas > 1:
        return "it does not split adapters over several GPUs (--max-replicas 1)"
    if problem.workload.arrivals.trace is not None:
        return "a replayed trace has no classes of equal adapters; use Poisson arrivals"
    return None
