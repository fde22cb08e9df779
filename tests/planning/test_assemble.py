"""A plan is assembled from what a solver found."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import packer
from packer.planning.settle import likely_slots
from packer.solvers.base import Problem, Solution
from packer.solvers.greedy.solver import Greedy
from packer.testing.analytic import AnalyticPredictor, small_profile


@dataclass
class Rounded:
    """A solver whose bound is that of a linear program: the price of its own plan but for its last digits."""

    name: str = "rounded"

    def supports(self, problem: Problem) -> str | None:
        """Everything."""
        return None

    def solve(self, problem: Problem) -> Solution:
        """Greedy's bins."""
        bins = Greedy().solve(problem).bins
        price = sum(problem.objective.weight(item.profile) for item in bins)
        return Solution(bins, lower_bound=price * (1 + 1e-8), proven=True)


def test_a_bound_may_be_above_the_plan_by_rounding() -> None:
    """How much depends on the size of the figures: a large price has larger errors."""
    fleet = packer.Workload([packer.Adapter(f"a{k}", 8, 1.0) for k in range(3)])
    server = small_profile("dear/m", 30_000.0)
    plan = packer.solve(
        fleet, server, objective="cost", solver=Rounded(), predictor=AnalyticPredictor(1e9), verify=False
    )
    assert plan.n_gpus == 1


class _Six(Greedy):
    """Greedy's plan, with 6 slots."""

    def solve(self, problem: Problem) -> Solution:
        """Greedy's bins, with other slots."""
        found = super().solve(problem)
        return replace(found, bins=tuple(item.with_slots(6) for item in found.bins))


@pytest.mark.parametrize("solver", ["spread", "dlora", "greedy", _Six()])
def test_requests_to_the_base_model_get_no_slot(solver: str | Greedy) -> None:
    """There are no more slots than adapters, also beside requests to the base model, whose slots would only take
    memory."""
    base = (packer.Adapter(f"base{k}", 0, 1.0) for k in range(2))
    fleet = packer.Workload([*base, *(packer.Adapter(f"a{k}", 8, 1.0) for k in range(5))])
    server, predictor = small_profile("h100/m", 1.0), AnalyticPredictor(1e9)
    plan = packer.solve(fleet, server, "gpus", solver=solver, predictor=predictor, max_gpus=1, verify=False)
    (item,) = plan.bins
    assert (len(item.adapters), item.max_loras) == (7, 5)
    assert likely_slots(fleet, item.with_slots(6)) == 5
    paper = packer.solve(fleet, server, "gpus", solver="greedy-paper", predictor=predictor, max_gpus=1, verify=False)
    assert paper.bins[0].max_loras == 8  # a solver's own choice, not one for each
