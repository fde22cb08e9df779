"""Bins as arrays are the bins that they stand for, however their runs overlap."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import IncompatibleError
from packer.predictors.api import load_predictor
from packer.predictors.bin_table import BinTable
from packer.profile import Profile
from packer.testing.analytic import AnalyticPredictor
from packer.workload import Workload


def fleet() -> Workload:
    """Adapters of several ranks and rates."""
    rng = np.random.default_rng(8)
    ranks, rates = rng.choice([8, 16, 32], 90), rng.choice([0.02, 0.4, 2.0], 90)
    return Workload([Adapter(f"a{i}", int(ranks[i]), float(rates[i])) for i in range(90)])


def bins_of(profile: Profile) -> list[Bin]:
    """The first adapters of a list, more and fewer; the same ones with several slots; with and without shares."""
    order = tuple(np.random.default_rng(1).permutation(90).tolist())
    growing = [Bin(order[:n], profile.settings(min(16, n), 32), profile) for n in (3, 30, 31, 80, 12)]
    slots = [growing[1].with_slots(n) for n in (8, 16, 30)]
    parts = [replace(growing[0], shares=(0.5, 1.0, 0.1)), replace(growing[0], shares=(0.5, 1.0, 0.2))]
    return [*growing, *slots, *parts, parts[1].with_slots(1)]


def runs(bins: list[Bin], profile: Profile) -> BinTable:
    """The first five bins as runs of one list."""
    longest = np.array(max((item.adapters for item in bins[:5]), key=len))
    sizes = np.array([len(item.adapters) for item in bins[:5]])
    slots = np.array([item.max_loras for item in bins[:5]], dtype=np.float64)
    ranks = np.full(5, 32.0)
    return BinTable(profile, np.zeros_like(sizes), sizes, longest, np.ones(len(longest)), slots, ranks)


def test_a_table_holds_the_bins_that_it_was_made_of(profile: Profile) -> None:
    """Adapters, shares and settings come back, and a table of a table is itself."""
    bins = bins_of(profile)
    table = BinTable.of(bins)
    assert list(table) == bins
    assert list(runs(bins, profile)) == bins[:5]
    assert BinTable.of(table) is table
    assert len(table.adapters) < sum(len(item.adapters) for item in bins)  # several slots: one run


@pytest.mark.parametrize("kind", ["tree", "boosting"])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_what_bins_have_in_common_changes_no_figure(kind: str, factor: float, profile: Profile) -> None:
    """Bit by bit, a bin among others that hold the same adapters has the figures that it has alone."""
    predictor, workload, bins = load_predictor(kind, profile), fleet(), bins_of(profile)
    scaled = workload.scaled(factor)
    alone = [predictor.evaluate(scaled, [item])[0] for item in bins]
    assert list(predictor.evaluate(scaled, bins)) == alone
    assert list(predictor.evaluate(scaled, bins[::-1])) == alone[::-1]
    assert list(predictor.evaluate(scaled, runs(bins, profile))) == alone[:5]


def test_factors_belong_to_bins(profile: Profile) -> None:
    """Two bins of the same adapters at other rates share nothing."""
    predictor, workload = load_predictor("tree", profile), fleet()
    item = Bin(tuple(range(60)), profile.settings(16, 32), profile)
    factors = np.array([0.5, 2.0, 0.5])
    found = predictor.evaluate(workload, [item] * 3, factors)  # type: ignore[call-arg]
    np.testing.assert_allclose(found.offered_tok_s, workload.subset(range(60)).offered_tok_s * factors)
    assert found[0] == found[2]
    assert found[0].mean_itl_ms < found[1].mean_itl_ms


def test_predictors_that_know_no_tables_read_their_bins(profile: Profile) -> None:
    """A table is a sequence of bins for any predictor."""
    bins = bins_of(profile)
    predictor = AnalyticPredictor()
    given, as_arrays = (predictor.evaluate(fleet(), each) for each in (bins, BinTable.of(bins)))
    for column in fields(given):
        np.testing.assert_array_equal(getattr(given, column.name), getattr(as_arrays, column.name))


def test_profiles_that_differ_in_their_name_alone_share_a_table(profile: Profile) -> None:
    """What a server costs or is called changes no figure; what it does, does."""
    item = Bin((0,), profile.settings(1, 8), profile)
    renamed = replace(item, profile=replace(profile, name="the same"))
    assert len(BinTable.of([item, renamed])) == 2
    slower = profile.with_coefficients(base_ms=99.0)
    with pytest.raises(IncompatibleError, match="same profile"):
        BinTable.of([item, replace(item, profile=slower)])
