"""Whenever a search is stopped, there is a plan, or it says which adapters have no place and why."""

from __future__ import annotations

import pytest

from packer import registry
from packer.adapter import Adapter
from packer.plan import Plan
from packer.planning.solve import solve
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{i}", (8, 16, 32)[i % 3], 0.05 * (1 + i % 7)) for i in range(60)])


@pytest.mark.parametrize("after", [0, 3, 25])
@pytest.mark.parametrize("name", registry.names("solver"))
def test_every_solver_can_be_stopped(name: str, after: int) -> None:
    """Stopped at once, soon or later: complete, or infeasible with reasons; never an exception."""
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls > after

    old: Plan | None = None
    if name == "replan":
        old = solve(FLEET, small_profile(), predictor=AnalyticPredictor())
    plan = solve(FLEET, small_profile(), solver=name, predictor=AnalyticPredictor(), stop=stop, old_plan=old)
    assert calls > 0
    if plan.unplaced or not plan.evaluations.feasible.all():
        assert plan.status.value == "infeasible"
        assert plan.reasons
    else:
        assert plan.bins
        assert plan.status.value in ("feasible", "optimal")
    assert plan.interrupted or after > 0
