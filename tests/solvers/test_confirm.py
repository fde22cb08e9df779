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
from packer.solvers.base import Bound, Problem, Solution
from packer.solvers.columns.exact import ExactSearch
from packer.solvers.confirm import STEPS, all_hold, repaired, solution_that_holds, with_other_slots
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.solver import Greedy
from packer.solvers.slots import real_bins
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
    found = solution_that_holds(task, Greedy().solve)
    assert all_hold(task, found)
    assert sorted(i for item in found.bins for i in item.adapters) == list(range(90))
    assert optimism < 1.5 or not all_hold(task, Greedy().solve(task))


def test_a_refused_bin_gives_adapters_to_those_with_room() -> None:
    """One GPU a little too full and two with room: three GPUs that hold, the others' adapters where they were."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.4) for i in range(100)])
    task = posed(fleet)
    profile = small_profile()
    largest = next(n for n in range(60, 1, -1) if real_bins(task, [tuple(range(n))])[0] is not None)
    sets = [tuple(range(largest + 1)), *map(tuple, np.array_split(np.arange(largest + 1, 100), 5))]
    bins = [Bin(tuple(map(int, each)), profile.settings(len(each), 8), profile) for each in sets]
    found = repaired(task, bins, [0])
    assert found is not None
    assert all_hold(task, Solution(found))
    assert len(found) == len(bins)
    assert set(found[0].adapters) < set(sets[0])
    assert repaired(task, [bins[0]], [0]) is None  # more than half are refused
    full = Bin(tuple(range(largest + 1, 2 * largest + 1)), profile.settings(largest, 8), profile)
    more = repaired(task, [bins[0], full], [0])
    assert more is not None
    assert len(more) == 3  # no other takes what it gives away
    assert all_hold(task, Solution(more))
    assert repaired(replace(task, max_gpus=2), [bins[0], full], [0]) is None


def in_bins(*sizes: int, slots: int = 0) -> tuple[Bin, ...]:
    """Consecutive adapters on GPUs, so many on each, with so many slots or one for each."""
    profile, ends = small_profile(), np.cumsum(sizes).tolist()
    ranges = zip((0, *ends[:-1]), ends, strict=True)
    return tuple(Bin(tuple(range(a, b)), profile.settings(slots or b - a, 8), profile) for a, b in ranges)


def most_on_one(task: Problem) -> int:
    """How many adapters of a fleet of equal ones a GPU bears."""
    return next(n for n in range(60, 1, -1) if real_bins(task, [tuple(range(n))])[0] is not None)


def equal_adapters(n: int) -> Workload:
    """A fleet of which small servers bear `most_on_one` each."""
    return Workload([Adapter(f"a{i}", 8, 0.4) for i in range(n)])


def test_a_refused_bin_keeps_its_adapters_where_it_holds_with_other_slots() -> None:
    """A GPU with too few slots gets the next larger number; one that holds, or does with no number, stays as it is."""
    task = posed(equal_adapters(220))
    few, fine, full = in_bins(40, 16, 60, slots=8)
    assert [all_hold(task, Solution((item,))) for item in (few, fine, full)] == [False, True, False]
    found = with_other_slots(task, Solution((few, fine, full)))
    assert found.bins == (few.with_slots(16), fine, full)
    hopeless = Solution(in_bins(60, 60, 60, 40, slots=8))  # where three hold with none, others are not tried
    assert with_other_slots(task, hopeless).bins == hopeless.bins


def test_adapters_of_a_refused_bin_go_where_the_whole_predictor_sees_room() -> None:
    """A search that puts all that is given away on one GPU, which bears a part of it, opens no further GPU."""
    most = most_on_one(posed(equal_adapters(60)))
    bins = in_bins(most + 2, most - 1, most - 1)
    task = posed(equal_adapters(3 * most), optimism=2.0)
    found = repaired(task, bins, [0])
    assert found is not None
    assert len(found) == 3
    assert all_hold(task, Solution(found))


def test_the_last_repetition_is_relieved_too() -> None:
    """The whole predictor takes part in a search only where every repetition was refused beyond repair."""
    most = most_on_one(posed(equal_adapters(60)))
    task, calls = posed(equal_adapters(3 * most)), list[bool]()

    def search(problem: Problem) -> Solution:
        calls.append(problem.evaluator.confirms)
        last = len(calls) == STEPS + 2  # the first one, a careful one, and the repetitions
        return Solution(in_bins(*((most + 1, most - 1, most - 1, 1) if last else (most + 30, 2 * most - 30))))

    found = solution_that_holds(task, search)
    assert all_hold(task, found)
    assert found.details["relieved"] == 1
    assert all(calls)


def test_of_equal_plans_the_one_without_full_servers_is_taken() -> None:
    """A GPU opened for what refused ones give away leaves the others full: a careful search spreads better."""
    most = most_on_one(posed(equal_adapters(60)))
    task = posed(equal_adapters(2 * most + 1))
    even = in_bins(*(len(each) for each in np.array_split(np.arange(2 * most + 1), 3)))
    plans = [in_bins(most + 1, most)]
    found = solution_that_holds(task, lambda _problem: Solution(plans.pop() if plans else even))
    assert found.bins == even


def test_out_of_time_a_refused_plan_gives_way_to_a_conservative_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no time is left to repair refused servers, those of which the search is certain are taken."""
    monkeypatch.setattr(Confirming, "cautious", Evaluator.whole)
    task = replace(posed(random_fleet(90, 1, rates=(1.6, 0.8, 0.3)), 1.5), stop=lambda: True)
    assert not all_hold(task, Greedy().solve(task))
    assert all_hold(task, solution_that_holds(task, Greedy().solve))


