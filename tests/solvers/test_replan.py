"""Replanning against the clock, and on fewer GPUs than it needs; see also test_refinement.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from packer.adapter import Adapter
from packer.bin import Bin, Evaluations
from packer.objectives.moves import Moves
from packer.predictors.base import Predictor
from packer.settings import Slots
from packer.solvers.base import Problem
from packer.solvers.replan import Replan
from packer.solvers.verify import check
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.testing.problems import problem, random_fleet
from packer.workload import Workload

PROFILE = small_profile()


class Recording:
    """The analytic judge; `asked` has the set of adapters of every question."""

    name = "recording"

    def __init__(self) -> None:
        self.asked: list[frozenset[int]] = []

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge each bin; one row per bin, in order."""
        self.asked.extend(frozenset(bin_.adapters) for bin_ in bins)
        return AnalyticPredictor().evaluate(workload, bins)


def running(workload: Workload, old: tuple[Bin, ...], judge: Predictor) -> Problem:
    """A problem with this plan running."""
    return replace(problem(workload, objective=Moves(old), predictor=judge), old_bins=old)


def two_servers(rate: float) -> tuple[Workload, tuple[Bin, ...]]:
    """90 adapters of this rate, every other one on the second server."""
    workload = random_fleet(90, seed=4, rates=(rate,))
    return workload, tuple(Bin(tuple(range(k, 90, 2)), Slots(45, 32), PROFILE) for k in range(2))


def test_out_of_time_a_server_that_holds_stays_as_it_is() -> None:
    """With no time left, each running server is asked about once, and one that is admissible is kept."""
    workload, old = two_servers(0.1)
    judge = Recording()
    posed = replace(running(workload, old, judge), stop=lambda: True)
    found = Replan().solve(posed)
    check(posed, found)
    assert found.bins == old
    assert found.moves is not None
    assert found.moves.adapters == ()
    assert [judge.asked.count(frozenset(bin_.adapters)) for bin_ in old] == [1, 1]


def test_out_of_time_a_server_that_starves_is_still_mended() -> None:
    """With no time left, every adapter has a place on a server that holds."""
    workload, old = two_servers(0.4)
    posed = replace(running(workload, old, AnalyticPredictor()), stop=lambda: True)
    assert not posed.predictor.evaluate(workload, old).feasible.any()
    found = Replan().solve(posed)
    check(posed, found)
    assert found.unplaced == ()
    assert posed.predictor.evaluate(workload, found.bins).feasible.all()


def test_out_of_time_slots_grow_with_their_adapters() -> None:
    """A server whose adapter has a higher rank now gets slots that hold it, also in a hurry."""
    workload, old = two_servers(0.1)
    taller = Workload([replace(workload.adapters[0], rank=64), *workload.adapters[1:]])
    posed = replace(running(taller, old, AnalyticPredictor()), stop=lambda: True)
    found = Replan().solve(posed)
    check(posed, found)
    assert [bin_.max_lora_rank for bin_ in found.bins] == [64, 32]


@pytest.mark.parametrize("max_gpus", [1, 2])
def test_a_limit_never_leaves_half_an_adapter(max_gpus: int) -> None:
    """On too few GPUs a split adapter is unplaced as a whole; with enough it has all of its shares."""
    workload = Workload([Adapter("hot", 8, 15.0), *(Adapter(f"a{i}", 8, 0.5) for i in range(6))])
    old = (Bin(tuple(range(1, 7)), Slots(6, 8), PROFILE),)
    posed = replace(running(workload, old, AnalyticPredictor()), max_gpus=max_gpus, max_replicas=4)
    found = Replan().solve(posed)
    check(posed, found)
    assert (0 in found.unplaced) == (max_gpus == 1)
    assert len(found.bins) == max_gpus
    assert bool(found.reasons) == (max_gpus == 1)
    assert (found.moves is not None) == (max_gpus == 2)
