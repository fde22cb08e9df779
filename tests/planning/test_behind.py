"""What a router that sees queues would save is said beside the plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

import packer
from packer.arrival import Arrivals
from packer.cluster import Cluster
from packer.planning.behind import ROUTER, _held, fewer_behind_router
from packer.planning.kept import SERVER_HOURS, Hour
from packer.twin.hours import FRESH_HOURS

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


@pytest.mark.parametrize(("servers", "further"), [(2, SERVER_HOURS // 2), (15, FRESH_HOURS)])
def test_a_cluster_is_simulated_in_a_few_of_many_fresh_hours(
    monkeypatch: pytest.MonkeyPatch, servers: int, further: int
) -> None:
    """A plan has hundreds of fresh hours of a server each, where an hour of a cluster has all servers: so few are
    simulated as make a set of fresh hours, each hour once, and their number is said."""
    fleet = packer.Workload([packer.Adapter("a", 8, 1.0)], arrivals=Arrivals("unpredictable"))
    planned, given, seen = Hour(fleet, 1), Hour(fleet, 2), list[int]()
    fresh = [Hour(fleet, 3 + place) for place in range(300)]
    kept = SimpleNamespace(hours=[planned, given], given=given, tried=lambda *_: fresh)

    def simulated(*_: Any, seed: int, **_more: Any) -> SimpleNamespace:
        seen.append(seed)
        return SimpleNamespace(slo_used=0.5)

    monkeypatch.setattr("packer.twin.cluster.simulate.simulate_cluster", simulated)
    job = cast("Any", SimpleNamespace(kept=kept, over=lambda: False, number=5))
    cluster = Cluster.of(PROFILE, servers, max_loras=1, max_lora_rank=8)
    assert _held(job, cast("Any", SimpleNamespace(bins=())), cluster) == 2 + further
    assert seen == list(range(1, 3 + further))
