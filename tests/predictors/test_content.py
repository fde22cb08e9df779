"""Bins of equal content are evaluated once and get equal figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.lengths import Lengths
from packer.predictors.content import ContentCache, content_classes
from packer.settings import Settings
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload

PROFILE = small_profile()
FLEET = Workload(
    [Adapter(f"a{i}", rank, rate) for i, (rank, rate) in enumerate([(8, 0.1), (16, 0.1), (8, 0.1), (8, 0.2)])]
)


@pytest.fixture
def evaluated() -> list[tuple[Bin, float]]:
    """What reached the function behind the cache."""
    return []


@pytest.fixture
def cache(evaluated: list[tuple[Bin, float]]) -> ContentCache:
    """A cache around the analytic predictor that notes what it evaluates."""

    def evaluate(workload: Workload, bins: Sequence[Bin], factors: npt.NDArray[np.float64]) -> Evaluations:
        pairs = list(zip(bins, factors.tolist(), strict=True))
        evaluated.extend(pairs)
        rows = [AnalyticPredictor().evaluate(workload.scaled(factor), [item])[0] for item, factor in pairs]
        return Evaluations.of(rows)

    return ContentCache(evaluate)


def test_classes_follow_rank_rate_and_lengths() -> None:
    """Adapters are one class only if rank, rate and both length distributions agree."""
    assert content_classes(FLEET).tolist() == [2, 0, 2, 1]
    long = Adapter("long", 8, 0.1, Lengths.constant(900))
    assert len(set(content_classes(Workload([*FLEET.adapters, long])).tolist())) == 4


def test_equal_contents_are_evaluated_once(cache: ContentCache, evaluated: list[tuple[Bin, float]]) -> None:
    """Bins of interchangeable adapters take one evaluation and get equal figures."""
    found = cache.evaluate(FLEET, [Bin((0, 1), Settings(2, 16), PROFILE), Bin((1, 2), Settings(2, 16), PROFILE)])
    again = cache.evaluate(FLEET, [Bin((2, 1), Settings(2, 16), PROFILE)])
    assert len(evaluated) == cache.evaluated == 1
    assert cache.requested == 3
    assert found[0] == found[1] == again[0]


def test_different_contents_are_told_apart(cache: ContentCache, evaluated: list[tuple[Bin, float]]) -> None:
    """Rate, slots, slot rank, shares, profile and the factor of the rates all make another content."""
    bins = [
        Bin((0,), Settings(1, 8), PROFILE),
        Bin((3,), Settings(1, 8), PROFILE),
        Bin((0,), Settings(2, 8), PROFILE),
        Bin((0,), Settings(1, 16), PROFILE),
        Bin((0,), Settings(1, 8), PROFILE, (0.5,)),
        Bin((0,), Settings(1, 8), small_profile("other/model")),
    ]
    found = cache.evaluate(FLEET, bins)
    assert len(evaluated) == len(bins)
    plain = AnalyticPredictor().evaluate(FLEET, bins)
    np.testing.assert_array_equal(found.offered_tok_s, plain.offered_tok_s)
    np.testing.assert_array_equal(found.total_token_throughput, plain.total_token_throughput)
    cache.evaluate(FLEET, bins, 1.5)
    assert len(evaluated) == 2 * len(bins)


def test_shares_stay_with_their_adapters(cache: ContentCache) -> None:
    """A reordered bin with shares is evaluated with each share at its own adapter."""
    item = Bin((3, 0), Settings(2, 8), PROFILE, (0.25, 1.0))
    assert cache.evaluate(FLEET, [item])[0].offered_tok_s == item.offered_tok_s(FLEET)


def test_adapters_of_a_trace_are_never_interchangeable() -> None:
    """In a replayed trace every adapter has its own requests, so nothing is shared between bins."""
    ones = np.ones(4, dtype=np.int64)
    trace = RequestTrace(np.arange(4.0), np.arange(4), ones, ones)
    replayed = FLEET.with_arrivals(Arrivals("trace", trace=trace))
    assert content_classes(replayed).tolist() == [0, 1, 2, 3]


def test_a_fleet_that_is_dropped_takes_its_figures_along(
    cache: ContentCache, evaluated: list[tuple[Bin, float]]
) -> None:
    """Figures of a fleet are never returned for another one, however many fleets come and go."""
    item = Bin((0,), Settings(1, 8), PROFILE)
    for k in range(40):
        fleet = Workload([Adapter("a", 8, 0.1 * (k + 1))])
        assert cache.evaluate(fleet, [item])[0].offered_tok_s == item.offered_tok_s(fleet)
    assert len(evaluated) == 40


def test_equal_adapters_of_two_models_are_two_classes() -> None:
    """A server has one base model: the bin that stands for a content must not mix two."""
    fleet = Workload([Adapter("a", 8, 1.0, model="llama"), Adapter("b", 8, 1.0, model="qwen")])
    assert len(set(content_classes(fleet).tolist())) == 2
