"""The pattern model: cheapest bins that cover every class, as a linear relaxation and in whole numbers.

The relaxation of few classes is solved in a simplex tableau, all else by HiGHS. On pools that column generation leaves
behind it finds better covers than CP-SAT, and proves them where CP-SAT does not (benchmarks/solvers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from packer.arrays import FloatArray, IntArray

_TIME_LIMIT = 1
"""`scipy.optimize.milp`: the time is up; what it found by then is returned."""

_INFEASIBLE = 2

FEW = 16
"""Up to so many classes, as the prices of `packer.solvers.exact.prices`, a simplex tableau is faster than to import
and call HiGHS."""

MOST_PIVOTS = 1000
_DUAL_TOLERANCE = 1e-9

_TOLERANCE = 1e-6
"""Of HiGHS for constraints, where patterns are not whole numbers."""


@dataclass(frozen=True)
class Master:
    """Optimum of the linear relaxation: its value, the use of each pattern (m,), the dual of each class (K,)."""

    value: float
    use: FloatArray
    duals: FloatArray


def solve_relaxation(
    patterns: IntArray | FloatArray,
    demand: IntArray | FloatArray,
    prices: FloatArray | None = None,
    *,
    time_limit_s: float = np.inf,
) -> Master | None:
    """Linear relaxation over these patterns (m, K) of these prices (m,), 1 if None.

    None if they can't cover the demand (K,), or the time is up.
    """
    if not len(patterns):
        return None
    if len(demand) <= FEW and (few := _by_pivots(patterns, demand, _prices(patterns, prices))) is not None:
        return few
    from scipy.optimize import linprog

    found = linprog(
        _prices(patterns, prices),
        A_ub=_held(-patterns),
        b_ub=-demand,
        bounds=(0, None),
        method="highs",
        options={"time_limit": max(0.01, time_limit_s)},
    )
    if found.status != 0:
        return None
    return Master(float(found.fun), found.x, np.maximum(-found.ineqlin.marginals, 0.0))


def _by_pivots(
    patterns: IntArray | FloatArray, demand: IntArray | FloatArray, prices: FloatArray
) -> Master | None:
    """The same by the simplex method on the dual, max demand · y where patterns · y <= prices and y >= 0.

    In the compact tableau (rows: slacks of the patterns, columns: duals) y = 0 is feasible. None where the dual is
    unbounded, or the pivots do not end.
    """
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
        # Steepest first; in the order of their numbers, which cannot cycle (R. Bland, 1977), if that takes long.
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
    patterns: IntArray | FloatArray,
    demand: IntArray | FloatArray,
    *,
    time_limit_s: float,
    prices: FloatArray | None = None,
    exact_cover: bool = False,
    most_bins: float = np.inf,
) -> tuple[IntArray | None, bool]:
    """Whole numbers of each pattern (m,) that cover the demand at the lowest price, and whether that is proven.

    With `exact_cover` every class is met exactly (patterns must then hold every part of a bin). None if nothing was
    found in time, or proven: if there is nothing of at most `most_bins` patterns.
    """
    from scipy.optimize import LinearConstraint, milp

    if not len(patterns):
        return None, bool(np.any(demand > 0))
    found = milp(
        _prices(patterns, prices),
        integrality=np.ones(len(patterns)),
        constraints=[
            LinearConstraint(_held(patterns), demand, demand if exact_cover else np.inf),
            *([LinearConstraint(np.ones((1, len(patterns))), 0.0, most_bins)] if most_bins < np.inf else []),
        ],
        options={"time_limit": max(0.1, time_limit_s)},
    )
    if found.x is None or found.status > _TIME_LIMIT:
        return None, found.status == _INFEASIBLE
    whole = np.rint(found.x).astype(np.int64)
    covered = whole @ patterns
    if np.any(whole < 0) or np.any(covered != demand if exact_cover else covered < demand - _TOLERANCE):
        return None, False
    return whole, found.status == 0


def _prices(patterns: IntArray | FloatArray, prices: FloatArray | None) -> FloatArray:
    return np.ones(len(patterns)) if prices is None else prices


def _held(patterns: IntArray | FloatArray) -> Any:
    """One row for each class: sparse (K, m)."""
    from scipy.sparse import csr_array

    return csr_array(patterns.T.astype(np.float64))
