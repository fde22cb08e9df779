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
