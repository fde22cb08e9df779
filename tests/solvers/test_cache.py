"""Answers remembered by content."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.bin import Bin, Evaluations
from packer.lengths import Lengths
from packer.settings import Slots
from packer.solvers.cache import CachedPredictor, content_classes
from packer.solvers.margin import MarginPredictor
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload

PROFILE = small_profile()
FLEET = Workload(
    [Adapter(f"a{i}", rank, rate) for i, (rank, rate) in enumerate([(8, 0.1), (16, 0.1), (8, 0.1), (8, 0.2)])]
)


class Counting(AnalyticPredictor):
    """Counts the bins that it was asked about, and remembers them."""

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge and note."""
        ASKED.extend(bins)
        return super().evaluate(workload, bins)


ASKED: list[Bin] = []


def test_classes_follow_rank_rate_and_lengths() -> None:
    """Adapters are one class only if rank, rate and both length distributions agree."""
    assert content_classes(FLEET).tolist() == [2, 0, 2, 1]
    long = Adapter("long", 8, 0.1, Lengths.constant(900))
    assert len(set(content_classes(Workload([*FLEET.adapters, long])).tolist())) == 4


def test_equal_contents_are_asked_once() -> None:
    """Bins of interchangeable adapters get one question and equal answers."""
    ASKED.clear()
    cached = CachedPredictor(Counting())
    found = cached.evaluate(FLEET, [Bin((0, 1), Slots(2, 16), PROFILE), Bin((1, 2), Slots(2, 16), PROFILE)])
    again = cached.evaluate(FLEET, [Bin((2, 1), Slots(2, 16), PROFILE)])
    assert len(ASKED) == cached.asked == 1
    assert cached.questions == 3
    assert found[0] == found[1] == again[0]


def test_different_contents_are_told_apart() -> None:
    """Rate, slots, slot rank and shares all change the question."""
    ASKED.clear()
    cached = CachedPredictor(Counting())
    bins = [
        Bin((0,), Slots(1, 8), PROFILE),
        Bin((3,), Slots(1, 8), PROFILE),
        Bin((0,), Slots(2, 8), PROFILE),
        Bin((0,), Slots(1, 16), PROFILE),
        Bin((0,), Slots(1, 8), PROFILE, (0.5,)),
        Bin((0,), Slots(1, 8), small_profile("other/model")),
    ]
    found = cached.evaluate(FLEET, bins)
    assert len(ASKED) == len(bins)
    plain = AnalyticPredictor().evaluate(FLEET, bins)
    np.testing.assert_array_equal(found.offered_tok_s, plain.offered_tok_s)
    np.testing.assert_array_equal(found.total_token_throughput, plain.total_token_throughput)


def test_shares_stay_with_their_adapters() -> None:
    """A reordered bin with shares is judged with each share at its own adapter."""
    cached = CachedPredictor(AnalyticPredictor())
    item = Bin((3, 0), Slots(2, 8), PROFILE, (0.25, 1.0))
    assert cached.evaluate(FLEET, [item])[0].offered_tok_s == item.offered_tok_s(FLEET)


def test_adapters_of_a_trace_are_never_interchangeable() -> None:
    """In a replayed trace every adapter has its own requests, so nothing is shared between bins."""
    ones = np.ones(4, dtype=np.int64)
    trace = RequestTrace(np.arange(4.0), np.arange(4), ones, ones)
    replayed = FLEET.with_arrivals(Arrivals("trace", trace=trace))
    assert content_classes(replayed).tolist() == [0, 1, 2, 3]
    faster = MarginPredictor(AnalyticPredictor(), 1.25).raised(replayed).arrivals.trace
    assert faster is not None
    np.testing.assert_allclose(faster.time_s, trace.time_s / 1.25)


def test_margin_raises_every_rate() -> None:
    """With a margin of 10 % a bin is judged at 1.1 times its load."""
    bins = [Bin((0, 1, 2), Slots(3, 16), PROFILE)]
    raised = MarginPredictor(AnalyticPredictor(), 1.1).evaluate(FLEET, bins)
    plain = AnalyticPredictor().evaluate(FLEET.scaled(1.1), bins)
    np.testing.assert_allclose(raised.offered_tok_s, 1.1 * bins[0].offered_tok_s(FLEET))
    np.testing.assert_array_equal(raised.mean_itl_ms, plain.mean_itl_ms)
