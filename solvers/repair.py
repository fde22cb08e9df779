"""Small repairs of replanned fleets: exact where the fleet is small, else adapters sent back to where they ran."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.bin import Bin
from packer.moves import match, moved
from packer.solvers.base import Problem
from packer.solvers.columns.master import solve_integer
from packer.solvers.slots import SlotSearch, real_bins

MOST_ADAPTERS, MOST_SIMULATED = 12, 7
"""Fleets up to which every set of adapters is evaluated; the latter where that simulates."""

_INTEGER_S = 10.0


def repaired(problem: Problem) -> list[Bin] | None:
    """Fewest GPUs, then fewest adapters moved: every set of adapters is evaluated, up to dominance.

    None where the fleet is too large, there are several kinds of server, or the time is up.
    """
    n = len(problem.workload)
    most = MOST_SIMULATED if problem.evaluator.simulates else MOST_ADAPTERS
    if n > most or len(problem.profiles) > 1:
        return None
    feasible = _feasible_sets(problem)
    if feasible is None:
        return None
    home = {i: j for j, old in enumerate(problem.old_bins) for i in old.adapters}
    rows, prices, sets = [], [], []
    for each in feasible:
        held = np.zeros(n + len(problem.old_bins), dtype=np.int64)
        held[list(each)] = 1
        for j in {None, *(home[i] for i in each if i in home)}:
            row = held.copy()
            if j is not None:
                row[n + j] = -1  # each running server becomes at most one of the new plan
            rows.append(row)
            prices.append(n + 1.0 + sum(i in home and home[i] != j for i in each))
            sets.append((each, j))
    demand = np.concatenate([np.ones(n, dtype=np.int64), -np.ones(len(problem.old_bins), dtype=np.int64)])
    seconds = min(_INTEGER_S, max(0.1, problem.remaining_s()))
    use, _ = solve_integer(np.array(rows), demand, time_limit_s=seconds, prices=np.array(prices))
    if use is None:
        return None
    bins = real_bins(problem, _disjoint([sets[k] for k in np.flatnonzero(use).tolist()], home))
    return [item for item in bins if item is not None] if all(item is not None for item in bins) else None


def _feasible_sets(problem: Problem) -> list[tuple[int, ...]] | None:
    """Every feasible set of adapters; one that holds an infeasible set is not evaluated. None if the time is up."""
    level: list[tuple[int, ...]] = [(i,) for i in range(len(problem.workload))]
    found: list[tuple[int, ...]] = []
    while level:
        if problem.out_of_time():
            return None
        bins = real_bins(problem, level)
        good = {each for each, item in zip(level, bins, strict=True) if item is not None}
        found += sorted(good)
        larger = ((*each, i) for each in sorted(good) for i in range(each[-1] + 1, len(problem.workload)))
        level = [each for each in larger if all(each[:k] + each[k + 1 :] in good for k in range(len(each)))]
    return found


def _disjoint(
    chosen: Sequence[tuple[tuple[int, ...], int | None]], home: dict[int, int]
) -> list[tuple[int, ...]]:
    """The sets without what is held twice: an adapter stays on its running server if it can."""
    owner: dict[int, int] = {}
    for k, (each, j) in enumerate(chosen):
        for i in each:
            if i not in owner or (i in home and home[i] == j):
                owner[i] = k
    sets = [tuple(i for i in each if owner[i] == k) for k, (each, _) in enumerate(chosen)]
    return [each for each in sets if each]


def homeward(problem: Problem, bins: Sequence[Bin]) -> list[Bin]:
    """The bins with adapters sent back to the servers where they ran, as far as these take them."""
    slots, made = SlotSearch(problem), list(bins)
    loads = problem.workload.offered_tok_s_by_adapter
    continues = {j: k for k, j in match(problem.old_bins, made).items()}
    home = {i: j for j, old in enumerate(problem.old_bins) for i in old.adapters}
    for i in sorted(moved(problem.old_bins, made), key=lambda i: (loads[i], i)):
        target = continues.get(home[i])
        source = next(k for k, item in enumerate(made) if i in item.adapters)
        if target is None or target == source or problem.out_of_time() or made[source].is_split:
            continue
        rest = [other for other in made[source].adapters if other != i]
        host = made[target]
        grown = slots.feasible((*host.adapters, i), host.profile, hint=host.max_loras)
        if grown is None or not rest:
            continue
        left = slots.feasible(rest, made[source].profile, hint=min(made[source].max_loras, len(rest)))
        if left is not None:
            made[target], made[source] = grown, left
    return made
