"""Baselines do what their papers and routers do, no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from monotone import problem

from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.papers.placements.flow import Flow
from packer.papers.placements.hrw import HrwPlacement, scores
from packer.papers.placements.maxbase import MaxBase, MaxBaseHalf
from packer.papers.placements.proposed_lat import ProposedLat
from packer.papers.placements.random import RandomPlacement
from packer.planning.verify import check
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.settings import Settings
from packer.solvers.backbone import backbone_tok_s, load_bound, without_adapters
from packer.solvers.base import Problem
from packer.solvers.baselines.spread import Spread
from packer.solvers.greedy.solver import Greedy
from packer.solvers.slots import SlotSearch
from packer.testing.analytic import random_fleet, small_profile
from packer.twin.memory.policy import kv_cache_tokens
from packer.twin.simulate import simulate
from packer.workload import Workload

FLEET = random_fleet(48, seed=6, rates=(3.2, 1.6, 0.8))


def on(n: int | None, workload: Workload = FLEET, **changes: object) -> Problem:
    """The problem with so many GPUs."""
    return replace(problem(workload, max_gpus=n), **changes)  # type: ignore[arg-type]


def test_the_backbone_has_no_cost_of_adapters(toy_profile: Profile) -> None:
    """Without adapters slots take no memory, and the server does at least as much as with them."""
    bare = without_adapters(toy_profile)
    assert kv_cache_tokens(bare, bare.settings(500, 512)) == kv_cache_tokens(bare, bare.settings(1, 8))
    # vLLM 0.10 turns its whole queue round in each step, which takes half a minute here.
    later = replace(toy_profile, engine=replace(toy_profile.engine, version="0.20.0"))
    most = backbone_tok_s(FLEET, later)
    busy = simulate(FLEET.scaled(most * 2 / FLEET.offered_tok_s), later, max_loras=16, duration_s=300.0)
    assert 0 < busy.total_token_throughput <= most


def test_first_uses_of_adapters_take_nothing_of_the_backbone(toy_profile: Profile) -> None:
    """Requests of a thousand adapters that the front end sees for the first time do not hold up the base model: its
    throughput is that of a fleet of few adapters, and bounds that divide by it exist."""
    slow = replace(toy_profile, frontend=replace(toy_profile.frontend, first_use_ms=275.0))
    many = Workload([Adapter(f"a{k}", 8, 0.01) for k in range(1500)])
    assert backbone_tok_s(many, slow) == backbone_tok_s(many, toy_profile) > 0.0
    assert load_bound(many, slow, 0.0) >= 1


def test_the_load_bound_is_below_any_plan() -> None:
    """No plan found needs fewer GPUs than the bound by load, for a predictor no more optimistic than the twin."""
    workload = random_fleet(300, seed=8, rates=(0.8,))
    bound = load_bound(workload, small_profile(), 0.0)
    assert 1 < bound <= len(Greedy().solve(problem(workload)).bins)


@pytest.mark.parametrize(
    "lengths",
    [
        (Lengths.gamma(200, 1.0), Lengths.gamma(3000, 0.5)),
        (Lengths.constant(1500), Lengths.constant(8)),
        (Lengths.gamma(64, 0.8), Lengths.gamma(500, 0.8)),
    ],
)
@pytest.mark.parametrize("odd_rank", [8, 512])
def test_no_server_of_the_twin_beats_the_load_bound(lengths: tuple[Lengths, Lengths], odd_rank: int) -> None:
    """Where the twin says that one server is enough, so does the bound: long answers, long prompts, odd ranks."""
    fleet = Workload([Adapter("odd", odd_rank, 0.01), *(Adapter(f"a{i}", 8, 1.0) for i in range(7))], *lengths)
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    low, high = 1e-3, 1e3
    for _ in range(9):
        middle = (low * high) ** 0.5
        bins = [Bin(tuple(range(1, 8)), Settings(7, 8), profile)]
        enough = bool(TwinPredictor().evaluate(fleet.scaled(middle), bins).feasible[0])
        low, high = (middle, high) if enough else (low, middle)
    alone = fleet.scaled(low).subset(range(1, 8))
    assert load_bound(alone, profile, 0.0) == 1
    assert load_bound(fleet.scaled(low), profile, 0.0) <= 2


def test_no_stable_server_of_the_twin_beats_the_bound_of_stable_ones() -> None:
    """What a server serves without a queue that grows is one server by the bound, which counts all of the load."""
    fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(8)])
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    low, high = 0.01, 100.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        stable = simulate(fleet.scaled(middle), profile, max_loras=8).stable
        low, high = (middle, high) if stable else (low, middle)
    assert load_bound(fleet.scaled(low), profile, 0.0, stable=True) == 1
    many = fleet.scaled(40.0 * low)
    assert load_bound(many, profile, 0.0, stable=True) > load_bound(many, profile, 0.0)


def test_load_proves_nothing_about_arrivals_of_another_mean() -> None:
    """A walk of rates has no bound by load; a day of rates has that of its mean."""
    heavy = random_fleet(300, seed=8, rates=(0.8,))
    profile = small_profile()
    walk = heavy.with_arrivals(Arrivals("unpredictable"))
    assert load_bound(walk, profile, 0.0) == 1
    day = heavy.with_arrivals(Arrivals("piecewise", factors=(0.5, 1.5)))
    assert load_bound(day, profile, 0.0) == load_bound(heavy, profile, 0.0)
    assert load_bound(heavy.with_arrivals(Arrivals("piecewise", factors=(0.05,))), profile, 0.0) == 1


def test_maxbase_fills_to_the_backbone_and_no_further() -> None:
    """Every GPU's load is at most the backbone's throughput, and the next adapter would not have fitted."""
    posed = on(None, FLEET.scaled(4.0))
    found = MaxBase().solve(posed)
    check(posed, found)
    most = backbone_tok_s(posed.workload, posed.profile)
    loads = [b.offered_tok_s(posed.workload) for b in found.bins]
    assert len(loads) > 1
    assert max(loads) <= most
    nexts = [b.adapters[0] for b in found.bins[1:]]
    offered = posed.workload.offered_tok_s_by_adapter
    assert all(load + offered[i] > most for load, i in zip(loads, nexts, strict=False))
    assert all(b.max_loras == len(b.adapters) for b in found.bins)


def test_maxbase_half_has_half_the_slots() -> None:
    """The same bins with a slot for every second adapter."""
    whole, half = MaxBase().solve(on(None)), MaxBaseHalf().solve(on(None))
    assert [b.adapters for b in whole.bins] == [b.adapters for b in half.bins]
    assert [b.max_loras for b in half.bins] == [round(len(b.adapters) / 2) for b in half.bins]


def test_random_follows_its_seed() -> None:
    """The same seed gives the same plan, another one another; slots never exceed adapters."""
    one, same, other = (RandomPlacement().solve(on(4, seed=seed)) for seed in (1, 1, 2))
    assert one.bins == same.bins != other.bins
    assert all(1 <= b.max_loras <= len(b.adapters) for b in one.bins)


def test_spread_evens_out_rates() -> None:
    """By falling rate to the least loaded GPU: sums of rates differ by no more than one adapter's rate."""
    found = Spread().solve(on(4))
    sums = [float(b.rates(FLEET).sum()) for b in found.bins]
    assert max(sums) - min(sums) <= FLEET.rates.max()
    assert len(found.bins) == 4


