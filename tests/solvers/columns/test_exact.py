"""The pattern model: exact on tiny fleets, never worse than greedy, bounds that hold."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monotone import MonotonePredictor, problem

from packer.adapter import Adapter
from packer.objectives.base import load_objective
from packer.objectives.gpus import Gpus
from packer.objectives.headroom import Headroom
from packer.plan import Status
from packer.planning.solve import solve
from packer.planning.verify import check
from packer.solvers.base import Problem
from packer.solvers.bounds import Bounds
from packer.solvers.classes import aggregate
from packer.solvers.columns import master
from packer.solvers.columns.exact import Exact, ExactSearch
from packer.solvers.columns.generation import BOUND
from packer.solvers.columns.master import solve_integer, solve_relaxation
from packer.solvers.columns.proof import certify
from packer.solvers.columns.rounding import realise
from packer.solvers.feasibility import Feasibility
from packer.solvers.greedy.solver import Greedy
from packer.solvers.slots import real_bins
from packer.solvers.work import Work
from packer.testing.analytic import random_fleet, small_profile
from packer.workload import Workload


def brute_force(task: Problem) -> int:
    """Fewest bins, by dynamic programming over all sets of adapters, each set evaluated on its own."""
    n = len(task.workload)
    sets = [tuple(i for i in range(n) if mask >> i & 1) for mask in range(1, 1 << n)]
    feasible = [mask for mask, each in enumerate(real_bins(task, sets), start=1) if each is not None]
    with_lowest = {i: [m for m in feasible if m & -m == 1 << i] for i in range(n)}

    @cache
    def fewest(left: int) -> int:
        if left == 0:
            return 0
        lowest = (left & -left).bit_length() - 1
        return 1 + min((fewest(left & ~m) for m in with_lowest[lowest] if m & left == m), default=n)

    return fewest((1 << n) - 1)


@pytest.mark.parametrize("seed", range(3))
def test_patterns_found_after_the_last_optimum_leave_it_as_it_is(seed: int) -> None:
    """What is rounded and diversified is the optimum over the patterns that it was found for."""
    task = problem(random_fleet(36, seed=seed, rates=(1.6, 0.8, 0.3)))
    columns = ExactSearch(task, Greedy().solve(task).bins).columns
    (source,) = columns.sources
    assert columns.start([columns.classes.rows(())])
    columns.run(np.array([1]), BOUND, lambda: False)
    assert source.add(np.minimum(source.patterns, 1)) > 0
    rows = columns.dive(np.array([60]), 0.0)
    assert rows is not None
    assert np.array_equal(np.sum([row for _, row in rows], axis=0), columns.demand)
    assert columns.diversify(len(rows) - 1) >= 0


def test_a_cover_whose_bins_are_refused_is_repaired() -> None:
    """Bins that are refused give adapters to the others or to a further one, each adapter keeps one place."""
    task = problem(random_fleet(80, seed=1, rates=(1.6, 0.8, 0.3)))
    classes = aggregate(task.workload)
    rows = [classes.counts(item.adapters) for item in Greedy().solve(task).bins]
    low, high = (min(rows, key=sum), max(rows, key=sum))
    full = [row for row in rows if row is not low and row is not high] + [low + high]
    made = realise(task, classes, full)
    assert made is not None
    assert len(made) <= len(rows)
    assert task.evaluator.holds(task.workload, made).all()
    assert sorted(i for item in made for i in item.adapters) == list(range(80))


@pytest.mark.parametrize("seed", range(6))
def test_exact_equals_brute_force_on_tiny_fleets(seed: int) -> None:
    """On at most 12 adapters the plan is as small as trying everything finds, and is proven."""
    fleet = random_fleet(6 + seed % 3, seed=seed, rates=(3.0, 4.5, 2.2, 5.1), ranks=(8, 16, 64))
    task = problem(fleet, predictor=MonotonePredictor(capacity_tok_s=6500.0))
    found = Exact().solve(task)
    assert not found.unplaced
    assert found.proven
    assert len(found.bins) == found.lower_bound == brute_force(task)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_know_limits_of_latency(seed: int) -> None:
    """With a limit of TTFT the bound is at most what trying everything within the limit finds, and is proven."""
    fleet = random_fleet(8, seed=seed, rates=(3.0, 4.5, 2.2), ranks=(8, 64))
    predictor = MonotonePredictor(capacity_tok_s=5000.0)
    limited = problem(fleet, objective=load_objective("slo:server.mean_ttft_ms=60.0"), predictor=predictor)
    best, found = brute_force(limited), Exact().solve(limited)
    assert (len(found.bins), found.lower_bound, found.proven) == (best, best, True)
    assert best > brute_force(problem(fleet, predictor=predictor))


def test_bounds_of_many_bins_know_limits_of_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bins are too many to evaluate each, the bound of the relaxation is above that without the limit."""
    monkeypatch.setattr("packer.solvers.classes.FEW_BINS", 500)
    monkeypatch.setattr("packer.solvers.columns.exact.FEW_BINS", 500)
    fleet = Workload([Adapter(f"a{i}", (8, 32)[i % 2], (0.9, 1.7, 2.6)[i % 3]) for i in range(30)])
    assert aggregate(fleet).every_bin() is None
    slow, free = (
        Exact().solve(problem(fleet, objective=goal))
        for goal in (load_objective("slo:server.mean_ttft_ms=60.0"), Gpus())
    )
    assert slow.proven
    assert free.lower_bound is not None
    assert free.lower_bound < (slow.lower_bound or 0.0) <= len(slow.bins)


