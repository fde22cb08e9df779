"""Systems side by side: common random numbers, intervals, plans, the number of servers that each needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.errors import IncompatibleError, UnknownNameError
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.operate.systems import FIGURES, Trials, compare_systems, servers_needed
from packer.planning.recommend import recommend
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.uncertainty import SHARES, intervals
from packer.workload import Workload

SLO = {"ttft_ms": 300.0}


@pytest.fixture
def fleet() -> Workload:
    """Twelve adapters, too many requests for one server."""
    return Workload([Adapter(f"a{i}", 8, 1.0) for i in range(12)])


@pytest.fixture
def cluster() -> Cluster:
    """Two servers with an SLO of their own."""
    two = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 2, max_loras=12, max_lora_rank=8)
    return replace(two, slo=SLO)


def test_figures_are_means_over_seeds_with_their_intervals(fleet: Workload, cluster: Cluster) -> None:
    """Each figure is the mean over the seeds' runs, within Student's interval, as `packer simulate` gives it; threads
    change nothing."""
    (found,) = compare_systems(fleet, cluster, ["round-robin"], seeds=3, seed=5, duration_s=60.0)
    assert found.router == "round-robin"
    runs = [simulate_cluster(fleet, cluster, "round-robin", duration_s=60.0, seed=5 + k) for k in range(3)]
    same = {name: row for name, *row in intervals(runs, FIGURES).iter_rows()}
    for name in FIGURES:
        values = np.array([getattr(run, name) for run in runs])
        row = found.figures[name]
        assert row.mean == pytest.approx(values.mean())
        half = 4.302653 * values.std(ddof=1) / np.sqrt(3)  # 97.5 % quantile of Student's t with 2 degrees
        most = 1.0 if name in SHARES else np.inf
        bounds = max(values.mean() - half, 0.0), min(values.mean() + half, most)
        assert (row.low, row.high) == pytest.approx(bounds)
        assert list(row) == pytest.approx(same[name])
    (again,) = compare_systems(fleet, cluster, ["round-robin"], seeds=3, seed=5, duration_s=60.0, jobs=1)
    assert again == found


def test_requests_in_flight_at_the_end_are_no_overload(fleet: Workload, cluster: Cluster) -> None:
    """Servers that serve all that a short run leaves time for are not called overloaded."""
    (found,) = compare_systems(fleet, cluster, ["round-robin"], seeds=1, duration_s=20.0)
    sent = fleet.offered_tok_s * 20.0
    assert found.figures["total_token_throughput"].mean * 20.0 < 0.9 * sent
    assert found.seeds["served"] == (1.0,)


def test_whole_jobs_have_no_token_times(fleet: Workload, cluster: Cluster) -> None:
    """TPOT and ITL of servers that run whole jobs are unknown, not 0."""
    run = simulate_cluster(fleet, cluster, "lrums", duration_s=60.0)
    assert run.completed > 0
    figures = run.to_dict()
    assert {figures[f"{name}_{what}_ms"] for name in ("mean", "p99") for what in ("tpot", "itl")} == {None}
    assert run.per_adapter["mean_tpot_ms"].null_count() == len(fleet)


def test_a_plan_is_one_of_the_systems(fleet: Workload, cluster: Cluster) -> None:
    """System "packer" plans for as many servers, and is held to the same SLO."""
    found = compare_systems(fleet, cluster, ["packer", "vllm"], seeds=2, duration_s=30.0)
    assert [each.router for each in found] == ["plan", "most-idle"]
    assert all(each.figures["slo_attainment"].runs == 2 for each in found)


def test_fewest_servers_for_an_slo(fleet: Workload, cluster: Cluster) -> None:
    """The SLO holds with the number that is found and not with one server less."""
    busy = fleet.scaled(4.0)  # for two minutes: each server's first use of an adapter takes longer than the SLO
    found = servers_needed(busy, cluster, "round-robin", Trials(1, duration_s=120.0), share=0.9)
    assert found is not None
    assert found.servers > 1

    def kept(n: int) -> float:
        run = simulate_cluster(busy, cluster.resized(n), "round-robin", duration_s=120.0)
        return run.slo_attainment

    assert kept(found.servers) >= 0.9 > kept(found.servers - 1)
    assert servers_needed(busy, cluster, "round-robin", Trials(1, duration_s=120.0), share=0.9, most=1) is None


def test_sizes_need_an_slo_and_equal_servers(fleet: Workload, cluster: Cluster) -> None:
    """Without an SLO, or with servers of several kinds, there is no number to find; the fleet's SLO is one."""
    bare = replace(cluster, slo={})
    with pytest.raises(IncompatibleError, match="give its limits"):
        servers_needed(fleet, bare, "vllm", Trials(1, slo="none"))
    found = servers_needed(fleet, bare, "vllm", Trials(1, duration_s=60.0))
    assert found is not None
    assert found.figures["slo_attainment"].mean >= fleet.slo.share
    placed = replace(cluster, placement=({"a0": 1.0}, {}))
    with pytest.raises(IncompatibleError, match="equal servers"):
        servers_needed(fleet, placed, "vllm")
    with pytest.raises(UnknownNameError, match="Known: affinity"):
        compare_systems(fleet, cluster, ["vlm"])


