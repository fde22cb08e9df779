"""The compiled first fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.objectives.gpus import Gpus
from packer.predictors.api import load_predictor
from packer.predictors.base import Predictor
from packer.profile import Profile
from packer.solvers.api import solve
from packer.solvers.base import Problem
from packer.solvers.cache import CachedPredictor
from packer.solvers.first_fit import FirstFit
from packer.solvers.greedy_fast import GreedyFast
from packer.solvers.margin import MarginPredictor
from packer.solvers.order import paper_order
from packer.solvers.verify import check
from packer.workload import Workload

RANKS = (1, 8, 16, 32, 64)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A shipped server."""
    return load_profile("h100-64gb/llama-3.1-8b-instruct")


def fleet(seed: int) -> Workload:
    """A fleet of some kind: few rates or as many as adapters, own lengths or none, light to too hot."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([1, 5, 40, 200, 700]))
    rates = rng.lognormal(-2.5, 1.2, n) if seed % 2 else rng.choice([0.8, 0.2, 0.05, 0.0125], n)
    lengths = [None, Lengths.gamma(float(rng.uniform(40, 900)), 0.8)]
    return Workload(
        [
            Adapter(f"a{i}", int(rng.choice(RANKS)), float(rate), lengths[seed % 3 == 0 and i % 2])
            for i, rate in enumerate(rates)
        ]
    )


def oracle(problem: Problem) -> tuple[list[Bin], list[int]]:
    """The same first fit, a Python question at a time."""
    first_fit = FirstFit(problem, paper_order(problem.workload))
    first_fit.run()
    return first_fit.bins, first_fit.left


@pytest.mark.parametrize("kind", ["tree", "forest", "boosting"])
@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_asks_as_the_first_fit_does(profile: Profile, kind: str, seed: int) -> None:
    """Compiled, first fit makes the same bins with the same slots, and leaves the same adapters."""
    learned = load_predictor(kind, profile)
    problem = Problem(fleet(seed), (profile,), Gpus(), learned)
    found = GreedyFast().solve(problem)
    check(problem, found)
    bins, left = oracle(problem)
    assert list(found.bins) == bins
    assert list(found.unplaced) == left
    assert len(found.reasons) == len(left)


@pytest.mark.parametrize("hot", [(64,), (16,), (1,), (64, 64, 16, 1, 1)])
def test_adapters_without_a_place_leave_the_others_theirs(profile: Profile, hot: tuple[int, ...]) -> None:
    """First, in the middle or last in the order: what starves an empty GPU is left, the rest is packed as ever."""
    workload = Workload(
        [
            *(Adapter(f"hot{k}", rank, 200.0) for k, rank in enumerate(hot)),
            *(Adapter(f"a{k}", (32, 8)[k % 2], 0.1) for k in range(120)),
        ]
    )
    problem = Problem(workload, (profile,), Gpus(), load_predictor("tree", profile))
    found = GreedyFast().solve(problem)
    check(problem, found)
    bins, left = oracle(problem)
    assert list(found.bins) == bins
    assert sorted(found.unplaced) == sorted(left) == list(range(len(hot)))
    assert all("req/s" in reason for reason in found.reasons)


def test_a_fleet_of_hot_adapters_has_no_plan(profile: Profile) -> None:
    """If no adapter has a place there are no servers, and a reason for each adapter."""
    workload = Workload([Adapter(f"hot{k}", 8, 200.0) for k in range(3)])
    found = GreedyFast().solve(Problem(workload, (profile,), Gpus(), load_predictor("tree", profile)))
    assert found.bins == ()
    assert sorted(found.unplaced) == [0, 1, 2]
    assert len(found.reasons) == 3


def test_the_margin_and_the_memory_of_answers_are_seen_through(profile: Profile) -> None:
    """A margin raises the rates for the kernel as for the predictor; remembered answers change nothing."""
    learned = load_predictor("tree", profile)
    raised: Predictor = MarginPredictor(CachedPredictor(learned), 1.3)
    problem = Problem(fleet(4), (profile,), Gpus(), raised)
    assert GreedyFast().supports(problem) is None
    found = GreedyFast().solve(problem)
    assert list(found.bins) == oracle(problem)[0]
    plain = GreedyFast().solve(Problem(fleet(4), (profile,), Gpus(), learned))
    assert len(found.bins) > len(plain.bins)


def test_a_plan_by_name_holds_every_adapter(profile: Profile) -> None:
    """The solver is found by its name and its plan is verified like any other."""
    workload = Workload([Adapter(f"a{i}", 8 + 8 * (i % 2), 0.2) for i in range(300)])
    plan = solve(workload, profile, solver="greedy-fast", predictor="forest")
    assert sorted(i for item in plan.bins for i in item.adapters) == list(range(300))
    assert plan.verified


def test_more_gpus_than_allowed_leave_adapters_with_reasons(profile: Profile) -> None:
    """With fewer GPUs than needed the rest is unplaced, and what would help is said."""
    problem = Problem(fleet(4), (profile,), Gpus(), load_predictor("tree", profile), max_gpus=1)
    found = GreedyFast().solve(problem)
    assert len(found.bins) == 1
    assert found.unplaced
    assert "--gpus" in found.reasons[-1]


def test_what_it_does_not_know_it_refuses(profile: Profile) -> None:
    """Other objectives' needs, replicas, uneven arrivals and judges that are not trees are refused with the reason."""
    tree = load_predictor("tree", profile)
    solver = GreedyFast()
    assert "--max-replicas" in str(
        solver.supports(Problem(fleet(4), (profile,), Gpus(), tree, max_replicas=2))
    )
    twin = load_predictor("twin", profile)
    assert "not twin" in str(solver.supports(Problem(fleet(4), (profile,), Gpus(), twin)))
    waves = Arrivals("piecewise", factors=(0.5, 1.5), period_s=300.0)
    uneven = Problem(fleet(4).with_arrivals(waves), (profile,), Gpus(), tree)
    assert "'piecewise'" in str(solver.supports(uneven))


def test_a_predictor_of_another_profile_is_refused(profile: Profile) -> None:
    """The kernel asks the trees that it is given: they must have been trained for the GPUs of the plan."""
    other = load_profile("h100-64gb/qwen-2.5-7b-instruct")
    problem = Problem(fleet(4), (profile,), Gpus(), load_predictor("tree", profile))
    assert GreedyFast().supports(problem) is None
    reason = str(GreedyFast().supports(replace(problem, profiles=(other,))))
    assert "trained for h100-64gb/llama-3.1-8b-instruct" in reason
    assert other.fingerprint in reason
    assert "one GPU type" in str(GreedyFast().supports(replace(problem, profiles=(profile, other))))
