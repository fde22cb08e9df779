"""What a limit of time or Ctrl-C leaves undone is said, and the plan that is returned is whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from monotone import problem

from packer import registry
from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.goal import Slo as FleetSlo
from packer.io.profiles import load_profile
from packer.objectives.base import load_objective
from packer.plan import Plan
from packer.planning import loop
from packer.planning import solve as api
from packer.planning.verify import check
from packer.room import LEVELS
from packer.settings import Settings
from packer.solvers import base
from packer.solvers.base import Problem, Solution
from packer.solvers.columns import generation
from packer.solvers.columns.exact import ExactSearch
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.solver import Greedy
from packer.solvers.headroom import headroom
from packer.solvers.slots import real_bins
from packer.solvers.spread_refined import SpreadRefined
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.workload import Workload

PROFILE = small_profile()


class Clock:
    """A clock that every evaluation of a bin moves on by a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


class Slow(AnalyticPredictor):
    """The analytic predictor with a clock of its own."""

    clock, each_s = Clock(), 1e-3

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin; one row per bin, in order."""
        self.clock.now += self.each_s * len(bins)
        return super().evaluate(workload, bins)


def limited(monkeypatch: object, seconds: float) -> tuple[Problem, Solution]:
    """Greedy's solution of a fleet within so many seconds of the clock."""
    Slow.clock.now = 0.0
    monkeypatch.setattr(base.time, "monotonic", Slow.clock.monotonic)  # type: ignore[attr-defined]
    fleet = random_fleet(400, seed=3, rates=(0.2, 0.11, 0.07), ranks=(8, 16, 32))
    posed = replace(problem(fleet, predictor=Slow()), time_limit_s=seconds, started=0.0)
    found = Greedy().solve(posed)
    check(posed, found)
    return posed, found


def test_a_limit_leaves_time_to_even_out_the_load(monkeypatch: object) -> None:
    """Packing takes its share of the time only, so that a plan cut short there is still evened out."""
    whole = limited(monkeypatch, 1e6)[1]
    assert whole.reasons == ()
    spent = Slow.clock.now
    posed, cut = limited(monkeypatch, spent * 0.5)
    assert len(cut.reasons) == 1
    assert "time limit cut short" in cut.reasons[0]
    loads = [bin_.offered_tok_s(posed.workload) for bin_ in cut.bins]
    assert max(loads) < 1.5 * min(loads)


def test_out_of_time_gpus_are_still_filled(monkeypatch: object) -> None:
    """Without time to search the number of GPUs stays near that of the whole search."""
    whole, cut = (limited(monkeypatch, seconds)[1] for seconds in (1e6, 0.02))
    assert len(whole.bins) <= len(cut.bins) <= 1.5 * len(whole.bins)


def test_headroom_stops_in_time() -> None:
    """Stopped, the bisection returns the largest factors that are known to hold."""
    fleet = random_fleet(24, seed=3, rates=(0.3,))
    bins = [Bin(tuple(range(24)), Settings(24, 32), PROFILE)]
    steps = iter([False, False, True])
    (found,) = headroom(fleet, bins, Evaluator(AnalyticPredictor()), lambda: next(steps))
    (exact,) = headroom(fleet, bins, Evaluator(AnalyticPredictor()))
    assert exact is not None
    assert found is None or 1.0 <= found <= exact <= LEVELS[-1]


def test_bins_of_one_adapter_are_not_swapped() -> None:
    """Two hot adapters that may be split: no refinement puts one of them on two GPUs as a whole."""
    for seed in range(40):
        rates = np.random.default_rng(seed).uniform(4.0, 16.0, 2).tolist()
        fleet = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate(rates)])
        task = problem(
            fleet, objective=load_objective("slo:server.mean_ttft_ms=40.0"), predictor=AnalyticPredictor(), max_gpus=2
        )
        posed = replace(task, max_replicas=2)
        check(posed, SpreadRefined().solve(posed))


