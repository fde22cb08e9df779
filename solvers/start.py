"""The plan that exact and refining solvers start from."""

from __future__ import annotations

from dataclasses import replace

from packer import registry
from packer.solvers.base import Problem, Solution, Solver

COUNTING = ("gpus", "slo", "headroom", "moves")
"""Objectives whose key starts with the number of GPUs."""


def start(problem: Problem, solver: str = "greedy") -> Solution:
    """The solution of another solver, without a limit on the GPUs where their number is to be chosen."""
    first: Solver = registry.load("solver", solver)()
    if not problem.objective.fixed_gpus:
        problem = replace(problem, max_gpus=None)
    return first.solve(problem)


def plain(problem: Problem) -> str | None:
    """Why adapters can't be counted in classes on GPUs of one kind, or None if they can."""
    if len(problem.profiles) > 1:
        return "it knows one GPU type only"
    if problem.max_replicas > 1:
        return "it does not split adapters over several GPUs (--max-replicas 1)"
    if problem.workload.arrivals.trace is not None:
        return "a replayed trace has no classes of equal adapters; use Poisson arrivals"
    return None


def counts_gpus(problem: Problem) -> str | None:
    """Why a solver that minimises the number of GPUs can't take the problem, or None if it can."""
    name = problem.objective.name
    if problem.objective.fixed_gpus:
        return "it minimises the number of GPUs; for a fixed number take cpsat or spread-refined"
    if name not in COUNTING:
        return f"it minimises the number of GPUs, which the objective {name!r} does not"
    if getattr(problem.objective, "rates", ""):
        return (
            "it counts adapters of equal rate as one kind, and a file of rates may tell them apart; "
            "take the solver greedy"
        )
    return plain(problem)
