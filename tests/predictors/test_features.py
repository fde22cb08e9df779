"""Features of bins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from naive_predictors import NaiveServer

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import IncompatibleError
from packer.kv_shape import KvShape
from packer.lengths import Lengths
from packer.predictors.bin_table import BinTable
from packer.predictors.features import COLUMN, FEATURES, FeatureExtractor
from packer.profile import Profile
from packer.settings import Settings
from packer.twin.memory.policy import kv_cache_tokens
from packer.workload import Workload


@pytest.fixture(scope="module")
def rich(small: Profile) -> Profile:
    """The small server with a step law that uses many terms, and loads that cost time."""
    law = {
        "base_ms": 6.0,
        "per_decode_ms": 0.04,
        "per_prefill_token_ms": 0.02,
        "prefill_step_ms": 0.7,
        "first_adapter_ms": 0.5,
        "per_adapter_ms": 0.2,
        "per_rank_ms": 0.01,
        "per_slot_ms": 0.01,
        "per_kv_token_ms": 1e-4,
        "beyond_graph_step_ms": 2.0,
        "per_waiting_ms": 1e-3,
    }
    return replace(
        small,
        latency=replace(small.latency, coefficients=law),
        loading=replace(small.loading, host_base_ms=4.0, host_per_rank_ms=0.1),
    )


def _levels(n: int, rate: float) -> Workload:
    """Adapters on three levels of load that fall into different groups."""
    return Workload(
        [Adapter(f"a{i}", (8, 16, 32)[i % 3], rate * (1.0, 0.25, 0.05)[i % 3]) for i in range(n)],
        Lengths.gamma(200.0, 1.0),
        Lengths.lognormal(150.0, 0.8),
        -0.3,
    )


def test_a_bin_does_not_depend_on_the_rest_of_the_fleet(rich: Profile) -> None:
    """The features of a bin are those of a fleet that consists of it, other adapters' ranks notwithstanding."""
    whole = _levels(60, 0.3)
    chosen = tuple(range(0, 60, 3))  # the small ranks
    part = whole.subset(chosen)
    inside = FeatureExtractor(whole, rich).matrix(BinTable.of([Bin(chosen, Settings(4, 8), rich)]))
    alone = FeatureExtractor(part, rich).matrix(BinTable.of([Bin(tuple(range(20)), Settings(4, 8), rich)]))
    np.testing.assert_allclose(inside, alone, rtol=1e-12)


@pytest.mark.parametrize(
    ("n", "rate", "slots"), [(12, 0.1, 12), (60, 0.05, 64), (90, 0.2, 8), (90, 0.02, 16), (200, 0.1, 100)]
)
def test_equilibrium_agrees_with_the_oracle(rich: Profile, n: int, rate: float, slots: int) -> None:
    """Grouping adapters and the fast root search change nothing that matters."""
    fleet = _levels(n, rate)
    table = BinTable.of([Bin(tuple(range(n)), Settings(slots, 32), rich)])
    row = FeatureExtractor(fleet, rich).matrix(table)[0]
    for name, expected in NaiveServer(fleet, rich, slots, 32).features().items():
        assert row[COLUMN[name]] == pytest.approx(expected, rel=0.03), name


def test_papers_features_are_exact(small: Profile) -> None:
    """Adapters, sum and spread of rates, largest, mean and spread of ranks, and slots are what they say."""
    fleet = _levels(30, 0.1)
    picked = (3, 7, 8, 11, 29)
    row = FeatureExtractor(fleet, small).matrix(BinTable.of([Bin(picked, Settings(4, 64), small)]))[0]
    rates, ranks = fleet.rates[list(picked)], fleet.ranks[list(picked)]
    expected = {
        "adapters": 5,
        "rate_sum": rates.sum(),
        "rate_std": rates.std(),
        "rank_max": ranks.max(),
        "rank_mean": ranks.mean(),
        "rank_std": ranks.std(),
        "max_loras": 4,
        "max_lora_rank": 64,
        "largest_share": rates.max() / rates.sum(),
    }
    for name, value in expected.items():
        assert row[COLUMN[name]] == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_features_depend_on_content_not_on_company(small: Profile) -> None:
    """A bin has the same features alone, in a batch, and with its adapters in another order."""
    fleet = _levels(40, 0.1)
    bins = [Bin(tuple(range(k, 40, 3)), Settings(8, 32), small) for k in range(3)]
    extractor = FeatureExtractor(fleet, small)
    together = extractor.matrix(BinTable.of(bins))
    for k, item in enumerate(bins):
        turned = replace(item, adapters=item.adapters[::-1])
        np.testing.assert_allclose(extractor.matrix(BinTable.of([turned]))[0], together[k], rtol=1e-9)