def test_servers_that_starve_with_any_slots_end_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit, servers get the slots of the one before, and one starting plan is enough."""
    Slow.clock.now = 0.0
    monkeypatch.setattr(base.time, "monotonic", Slow.clock.monotonic)
    fleet = random_fleet(400, seed=3, rates=(0.9, 0.5, 0.7), ranks=(8, 16, 32))
    posed = replace(problem(fleet, predictor=Slow(), max_gpus=8), time_limit_s=0.01, started=0.0)
    found = SpreadRefined().solve(posed)
    check(posed, found)
    assert not posed.evaluator.evaluate(fleet, found.bins).feasible.any()
    assert Slow.clock.now < 0.018


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_column_generation_keeps_to_its_limit(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Neither the evaluation of bins nor a linear program goes on beyond the limit by more than a batch."""
    Slow.clock.now = 0.0
    monkeypatch.setattr(base.time, "monotonic", Slow.clock.monotonic)
    fleet = random_fleet(240, seed=3, rates=tuple(np.linspace(0.05, 0.6, 40)), ranks=(8, 16, 32))
    task = replace(problem(fleet, predictor=Slow()), started=0.0)
    bins = [bin_ for bin_ in real_bins(task, [tuple(range(i, i + 4)) for i in range(0, 240, 4)]) if bin_]
    assert len(bins) == 60
    whole = generation.solve_relaxation

    def hard(*given: Any, time_limit_s: float) -> Any:
        """A linear program that takes as long as it may, and 10 s if it is let."""
        Slow.clock.now += min(10.0, time_limit_s)
        return None if time_limit_s < 10.0 else whole(*given, time_limit_s=time_limit_s)

    monkeypatch.setattr(generation, "solve_relaxation", hard)
    search = ExactSearch(replace(task, started=Slow.clock.now, time_limit_s=seconds), bins)
    search.run()
    assert Slow.clock.now <= search.problem.started + seconds + 0.3
    assert sorted(i for bin_ in search.bins for i in bin_.adapters) == list(range(240))


def test_a_limit_that_passes_after_the_search_costs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the limit passes between the plan and what is said beside it, the plan is returned."""
    late = {"s": 0.0}
    real = base.time.monotonic
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: real() + late["s"]))

    def slow(plan: Plan, *_given: object) -> Plan:
        late["s"] = 1e6
        return plan

    monkeypatch.setattr(loop, "with_band", slow)
    fleet = Workload([Adapter(f"a{k}", 16, 0.9) for k in range(50)])
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    waits = replace(fleet, slo=FleetSlo.of(p95_ttft_ms=1.0))
    assert api.solve(waits, profile, time_limit_s=1e3, verify=False).n_gpus >= 1


@pytest.mark.parametrize("name", ["mixed", "auto", "cpsat"])
def test_without_a_limit_a_slow_machine_finds_the_same_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of solvers count work: the same seed gives the same plan and bound, however slow evaluations are."""
    monkeypatch.setattr(base.time, "monotonic", Slow.clock.monotonic)
    monkeypatch.setattr("packer.solvers.cpsat.solver._WORK_PER_S", 0.005)
    monkeypatch.setattr("packer.solvers.auto._DEFAULT_S", 2.0)
    rates = tuple(np.random.default_rng(1).uniform(0.3, 2.5, 8).tolist())
    fleet, found = random_fleet(14, seed=1, rates=rates, ranks=(8, 16, 32)), []
    for each_s in (1e-9, 1e3):
        Slow.each_s, Slow.clock.now = each_s, 0.0
        priced = {}
        for gpu, price, peak_tok_s in (("large", 3.0, 4000.0), ("small", 1.2, 1500.0)):
            profile = small_profile(gpu)
            profile = replace(profile, gpu=replace(profile.gpu, name=gpu, price_per_hour=price))
            priced[profile] = Slow(peak_tok_s)
        kinds = (PROFILE,) if name == "auto" else tuple(priced)
        evaluator = Evaluator(
            Slow() if name == "auto" else priced, load_objective("gpus" if name == "auto" else "cost")
        )
        posed = Problem(fleet, kinds, load_objective("gpus" if name == "auto" else "cost"), evaluator, started=0.0)
        solution = registry.load("solver", name)().solve(posed)
        check(posed, solution)
        found.append((solution.bins, solution.lower_bound, solution.proven))
    monkeypatch.setattr(Slow, "each_s", 1e-3)
    assert found[0] == found[1]


def test_counted_work_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search without a time limit ends after its work, with a whole plan."""
    fleet = random_fleet(60, seed=2, rates=tuple(np.linspace(0.3, 2.5, 12).tolist()), ranks=(8, 16, 32))
    posed = problem(fleet, predictor=AnalyticPredictor()).within(0.05)
    assert not posed.out_of_time()
    assert math.isinf(posed.wall_s)
    search = ExactSearch(posed, Greedy().solve(posed).bins)
    search.run()
    assert posed.out_of_time()
    assert posed.elapsed_s() < 0.1
    assert sorted(i for bin_ in search.bins for i in bin_.adapters) == list(range(60))


def test_a_search_whose_time_is_over_still_takes_its_first_step() -> None:
    """What is left of a limit becomes a limit again: never none at all, and none where there was none."""
    assert base.limit_of(math.inf) is None
    assert base.limit_of(3.0) == 3.0
    assert base.limit_of(-3.0) == base.LEAST_S
    posed = problem(Workload([Adapter("a", 8, 0.1)]), time_limit_s=1e-9)
    assert posed.with_share(0.5).with_share(0.1).out_of_time()
