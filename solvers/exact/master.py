"""The pattern model: cheapest bins that cover every class, as a linear relaxation and in whole numbers.

Both are solved by HiGHS. On pools that column generation leaves behind it finds better covers than CP-SAT, and
proves them where CP-SAT does not (benchmarks/solvers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from packer.solvers.classes import FloatArray, IntArray

_TIME_LIMIT = 1
"""`scipy.optimize.milp`: the time is up; what it found by then is returned."""

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
    from scipy.optimize import linprog

    if not len(patterns):
        return None
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


def solve_integer(
    patterns: IntArray | FloatArray,
    demand: IntArray | FloatArray,
    *,
    time_limit_s: float,
    prices: FloatArray | None = None,
    exact_cover: bool = False,
) -> tuple[IntArray | None, bool]:
    """Whole numbers of each pattern (m,) that cover the demand at the lowest price, and whether that is proven.

    With `exact_cover` every class is met exactly (patterns must then hold every part of a bin). None if
    nothing was found in time.
    """
    from scipy.optimize import LinearConstraint, milp

    if not len(patterns):
        return None, False
    found = milp(
        _prices(patterns, prices),
        integrality=np.ones(len(patterns)),
        constraints=LinearConstraint(_held(patterns), demand, demand if exact_cover else np.inf),
        options={"time_limit": max(0.1, time_limit_s)},
    )
    if found.x is None or found.status > _TIME_LIMIT:
        return None, False
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
