"""Spread-refined, balancing, headroom and replanning."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monotone import Imitating, problem

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.bin import Bin
from packer.io.profiles import load_profile
from packer.moves import moved
from packer.objectives.latency import Latency
from packer.plan import Plan
from packer.planning.solve import solve
from packer.planning.verify import check
from packer.predictors.auto import AutoPredictor
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.room import LEVELS
from packer.settings import Settings
from packer.solvers import spread_refined
from packer.solvers.base import Problem, Solver
from packer.solvers.baselines.dlora import DLora
from packer.solvers.baselines.spread import Spread
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.balance import even_parts
from packer.solvers.headroom import headroom
from packer.solvers.spread_refined import SpreadRefined
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.twin.hours import Hours
from packer.workload import Workload

PROFILE = small_profile()
ANALYTIC = AnalyticPredictor()


def latencies(posed: Problem, solver: Solver) -> tuple[bool, float, float]:
    """Feasible?, mean TTFT and mean ITL over requests of a solver's plan."""
    found = solver.solve(posed)
    check(posed, found)
    bins = found.bins
    rows = posed.evaluator.evaluate(posed.workload, bins)
    weights = [b.rates(posed.workload).sum() for b in bins]
    ttft, itl = (np.average(column, weights=weights) for column in (rows.mean_ttft_ms, rows.mean_itl_ms))
    return bool(rows.feasible.all()), float(ttft), float(itl)


@given(st.integers(0, 500), st.integers(2, 5))
@settings(max_examples=15, deadline=None)
def test_refined_is_no_worse_than_spread_and_dlora(seed: int, gpus: int) -> None:
    """Where plain spreading is feasible, so is the refined plan, and no slower than either of them."""
    workload = random_fleet(30, seed=seed, rates=(0.8, 0.4, 0.1), ranks=(8, 16, 64))
    posed = problem(workload, objective=Latency(), predictor=ANALYTIC, max_gpus=gpus)
    mine = latencies(posed, SpreadRefined())
    for other in (Spread(), DLora()):
        ok, ttft, itl = latencies(posed, other)
        if ok:
            assert mine[0]
            assert mine[1] + 195 * mine[2] <= 1.001 * (ttft + 195 * itl)


def test_refinement_mends_what_starves() -> None:
    """If spreading by rate starves a GPU, moving adapters makes the plan feasible."""
    workload = Workload(
        [Adapter(f"wide{i}", 256, 0.9) for i in range(2)] + [Adapter(f"a{i}", 8, 0.4) for i in range(24)]
    )
    posed = problem(workload, objective=Latency(), predictor=AnalyticPredictor(3000.0), max_gpus=4)
    found = SpreadRefined().solve(posed)
    check(posed, found)
    assert posed.evaluator.evaluate(workload, found.bins).feasible.all()


class Imitator(Imitating, AnalyticPredictor):
    """The same figures, from a predictor that says that it learned from the twin."""


@pytest.mark.parametrize("objective", ["latency", "latency:metric=itl,statistic=worst"])
def test_the_objective_alone_decides_which_plan_is_best(objective: str) -> None:
    """Nothing but the figures of the predictor counts: no other plan is preferred because of who predicted them."""
    workload = random_fleet(30, seed=1, rates=(0.8, 0.4, 0.1), ranks=(8, 16, 64))
    plans = [
        solve(workload, PROFILE, objective, predictor=predictor, max_gpus=3, margin=0.0, verify=False)
        for predictor in (ANALYTIC, Imitator())
    ]
    assert plans[0].bins == plans[1].bins
    for solver in ("spread", "dlora"):
        other = solve(workload, PROFILE, objective, solver=solver, predictor=ANALYTIC, max_gpus=3, margin=0.0)
        assert plans[1].objective_value <= other.objective_value


def test_even_parts_keep_the_order_and_share_the_load() -> None:
    """The parts are consecutive in packing order and differ by about one adapter's load."""
    posed = problem(random_fleet(100, seed=2, rates=(0.2, 0.1)))
    parts = even_parts(posed, 7)
    loads = [posed.workload.offered_tok_s_by_adapter[part].sum() for part in parts]
    assert sum(map(len, parts)) == 100
    assert max(loads) - min(loads) <= 2 * posed.workload.offered_tok_s_by_adapter.max()
    ranks = [posed.workload.ranks[part] for part in parts]
    assert all(one.min() >= other.max() for one, other in pairwise(ranks))


