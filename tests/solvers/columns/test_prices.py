"""Prices in few dimensions come near the best weights, and never promise more than all feasible bins allow."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from monotone import problem

from packer.adapter import Adapter
from packer.lengths import Lengths
from packer.solvers.classes import aggregate
from packer.solvers.columns.generation import Columns
from packer.solvers.columns.master import solve_relaxation
from packer.solvers.columns.source import Source
from packer.solvers.feasibility import Feasibility
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{i}", (8, 32)[i % 2], (2.4, 0.9)[i // 2 % 2]) for i in range(24)])


def test_features_are_tokens_adapters_and_ranks() -> None:
    """One row for each class: input tok/s, output tok/s, 1, and for each larger slot rank 1 and tok/s again."""
    lengths = Lengths.constant(100), Lengths.constant(50)
    classes = aggregate(Workload([Adapter("a", 8, 2.0, *lengths), Adapter("b", 24, 1.0, *lengths)]))
    rows = {int(rank): row.tolist() for rank, row in zip(classes.ranks, classes.features, strict=True)}
    assert rows == {8: [200.0, 100.0, 1.0, 0.0, 0.0], 24: [100.0, 50.0, 1.0, 1.0, 150.0]}


def test_few_prices_come_near_the_linear_relaxation_from_below() -> None:
    """With the heaviest of all feasible bins weighing 1, all adapters weigh 0.9 to 1 times what the relaxation says."""
    classes = aggregate(FLEET)
    feasibility = Feasibility(problem(FLEET), classes)
    rows = np.array(list(product(*(range(d + 1) for d in classes.demand.tolist()))), dtype=np.int64)
    rows = rows[feasibility.feasible(rows)]
    whole = solve_relaxation(rows, classes.demand)
    assert whole is not None
    columns = Columns([Source(1.0, feasibility, feasibility, np.random.default_rng(0))])
    assert columns.start([rows[:0]])
    columns.warm()
    heaviest = float((rows @ columns.weights).max())
    assert 1.0 - 1e-6 <= heaviest <= 1.05  # the search for the heaviest bin may miss it, but not by much
    value = columns.value / heaviest
    assert 0.9 * whole.value <= value <= whole.value * (1.0 + 1e-9)
    assert whole.value == pytest.approx(float(whole.duals @ classes.demand))


def test_columns_end_where_the_known_bound_is_out_of_reach() -> None:
    """With each bound known beforehand, the better of both is what all columns promise, after fewer or as many.

    So it is where no more than what is promised already is in reach.
    """
    classes = aggregate(FLEET)

    def warmed(known: int | None) -> Columns:
        feasibility = Feasibility(problem(FLEET), classes)
        columns = Columns([Source(1.0, feasibility, feasibility, np.random.default_rng(0))])
        assert columns.start([classes.rows(())])
        columns.warm(known)
        return columns

    def patterns(columns: Columns) -> int:
        return len(columns.sources[0].patterns)

    every = warmed(None)
    for known in range(2 * every.promised):
        found = warmed(known)
        assert max(known, found.promised) == max(known, every.promised)
        assert patterns(found) <= patterns(every)
    assert patterns(warmed(every.promised)) < patterns(every)
    assert patterns(warmed(0)) < patterns(every)
