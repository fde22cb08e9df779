"""A plan is called optimal only where that is certain relative to what evaluated it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from monotone import Imitating, problem

from packer.adapter import Adapter
from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.evaluation import Evaluations
from packer.fit.estimate import estimate_profile
from packer.fit.models import model_named
from packer.lengths import Lengths
from packer.plan import Status
from packer.planning.solve import solve
from packer.predictors.learned import TreePredictor
from packer.profile import Profile
from packer.solvers.backbone import load_bound
from packer.solvers.bounds import Bounds
from packer.solvers.columns import exact
from packer.solvers.columns.exact import ExactSearch
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.solver import Greedy
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.workload import Workload


class Knapsack(AnalyticPredictor):
    """A server holds adapters of at most `capacity` req/s together, whatever the twin says of that."""

    name = "knapsack"
    monotone = True

    def __init__(self, capacity: float) -> None:
        super().__init__()
        object.__setattr__(self, "capacity", capacity)

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin; one row per bin, in order."""
        found = AnalyticPredictor(1e12).evaluate(workload, bins)
        full = np.array([b.rates(workload).sum() > self.capacity * (1.0 + 1e-9) for b in bins])  # type: ignore[attr-defined]
        throughput = np.where(full, 0.0, found.offered_tok_s)
        nothing = np.zeros(len(bins), dtype=bool)
        return replace(found, starved=full, memory_error=nothing, total_token_throughput=throughput)


