"""A certificate is exhaustive only if every bin beyond the value is at least as heavy as an infeasible one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from monotone import problem

from packer.adapter import Adapter
from packer.arrays import IntArray
from packer.solvers.classes import aggregate
from packer.solvers.columns.proof import Certificate, _beyond, _steps, certify
from packer.solvers.feasibility import Feasibility
from packer.workload import Workload


class Recorded(Feasibility):
    """Admits bins of at most `capacity` req/s, and keeps those that it was given."""

    capacity: float
    seen: list[IntArray]

    def feasible(self, counts: IntArray) -> np.ndarray:
        """By load alone."""
        self.seen.append(counts)
        return counts @ self.classes.rates <= self.capacity


def drawn(seed: int, capacity: float) -> tuple[Recorded, np.random.Generator]:
    """A fleet of few classes of one or two ranks, a few adapters of each."""
    rng = np.random.default_rng(seed)
    kinds = [(int(rng.choice((8, 32))), float(rate)) for rate in rng.uniform(0.5, 4.0, int(rng.integers(2, 5)))]
    names = ((k, i) for k in range(len(kinds)) for i in range(int(rng.integers(1, 6))))
    fleet = Workload([Adapter(f"a{k}-{i}", *kinds[k]) for k, i in names])
    feasibility = Recorded(problem(fleet), aggregate(fleet))
    feasibility.capacity, feasibility.seen = capacity, []
    return feasibility, rng


def certified(feasibility: Feasibility, weights: np.ndarray, slack: float, budget: int) -> Certificate:
    """A search for bins of a weight above 1."""
    none = np.zeros((0, len(weights)), dtype=np.int64)
    return certify(feasibility, weights, above=1.0 - slack, slack=slack, budget=budget, known=none)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("budget", [2000, 8])
def test_every_bin_beyond_is_as_heavy_as_an_infeasible_one(seed: int, budget: int) -> None:
    """What is evaluated lies below every bin beyond the value: adapter by adapter, in fewer or lower rates."""
    feasibility, rng = drawn(seed, capacity=-1.0)
    classes = feasibility.classes
    weights = rng.uniform(0.05, 0.5, len(classes))
    found = certified(feasibility, weights, 0.05, budget)
    assert found.counterexample is None
    every = np.array(list(product(*(range(d + 1) for d in classes.demand.tolist()))))
    beyond = every[every @ weights > 1.0 + 1e-9] @ classes.chains
    seen = np.concatenate([every[:0], *feasibility.seen]) @ classes.chains
    assert found.evaluated == len(seen)
    if found.exhaustive:
        assert all((row >= seen).all(axis=1).any() for row in beyond)
    assert found.exhaustive or budget == 8


@pytest.mark.parametrize("seed", range(25))
def test_no_certificate_where_a_bin_beyond_is_feasible(seed: int) -> None:
    """With weights by load it is exhaustive where no feasible bin is beyond the value, and else finds one that is."""
    feasibility, rng = drawn(seed, capacity=6.0)
    classes = feasibility.classes
    weights = classes.rates / 6.0 * rng.uniform(0.9, 1.1)
    every = np.array(list(product(*(range(d + 1) for d in classes.demand.tolist()))))
    heaviest = max((row @ weights for row in every if row @ classes.rates <= 6.0), default=0.0)
    found = certified(feasibility, weights, 0.0, 2000)
    assert found.exhaustive == (heaviest <= 1.0)
    if found.counterexample is not None:
        assert found.counterexample @ classes.rates <= 6.0
        assert found.counterexample @ weights > 1.0
    assert (found.counterexample is None) is found.exhaustive


def test_a_chain_of_near_rates_takes_few_evaluations() -> None:
    """Of 60 adapters, three on a server, the lightest triples beyond the value are some hundreds of 34,220."""
    rates = np.linspace(250.0, 490.0, 60)
    fleet = Workload([Adapter(f"a{i}", 8, float(rate)) for i, rate in enumerate(rates)])
    feasibility = Recorded(problem(fleet), aggregate(fleet, max_classes=60))
    feasibility.capacity, feasibility.seen = 1000.0, []
    found = certified(feasibility, feasibility.classes.rates / 1000.0, 0.0, 20_000)
    assert found.exhaustive
    assert 0 < found.evaluated < 2000


@pytest.mark.parametrize("seed", range(10))
def test_coarse_steps_lose_no_more_than_the_slack(seed: int) -> None:
    """What is counted in steps is short by Σ weight × (step − 1) at most; one more of each class is beyond it."""
    rng = np.random.default_rng(seed)
    weights, slack = rng.lognormal(0.0, 2.0, 12), float(rng.uniform(0.0, 20.0))
    steps = _steps(weights, slack)
    lost = float((weights * (steps - 1)).sum())
    assert (steps >= 1).all()
    assert lost <= slack + 1e-9
    assert slack - lost < weights.sum()


@pytest.mark.parametrize("seed", range(10))
def test_what_is_tried_first_is_a_good_bin_with_as_many_of_a_class_as_it_takes(seed: int) -> None:
    """From a bin, whole or without half of a class, the fewest more of one class that are worth more."""
    rng = np.random.default_rng(seed)
    weights, limit = rng.uniform(0.05, 0.5, 3), rng.integers(2, 9, 3)
    best = np.array([int(rng.integers(0, most + 1)) for most in limit])
    above = float(best @ weights) + float(rng.uniform(0.0, 0.3))
    expected = set()
    for k in range(-1, 3):
        start = best.copy()
        if k >= 0:
            start[k] = best[k] // 2
        for j in range(3):
            row = start.copy()
            while row[j] == start[j] or float(row @ weights) <= above:
                row[j] += 1
            if row[j] <= limit[j]:
                expected.add(tuple(row.tolist()))
    assert {tuple(row) for row in _beyond(best[None, :], weights, limit, above).tolist()} == expected
