"""The evaluator: scenarios, margin and one predictor for each profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import IncompatibleError, PluginError, ValidationError
from packer.evaluation import Evaluations
from packer.io.profiles import load_profile
from packer.objectives.base import Objective, Scenario, load_objective
from packer.predictors.api import load_predictor
from packer.predictors.auto import AutoPredictor
from packer.predictors.content import Factors
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.settings import Settings
from packer.solvers.evaluator import Evaluator, margins_for, rate_margin_for
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.twin.margin import DEFAULT_CONFIDENCE, UNCALIBRATED_MARGIN, error_key, rate_margin
from packer.workload import Workload

PROFILE = small_profile()
FLEET = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate((0.1, 0.1, 0.1, 0.2))])
BINS = [Bin((0, 1, 2), Settings(3, 16), PROFILE), Bin((3,), Settings(1, 8), PROFILE)]


@dataclass(frozen=True)
class Rush(Objective):
    """Fewest GPUs that hold when every rate is multiplied."""

    factor: float = 3.0
    name = "rush"

    def scenarios(self, workload: Workload) -> Sequence[Scenario]:
        """The rates as given, and the rush."""
        return (Scenario(workload), Scenario(workload, self.factor, "in the rush"))


def test_the_margin_raises_every_rate() -> None:
    """With a margin of 10 % bins are evaluated at 1.1 times their load."""
    raised = Evaluator(AnalyticPredictor(), margin=0.1).evaluate(FLEET, BINS)
    plain = AnalyticPredictor().evaluate(FLEET.scaled(1.1), BINS)
    np.testing.assert_allclose(raised.offered_tok_s, 1.1 * np.array([b.offered_tok_s(FLEET) for b in BINS]))
    np.testing.assert_array_equal(raised.mean_itl_ms, plain.mean_itl_ms)


@pytest.mark.parametrize(("over", "holds"), [(1.015, True), (1.03, False)])
def test_bins_that_hold_with_the_margin_hold_without_it_too(over: float, holds: bool) -> None:
    """A search refuses a bin that chance lets break its limit at the rates as given, which the report would show."""

    class Slower(TwinPredictor):
        def evaluate(self, workload: Workload, bins: Sequence[Bin], factors: Factors = 1.0) -> Evaluations:
            found = super().evaluate(workload, bins, factors)
            return replace(found, mean_itl_ms=np.full(len(bins), 50.0 * (over if np.all(factors == 1.0) else 0.9)))

    goal = load_objective("slo:server.mean_itl_ms=50")
    evaluator = Evaluator(Slower(), goal, 0.05)
    assert goal.holds(evaluator.judged(FLEET, BINS)).tolist() == [holds, holds]
    assert evaluator.holds(FLEET, BINS).tolist() == [holds, holds]


def test_a_bin_is_as_good_as_in_its_worst_scenario() -> None:
    """It starves if it starves in one scenario; its other figures are those of the first."""
    predictor = AnalyticPredictor(300.0)
    found = Evaluator(predictor, Rush()).evaluate(FLEET, BINS)
    plain, rush = predictor.evaluate(FLEET, BINS), predictor.evaluate(FLEET.scaled(3.0), BINS)
    assert plain.feasible.all()
    assert not rush.feasible.all()
    np.testing.assert_array_equal(found.feasible, rush.feasible)
    np.testing.assert_array_equal(found.mean_ttft_ms, plain.mean_ttft_ms)


def test_a_report_has_nominal_figures_and_the_worst_status() -> None:
    """Figures are those at the rates as given; a bin that starves with the margin counts as starved."""
    predictor = AnalyticPredictor(300.0)
    found = Evaluator(predictor, margin=2.0).report(FLEET, BINS)
    np.testing.assert_array_equal(found.offered_tok_s, predictor.evaluate(FLEET, BINS).offered_tok_s)
    np.testing.assert_array_equal(found.feasible, predictor.evaluate(FLEET.scaled(3.0), BINS).feasible)


def test_every_profile_has_its_predictor() -> None:
    """Bins of several GPU types keep their order, each evaluated by the predictor of its own profile."""
    other = small_profile("other/model")
    mixed = [BINS[0], Bin((3,), Settings(1, 8), other), BINS[1]]
    weak, strong = AnalyticPredictor(200.0), AnalyticPredictor(4000.0)
    found = Evaluator({PROFILE: weak, other: strong}).evaluate(FLEET, mixed)
    expected = [(strong if b.profile == other else weak).evaluate(FLEET, [b])[0] for b in mixed]
    assert list(found) == expected
    stranger = Bin((3,), Settings(1, 8), small_profile("third/model"))
    with pytest.raises(KeyError):  # not a table that lacks a row
        Evaluator({PROFILE: weak, other: strong}).evaluate(FLEET, [*mixed, stranger])


@pytest.mark.parametrize("name", ["tree", "twin"])
def test_a_factor_is_the_same_as_a_scaled_fleet(name: str, profile: Profile) -> None:
    """Predictors that scale rates bin by bin give the figures of the scaled fleet."""
    predictor = load_predictor(name, profile)
    bins = [Bin((0, 1, 2), Settings(3, 8), profile), Bin((3,), Settings(1, 8), profile)]
    found = Evaluator(predictor).scaled(FLEET, bins, np.array([2.0, 3.0]))
    for k, factor in enumerate((2.0, 3.0)):
        expected = predictor.evaluate(FLEET.scaled(factor), [bins[k]])[0]
        assert found[k].total_token_throughput == pytest.approx(expected.total_token_throughput)
        assert found[k].mean_ttft_ms == pytest.approx(expected.mean_ttft_ms)


def test_limits_of_latency_are_confirmed_by_the_twin(profile: Profile) -> None:
    """Trees are sure that an idle server does not starve, which says nothing of its p99 TTFT: the twin gives that."""
    auto = AutoPredictor.for_profile(profile)
    bins = [Bin((0, 1, 2), Settings(3, 8), profile)]
    expected = TwinPredictor().evaluate(FLEET, bins).p99_ttft_ms
    plain = Evaluator(auto)
    limited = plain.of(load_objective("slo:server.p99_ttft_ms=500.0"))
    assert limited.judged(FLEET, bins).p99_ttft_ms == expected
    assert limited.report(FLEET, bins).p99_ttft_ms == expected
    assert plain.judged(FLEET, bins).p99_ttft_ms != expected
    assert limited.evaluate(FLEET, bins).p99_ttft_ms != expected  # searches stay with the trees


def test_a_margin_can_be_raised_without_new_predictors() -> None:
    """A raised evaluator shares what was stored, and the first keeps its own margin."""
    twin = TwinPredictor(workers=1)
    first = Evaluator(twin)
    raised = first.with_more_margin(0.5)
    bins = [Bin((0, 1), Settings(2, 8), load_profile("h100-64gb/llama-3.1-8b-instruct"))]
    first.evaluate(FLEET, bins)
    raised.evaluate(FLEET, bins)
    raised.report(FLEET, bins)
    assert (first.largest_margin(), raised.largest_margin(), twin.simulated) == (0.0, 0.5, 2)


def test_the_hours_of_a_twin_for_several_kinds_count_once() -> None:
    """A search without a time limit ends after counted work: an hour is no more work if one twin judges two kinds."""
    first, twin = load_profile("h100-64gb/llama-3.1-8b-instruct"), TwinPredictor(workers=1)
    kinds = (first, load_profile("h100-64gb/qwen-2.5-7b-instruct"))
    one, two = Evaluator(twin), Evaluator(dict.fromkeys(kinds, twin))
    for each, slots in ((one, 2), (two, 3)):
        each.evaluate(FLEET, [Bin((0, 1), Settings(slots, 8), first)])
    assert two.work.done_s == one.work.done_s


@dataclass(frozen=True)
class Faulty(AnalyticPredictor):
    """A predictor of another package with a defect."""

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """A row too many for two bins, an error for more."""
        if len(bins) > 2:
            raise KeyError("boom")
        return super().evaluate(workload, [*bins, bins[0]])


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        (BINS, "Expected 2 rows from the predictor 'analytic', got 3"),
        ([*BINS, Bin((0,), Settings(1, 8), PROFILE)], "The predictor 'analytic' raised KeyError: 'boom'"),
    ],
)
def test_a_defect_of_a_predictor_names_it(bins: list[Bin], message: str) -> None:
    """What a predictor of another package does wrong is said as such, not as a defect of packer."""
    with pytest.raises(PluginError, match=message):
        Evaluator(Faulty()).evaluate(FLEET, bins)


def test_the_margin_comes_from_the_profile_unless_given() -> None:
    """A profile's errors set the margin, one without gets the fixed one, and a given one wins."""
    errors = {error_key(0.5): 0.0, error_key(0.95): 0.04, error_key(0.99): 0.08}
    calibrated = replace(PROFILE, errors=errors, calibrated=True)
    assert rate_margin_for(calibrated) == rate_margin(calibrated, DEFAULT_CONFIDENCE) == pytest.approx(0.04)
    assert rate_margin_for(calibrated, confidence=0.99) == pytest.approx(0.08)
    assert rate_margin_for(PROFILE) == UNCALIBRATED_MARGIN
    assert rate_margin_for(calibrated, margin=0.0) == 0.0
    with pytest.raises(ValidationError, match="both"):
        rate_margin_for(calibrated, confidence=0.9, margin=0.1)
    with pytest.raises(IncompatibleError, match="margin"):
        rate_margin_for(PROFILE, confidence=0.9)


def test_each_kind_of_server_needs_a_margin() -> None:
    """Margins by kind of server name all kinds; the message names those without."""
    other = small_profile("other/m", 2.0)
    assert margins_for([PROFILE, other], margin={PROFILE: 0.1, other: 0.2}) == {PROFILE: 0.1, other: 0.2}
    with pytest.raises(ValidationError, match="a margin for each kind of server, got none for other/m"):
        margins_for([PROFILE, other], margin={PROFILE: 0.1})
