"""On too few servers every adapter gets answers, and of such plans most requests keep their limits."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

import packer
from packer.cluster import Cluster
from packer.planning.explore import Frontier
from packer.planning.overload import Overload, _Kept

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


@pytest.mark.usefixtures("whole_hours")
def test_more_requests_keep_their_limits_than_on_the_plan_of_least_latency(
    fleet: packer.Workload, h100: packer.Profile
) -> None:
    """The plan on too few servers places every adapter once, and keeps most requests within limits by one server."""
    job = Frontier(fleet, h100)
    before = job.at(2)
    point = Overload(job).at(2)
    shares = np.zeros(len(fleet))
    for item in point.plan.bins:
        np.add.at(shares, list(item.adapters), item.shares)
    assert np.allclose(shares, 1.0)
    assert not point.holds
    assert point.n_gpus == 2
    assert point.slo_attainment > before.slo_attainment
    assert job.at(2) is point


def test_no_adapter_is_left_without_an_answer(h100: packer.Profile) -> None:
    """On a server of few slots the hottest adapters would keep them, and their limits, while the others get nothing."""
    weights = 1.0 / np.arange(1, 13) ** 0.7
    adapters = [packer.Adapter(f"a{i}", 8, 25.0 * weight / weights.sum()) for i, weight in enumerate(weights)]
    fleet = packer.Workload(adapters, *[packer.Lengths.constant(480)] * 2)
    plan = packer.recommend(fleet, h100, max_gpus=1)
    assert plan.adapters is not None
    assert not plan.adapters.silent.any()
    assert "without an answer" not in plan.decision


@pytest.mark.usefixtures("whole_hours")
def test_what_answers_for_all_cost_is_told(h100: packer.Profile) -> None:
    """Where fewer slots would keep far more requests within limits by leaving adapters without an answer, a sentence
    has both shares, and the number of these adapters."""
    fleet = packer.read_workload("examples/workloads/azure-conv-2023.csv")
    plan = packer.recommend(fleet, h100, max_gpus=1)
    (told,) = [each for each in plan.reasons if each.startswith("Answers to")]
    (item,) = plan.bins
    few = [packer.simulate(fleet, h100, max_loras=n, max_lora_rank=32) for n in (4, 2, 1) if n < item.max_loras]
    best = max(few, key=lambda run: run.slo_attainment)
    own = float(np.nan_to_num(plan.evaluations.slo_attainment[0]))
    assert best.slo_attainment > own + 0.05
    assert f"{own:.1%} are, with fewer slots {best.slo_attainment:.1%} would be" in told
    assert f"Answers to {int(np.isnan(best.adapter_mean_ttft_ms).sum())} adapters cost" in told
    assert not any(each.startswith("Answers to") for each in packer.recommend(fleet, h100, max_gpus=3).reasons)


def test_without_limits_most_of_the_load_is_served(h100: packer.Profile) -> None:
    """On too few servers without a latency goal, the slots are those that serve most of the load, and the text says
    what the goal is."""
    fleet = packer.read_workload("examples/workloads/azure-conv-2023.csv")
    plan = packer.recommend(fleet, h100, max_gpus=1, slo="none")
    (item,) = plan.bins
    most = packer.simulate(fleet, h100, max_loras=96, max_lora_rank=32).served_share
    assert item.max_loras < 96
    assert plan.evaluations.total_token_throughput[0] / plan.evaluations.offered_tok_s[0] > 1.2 * most
    assert "the goal breaks on 1 server" in plan.decision
    assert "The goal: every server serves its load, with no latency limits." in plan.decision


@pytest.mark.usefixtures("whole_hours")
def test_a_number_of_gpus_that_serves_the_load_is_planned_with(h100: packer.Profile) -> None:
    """Without limits, the plan has no more GPUs than a row of the table that keeps the goal."""
    fleet = packer.read_workload("examples/workloads/azure-conv-2023.csv")
    plan = packer.recommend(fleet, h100, slo="none")
    assert plan.n_gpus == min(row["n_gpus"] for row in plan.frontier if row["holds"])


def test_gpus_at_hand_are_used(h100: packer.Profile) -> None:
    """That one adapter more keeps its limits by chance is no reason for half of the GPUs, on which all wait longer."""
    fleet = packer.read_workload("examples/workloads/azure-code-2023.csv")
    plan = packer.recommend(fleet, h100, max_gpus=4)
    assert plan.n_gpus == 4
    assert plan.frontier[-1]["slo_attainment"] == max(row["slo_attainment"] for row in plan.frontier)


def test_late_answers_for_all_are_better_than_long_queues_for_some(h100: packer.Profile) -> None:
    """A plan that uses a few times its limits stays, even if more requests keep theirs while a queue grows."""
    classes = (("chat", packer.goal.Limits(500.0, 40.0)), ("batch", packer.goal.Limits(15_000.0, 200.0)))
    adapters = [packer.Adapter(f"a{i}", 16, 0.7, slo_class=("chat", "batch")[i % 2]) for i in range(28)]
    job = Frontier(packer.Workload(adapters, slo=packer.Slo(classes=classes)), h100)
    used = max(job.kept.used(job.at(1).plan.bins, [job.kept.given]))
    assert 1.0 < used < 8.0
    assert Overload(job).at(1) is job.at(1)


@pytest.mark.usefixtures("whole_hours")
def test_the_next_smaller_number_of_gpus_is_shown_with_its_best_slots(h100: packer.Profile) -> None:
    """The table of GPUs says of one GPU fewer what it gives with the slots that suit it, as --gpus does; not what a
    search tried last, which went on to more slots while the limits were broken."""
    adapters = [packer.Adapter(f"a{i}", (8, 32)[i % 2], 0.065) for i in range(40)]
    fleet = packer.Workload(adapters, packer.Lengths.gamma(mean=5000.0, cv=0.7), packer.Lengths.constant(150))
    plan = packer.recommend(fleet, h100)
    given = packer.recommend(fleet, h100, max_gpus=1)
    assert (plan.n_gpus, given.n_gpus) == (2, 1)
    assert plan.frontier[0]["slo_attainment"] == given.frontier[0]["slo_attainment"]
    assert packer.frontier(fleet, h100)[0].slo_attainment == given.frontier[0]["slo_attainment"]


def test_the_order_of_equal_servers_makes_no_plan_better(
    fleet: packer.Workload, h100: packer.Profile, job: Frontier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many requests keep their limits on the same servers in any order, to the last digit: sums are exact."""
    bins = [packer.Bin(tuple(range(k, 30, 5)), h100.settings(2, 32), h100) for k in range(5)]
    monkeypatch.setattr(
        Overload, "_kept", lambda _self, some: [_Kept(True, 0, 1.0, 0.1 * item.adapters[0] + 0.1) for item in some]
    )
    assert len({Overload(job)._worth(some) for some in permutations(bins)}) == 1


