"""The pattern model: fewest bins that cover every class, as a linear relaxation and in whole numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pulp

from packer.solvers.classes import FloatArray, IntArray


@dataclass(frozen=True)
class Master:
    """Optimum of the linear relaxation: its value, the use of each pattern (m,), the dual of each class
    (K,)."""

    value: float
    use: FloatArray
    duals: FloatArray


def _model(
    patterns: IntArray, demand: IntArray, category: str, exact_cover: bool = False
) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    model = pulp.LpProblem("patterns", pulp.LpMinimize)
    use = [model.add_variable(f"x{j}", 0, None, category) for j in range(len(patterns))]
    model.setObjective(pulp.lpSum(use))
    for k, needed in enumerate(demand.tolist()):
        row = [(use[j], int(patterns[j, k])) for j in np.flatnonzero(patterns[:, k]).tolist()]
        held = pulp.LpAffineExpression(row)
        model.addConstraint(held == needed if exact_cover else held >= needed, f"class{k}")
    return model, use


def solve_relaxation(patterns: IntArray, demand: IntArray) -> Master | None:
    """Linear relaxation over these patterns (m, K); None if they can't cover the demand (K,)."""
    model, use = _model(patterns, demand, pulp.LpContinuous)
    if model.solve(pulp.HiGHS(msg=False, threads=1)) != pulp.LpStatusOptimal:
        return None
    duals = np.array([constraint.pi or 0.0 for constraint in model.constraints()])
    values = np.array([variable.value() or 0.0 for variable in use])
    return Master(float(values.sum()), values, np.maximum(duals, 0.0))


def solve_integer(
    patterns: IntArray, demand: IntArray, *, time_limit_s: float, exact_cover: bool = False
) -> tuple[IntArray | None, bool]:
    """Whole numbers of each pattern (m,) that cover the demand with fewest bins, and whether that is proven.

    With `exact_cover` every class is met exactly (patterns must then hold every part of a bin). None if
    nothing was found in time.
    """
    model, use = _model(patterns, demand, pulp.LpInteger, exact_cover)
    solver = pulp.HiGHS(msg=False, threads=1, timeLimit=max(0.1, time_limit_s))
    status = model.solve(solver)
    values = [variable.value() for variable in use]
    if status in (pulp.LpStatusInfeasible, pulp.LpStatusUndefined) or any(value is None for value in values):
        return None, False
    whole = np.rint(np.array(values, dtype=np.float64)).astype(np.int64)
    if np.any(whole < 0) or np.any(whole @ patterns < demand):
        return None, False
    return whole, model.sol_status == pulp.LpSolutionOptimal
