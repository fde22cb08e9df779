"""What each objective admits and minimises."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packer
from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import FileFormatError, IncompatibleError, UnknownNameError, ValidationError
from packer.evaluation import FIGURES, Evaluations
from packer.goal import Goal
from packer.moves import match, moved
from packer.objectives.base import Objective, load_objective
from packer.objectives.cost import Cost
from packer.objectives.headroom import Headroom
from packer.objectives.latency import Latency
from packer.objectives.moves import FewestMoves
from packer.objectives.slo import Slo
from packer.profile import Profile
from packer.settings import Settings
from packer.solvers.evaluator import Evaluator
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload

PROFILE = small_profile()
FLEET = Workload([Adapter(f"a{i}", 8, 0.1 * (i + 1)) for i in range(6)])
BINS = [
    Bin((0, 1, 2), Settings(3, 8), PROFILE),
    Bin((3, 4), Settings(2, 8), PROFILE),
    Bin((5,), Settings(1, 8), PROFILE),
]


@pytest.fixture
def evaluations() -> Evaluations:
    """The three bins, all feasible, with hand-set latencies."""
    found = AnalyticPredictor().evaluate(FLEET, BINS)
    ttft, itl = np.array([100.0, 200.0, 300.0]), np.array([10.0, 20.0, 30.0])
    return replace(found, mean_ttft_ms=ttft, mean_itl_ms=itl, p99_ttft_ms=3 * ttft)


@pytest.mark.parametrize(("spec", "admitted"), [("gpus:stable=1", [True, False, True]), ("gpus", [True, True, True])])
def test_a_growing_queue_is_refused_on_demand(evaluations: Evaluations, spec: str, admitted: list[bool]) -> None:
    """Where stable servers are demanded, one whose queue grows is not admitted."""
    growing = replace(evaluations, stable=np.array([True, False, True]))
    assert load_objective(spec).holds(growing).tolist() == admitted


def test_parameters_follow_the_name() -> None:
    """`name:key=value,…` sets the fields of the objective, numbers as numbers."""
    assert load_objective("slo:mean_ttft_ms=500,p99_itl_ms=60.5") == Slo().within(
        Goal.only({"server.mean_ttft_ms": 500, "server.p99_itl_ms": 60.5})
    )
    assert load_objective("latency:metric=ttft") == Latency(metric="ttft")


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("latencies", UnknownNameError, "Did you mean 'latency'"),
        ("slo:mean_ttft=5", ValidationError, "mean_ttft_ms"),
        ("slo:mean_ttft_ms", ValidationError, "key=value"),
        ("slo:mean_ttft_ms=soon", ValidationError, "finite number"),
        ("slo:mean_ttft_ms=-1", ValidationError, "> 0"),
        ("latency:metric=speed", ValidationError, "request, ttft, itl"),
        ("headroom:factor=0", ValidationError, "> 0"),
        ("gpus:factor=2", ValidationError, "stable"),
    ],
)
def test_wrong_specs_say_what_is_known(spec: str, error: type[Exception], says: str) -> None:
    """A wrong name, parameter or value is refused with the rule."""
    with pytest.raises(error, match=says.replace("(", r"\(")):
        load_objective(spec)


def test_latency_weighs_gpus_by_their_requests(evaluations: Evaluations) -> None:
    """The mean is over requests, the other entry is the worst GPU."""
    rates = np.array([0.6, 0.9, 0.6])
    expected = float(rates @ [100.0, 200.0, 300.0] / rates.sum())
    assert Latency("ttft").key(FLEET, BINS, evaluations) == pytest.approx((expected, 300.0))
    assert Latency("itl", "worst").key(FLEET, BINS, evaluations)[0] == 30.0


def test_latency_of_a_request_counts_every_token(evaluations: Evaluations) -> None:
    """A request takes its TTFT and one gap for each output token but the first."""
    worst, _ = Latency("request", "worst").key(FLEET, BINS, evaluations)
    assert worst == pytest.approx(300.0 + 30.0 * (FLEET.output_tokens.mean - 1))


def test_latency_of_a_dead_server_is_infinite(evaluations: Evaluations) -> None:
    """A server that does not start is worse than any that does."""
    dead = replace(evaluations, mean_itl_ms=np.array([np.nan, 1.0, 1.0]))
    assert Latency("itl").key(FLEET, BINS, dead)[0] == np.inf


@pytest.mark.parametrize("spec", ["latency", "goodput", "slo:mean_ttft_ms=500,p99_itl_ms=60"])
def test_a_server_without_requests_keeps_every_limit(evaluations: Evaluations, spec: str) -> None:
    """The twin knows no latencies of idle adapters, which is no lack of the predictor and breaks nothing."""
    none = np.full(3, np.nan)
    idle = dict.fromkeys(("mean_ttft_ms", "mean_itl_ms", "p99_itl_ms", "goodput_tok_s"), none)
    still = replace(evaluations, **idle, worst_adapter_ttft_ms=np.zeros(3), slo_used=np.zeros(3))
    assert load_objective(spec).holds(still).all()
    assert Latency().key(FLEET, BINS, still) == (0.0, 0.0)


@pytest.mark.parametrize("spec", ["latency", "latency:metric=itl", "slo:mean_itl_ms=100"])
def test_a_server_without_a_required_figure_is_not_admitted(evaluations: Evaluations, spec: str) -> None:
    """A server of unknown ITL is refused by each objective that needs the ITL, whether or not a limit is set for it."""
    unknown = replace(evaluations, mean_itl_ms=np.array([10.0, math.nan, 30.0]))
    assert load_objective(spec).holds(unknown).tolist() == [True, False, True]


@pytest.mark.parametrize("spec", ["latency", "latency:metric=itl", "latency:statistic=worst", "gpus", "goodput"])
def test_many_plans_have_the_keys_of_each_alone(evaluations: Evaluations, spec: str) -> None:
    """`keys` is `key` of each plan with its own figures, also where servers have no answers or no requests."""
    objective = load_objective(spec)
    figures = {name: np.stack([getattr(evaluations, name)] * 3) for name in FIGURES}
    figures["mean_ttft_ms"][1] = [50.0, np.nan, 70.0]
    figures["worst_adapter_ttft_ms"][2] = [0.0, 80.0, 90.0]
    plans = [BINS, BINS[::-1], [*BINS[1:], BINS[0]]]
    rows = [Evaluations(**{name: each[k] for name, each in figures.items()}) for k in range(3)]
    alone = [objective.key(FLEET, bins, row) for bins, row in zip(plans, rows, strict=True)]
    assert objective.keys(FLEET, plans, Evaluations(**figures)) == alone
    assert objective.keys(FLEET, [], Evaluations(**{name: each[:0] for name, each in figures.items()})) == []


def test_slo_keeps_every_limit(evaluations: Evaluations) -> None:
    """A bin holds only within all the limits that are given."""
    assert load_objective("slo:server.mean_ttft_ms=200").holds(evaluations).tolist() == [
        True,
        True,
        False,
    ]
    assert load_objective("slo:server.mean_ttft_ms=200,server.p99_ttft_ms=400").holds(evaluations).tolist() == [
        True,
        False,
        False,
    ]


def test_slo_refuses_a_predictor_without_the_figure(evaluations: Evaluations) -> None:
    """A limit on a figure that the predictor does not give is an error, not an infeasible plan."""
    without = replace(evaluations, p99_itl_ms=np.full(3, np.nan))
    with pytest.raises(IncompatibleError, match="p99_itl_ms"):
        load_objective("slo:server.p99_itl_ms=50").holds(without)


def test_cost_adds_prices_and_needs_them() -> None:
    """The key is the price of all GPUs; a GPU type without a price is refused by name."""
    dear = small_profile("big/test-model", 3.0)
    bins = [BINS[0], replace(BINS[1], profile=dear)]
    found = AnalyticPredictor().evaluate(FLEET, bins)
    assert Cost().key(FLEET, bins, found) == (4.0, 2.0)
    assert Cost().supports([PROFILE, dear]) is None
    assert "unpriced/test" in str(Cost().supports([small_profile("unpriced/test", None)]))


def test_a_price_of_nothing_is_a_price() -> None:
    """GPUs that one owns cost 0 per hour, which is not the same as no known price."""
    owned = small_profile("owned/test-model", 0.0)
    bins = [BINS[0], replace(BINS[1], profile=owned)]
    assert Cost().supports([PROFILE, owned]) is None
    assert Cost().key(FLEET, bins, AnalyticPredictor().evaluate(FLEET, bins)) == (1.0, 2.0)


def test_headroom_fails_a_bin_at_its_worst_load() -> None:
    """A bin that holds as it is but not with more load does not hold; figures stay those as given."""
    predictor = AnalyticPredictor(peak_tok_s=600.0)
    plain = predictor.evaluate(FLEET, BINS)
    raised = Evaluator(predictor, Headroom(factor=2.0)).evaluate(FLEET, BINS)
    assert plain.feasible.all()
    assert (raised.feasible == predictor.evaluate(FLEET.scaled(2.0), BINS).feasible).all()
    assert not raised.feasible.all()
    np.testing.assert_allclose(raised.mean_itl_ms, plain.mean_itl_ms)


def test_headroom_reads_the_hours_of_a_day(tmp_path: Path) -> None:
    """With a file of rates every column is a load of its own."""
    lines = ["adapter,night,day", *(f"a{i},0,{0.3 * (i + 1)}" for i in range(6))]
    path = tmp_path / "hours.csv"
    path.write_text("\n".join(lines))
    nominal, *loads = Headroom(factor=1.0, rates=str(path)).scenarios(FLEET)
    assert nominal.workload is FLEET
    assert [round(load.workload.rate, 3) for load in loads] == [0.0, 6.3]


def test_headroom_names_its_loads(tmp_path: Path) -> None:
    """Each load has a name for messages, with its factor unless that is 1."""
    assert [each.name for each in Headroom(factor=50.0).scenarios(FLEET)][1:] == ["at 50 times the rates"]
    path = tmp_path / "hours.csv"
    path.write_text("\n".join(["adapter,night,day", *(f"a{i},0.001,0.001" for i in range(6))]))
    assert [each.name for each in Headroom(1.0, str(path)).scenarios(FLEET)][1:] == ["at 'night'", "at 'day'"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("adapter,rank,rate\na0,8,0.5\n", "expected columns"),  # a fleet, whose ranks are no rates
        ("name,day\na0,1", "expected columns"),
        ("adapter,day\na0,x", "row 2, column 'day'"),
        ("adapter,day\na0,-1", "row 2"),
        ("adapter,day\na0,1,2", "expected 2 cells"),
        ("adapter,day\na0,1", "no rates for adapter 'a1'"),
        ("adapter,day\na0,1\na0,2", "row 3, column 'adapter': .*unique names, got 'a0'"),
        ("adapter,day\na0,1\r2\n", "row 3: expected 2 cells"),
    ],
)
def test_headroom_refuses_damaged_rates(tmp_path: Path, text: str, says: str) -> None:
    """A damaged file of rates is refused with its row and column."""
    path = tmp_path / "hours.csv"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=says):
        Headroom(rates=str(path)).scenarios(FLEET)


def test_moves_counts_adapters_that_change_servers() -> None:
    """Servers are matched so that most stay; new adapters are no moves."""
    old = [Bin((0, 1, 2), Settings(3, 8), PROFILE), Bin((3, 4), Settings(2, 8), PROFILE)]
    new = [Bin((3, 4, 0), Settings(3, 8), PROFILE), Bin((1, 2, 5), Settings(3, 8), PROFILE)]
    assert match(old, new) == {0: 1, 1: 0}
    assert moved(old, new) == [0]
    found = AnalyticPredictor().evaluate(FLEET, new)
    assert FewestMoves(tuple(old)).key(FLEET, new, found) == (2.0, 1.0)


def test_moves_never_matches_another_gpu_type() -> None:
    """An adapter on a server of another GPU type has moved, whatever the number of the server."""
    other = small_profile("other/test-model")
    old = [Bin((0, 1), Settings(2, 8), PROFILE)]
    assert moved(old, [Bin((0, 1), Settings(2, 8), other)]) == [0, 1]
    assert FewestMoves().supports([PROFILE]) is not None


def test_slo_without_limits_keeps_those_of_the_adapters(evaluations: Evaluations) -> None:
    """A bin holds while no adapter uses more than all of its own limits."""
    found = replace(evaluations, slo_used=np.array([0.4, 1.0, 1.2]))
    assert Slo().holds(found).tolist() == [True, True, False]
    with pytest.raises(IncompatibleError, match="slo_used"):
        Slo().holds(evaluations)


def test_goodput_is_what_counts_most(evaluations: Evaluations) -> None:
    """More goodput is better; of equal goodput, the plan whose worst GPU uses less of its limits."""
    better = replace(evaluations, goodput_tok_s=np.array([5.0, 5.0, 5.0]), slo_used=np.array([0.1, 0.2, 0.9]))
    worse = replace(better, goodput_tok_s=np.array([5.0, 5.0, 4.9]), slo_used=np.zeros(3))
    equal = replace(better, slo_used=np.array([0.1, 0.2, np.inf]))
    keys = [load_objective("goodput").key(FLEET, BINS, each) for each in (better, equal, worse)]
    assert keys == sorted(keys)
    assert keys[0] == (-15.0, 0.9)


@pytest.mark.parametrize(
    ("spec", "absent"),
    [
        ("latency", "mean_itl_ms"),
        ("latency:metric=ttft", "mean_ttft_ms"),
        ("latency:metric=itl", "mean_itl_ms"),
        ("goodput", "goodput_tok_s"),
    ],
)
def test_a_figure_that_the_predictor_does_not_give_is_named(evaluations: Evaluations, spec: str, absent: str) -> None:
    """What an objective minimises has to be predicted, as its limits have to be: else every plan is as good."""
    unknown = replace(evaluations, **{absent: np.full(3, np.nan)})
    with pytest.raises(IncompatibleError, match=f"gives no {absent}"):
        load_objective(spec).holds(unknown)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_a_weight_that_no_server_has_is_refused_by_name(weight: float) -> None:
    """Bounds are sums of weights: with such a one a plan would have no bound, or its solver would be blamed."""

    class Weighs(Objective):
        """Every server has the weight."""

        name = "weighs"

        def weight(self, profile: Profile) -> float:
            """The same of each profile."""
            return weight

    with pytest.raises(ValidationError, match="weight of test-gpu/test-model by the objective 'weighs'"):
        packer.solve(FLEET, PROFILE, Weighs(), predictor=AnalyticPredictor(), verify=False)
