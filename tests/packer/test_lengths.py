"""Distributions of token lengths."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import ValidationError
from packer.gamma import unit_gamma
from packer.lengths import Lengths, each_at_normal, expected_of, length_moments

N = 40_000
means = st.floats(min_value=20.0, max_value=5000.0)
cvs = st.floats(min_value=0.05, max_value=2.0)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(["gamma", "lognormal"]), mean=means, cv=cvs, seed=st.integers(0, 2**32 - 1))
def test_samples_have_the_true_mean(kind: str, mean: float, cv: float, seed: int) -> None:
    """Rounding and the lower bound of one token move the mean by less than a token; the rest is chance."""
    lengths = getattr(Lengths, kind)(mean, cv)
    sample = lengths.sample(np.random.default_rng(seed), N)
    chance = 6.0 * mean * cv * (1.0 + cv) / math.sqrt(N)
    assert abs(sample.mean() - mean) < 0.75 + chance
    assert sample.min() >= 1
    assert sample.dtype == np.int64


@pytest.mark.parametrize("kind", ["gamma", "lognormal"])
@pytest.mark.parametrize("cv", [0.1, 0.5, 1.1])
def test_samples_have_the_true_cv(kind: str, cv: float) -> None:
    """The spread of a large sample is the one given."""
    sample = getattr(Lengths, kind)(500.0, cv).sample(np.random.default_rng(0), 400_000)
    assert sample.std() / sample.mean() == pytest.approx(cv, rel=0.03)


def test_gamma_inverts_its_distribution_function() -> None:
    """At each score the lookup table gives the length whose gamma probability is the score's."""
    from scipy.special import gammainc, ndtr

    z = np.linspace(-4.0, 4.0, 101)
    for cv in (0.3, 1.0, 2.0):
        found = Lengths.gamma(300.0, cv).quantile_at_normal(z)
        assert gammainc(1 / cv**2, found / (300.0 * cv**2)) == pytest.approx(ndtr(z), rel=2e-3, abs=1e-9)


