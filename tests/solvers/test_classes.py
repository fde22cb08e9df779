"""Class aggregation: counts and names, rounding and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monotone import MonotonePredictor

from packer.adapter import Adapter
from packer.arrays import FloatArray
from packer.bin import Bin
from packer.errors import ValidationError
from packer.evaluation import Evaluations
from packer.goal import Goal
from packer.lengths import Lengths
from packer.plan import Status
from packer.planning.solve import solve
from packer.solvers import classes
from packer.solvers.classes import aggregate
from packer.testing.analytic import random_fleet, small_profile
from packer.workload import Workload


def test_equal_adapters_share_a_class() -> None:
    """Rank, rate and lengths make a class; the name does not."""
    own = Lengths.constant(100.0)
    fleet = Workload([Adapter("a", 8, 0.1), Adapter("b", 8, 0.1), Adapter("c", 16, 0.1), Adapter("d", 8, 0.1, own)])
    classes = aggregate(fleet)
    assert sorted(classes.demand.tolist()) == [1, 1, 2]
    assert classes.loss == 0.0
    assert classes.fleet is fleet


def test_counts_become_disjoint_names_and_back() -> None:
    """Assigning patterns uses each adapter once, and counting the bins gives the patterns again."""
    classes = aggregate(random_fleet(40, seed=1))
    first = classes.demand // 3
    patterns = [first, classes.demand - first]
    sets = classes.assign(patterns)
    assert sorted(i for each in sets for i in each) == list(range(40))
    for pattern, each in zip(patterns, sets, strict=True):
        assert classes.counts(each).tolist() == pattern.tolist()


def test_names_of_counts_keep_adapters_at_home() -> None:
    """Of equal adapters those that belong to a set are taken first, and every adapter is placed once."""
    classes = aggregate(Workload([Adapter(f"a{i}", 8, 1.0) for i in range(6)]))
    sets = classes.assign([np.array([3]), np.array([3])], {4: 0, 5: 0, 0: 1})
    assert {4, 5} <= set(sets[0])
    assert 0 in sets[1]
    assert sorted(sum(sets, ())) == list(range(6))


def test_adapters_stay_where_they_belong_as_far_as_the_counts_allow() -> None:
    """Assigning takes the adapters of each set's own first, and fills the rest of its counts with others."""
    classes = aggregate(random_fleet(40, seed=1))
    first, second = list(range(0, 40, 2)), list(range(1, 40, 2))
    home = {i: s for s, own in enumerate((first, second)) for i in own}
    assert classes.assign([classes.counts(first), classes.counts(second)], home) == [tuple(first), tuple(second)]
    assert classes.assign([0 * classes.demand, classes.demand], home) == [(), tuple(range(40))]


def test_more_than_there_are_is_refused() -> None:
    """A pattern beyond the demand is an error, never a silent shortage."""
    classes = aggregate(random_fleet(10, seed=0))
    with pytest.raises(ValidationError):
        classes.assign([classes.demand, classes.demand])
    with pytest.raises(ValidationError):
        classes.representatives(classes.demand + 1)


@settings(max_examples=30, deadline=None)
@given(rates=st.lists(st.floats(0.001, 10.0), min_size=2, max_size=60), limit=st.integers(1, 12))
def test_rounding_keeps_the_load_and_its_loss_is_stated(rates: list[float], limit: int) -> None:
    """Merged classes take their mean rate, and the loss is what that changes."""
    fleet = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate(rates)])
    classes = aggregate(fleet, max_classes=limit)
    assert len(classes) <= limit
    assert classes.fleet.offered_tok_s == pytest.approx(fleet.offered_tok_s)
    moved = np.abs(classes.fleet.rates - fleet.rates).sum() / fleet.rates.sum()
    assert classes.loss == pytest.approx(moved, abs=1e-9)
    assert (classes.loss > 0.0) == (len(set(rates)) > limit)
    assert sorted(i for each in classes.members for i in each.tolist()) == list(range(len(rates)))


