"""Replanned small fleets need as few GPUs as possible, and then move as few adapters as possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from monotone import MonotonePredictor, problem

from packer.adapter import Adapter
from packer.bin import Bin
from packer.moves import moved
from packer.objectives.moves import FewestMoves
from packer.planning.verify import check
from packer.solvers import repair
from packer.solvers.base import Problem
from packer.solvers.greedy.solver import Greedy
from packer.solvers.repair import cheapest, homeward, repaired
from packer.solvers.replan import Replan
from packer.solvers.slots import real_bins
from packer.workload import Workload

PREDICTOR = MonotonePredictor(capacity_tok_s=2500.0)


def partitions(items: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to divide the items into sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [(first,), *smaller]
        for k, each in enumerate(smaller):
            yield [*smaller[:k], (first, *each), *smaller[k + 1 :]]


def brute_force(task: Problem) -> tuple[int, int]:
    """Fewest GPUs, and then fewest moves, over every division of the fleet."""
    made: dict[tuple[int, ...], Bin | None] = {}
    best: tuple[int, int] | None = None
    for sets in partitions(list(range(len(task.workload)))):
        new = [each for each in sets if each not in made]
        made |= dict(zip(new, real_bins(task, new), strict=True))
        bins = [made[each] for each in sets]
        if all(item is not None for item in bins) and (best is None or len(bins) <= best[0]):
            whole = [item for item in bins if item is not None]
            key = len(whole), len(moved(task.old_bins, whole))
            best = key if best is None else min(best, key)
    assert best is not None
    return best


def grown(seed: int, n: int = 8) -> Problem:
    """A running fleet whose rates have changed, some of them much, with an adapter more and one less."""
    rng = np.random.default_rng(seed)
    ranks = rng.choice((8, 16, 32), n)
    old = Workload([Adapter(f"a{i}", int(ranks[i]), float(rng.uniform(0.3, 1.8))) for i in range(n)])
    bins = Greedy().solve(problem(old, predictor=PREDICTOR)).bins
    factor = 1.9 if seed % 2 else rng.uniform(0.4, 2.2, n)
    rates = np.minimum(old.rates * factor, 5.0).tolist()
    fleet = Workload([replace(each, rate=rate) for each, rate in zip(old.adapters, rates, strict=True)])
    return replace(problem(fleet, objective=FewestMoves(bins), predictor=PREDICTOR), old_bins=bins)


@pytest.mark.parametrize("seed", [0, 1, 13, 16, 34])
def test_small_fleets_are_replanned_as_by_brute_force(seed: int) -> None:
    """GPUs and moves equal those of the best of all divisions."""
    task = grown(seed)
    found = Replan().solve(task)
    check(task, found)
    assert (len(found.bins), len(moved(task.old_bins, found.bins))) == brute_force(task)


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_partition_is_that_of_all_partitions(seed: int) -> None:
    """Sets are as few as can be, and then adapters away from home, whichever servers become which set."""
    rng = np.random.default_rng(seed)
    n, servers, weights = 6, seed % 4, rng.uniform(0.1, 1.0, 6)
    home = {i: int(rng.integers(servers)) for i in range(n) if servers and rng.random() < 0.8}
    subsets = (each for size in range(1, n + 1) for each in combinations(range(n), size))
    feasible = [each for each in subsets if len(each) == 1 or weights[list(each)].sum() < 1.3]

    def away(sets: list[tuple[int, ...]]) -> int:
        """Fewest adapters that move, over every way to make running servers or new ones of the sets."""
        kept = [[sum(home.get(i) == j for i in each) for j in range(servers)] for each in sets]
        ways = permutations([*range(servers), *[servers] * len(sets)], len(sets))
        return len(home) - max(sum([*row, 0][j] for row, j in zip(kept, way, strict=True)) for way in ways)

    found = cheapest(feasible, n, home, servers)
    assert found is not None
    assert sorted(i for each in found for i in each) == list(range(n))
    every = [sets for sets in partitions(list(range(n))) if set(sets) <= set(feasible)]
    assert (len(found), away(found)) == min((len(sets), away(sets)) for sets in every)
    assert cheapest([(0,), (1,)], 3, {}, 1) is None


def test_a_fleet_on_one_server_is_not_enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one server holds every adapter, no plan has fewer, and its subsets are not evaluated."""
    task = grown(0)
    quiet = replace(task.workload, adapters=tuple(replace(a, rate=0.01) for a in task.workload.adapters))
    monkeypatch.setattr(repair, "_feasible_sets", lambda _problem: pytest.fail("enumerated"))
    (item,) = repaired(replace(task, workload=quiet)) or ()
    assert item.adapters == tuple(range(8))


def test_large_fleets_are_not_enumerated() -> None:
    """Beyond a dozen adapters the repair leaves the fleet to the other ways."""
    assert repaired(grown(0, n=13)) is None


@pytest.mark.parametrize("seed", range(4))
def test_adapters_go_home_where_they_are_taken(seed: int) -> None:
    """From a plan made anew, no adapter that could go back alone stays away; none is lost, every bin holds."""
    task = grown(seed, n=30)
    fresh = Greedy().solve(task).bins
    found = homeward(task, fresh)
    assert sorted(i for item in found for i in item.adapters) == list(range(30))
    assert task.evaluator.holds(task.workload, found).all()
    assert len(moved(task.old_bins, found)) <= len(moved(task.old_bins, fresh))
