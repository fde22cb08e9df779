"""Combinations side by side: what fails is marked and costs no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import ModelError, PackerError, VerificationError
from packer.evaluation import Evaluations
from packer.plan import Plan
from packer.planning import compare
from packer.planning.compare import Comparison, PlanFigures, Result
from packer.planning.solve import solve
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.testing.analytic import AnalyticPredictor, small_profile
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

    def sometimes(workload: Workload, profile: Profile, objective: Any = "gpus", *, solver: str, **more: Any) -> Plan:
        if solver == "maxbase":
            raise error
        return solve(workload, profile, objective, solver=solver, **more)

    monkeypatch.setattr(compare, "solve", sometimes)
    results = list(Comparison(FLEET, toy_profile, ("maxbase", "greedy")).run())
    assert [result.outcome for result in results] == [f"failed: {error}", "ok"]
    assert results[0].to_dict()["status"] == "failed"


def test_plans_are_evaluated_by_their_objective(toy_profile: Profile) -> None:
    """A plan that serves the nominal rates but not the loads of its objective is marked and not verified."""
    rows = list(Comparison(FLEET, toy_profile, ("greedy",), ("gpus", "headroom:factor=1000")).run())
    assert [row.outcome for row in rows] == ["ok", "breaks headroom on 1"]
    assert [row.plan.verified for row in rows if row.plan is not None] == [True, False]


def test_a_solver_that_chooses_the_number_of_gpus_is_compared_by_its_latency(toy_profile: Profile) -> None:
    """Under an objective for a given number of GPUs, greedy packs the fewest and has its latency beside the others'."""
    rows = list(Comparison(FLEET, toy_profile, ("greedy", "spread"), ("latency",), max_gpus=2).run())
    assert [row.outcome for row in rows] == ["ok", "ok"]
    assert [row.plan.n_gpus for row in rows if row.plan] == [1, 2]
    assert all(row.reference is not None and row.reference.mean_ttft_ms > 0 for row in rows)


def test_a_plan_by_greedy_is_made_once(toy_profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number of GPUs, which solvers that spread get, is that of its own row."""
    made: list[str] = []
    monkeypatch.setattr(compare, "solve", lambda *given, **more: made.append(more["solver"]) or solve(*given, **more))
    rows = list(Comparison(FLEET, toy_profile, ("spread", "greedy", "random")).run())
    assert [row.outcome for row in rows] == ["ok", "ok", "ok"]
    assert made == ["greedy", "spread", "random"]


def test_solvers_that_spread_get_the_gpus_of_the_objective(toy_profile: Profile) -> None:
    """Beside greedy's plan that survives the loss of a server, a plan on fewer servers shows no difference of
    solvers; on one server it does not survive, which its outcome says."""
    both = Comparison(FLEET, toy_profile, ("spread", "greedy"), ("gpus", "gpus:spare=1"))
    rows = list(both.run())
    assert [row.plan.n_gpus for row in rows if row.plan] == [1, 1, 2, 2]
    assert [row.outcome for row in rows] == ["ok"] * 4
    few = list(replace(both, max_gpus=1).run())
    assert [row.outcome for row in few] == ["ok", "ok", "infeasible by the predictor", "infeasible by the predictor"]


def test_queues_of_minutes_are_not_ok() -> None:
    """A plan that serves its load with a TTFT far beyond the fleet's limit is marked, one within it is not."""
    profile = small_profile()
    quick, slow = (
        PlanFigures.of("twin", FLEET, [Bin((0,), profile.settings(1, 8), profile)], Evaluations.of([row]))
        for row in (
            replace(
                TwinPredictor().evaluate(FLEET, [Bin((0,), profile.settings(1, 8), profile)])[0],
                mean_ttft_ms=ttft,
            )
            for ttft in (100.0, 202_000.0)
        )
    )
    plan = solve(FLEET, profile, verify=False)
    row = Result(len(FLEET), "gpus", "greedy", "twin", plan)
    assert replace(row, reference=quick).outcome == "ok"
    assert replace(row, reference=slow).outcome == "TTFT beyond the limit on 1"