def test_exact_equals_brute_force_on_twelve_adapters_of_three_kinds() -> None:
    """Twelve adapters, several bins: the enumeration is complete."""
    fleet = random_fleet(12, seed=11, rates=(3.1, 2.3, 1.3), ranks=(8,))
    task = problem(fleet)
    found = Exact().solve(task)
    assert len(found.bins) == found.lower_bound
    assert len(found.bins) == brute_force(task)


@settings(max_examples=6, deadline=None)
@given(
    n=st.integers(4, 30),
    seed=st.integers(0, 1000),
    rates=st.sampled_from([(3.2, 1.6, 0.8), (0.4, 0.2), (2.0, 0.05)]),
    ranks=st.sampled_from([(8,), (32,), (8, 16, 32)]),
)
def test_bound_is_at_most_exact_is_at_most_greedy(
    n: int, seed: int, rates: tuple[float, ...], ranks: tuple[int, ...]
) -> None:
    """Lower bound ≤ exact ≤ greedy, wherever the search ends (early, it may have no bound), and the plan is valid."""
    task = problem(random_fleet(n, seed, rates, ranks), time_limit_s=3.0)
    greedy, exact, quick = Greedy().solve(task), Exact().solve(task), Bounds().solve(task)
    bounds = [each.lower_bound or 0.0 for each in (exact, quick)]
    assert max(bounds) <= len(exact.bins) <= len(greedy.bins)
    check(task, exact)


def test_a_worse_start_is_improved_to_the_bound() -> None:
    """Column generation and rounding close a gap that the start left open."""
    fleet = random_fleet(48, seed=5, rates=(1.6, 0.8), ranks=(8, 32))
    task = problem(fleet, time_limit_s=30.0)
    bins = real_bins(task, [tuple(range(i, min(i + 4, 48))) for i in range(0, 48, 4)])
    search = ExactSearch(task, [each for each in bins if each is not None])
    search.run()
    greedy = Greedy().solve(task)
    assert len(search.bins) <= len(greedy.bins)
    assert search.bound.value <= len(search.bins)


