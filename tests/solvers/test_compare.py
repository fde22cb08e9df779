"""Combinations side by side: what fails is marked and costs no other."""

from __future__ import annotations

from typing import Any

import pytest

from packer.adapter import Adapter
from packer.errors import ModelError, PackerError, VerificationError
from packer.plan import Plan
from packer.profile import Profile
from packer.solvers import compare
from packer.solvers.api import solve
from packer.solvers.compare import Comparison
from packer.testing.analytic import AnalyticPredictor
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{i}", 8, 0.05) for i in range(6)])


@pytest.fixture(autouse=True)
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A predictor for the search that finds everything feasible; plans are still simulated by the twin."""

    monkeypatch.setattr("packer.solvers.evaluator.load_predictor", lambda *_, **__: AnalyticPredictor(1e9))


@pytest.mark.parametrize("error", [VerificationError("a rule is broken"), ModelError("a model is damaged")])
def test_a_combination_that_fails_costs_no_other(
    error: PackerError, toy_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row says what happened, and the others are there."""

    def sometimes(
        workload: Workload, profile: Profile, objective: Any = "gpus", *, solver: str, **more: Any
    ) -> Plan:
        if solver == "maxbase":
            raise error
        return solve(workload, profile, objective, solver=solver, **more)

    monkeypatch.setattr(compare, "solve", sometimes)
    results = list(Comparison(FLEET, toy_profile, ("maxbase", "greedy")).run())
    assert [result.outcome for result in results] == [f"failed: {error}", "ok"]
    assert results[0].to_dict()["status"] == "failed"


def test_plans_are_judged_by_their_objective(toy_profile: Profile) -> None:
    """A plan that serves the nominal rates but not the loads of its objective is marked and not verified."""
    rows = list(Comparison(FLEET, toy_profile, ("greedy",), ("gpus", "headroom:factor=1000")).run())
    assert [row.outcome for row in rows] == ["ok", "breaks headroom on 1"]
    assert [row.plan.verified for row in rows if row.plan is not None] == [True, False]
