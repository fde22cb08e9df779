"""Class aggregation: counts and names, rounding and its loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.errors import ValidationError
from packer.lengths import Lengths
from packer.solvers.classes import aggregate
from packer.testing.problems import random_fleet
from packer.workload import Workload


def test_equal_adapters_share_a_class() -> None:
    """Rank, rate and lengths make a class; the name does not."""
    own = Lengths.constant(100.0)
    fleet = Workload(
        [Adapter("a", 8, 0.1), Adapter("b", 8, 0.1), Adapter("c", 16, 0.1), Adapter("d", 8, 0.1, own)]
    )
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


def test_assigning_from_a_part_of_the_fleet_stays_within_it() -> None:
    """Names for freed bins come from the freed adapters only."""
    classes = aggregate(random_fleet(40, seed=1))
    freed = list(range(0, 40, 2))
    sets = classes.assign([classes.counts(freed)], freed)
    assert list(sets[0]) == freed


def test_more_than_there_are_is_refused() -> None:
    """A pattern beyond the demand is an error, never a silent shortage."""
    classes = aggregate(random_fleet(10, seed=0))
    with pytest.raises(ValidationError):
        classes.assign([classes.demand, classes.demand])
    with pytest.raises(ValidationError):
        classes.representatives(classes.demand + 1)


@settings(max_examples=30, deadline=None)
@given(
    rates=st.lists(st.floats(0.001, 10.0), min_size=2, max_size=60),
    limit=st.integers(1, 12),
)
def test_rounding_is_safe_and_its_loss_is_stated(rates: list[float], limit: int) -> None:
    """Merged classes take their highest rate (lowest when optimistic), and the loss is what that changes."""
    fleet = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate(rates)])
    up, down = aggregate(fleet, max_classes=limit), aggregate(fleet, max_classes=limit, optimistic=True)
    assert len(up) <= limit
    assert len(down) <= limit
    assert np.all(up.fleet.rates >= fleet.rates)
    assert np.all(down.fleet.rates <= fleet.rates)
    assert up.loss == pytest.approx(up.fleet.offered_tok_s / fleet.offered_tok_s - 1.0, abs=1e-9)
    assert down.loss == pytest.approx(1.0 - down.fleet.offered_tok_s / fleet.offered_tok_s, abs=1e-9)
    assert sorted(i for each in up.members for i in each.tolist()) == list(range(len(rates)))


def test_merging_takes_the_cheapest_neighbours() -> None:
    """Two rates that are nearly equal are merged before two that are far apart."""
    fleet = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate([1.0, 0.999, 0.5])])
    classes = aggregate(fleet, max_classes=2)
    assert sorted(classes.demand.tolist()) == [1, 2]
    assert classes.loss == pytest.approx(0.001 / 2.499, rel=1e-6)


def test_dominance_is_a_partial_order_on_rank_rate_and_lengths() -> None:
    """A class dominates another only if it is at least as heavy in everything."""
    fleet = Workload([Adapter("a", 16, 0.2), Adapter("b", 8, 0.1), Adapter("c", 8, 0.4)])
    classes = aggregate(fleet)
    a, b, c = (int(classes.class_of[i]) for i in range(3))
    assert classes.dominates[a, b]
    assert not classes.dominates[b, a]
    assert not classes.dominates[a, c]
    assert not classes.dominates[c, a]
