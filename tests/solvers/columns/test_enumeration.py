"""No plan of so many bins is excluded that exists: every bin that it may hold is enumerated."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from monotone import MonotonePredictor, problem

from packer.adapter import Adapter
from packer.solvers.classes import Classes, aggregate
from packer.solvers.columns.enumeration import every_bin_within, packed
from packer.solvers.feasibility import Feasibility
from packer.testing.analytic import random_fleet
from packer.workload import Workload


def every(classes: Classes) -> np.ndarray:
    """Every vector of counts (m, K)."""
    return np.array(list(product(*(range(d + 1) for d in classes.demand.tolist()))))


def fewest(rows: np.ndarray, demand: np.ndarray) -> int:
    """Fewest of these bins that hold the demand, by dynamic programming over what is left."""
    bins = [tuple(row) for row in rows.tolist() if any(row)]

    @cache
    def needed(left: tuple[int, ...]) -> int:
        first = next((k for k, count in enumerate(left) if count), None)
        if first is None:
            return 0
        parts = {tuple(min(a, b) for a, b in zip(row, left, strict=True)) for row in bins if row[first]}
        return 1 + min(needed(tuple(a - b for a, b in zip(left, part, strict=True))) for part in parts)

    return needed(tuple(demand.tolist()))


@pytest.mark.parametrize("seed", range(20))
def test_every_vector_of_such_a_weight_is_listed(seed: int) -> None:
    """The same vectors as by going through all of them, in falling order; None where these are more than allowed."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 6))
    weights, limit = rng.uniform(0.03, 0.6, k).round(2), rng.integers(0, 5, k)
    weights[rng.random(k) < 0.2] = 0.0
    low = float(rng.uniform(0.3, 0.95))
    grid = np.array(list(product(*(range(d + 1) if w else (0,) for d, w in zip(limit, weights, strict=True)))))
    kept = grid[(grid @ weights >= low) & (grid @ weights <= 1.0 + 1e-9)]
    found = every_bin_within(weights, limit, low, 1.0 + 1e-9, len(kept))
    assert found is not None
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, kept.tolist()))
    assert (np.diff(found @ weights) <= 1e-12).all()
    if len(kept):
        assert every_bin_within(weights, limit, low, 1.0 + 1e-9, len(kept) - 1) is None


@pytest.mark.parametrize("seed", range(12))
def test_plans_are_found_where_they_exist_and_excluded_where_not(seed: int) -> None:
    """For each number of bins, as dynamic programming over every feasible bin has it."""
    fleet = random_fleet(9, seed, rates=(3.0, 4.5, 2.2), ranks=(8, 32))
    classes = aggregate(fleet)
    feasibility = Feasibility(problem(fleet, predictor=MonotonePredictor(capacity_tok_s=6500.0)), classes)
    rows = every(classes)
    feasible = rows[feasibility.evaluate(rows)]
    weights = np.random.default_rng(seed).uniform(0.5, 1.0, len(classes)) * classes.loads
    weights /= (feasible @ weights).max()
    best = fewest(feasible, classes.demand)
    for n_bins in range(best - 2, best + 2):
        found = packed(feasibility, weights, n_bins, budget=20_000, time_limit_s=10.0)
        assert found.excluded is (n_bins < best)
        assert found.heavier is None
        assert (found.bins is None) is found.excluded
        if found.bins is not None:
            assert len(found.bins) <= n_bins
            assert (found.bins.sum(axis=0) >= classes.demand).all()
            assert feasibility.evaluate(found.bins).all()


def test_a_bin_heavier_than_1_comes_first_and_too_many_bins_say_nothing() -> None:
    """Weights that are too high exclude nothing: the bin that shows it is returned."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.5 + 0.1 * (i % 5)) for i in range(30)])
    classes = aggregate(fleet)
    feasibility = Feasibility(problem(fleet), classes)
    heavy = classes.loads / classes.loads.max()
    found = packed(feasibility, heavy, 2, budget=20_000, time_limit_s=10.0)
    assert (found.bins, found.excluded) == (None, False)
    assert found.heavier is not None
    assert found.heavier @ heavy > 1.0
    assert feasibility.evaluate(found.heavier[None, :])[0]
    few = packed(feasibility, classes.loads / 1e5, 2, budget=3, time_limit_s=10.0)
    assert (few.bins, few.excluded, few.heavier) == (None, False, None)
