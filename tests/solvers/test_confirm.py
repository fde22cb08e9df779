"""Refused bins are relieved of adapters, or the search is repeated; the bound stays the first one's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from monotone import MonotonePredictor

from packer.adapter import Adapter
from packer.bin import Bin
from packer.objectives.gpus import Gpus
from packer.solvers import auto
from packer.solvers.auto import Auto
from packer.solvers.base import Problem, Solution
from packer.solvers.bound import Bound
from packer.solvers.confirm import admits, confirmed_solution, relieved
from packer.solvers.evaluator import Evaluator
from packer.solvers.feasibility import real_bins
from packer.solvers.greedy.solver import Greedy
from packer.testing.analytic import random_fleet, small_profile
from packer.workload import Workload


class Confirming(Evaluator):
    """Searches with a predictor that sees more room than there is."""

    def __init__(self, optimism: float) -> None:
        super().__init__(MonotonePredictor(), Gpus())
        self.searching = Evaluator(MonotonePredictor(capacity_tok_s=optimism * 8000.0), Gpus()).searching
        self.confirms = True


def posed(fleet: Workload, optimism: float = 1.0) -> Problem:
    """A problem with such an evaluator."""
    return Problem(fleet, (small_profile(),), Gpus(), Confirming(optimism))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("optimism", [1.02, 1.1, 1.5])
def test_what_is_returned_holds_in_the_whole_predictor(optimism: float, seed: int) -> None:
    """Whatever the search overlooks, every bin of the solution is admitted, every adapter has a place."""
    task = posed(random_fleet(90, seed, rates=(1.6, 0.8, 0.3)), optimism)
    found = confirmed_solution(task, Greedy().solve)
    assert admits(task, found)
    assert sorted(i for item in found.bins for i in item.adapters) == list(range(90))
    assert optimism < 1.5 or not admits(task, Greedy().solve(task))


def test_a_refused_bin_gives_adapters_to_those_with_room() -> None:
    """One GPU a little too full and two with room: three GPUs that hold, the others' adapters where they were."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.4) for i in range(100)])
    task = posed(fleet)
    profile = small_profile()
    largest = next(n for n in range(60, 1, -1) if real_bins(task, [tuple(range(n))])[0] is not None)
    sets = [tuple(range(largest + 1)), *map(tuple, np.array_split(np.arange(largest + 1, 100), 5))]
    bins = [Bin(tuple(map(int, each)), profile.settings(len(each), 8), profile) for each in sets]
    found = relieved(task, bins, [0])
    assert found is not None
    assert admits(task, Solution(found))
    assert len(found) == len(bins)
    assert set(found[0].adapters) < set(sets[0])
    assert relieved(task, [bins[0]], [0]) is None  # more than half are refused
    full = Bin(tuple(range(largest + 1, 2 * largest + 1)), profile.settings(largest, 8), profile)
    more = relieved(task, [bins[0], full], [0])
    assert more is not None
    assert len(more) == 3  # no other takes what it gives away
    assert admits(task, Solution(more))
    assert relieved(replace(task, max_gpus=2), [bins[0], full], [0]) is None


def test_out_of_time_a_refused_plan_gives_way_to_a_careful_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no time is left to repair refused servers, those of which the search is certain are taken."""
    monkeypatch.setattr(Confirming, "sure", Evaluator.whole)
    task = replace(posed(random_fleet(90, 1, rates=(1.6, 0.8, 0.3)), 1.5), stop=lambda: True)
    assert not admits(task, Greedy().solve(task))
    assert admits(task, confirmed_solution(task, Greedy().solve))


def test_the_bound_is_that_of_the_rates_as_given() -> None:
    """A search at raised rates has a higher bound, which says nothing about the fleet."""
    task = posed(random_fleet(60, 1, rates=(1.6, 0.8)), 1.4)
    seen: list[int] = []

    def search(problem: Problem) -> Solution:
        found = Greedy().solve(problem)
        seen.append(len(found.bins))
        return Solution(found.bins, lower_bound=float(len(found.bins)), bound_source="mine", proven=True)

    found = confirmed_solution(task, search)
    assert len(seen) > 1
    assert seen[-1] > seen[0]
    assert (found.lower_bound, len(found.bins)) == (seen[0], seen[-1])


def test_what_the_search_proves_is_an_estimate_for_the_whole_predictor() -> None:
    """A bound that is certain for the predictor of the search is not proven for the one that confirms."""
    fleet = random_fleet(6, 1)
    plain = Problem(fleet, (small_profile(),), Gpus(), Evaluator(MonotonePredictor(), Gpus()))
    bound, always = Bound(3, "said so", certain=True), Bound(3, "said so", certain=True, always=True)
    assert (bound.proven(plain), bound.words(plain)) == (True, "said so")
    assert (bound.proven(posed(fleet)), bound.words(posed(fleet))) == (False, "estimate: said so")
    assert always.proven(posed(fleet))


@pytest.mark.parametrize("seed", range(3))
def test_a_refused_search_is_repeated_before_greedys_plan_is_kept(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the whole predictor refuses the smaller plan of `auto`, a smaller one that holds is still found."""
    fleet = random_fleet(24, seed, rates=(3.1, 2.3, 1.3), ranks=(8,))
    wasteful = Solution(tuple(each for each in real_bins(posed(fleet), [(i,) for i in range(24)]) if each))
    monkeypatch.setattr(auto, "start", lambda _problem, *_: wasteful)
    task = posed(fleet, optimism=1.4)
    found = Auto().solve(task)
    assert admits(task, found)
    assert len(found.bins) < len(wasteful.bins)
