"""How many more of a class a bin takes: few evaluations around a guess."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from packer.solvers.columns.generation import Columns
from packer.solvers.columns.pricing import _Search


def tries(guess: int, most: int, top: int = 100) -> list[int]:
    """What the search tries for a bin that takes `most`."""
    search, tried = _Search.over(np.array([top])), []
    while search.high[0] - search.low[0] > 1:
        tried.append(int(search.next(np.array([guess]))[0]))
        search.learn(np.array([0]), np.array(tried[-1:]), np.array([float(tried[-1] <= most)]))
    assert search.low[0] == most
    return tried


@pytest.mark.parametrize(
    ("guess", "most", "expected"),
    [
        (40, 40, [40, 41]),
        (10, 17, [10, 11, 13, 17, 25, 21, 19, 18]),
        (60, 50, [60, 59, 57, 53, 45, 49, 51, 50]),
    ],
)
def test_a_search_begins_at_the_guess_and_doubles_its_steps(guess: int, most: int, expected: list[int]) -> None:
    """A right guess costs two evaluations, another one 1, 2, 4 … steps away from it, then halves of the interval."""
    assert tries(guess, most) == expected


@pytest.mark.parametrize("most", [0, 1, 2, 50, 99, 100])
@pytest.mark.parametrize("guess", [0, 1, 3, 50, 100])
def test_a_search_ends_at_the_largest_whatever_the_guess(guess: int, most: int) -> None:
    """The guess decides the cost alone; no count is tried twice, and few are."""
    tried = tries(guess, most)
    assert len(tried) == len(set(tried)) <= 14


@pytest.mark.parametrize(("target", "kept"), [(1.0, [True, False, False]), (2.0, [True, True, False])])
def test_patterns_that_a_plan_of_so_many_servers_may_hold_are_kept(target: float, kept: list[bool]) -> None:
    """Adapters worth 1.5 on two servers leave half a server: bins worth exactly that are added, lighter ones not."""
    rows, added = np.array([[2, 0], [1, 0], [0, 1]]), []
    source = SimpleNamespace(
        rng=np.random.default_rng(0), search=lambda *_: rows, add=added.append,
        mean=SimpleNamespace(problem=SimpleNamespace(evaluator=SimpleNamespace(simulates=True))),
    )  # fmt: skip
    columns = SimpleNamespace(
        master=SimpleNamespace(duals=np.array([0.5, 0.25])), weights=np.array([0.5, 0.25]), priced=True,
        demand=np.array([2, 2]), sources=[source], pools=[rows], uses=[np.zeros(3)],
    )  # fmt: skip
    Columns.diversify(columns, target)  # type: ignore[arg-type]
    assert added[0].tolist() == rows[kept].tolist()