def test_hardly_more_requests_within_limits_are_no_reason_for_a_longer_wait(
    job: Frontier, h100: packer.Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of least latency stays until another keeps clearly more requests within their limits."""
    first, more, most = ([packer.Bin((k,), h100.settings(2, 32), h100)] for k in range(3))
    shares = (0.5, 0.505, 0.6)
    monkeypatch.setattr(
        Overload, "_kept", lambda _self, some: [_Kept(True, 0, 1.0, shares[item.adapters[0]]) for item in some]
    )
    monkeypatch.setattr(Overload, "_slotted", lambda _self, bins: bins)
    assert Overload(job).best([first, more], 1) is first
    assert Overload(job).best([first, more, most], 1) is most


def test_the_system_packer_is_that_plan(fleet: packer.Workload, h100: packer.Profile, job: Frontier) -> None:
    """`compare` on too few servers: more requests keep their limits than by hashing or on the most idle server."""
    cluster = Cluster.of(h100, 2, max_loras=32, max_lora_rank=32)
    found = packer.compare_systems(fleet, cluster, ["packer", "hrw", "vllm"], seeds=1, duration_s=600.0, slo=SLO)
    ours, *others = [row.figures["slo_attainment"].mean or 0.0 for row in found]
    assert ours > max(others)
    plan = packer.recommend(fleet, h100, max_gpus=2)
    assert plan.status.value == "infeasible"
    assert sorted(item.max_loras for item in plan.bins) == sorted(
        item.max_loras for item in Overload(job).at(2).plan.bins
    )


def test_a_number_that_keeps_the_goal_stays(h100: packer.Profile) -> None:
    """Where the goal is kept, the plan is the one that keeps it."""
    job = Frontier(packer.Workload([packer.Adapter(f"a{i}", 8, 0.2) for i in range(6)]).held_to(SLO), h100)
    assert Overload(job).at(1) is job.at(1)
    assert job.at(1).holds


def test_gpus_that_suffice_without_the_margin_keep_the_goal() -> None:
    """Servers at hand that keep the goal at the rates as given, and break it only at those raised by the margin, get a
    plan that does so: one of an overload gives up adapters for nothing."""
    server = packer.estimate_profile("google/gemma-3-27b-it", "h200", max_model_len=8192)
    ranks = np.random.default_rng(1).choice([8, 16, 32, 64], 300, p=[0.4, 0.3, 0.2, 0.1]).tolist()
    lengths = packer.Lengths.gamma(1500.0, 1.0), packer.Lengths.gamma(196.0, 1.0)
    fleet = packer.Workload([packer.Adapter(f"a{i}", rank, 5.0 / 300) for i, rank in enumerate(ranks)], *lengths)
    plan = packer.recommend(fleet, server, max_gpus=3, max_replicas=3, verify=False)
    assert (plan.n_gpus, plan.status.value) == (3, "infeasible")
    assert plan.adapters is not None
    assert plan.adapters.slo_used.max() < 1.0
    assert "with rates raised by the margin" in plan.decision
