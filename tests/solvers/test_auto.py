"""`auto`: greedy, proof and refinement in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from monotone import Imitating, MonotonePredictor, problem

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import IncompatibleError
from packer.evaluation import Evaluations
from packer.objectives.latency import Latency
from packer.plan import Status
from packer.planning.solve import solve
from packer.planning.verify import check
from packer.solvers import auto
from packer.solvers.auto import Auto
from packer.solvers.base import Solution
from packer.solvers.columns.exact import ExactSearch
from packer.solvers.greedy.solver import Greedy
from packer.solvers.slots import real_bins
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.workload import Workload


@pytest.mark.parametrize(("n", "rates"), [(10, (3.0, 2.0)), (40, (1.6, 0.8, 0.4)), (200, (0.1, 0.05))])
def test_auto_never_needs_more_gpus_than_greedy(n: int, rates: tuple[float, ...]) -> None:
    """The plan is complete, no larger than greedy's, and comes with a bound."""
    task = problem(random_fleet(n, seed=n, rates=rates), time_limit_s=8.0)
    found = Auto().solve(task)
    check(task, found)
    assert not found.unplaced
    assert found.lower_bound is not None
    assert found.lower_bound <= len(found.bins) <= len(Greedy().solve(task).bins)


class Imitator(Imitating, MonotonePredictor):
    """The same figures, from a predictor that says that it learned from the twin."""


def test_the_twin_confirms_smaller_plans_of_trained_predictors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller plan that the twin refuses is dropped for greedy's; one that it accepts is kept."""
    fleet = random_fleet(12, seed=3, rates=(3.1, 2.3, 1.3), ranks=(8,))
    wasteful = tuple(real_bins(problem(fleet), [(i,) for i in range(12)]))
    monkeypatch.setattr(auto, "start", lambda _problem, *_: Solution(wasteful))
    task = problem(fleet, predictor=Imitator(), time_limit_s=8.0)
    for answer in (True, False):
        monkeypatch.setattr(auto, "holds_in_twin", lambda *_args, answer=answer: answer)
        assert (len(Auto().solve(task).bins) < 12) is answer


def test_without_time_for_the_twin_greedys_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the time is up nothing is simulated, and a smaller plan of a trained predictor is not taken unconfirmed."""
    fleet = random_fleet(12, seed=3, rates=(3.1, 2.3, 1.3), ranks=(8,))
    wasteful = tuple(each for each in real_bins(problem(fleet), [(i,) for i in range(12)]) if each is not None)
    stopped: list[bool] = []

    def searched(search: ExactSearch) -> None:
        stopped.append(True)
        search.bins = search.bins[:6]

    def never(*_: object) -> bool:
        raise AssertionError("simulated after the time was up")

    monkeypatch.setattr(auto, "start", lambda _problem, *_: Solution(wasteful))
    monkeypatch.setattr(ExactSearch, "run", searched)
    monkeypatch.setattr(auto, "holds_in_twin", never)
    found = Auto().solve(problem(fleet, predictor=Imitator(), stop=lambda: bool(stopped)))
    assert found.bins == wasteful
    assert found.details["not_confirmed_in_time"] == 6


def test_a_very_short_limit_still_gives_a_plan() -> None:
    """When the time is up at once the plan is greedy's, complete."""
    fleet = random_fleet(30, seed=4)
    found = Auto().solve(problem(fleet, time_limit_s=1e-6))
    assert len(found.bins) + len(found.unplaced) > 0
    placed = sorted([i for each in found.bins for i in each.adapters] + list(found.unplaced))
    assert placed == list(range(30))


def test_too_few_gpus_say_how_many_are_needed() -> None:
    """A limit below the bound is infeasible with reasons, never an exception."""
    found = Auto().solve(problem(random_fleet(40, seed=2), max_gpus=1, time_limit_s=5.0))
    assert found.unplaced
    assert found.reasons


def test_what_the_refinements_cannot_take_is_left_to_greedy() -> None:
    """With replicas allowed the plan is greedy's."""
    task = replace(problem(random_fleet(20, seed=3)), max_replicas=2)
    assert Auto().solve(task).bins == Greedy().solve(task).bins


def test_latency_keeps_the_number_of_gpus() -> None:
    """On a fixed number of GPUs every one of them is used and no adapter is left out."""
    fleet = random_fleet(30, seed=5)
    task = problem(fleet, objective=Latency(), max_gpus=5, time_limit_s=3.0)
    found = Auto().solve(task)
    assert not found.unplaced
    assert len(found.bins) <= 5
    assert sorted(i for each in found.bins for i in each.adapters) == list(range(30))


class FasterIfDearer(MonotonePredictor):
    """A predictor whose TTFT falls with the price of the GPU."""

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin; one row per bin, in order."""
        found = super().evaluate(workload, bins)
        return replace(found, mean_ttft_ms=found.mean_ttft_ms / [each.profile.gpu.price_per_hour for each in bins])


SLOW, FAST = small_profile("slow", 1.0), small_profile("fast", 3.0)


@pytest.mark.parametrize("solver", ["auto", "cpsat"])
def test_of_several_kinds_the_best_one_is_taken_on_a_fixed_number_of_gpus(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A solver that starts from the plan for one kind of server is tried with each kind, whichever comes first."""
    monkeypatch.setattr("packer.solvers.cpsat.solver._WORK_PER_S", 0.01)
    plan = solve(
        random_fleet(12, seed=1), [SLOW, FAST], Latency(), solver=solver, predictor=FasterIfDearer(), max_gpus=3,
        margin=0.0, verify=False, with_headroom=False, time_limit_s=5.0,
    )  # fmt: skip
    assert {item.profile for item in plan.bins} == {FAST}


@pytest.mark.parametrize("solver", ["auto", "cpsat"])
def test_running_servers_of_another_kind_are_refused(solver: str) -> None:
    """A solver that starts from a replan says why it can't, instead of a plan with servers that are not offered."""
    fleet, predictor = random_fleet(12, seed=1), MonotonePredictor()
    old = solve(fleet, SLOW, solver="greedy", predictor=predictor, margin=0.0, verify=False, with_headroom=False)
    with pytest.raises(IncompatibleError, match="GPUs of another type"):
        solve(fleet, FAST, solver=solver, predictor=predictor, old_plan=old, margin=0.0, verify=False)


COOL = [Adapter(f"a{i}", 8, 4.0) for i in range(6)]


@pytest.mark.parametrize(
    ("adapters", "changes"),
    [
        *(([Adapter("hot", 8, 15.0), *COOL], {"solver": name}) for name in ("auto", "exact", "bounds")),
        (COOL, {"solver": "auto", "objective": "cost"}),
        (COOL, {"solver": "auto", "max_replicas": 2}),
    ],
)
def test_a_limit_on_gpus_makes_a_plan_infeasible(adapters: list[Adapter], changes: dict[str, Any]) -> None:
    """Whatever stands in the way besides, a plan has at most the GPUs allowed, and says who has no place."""
    plan = solve(
        Workload(adapters),
        small_profile(),
        predictor=AnalyticPredictor(),
        max_gpus=1,
        time_limit_s=5.0,
        margin=0.0,
        verify=False,
        **changes,
    )
    assert plan.status is Status.INFEASIBLE
    assert plan.n_gpus == 1
    assert plan.unplaced
    assert any("1 GPU can't hold" in reason for reason in plan.reasons)
