"""A given number of servers that is too small gets the plan with the most requests within their limits."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

import packer
from packer.cluster import Cluster
from packer.planning.explore import Frontier
from packer.planning.overload import Overload

SLO = "ttft_ms=2000,tpot_ms=100"


@pytest.fixture(scope="module")
def h100() -> packer.Profile:
    return packer.load_profile("h100-64gb/llama-3.1-8b-instruct")


@pytest.fixture(scope="module")
def fleet() -> packer.Workload:
    """30 adapters of three ranks with more load than two H100 serve."""
    weights = 1.0 / np.arange(1, 31) ** 0.7
    adapters = [
        packer.Adapter(f"a{i}", (8, 16, 32)[i % 3], 25.0 * weight / weights.sum()) for i, weight in enumerate(weights)
    ]
    lengths = packer.Lengths.constant(500), packer.Lengths.constant(460)
    return packer.Workload(adapters, *lengths).held_to(SLO)


@pytest.fixture(scope="module")
def job(fleet: packer.Workload, h100: packer.Profile) -> Frontier:
    return Frontier(fleet, h100)


def test_more_requests_keep_their_limits_than_on_the_plan_of_least_latency(
    fleet: packer.Workload, job: Frontier
) -> None:
    """The plan on too few servers places every adapter once, and keeps most requests within limits by one server."""
    before = job.at(2)
    point = job.at_most(2)
    shares = np.zeros(len(fleet))
    for item in point.plan.bins:
        np.add.at(shares, list(item.adapters), item.shares)
    assert np.allclose(shares, 1.0)
    assert not point.holds
    assert point.n_gpus == 2
    assert point.slo_attainment > max(0.5, before.slo_attainment)
    assert job.at(2) is point


def test_the_order_of_equal_servers_makes_no_plan_better(
    fleet: packer.Workload, h100: packer.Profile, job: Frontier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many requests keep their limits on the same servers in any order, to the last digit: sums are exact."""
    bins = [packer.Bin(tuple(range(k, 30, 5)), h100.settings(2, 32), h100) for k in range(5)]
    monkeypatch.setattr(Overload, "_shares", lambda _self, some: [0.1 * item.adapters[0] + 0.1 for item in some])
    assert len({Overload(job)._attainment(some) for some in permutations(bins)}) == 1


def test_the_system_packer_is_that_plan(fleet: packer.Workload, h100: packer.Profile, job: Frontier) -> None:
    """`compare` on too few servers: more requests keep their limits than by hashing or on the most idle server."""
    cluster = Cluster.of(h100, 2, max_loras=32, max_lora_rank=32)
    found = packer.compare_systems(fleet, cluster, ["packer", "hrw", "vllm"], seeds=1, duration_s=600.0, slo=SLO)
    ours, *others = [row.figures["slo_attainment"].mean or 0.0 for row in found]
    assert ours > max(others)
    plan = packer.recommend(fleet, h100, max_gpus=2)
    assert plan.status.value == "infeasible"
    assert sorted(item.max_loras for item in plan.bins) == sorted(item.max_loras for item in job.at_most(2).plan.bins)


def test_a_number_that_keeps_the_goal_stays(h100: packer.Profile) -> None:
    """Where the goal is kept, the plan is the one that keeps it."""
    job = Frontier(packer.Workload([packer.Adapter(f"a{i}", 8, 0.2) for i in range(6)]).held_to(SLO), h100)
    assert job.at_most(1) is job.at(1)
    assert job.at(1).holds
