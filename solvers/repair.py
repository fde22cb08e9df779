"""Repairs of replanned fleets: an exact search for small fleets, and adapters sent back to where they ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.moves import match, moved
from packer.solvers.base import Problem
from packer.solvers.slots import SlotSearch, real_bins

MOST_ADAPTERS, MOST_SIMULATED = 12, 7
"""Largest fleets for which every set of adapters is evaluated; the second if evaluations are simulations."""


def repaired(problem: Problem) -> list[Bin] | None:
    """Return bins with the fewest GPUs, then the fewest moves: every set of adapters is evaluated, up to dominance.
    None if the fleet is too large, there are several kinds of server, or the time is up."""
    n = len(problem.workload)
    most = MOST_SIMULATED if problem.evaluator.simulates else MOST_ADAPTERS
    if n > most or len(problem.profiles) > 1:
        return None
    (whole,) = real_bins(problem, [tuple(range(n))])
    if whole is not None:
        return [whole]
    feasible = _feasible_sets(problem)
    if feasible is None:
        return None
    home = {i: j for j, old in enumerate(problem.old_bins) for i in old.adapters}
    sets = cheapest(feasible, n, home, len(problem.old_bins))
    bins = [None] if sets is None else real_bins(problem, sets)
    return [item for item in bins if item is not None] if all(item is not None for item in bins) else None


def cheapest(
    feasible: Sequence[tuple[int, ...]], n: int, home: Mapping[int, int], servers: int
) -> list[tuple[int, ...]] | None:
    """Partition `n` adapters into the fewest sets, then with the fewest adapters away from home; None if impossible.

    `home`: running server of each adapter. `servers`: number of running servers; each becomes at most one set. Dynamic
    programming over subsets of the adapters (bit masks) finds the cheapest partition into new servers, from the last
    adapter on, then adds the running servers in turn.
    """
    masks = np.arange(1 << n)
    bits = [sum(1 << i for i in each) for each in feasible]
    homes = [[home.get(i) for i in each] for each in feasible]
    least = np.where(masks == 0, 0, np.iinfo(np.int64).max // 2)
    took = np.full((servers + 1, 1 << n), -1)

    def improve(k: int, j: int, among: IntArray, before: IntArray) -> None:
        """Put set `k` on server `j` for each mask that this makes cheaper; `j` = `servers` is a new server."""
        at = among[among & bits[k] == bits[k]]
        price = before[at ^ bits[k]] + n + 1 + sum(own is not None and own != j for own in homes[k])
        at, price = at[price < least[at]], price[price < least[at]]
        least[at], took[j, at] = price, k

    for k in sorted(range(len(feasible)), key=lambda k: -feasible[k][0]):
        improve(k, servers, masks[masks & -masks == 1 << feasible[k][0]], least)
    for j in range(servers):
        before = least.copy()
        for k in (k for k, own in enumerate(homes) if j in own):
            improve(k, j, masks, before)
    left, found = (1 << n) - 1, []
    for j in (*reversed(range(servers)), *[servers] * n):
        if left and (k := int(took[j, left])) >= 0:
            found.append(feasible[k])
            left ^= bits[k]
    return None if left else found


def _feasible_sets(problem: Problem) -> list[tuple[int, ...]] | None:
    """Every feasible set of adapters; sets that contain an infeasible set are not evaluated. None if time is up."""
    level: list[tuple[int, ...]] = [(i,) for i in range(len(problem.workload))]
    found: list[tuple[int, ...]] = []
    while level:
        if problem.out_of_time():
            return None
        bins = real_bins(problem, level, until_holds=True)
        good = {each for each, item in zip(level, bins, strict=True) if item is not None}
        found += sorted(good)
        larger = ((*each, i) for each in sorted(good) for i in range(each[-1] + 1, len(problem.workload)))
        level = [each for each in larger if all(each[:k] + each[k + 1 :] in good for k in range(len(each)))]
    return found


def homeward(problem: Problem, bins: Sequence[Bin]) -> list[Bin]:
    """Send adapters back to the servers where they ran, as far as these servers can hold them."""
    slots, made = SlotSearch(problem), list(bins)
    loads = problem.workload.offered_tok_s_by_adapter
    continues = {j: k for k, j in match(problem.old_bins, made).items()}
    home = {i: j for j, old in enumerate(problem.old_bins) for i in old.adapters}
    for i in sorted(moved(problem.old_bins, made), key=lambda i: (loads[i], i)):
        target = continues.get(home[i])
        source = next(k for k, item in enumerate(made) if i in item.adapters)
        if target is None or target == source or problem.out_of_time():
            continue
        host, guest = made[target], made[source]
        rest = [other for other in guest.adapters if other != i]
        if host.is_split or guest.is_split or not rest:
            continue
        grown = slots.feasible((*host.adapters, i), host.profile, hint=host.max_loras)
        left = grown and slots.feasible(rest, guest.profile, hint=min(guest.max_loras, len(rest)))
        if grown is not None and left is not None:
            made[target], made[source] = grown, left
    return made