def test_headroom_is_where_the_predictor_says_starved() -> None:
    """At the factor a server still holds; at the next step it starves."""
    workload = random_fleet(24, seed=3, rates=(0.3,))
    bins = [
        Bin(tuple(range(0, 24, 2)), Settings(12, 32), PROFILE),
        Bin(tuple(range(1, 24, 2)), Settings(6, 32), PROFILE, (0.5,) * 12),
    ]
    for k, factor in enumerate(headroom(workload, bins, Evaluator(ANALYTIC))):
        assert factor is not None
        assert ANALYTIC.evaluate(workload.scaled(factor), bins)[k].feasible
        assert factor == LEVELS[-1] or not ANALYTIC.evaluate(workload.scaled(factor * 1.09), bins)[k].feasible


def test_room_of_the_twin_is_that_of_simulated_hours(toy_profile: Profile) -> None:
    """Where the twin has the last word, the headroom is that of simulated hours; where a server breaks its limits there
    is none, however much load it serves."""
    workload = random_fleet(6, seed=3, rates=(0.2,), ranks=(8,)).held_to("mean_itl_ms=9")
    busy = workload.scaled(20.0)
    for predictor in (TwinPredictor(seed=4), AutoPredictor(None, TwinPredictor(seed=4))):
        for fleet in (workload, busy):
            plan = solve(fleet, toy_profile, predictor=predictor, margin=0.0, max_gpus=1, verify=False)
            assert plan.rooms == Hours(plan.seed).rooms(plan.bins, fleet)
            assert plan.headroom == tuple(room.headroom for room in plan.rooms)
            assert not plan.evaluations.starved.any()
            assert [room.headroom is None for room in plan.rooms] == [fleet is busy]
            assert (plan.evaluations.slo_used > 1.0).tolist() == [fleet is busy]


def test_headroom_is_that_of_the_objective(toy_profile: Profile) -> None:
    """A plan for limits of its own has room until those break, not until the wider ones of the fleet do."""
    workload = random_fleet(6, seed=3, rates=(0.2,), ranks=(8,))
    wide = solve(workload, toy_profile, margin=0.0, predictor="twin", verify=False)
    limit_ms = float(TwinPredictor().evaluate(workload.scaled(2.0), wide.bins).mean_itl_ms[0])
    tight = solve(workload, toy_profile, f"slo:mean_itl_ms={limit_ms}", margin=0.0, predictor="twin", verify=False)
    assert tight.bins == wide.bins
    (own,), (other,) = tight.rooms, wide.rooms
    assert 1.0 <= (own.headroom or 0.0) < (other.headroom or 0.0)


def test_no_headroom_where_none_is_left_or_none_is_defined() -> None:
    """A starved server and a replayed trace have no headroom."""
    heavy = random_fleet(4, seed=3, rates=(50.0,))
    assert headroom(heavy, [Bin((0, 1), Settings(2, 32), PROFILE)], Evaluator(ANALYTIC)) == (None,)
    ones = np.ones(1, dtype=np.int64)
    trace = RequestTrace(np.zeros(1), ones - 1, ones, ones)
    replayed = heavy.with_arrivals(Arrivals("trace", trace=trace))
    assert headroom(replayed, [Bin((0,), Settings(1, 32), PROFILE)], Evaluator(ANALYTIC)) == (None,)


def plan_of(workload: Workload) -> Plan:
    """Greedy's plan by the analytic predictor."""
    return solve(workload, PROFILE, predictor=ANALYTIC, verify=False, margin=0.0)


def replanned(old: Plan, workload: Workload, **changes: int) -> Plan:
    """The plan replanned for a new fleet."""
    return solve(
        workload,
        PROFILE,
        "moves",
        solver="replan",
        predictor=ANALYTIC,
        verify=False,
        margin=0.0,
        old_plan=old,
        **changes,
    )


def test_an_unchanged_fleet_moves_nothing() -> None:
    """Replanning for the same fleet keeps every server as it is."""
    workload = random_fleet(90, seed=4, rates=(0.3, 0.2))
    old = plan_of(workload)
    new = replanned(old, workload)
    assert old.n_gpus > 1
    assert new.objective_value == (float(old.n_gpus), 0.0)
    assert new.moves is not None
    assert new.moves.servers == tuple(range(old.n_gpus))


def test_newcomers_move_nobody_while_there_is_room() -> None:
    """New adapters go where there is room; gone ones leave; no other adapter moves."""
    workload = random_fleet(90, seed=4, rates=(0.3, 0.2))
    old = plan_of(workload)
    newer = Workload([*workload.adapters[6:], *(Adapter(f"new{i}", 8, 0.2) for i in range(3))])
    new = replanned(old, newer)
    assert new.n_gpus <= old.n_gpus
    assert new.objective_value[1] == 0.0