def triplets(n: int, seed: int, scale: float) -> Workload:
    """`n` adapters that fill n / 3 servers of 1000 × `scale` req/s to the last request, three on each."""
    rng = np.random.default_rng(seed)
    sizes: list[int] = []
    for _ in range(n // 3):
        first = int(rng.integers(380, 490))
        second = int(rng.integers(250, (1000 - first) // 2 + 1))
        sizes += [first, second, 1000 - first - second]
    rng.shuffle(sizes)
    return Workload([Adapter(f"a{i}", 8, scale * size) for i, size in enumerate(sizes)])


@pytest.mark.parametrize("solver", ["greedy", "bounds", "exact", "auto"])
def test_a_bound_belongs_to_the_predictor_that_it_was_made_for(solver: str) -> None:
    """The twin's bound by load says nothing of a predictor that finds more load feasible than the twin does."""
    fleet = triplets(30, seed=1, scale=0.1)
    profile = small_profile()
    assert load_bound(fleet, profile, 0.0) > 10
    settings = {"predictor": Knapsack(100.0), "verify": False, "margin": 0.0, "time_limit_s": 6.0}
    plan = solve(fleet, profile, solver=solver, **settings)
    assert plan.n_gpus >= 10
    assert plan.lower_bound is None or not plan.bound_proven or plan.lower_bound <= 10
    assert plan.status is not Status.OPTIMAL or plan.n_gpus == 10


def test_an_estimate_does_not_end_the_search() -> None:
    """With a bound that only a search failed to refute the search goes on; a certain one ends it."""
    task = problem(random_fleet(48, seed=5, rates=(1.6, 0.8), ranks=(8, 32)))
    search = ExactSearch(task, Greedy().solve(task).bins)
    for certain in (False, True):
        search._raise(len(search.bins), "said so", exhaustive=certain, every=certain)
        assert search.closed is certain


@pytest.mark.parametrize("seed", range(3))
def test_triplets_are_solved_and_proven(seed: int) -> None:
    """Where 45 adapters fill 15 servers exactly, the plan has 15 and the bound is 15, proven by enumeration."""
    fleet = triplets(45, seed=seed, scale=1.0)
    settings = {"predictor": Knapsack(1000.0), "verify": False, "margin": 0.0, "time_limit_s": 60.0}
    plan = solve(fleet, small_profile(), solver="exact", **settings)
    assert plan.lower_bound == plan.n_gpus == 15
    assert plan.bound_proven
    assert plan.status is Status.OPTIMAL


@pytest.mark.parametrize(
    ("capacity", "items", "relaxed", "fewest"),
    [
        (30, {15: 13, 10: 20, 6: 34}, 19.967, 21),
        (66, {33: 11, 22: 14, 6: 53}, 14.985, 16),
        (84, {28: 14, 21: 15, 12: 25, 25: 3, 59: 3}, 14.988, 16),
        (30, {15: 11, 10: 14, 6: 9, 16: 2, 14: 2, 17: 5, 13: 5}, 18.967, 20),
        (84, {28: 5, 21: 23, 12: 32, 65: 5, 19: 5}, 16.988, 18),
        (60, {30: 11, 20: 17, 12: 9, 35: 4, 25: 4}, 16.967, 18),
    ],
)
def test_a_plan_above_the_relaxation_rounded_up_is_proven(
    capacity: int, items: dict[int, int], relaxed: float, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fewest servers are one more than the relaxation promises, the bound is raised to them."""
    monkeypatch.setattr(exact, "FEW_BINS", 5000)  # else some are enumerated
    sizes = [size for size, count in items.items() for _ in range(count)]
    fleet = Workload([Adapter(f"a{i}", 8, float(size)) for i, size in enumerate(sizes)])
    settings = {"predictor": Knapsack(capacity), "verify": False, "margin": 0.0, "time_limit_s": 20.0}
    plan = solve(fleet, small_profile(), solver="exact", **settings)
    assert plan.statistics["relaxation"] == pytest.approx(relaxed, abs=1e-3)
    assert plan.n_gpus == plan.lower_bound == fewest
    assert (plan.bound_proven, plan.status) == (True, Status.OPTIMAL)
    assert "integer program" in plan.bound_source


def test_some_hundred_adapters_of_160_kinds_are_solved_and_proven() -> None:
    """110 adapters of 55 rates keep their rates: merged into 48 classes they would have an estimate only."""
    sizes = np.random.default_rng(0).integers(20, 91, 110).tolist()
    fleet = Workload([Adapter(f"a{i}", 8, float(size)) for i, size in enumerate(sizes)])
    settings = {"predictor": Knapsack(150.0), "verify": False, "margin": 0.0, "time_limit_s": 300.0}
    plan = solve(fleet, small_profile(), solver="exact", **settings)
    assert (plan.status, plan.n_gpus, plan.lower_bound) == (Status.OPTIMAL, 41, 41.0)


def test_slow_predictors_have_the_same_limit_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long an evaluation takes, servers of many light adapters are among those that a bound admits."""
    adapters = [Adapter(f"big{i}", 8, 2.0) for i in range(10)]
    adapters += [Adapter(f"small{i}", 8, 0.02) for i in range(200)]
    found = []
    for simulates in (False, True):
        monkeypatch.setattr(Evaluator, "simulates", simulates)
        found.append(Bounds().solve(problem(Workload(adapters))))
    assert found[0].lower_bound == found[1].lower_bound == len(found[0].bins) == 2


def test_a_plan_of_a_trained_predictor_is_optimal_only_if_the_twin_confirms_it(toy_profile: Profile) -> None:
    """The bound by load is the twin's: unconfirmed it is an estimate for predictors that imitate the twin."""

    class Imitator(Imitating, AnalyticPredictor):
        pass

    fleet = Workload([Adapter(f"a{i}", 8, 0.4, Lengths.constant(400), Lengths.constant(200)) for i in range(40)])
    plan = solve(fleet, toy_profile, predictor=Imitator(), verify=False, margin=0.0)
    assert plan.n_gpus > 1
    assert plan.bound_source.startswith("estimate") is not plan.bound_proven
    assert not plan.bound_proven or plan.lower_bound == 1
    assert plan.status is Status.FEASIBLE


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("solver", ["bounds", "exact", "greedy"])
def test_optimal_holds_over_every_number_of_slots(solver: str, seed: int) -> None:
    """On a small card with large ranks a plan called optimal has no more GPUs than the best of every partition with
    every `max_loras`, of which few start at all."""
    rng = np.random.default_rng((seed, 3))
    card = estimate_profile(model_named("meta-llama/Llama-3.1-8B-Instruct"), "a10", max_model_len=4096)
    rates = rng.uniform(0.02, 0.4, 6)
    fleet = Workload([Adapter(f"a{i}", int(rng.choice((64, 128))), float(rate)) for i, rate in enumerate(rates)])
    judge = TreePredictor.guide(card)
    sets = [tuple(i for i in range(6) if mask >> i & 1) for mask in range(1, 64)]
    ranks = [slot_rank_for(int(fleet.ranks[list(each)].max())) for each in sets]
    tried = [
        (mask, Bin(each, card.settings(n, rank), card))
        for mask, (each, rank) in enumerate(zip(sets, ranks, strict=True), start=1)
        for n in range(1, len(each) + 1)
    ]
    feasible = judge.evaluate(fleet, [item for _, item in tried]).feasible.tolist()
    good = {mask for (mask, _), ok in zip(tried, feasible, strict=True) if ok}
    fewest = [0]
    for mask in range(1, 64):
        parts = [fewest[mask & ~part] for part in good if part & mask == part and part & mask & -mask]
        fewest.append(1 + min(parts, default=99))
    plan = solve(fleet, card, solver=solver, predictor=judge, margin=0.0, verify=False, with_headroom=False)
    assert plan.n_gpus >= fewest[63]
    assert not plan.bound_proven or (plan.lower_bound or 0) <= fewest[63]
    assert solver == "greedy" or (plan.status, plan.n_gpus) == (Status.OPTIMAL, fewest[63])