def test_bucketed_rates_keep_plan_and_bound_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more distinct rates than classes the real bins are still evaluated, and the bound still holds."""
    monkeypatch.setattr("packer.solvers.columns.exact._UNMERGED", 0)
    rng, asked = np.random.default_rng(2), count()
    fleet = Workload([Adapter(f"a{i}", 8, float(rate)) for i, rate in enumerate(rng.uniform(0.05, 1.0, 60))])
    task = problem(fleet, stop=lambda: next(asked) > 300)  # it ends early, and on every machine at the same step
    found = Exact().solve(task)
    check(task, found)
    assert found.lower_bound is not None
    assert found.lower_bound <= len(found.bins) <= len(Greedy().solve(task).bins)


def test_one_gpu_ends_the_search() -> None:
    """No bin is evaluated to show that a plan of one GPU can't be smaller."""
    task = problem(random_fleet(20, seed=0, rates=(0.1,)))
    search = ExactSearch(task, Greedy().solve(task).bins)
    assert len(search.bins) == 1
    search.run()
    assert search.closed
    assert search.feasibility.evaluated == 0


def test_bounds_name_the_bins_that_no_search_evaluates() -> None:
    """Where searches keep to so many adapters on a GPU, what every possible bin says is said of those."""
    task = replace(problem(random_fleet(24, seed=3, rates=(1.6, 0.8), ranks=(8,))), most_adapters=4)
    search = ExactSearch(task, Greedy().solve(task).bins)
    search.run()
    most = search.problem.most_adapters
    assert most < 24
    assert search.bound.source.startswith(f"at most {most} adapters on a GPU; every possible bin")


def test_the_same_seed_gives_the_same_plan() -> None:
    """Nothing random is left unseeded."""
    fleet = random_fleet(32, seed=9)
    first, second = (Exact().solve(problem(fleet)) for _ in range(2))
    assert first.bins == second.bins
    assert first.lower_bound == second.lower_bound


def test_an_integer_program_ends_after_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an integer program is counted, as work of its search: nothing is claimed of one that takes more."""
    rng = np.random.default_rng(0)
    patterns, demand = rng.binomial(3, 0.2, (200, 30)), rng.integers(1, 9, 30)
    work = Work()
    assert solve_integer(patterns, demand, work=work)[0] is not None
    assert 0.0 < work.done_s < 10.0
    monkeypatch.setattr("packer.solvers.columns.master._MOST_S", 0.0)
    assert solve_integer(patterns, demand) == (None, False)


def test_relaxation_and_whole_numbers_of_a_known_model() -> None:
    """Patterns {2 of A}, {1 of A and 1 of B}, demand 3 and 1: 2 bins, the relaxation 2 as well."""
    patterns = np.array([[2, 0], [1, 1]])
    demand = np.array([3, 1])
    relaxed = solve_relaxation(patterns, demand)
    assert relaxed is not None
    assert relaxed.value == pytest.approx(2.0)
    assert relaxed.duals @ demand == pytest.approx(2.0)
    whole, proven = solve_integer(patterns, demand, time_limit_s=5.0)
    assert proven
    assert whole is not None
    assert whole.sum() == 2


def test_few_classes_are_solved_as_highs_solves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tableau for few classes has the optimum of HiGHS, and duals that prove it; None where nothing covers."""
    rng = np.random.default_rng(2)
    for _ in range(60):
        k, m = int(rng.integers(1, 9)), int(rng.integers(1, 80))
        patterns = rng.integers(0, 20, (m, k)) * 10.0 ** rng.uniform(0.0, 5.0, k) * (rng.random((m, k)) < 0.6)
        demand = patterns[rng.integers(m, size=9)].sum(axis=0) * rng.random(k) + (rng.random() < 0.1)
        prices = rng.uniform(0.5, 2.0, m)
        few = solve_relaxation(patterns, demand, prices)
        with monkeypatch.context() as patch:
            patch.setattr(master, "FEW", 0)
            highs = solve_relaxation(patterns, demand, prices)
        assert (few is None) == (highs is None)
        if few is None or highs is None:
            continue
        assert few.value == pytest.approx(highs.value)
        assert few.use @ prices == pytest.approx(highs.value)
        assert few.duals @ demand == pytest.approx(highs.value)
        assert (few.use @ patterns >= demand * (1.0 - 1e-7)).all()
        assert (patterns @ few.duals <= prices * (1.0 + 1e-7)).all()


