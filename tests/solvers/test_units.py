"""Bounds count what the objective counts: the GPUs of servers on several of them each, or their prices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from monotone import MonotonePredictor

from packer.adapter import Adapter
from packer.bin import Bin
from packer.gpu import GpuKind
from packer.objectives.base import load_objective
from packer.plan import Plan, Status
from packer.planning.solve import solve
from packer.profile import Profile
from packer.solvers.base import Problem
from packer.solvers.evaluator import Evaluator
from packer.solvers.slots import real_bins
from packer.strategies import Predictor
from packer.testing.analytic import random_fleet, small_profile
from packer.workload import Workload


@dataclass(frozen=True)
class Scaling(MonotonePredictor):
    """A server on two GPUs serves 1.7 times what a server on one serves."""

    name = "scaling"
    monotone = True

    def capacities(self, bins: Sequence[Bin]) -> npt.NDArray[np.float64]:
        """What each server could serve without adapters, tok/s, float64 (n,)."""
        return self.capacity_tok_s * np.where([item.gpus == 2 for item in bins], 1.7, 1.0)


def kind(tensor: int, name: str = "card") -> Profile:
    """A small server on so many GPUs, at 1 or, on two, 1.5 dollars per hour."""
    base = small_profile(f"{name}-{tensor}")
    return replace(
        base,
        gpu=replace(base.gpu, name=name, price_per_hour=(1.0 + tensor) / 2.0),
        engine=replace(base.engine, tensor_parallel_size=tensor),
    )


def cheapest(fleet: Workload, kinds: Sequence[Profile], objective: str, predictor: str | Predictor) -> float:
    """The lowest GPUs or price, by dynamic programming over all sets of adapters on each kind of server."""
    n, goal = len(fleet), load_objective(objective)
    evaluator = Evaluator.load(predictor, kinds, objective=goal, margin=0.0)
    sets = [tuple(i for i in range(n) if mask >> i & 1) for mask in range(1, 1 << n)]
    price: dict[int, float] = {}
    for profile in kinds:
        made = real_bins(Problem(fleet, (profile,), goal, evaluator), sets)
        for mask, item in enumerate(made, start=1):
            if item is not None:
                price[mask] = min(price.get(mask, 1e9), goal.weight(profile))
    least = [0.0]
    for left in range(1, 1 << n):
        own = [mask for mask in price if mask & left == mask and mask & left & -left]
        least.append(min((price[mask] + least[left ^ mask] for mask in own), default=1e9))
    return least[-1]


@cache
def drawn(seed: int, tensor: int) -> tuple[Workload, Profile, Scaling, float]:
    """Seven adapters, servers on so many GPUs, what evaluates these, and the fewest GPUs: the same for all solvers."""
    fleet = random_fleet(7, seed=seed, rates=(3.0, 4.5, 2.2, 5.1), ranks=(8, 16, 64))
    predictor, one = Scaling(4000.0), kind(tensor)
    return fleet, one, predictor, cheapest(fleet, [one], "gpus", predictor)


@cache
def simulated(tensor: int) -> tuple[Workload, Profile, float]:
    """Five adapters, servers on so many GPUs, and the fewest GPUs by the twin."""
    fleet, one = Workload([Adapter(f"a{i}", 8, 10.0 + 0.5 * i) for i in range(5)]), kind(tensor)
    return fleet, one, cheapest(fleet, [one], "gpus", "twin")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpsat` gives up early: the rules hold however long it searches."""
    monkeypatch.setattr("packer.solvers.cpsat.solver._WORK_PER_S", 0.005)


def plan_of(fleet: Workload, kinds: Any, objective: str, solver: str, predictor: Any) -> Plan:
    """A plan without margin and verification."""
    return solve(
        fleet, kinds, objective, solver=solver, predictor=predictor, margin=0.0, verify=False,
        with_headroom=False, time_limit_s=10.0,
    )  # fmt: skip


@pytest.mark.parametrize("solver", ["exact", "bounds", "auto", "mixed", "cpsat", "greedy"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("enumerated", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_bounds_are_in_gpus(
    solver: str, tensor: int, enumerated: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bound is at most the GPUs that trying all sets of adapters finds, and optimal plans have these."""
    if not enumerated and solver in ("cpsat", "greedy"):
        pytest.skip("it enumerates no bins")
    fleet, one, predictor, fewest = drawn(seed, tensor)
    if not enumerated:
        monkeypatch.setattr("packer.solvers.classes.FEW_BINS", 3)
        for module in ("exact", "mixed"):
            monkeypatch.setattr(f"packer.solvers.columns.{module}.FEW_BINS", 3)
    for given in (one, GpuKind(one, available=int(fewest) + 2)):
        plan = plan_of(fleet, given, "gpus", solver, predictor)
        assert plan.n_gpus == sum(item.gpus for item in plan.bins) >= fewest
        assert plan.lower_bound is None or plan.lower_bound <= fewest
        assert plan.status is not Status.OPTIMAL or plan.n_gpus == plan.lower_bound == fewest
        if solver in ("exact", "auto") or (enumerated and solver == "bounds"):
            assert plan.status is Status.OPTIMAL


@pytest.mark.parametrize("solver", ["mixed", "exact", "auto", "cpsat", "greedy"])
@pytest.mark.parametrize("objective", ["gpus", "cost"])
@pytest.mark.parametrize("seed", range(2))
def test_bounds_over_kinds_are_in_gpus_or_prices(solver: str, objective: str, seed: int) -> None:
    """With servers on one and on two GPUs at hand no bound is above the best of every mix of them."""
    if objective == "cost" and solver == "exact":
        pytest.skip("it counts GPUs")
    fleet = random_fleet(6, seed=seed, rates=(3.0, 4.5, 2.2, 5.1), ranks=(8, 16, 64))
    kinds, predictor = [kind(1), kind(2, "large")], Scaling(4000.0)
    least = cheapest(fleet, kinds, objective, predictor)
    plan = plan_of(fleet, kinds, objective, solver, predictor)
    assert plan.objective_value[0] >= least - 1e-9
    assert plan.lower_bound is None or plan.lower_bound <= least + 1e-9
    if plan.status is Status.OPTIMAL:
        assert plan.objective_value[0] == pytest.approx(least)
    if solver == "mixed":
        assert plan.lower_bound == pytest.approx(least)


@pytest.mark.parametrize("solver", ["greedy", "exact", "bounds"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_twins_bound_by_load_is_in_gpus(
    solver: str, tensor: int, short_runs: Callable[[], AbstractContextManager[None]]
) -> None:
    """By the twin, too, no bound is above the GPUs of the fewest servers."""
    with short_runs():
        fleet, one, fewest = simulated(tensor)
        plan = plan_of(fleet, one, "gpus", solver, "twin")
    assert plan.lower_bound is not None
    assert tensor < plan.lower_bound <= fewest <= plan.n_gpus
