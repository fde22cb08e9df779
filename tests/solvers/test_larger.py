"""Servers of more adapters than trees know: as few as a packing of each would find, and few are evaluated for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from few_adapters import trained_up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from monotone import problem

from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.io.profiles import load_profile
from packer.objectives.gpus import Gpus
from packer.solvers.base import Problem
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.first_fit import FirstFit
from packer.solvers.greedy.larger import larger
from packer.solvers.greedy.solver import Greedy
from packer.solvers.order import even_order, paper_order
from packer.testing.analytic import AnalyticPredictor
from packer.workload import Workload


@dataclass(frozen=True)
class Counting:
    """Counts the servers of more adapters than searches without simulations know."""

    known: int
    predictor: AnalyticPredictor
    seen: list[int] = field(default_factory=list)
    name = "counting"

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin; one row per bin, in order."""
        self.seen.extend(len(item.adapters) for item in bins if len(item.adapters) > self.known)
        return self.predictor.evaluate(workload, bins)


def drawn(n: int, low: float, high: float, ranks: Sequence[int], seed: int = 0) -> Workload:
    """A fleet of rates drawn between two."""
    rng = np.random.default_rng(seed)
    return Workload([Adapter(f"a{i}", int(rng.choice(ranks)), float(rng.uniform(low, high))) for i in range(n)])


def packed(posed: Problem) -> tuple[Bin, ...]:
    """The bins of first fit in the paper's order."""
    packing = FirstFit(posed, paper_order(posed.workload))
    packing.run()
    assert not packing.left
    return tuple(packing.bins)


@given(st.integers(1, 400), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_any_run_of_the_even_order_has_the_loads_of_its_rank(n: int, seed: int) -> None:
    """Ranks fall, nothing is left out, and a run's mean load is off by no more than few adapters explain."""
    fleet = drawn(n, 0.0125, 0.1, (8, 32), seed)
    order = even_order(fleet)
    assert sorted(order.tolist()) == list(range(n))
    assert (np.diff(fleet.ranks[order]) <= 0).all()
    for rank in np.unique(fleet.ranks).tolist():
        own = fleet.offered_tok_s_by_adapter[order[fleet.ranks[order] == rank]]
        sums = np.concatenate([[0.0], np.cumsum(own - own.mean())])
        assert np.ptp(sums) <= 4.0 * own.max()


@pytest.mark.parametrize("ranks", [(8,), (8, 16, 64)])
@pytest.mark.parametrize("rates", [(0.001, 0.01), (0.05, 0.2)])
def test_as_few_servers_as_a_packing_of_each_within_one(rates: tuple[float, float], ranks: tuple[int, ...]) -> None:
    """Against first fit that evaluates every larger server: a GPU more at most, for fewer evaluations."""
    fleet, known = drawn(3000, *rates, ranks), 60
    posed = problem(fleet, predictor=(counting := Counting(known, AnalyticPredictor(40_000.0))))
    small = packed(replace(posed, most_adapters=known))
    assert not counting.seen
    found = larger(posed, small, len(small))
    taken = len(counting.seen)
    assert found is not None
    assert sorted(i for item in found for i in item.adapters) == list(range(3000))
    assert posed.evaluator.holds(fleet, found).all()
    counting.seen.clear()
    each = packed(posed)
    assert len(found) <= len(each) + 1 < len(small)
    assert taken < 0.8 * len(counting.seen)


def test_no_larger_server_is_evaluated_where_load_is_the_limit() -> None:
    """Servers that are full and bear no more load than they have are left as they are."""
    fleet, known = drawn(600, 0.4, 0.5, (8,)), 40
    posed = problem(fleet, predictor=(counting := Counting(known, AnalyticPredictor(8_000.0))))
    small = packed(replace(posed, most_adapters=known))
    assert sum(len(item.adapters) == known for item in small) > 1
    assert larger(posed, small, len(small)) is None
    assert not counting.seen


def test_light_adapters_among_heavier_ones_take_no_simulation() -> None:
    """Where the paper's order leaves servers full of light adapters, the even order takes fewer without any."""
    rng = np.random.default_rng(10_000)
    kinds = ((8, 16, 32), (0.1, 0.05, 0.025, 0.0125))
    fleet = Workload(
        [
            Adapter(f"a{i}", *(each(rng.choice(k)) for each, k in zip((int, float), kinds, strict=True)))
            for i in range(10_000)
        ]
    )
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    auto = trained_up_to(512, profile)
    posed = Problem(fleet, (profile,), Gpus(), Evaluator(auto, Gpus()))
    first = packed(posed.learned())
    assert sum(len(item.adapters) == posed.evaluator.most_learned for item in first) > 1
    found = Greedy().solve(posed)
    assert auto.twin.simulated == 0
    assert len(found.bins) < len(first)