def test_few_classes_of_a_mix_of_servers_prove_their_optimum() -> None:
    """Where kinds of server are limited (entries below 0, prices of 0), cover and duals agree: both are optimal."""
    rng = np.random.default_rng(3)
    for _ in range(60):
        kinds, k = int(rng.integers(1, 4)), int(rng.integers(1, 13))
        kind = np.sort(np.append(np.arange(kinds), rng.integers(0, kinds, 80)))
        filled = rng.integers(0, 20, (len(kind), k)) * 10.0 ** rng.uniform(-1.0, 4.0, k)
        counts = np.append(np.zeros(k), rng.integers(1, 40, kinds))
        patterns = np.vstack([np.hstack([filled, -np.eye(kinds)[kind]]), counts])
        prices, demand = (np.append(np.zeros(len(kind)), 1.0), np.append(filled[:40].sum(axis=0), np.zeros(kinds)))
        few = solve_relaxation(patterns, demand, prices)
        assert few is not None
        assert few.use @ prices == pytest.approx(few.duals @ demand, rel=1e-9)
        assert few.value == pytest.approx(few.use @ prices, rel=1e-9)
        assert (few.use @ patterns >= demand - 1e-7 * np.maximum(demand, 1.0)).all()
        assert (patterns @ few.duals <= prices + 1e-9).all()


def test_certificates_find_what_enumeration_finds() -> None:
    """The search beyond a value is right about whether a feasible bin lies there."""
    fleet = random_fleet(22, seed=3, rates=(1.6, 0.8), ranks=(8, 32))
    classes = aggregate(fleet)
    task = problem(fleet)
    feasibility = Feasibility(task, classes)
    grids = np.meshgrid(*(np.arange(d + 1) for d in classes.demand.tolist()), indexing="ij")
    rows = np.stack([grid.ravel() for grid in grids], axis=1)
    weights = classes.loads / 1000.0
    best = float((rows[feasibility.feasible(rows)] @ weights).max())
    beyond = certify(feasibility, weights, above=best + 1e-6, slack=0.0, budget=20_000, known=rows[:0])
    assert beyond.exhaustive
    below = certify(feasibility, weights, above=best * 0.9, slack=0.0, budget=20_000, known=rows[:0])
    assert below.counterexample is not None
    assert below.counterexample @ weights > best * 0.9


def test_rounded_certificates_promise_only_what_they_may() -> None:
    """With coarse steps the enumeration is smaller and still excludes every bin beyond value plus slack."""
    fleet = random_fleet(30, seed=3, rates=(1.6, 0.8), ranks=(8, 32))
    classes = aggregate(fleet)
    feasibility = Feasibility(problem(fleet), classes)
    weights = classes.loads / 1000.0
    best = 0.0
    for _ in range(200):
        known = np.zeros((0, len(classes)), dtype=np.int64)
        found = certify(feasibility, weights, above=best, slack=0.2, budget=20_000, known=known)
        if found.counterexample is None:
            break
        best = float(found.counterexample @ weights)
    assert found.exhaustive
    rows = np.random.default_rng(1).integers(0, classes.demand + 1, size=(2000, len(classes)))
    feasible = rows[feasibility.feasible(rows)]
    assert (feasible @ weights).max() <= best + 0.2 + 1e-9


def test_stopping_returns_a_complete_plan() -> None:
    """Stopped in the middle of the search, the solver returns the plan at hand, whole."""
    fleet = random_fleet(60, seed=1)
    queried, most = 0, 10**9

    def stop() -> bool:
        nonlocal queried
        queried += 1
        return queried > most

    greedy = Greedy().solve(problem(fleet, stop=stop))
    most, queried = queried + 5, 0
    task = problem(fleet, stop=stop)
    found = Exact().solve(task)
    check(task, found)
    assert queried > most
    assert not found.unplaced
    assert len(found.bins) <= len(greedy.bins)