@pytest.mark.parametrize("tables", [1, 2, 512])
def test_mixed_lengths_are_those_of_each_distribution(tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of many distributions, drawn at once in blocks of tables, are what each gives at its scores."""
    monkeypatch.setattr("packer.lengths._TABLES", tables)
    rng = np.random.default_rng(0)
    lengths = [
        Lengths.constant(7),
        Lengths.gamma(300.0, 0.7),
        Lengths.gamma(90.0, 0.7, low=20, high=200),
        Lengths.gamma(300.0, 1.4),
        Lengths.lognormal(300.0, 1.3),
        Lengths.empirical([1, 5, 9, 70.5]),
        Lengths.empirical([4.0, 4.0]),
    ]
    which, z = rng.integers(0, len(lengths), 2000), 1.5 * rng.standard_normal(2000)
    drawn = each_at_normal(lengths, which, z)
    for k, each in enumerate(lengths):
        assert drawn[which == k].tolist() == each.at_normal(z[which == k]).tolist()


def test_tables_of_many_distributions_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log gives each adapter its own spread: a table for each alone took most of the time of a plan."""
    calls: list[int] = []
    monkeypatch.setattr("packer.lengths._GAMMA", {})
    monkeypatch.setattr("packer.lengths._TABLES", 4)
    monkeypatch.setattr(
        "packer.lengths.unit_gamma", lambda shapes, z: (calls.append(len(shapes)), unit_gamma(shapes, z))[1]
    )
    lengths = [Lengths.constant(3), *(Lengths.gamma(100.0, 0.5 + 0.1 * k) for k in range(8))]
    for _ in range(2):  # kept, too
        each_at_normal(lengths, np.arange(9), np.zeros(9))
    assert calls == [3, 4, 1]
    monkeypatch.setattr("packer.lengths._KEPT", 8)
    tracemalloc.start()
    each_at_normal([Lengths.gamma(100.0, 0.5 + 0.001 * k) for k in range(200)], np.arange(200), np.zeros(200))
    assert tracemalloc.get_traced_memory()[1] < 150 * 8 * 4097, "tables that were dropped are not kept elsewhere"
    tracemalloc.stop()
    calls.clear()
    expected_of([Lengths.gamma(100.0, 0.51 + 0.1 * k) for k in range(8)])
    assert calls == [4, 4]


@given(sample=st.lists(st.integers(1, 10_000), min_size=1, max_size=50))
def test_empirical_stays_within_its_sample(sample: list[int]) -> None:
    """Quantiles of a sample never leave its range, and grow with the score."""
    lengths = Lengths.empirical(sample)
    drawn = lengths.quantile_at_normal(np.linspace(-6, 6, 41))
    assert drawn.min() >= min(sample) - 1e-9
    assert drawn.max() <= max(sample) + 1e-9
    assert np.all(np.diff(drawn) >= -1e-9)
    assert lengths.mean == pytest.approx(np.mean(sample))


def test_empirical_keeps_its_sample() -> None:
    """Only values of the sample are drawn, each as often as the others, so the mean is the sample's."""
    sample = [100.0] * 19 + [5000.0]
    lengths = Lengths.empirical(sample)
    drawn = lengths.sample(np.random.default_rng(0), 200_000)
    assert set(drawn.tolist()) == {100, 5000}
    assert drawn.mean() == pytest.approx(345.0, rel=0.02)
    assert length_moments(lengths) == pytest.approx((345.0, np.square(sample).mean()))
    assert length_moments(Lengths.empirical(sample, high=400))[0] == pytest.approx(115.0)


@given(mean=means, cv=cvs, factor=st.floats(0.1, 10.0))
def test_scaled_keeps_the_shape(mean: float, cv: float, factor: float) -> None:
    """Scaling the mean scales every quantile by the same factor."""
    z = np.array([-1.0, 0.0, 2.0])
    for lengths in (Lengths.gamma(mean, cv), Lengths.lognormal(mean, cv)):
        scaled = lengths.scaled(mean * factor)
        assert scaled.cv == lengths.cv
        assert scaled.quantile_at_normal(z) == pytest.approx(factor * lengths.quantile_at_normal(z), rel=1e-6)


@given(low=st.integers(1, 100), width=st.integers(0, 400), seed=st.integers(0, 99))
def test_bounds_hold(low: int, width: int, seed: int) -> None:
    """Samples never leave [low, high]."""
    sample = Lengths.gamma(200.0, 1.5, low=low, high=low + width).sample(np.random.default_rng(seed), 500)
    assert low <= sample.min() <= sample.max() <= low + width


def test_same_seed_same_sample() -> None:
    """A sample depends on the generator alone."""
    first, second = (Lengths.gamma(223.0, 1.1).sample(np.random.default_rng(7), 100) for _ in range(2))
    assert np.array_equal(first, second)
    assert np.all(Lengths.constant(12.4).sample(np.random.default_rng(0), 5) == 12)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Lengths.constant(0.0),
        lambda: Lengths.constant(math.nan),
        lambda: Lengths.gamma(-1.0, 1.0),
        lambda: Lengths.gamma(10.0, -1.0),
        lambda: Lengths.gamma(10.0, 1e9),
        lambda: Lengths.gamma(10.0, 1e-300),
        lambda: Lengths.gamma(10.0, 1.0, low=2**70),
        lambda: Lengths.gamma(10.0, 1.0, high=2**62),
        lambda: Lengths.empirical([2.0**62]),
        lambda: Lengths.gamma(10.0, 1.0, low=0),
        lambda: Lengths.gamma(10.0, 1.0, low=10, high=9),
        lambda: Lengths.empirical([]),
        lambda: Lengths.empirical(["a"]),
        lambda: Lengths.empirical([1.0, math.inf]),
        lambda: Lengths.empirical([0.0]),
        lambda: Lengths("empirical", 10.0),
        lambda: Lengths("normal", 10.0),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused(build: object) -> None:
    """Every broken rule is a ValidationError at construction, not a surprise when sampling."""
    with pytest.raises(ValidationError):
        build()  # type: ignore[operator]


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths.lognormal(2000, 2.0, high=2048),
        Lengths.gamma(4, 1.5),
        Lengths.constant(100.4),
        Lengths.gamma(300, 1, low=200),
    ],
)
def test_the_expected_length_is_that_of_samples(lengths: Lengths) -> None:
    """Clipping and rounding count in the expected length, from which offered load is computed."""
    sample = lengths.sample(np.random.default_rng(0), 400_000)
    assert lengths.expected == pytest.approx(sample.mean(), rel=0.01)
    assert Lengths.gamma(223.0, 1.1).expected == 223.0
