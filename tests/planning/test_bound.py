"""The bound of a recommended plan includes the latency goal, and no plan that keeps the goal refutes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import packer
from packer import Adapter, Lengths, Slo, Workload
from packer.objectives.base import load_objective
from packer.plan import Plan, Status
from packer.planning.prove import prove
from packer.planning.recommend import recommend
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.solvers.base import Problem
from packer.solvers.evaluator import Evaluator


@pytest.fixture(scope="module")
def server() -> Profile:
    """A shipped server."""
    return packer.load_profile("h100-64gb/llama-3.1-8b-instruct")


@pytest.fixture(scope="module")
def fleet() -> Workload:
    """Sixty adapters that fill two servers."""
    lengths = Lengths.constant(500), Lengths.constant(460)
    return Workload([Adapter(f"a{k}", 16 if k % 4 else 32, 0.2) for k in range(60)], *lengths)


@pytest.fixture(scope="module")
def plans(fleet: Workload, server: Profile) -> list[Plan]:
    """Plans for a wide goal, and for one that takes twice the GPUs."""
    return [recommend(fleet, server, slo=Slo.of(2000, itl_ms), margin=0.0) for itl_ms in (100, 25)]


def test_a_tighter_goal_has_a_higher_bound(plans: list[Plan]) -> None:
    """A goal that takes more GPUs moves the bound, which stays at or below the plan's GPUs and is marked."""
    wide, tight = plans
    for plan in plans:
        assert plan.status is Status.FEASIBLE
        assert plan.lower_bound is not None
        assert 1 <= plan.lower_bound <= plan.n_gpus
        assert plan.bound_source.startswith("estimate") is not plan.bound_proven
    assert tight.n_gpus > wide.n_gpus
    assert tight.lower_bound is not None
    assert wide.lower_bound is not None
    assert tight.lower_bound > wide.lower_bound


def test_a_plan_for_several_kinds_has_no_bound_of_one_kind(fleet: Workload, server: Profile) -> None:
    """A bound for one kind of server says nothing of another."""
    cheap = replace(server, name="other", gpu=replace(server.gpu, name="other", price_per_hour=1.0))
    dear = replace(server, gpu=replace(server.gpu, price_per_hour=2.0))
    small = fleet.subset(tuple(range(20)))
    assert recommend(small, [dear, cheap], margin=0.0).lower_bound is None


def test_a_spare_server_counts(plans: list[Plan], fleet: Workload, server: Profile) -> None:
    """If any server may be lost, a plan has one more than the load takes, and at least two; the plan to deploy, which
    is no plan for an objective with a spare server, has one more than the load takes without the margin."""
    of, cases = "gpus:spare=1", ((0.1, 0, "gpus", 1.0), (0.1, 1, "gpus", 2.0), (4.0, 0, "gpus", 7.0))
    for load, spare, objective, known in (*cases, (4.0, 1, of, 8.0), (4.0, 1, "gpus", 7.0)):
        goal = load_objective(objective)
        posed = Problem(fleet.scaled(load), (server,), goal, Evaluator(TwinPredictor(), goal, margin=1.0))
        plan = replace(plans[0], objective_value=(99.0,), statistics={"spare": spare})
        bound = prove(posed, plan, simulated=False)
        assert bound is not None
        assert (bound.value, bound.proven) == (known, True)