def test_unfit_problems_are_refused_in_words() -> None:
    """Replicas and several GPU types are not for this solver, and it says so."""
    task = problem(random_fleet(4, seed=0))
    assert Exact().supports(task) is None
    assert "replica" in (Exact().supports(replace(task, max_replicas=2)) or "")
    assert "one GPU type" in (Exact().supports(replace(task, profiles=task.profiles * 2)) or "")


@pytest.mark.parametrize("seed", range(8))
def test_rates_of_other_hours_are_never_taken_for_equal(seed: int, tmp_path: Path) -> None:
    """Adapters of one nominal rate may differ in a file of rates: `exact` says so, `auto` proves nothing wrong."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 8))
    fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(n)])
    hours = rng.choice([0.5, 2.5, 4.5, 6.5], (n, 2)).tolist()
    path = tmp_path / "hours.csv"
    path.write_text("\n".join(["adapter,h1,h2", *(f"a{i},{one},{two}" for i, (one, two) in enumerate(hours))]))
    goal, predictor = Headroom(1.0, str(path)), MonotonePredictor(capacity_tok_s=6500.0)
    task = problem(fleet, objective=goal, predictor=predictor)
    assert "may distinguish them" in (Exact().supports(task) or "")
    plan = solve(fleet, small_profile(), goal, solver="auto", predictor=predictor, margin=0.0, verify=False)
    fewest = brute_force(task)
    assert plan.n_gpus >= fewest
    assert plan.status is not Status.OPTIMAL or plan.n_gpus == fewest


def test_only_certain_bounds_are_proven() -> None:
    """A bound that rests on a search says so and is not proven; one as high that is certain takes its place."""
    task = problem(random_fleet(48, seed=5, rates=(1.6, 0.8), ranks=(8, 32)))
    first = Greedy().solve(task)
    search = ExactSearch(task, first.bins)
    for certain in (False, True, False):
        search._raise(len(first.bins), "said so", exhaustive=certain, every=certain)
        found = search.solution(first)
        assert found.lower_bound == len(first.bins)
        seen = search.certain
        assert (found.proven, found.bound_source) == (seen, "said so" if seen else "estimate: said so")
    assert search.certain


def test_prices_decide_between_covers() -> None:
    """Where one large bin costs more than two small ones, the small ones are taken, whole and relaxed."""
    patterns, demand = np.array([[4], [2]]), np.array([4])
    for prices, use, value in (([3.0, 1.0], [0, 2], 2.0), ([1.5, 1.0], [1, 0], 1.5)):
        relaxed = solve_relaxation(patterns, demand, np.array(prices))
        assert relaxed is not None
        assert relaxed.value == pytest.approx(value)
        whole, proven = solve_integer(patterns, demand, time_limit_s=5.0, prices=np.array(prices))
        assert whole is not None
        assert (whole.tolist(), proven) == (use, True)
    assert solve_integer(np.zeros((0, 1), dtype=np.int64), demand, time_limit_s=1.0) == (None, True)
    assert solve_integer(patterns, demand, time_limit_s=5.0, most_bins=0) == (None, True)


def test_certificates_of_many_classes_stay_within_their_memory() -> None:
    """With lengths of their own adapters are 160 classes: the enumeration of bins takes less than 512 MiB."""
    rng = np.random.default_rng(0)
    weights, one = rng.uniform(0.02, 0.2, 160), np.eye(160, dtype=np.int64)
    nothing: Any = SimpleNamespace(
        feasible=lambda rows: np.zeros(len(rows), dtype=bool),
        classes=SimpleNamespace(demand=one.sum(axis=0), chains=one),
    )
    tracemalloc.start()
    certify(nothing, weights, above=1.0, slack=0.02, budget=200_000, known=one)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 512 * 2**20