def test_proposed_lat_refuses_what_the_predictor_says_would_starve() -> None:
    """The placement is whole and holds, or nothing is placed; adapters go in the fleet's order."""
    few, many, one = (ProposedLat().solve(on(gpus)) for gpus in (4, 12, 1))
    assert not few.bins
    assert few.unplaced == tuple(range(len(FLEET)))
    assert "the goal breaks on 4 of 4 servers, the first with" in few.reasons[0]
    assert "1 of 1 server, the first with" in one.reasons[0]
    assert not many.unplaced
    assert {min(item.adapters) for item in many.bins} == set(range(12))
    assert all(SlotSearch(on(12)).holds(many.bins))


def test_hashing_moves_few_adapters_when_a_gpu_comes() -> None:
    """With one more GPU only adapters that go to it move."""
    names = [f"adapter-{i}" for i in range(400)]
    four = [int(np.argmax(scores(name, 4))) for name in names]
    five = [int(np.argmax(scores(name, 5))) for name in names]
    moved = [b for a, b in zip(four, five, strict=True) if a != b]
    assert set(moved) == {4}
    assert 40 < len(moved) < 120


def test_hashing_goes_on_where_a_gpu_is_full() -> None:
    """An adapter whose first choice has no room for its load takes its next choice."""
    most = backbone_tok_s(FLEET, small_profile())
    mean_tokens = FLEET.offered_tok_s / FLEET.rate
    heavy = Workload([Adapter(f"a{i}", 8, 0.6 * most / mean_tokens) for i in range(4)])
    found = HrwPlacement().solve(on(4, heavy))
    assert [len(b.adapters) for b in found.bins] == [1, 1, 1, 1]


def test_flow_balances_and_stays_where_adapters_run() -> None:
    """Loads come out even, and of equally loaded GPUs an adapter takes the one where it runs."""
    posed = on(4)
    found = Flow().solve(posed)
    check(posed, found)
    loads = [b.offered_tok_s(FLEET) for b in found.bins]
    assert max(loads) < 1.15 * min(loads)
    equal = Workload([Adapter(f"a{i}", 8, 0.5) for i in range(8)])
    before = Flow().solve(on(4, equal)).bins
    swapped = (before[1], before[0], *before[2:])
    after = Flow().solve(on(4, equal, old_bins=swapped)).bins
    assert [set(b.adapters) for b in after] == [set(b.adapters) for b in swapped]


def test_flow_splits_what_one_gpu_can_not_carry() -> None:
    """An adapter heavier than the backbone gets the replicas that its rate needs, on different GPUs."""
    most = backbone_tok_s(FLEET, small_profile())
    rate = 2.5 * most / (FLEET.offered_tok_s / FLEET.rate)
    workload = Workload([Adapter("hot", 8, rate), *(Adapter(f"a{i}", 8, 0.2) for i in range(6))])
    posed = on(4, workload, max_replicas=4)
    found = Flow().solve(posed)
    check(posed, found)
    assert sum(0 in b.adapters for b in found.bins) == 3


@pytest.mark.parametrize("solver", [MaxBase(), RandomPlacement(), Spread(), ProposedLat(), HrwPlacement(), Flow()])
def test_one_gpu_type_only(solver: MaxBase | RandomPlacement | Spread | ProposedLat | HrwPlacement | Flow) -> None:
    """Baselines refuse several GPU types before running."""
    assert "one GPU type" in str(solver.supports(on(2, profiles=(small_profile(), small_profile("b/c")))))
