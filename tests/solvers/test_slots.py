"""Slots are chosen for many bins at once as they are for each alone, and arrays of bins are those made one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from monotone import problem

from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.solvers.base import Problem
from packer.solvers.candidates import candidates_of, most_slots_of
from packer.solvers.slots import SlotSearch, most_slots, qualities, real_bins
from packer.testing.analytic import AnalyticPredictor, random_fleet
from packer.workload import Workload

SIZES = (3, 20, 45, 70)


class Counting(AnalyticPredictor):
    """The analytic predictor; `calls` has the number of bins of each call."""

    def __init__(self, peak: float) -> None:
        super().__init__(peak)
        self.calls: list[int] = []

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin; one row per bin, in order."""
        self.calls.append(len(bins))
        return super().evaluate(workload, bins)


def posed(peak: float = 3000.0) -> tuple[Problem, Counting]:
    """Adapters of three ranks, of which a server bears about 70, and the predictor that counts."""
    predictor = Counting(peak)
    fleet = random_fleet(200, seed=4, rates=(0.1, 0.05), ranks=(1, 16, 32))
    return problem(fleet, predictor=predictor), predictor


def sets(slots: SlotSearch) -> list[Bin]:
    """Bins of several sizes, with few slots."""
    return [slots.make(range(n, 2 * n), min(n, 8)) for n in SIZES]


def test_bins_climb_together_as_each_alone() -> None:
    """The same slots, in as many calls as the longest climb takes."""
    known, counting = posed()
    slots = SlotSearch(known)
    alone, longest = [], 0
    for item in sets(slots):
        counting.calls.clear()
        alone.append(slots.best(item))
        longest = max(longest, len(counting.calls))
    counting.calls.clear()
    together, grades = slots.climbed(sets(slots))
    assert len(counting.calls) <= longest
    assert together == alone
    assert any(item.max_loras > 8 for item in together)
    assert grades == qualities(known.evaluator.evaluate(known.workload, together))


def test_whether_a_set_holds_takes_one_evaluation_if_it_does_with_all_slots() -> None:
    """The same sets hold as with all candidates evaluated."""
    known, counting = posed()
    every = [range(n) for n in (*SIZES, 120)]
    held = [item is not None for item in real_bins(known, every)]
    assert set(held) == {True, False}
    counting.calls.clear()
    assert [item is not None for item in real_bins(known, every, until_holds=True)] == held
    known, counting = posed()
    (item,) = real_bins(known, [range(SIZES[0])], until_holds=True)
    assert item is not None
    assert (item.max_loras, counting.calls) == (SIZES[0], [1])


def test_out_of_time_better_slots_are_not_looked_for_beyond_one_step() -> None:
    """What holds so far is taken; for a bin that is not yet, the search goes on."""
    known, counting = posed()
    slots, late = SlotSearch(known), SlotSearch(replace(known, stop=lambda: True))
    few = [item for item in sets(slots) if slots.holds([item])[0]]
    counting.calls.clear()
    made, _ = late.climbed(few)
    assert len(counting.calls) == 1
    assert [item.adapters for item in made] == [item.adapters for item in few]
    assert slots.holds([slots.make(range(70), 8)]) == [False]
    found = late.feasible(range(70), hint=8)
    assert found is not None
    assert found.max_loras > 8


def test_one_bin_that_never_holds_ends_the_climb_of_all() -> None:
    """Nothing comes back, and the bin by itself stays as it was."""
    slots = SlotSearch(posed()[0])
    heavy = slots.make(range(200), 8)
    assert slots.climbed([*sets(slots), heavy]) == ([], [])
    assert slots.best(heavy) == heavy


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("width", [1, 3])
def test_without_a_hint_the_best_of_all_candidates_is_found(n: int, width: int) -> None:
    """In one call where an evaluation takes microseconds, else by few evaluations from all over the candidates."""
    known, counting = posed()
    slots = SlotSearch(known)
    slots.width = width
    found = slots.feasible(range(n))
    assert found is not None
    candidates = candidates_of(found)
    assert len(counting.calls) == 1 if width > 1 else sum(counting.calls) <= max(3, len(candidates) - 3)
    every = [found.with_slots(p) for p in candidates]
    rows = known.evaluator.evaluate(known.workload, every)
    marks = [mark for mark, ok in zip(qualities(rows), rows.feasible.tolist(), strict=True) if ok]
    assert qualities(known.evaluator.evaluate(known.workload, [found])) == [min(marks)]


def test_bins_of_the_first_adapters_are_those_made_one_by_one() -> None:
    """With slots that hold the largest rank of each and that the server takes, whole or in parts."""
    slots = SlotSearch(posed()[0])
    order = np.argsort(slots.problem.workload.ranks, kind="stable")
    sizes, slots_of = [1, 40, 7], [1, 16, 7]
    shares: Any = np.linspace(0.1, 1.0, 200)
    expected = [slots.make(order[:n].tolist(), p) for n, p in zip(sizes, slots_of, strict=True)]
    table = slots.first(order, sizes, slots_of)
    assert list(table) == expected
    assert table.max_lora_rank.tolist() == [item.max_lora_rank for item in expected]
    parts = [slots.make(order[:n].tolist(), p, None, shares[:n].tolist()) for n, p in zip(sizes, slots_of, strict=True)]
    assert list(slots.first(order, sizes, slots_of, None, shares)) == parts


def test_a_bin_like_another_has_as_many_slots_or_one_for_each_adapter() -> None:
    """One for each only where the other has that, as far as memory lasts, and never more slots than adapters."""
    slots = SlotSearch(posed()[0])
    few, each = slots.make(range(20), 8), slots.make(range(20), 20)
    assert (most_slots(few), most_slots(each)) == (8, most_slots_of(each.profile, each.max_lora_rank))
    found = [slots.like(range(n), other).max_loras for other in (few, each) for n in (5, 30)]
    assert found == [5, 8, 5, 30]
