"""The estimate of the GPUs needed says which servers it leaves out, and ends by its work, not by the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from monotone import problem

from packer.plan import Plan
from packer.planning.solve import solve
from packer.solvers.columns import estimate
from packer.solvers.columns.estimate import with_estimate
from packer.solvers.evaluator import Evaluator
from packer.solvers.feasibility import Feasibility
from packer.testing.analytic import random_fleet, small_profile

FLEET = random_fleet(60, seed=5, rates=(1.6, 0.8), ranks=(8, 32))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan of 20 GPUs without a bound."""
    settings = {"predictor": "twin", "verify": False, "with_headroom": False}
    return solve(FLEET, small_profile(), "latency", solver="spread", max_gpus=20, **settings)


def test_servers_that_it_leaves_out_are_named(plan: Plan) -> None:
    """Where servers may hold fewer adapters than there are, the estimate says how many."""
    found = with_estimate(problem(FLEET), plan)
    assert found.lower_bound is not None
    assert found.bound_source == "estimate: trained trees find no fuller servers"
    few = with_estimate(replace(problem(FLEET), most_adapters=5), plan)
    assert few.lower_bound == 12 > found.lower_bound > 1
    assert few.bound_source.endswith("no fuller servers of at most 5 adapters")
    assert not few.bound_proven


def test_it_ends_after_so_many_servers(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is, the same servers are evaluated, and the estimate is the same."""
    made: list[Feasibility] = []
    monkeypatch.setattr(estimate, "Feasibility", lambda *given: made.append(Feasibility(*given)) or made[-1])
    monkeypatch.setattr(estimate, "MOST_EVALUATED", 20)
    with_estimate(problem(FLEET), plan)
    assert made[0].evaluated > 20
    monkeypatch.setattr(estimate, "MOST_EVALUATED", 20_000)
    assert len({with_estimate(problem(FLEET), plan).lower_bound for _ in range(2)}) == 1
    assert made[1].evaluated == made[2].evaluated > made[0].evaluated


def test_none_is_made_where_the_search_simulates(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that trees were not trained on would be simulated by the hundred, and the trees say nothing of them."""
    monkeypatch.setattr(Evaluator, "simulates", True)
    monkeypatch.setattr(estimate, "Feasibility", None)
    assert with_estimate(problem(FLEET), plan) is plan