def test_shares_scale_rates(small: Profile) -> None:
    """An adapter of which half the traffic comes here counts as one with half the rate."""
    fleet = _levels(20, 0.2)
    half = Bin(tuple(range(20)), Settings(8, 32), small, (0.5,) * 20)
    whole = Bin(tuple(range(20)), Settings(8, 32), small)
    told = FeatureExtractor(fleet, small).matrix(BinTable.of([half]))
    expected = FeatureExtractor(fleet.scaled(0.5), small).matrix(BinTable.of([whole]))
    np.testing.assert_allclose(told, expected, rtol=1e-9)


@pytest.mark.parametrize("idle", [1, 3000])
def test_idle_adapters_are_no_load(rich: Profile, idle: int) -> None:
    """Adapters of rate 0 change no feature, as they change nothing in a simulation; a bin of them alone is one of a
    single adapter with hardly a request, of the largest rank."""
    fleet = _levels(30, 0.1)
    rest = [Adapter(f"idle{k}", 8, 0.0) for k in range(idle)]
    more = replace(fleet, adapters=(*fleet.adapters, *rest, Adapter("rare", 8, 2e-9)))
    extractor = FeatureExtractor(more, rich)
    alone, beside, nothing, rare = (
        extractor.matrix(BinTable.of([Bin(tuple(held), Settings(8, 32), rich)]))[0]
        for held in (range(30), range(30 + idle), range(30, 30 + idle), [30 + idle])
    )
    np.testing.assert_allclose(beside, alone, rtol=1e-4)
    np.testing.assert_allclose(nothing, rare, rtol=1e-6, atol=0.01)


def test_features_are_finite_for_extreme_servers(small: Profile) -> None:
    """Tiny and enormous loads, one adapter, and slots that don't fit give numbers all the same."""
    for rate, factor in ((1e-7, 1e-10), (1e-7, 1.0), (1e3, 1.0)):
        fleet = _levels(3, rate).scaled(factor)
        bins = [
            Bin((0,), Settings(1, 32), small),
            Bin((0, 1, 2), Settings(1, 32), small),
            Bin((0,), Settings(100_000, 512), small),
        ]
        assert np.isfinite(FeatureExtractor(fleet, small).matrix(BinTable.of(bins))).all()


def test_load_features_rise_with_the_rate(small: Profile) -> None:
    """The load factor and the wait for slots never fall when all rates rise: monotone models rely on it."""
    rows = []
    for factor in np.geomspace(0.05, 20.0, 40):
        fleet = _levels(60, 0.1 * float(factor))
        bins = BinTable.of([Bin(tuple(range(60)), Settings(8, 32), small)])
        rows.append(FeatureExtractor(fleet, small).matrix(bins)[0])
    told = np.array(rows)
    for name in ("load_factor", "slot_wait", "batch", "backlog"):
        assert np.all(np.diff(told[:, COLUMN[name]]) >= -1e-2 * told[:-1, COLUMN[name]]), name


def test_one_table_has_one_profile(small: Profile) -> None:
    """Bins of different profiles can't share a table."""
    other = small.with_coefficients(base_ms=9.0)
    with pytest.raises(IncompatibleError, match="same profile"):
        BinTable.of([Bin((0,), Settings(1, 8), small), Bin((0,), Settings(1, 8), other)])


def test_every_feature_has_a_name_of_its_own() -> None:
    """Names identify features in files."""
    assert len(COLUMN) == len(FEATURES)


@pytest.mark.parametrize("shape", [KvShape(100, 0.8), KvShape(0, 0.0, 3000.0)])
def test_capacity_is_that_of_the_bin_s_requests(small: Profile, shape: KvShape) -> None:
    """Where layers do not keep all tokens, bins have the twin's tokens; a bin that does not start has none."""
    profile = replace(small, model=replace(small.model, kv_shape=shape))
    fleet = Workload(
        [Adapter(f"a{k}", 8, 0.1 + k, Lengths.constant(50 * (k + 1)), Lengths.constant(90)) for k in range(6)]
    )
    start = Settings(4, 8)
    bins = [Bin((0, 1), start, profile), Bin((3, 1, 5), start, profile, (0.5, 1.0, 1.0))]
    found = FeatureExtractor(fleet, profile).matrix(BinTable.of(bins))[:, COLUMN["kv_cache"]]
    served = [item.workload(fleet) for item in bins]
    assert found.tolist() == [kv_cache_tokens(profile, start, each) for each in served]
    many = Bin((0, 1), Settings(100_000, 8), profile)
    assert FeatureExtractor(fleet, profile).kv_cache_tokens(BinTable.of([many]))[0] < 0