def test_more_load_evicts_as_few_as_needed() -> None:
    """Where a server would starve, adapters leave it; fewer move than in a fresh plan."""
    workload = random_fleet(90, seed=4, rates=(0.3, 0.2))
    old = plan_of(workload)
    grown = Workload([replace(a, rate=a.rate * 1.5) for a in workload.adapters])
    new = replanned(old, grown)
    fresh = plan_of(grown)
    assert new.n_gpus <= fresh.n_gpus or new.n_gpus == old.n_gpus
    assert new.objective_value[1] <= len(moved(old.bins, fresh.bins))
    assert new.evaluations.feasible.all()


def test_less_load_closes_servers() -> None:
    """When the load falls, servers are closed down to what a fresh plan needs."""
    workload = random_fleet(90, seed=4, rates=(0.3, 0.2))
    old = plan_of(workload)
    shrunk = Workload([replace(a, rate=a.rate * 0.3) for a in workload.adapters])
    assert replanned(old, shrunk).n_gpus == plan_of(shrunk).n_gpus < old.n_gpus


def test_a_limit_on_gpus_is_reported() -> None:
    """Fewer GPUs than needed leave adapters unplaced, with the number that would do."""
    workload = random_fleet(90, seed=4, rates=(0.3, 0.2))
    old = plan_of(workload)
    new = replanned(old, workload, max_gpus=1)
    assert new.unplaced
    assert f"--gpus {old.n_gpus}" in new.reasons[0]


def test_a_hot_adapter_takes_more_gpus_than_there_are_adapters() -> None:
    """One adapter that may be split uses all the GPUs given, in equal parts."""
    task = problem(Workload([Adapter("hot", 8, 9.0)]), objective=Latency(), predictor=ANALYTIC, max_gpus=4)
    found = SpreadRefined().solve(replace(task, max_replicas=4))
    assert [item.shares for item in found.bins] == [(0.25,)] * 4


def test_slots_of_a_latency_plan_are_chosen_by_simulation() -> None:
    """Trees see little of what requests wait for slots: 64 adapters of rank 32 on 16 slots wait ten times as long."""
    profile = load_profile("h100-64gb/qwen-2.5-7b-instruct")
    rates = np.random.default_rng(0).choice((0.1, 0.05, 0.025), 128).tolist()
    fleet = Workload([Adapter(f"a{i}", 32, rate) for i, rate in enumerate(rates)])
    refined, spread = (
        solve(fleet, profile, "latency", solver=solver, max_gpus=2, verify=False, with_headroom=False)
        for solver in ("spread-refined", "spread")
    )
    ttft_ms = [TwinPredictor(seed=5).evaluate(fleet, plan.bins).mean_ttft_ms.max() for plan in (refined, spread)]
    assert ttft_ms[0] < 1.5 * ttft_ms[1]


def test_slots_by_simulation_are_taken_if_the_objective_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """More slots shorten waits and lengthen steps: an objective of gaps alone keeps those that its search found."""
    profile = load_profile("h100-64gb/qwen-2.5-7b-instruct")
    rates = np.random.default_rng(0).choice((0.1, 0.05, 0.025), 128).tolist()
    fleet = Workload([Adapter(f"a{i}", 32, rate) for i, rate in enumerate(rates)])
    goal, twin, plans = Latency(metric="itl"), TwinPredictor(), []
    for keep in (False, True):
        if keep:
            monkeypatch.setattr(spread_refined, "_simulated_slots", lambda problem, bins: bins)
        plans.append(solve(fleet, profile, goal, max_gpus=2, margin=0.0, verify=False, with_headroom=False))
    after, before = (goal.key(fleet, plan.bins, twin.evaluate(fleet, plan.bins)) for plan in plans)
    assert after <= before


def test_an_idle_server_is_not_the_slowest() -> None:
    """Adapters that nobody uses, on servers of their own, do not keep the others from being moved."""
    busy = ((8, 2.0), (32, 0.5), (16, 0.2), (32, 1.0), (32, 0.5), (32, 0.2))
    rows = [*((64 if k != 2 else 8, 0.0) for k in range(4)), *busy]
    fleet = Workload([Adapter(f"a{k}", rank, rate) for k, (rank, rate) in enumerate(rows)])
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    plan = solve(fleet, profile, "latency", max_gpus=6, solver="spread-refined", seed=3)
    assert plan.objective_value[1] < 3100.0  # with two busy adapters of rank 16 and 32 on one server: 3,279 ms
