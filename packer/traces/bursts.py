"""Measure how bursty a trace is: dispersion over time scales, and the random factors on rates that explain it.

Counts N in windows of w seconds have the index of dispersion Var N / E N, which is 1 for Poisson arrivals at every w.
If a random factor of mean 1 multiplies the rate of a Poisson process, the covariance of its counts, divided by their
squared mean, is the covariance of the factor. Both factors of `Arrivals` kind "bursty" are measured in this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from packer.arrays import FloatArray, IntArray, distinct
from packer.arrival import Arrivals, Bursts
from packer.gamma import gamma_covariances
from packer.times import HOUR_S
from packer.traces.burst_fit import MIN_CV, fitted, polynomials
from packer.traces.pattern import WHOLE_FROM, busiest_requests, gap_of, rates_of
from packer.traces.trace import Trace
from packer.traces.trend import flattened

WINDOWS_S = (0.1, 1.0, 10.0, 60.0, 300.0)
MOST_WINDOWS = 20_000_000  # Widths with more windows in a trace are skipped; three weeks have about as many of 0.1 s.
SMALLEST_CELL_S, MAX_CELLS = 0.05, 2_000_000
LONGEST_SHARE = 0.1  # Longest time scale and lag, as a share of the trace: one realisation does not show longer ones.
FEWEST_CELLS = 10  # Smallest number of cells of a window for which covariances are estimated.
SIGNIFICANCE = 0.999
OWN_CELL_S = 5.0  # Shortest time scale of adapters' own bursts, s: one adapter has too few requests for less.
CLUMPED = 0.1  # Share of the covariances, over all lags, from which requests that come in one cell are bursts.
TREND_DEGREE = 2  # Degree of the polynomial for the trend inside a window: rise, peak or fall of a day's traffic.


def measure_arrivals(trace: Trace, window_s: float | None = None) -> Arrivals:
    """Bursty arrivals if the counts are dispersed significantly more than Poisson counts, else Poisson arrivals.

    `window_s`: measure bursts within windows of this length, relative to the rate of each window, so that a plan for
    the rates of one window does not count the difference between windows twice. The trend inside each window is
    removed, because a day's ramp is not a burst, nor is a load that has few levels (`flattened`), and time
    scales above a tenth of the window are left out. A trace without a whole window by the clock counts in its busiest
    window alone, or is one window if it is shorter. None: relative to the mean rate of the whole trace. A long trace
    then has bursts within hours and a slow factor, fitted separately: in a joint fit, the course of a day hides short
    bursts. Raises `ValidationError`: the trace names no adapters.
    """
    within_s = window_s or HOUR_S
    trace = flattened(trace, window_s) if window_s else trace
    # With `window_s`, one whole window is enough; the slow factor needs at least two.
    several = _shown(trace, within_s)[1] >= (within_s if window_s else 2.0 * within_s)
    if window_s and not several and trace.span_s > window_s:
        trace = busiest_requests(trace, rates_of(trace, window_s))
    common, own = _factors(trace, within_s if several else trace.span_s, TREND_DEGREE)
    if window_s is None and several:
        slow = _factors(trace, trace.span_s, 0, (common, own))
        common, own = _product(common, slow[0]), _product(own, slow[1])
    return Arrivals() if common is None and own is None else Arrivals("bursty", common=common, own=own)


def bursts_within(arrivals: Arrivals, window_s: float) -> Arrivals:
    """The bursts that remain within windows of this length if the rate of each window is known.

    Let M be the mean of the factor F given its slow time scales. Then Var F = Var M + E Var(F | M), and the factor
    relative to M has the variance (1 + Var F) / (1 + Var M) − 1. Var M is the covariance of the gamma factor at the
    correlation of the slow scales (Mehler, as in `gamma_covariances`).
    """
    if arrivals.kind != "bursty":
        return arrivals
    common, own = (_within(bursts, window_s) for bursts in (arrivals.common, arrivals.own))
    if common is None and own is None:
        return Arrivals().following(arrivals.trend)
    return replace(arrivals, common=common, own=own)


def _within(bursts: Bursts | None, window_s: float) -> Bursts | None:
    """One factor without the time scales above a tenth of the window; the inverse of `_product`."""
    if bursts is None:
        return None
    fast = [(scale_s, weight) for scale_s, weight in bursts.scales if scale_s <= LONGEST_SHARE * window_s]
    kept = sum(weight for _, weight in fast)
    if len(fast) == len(bursts.scales):
        return bursts
    rho, covariance = gamma_covariances(bursts.cv)
    slow = float(np.interp(1.0 - kept, rho, covariance))
    variance = (1.0 + bursts.cv**2) / (1.0 + slow) - 1.0
    if not fast or variance < MIN_CV**2:
        return None
    weights = [round(weight / kept, 4) for _, weight in fast]
    # The sum stays 1 despite rounding.
    weights[0] += 1.0 - sum(weights)
    scales = tuple((scale_s, weight) for (scale_s, _), weight in zip(fast, weights, strict=True))
    return Bursts(float(f"{np.sqrt(variance):.4g}"), scales)


def _product(fast: Bursts | None, slow: Bursts | None) -> Bursts | None:
    """The gamma factor whose slow scales have the variance of `slow`, and which otherwise varies like `fast`."""
    if fast is None or slow is None:
        return fast or slow
    cv = min(float(f"{np.sqrt((1.0 + fast.cv**2) * (1.0 + slow.cv**2) - 1.0):.4g}"), 100.0)
    rho, covariance = gamma_covariances(cv)
    share = float(np.interp(slow.cv**2, covariance, rho))
    own, other = dict(fast.scales), dict(slow.scales)
    weight = {s: round((1.0 - share) * own.get(s, 0.0) + share * other.get(s, 0.0), 6) for s in own | other}
    return Bursts(cv, tuple(each for each in weight.items() if each[1] > 0))


def _factors(
    trace: Trace, window_s: float, degree: int, fast: tuple[Bursts | None, Bursts | None] | None = None
) -> tuple[Bursts | None, Bursts | None]:
    """The common and the own factor within windows; with `fast` factors, the slower factors that explain the rest.
    Several windows start at multiples of their length, as in `packer.traces.pattern.rates_of`."""
    if not trace.span_s:
        return None, None
    time_s, adapter = trace.time_s - trace.time_s[0], trace.owner
    skipped_s, span_s = _shown(trace, window_s) if trace.span_s > window_s else (0.0, trace.span_s)
    whole = np.flatnonzero(time_s >= skipped_s)
    time_s, adapter = time_s[whole] - skipped_s, adapter[whole]
    inside = _in_traffic(time_s, window_s)
    time_s, adapter = time_s[inside], adapter[inside]
    if not _significant(time_s, span_s, window_s, degree):
        return None, None
    gaps = np.diff(time_s)  # cells are at least as wide as the resolution of the recorded times
    resolution = float(gaps[gaps > 0].min()) if (gaps > 0).any() else SMALLEST_CELL_S
    cell_s = max(SMALLEST_CELL_S, resolution, span_s / MAX_CELLS, trace.step_s)
    counts = _counts(time_s, span_s, cell_s)
    size = _row_cells(len(counts), cell_s, window_s)
    if size < FEWEST_CELLS:
        return None, None
    lag_s, total, _ = _pooled([_rows(counts, size)], size, cell_s, degree)
    # Requests that come regularly, as those of timers do, meet at times without a burst: their sum is far below 0.
    clumped = -total[0] * cell_s < total @ np.gradient(lag_s) < total[0] * cell_s / CLUMPED
    from_s, fast = (0.0, (None, None)) if fast is None else (LONGEST_SHARE * HOUR_S, fast)
    found = _own_covariance(len(trace.names), span_s, (time_s, adapter), window_s, degree)
    own = None
    if found is not None:
        own_lag_s, seen, same, length_s = found
        own = fitted(own_lag_s, _beside(seen, _covariance(fast[1], own_lag_s)), length_s, degree, from_s)
        # The total has the covariance of the common factor and, weighted by shares, that of the own factors.
        known = np.interp(lag_s, own_lag_s, seen)
        if own is not None:  # extrapolate to lags below the first
            known *= _covariance(own, np.minimum(lag_s, own_lag_s[0])) / _covariance(own, own_lag_s[:1])
        total = _beside(total, same * known)
    total = _beside(total, _covariance(fast[0], lag_s))
    common = fitted(lag_s[1:], total[1:], size * cell_s, degree, from_s)
    if clumped and not from_s:
        # Of pairs that are up to a cell and a half apart, a third are in one cell; only these have more bursts.
        near_s, more = np.append(0.75 * cell_s, lag_s[2:]), _beside(total, _covariance(common, lag_s))[0] / 3.0
        at_once = fitted(near_s, np.where(near_s < cell_s, more, 0.0), size * cell_s, degree)
        common = _product(at_once, common)
    return common, own


def _in_traffic(time_s: FloatArray, window_s: float) -> IntArray:
    """Rows of the requests outside windows in which traffic begins after a silent window, or ends before one, as where
    a service closes at night: a step is no burst. All rows if only the last window, perhaps a part, has others."""
    window = (time_s // window_s).astype(np.int64)
    number = np.bincount(window)
    used = np.flatnonzero(number)
    edges = np.searchsorted(window, used), np.searchsorted(window, used, "right") - 1
    head, tail = time_s[edges[0]] / window_s - used, used + 1 - time_s[edges[1]] / window_s
    silent = np.diff(used, prepend=0) > 1, np.diff(used, append=used[-1:] + 1) > 1
    # The chance that none of the window's requests falls into a part of it.
    chance = [(1.0 - part) ** number[used] for part in (head, tail)]
    step = np.any([near & (each < 1.0 - SIGNIFICANCE) for near, each in zip(silent, chance, strict=True)], axis=0)
    return np.flatnonzero(~np.isin(window, used[step])) if not step[:-1].all() else np.arange(len(time_s))


def _shown(trace: Trace, window_s: float) -> tuple[float, float]:
    """Time from the first request to the start of a window, s, and the length of what the trace shows from there on. A
    window at either end is whole if the trace lacks a few gaps between requests or a thousandth of it: a log from 10:00
    to 12:00 has its first request later and its last one earlier. The time is below 0 then."""
    near_s = min(max(window_s / 1000.0, 3.0 * gap_of(trace)), (1.0 - WHOLE_FROM) * window_s)
    late_s = float((trace.start_s + trace.time_s[0]) % window_s)
    skipped_s = -late_s if late_s <= near_s else window_s - late_s
    length_s = trace.span_s - skipped_s
    if -length_s % window_s <= near_s:
        length_s = window_s * (round(length_s / window_s) + 1e-6)  # more, so that rounding takes no cell away
    return skipped_s, length_s


def _covariance(bursts: Bursts | None, lag_s: FloatArray) -> FloatArray:
    """Autocovariance of a factor at these lags; 0 for None."""
    if bursts is None:
        return np.zeros(len(lag_s))
    scales, weights = np.array(bursts.scales).T
    rho, table = gamma_covariances(bursts.cv)
    found: FloatArray = np.interp(np.exp(-lag_s[:, np.newaxis] / scales) @ weights, rho, table)
    return found


def _beside(covariance: FloatArray, known: FloatArray) -> FloatArray:
    """Covariance of one of two independent factors with mean 1, from those of their product and of the `known` one."""
    return (1.0 + covariance) / (1.0 + np.maximum(known, -0.5)) - 1.0


def _significant(time_s: FloatArray, span_s: float, within_s: float, degree: int) -> bool:
    """Whether the counts in windows of some width vary significantly more than Poisson counts."""
    from scipy.stats import chi2

    for width_s in (each for each in WINDOWS_S if span_s <= MOST_WINDOWS * each):
        n, cells, counts = _filled(time_s, span_s, width_s)
        size = _row_cells(n, width_s, within_s)
        cells, counts = cells[cells < n // size * size], counts[cells < n // size * size]
        if n < 20 or within_s < 20 * width_s or not len(counts):
            continue
        rows, row = np.unique(cells // size, return_inverse=True)
        # Squared residuals of the fitted polynomial: squared counts minus its squared coefficients.
        squares = np.bincount(row, counts**2)
        for each in polynomials(cells % size, size, degree):
            squares -= np.bincount(row, counts * each) ** 2
        freedom = len(rows) * (size - 1 - degree)
        if float((squares / (np.bincount(row, counts) / size)).sum()) > chi2.ppf(SIGNIFICANCE, freedom):
            return True
    return False


def _own_covariance(
    adapters: int, span_s: float, requests: tuple[FloatArray, IntArray], window_s: float, degree: int
) -> tuple[FloatArray, FloatArray, float, float] | None:
    """Own bursts of adapters: lags, s; covariances at the lags; Σ (an adapter's share of requests)²; length of the
    windows, s. None: the covariances are not significant, or there is too little data.

    The covariance within adapters, pooled with the squares of their means as weights, is
    (1 + common) × (1 + own) − 1; the covariance between adapters is the common one.
    """
    time_s, adapter = requests
    if adapters < 2 or window_s < 100 * OWN_CELL_S:
        return None
    cell_s = max(OWN_CELL_S, span_s * adapters / 50_000_000, span_s / MAX_CELLS)
    cells = int(span_s / cell_s)
    inside = (time_s / cell_s).astype(np.int64)
    size, most = _row_cells(cells, cell_s, window_s), max(1, MAX_CELLS // cells)

    def rows() -> Iterator[FloatArray]:
        for first in range(0, adapters, most):  # in parts, which bounds the memory
            n = min(most, adapters - first)
            kept = (inside < cells) & (adapter >= first) & (adapter < first + n)
            counts = np.bincount((adapter[kept] - first) * cells + inside[kept], minlength=n * cells)
            yield _rows(counts.reshape(n, cells).astype(np.float64), size)

    summed = np.bincount(inside[inside < cells], minlength=cells).astype(np.float64)
    lag_s, within, squares = _pooled(rows(), size, cell_s, degree)
    _, total, all_squares = _pooled([_rows(summed, size)], size, cell_s, degree)
    same = squares / all_squares
    if same >= 1.0:
        return None
    # The total is the mean of both, with weights `same` and 1 − `same`.
    between = (total - same * within) / (1.0 - same)
    # Significant: above twice the standard error that the pooled estimate has under Poisson arrivals.
    error = 1.0 / np.sqrt(squares * size)
    own = _beside(within, between)[1:]
    return (lag_s[1:], own, same, size * cell_s) if own[:4].mean() > 2.0 * error else None


def _row_cells(cells: int, cell_s: float, window_s: float) -> int:
    return min(max(int(window_s / cell_s), 1), max(cells, 1))


def _rows(counts: FloatArray, size: int) -> FloatArray:
    """Counts in cells, float64 (…, cells), as rows of whole windows, float64 (rows, size)."""
    return counts[..., : counts.shape[-1] // size * size].reshape(-1, size)


def _pooled(parts: Iterable[FloatArray], n: int, cell_s: float, degree: int) -> tuple[FloatArray, FloatArray, float]:
    """Lags, s; autocovariance of rows at these lags, summed over rows, / sum of their squared means; and this sum.
    `parts`: parts of the rows, float64 (rows, n) each. Trends of this degree are removed. Covariances are means over
    bands; the first is that of requests in one cell, which are a third of it apart on average."""
    from scipy.fft import next_fast_len

    edges = distinct(np.round(np.geomspace(1, max(3, 2 * LONGEST_SHARE * n), 40)).astype(np.int64))
    bands = [(0, 1), *pairwise(edges.tolist())]
    lag_s = np.array([cell_s / 3.0] + [cell_s * (a + b - 1) / 2 for a, b in bands[1:]])
    longest = min(int(edges[-1]), n)
    squares, lagged, most = 0.0, np.zeros(longest), max(1, MAX_CELLS // n)
    # Zeros at the end, so that no lag that is needed wraps around.
    padded = next_fast_len(n + longest, real=True)
    basis, _ = np.linalg.qr(np.vander(np.linspace(-1.0, 1.0, n), degree + 1))
    for part in parts:
        rows = part[part.any(axis=1)]
        squares += float((rows.mean(axis=1) ** 2).sum())
        lagged[0] -= rows.sum() * (1.0 - (degree + 1) / n)  # the Poisson noise of the counts
        for begin in range(0, len(rows), most):  # in parts, which bounds the memory
            some = rows[begin : begin + most]
            spectrum = np.fft.rfft(some - (some @ basis) @ basis.T, padded)
            lagged += np.fft.irfft((spectrum * np.conj(spectrum)).sum(axis=0), padded)[:longest]
    # A row has n − k pairs of cells at lag k.
    lagged /= n - np.arange(longest)
    return lag_s, np.array([lagged[a:b].mean() for a, b in bands]) / squares, squares


def _filled(time_s: FloatArray, span_s: float, window_s: float) -> tuple[int, IntArray, FloatArray]:
    """Number of whole windows; ascending indices of windows with requests; number of requests in each of these."""
    n = int(span_s // window_s)
    inside = (time_s / window_s).astype(np.int64)
    inside = inside[inside < n]
    first = np.flatnonzero(np.diff(inside, prepend=-1))  # times ascend
    return n, inside[first], np.diff(first, append=len(inside)).astype(np.float64)


def _counts(time_s: FloatArray, span_s: float, window_s: float) -> FloatArray:
    """Number of requests in each whole window, float64 (windows,)."""
    n, cells, counts = _filled(time_s, span_s, window_s)
    every = np.zeros(n)
    every[cells] = counts
    return every