@pytest.mark.parametrize(
    ("goal", "share"), [("ttft_ms=2000,tpot_ms=100", 0.99), ("p95_ttft_ms=2000,mean_itl_ms=100", 0.95)]
)
def test_size_of_a_plan_is_that_of_solve(goal: str, share: float) -> None:
    """System "packer" needs as many servers as `packer solve` plans for the same goal, of requests and of adapters;
    replicas of a hot adapter are included."""
    server = load_profile("h100-64gb/llama-3.1-8b-instruct")
    long = Lengths.constant(500), Lengths.constant(460)
    fleet = Workload([Adapter("hot", 16, 14.0), Adapter("b", 8, 0.1)], *long).held_to(goal)
    assert fleet.slo.share == share
    plan = recommend(fleet, server)
    four = Cluster.of(server, 4, max_loras=2, max_lora_rank=16)
    found = servers_needed(fleet, four, "packer", Trials(1, duration_s=600.0, slo=fleet.slo))
    assert found is not None
    assert found.servers == plan.n_gpus > 1


def test_no_number_of_servers_is_found_where_no_plan_keeps_the_goal(fleet: Workload, cluster: Cluster) -> None:
    """A limit below the time of one step has no number of servers; the search ends at once."""
    assert servers_needed(fleet, replace(cluster, slo={"ttft_ms": 1.0}), "packer", Trials(1)) is None


def test_servers_that_do_not_start_have_no_figures(fleet: Workload, cluster: Cluster) -> None:
    """A system has no tokens per second then but a reason, and no number of servers is searched."""
    large = Cluster.of(cluster.kinds[0].profile, 2, max_loras=2000, max_lora_rank=64)
    (row,) = compare_systems(fleet, large, ["vllm"], seeds=2, duration_s=30.0)
    assert "2000 slots of rank 64" in row.failed
    assert {figure.mean for figure in row.figures.values()} == {None}
    assert servers_needed(fleet, large, "vllm", Trials(2)).failed == row.failed  # type: ignore[union-attr]


def test_the_search_for_a_size_does_not_skip_numbers(
    fleet: Workload, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that holds is found below one that does not."""
    holding = {2, 5, 6}

    def runs(given: Sequence[dict[str, Any]], *_: Any) -> list[dict[str, Any]]:
        held = len(given[0]["cluster"]) in holding
        return [dict.fromkeys((*FIGURES, "served"), float(held)) | {"router": "hrw", "failed": ""} for _ in given]

    monkeypatch.setattr("packer.operate.systems._run_all", runs)
    found = servers_needed(fleet, cluster, "hrw", Trials(2), share=0.9)
    assert found is not None
    assert found.servers == 2


def test_a_placement_is_that_of_systems_that_serve_plans(fleet: Workload, cluster: Cluster) -> None:
    """A cluster's placement binds the system "packer"; others serve all adapters everywhere, or place them."""
    halves = ({f"a{i}": 1.0 for i in range(10)}, {"a10": 1.0, "a11": 1.0})
    both = [replace(cluster, placement=halves), cluster]
    found = [compare_systems(fleet, each, ["vllm", "dlora"], seeds=1, duration_s=30.0) for each in both]
    assert found[0] == found[1]
    (bound,) = compare_systems(fleet, both[0], ["packer"], seeds=1, duration_s=30.0)
    assert bound != compare_systems(fleet, cluster, ["packer"], seeds=1, duration_s=30.0)[0]


@pytest.mark.parametrize("system", ["packer", "dlora"])
def test_a_simulation_applies_the_placement_of_its_system(fleet: Workload, cluster: Cluster, system: str) -> None:
    """`simulate_cluster` serves what `compare_systems` compares; a placement that it would ignore is refused."""
    run = simulate_cluster(fleet, cluster, system, duration_s=30.0)
    assert run.cluster.placement is not None
    (row,) = compare_systems(fleet, cluster, [system], seeds=1, duration_s=30.0)
    assert row.figures["mean_ttft_ms"].mean == run.mean_ttft_ms
    if system == "dlora":
        with pytest.raises(IncompatibleError, match="without a placement"):
            simulate_cluster(fleet, run.cluster, system, duration_s=30.0)


@pytest.mark.usefixtures("local_ray")
def test_ray_gives_the_same_figures(fleet: Workload, cluster: Cluster) -> None:
    """A local Ray cluster gives what threads give, with the same call."""
    found = [
        compare_systems(fleet, cluster, ["vllm"], seeds=2, duration_s=30.0, backend=backend)
        for backend in ("threading", "ray")
    ]
    assert found[0] == found[1]


def test_a_plan_for_one_kind_is_made_and_for_several_is_to_be_given(fleet: Workload, cluster: Cluster) -> None:
    """Which kinds of server there are is a question for packer solve."""
    other = Cluster.of(load_profile("h100-64gb/qwen-2.5-7b-instruct"), 1, max_loras=12, max_lora_rank=8)
    both = replace(cluster, kinds=(*cluster.kinds, *other.kinds), servers=(*cluster.servers, *other.servers))
    assert len(both.kinds) == 2
    with pytest.raises(IncompatibleError, match="a plan for several is made by packer solve"):
        compare_systems(fleet, both, ["packer"], seeds=1, duration_s=10.0)
    (found,) = compare_systems(fleet, cluster, ["packer"], seeds=1, duration_s=10.0)
    assert found.servers == 2
