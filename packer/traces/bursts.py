"""How bursty a trace is: dispersion over time scales, and the random factor on the rates that explains it.

Counts N in windows of w seconds have the index of dispersion Var N / E N: 1 for Poisson arrivals at every w. A
Poisson process whose rate is multiplied by a random factor of mean 1 has counts whose covariance, divided by the
squares of their means, is that of the factor: both factors of `Arrivals` kind "bursty" are measured from it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.arrival import Arrivals, Bursts
from packer.gamma import unit_gamma
from packer.traces.trace import Trace

WINDOWS_S = (0.1, 1.0, 10.0, 60.0, 300.0)
SCALES_S = tuple(float(f"{0.1 * 3**k:.2g}") for k in range(14))
SMALLEST_CELL_S, MAX_CELLS = 0.05, 2_000_000
LONGEST_SHARE = 0.1
"""Longest time scale and lag, as a share of the trace: longer ones can't be estimated from a single realisation."""
SIGNIFICANCE = 0.999
OWN_CELL_S = 5.0
"""Own bursts of adapters are measured from this time scale on: single adapters have few requests."""
MIN_CV = 0.05
MIN_WEIGHT = 0.01


def dispersion(time_s: FloatArray, span_s: float) -> dict[float, float]:
    """Index of dispersion of the counts in windows of `WINDOWS_S`, those that fit 20 times into the trace."""
    found = {}
    for window in WINDOWS_S:
        counts = _counts(time_s, span_s, window)
        if len(counts) >= 20 and counts.any():
            found[window] = float(counts.var(ddof=1) / counts.mean())
    return found


def measure_arrivals(trace: Trace) -> Arrivals:
    """Poisson arrivals, or bursty ones where the counts are dispersed significantly more than Poisson's.

    Raises `ValidationError`: the trace names no adapters.
    """
    time_s = trace.time_s - trace.time_s[0]
    adapter = trace.requests().adapter
    if not _significant(time_s, trace.span_s):
        return Arrivals()
    cell_s = _cell_s(time_s, trace.span_s)
    lag_s, total = _covariance(_counts(time_s, trace.span_s, cell_s), cell_s)
    own = _own_bursts(trace, time_s, adapter)
    common = _fit(lag_s, total)
    if common is None and own is None:
        return Arrivals()
    return Arrivals("bursty", common=common, own=own)