def test_merging_takes_the_nearest() -> None:
    """Two rates that are nearly equal are merged before two that are far apart."""
    fleet = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate([1.0, 0.999, 0.5])])
    classes = aggregate(fleet, max_classes=2)
    assert sorted(classes.demand.tolist()) == [1, 2]
    assert classes.loss == pytest.approx(0.001 / 2.499, rel=1e-6)


def lengthy(n: int, seed: int, cv: float = 0.8) -> Workload:
    """Adapters with lengths of their own."""
    rng = np.random.default_rng(seed)
    return Workload(
        [
            Adapter(
                f"a{i}",
                int(rng.choice((8, 32))),
                float(rng.lognormal(-2.0, 1.0)),
                Lengths.gamma(float(rng.uniform(50, 2000)), cv),
                Lengths.gamma(float(rng.uniform(10, 500)), cv),
            )
            for i in range(n)
        ]
    )


@pytest.mark.parametrize("limit", [4, 16, 48])
def test_own_lengths_are_merged_with_their_means(limit: int) -> None:
    """However many lengths there are, classes are few, of one rank each, and keep input and output tok/s."""
    fleet = lengthy(200, limit)
    classes = aggregate(fleet, max_classes=limit)
    assert len(classes) <= limit
    assert sorted(i for each in classes.members for i in each.tolist()) == list(range(200))
    assert np.all(classes.fleet.ranks == fleet.ranks)
    for k, each in enumerate(classes.members):
        for tokens, own in (
            (classes.tokens_in, fleet.mean_input_tokens),
            (classes.tokens_out, fleet.mean_output_tokens),
        ):
            assert len(each) * classes.rates[k] * tokens[k] == pytest.approx(fleet.rates[each] @ own[each])
    moved = np.abs(classes.fleet.offered_tok_s_by_adapter - fleet.offered_tok_s_by_adapter).sum()
    assert classes.loss == pytest.approx(moved / fleet.offered_tok_s)
    assert classes.loads[classes.class_of] == pytest.approx(classes.fleet.offered_tok_s_by_adapter)


def test_more_classes_round_less() -> None:
    """Cutting further never makes the rounding larger."""
    fleet = lengthy(200, 1)
    losses = [aggregate(fleet, max_classes=limit).loss for limit in (4, 12, 48, 150)]
    assert losses == sorted(losses, reverse=True)
    assert aggregate(fleet, max_classes=200).loss == 0.0


@pytest.mark.parametrize("cv", [0.8, 2.0])
def test_optimistic_classes_stand_for_their_lightest_member(cv: float) -> None:
    """Rates and lengths are at most those of each member; of lengths of two shapes the means alone tell no order."""
    plain, other = lengthy(60, 2).adapters, lengthy(60, 3, cv).adapters
    fleet = Workload([*plain, *(replace(each, name=f"b{each.name}") for each in other)])
    classes = aggregate(fleet, max_classes=8, optimistic=True)
    light = classes.fleet
    assert np.all(light.rates <= fleet.rates)
    assert np.all(light.mean_input_tokens <= fleet.mean_input_tokens)
    assert np.all(light.mean_output_tokens <= fleet.mean_output_tokens)
    assert classes.exact is (cv == 0.8)
    assert [each.tolist() for each in classes.members] == [
        each.tolist() for each in aggregate(fleet, max_classes=8).members
    ]
    assert aggregate(fleet, max_classes=120, optimistic=True).exact


GOAL = Goal().parsed(["gold:mean_itl_ms=16", "loose:mean_itl_ms=400"])


