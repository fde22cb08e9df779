"""Quantiles of gamma distributions for many shapes at once, without SciPy: its import takes longer than a plan."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from packer.arrays import FloatArray

Z_MAX = 8.0  # Largest absolute standard-normal score.
SHAPES = (0.1, 1e4)
"""Shapes in this range use a Chebyshev series of `NODES` terms: the error is at most 3e-8, usually 1e-12, and the sums
converge. For other shapes SciPy is used."""
NODES = 96
CLOSE = 1e-5  # Halley's method stops after a step below this: what remains is about the cube of the step.
_ANGLES = (np.arange(NODES) + 0.5) * (np.pi / NODES)


def unit_gamma(shapes: FloatArray, z: FloatArray) -> FloatArray:
    """Quantiles of gamma distributions with mean 1, float64 (k, n), for shapes (k,) at standard-normal scores (n,). The
    quantiles of a shape do not depend on the other shapes, not even in the last bit."""
    out = np.empty((len(shapes), len(z)))
    usual = (shapes >= SHAPES[0]) & (shapes <= SHAPES[1])
    for k in np.flatnonzero(~usual).tolist():
        from scipy.special import gammaincinv, ndtr

        out[k] = gammaincinv(shapes[k], ndtr(z)) / shapes[k]
    if usual.any():
        logs = _log_quantiles(shapes[usual, None], Z_MAX * np.cos(_ANGLES))
        terms = np.cos(np.arange(NODES)[:, None] * _ANGLES) * (2.0 / NODES)
        terms[0] /= 2.0
        at = np.clip(z / Z_MAX, -1.0, 1.0)
        waves = np.ones((NODES, len(z)))
        waves[1] = at
        for k in range(2, NODES):
            waves[k] = 2.0 * at * waves[k - 1] - waves[k - 2]
        for k, row in zip(np.flatnonzero(usual).tolist(), logs, strict=True):
            out[k] = np.exp((terms @ row) @ waves)
    return out


def gamma_covariances(cv: float) -> tuple[FloatArray, FloatArray]:
    """Correlations of normal scores, 0 to 1, and for each the covariance of a gamma factor with this `cv`. Cov(rho) = Σ
    c_n² rho^n with c_n the coefficients of the gamma quantile in Hermite polynomials (Mehler)."""
    nodes, weights = _hermite()
    within = np.clip(nodes, -8.0, 8.0)  # beyond 8, the normal distribution function is 1
    values = unit_gamma(np.array([cv**-2.0]), within)[0]
    previous, current = np.zeros_like(nodes), np.ones_like(nodes)
    squares = []
    for n in range(1, 40):
        previous, current = current, (nodes * current - np.sqrt(n - 1) * previous) / np.sqrt(n)
        squares.append(float((weights * values * current).sum()) ** 2)
    rho = np.linspace(0.0, 1.0, 201)
    powers = rho[:, np.newaxis] ** np.arange(1, 40)
    table = powers @ np.array(squares)
    return rho, table * (cv**2 / table[-1])


@cache
def _hermite() -> tuple[FloatArray, FloatArray]:
    """Nodes and weights by which a function's values add up to its mean over a standard-normal variable."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    return nodes, weights / weights.sum()


def normal_tail(z: FloatArray) -> FloatArray:
    """Probability that a standard-normal variable exceeds each score, float64 (n,)."""
    return np.array([0.5 * math.erfc(each) for each in (z / math.sqrt(2.0)).tolist()])


def _log_quantiles(shapes: FloatArray, z: FloatArray) -> FloatArray:
    """Logarithms of the quantiles, float64 (k, n), for shapes (k, 1) at scores (n,), by Halley's method. The logarithm
    of the smaller tail is a concave function of the logarithm of the quantile."""
    below, tail = z < 0.0, normal_tail(np.abs(z))
    one = np.array([[math.lgamma(each + 1.0)] for each in shapes[:, 0].tolist()])
    cube = 1.0 - 1.0 / (9.0 * shapes) + z / (3.0 * np.sqrt(shapes))  # Wilson and Hilferty, 1931
    first = (np.log(np.where(below, tail, 1.0 - tail)) + one) / shapes  # where x is small
    found = np.where(cube > 0.3, np.log(shapes) + 3.0 * np.log(np.maximum(cube, 0.3)), first)
    far = np.ones(shapes.shape, dtype=bool)  # shapes, (k, 1)
    while far.any():
        x = np.exp(found)
        density = np.exp(shapes * found - x - one) * shapes  # of log x
        small = x < shapes + 1.0
        shape = np.broadcast_to(shapes, x.shape)
        part = np.empty(x.shape)
        part[small] = _series(shape[small], x[small])
        part[~small] = _fraction(shape[~small], x[~small])
        part *= density
        part = np.where(small == below, part, 1.0 - part)
        slope = np.where(below, density, -density) / part
        step = np.log(tail / part) / slope
        step /= 1.0 + 0.5 * step * (shapes - x - slope)
        found = np.where(far, found + step, found)
        far &= np.abs(step).max(axis=1, keepdims=True) > CLOSE
    return found - np.log(shapes)


def _series(shape: FloatArray, x: FloatArray) -> FloatArray:
    """P(X < x) for x < shape + 1, divided by the density of log x (Numerical Recipes, section 6.2)."""
    total = term = 1.0 / shape
    while x.size and term.max() > 1e-17 * total.min():
        shape = shape + 1.0
        term = term * (x / shape)
        total = total + term
    return total


def _fraction(shape: FloatArray, x: FloatArray) -> FloatArray:
    """P(X > x) for x >= shape + 1, divided by the density of log x, by Lentz's method (same section)."""
    b = x + 1.0 - shape
    total = d = 1.0 / b
    c, change, i = np.full(x.shape, 1e300), d + 2.0, 0.0
    while (change != 1.0).any():
        i += 1.0
        b = b + 2.0
        d = 1.0 / (i * (shape - i) * d + b)
        c = b + i * (shape - i) / c
        change = np.where(np.abs(c * d - 1.0) < 2e-15, 1.0, c * d)
        total = total * change
    return total
