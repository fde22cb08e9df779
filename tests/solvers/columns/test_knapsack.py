"""Where the load alone decides, the most valuable feasible bin is found, whatever its adapters are worth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from monotone import MonotonePredictor, problem

from packer.adapter import Adapter
from packer.solvers.classes import aggregate
from packer.solvers.columns.knapsack import Knapsacks
from packer.solvers.feasibility import Feasibility
from packer.workload import Workload


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("whole", [True, False])
def test_the_best_bin_equals_enumeration(seed: int, whole: bool) -> None:
    """Of all bins that carry their load, the one that is worth most; loads need not be multiples of each other."""
    rng = np.random.default_rng(seed)
    rates = rng.integers(3, 40, 7) / 10.0 if whole else rng.uniform(0.3, 4.0, 7)
    fleet = Workload([Adapter(f"a{i}", 8, float(rates[i % 7])) for i in range(10)])
    classes = aggregate(fleet)
    by_load = MonotonePredictor(float(classes.loads.sum()) * 0.6, 0.0, 0.0, 0.0, 0.0)
    feasibility = Feasibility(problem(fleet, predictor=by_load), classes)
    rows = np.array(list(itertools.product(*(range(d + 1) for d in classes.demand.tolist()))))
    feasible = rows[feasibility.evaluate(rows)]
    search = Knapsacks(feasibility)
    for _ in range(4):
        weights = classes.loads * np.exp(rng.normal(0.0, 0.2, len(classes)))
        known = float((feasible @ classes.loads).max()) * rng.uniform(0.98, 1.0)
        found = search.best(weights, classes.demand, known)
        assert len(found) == 1
        if whole:
            assert found[0] @ weights == pytest.approx((feasible @ weights).max())
        else:  # loads are rounded to thousandths of a bin
            assert found[0] @ weights >= 0.98 * (feasible @ weights).max()


def test_bins_around_it_hold_what_they_must() -> None:
    """Each holds the class that is given, is feasible, and keeps to the adapters that there are."""
    fleet = Workload([Adapter(f"a{i}", 8 if i % 2 else 32, 0.5 + 0.1 * (i % 5)) for i in range(30)])
    classes = aggregate(fleet)
    feasibility = Feasibility(problem(fleet), classes)
    search = Knapsacks(feasibility)
    weights = classes.loads / classes.loads.sum()
    start = search.best(weights, classes.demand, float(classes.loads.max()))
    assert len(start) == 2
    limit = np.maximum(1, classes.demand // 2)
    for k in range(len(classes)):
        found = search.alike(weights[None, :], limit, [k])
        held = found[found.any(axis=1)]
        assert np.all(held[:, k] >= 1)
        assert np.all(held <= limit)
        assert feasibility.evaluate(found).all()