def _significant(time_s: FloatArray, span_s: float) -> bool:
    """Whether some window's dispersion exceeds what Poisson arrivals have by chance."""
    from scipy.stats import chi2

    found = ((index, int(span_s // window) - 1) for window, index in dispersion(time_s, span_s).items())
    return any(index * freedom > chi2.ppf(SIGNIFICANCE, freedom) for index, freedom in found)


def _own_bursts(trace: Trace, time_s: FloatArray, adapter: IntArray) -> Bursts | None:
    """Bursts that an adapter does not share with the others.

    The covariance within adapters, pooled with the squares of their means as weights, is
    (1 + common) × (1 + own) − 1; that between adapters is the common one alone.
    """
    if len(trace.names) < 2 or trace.span_s < 100 * OWN_CELL_S:
        return None
    cell_s = max(OWN_CELL_S, trace.span_s * len(trace.names) / 50_000_000)
    cells = int(trace.span_s / cell_s)
    inside = (time_s / cell_s).astype(np.int64)
    kept = inside < cells
    counts = np.bincount(adapter[kept] * cells + inside[kept], minlength=len(trace.names) * cells)
    table = counts.reshape(len(trace.names), cells).astype(np.float64)
    means = table.mean(axis=1)
    lag_s, within = _pooled(table, cell_s)
    _, total = _covariance(table.sum(axis=0), cell_s)
    same = float((means**2).sum() / means.sum() ** 2)
    if same >= 1.0:
        return None
    between = (total - same * within) / (1.0 - same)
    # Twice the standard error of the pooled estimate under Poisson arrivals: less is chance.
    error = float(np.sqrt((means**2).sum()) / (means**2).sum() / np.sqrt(cells))
    own = (1.0 + within) / (1.0 + np.maximum(between, 0.0)) - 1.0
    return _fit(lag_s, own) if own[:4].mean() > 2.0 * error else None


def _pooled(table: FloatArray, cell_s: float) -> tuple[FloatArray, FloatArray]:
    """Lags and the pooled covariance of each row with itself, over the sum of the squared means."""
    means = table.mean(axis=1)
    lag_s, summed = np.zeros(0), np.zeros(0)
    for row, mean in zip(table, means.tolist(), strict=True):
        if mean > 0:
            lag_s, cov = _covariance(row, cell_s)
            summed = summed + cov * mean**2 if len(summed) else cov * mean**2
    pooled: FloatArray = summed / float((means**2).sum())
    return lag_s, pooled


def _covariance(counts: FloatArray, cell_s: float) -> tuple[FloatArray, FloatArray]:
    """Lags, s, and the covariance of counts at these lags over the squared mean, averaged in bands of lags."""
    n, mean = len(counts), float(counts.mean())
    spectrum = np.fft.rfft(counts - mean, 2 * n)
    lagged = np.fft.irfft(spectrum * np.conj(spectrum))[:n] / (n - np.arange(n))
    edges = np.unique(np.round(np.geomspace(1, max(3, 2 * LONGEST_SHARE * n), 40)).astype(np.int64))
    bands = list(pairwise(edges.tolist()))
    lag_s = np.array([cell_s * (a + b - 1) / 2 for a, b in bands])
    cov = np.array([lagged[a:b].mean() for a, b in bands])
    return lag_s, cov / mean**2


def _fit(lag_s: FloatArray, covariance: FloatArray) -> Bursts | None:
    """The factor with this covariance: its spread, and the weights of its time scales (least squares, >= 0)."""
    from scipy.optimize import nnls

    scales = np.array([s for s in SCALES_S if lag_s[0] <= s <= 0.5 * lag_s[-1]])
    if not len(scales):
        return None
    decay = np.exp(-lag_s[:, np.newaxis] / scales)
    logs, _ = nnls(decay, np.log1p(np.maximum(covariance, 0.0)))
    variance = float(np.expm1(logs.sum()))
    if variance < MIN_CV**2:
        return None
    cv = min(float(f"{np.sqrt(variance):.4g}"), 100.0)
    target = _score_correlation(np.maximum(covariance, 0.0), cv)
    # The last row makes the weights sum to 1.
    rows = np.vstack([decay, np.full(len(scales), 100.0)])
    weights, _ = nnls(rows, np.append(target, 100.0))
    weights[weights < MIN_WEIGHT * weights.sum()] = 0.0
    weights /= weights.sum()
    kept = [(s, round(w, 4)) for s, w in zip(scales.tolist(), weights.tolist(), strict=True) if w > 0]
    return Bursts(cv, tuple(kept))


def _score_correlation(covariance: FloatArray, cv: float) -> FloatArray:
    """Correlation of the normal scores of a gamma factor with this spread that gives each covariance.

    Cov(rho) = Σ c_n² rho^n with c_n the coefficients of the gamma quantile in Hermite polynomials (Mehler).
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / weights.sum()
    within = np.clip(nodes, -8.0, 8.0)  # beyond, the normal distribution is at 1
    values = unit_gamma(np.array([cv**-2.0]), within)[0]
    previous, current = np.zeros_like(nodes), np.ones_like(nodes)
    squares = []
    for n in range(1, 40):
        previous, current = current, (nodes * current - np.sqrt(n - 1) * previous) / np.sqrt(n)
        squares.append(float((weights * values * current).sum()) ** 2)
    rho = np.linspace(0.0, 1.0, 201)
    powers = rho[:, np.newaxis] ** np.arange(1, 40)
    table = powers @ np.array(squares)
    correlation: FloatArray = np.interp(covariance, table * (cv**2 / table[-1]), rho)
    return correlation


def _cell_s(time_s: FloatArray, span_s: float) -> float:
    """Width of the cells: not below the resolution of the recorded times."""
    gaps = np.diff(time_s)
    resolution = float(gaps[gaps > 0].min()) if (gaps > 0).any() else SMALLEST_CELL_S
    return max(SMALLEST_CELL_S, resolution, span_s / MAX_CELLS)


def _counts(time_s: FloatArray, span_s: float, window_s: float) -> FloatArray:
    """Requests in successive whole windows, float64 (windows,)."""
    n = int(span_s // window_s)
    inside = (time_s / window_s).astype(np.int64)
    return np.bincount(inside[inside < n], minlength=n).astype(np.float64)