def test_the_bound_is_that_of_the_rates_as_given() -> None:
    """A search at raised rates has a higher bound, which says nothing about the fleet."""
    task = posed(random_fleet(60, 1, rates=(1.6, 0.8)), 1.4)
    seen: list[int] = []

    def search(problem: Problem) -> Solution:
        found = Greedy().solve(problem)
        seen.append(len(found.bins))
        return Solution(found.bins, lower_bound=float(len(found.bins)), bound_source="mine", proven=True)

    found = solution_that_holds(task, search)
    assert len(seen) > 1
    assert seen[-1] > seen[0]
    assert (found.lower_bound, len(found.bins)) == (seen[0], seen[-1])


def test_what_the_search_proves_is_an_estimate_for_the_whole_predictor() -> None:
    """A bound that is certain for the predictor of the search is not proven for the one that confirms."""
    fleet = random_fleet(6, 1)
    plain = Problem(fleet, (small_profile(),), Gpus(), Evaluator(MonotonePredictor(), Gpus()))
    for task, said in ((plain, "said so"), (posed(fleet), "estimate: said so")):
        search = ExactSearch(task, [made for made in real_bins(task, [(i,) for i in range(6)]) if made])
        assert search.bound == Bound(1.0, "a fleet needs at least one server", proven=True)
        search._raise(3, "said so", exhaustive=True, every=True)
        assert search.bound == Bound(3.0, said, proven=said == "said so")


@pytest.mark.parametrize("seed", range(3))
def test_a_refused_search_is_repeated_before_greedys_plan_is_kept(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the whole predictor refuses the smaller plan of `auto`, a smaller one that holds is still found."""
    fleet = random_fleet(24, seed, rates=(3.1, 2.3, 1.3), ranks=(8,))
    wasteful = Solution(tuple(each for each in real_bins(posed(fleet), [(i,) for i in range(24)]) if each))
    monkeypatch.setattr(auto, "start", lambda _problem, *_: wasteful)
    task = posed(fleet, optimism=1.4)
    found = Auto().solve(task)
    assert all_hold(task, found)
    assert len(found.bins) < len(wasteful.bins)
