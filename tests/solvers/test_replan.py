"""Replanning against the clock, and on fewer GPUs than it needs; see also test_refinement.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from monotone import problem

from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.goal import Goal
from packer.moves import most_copies
from packer.objectives.cost import Cost
from packer.objectives.gpus import Gpus
from packer.objectives.moves import FewestMoves
from packer.plan import Moves
from packer.planning.solve import solve
from packer.planning.verify import check
from packer.settings import Settings
from packer.solvers.base import Problem
from packer.solvers.replan import Replan, settled
from packer.strategies import Predictor
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.workload import Workload

PROFILE = small_profile()


class Recording:
    """The analytic predictor; `evaluated` has the adapters of every bin."""

    name = "recording"

    def __init__(self) -> None:
        self.evaluated: list[frozenset[int]] = []

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin; one row per bin, in order."""
        self.evaluated.extend(frozenset(bin_.adapters) for bin_ in bins)
        return AnalyticPredictor().evaluate(workload, bins)


def running(workload: Workload, old: tuple[Bin, ...], predictor: Predictor) -> Problem:
    """A problem with this plan running."""
    return replace(problem(workload, objective=FewestMoves(old), predictor=predictor), old_bins=old)


def two_servers(rate: float) -> tuple[Workload, tuple[Bin, ...]]:
    """90 adapters of about this rate, every other one on the second server."""
    ranks = random_fleet(90, seed=4, rates=(rate,)).ranks.tolist()
    workload = Workload([Adapter(f"a{i}", rank, rate * (1.0 + 1e-9 * i)) for i, rank in enumerate(ranks)])
    return workload, tuple(Bin(tuple(range(k, 90, 2)), Settings(45, 32), PROFILE) for k in range(2))


def test_out_of_time_a_server_that_holds_stays_as_it_is() -> None:
    """With no time left, each running server is evaluated once, and one that holds is kept."""
    workload, old = two_servers(0.1)
    predictor = Recording()
    posed = replace(running(workload, old, predictor), stop=lambda: True)
    found = Replan().solve(posed)
    check(posed, found)
    assert found.bins == old
    assert found.moves is not None
    assert found.moves.adapters == ()
    assert [predictor.evaluated.count(frozenset(bin_.adapters)) for bin_ in old] == [1, 1]


def test_out_of_time_a_server_that_starves_is_still_mended() -> None:
    """With no time left, every adapter has a place on a server that holds."""
    workload, old = two_servers(0.4)
    posed = replace(running(workload, old, AnalyticPredictor()), stop=lambda: True)
    assert not posed.evaluator.evaluate(workload, old).feasible.any()
    found = Replan().solve(posed)
    check(posed, found)
    assert found.unplaced == ()
    assert posed.evaluator.evaluate(workload, found.bins).feasible.all()


def test_out_of_time_slots_grow_with_their_adapters() -> None:
    """A server whose adapter has a higher rank now gets slots that hold it, also out of time."""
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
    old = (Bin(tuple(range(1, 7)), Settings(6, 8), PROFILE),)
    posed = replace(running(workload, old, AnalyticPredictor()), max_gpus=max_gpus, max_replicas=4)
    found = Replan().solve(posed)
    check(posed, found)
    assert (0 in found.unplaced) == (max_gpus == 1)
    assert len(found.bins) == max_gpus
    assert bool(found.reasons) == (max_gpus == 1)
    assert (found.moves is not None) == (max_gpus == 2)


def test_a_running_plan_with_a_split_adapter_stays_if_it_holds() -> None:
    """Nothing moves if the servers of a split adapter hold what they have; else a fresh plan is matched to them."""
    workload = Workload([Adapter("hot", 8, 15.0), *(Adapter(f"a{i}", 8, 0.5) for i in range(6))])
    old = tuple(Bin((0, *own), Settings(4, 8), PROFILE, (0.5, 1.0, 1.0, 1.0)) for own in ((1, 2, 3), (4, 5, 6)))
    posed = replace(running(workload, old, AnalyticPredictor()), max_replicas=2)
    assert Replan().supports(posed) is None
    found = Replan().solve(posed)
    check(posed, found)
    assert (found.bins, found.moves) == (old, Moves((), (0, 1)))
    busier = replace(running(workload.scaled(1.9), old, AnalyticPredictor()), max_replicas=4)
    found = Replan().solve(busier)
    check(busier, found)
    assert found.unplaced == ()
    assert found.moves is not None
    assert [k for k in found.moves.servers if k is not None] == [0, 1]