@pytest.mark.parametrize("other", [{"slo_class": "loose"}, {"acceptance": 0.9}, {"acceptance": None}, {"priority": 1}])
@pytest.mark.parametrize("limit", [1, 48])
def test_adapters_of_other_limits_or_drafts_are_not_interchangeable(other: dict[str, object], limit: int) -> None:
    """Adapters that differ in limits, acceptance or priority share no class, however few classes there may be, and
    a higher rate does not make one of them the heavier."""
    first = [Adapter(f"a{i}", 8, 0.1 + 0.01 * i, slo_class="gold", acceptance=0.2) for i in range(4)]
    more = [replace(each, name=f"b{each.name}", rate=each.rate + 0.1, **other) for each in first]  # type: ignore[arg-type]
    fleet = Workload([*first, *more], slo=GOAL)
    classes = aggregate(fleet, max_classes=limit)
    assert all(len({int(i) // 4 for i in each}) == 1 for each in classes.members)
    assert len(classes) == (2 if limit == 1 else 8)
    side = np.array([each[0] // 4 for each in classes.members])
    assert not classes.chains[np.not_equal.outer(side, side)].any()
    kept = {(kind.slo_class, kind.acceptance, kind.priority) for kind in classes.kinds}
    assert kept == {(a.slo_class, a.acceptance, a.priority) for a in (first[0], more[0])}


def test_classes_that_the_goal_does_not_name_are_one() -> None:
    """Without limits of their own, adapters of two classes are interchangeable."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.1, slo_class=("x", "y")[i % 2]) for i in range(4)])
    assert len(aggregate(fleet)) == 1


def test_merged_acceptances_are_their_mean_or_the_highest() -> None:
    """A class of similar acceptances is never exact; the optimistic one has the most drafts accepted."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.1, acceptance=share) for i, share in enumerate((0.58, 0.6, 0.62))])
    assert len(aggregate(fleet)) == 3
    merged, light = (aggregate(fleet, max_classes=1, optimistic=best) for best in (False, True))
    assert [kind.acceptance for kind in (*merged.kinds, *light.kinds)] == pytest.approx([0.6, 0.62])
    assert merged.loss > 0.0


class Crowded(MonotonePredictor):
    """An adapter of class gold keeps its limits among at most 4 adapters, any other among at most 20."""

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Evaluate each bin; one row per bin, in order."""
        gold = [any(workload.adapters[i].slo_class == "gold" for i in item.adapters) for item in bins]
        used = [len(item.adapters) / (4 if own else 20) for item, own in zip(bins, gold, strict=True)]
        return replace(super().evaluate(workload, bins), slo_used=np.array(used))


@pytest.mark.parametrize("solver", ["exact", "bounds", "auto", "mixed"])
@pytest.mark.parametrize("golden", [slice(0, 4), slice(11, 15)])
def test_a_plan_for_two_classes_of_limits_is_optimal_only_if_it_is(solver: str, golden: slice) -> None:
    """Where 4 adapters with tight limits fit one server and 11 with loose ones another, two GPUs are the fewest."""
    names = np.full(15, "loose", dtype=object)
    names[golden] = "gold"
    fleet = Workload([Adapter(f"a{i}", 8, 0.1, slo_class=name) for i, name in enumerate(names)], slo=GOAL)
    plan = solve(
        fleet, small_profile(), "slo", solver=solver, predictor=Crowded(), margin=0.0, verify=False,
        with_headroom=False, time_limit_s=10.0,
    )  # fmt: skip
    assert (plan.n_gpus, plan.lower_bound, plan.status) == (2, 2.0, Status.OPTIMAL)


def _error(points: FloatArray) -> float:
    """Σ |mean − own| of input and of output tok/s."""
    return sum(abs(np.mean(each) - each).sum() for each in (points[:, 0] * points[:, 1], points[:, 0] * points[:, 2]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=2, max_size=9).filter(lambda rows: len(set(rows)) > 1))
def test_a_group_is_cut_where_the_rounding_falls_most(rows: list[tuple[int, int, int]]) -> None:
    """With fewer values than places, no cut at any value of rate, input or output tokens has a smaller error."""
    points = np.array(rows, dtype=np.float64)
    below, rest = classes._cut(points, np.arange(len(points)))
    assert sorted([*below, *rest]) == list(range(len(points)))
    halves = [column < value for column in points.T for value in np.unique(column)[1:]]
    least = min(_error(points[half]) + _error(points[~half]) for half in halves)
    assert _error(points[below]) + _error(points[rest]) == pytest.approx(least, abs=1e-9)
