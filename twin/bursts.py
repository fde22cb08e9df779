"""Arrivals whose rates vary at random: a Cox process with a gamma-distributed factor.

A Poisson process of constant rate becomes one of varying rate by a change of time: its points are mapped through the
inverse of the integrated factor. The factor is the gamma quantile of a Gaussian process that sums Ornstein–Uhlenbeck
processes, one for each time scale. It is divided by its mean over the run, whose mean rates are the workload's.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.arrival import Arrivals, Bursts
from packer.gamma import unit_gamma
from packer.twin.flags import ENGINE_FLAGS

CELLS_PER_SCALE = 4.0  # Cells of the time grid per shortest time scale.
MAX_CELLS = 4_000_000
MAX_OWN_CELLS = 20_000_000
_SCORES = np.linspace(-6.0, 6.0, 2001)


def factor_path(rng: np.random.Generator, bursts: Bursts, step_s: float, cells: int) -> FloatArray:
    """Draw the factor in `cells` steps of `step_s` seconds, float64 (cells,), with mean 1."""
    score = np.zeros(cells)
    for time_s, weight in bursts.scales:
        keep = float(np.exp(-step_s / time_s))
        shocks = rng.standard_normal(cells)
        # The first value is drawn from the stationary distribution, so all values have variance 1.
        shocks[1:] *= np.sqrt(1.0 - keep * keep)
        _relax(shocks, keep)
        score += np.sqrt(weight) * shocks
    factor = _interpolated(score, *_factors(bursts.cv))
    # The floor keeps the integral increasing where the factor is 0 for a while.
    factor = np.maximum(factor, 1e-9)
    mean_one: FloatArray = factor / factor.mean()
    return mean_one


@lru_cache(maxsize=64)
def _factors(cv: float) -> tuple[FloatArray, FloatArray]:
    """Return the quantiles of a gamma distribution with mean 1 at `_SCORES`, and the slopes between these."""
    factors: FloatArray = unit_gamma(np.array([cv**-2.0]), _SCORES)[0]
    return factors, np.append(np.diff(factors) / np.diff(_SCORES), 0.0)


def _interpolated(score: FloatArray, factors: FloatArray, slopes: FloatArray) -> FloatArray:
    """Return `np.interp(score, _SCORES, factors)`, to the last bit, in half the time: the grid is uniform."""
    at = np.clip(score, _SCORES[0], _SCORES[-1])
    left = ((at - _SCORES[0]) * ((_SCORES.size - 1) / (_SCORES[-1] - _SCORES[0]))).astype(np.int64)
    left -= at < _SCORES[left]  # rounding may lead to the next cell
    left += at >= _SCORES[np.minimum(left + 1, _SCORES.size - 1)]
    left = np.minimum(left, _SCORES.size - 1)
    between: FloatArray = slopes[left] * (at - _SCORES[left]) + factors[left]
    return between


@njit(**ENGINE_FLAGS)
def _relax(values: FloatArray, keep: float) -> None:
    """Turn shocks, float64 (n,), into the process x(i) = keep · x(i − 1) + shock(i), in place."""
    for i in range(1, values.size):
        values[i] += keep * values[i - 1]


def in_bursts(clock: tuple[FloatArray, FloatArray], time_s: FloatArray, duration_s: float) -> FloatArray:
    """Move sorted times of a Poisson process in [0, duration_s[ into bursts, float64 (n,); `clock`: `integrated`."""
    edges, reached = clock
    return _below(np.interp(time_s, reached, edges), duration_s)


def own_streams(
    rng: np.random.Generator, shocks: np.random.Generator, arrivals: Arrivals, rates: FloatArray, duration_s: float
) -> tuple[FloatArray, IntArray]:
    """Draw times and adapters where each adapter has its own bursts, and shares the common ones if there are any. An
    adapter's own factor multiplies the common one: its time is changed twice."""
    own = arrivals.own
    assert own is not None
    edges = reached = None
    if arrivals.common is not None:
        edges, reached = integrated(shocks, arrivals.common, duration_s)
    counts = rng.poisson(rates * duration_s)
    times = []
    for count in counts.tolist():
        points = np.sort(rng.uniform(0.0, duration_s, count))
        own_edges, own_reached = integrated(shocks, own, duration_s, max(64, MAX_OWN_CELLS // len(rates)))
        if edges is not None and reached is not None:
            # The own factor runs in real time and weighs the cells of the common one.
            weighed = np.diff(np.interp(edges, own_edges, own_reached)) * np.diff(reached) / np.diff(edges)
            total = np.concatenate(([0.0], np.cumsum(weighed)))
            points = np.interp(points, total * (duration_s / total[-1]), edges)
        else:
            points = np.interp(points, own_reached, own_edges)
        times.append(points)
    time_s = np.concatenate(times)
    adapter = np.repeat(np.arange(len(rates)), counts)
    order = np.argsort(time_s, kind="stable")
    return _below(time_s[order], duration_s), adapter[order]


def integrated(
    rng: np.random.Generator, bursts: Bursts, duration_s: float, most: int = MAX_CELLS
) -> tuple[FloatArray, FloatArray]:
    """Return the edges of the time grid and the integral of the factor up to each, float64 (cells + 1,), s."""
    shortest = min(time_s for time_s, _ in bursts.scales)
    cells = int(min(max(np.ceil(duration_s * CELLS_PER_SCALE / shortest), 64), most))
    edges = np.linspace(0.0, duration_s, cells + 1)
    reached = np.concatenate(([0.0], np.cumsum(factor_path(rng, bursts, duration_s / cells, cells))))
    return edges, reached * (duration_s / reached[-1])


def _below(time_s: FloatArray, duration_s: float) -> FloatArray:
    """Keep times below the end of the run, which rounding may reach."""
    return np.minimum(time_s, np.nextafter(duration_s, 0.0))
