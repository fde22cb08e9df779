"""Cutting a plan down to a number of GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from monotone import problem

from packer.adapter import Adapter
from packer.bin import Bin
from packer.gpu import GpuKind
from packer.io.plans import load_plan
from packer.plan import Moves, Status
from packer.planning.solve import solve
from packer.planning.verify import check
from packer.settings import Settings
from packer.solvers.base import Problem, Solution
from packer.solvers.limit import within_limit, without
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload

PROFILE = small_profile()


def fleet(*rates: float, ranks: tuple[int, ...] = ()) -> Workload:
    """Adapters a0, a1, … with these rates, of rank 8 unless given."""
    return Workload([Adapter(f"a{i}", ranks[i] if ranks else 8, rate) for i, rate in enumerate(rates)])


def cut(workload: Workload, bins: tuple[Bin, ...], max_gpus: int) -> tuple[Problem, Solution]:
    """The plan of these bins on at most so many GPUs, checked."""
    posed = replace(problem(workload, max_gpus=max_gpus), max_replicas=4)
    found = within_limit(posed, Solution(bins))
    check(posed, found)
    return posed, found


@pytest.mark.parametrize("rate", [12.0, 15.0, 18.0])
@pytest.mark.parametrize("others", [(), (4.0,) * 6])
def test_half_of_a_hot_adapter_is_not_a_plan(rate: float, others: tuple[float, ...]) -> None:
    """An adapter that needs two GPUs is unplaced on one, wherever its shares were, and the plan says so."""
    plan = solve(
        fleet(rate, *others),
        PROFILE,
        solver="greedy",
        predictor=AnalyticPredictor(),
        max_gpus=1,
        max_replicas=4,
        margin=0.0,
        verify=False,
    )
    assert plan.status is Status.INFEASIBLE
    assert 0 in plan.unplaced
    assert all(0 not in bin_.adapters and not bin_.is_split for bin_ in plan.bins)
    assert len(plan.bins) == (1 if others else 0)
    assert "'a0'" in plan.reasons[0]
    assert "--gpus" in plan.reasons[0]


def test_the_heaviest_gpus_stay_in_their_order() -> None:
    """Without split adapters, those with the most load stay as they are and the others' adapters are left."""
    bins = tuple(Bin((i,), Settings(1, 8), PROFILE) for i in range(4))
    posed, found = cut(fleet(1.0, 3.0, 2.0, 4.0), bins, 2)
    assert found.bins == (bins[1], bins[3])
    assert found.unplaced == (0, 2)
    assert "--gpus 4" in found.reasons[0]
    assert within_limit(replace(posed, max_gpus=4), Solution(bins)) == Solution(bins)


def test_a_split_adapter_that_is_given_up_makes_room_for_others() -> None:
    """GPUs that only an unplaced adapter used go to those that were to be dropped."""
    halves = tuple(Bin((0,), Settings(1, 8), PROFILE, (0.5,)) for _ in range(2))
    bins = (*halves, Bin((1,), Settings(1, 8), PROFILE), Bin((2,), Settings(1, 8), PROFILE))
    _, found = cut(fleet(16.0, 3.0, 2.0), bins, 3)
    assert found.bins == (*halves, bins[2])
    assert found.unplaced == (2,)
    _, found = cut(fleet(16.0, 9.0, 2.0), bins, 2)
    assert found.bins == bins[2:]
    assert found.unplaced == (0,)


def test_what_is_left_of_a_gpu_has_slots_for_what_it_holds() -> None:
    """Without its largest adapter a server has smaller slots and no more than adapters, unless it had more."""
    workload = fleet(1.0, 1.0, 1.0, ranks=(64, 8, 16))
    full = Bin((0, 1, 2), Settings(3, 64), PROFILE, (0.5, 1.0, 1.0))
    few, spare = replace(full, settings=Settings(1, 64)), replace(full, settings=Settings(8, 64))
    assert without(workload, (full, few, spare), {0}) == (
        Bin((1, 2), Settings(2, 16), PROFILE),
        Bin((1, 2), Settings(1, 16), PROFILE),
        Bin((1, 2), Settings(8, 16), PROFILE),
    )
    assert without(workload, (full,), {1}) == (Bin((0, 2), Settings(2, 64), PROFILE, (0.5, 1.0)),)
    assert without(workload, (full,), {0, 1, 2}) == ()
    assert without(workload, (full,), {7}) == (full,)


def test_a_plan_that_is_cut_down_continues_no_servers() -> None:
    """What moves on running servers is not said of a plan that lost some of them, and kept of one that did not."""
    bins = tuple(Bin((i,), Settings(1, 8), PROFILE) for i in range(2))
    changes, posed = Moves((1,), (0, None)), problem(fleet(1.0, 2.0), max_gpus=1)
    assert within_limit(posed, Solution(bins, moves=changes)).moves is None
    assert within_limit(replace(posed, max_gpus=2), Solution(bins, moves=changes)).moves == changes


@pytest.mark.parametrize("solver", ["replan", "cpsat"])
@pytest.mark.parametrize(("tensor", "stock", "gpus"), [(2, None, 2), (1, 9, 1), (1, None, 1)])
def test_a_replanned_fleet_that_is_cut_down_is_read_back(
    solver: str, tensor: int, stock: int | None, gpus: int, tmp_path: Path
) -> None:
    """A plan for too few GPUs is a valid file, on servers of several GPUs and with a number of GPUs at hand, too."""
    one = replace(PROFILE, engine=replace(PROFILE.engine, tensor_parallel_size=tensor))
    settings = {"predictor": AnalyticPredictor(), "verify": False, "margin": 0.0, "with_headroom": False}
    own = fleet(*[1.5] * 8)
    old = solve(own, one, solver="greedy", **settings)
    given = one if stock is None else GpuKind(one, available=stock)
    plan = solve(
        own.scaled(3.0), given, "moves", solver=solver, old_plan=old, max_gpus=gpus, time_limit_s=3.0, **settings
    )
    assert plan.status is Status.INFEASIBLE
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").moves is None
