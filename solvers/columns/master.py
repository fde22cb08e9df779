"""The pattern model: cheapest bins that cover every class, as a linear relaxation and as an integer program.

A simplex tableau solves the relaxation of few classes; HiGHS, through SciPy, which takes a matrix, solves the
relaxation of many. PuLP models the integer programs for HiGHS. On the pools of column generation HiGHS finds better
covers than CP-SAT, and proves them where CP-SAT does not (benchmarks/solvers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.solvers.work import CHECKED_ENTRY_S, CHECKED_S, Work

FEW = 16
"""Up to this number of classes (or prices of `Classes.features`), a simplex tableau is faster than
importing and calling HiGHS."""

MOST_PIVOTS = 1000
_DUAL_TOLERANCE = 1e-9
_MOST_S = 10.0  # Most work of an integer program, s: it ends at a check of its limits; most take about ten checks.
_TOLERANCE = 1e-6  # Tolerance of HiGHS on constraints, for patterns that are not integers.


@dataclass(frozen=True)
class Master:
    """Optimum of the linear relaxation: its value, the use of each pattern (m,), the dual of each class (K,)."""

    value: float
    use: FloatArray
    duals: FloatArray


def solve_relaxation(
    patterns: IntArray | FloatArray, demand: IntArray | FloatArray, prices: FloatArray | None = None, *,
    time_limit_s: float = np.inf,
) -> Master | None:  # fmt: skip
    """Solve the linear relaxation over `patterns` (m, K) with `prices` (m,), 1 each if None. None if the patterns can't
    cover the demand (K,), or the time is up."""
    if not len(patterns):
        return None
    prices = np.ones(len(patterns)) if prices is None else prices
    if len(demand) <= FEW and (few := _by_pivots(patterns, demand, prices)) is not None:
        return few
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    found = linprog(
        prices, A_ub=csr_array(-patterns.T.astype(np.float64)), b_ub=-demand, bounds=(0, None), method="highs",
        options={"time_limit": max(0.01, time_limit_s)},
    )  # fmt: skip
    if found.status != 0:
        return None
    return Master(float(found.fun), found.x, np.maximum(-found.ineqlin.marginals, 0.0))


def _by_pivots(patterns: IntArray | FloatArray, demand: IntArray | FloatArray, prices: FloatArray) -> Master | None:
    """As `solve_relaxation`, by the simplex method on the dual: max demand · y with patterns · y <= prices, y >= 0. In
    the compact tableau (rows: slacks of the patterns, columns: duals), y = 0 is feasible. None if the dual is
    unbounded, or the pivots do not end."""
    # With every demand scaled to 1, the costs of columns are comparable.
    scale = np.where(demand > 0.0, demand, 1.0)
    m, k = patterns.shape
    table = np.zeros((m + 1, k + 1))
    table[:m, :k], table[:m, k], table[m, :k] = patterns / scale, prices, -demand / scale
    basic, free = np.arange(k, k + m), np.arange(k)
    for pivot in range(MOST_PIVOTS):
        costs = table[m, :k]
        improving = np.flatnonzero(costs < -_DUAL_TOLERANCE)
        if not improving.size:
            values = np.zeros(k + m)
            values[basic], use = table[:m, k], np.zeros(k + m)
            use[free] = costs
            duals = np.maximum(values[:k], 0.0) / scale
            return Master(float(table[m, k]), np.maximum(use[k:], 0.0), duals)
        # Steepest column first; after many pivots the lowest index, which cannot cycle (R. Bland, 1977).
        key = costs if pivot < MOST_PIVOTS // 2 else free
        j = int(improving[key[improving].argmin()])
        rows = np.flatnonzero(table[:m, j] > _DUAL_TOLERANCE)
        if not rows.size:
            return None
        ratios = table[rows, k] / table[rows, j]
        ties = rows[ratios <= ratios.min() + 1e-12]
        i = int(ties[basic[ties].argmin()])
        row, column = table[i] / table[i, j], table[:, j].copy()
        column[i] = 0.0
        table -= np.outer(column, row)
        row[j] = 1.0 / table[i, j]
        table[:, j], table[i] = -column * row[j], row
        basic[i], free[j] = free[j], basic[i]
    return None


def solve_integer(
    patterns: IntArray | FloatArray, demand: IntArray | FloatArray, *, time_limit_s: float = np.inf,
    prices: FloatArray | None = None, exact_cover: bool = False, most_bins: float = np.inf,
    work: Work | None = None,
) -> tuple[IntArray | None, bool]:  # fmt: skip
    """Integer use of each pattern (m,) that covers the demand at the lowest price, and whether this is proven. With
    `exact_cover` every class is covered exactly (`patterns` must then include every part of a bin). (None, False) if
    nothing was found in time, or in `_MOST_S` of work; (None, True) if there is no cover of at most `most_bins`
    patterns. `work`: where its work is counted.
    """
    if not len(patterns):
        return None, bool(np.any(demand > 0))
    import highspy
    import pulp

    done_s, each_s = 0.0, CHECKED_S + CHECKED_ENTRY_S * np.count_nonzero(patterns)

    def check(_kind: object, _message: str, _state: object, answer: Any, _data: object) -> None:
        nonlocal done_s
        done_s += each_s
        answer.user_interrupt = done_s >= _MOST_S

    prices = np.ones(len(patterns)) if prices is None else prices
    model = pulp.LpProblem("cover", pulp.LpMinimize)
    use = [model.add_variable(f"use{k}", lowBound=0, cat=pulp.LpInteger) for k in range(len(patterns))]
    model.setObjective(pulp.LpAffineExpression(list(zip(use, prices.tolist(), strict=True))))
    sense = pulp.LpConstraintEQ if exact_cover else pulp.LpConstraintGE
    for k, needed in enumerate(np.asarray(demand).tolist()):
        held = np.flatnonzero(patterns[:, k]).tolist()
        total = pulp.LpAffineExpression([(use[i], float(patterns[i, k])) for i in held])
        model.addConstraint(pulp.LpConstraint(total, sense, f"class{k}", needed))
    if most_bins < np.inf:
        total = pulp.LpAffineExpression([(each, 1.0) for each in use])
        model.addConstraint(pulp.LpConstraint(total, pulp.LpConstraintLE, "bins", most_bins))
    model.solve(
        pulp.HiGHS(
            msg=False, timeLimit=max(0.1, time_limit_s), gapRel=0.0, threads=1,
            callbackTuple=(check, None), callbacksToActivate=[highspy.cb.HighsCallbackType.kCallbackMipInterrupt],
        )
    )  # fmt: skip
    if work is not None:
        work.add(done_s)
    if model.status == pulp.LpStatusInfeasible:
        return None, True
    values = [variable.varValue for variable in use]
    if model.status != pulp.LpStatusOptimal or None in values:
        return None, False
    # The solver's values are whole only up to its tolerance: check the cover after rounding.
    whole = np.rint(np.array(values)).astype(np.int64)
    covered = whole @ patterns
    if np.any(whole < 0) or np.any(covered != demand if exact_cover else covered < demand - _TOLERANCE):
        return None, False
    return whole, model.sol_status == pulp.LpSolutionOptimal
