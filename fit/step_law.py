"""Fit of the linear step law: non-negative least squares on mean states.

A mean step time is linear in the means of what the terms multiply, so micro-benchmarks, whole runs
(`from_tables`) and groups of like steps (`from_log`) give one equation each. Rows are weighted by 1 / step time:
relative errors count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packer.arrays import FloatArray
from packer.fit.prior import EXACT, SMALLEST, WEIGHT, Prior
from packer.terms import LINEAR_TERMS

FOLDS = 5


@dataclass(frozen=True, eq=False)
class Equations:
    """Features (n, len(LINEAR_TERMS)), step times (n,) in ms, weights (n,)."""

    features: FloatArray
    step_ms: FloatArray
    weights: FloatArray

    def __add__(self, other: Equations) -> Equations:
        return Equations(
            np.vstack([self.features, other.features]),
            np.concatenate([self.step_ms, other.step_ms]),
            np.concatenate([self.weights, other.weights]),
        )


def solve(equations: Equations, terms: Sequence[str], prior: Prior | None = None) -> dict[str, float]:
    """Non-negative coefficients of some terms, ms; the others are absent (0).

    `prior`: each term is held near its coefficient there, the more the less the equations say of it.
    """
    columns = [LINEAR_TERMS.index(term) for term in terms]
    weight = equations.weights / equations.step_ms
    design, wanted = equations.features[:, columns] * weight[:, None], equations.step_ms * weight
    coefficients = non_negative(design, wanted)
    if prior is not None:
        error = float(np.sqrt(np.mean((design @ coefficients - wanted) ** 2)))
        near = np.array([prior.coefficients.get(term, 0.0) for term in terms])
        rows, right = _held(design, near, WEIGHT * max(error, EXACT))
        coefficients = non_negative(np.vstack([design, rows]), np.concatenate([wanted, right]))
    return dict(zip(terms, coefficients.tolist(), strict=True))


def non_negative(design: FloatArray, wanted: FloatArray) -> FloatArray:
    """Non-negative least squares, columns scaled to length 1; float64 (columns,)."""
    from scipy.optimize import nnls

    scale = np.maximum(np.linalg.norm(design, axis=0), 1e-12)
    found, _ = nnls(design / scale, wanted)
    coefficients: FloatArray = found / scale
    return coefficients


def _held(design: FloatArray, near: FloatArray, weight: float) -> tuple[FloatArray, FloatArray]:
    """Rows and right side of a ridge around coefficients `near` (terms,), in units of their own size."""
    n, terms = design.shape
    typical = np.sqrt((design**2).mean(axis=0))
    size = np.maximum(near, np.where(typical > 0, SMALLEST / np.maximum(typical, 1e-12), 0.0))
    size = np.where(size > 0, size, 1e-12)  # neither measured nor known: stays 0
    rows = np.diag(weight * math.sqrt(n / terms) / size)
    return rows, rows @ near


def residuals(equations: Equations, coefficients: dict[str, float]) -> FloatArray:
    """Relative errors of the law on the equations, (n,)."""
    vector = np.array([coefficients.get(term, 0.0) for term in LINEAR_TERMS])
    out: FloatArray = equations.features @ vector / equations.step_ms - 1.0
    return out


def solve_unbiased(equations: Equations, terms: Sequence[str]) -> dict[str, float]:
    """Relative least squares in which the law's own times are the scale, in three rounds.

    With the measured times as the scale, a time that is short by chance would weigh more than a long one, and
    the law would come out too fast by about the noise's squared coefficient of variation.
    """
    coefficients = solve(equations, terms)
    for _ in range(2):
        law_ms = equations.step_ms * (1.0 + residuals(equations, coefficients))
        weights = equations.weights * equations.step_ms / np.maximum(law_ms, 1e-6)
        coefficients = solve(Equations(equations.features, equations.step_ms, weights), terms)
    return coefficients


def cross_validated(equations: Equations, terms: Sequence[str]) -> float:
    """Mean relative error of the law on equations outside its fit, percent, weighted by steps."""
    fold = np.arange(len(equations.step_ms)) % FOLDS
    errors = np.zeros(len(fold))
    for k in range(FOLDS):
        out = fold == k
        kept = Equations(equations.features[~out], equations.step_ms[~out], equations.weights[~out])
        left = Equations(equations.features[out], equations.step_ms[out], equations.weights[out])
        errors[out] = np.abs(residuals(left, solve_unbiased(kept, terms)))
    return float(100 * np.average(errors, weights=equations.weights**2))
