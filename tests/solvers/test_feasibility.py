"""The feasibility feasibility."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from monotone import MonotonePredictor, problem

from packer.adapter import Adapter
from packer.arrays import IntArray
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.settings import Settings
from packer.solvers import feasibility as module
from packer.solvers.candidates import max_loras_candidates
from packer.solvers.classes import aggregate
from packer.solvers.feasibility import Feasibility, OutOfTime
from packer.solvers.slots import real_bins
from packer.testing.analytic import random_fleet
from packer.workload import Workload


class Counting(MonotonePredictor):
    """The monotone predictor, counting its questions."""

    queried = 0

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Evaluate and count."""
        type(self).queried += len(bins)
        return super().evaluate(workload, bins)


class Contrary(MonotonePredictor):
    """Refuses even numbers of adapters: not monotone at all."""

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Evaluate by parity."""
        found = super().evaluate(workload, bins)
        odd = np.array([len(each.adapters) % 2 == 1 for each in bins])
        return replace(found, starved=~odd, memory_error=np.zeros(len(bins), dtype=bool))


def test_feasible_means_some_candidate_works() -> None:
    """The feasibility says yes exactly when the predictor accepts some candidate of max_loras."""
    fleet = random_fleet(16, seed=3)
    predictor = MonotonePredictor(capacity_tok_s=3000.0)
    task = problem(fleet, predictor=predictor)
    classes = aggregate(fleet)
    feasibility = Feasibility(task, classes)
    rng = np.random.default_rng(0)
    rows = np.array([rng.integers(0, classes.demand + 1) for _ in range(60)])
    answers = feasibility.feasible(rows)
    assert 0 < answers.sum() < len(rows)
    for row, answer in zip(rows, answers.tolist(), strict=True):
        members = classes.representatives(row)
        if members:
            bins = [
                Bin(members, Settings(p, 32), task.profile)
                for p in max_loras_candidates(len(members), task.profile, 32, proof=True)
            ]
            slots = [
                replace(each, settings=Settings(each.max_loras, int(fleet.ranks[list(members)].max()))) for each in bins
            ]
            assert answer == predictor.evaluate(fleet, slots).feasible.any()


def test_nothing_is_evaluated_twice() -> None:
    """The result for equal counts is stored."""
    fleet = random_fleet(16, seed=3)
    classes = aggregate(fleet)
    feasibility = Feasibility(problem(fleet, predictor=Counting()), classes)
    Counting.queried = 0
    rows = np.array([classes.demand, classes.demand // 2])
    first = feasibility.feasible(rows).tolist()
    queried = Counting.queried
    assert feasibility.feasible(rows).tolist() == first
    assert Counting.queried == queried == feasibility.evaluated


def test_violations_of_dominance_are_counted() -> None:
    """A predictor that is not monotone is found out by the checks of inferred answers."""
    fleet = random_fleet(60, seed=0, rates=(0.1,), ranks=(8,))
    feasibility = Feasibility(problem(fleet, predictor=Contrary()), aggregate(fleet))
    feasibility.feasible(np.array([[51]]))
    feasibility.feasible(np.arange(1, 50)[:, None])
    assert feasibility.checks > 0
    assert feasibility.violations > 0


def test_higher_rates_in_place_of_others_are_no_lighter() -> None:
    """A bin with higher rates of the same rank than an infeasible one is not evaluated; one of another rank is."""
    rates = (1.0, 2.0, 3.0)
    fleet = Workload([Adapter(f"a{i}", (8, 32)[i % 2], rates[i % 3]) for i in range(60)])
    feasibility = Feasibility(problem(fleet, predictor=MonotonePredictor(capacity_tok_s=2000.0)), aggregate(fleet))
    classes = feasibility.classes

    def held(rank: int, rate: float, count: int) -> IntArray:
        mine = (classes.ranks == rank) & (classes.rates == rate)
        assert mine.sum() == 1
        return (mine * count)[None, :].astype(np.int64)

    assert not feasibility.feasible(held(8, 2.0, 6))[0]
    before = feasibility.evaluated
    assert not feasibility.feasible(held(8, 3.0, 6))[0]
    assert not feasibility.feasible(held(8, 2.0, 3) + held(8, 3.0, 3))[0]
    assert feasibility.evaluated == before
    assert not feasibility.feasible(held(32, 3.0, 6))[0]
    assert feasibility.evaluated > before
    assert feasibility.feasible(held(8, 2.0, 1))[0]
    before = feasibility.evaluated
    assert feasibility.feasible(held(8, 1.0, 1))[0]
    assert feasibility.evaluated == before


def test_the_monotone_predictor_never_violates_dominance() -> None:
    """For a monotone predictor every inference is right."""
    fleet = random_fleet(40, seed=5)
    classes = aggregate(fleet)
    feasibility = Feasibility(problem(fleet), classes)
    rng = np.random.default_rng(1)
    for _ in range(10):
        feasibility.feasible(np.array([rng.integers(0, classes.demand + 1) for _ in range(40)]))
    assert feasibility.checks > 0
    assert feasibility.violations == 0


def test_out_of_time_ends_a_search() -> None:
    """The clock is read before the predictor is called."""
    fleet = random_fleet(16, seed=3)
    feasibility = Feasibility(problem(fleet, stop=lambda: True), aggregate(fleet))
    with pytest.raises(OutOfTime):
        feasibility.feasible(aggregate(fleet).demand[None, :])


def test_real_bins_are_evaluated_directly() -> None:
    """A set that fits gets slots that the predictor accepts; one that does not gets None."""
    fleet = random_fleet(64, seed=2)
    task = problem(fleet)
    small, large = real_bins(task, [(0, 1, 2), tuple(range(64))])
    assert large is None
    assert small is not None
    assert task.evaluator.evaluate(fleet, [small]).feasible.all()


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its share of memory the oldest results are forgotten, and evaluated again when they are needed."""
    fleet = random_fleet(30, seed=1)
    classes = aggregate(fleet)
    monkeypatch.setattr(module, "_KNOWN_BYTES", 8 * (4 * len(classes) + module._ENTRY_BYTES))
    small = Feasibility(problem(fleet), classes)
    monkeypatch.undo()
    whole = Feasibility(problem(fleet), classes)
    rows = np.random.default_rng(0).integers(0, classes.demand + 1, (60, len(classes)))
    for _ in range(2):
        for part in np.array_split(rows, 12):
            assert small.evaluate(part).tolist() == whole.evaluate(part).tolist()
            assert len(small._known) <= 8 + len(part)
