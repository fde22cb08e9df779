"""The search by number of GPUs: slots, parts of hot adapters and spare GPUs until the limits are kept."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import packer
from packer import Adapter, Bin, Lengths, Workload
from packer.arrival import Arrivals, Bursts
from packer.fit.estimate import estimate_profile
from packer.fit.models import model_named
from packer.io.plans import plan_to_dict
from packer.kv_shape import KvShape
from packer.plan import Status
from packer.planning.explore import Frontier
from packer.planning.loop import LITTLE
from packer.planning.recommend import Deployment
from packer.planning.settle import likely_slots, with_best_slots
from packer.predictors.learned import LearnedPredictor
from packer.profile import Profile
from packer.solvers.candidates import candidates_of

LONG = (Lengths.constant(500), Lengths.constant(460))
"""Lengths with which few requests fill a server."""


def test_the_frontier_is_the_same_each_time_and_rises_in_gpus(fleet: Workload, server: Profile) -> None:
    """Points have distinct numbers of GPUs, none starves, and the same seed gives the same figures."""
    points = packer.frontier(fleet, server, max_gpus=3)
    assert [p.n_gpus for p in points] == sorted({p.n_gpus for p in points})
    assert all(p.plan.n_gpus == p.n_gpus and not p.starving for p in points)
    assert all(p.worst_adapter_ttft_ms >= p.p95_ttft_ms * 0.5 for p in points)
    again = packer.frontier(fleet, server, max_gpus=3)
    assert [p.to_dict() for p in again] == [p.to_dict() for p in points]


def test_the_frontier_stays_within_the_gpus_at_hand(fleet: Workload, server: Profile) -> None:
    """GPUs at hand of a kind limit the frontier as `max_gpus` does, and both have to be at least one."""
    limited = packer.frontier(fleet, packer.GpuKind(server, available=2))
    assert [p.to_dict() for p in limited] == [p.to_dict() for p in packer.frontier(fleet, server, max_gpus=2)]
    assert max(p.n_gpus for p in packer.frontier(fleet, server)) > 2
    with pytest.raises(packer.PackerError, match="max_gpus to be a whole number >= 1"):
        packer.frontier(fleet, server, max_gpus=0)


def test_plans_are_the_same_on_a_slow_machine(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a time limit no clock decides what a plan is: an hour may pass between any two looks at one."""
    rates = np.random.default_rng(3).gamma(0.5, 1.2, 40) + 0.01
    fleet = Workload([Adapter(f"a{k}", (8, 16, 64)[k % 3], rate) for k, rate in enumerate(rates.tolist())])
    quick = packer.frontier(fleet, server, max_gpus=2)
    for clock in ("monotonic", "perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(time, clock, partial(next, itertools.count(0.0, 3600.0)))
    slow = packer.frontier(fleet, server, max_gpus=2)
    assert [point.plan.bins for point in slow] == [point.plan.bins for point in quick]


def test_room_to_grow_is_not_known_of_a_search_that_ended(server: Profile) -> None:
    """A server of which no factor was simulated in time has not failed at the rates as given: nothing is said of it."""
    job = Frontier(Workload([Adapter("a", 8, 0.5)]), server)
    task, plan = Deployment(job), job.at(1).plan
    calls = iter([False])
    job.stop = lambda: next(calls, True)
    assert task.rooms(plan) == ()
    job.stop = lambda: False
    assert [room.headroom is not None for room in task.rooms(plan)] == [True]


def test_an_adapter_too_hot_for_a_gpu_is_split(server: Profile) -> None:
    """An adapter that breaks its limits alone gets as many equal parts as it needs; parts are balanced."""
    hot = Workload([Adapter("hot", 8, 14.0, *LONG), Adapter("cool", 8, 0.1, *LONG)])
    found = packer.recommend(hot, server)
    assert (found.status, found.verified) == (Status.FEASIBLE, True)
    shares = [item.shares[item.adapters.index(0)] for item in found.bins if 0 in item.adapters]
    assert len(shares) > 1
    assert math.isclose(sum(shares), 1.0)
    assert max(found.evaluations.worst_adapter_ttft_ms) <= 2000.0
    points = packer.frontier(hot, server)
    parts = [sum(0 in item.adapters for item in point.plan.bins) for point in points]
    assert parts[0] == len(shares) < parts[-1]  # more GPUs are of use to the hot adapter
    assert points[-1].p95_ttft_ms < 0.9 * points[0].p95_ttft_ms
    whole = packer.recommend(hot, server, max_replicas=1)
    assert whole.status is Status.INFEASIBLE
    assert "'hot'" in whole.reasons[0]
    assert "--max-replicas" in whole.reasons[0]


def test_a_spare_gpu_keeps_the_goal_when_any_is_lost(server: Profile) -> None:
    """With a spare GPU, the adapters of any lost one find servers on which the goal is kept."""
    fleet = Workload([Adapter(f"a{k}", 16 if k % 4 else 32, 0.9) for k in range(24)])
    plain, spared = packer.recommend(fleet, server), packer.recommend(fleet, server, spare=1)
    assert spared.n_gpus > plain.n_gpus
    assert "When any GPU is lost, the goal is kept at the rates as given." in spared.decision
    for lost in range(spared.n_gpus):
        left = packer.evaluate_plan(spared, lose=[lost])
        assert left.holds
        assert left.over_limits == ()


def test_any_server_may_take_the_adapters_of_a_lost_one(server: Profile) -> None:
    """With a spare GPU, the slots of each server fit every rank, also where one adapter alone has the largest."""
    fleet = Workload([Adapter(f"a{k}", 8 if k else 32, 0.5) for k in range(12)])
    proposed = list(Frontier(fleet, server, spare=1)._proposals(3))
    assert {item.max_lora_rank for bins in proposed for item in bins} == {32}


def test_slots_are_added_where_the_goal_breaks(server: Profile) -> None:
    """A server with too few slots gets more until its adapters keep the goal."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.2) for k in range(32)])
    job = Frontier(fleet, server, margin=0.0)
    tight = Bin(tuple(range(32)), server.settings(1, 8), server)
    (found,) = with_best_slots(job.kept, [tight], job.kept.hours, job.over)
    assert job.kept.used([tight])[0] > 1.0 >= job.kept.used([found])[0]
    assert found.max_loras > 1


def test_bursts_beyond_a_server_split_the_adapter_further(server: Profile) -> None:
    """An hour whose bursts break the plan is planned for: the adapter gets more parts, and every point that keeps the
    goal does so by the figures that are shown."""
    fleet = packer.read_workload("examples/workloads/azure-code-2023.csv").subset([0, 1, 2])
    found = packer.recommend(fleet, server)
    assert (found.status, found.verified) == (Status.FEASIBLE, True)
    for seed in (5, 6):
        for item in found.bins:
            own = item.workload(fleet)
            run = packer.simulate(own, server, max_loras=item.max_loras, max_lora_rank=16, seed=seed)
            assert run.worst_adapter_ttft_ms <= 2 * 2000
    rows = found.frontier
    assert all(row["worst_adapter_ttft_ms"] <= 2000 for row in rows if row["holds"])
    (below,) = [row for row in rows if row["n_gpus"] == found.n_gpus - 1]
    assert not below["holds"]
    (told, *_) = packer.recommend(fleet, server, max_gpus=1).reasons
    assert told.endswith("more may be needed: without --gpus and --available the search goes on.")
    assert int(told.split()[0]) < found.n_gpus


def test_slots_that_give_room_are_taken(server: Profile) -> None:
    """Where few slots leave little room to grow, the plan has more of them instead of advising them."""
    rates = 45.0 * (weights := 1.0 / np.arange(1, 81) ** 1.6) / weights.sum()
    fleet = Workload([Adapter(f"a{k}", 8 if k % 3 else 16, float(rate)) for k, rate in enumerate(rates)])
    found = packer.recommend(fleet, server)
    assert found.verified
    assert all(room.headroom is not None for room in found.rooms)
    assert not any((room.headroom or 0.0) < LITTLE and "max_loras" in room.advice for room in found.rooms)


def test_points_have_numbers_of_gpus_of_their_own(server: Profile) -> None:
    """Two searches that end with the same number of GPUs are one point: the better one."""
    job = Frontier(Workload([Adapter(f"a{k}", 8, 0.2) for k in range(6)]), server, margin=0.0)
    point = job.at(1)
    job._points |= {2: replace(point, holds=False, p95_ttft_ms=1.0), 3: replace(point, p95_ttft_ms=9e3)}
    assert job.points == [point]


def test_more_gpus_are_not_slower(server: Profile) -> None:
    """Where slots are few for many large adapters, a plan on more GPUs has the slots that keep its latency down."""
    fleet = Workload([Adapter(f"a{k}", 128, 0.01) for k in range(300)])
    points = packer.frontier(fleet, server, max_gpus=5)
    assert len(points) > 2
    for fewer, more in pairwise(points):
        assert more.p95_ttft_ms < 1.5 * fewer.p95_ttft_ms


def test_a_spare_gpu_without_an_adapter_ends_the_search(server: Profile, tmp_path: Path) -> None:
    """With fewer adapters than GPUs the search ends, and the plan says what is lost with a GPU."""
    fleet = Workload([Adapter(k, 16, 17.0, Lengths.constant(250), Lengths.constant(230)) for k in "ab"])
    found = packer.recommend(fleet, server, margin=0.0, spare=1, max_replicas=1, time_limit_s=60.0)
    assert (found.status, found.n_gpus) == (Status.INFEASIBLE, 2)
    assert not found.time_limit_reached
    assert "the goal breaks when a GPU is lost, " in found.decision
    assert "--spare" in found.reasons[0]
    found.save(tmp_path / "plan.json")
    assert packer.load_plan(tmp_path / "plan.json").reasons == found.reasons


@pytest.mark.parametrize(("rates", "gpus"), [((8.5, 8.5), 3), ((2.5,), 2), ((16.0,), 3)])
def test_a_spare_gpu_for_one_or_two_hot_adapters(server: Profile, rates: tuple[float, ...], gpus: int) -> None:
    """No more adapters than GPUs: each has parts on all of them, and what any GPU loses goes to the others."""
    found = packer.recommend(
        Workload([Adapter(f"a{k}", 16, rate, *LONG) for k, rate in enumerate(rates)]), server, spare=1
    )
    assert (found.status, found.n_gpus) == (Status.OPTIMAL, gpus)
    for lost in range(gpus):
        left = packer.evaluate_plan(found, lose=[lost])
        assert left.holds
        assert left.over_limits == ()


def test_adapters_of_half_a_gpu_are_on_all_servers(server: Profile) -> None:
    """Where two adapters do not fit on a GPU, equal parts of all of them on every server take fewer GPUs than one for
    each; the plan keeps its goal in a fresh hour and behind routers of its replicas; one copy each is one GPU each."""
    lengths = Lengths.constant(250), Lengths.constant(460)
    fleet = Workload([Adapter(f"a{k}", 16, 11.0, *lengths) for k in range(5)])
    found = packer.recommend(fleet, server)
    assert found.verified
    assert found.n_gpus < 5
    assert all(item.shares == (1.0 / found.n_gpus,) * 5 for item in found.bins)
    for router in ("plan", "affinity", "round-robin"):
        run = packer.simulate_cluster(fleet, found.cluster(), router=router, seed=77, duration_s=600.0)
        assert run.adapter_p95_ttft_ms.max() <= 2000.0
    assert packer.recommend(fleet, server, max_replicas=1).n_gpus == 5


def test_a_number_of_gpus_holds_as_it_does_with_all_slots_tried(fleet: Workload, server: Profile) -> None:
    """Slots that are likely to be enough, and a search that ends at a server that breaks its limits with any, find a
    plan that keeps the goal wherever every number of slots of every proposal, tried one by one, finds one."""
    job = Frontier(fleet.scaled(1.2), server)
    found = set()
    for n_gpus in (1, 2):
        alone = [
            all(any(job.kept.used([item.with_slots(n)])[0] <= 1.0 for n in candidates_of(item)) for item in bins)
            for bins in job._proposals(n_gpus)
        ]
        assert job.at(n_gpus).holds == any(alone)
        found.add(any(alone))
    assert found == {False, True}


def test_a_fleet_is_split_over_several_servers_alone(server: Profile) -> None:
    """One server of all adapters is no even split: it is proposed once, by the solvers."""
    job = Frontier(Workload([Adapter(f"a{k}", 8, 0.05) for k in range(4)]), server)
    assert list(job._even(1)) == []
    assert {len(bins) for bins in job._even(2)} == {2}


def test_one_server_is_tried_before_splits(server: Profile) -> None:
    """Many adapters go on one server that keeps their limits, though splits begin at two servers."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.002) for k in range(120)])
    assert Frontier(fleet, server).first(1, 3) == 1


def test_a_server_tried_first_costs_no_plan_in_time(server: Profile) -> None:
    """Once the time is over, the number of servers that splits do on gets its plan, though one server was tried."""
    job = Frontier(Workload([Adapter(f"a{k}", 8, 0.06, *LONG) for k in range(120)]), server)
    assert not job.at(1).holds
    job.over = lambda: True
    assert job.first_that_holds(3, 4) == 3


def test_likely_slots_hold_the_adapters_that_have_requests(server: Profile) -> None:
    """Quiet adapters share slots, busy ones have one each, the base model none, and no server gets fewer slots than it
    has."""
    quiet = Workload([Adapter(f"a{k}", 8, 0.001) for k in range(64)])
    busy = Workload([Adapter(f"a{k}", 8, 0.5) for k in range(24)])
    assert likely_slots(quiet, Bin(tuple(range(64)), server.settings(1, 8), server)) <= 4
    assert likely_slots(quiet, Bin(tuple(range(64)), server.settings(48, 8), server)) == 48
    assert likely_slots(busy, Bin(tuple(range(24)), server.settings(1, 8), server)) == 24
    mixed = replace(busy, adapters=tuple(replace(a, rank=0) if k >= 12 else a for k, a in enumerate(busy.adapters)))
    for slots in (1, 24):
        assert likely_slots(mixed, Bin(tuple(range(24)), server.settings(slots, 8), server)) == 12
    states = replace(server, model=replace(server.model, kv_shape=KvShape(request_tokens=20_000.0)))
    assert likely_slots(busy, Bin(tuple(range(24)), states.settings(1, 8), states)) == 1  # the rest is for states


def test_the_plan_is_the_same_with_any_number_of_threads(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, and hours that are begun before they are asked for, change no figure of the plan."""
    few = Workload(
        [Adapter(f"a{k}", 16 if k % 3 else 32, 1.2 - 0.06 * k, *LONG) for k in range(14)],
        arrivals=Arrivals("bursty", common=Bursts(0.4, ((30.0, 0.5), (300.0, 0.5)))),
    )
    plans = []
    for cores in (1, 3):
        monkeypatch.setattr("packer.twin.threads.os.cpu_count", lambda cores=cores: cores)
        found = plan_to_dict(packer.recommend(few, server))
        plans.append({key: value for key, value in found.items() if key != "runtime_s"})
        assert found["n_gpus"] > 1
    assert plans[0] == plans[1]


def test_estimated_profiles_are_searched_with_trees() -> None:
    """Proposals for a profile without trees of its own come from those of another one, without simulations."""
    estimate = estimate_profile(model_named("meta-llama/Llama-3.1-8B-Instruct"), "a100-80gb")
    assert isinstance(Frontier(Workload([Adapter("a", 8, 0.1)]), estimate).predictor, LearnedPredictor)


@pytest.mark.parametrize("estimated", [False, True])
def test_fleets_with_a_job_are_planned(estimated: bool, server: Profile) -> None:
    """Trees know nothing of servers that train beside their requests: they propose, and the twin simulates the job."""
    llama = model_named("meta-llama/Llama-3.1-8B-Instruct")
    profile = estimate_profile(llama, "a100-80gb") if estimated else server
    fleet = Workload([Adapter(f"a{i}", 8, 0.1) for i in range(8)], fine_tuning=packer.FineTuning())
    plan = packer.recommend(fleet, profile)
    assert plan.status is Status.OPTIMAL
    assert (plan.evaluations.tuning_tok_s > 0.0).all()


@pytest.mark.parametrize("low", [2, 30])
def test_too_few_servers_are_followed_by_as_many_as_splits_need(
    low: int, server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for each number in between takes long: 300 req/s of sessions were tried on 30 to 38 servers before 39. No
    further plan is made if the time ends while splits are searched."""
    job, tried = Frontier(Workload([Adapter("a", 8, 1.0)]), server), list[int]()

    def at(n: int, _following: int | None = None) -> SimpleNamespace:
        tried.append(n)
        return SimpleNamespace(holds=n >= low + 9)

    monkeypatch.setattr(job, "at", at)
    monkeypatch.setattr(job, "first_even", lambda low, _high: low + 9)
    assert job.first_that_holds(low, 60) == low + 9
    assert list(dict.fromkeys(tried)) == [low, low + 10, low + 9, low + 8]
    monkeypatch.setattr(job, "over", lambda: bool(tried))
    monkeypatch.setattr(job, "_points", {low: at(low)})
    tried.clear()
    assert job.first_that_holds(low, 60) is None
    assert tried == [low]


def test_even_splits_of_a_fleet_some_of_whose_adapters_may_break_the_goal_are_judged(server: Profile) -> None:
    """The fewest servers that splits need are those whose most loaded one keeps the share of its adapters: a search
    that began with one server more made a plan for each number in between."""
    fleet = Workload([Adapter(f"a{i}", 8, 2.0) for i in range(40)]).held_to("adapter_share=0.9")
    job = Frontier(fleet, server)
    found = job.first_even(2, 20)
    assert found is not None
    assert found > 2
    assert all(map(job.kept.holds_one, job.fullest(next(job._splits(found)))[0]))


def test_a_hot_adapter_on_a_server_of_its_own_does_not_speak_for_servers_of_several(server: Profile) -> None:
    """It takes one slot, with which the others would wait for loads, and its steps are those of one adapter: with the
    hottest one alone on the most loaded server, so few servers seemed enough that a plan was made for each number in
    between, and every server of the splits began with one slot."""
    rates = [6.0, *[0.5] * 30]
    fleet = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate(rates)]).held_to("mean_itl_ms=16")
    job = Frontier(fleet, server)
    found = job.first_even(2, 30)
    assert found is not None
    bins = next(job._splits(found))
    full, _ = job.fullest(bins)
    assert [len(item.adapters) > 1 for item in full] == [False, True]
    assert all(map(job.kept.holds_one, full))
    assert {item.max_loras for item in bins if len(item.adapters) > 1} != {1}


