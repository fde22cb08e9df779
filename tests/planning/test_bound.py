"""The bound of a recommended plan includes the latency goal, and no plan that keeps the goal refutes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import packer
from packer import Adapter, Lengths, Slo, Workload
from packer.plan import Plan, Status
from packer.planning.recommend import recommend
from packer.profile import Profile


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
