"""The compiled evaluation of trees gives the figures of the plain one."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.lengths import Lengths
from packer.predictors.api import load_predictor
from packer.predictors.bin_table import BinTable
from packer.predictors.learned import LearnedPredictor
from packer.predictors.trees_kernel import evaluate_bins
from packer.profile import Profile
from packer.workload import Workload


def fleet() -> Workload:
    """Adapters of several ranks, rates and lengths."""
    rng = np.random.default_rng(3)
    adapters = [Adapter(f"a{i}", int(rng.choice([8, 16, 32])), float(rng.choice([0.05, 0.4, 2.0]))) for i in range(60)]
    return Workload([*adapters, Adapter("long", 8, 0.1, Lengths.constant(900))])


def bins_of(profile: Profile) -> list[Bin]:
    """Feasible, starved and failing bins, some with shares."""
    bins = [Bin(tuple(range(n)), profile.settings(slots, 32), profile) for n in (1, 8, 40, 61) for slots in (1, 8, 300)]
    bins.append(Bin((0, 3, 60), profile.settings(3, 32), profile, (0.5, 1.0, 0.25)))
    bins.append(Bin((0, 1), profile.settings(5000, 512), profile))
    return bins


@pytest.mark.parametrize("kind", ["tree", "boosting", "forest"])
def test_python_gives_the_same_bits_before_the_kernel_is_compiled(
    kind: str, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every figure of every family, bit by bit."""
    predictor = load_predictor(kind, profile)
    assert isinstance(predictor, LearnedPredictor)
    workload, bins = fleet(), bins_of(profile)
    factors = np.linspace(0.5, 2.5, len(bins))
    compiled = predictor.evaluate_checked(workload, bins, factors)

    def run(*arguments: object, short: bool) -> None:
        evaluate_bins.as_python(*arguments)

    monkeypatch.setattr("packer.predictors.learned.evaluate_bins", run)
    plain = predictor.evaluate_checked(workload, bins, factors)
    for column in fields(compiled[0]):
        np.testing.assert_array_equal(getattr(plain[0], column.name), getattr(compiled[0], column.name))
    np.testing.assert_array_equal(plain[1], compiled[1])


@pytest.mark.parametrize("kind", ["tree", "boosting", "forest"])
def test_the_kernel_agrees_with_features_and_walks(kind: str, profile: Profile) -> None:
    """With shares and scaled rates, every figure is the same."""
    predictor = load_predictor(kind, profile)
    assert isinstance(predictor, LearnedPredictor)
    workload = fleet()
    bins = bins_of(profile)
    factors = np.linspace(0.5, 2.5, len(bins))
    table = BinTable.of(bins)
    extractor = predictor.extractor(workload)
    kv_tokens = extractor.kv_cache_tokens(table)
    features = extractor.matrix(table, factors)
    offered = np.array([b.offered_tok_s(workload) for b in bins]) * factors
    expected = predictor.evaluate_features(features, kv_tokens, offered)
    found, outside = predictor.evaluate_checked(workload, bins, factors)
    assert expected.starved.any()
    assert not expected.starved.all()
    assert expected.memory_error.sum() >= 1
    for column in fields(found):
        np.testing.assert_allclose(
            getattr(found, column.name), getattr(expected, column.name), rtol=1e-9, err_msg=column.name
        )
    np.testing.assert_array_equal(outside, predictor.outside(features).any(axis=1))