def test_a_number_that_tells_whether_any_holds_has_no_point(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """After several numbers that break the limits the largest is tried: its plan, far from the one that is found, is no
    row of the table of GPUs, unless it was asked for before or is the one found."""
    job = Frontier(Workload([Adapter("a", 8, 1.0)]), server)
    for fewest, known in ((12, False), (12, True), (60, False)):
        points = {60: SimpleNamespace(holds=True)} if known else dict[int, SimpleNamespace]()

        def at(n: int, _following: int | None = None, points=points, fewest=fewest) -> SimpleNamespace:  # type: ignore[no-untyped-def]
            return points.setdefault(n, SimpleNamespace(holds=n >= fewest))

        monkeypatch.setattr(job, "at", at)
        monkeypatch.setattr(job, "_points", points)
        assert job.first_that_holds(1, 60) == fewest
        assert fewest in points
        assert (60 in points) == (known or fewest == 60)


@pytest.mark.parametrize("held", [True, False])
def test_a_plan_on_more_gpus_that_a_further_hour_breaks_is_made_again(
    held: bool, server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots were chosen without that hour: judged as it was, it took 8 GPUs where another plan takes 7."""
    job = Frontier(Workload([Adapter(f"a{i}", 8, 1.0) for i in range(4)]), server)
    assert job.at(1).holds
    known = job.at(2)
    monkeypatch.setattr(job.kept, "holds", lambda _bins, _spare=0: held)
    job.keep(job.kept.fresh_hour(1))
    assert job._points == ({2: known} if held else {})
