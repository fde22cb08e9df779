"""What a router that sees queues would save is said beside the plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

import packer
from packer.arrival import Arrivals
from packer.cluster import Cluster
from packer.planning.behind import ROUTER, fewer_behind_router

PROFILE = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")


@pytest.mark.usefixtures("quarter_hours")
def test_fewer_servers_behind_a_router_are_named_where_they_keep_the_goal() -> None:
    """Adapters that are busy at different times: a server fewer keeps the goal behind the router that is named."""
    fleet = packer.Workload([packer.Adapter(f"a{i}", 16, 1.25) for i in range(44)])
    apart = fleet.with_arrivals(Arrivals("unpredictable"))
    plan = packer.recommend(apart, PROFILE)
    (said,) = (reason for reason in plan.reasons if ROUTER in reason)
    assert f"{plan.n_gpus - 1} GPUs keep the goal" in said
    slots = int(said.partition("max_loras ")[2].partition(")")[0])
    fewer = Cluster.of(PROFILE, plan.n_gpus - 1, max_loras=slots, max_lora_rank=16)
    assert packer.simulate_cluster(apart, fewer, router=ROUTER, seed=plan.seed).slo_used <= 1.0


def test_fleets_with_steady_rates_are_not_simulated_behind_a_router() -> None:
    """A router finds little to even out where rates stay: nothing is simulated, and nothing said."""
    fleet = packer.Workload([packer.Adapter("a", 8, 1.0)])
    for arrivals in (Arrivals(), Arrivals("piecewise", factors=(1.0, 2.0))):
        job = cast("Any", SimpleNamespace(workload=replace(fleet, arrivals=arrivals), spare=0))
        plan = cast("Any", SimpleNamespace(bins=(None, None), verified=True))
        assert fewer_behind_router(job, plan) == ()
