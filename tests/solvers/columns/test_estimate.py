"""The estimate of the GPUs needed says which servers it leaves out, and ends by its work, not by the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from monotone import problem

from packer.solvers.columns import estimate
from packer.solvers.columns.estimate import estimated
from packer.solvers.evaluator import Evaluator
from packer.solvers.feasibility import Feasibility
from packer.testing.analytic import random_fleet

FLEET = random_fleet(60, seed=5, rates=(1.6, 0.8), ranks=(8, 32))


def test_servers_that_it_leaves_out_are_named() -> None:
    """Where servers may hold fewer adapters than there are, the estimate says how many."""
    found, few = (estimated(problem(FLEET), 0.0, 20.0), estimated(replace(problem(FLEET), most_adapters=5), 0.0, 20.0))
    assert found is not None
    assert few is not None
    assert found.source == "estimate: trained trees find no fuller servers"
    assert few.value == 12 > found.value > 1
    assert few.source.endswith("no fuller servers of at most 5 adapters")
    assert not few.proven
    assert estimated(problem(FLEET), found.value, 20.0) is None
    assert estimated(problem(FLEET), 0.0, found.value - 1.0) is None


def test_it_ends_after_so_many_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is, the same servers are evaluated, and the estimate is the same."""
    made: list[Feasibility] = []
    monkeypatch.setattr(estimate, "Feasibility", lambda *given: made.append(Feasibility(*given)) or made[-1])
    monkeypatch.setattr(estimate, "MOST_EVALUATED", 20)
    estimated(problem(FLEET), 0.0, 20.0)
    assert made[0].evaluated > 20
    monkeypatch.setattr(estimate, "MOST_EVALUATED", 20_000)
    assert len({estimated(problem(FLEET), 0.0, 20.0) for _ in range(2)}) == 1
    assert made[1].evaluated == made[2].evaluated > made[0].evaluated


def test_none_is_made_where_the_search_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that trees were not trained on would be simulated by the hundred, and the trees say nothing of them."""
    monkeypatch.setattr(Evaluator, "simulates", True)
    monkeypatch.setattr(estimate, "Feasibility", None)
    assert estimated(problem(FLEET), 0.0, 20.0) is None