def test_a_fresh_plan_keeps_the_limits_of_the_objective() -> None:
    """One GPU serves the fleet but breaks the limit on latency, so that it is no way out for two that keep it."""
    workload, old = two_servers(0.05)
    most_ms = 1.2 * AnalyticPredictor().evaluate(workload, old).mean_ttft_ms.max()
    goal = FewestMoves(old).within(Goal.only({"server.mean_ttft_ms": float(most_ms)}))
    posed = replace(problem(workload, objective=goal, predictor=AnalyticPredictor()), old_bins=old)
    alone = Bin(tuple(range(90)), Settings(90, 32), PROFILE)
    row = posed.evaluator.evaluate(workload, [alone])
    assert row.feasible.all()
    assert not goal.holds(row).any()
    found = Replan().solve(posed)
    check(posed, found)
    assert goal.holds(posed.evaluator.evaluate(workload, found.bins)).all()
    assert len(found.bins) == 2


class ByKind:
    """The analytic predictor; servers of the profile "large/m" have four times the capacity of others."""

    name = "by-kind"

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin; one row per bin, in order."""
        peaks = [16000.0 if bin_.profile.name == "large/m" else 4000.0 for bin_ in bins]
        pairs = zip(peaks, bins, strict=True)
        return Evaluations.of([AnalyticPredictor(peak).evaluate(workload, [bin_])[0] for peak, bin_ in pairs])


def test_the_cheapest_plan_that_the_gpus_allow_replaces_the_running_one() -> None:
    """Where the price counts, more GPUs at a lower price are better, though all adapters move; within `max_gpus`."""
    large, small = small_profile("large/m", 10.0), small_profile("small/m", 1.0)
    fleet = random_fleet(60, seed=4, rates=(0.8, 0.4))
    old = tuple(Bin(tuple(range(k, 60, 2)), Settings(30, 32), large) for k in range(2))
    posed = problem(fleet, objective=Cost(), predictor=ByKind())
    posed = replace(posed, profiles=(large, small), old_bins=old)
    found = Replan().solve(posed)
    check(posed, found)
    assert {bin_.profile.name for bin_ in found.bins} == {"small/m"}
    assert 2 < len(found.bins) < 20
    few = replace(posed, max_gpus=2)
    found = Replan().solve(few)
    check(few, found)
    assert found.unplaced == ()
    assert {bin_.profile.name for bin_ in found.bins} == {"large/m"}
    fewest = replace(posed, objective=Gpus())
    assert {bin_.profile.name for bin_ in Replan().solve(fewest).bins} == {"large/m"}


class _Slots(AnalyticPredictor):
    """Servers with fewer than 8 slots starve."""

    name = "slots"

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin; one row per bin, in order."""
        found = super().evaluate(workload, bins)
        return replace(found, starved=found.starved | [item.max_loras < 8 for item in bins])


def test_a_server_that_goes_on_keeps_the_settings_with_which_it_holds() -> None:
    """Slots that suffice are no reason to start a server again; those that do not suffice, or other ranks, are."""
    workload, placed = two_servers(0.01)
    enough, few = (replace(item, settings=Settings(n, 32)) for item, n in zip(placed, (12, 4), strict=True))
    posed = running(workload, (enough, few), _Slots())
    wanted = [replace(item, settings=Settings(45, 32)) for item in placed]
    assert settled(posed, wanted) == [enough, wanted[1]]
    low = replace(posed, old_bins=(replace(enough, settings=Settings(12, 16)), few))
    assert settled(low, wanted) == wanted


def test_a_running_plan_that_splits_adapters_may_go_on_splitting_them() -> None:
    """Without a maximum number of servers per adapter, the running plan's holds: servers that hold all stay."""
    workload = random_fleet(1, seed=1, rates=(20.0,))
    parts = tuple(Bin((0,), Settings(1, 32), PROFILE, (0.25,)) for _ in range(4))
    posed = {"predictor": AnalyticPredictor(), "verify": False, "margin": 0.0}
    first = solve(workload, PROFILE, max_replicas=4, **posed)
    assert first.n_gpus > 1
    assert most_copies(parts) == 4
    plan = solve(workload, PROFILE, old_plan=first, **posed)
    assert (plan.status, plan.n_gpus, plan.moves) == (first.status, first.n_gpus, Moves((), tuple(range(first.n_gpus))))
    assert solve(workload, PROFILE, old_plan=first, max_replicas=1, **posed).unplaced == (0,)
