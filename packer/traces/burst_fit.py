"""Fit a random factor on rates, its cv and time scales, to a measured covariance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.arrival import Bursts
from packer.gamma import gamma_covariances

SCALES_S = tuple(float(f"{0.1 * 3**k:.2g}") for k in range(14))
MIN_CV = 0.05
MIN_WEIGHT = 0.01
GRID = 300  # Number of cells of a window for computing how much of bursts is lost when the trend is removed.
SMALL_VARIANCE = 0.1  # Least scale of relative errors, as a share of the largest variance: less is noise.


def fitted(
    lag_s: FloatArray, covariance: FloatArray, window_s: float, degree: int, from_s: float = 0.0
) -> Bursts | None:
    """The factor with this covariance, measured after trends of this degree were removed; None: no bursts.

    The variances of the factor's means over windows of each length are fitted by nonnegative least squares on relative
    errors, because queues depend on these variances. A fit lag by lag would be poor for bursts of minutes, whose
    covariance is small and lasts long.
    """
    scales = np.array([s for s in SCALES_S if max(lag_s[0], from_s) <= s <= 0.5 * lag_s[-1]])
    over = _over_windows(lag_s)
    if not len(scales) or (over @ covariance).max() <= 0.0:
        return None
    parts = _weights(over @ _left_of(scales, lag_s, window_s, degree), over @ covariance)
    if parts.sum() < MIN_CV**2:
        return None
    cv = min(float(f"{np.sqrt(parts.sum()):.4g}"), 100.0)
    decay = np.exp(-lag_s[:, np.newaxis] / scales)
    whole = np.maximum(decay @ parts, 1e-12)  # before trends were removed
    rho, table = gamma_covariances(cv)
    # Weights add up in the correlation, not in the covariance: convert at each lag.
    slope = whole / np.interp(whole, table, rho)
    weights = _weights(over @ (decay * slope[:, np.newaxis]), over @ whole, total=1.0)
    weights[weights < MIN_WEIGHT * weights.sum()] = 0.0
    weights /= weights.sum()
    kept = [(s, round(w, 4)) for s, w in zip(scales.tolist(), weights.tolist(), strict=True) if w > 0]
    return Bursts(cv, tuple(kept))


def _weights(columns: FloatArray, wanted: FloatArray, total: float = 0.0) -> FloatArray:
    """Weights >= 0 of columns that fit `wanted` with the least squared relative errors; `total` > 0: their sum."""
    from scipy.optimize import nnls

    share = 1.0 / np.maximum(wanted, SMALL_VARIANCE * wanted.max())
    # A heavy last equation holds the sum near `total`; it is empty if that is 0.
    rows = np.vstack([columns * share[:, np.newaxis], np.full(columns.shape[1], 100.0 * total)])
    found: FloatArray = nnls(rows, np.append(wanted * share, 100.0 * total))[0]
    return found


def _over_windows(lag_s: FloatArray) -> FloatArray:
    """Weights by which covariances at lags sum to the variance of the mean over a window, float64 (windows, lags). The
    variance over w seconds is 2 / w² ∫ (w − t) Cov(t) dt; each lag represents the lags nearest to it."""
    edges = np.concatenate(([0.0], (lag_s[1:] + lag_s[:-1]) / 2.0, lag_s[-1:]))
    width = edges[1:, np.newaxis]
    until = np.minimum(edges, width)
    parts: FloatArray = np.diff(until * (width - until / 2.0)) * 2.0 / width**2
    return parts


def _left_of(scales: FloatArray, lag_s: FloatArray, window_s: float, degree: int) -> FloatArray:
    """Part of the correlation exp(−t / scale) at lags that is left after trends are removed, float64 (lags, scales). A
    polynomial absorbs part of every burst: within an hour, a third of the variance of a burst that lasts minutes. The
    part absorbed at a lag is the mean over all pairs of the window's `GRID` cells at this distance."""
    step_s = window_s / GRID
    apart = np.arange(GRID)
    basis = np.column_stack(list(polynomials(apart, GRID, degree)))
    left: FloatArray = np.exp(-lag_s[:, np.newaxis] / scales)
    for column, scale_s in zip(left.T, scales.tolist(), strict=True):
        u = step_s / scale_s  # correlations are those of means over cells
        mean = np.exp(-np.maximum(apart - 1, 0) * u) * (-np.expm1(-u) / u) ** 2
        mean[0] = 2.0 / u + 2.0 * np.expm1(-u) / u**2
        onto = mean[np.abs(apart[:, np.newaxis] - apart)] @ basis
        rest = onto - basis @ (basis.T @ onto)
        # The part taken is P W + W P - P W P, with P = basis @ basis.T and the correlations W of the cells.
        each = (
            np.correlate(b, w, "full") + np.correlate(r, b, "full")
            for b, w, r in zip(basis.T, onto.T, rest.T, strict=True)
        )
        taken = (np.sum(list(each), axis=0)[GRID - 1 :] / (GRID - apart))[: GRID // 2]
        column -= np.interp(lag_s, step_s * apart[: GRID // 2], taken)
    return left


def polynomials(place: IntArray, size: int, degree: int) -> Iterator[FloatArray]:
    """Orthonormal polynomials on 0 … size − 1, up to degree 0 or 2, evaluated at `place` (Gram's polynomials)."""
    x, n = place - (size - 1) / 2.0, float(size)
    second = (n**2 - 1.0) / 12.0  # the mean of x²; the mean of x⁴ is (n² − 1)(3 n² − 7) / 240
    yield np.full(len(x), n**-0.5)
    if degree:
        yield x / np.sqrt(n * second)
        yield (x**2 - second) / np.sqrt(n * (second * (3.0 * n**2 - 7.0) / 20.0 - second**2))
