"""Bursty arrivals have the covariance that the workload names, and its mean rates."""

from __future__ import annotations

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts
from packer.twin.arrivals import draw_times
from packer.twin.bursts import _SCORES, _factors, _interpolated, factor_path
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate((1.0, 2.0, 3.0))])


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0])
def test_the_factor_has_its_spread_and_memory(cv: float) -> None:
    """The factor has mean 1, the cv given, and scores that decay with the time scale."""
    from scipy.special import gammainc, ndtri

    path = factor_path(np.random.default_rng(0), Bursts(cv, ((10.0, 1.0),)), 1.0, 400_000)
    assert path.mean() == pytest.approx(1.0)
    assert path.std() == pytest.approx(cv, rel=0.05)
    shape = cv**-2
    kept = (path[:-10] > 1e-6) & (path[10:] > 1e-6)  # the floor hides the smallest scores
    if cv <= 1.0:
        before, after = (
            ndtri(np.clip(gammainc(shape, part[kept] * shape), 1e-9, 1 - 1e-9)) for part in (path[:-10], path[10:])
        )
        assert np.corrcoef(before, after)[0, 1] == pytest.approx(np.exp(-1.0), abs=0.02)


@pytest.mark.parametrize("cv", [0.2, 1.0, 4.0])
def test_factors_are_interpolated_as_numpy_does(cv: float) -> None:
    """The factor of a score is that of `numpy.interp`, to the last bit: on the grid, beside it and beyond it, too."""
    near = [_SCORES, np.nextafter(_SCORES, -9.0), np.nextafter(_SCORES, 9.0), [-7.0, 7.0]]
    score = np.concatenate([*near, np.random.default_rng(0).standard_normal(100_000)])
    found = _interpolated(score, *_factors(cv))
    assert np.array_equal(found, np.interp(score, _SCORES, _factors(cv)[0]))


def test_counts_are_dispersed_as_a_cox_process() -> None:
    """Var N / E N in windows much shorter than the time scale is 1 + E N × cv²."""
    bursts = Bursts(0.8, ((200.0, 1.0),))
    fleet = FLEET.with_arrivals(Arrivals("bursty", common=bursts))
    indices, means = [], []
    for seed in range(20):
        time_s, _ = draw_times(fleet, 20_000.0, seed)
        counts = np.bincount((time_s / 2.0).astype(int), minlength=10_000)
        indices.append(counts.var() / counts.mean())
        means.append(counts.mean())
    assert np.mean(means) == pytest.approx(12.0, rel=0.01)
    assert np.mean(indices) == pytest.approx(1 + 12.0 * 0.8**2, rel=0.1)


@pytest.mark.parametrize("common", [None, Bursts(0.5, ((20.0, 1.0),))])
def test_own_bursts_are_independent_between_adapters(common: Bursts | None) -> None:
    """Counts of two adapters covary by the common factor only, those of one by both."""
    fleet = FLEET.with_arrivals(Arrivals("bursty", common=common, own=Bursts(1.0, ((40.0, 1.0),))))
    within, between, rates = [], [], []
    for seed in range(30):
        time_s, adapter = draw_times(fleet, 10_000.0, seed)
        assert adapter is not None
        counts = np.array([np.bincount((time_s[adapter == k] / 4.0).astype(int), minlength=2500) for k in (1, 2)])
        mean = counts.mean(axis=1)
        within.append((counts[1].var() - mean[1]) / mean[1] ** 2)
        between.append(np.cov(counts)[0, 1] / (mean[0] * mean[1]))
        rates.append(np.bincount(adapter) / 10_000.0)
    shared = 0.0 if common is None else 0.5**2
    # A window of a tenth of the time scale sees a little less than the whole variance.
    assert np.mean(between) == pytest.approx(shared, abs=0.04)
    assert np.mean(within) == pytest.approx((1 + shared) * 2.0 - 1.0, rel=0.15)
    assert np.mean(rates, axis=0) == pytest.approx([1.0, 2.0, 3.0], rel=0.02)
