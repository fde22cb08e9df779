"""Lower bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from monotone import MonotonePredictor, problem

from packer.adapter import Adapter
from packer.planning.verify import check
from packer.solvers.base import Bound
from packer.solvers.bounds import Bounds
from packer.solvers.columns.exact import Exact, limited
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.solver import Greedy
from packer.testing.analytic import random_fleet
from packer.workload import Workload


def test_the_bound_comes_with_its_argument() -> None:
    """`bounds` returns a plan, a bound no larger, and says in words why it holds."""
    found = Bounds().solve(problem(random_fleet(48, seed=7)))
    assert found.lower_bound is not None
    assert 1 <= found.lower_bound <= len(found.bins)
    assert "monotone" in found.bound_source or "384" in found.bound_source


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_a_smaller_plan_that_the_enumeration_finds_is_taken(seed: int) -> None:
    """Where every bin is evaluated for the bound, the plan has the fewest GPUs, also where greedy has one more."""
    rng = np.random.default_rng(seed)
    task = problem(Workload([Adapter(f"a{i}", 8, float(rng.uniform(4.0, 16.0))) for i in range(9)]))
    found = Bounds().solve(task)
    assert len(Greedy().solve(task).bins) == 5
    assert len(found.bins) == found.lower_bound == 4
    assert found.proven
    check(task, found)


def test_too_few_gpus_are_reported_with_the_bound() -> None:
    """With fewer GPUs than necessary the plan is incomplete and the reason names what is necessary."""
    found = Bounds().solve(problem(random_fleet(48, seed=7), max_gpus=1))
    assert len(found.bins) == 1
    assert found.unplaced
    assert any("necessary" in reason for reason in found.reasons)


@pytest.mark.parametrize("seed", range(4))
def test_a_bound_by_search_says_so(seed: int) -> None:
    """What rests on the search for the heaviest bins is marked and not proven."""
    found = Bounds().solve(problem(random_fleet(48, seed=seed)))
    assert found.proven is not found.bound_source.startswith("estimate")


def test_a_plan_at_hand_refutes_a_bound() -> None:
    """A search that missed a bin may promise more GPUs than the plan has: that is no bound."""
    task = problem(random_fleet(12, seed=4))
    first = Bounds().solve(task)
    found = limited(task, first, Bound(len(first.bins) + 1, "wrong"), {})
    assert (found.lower_bound, found.bound_source, found.proven) == (None, "", False)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_of_few_simulated_servers_are_proven(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every server is simulated, some dozens of different ones are evaluated each: no estimate exceeds these."""
    monkeypatch.setattr(Evaluator, "simulates", True)
    task = problem(random_fleet(8, seed, rates=(1.5, 4.0), ranks=(8,)), predictor=MonotonePredictor(4500.0))
    quick, exact = Bounds().solve(task), Exact().solve(task)
    assert quick.proven
    assert len(quick.bins) == quick.lower_bound == len(exact.bins) > 1


@pytest.mark.parametrize("seed", range(8))
def test_bounds_of_few_adapters_are_proven_and_never_above_the_optimum(seed: int) -> None:
    """Where every bin can be evaluated, no bound rests on a search: it is at most what the exact solver needs."""
    rng = np.random.default_rng(seed)
    levels = rng.uniform(0.5, 5.0, 4).tolist()
    task = problem(random_fleet(10, seed, rates=levels, ranks=(8, 16)), predictor=MonotonePredictor(4500.0))
    quick, exact = Bounds().solve(task), Exact().solve(task)
    assert quick.lower_bound is not None
    assert quick.proven
    assert quick.lower_bound <= len(exact.bins)
    assert exact.proven


def test_bounds_count_the_gpus_of_a_server() -> None:
    """Where a server takes two GPUs, a plan of n servers that is proven has a bound of 2 n GPUs."""
    one = problem(random_fleet(8, 3, rates=(1.5, 4.0), ranks=(8,)), predictor=MonotonePredictor(4500.0))
    pair = replace(one.profile, engine=replace(one.profile.engine, tensor_parallel_size=2))
    single, double = Exact().solve(one), Exact().solve(replace(one, profiles=(pair,)))
    assert single.proven
    assert double.proven
    assert double.lower_bound == 2 * (single.lower_bound or 0.0) == 2 * len(double.bins) > 2
