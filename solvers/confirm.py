"""Searches with a trained predictor: what makes their bins hold in the whole predictor.

Trained trees are wrong about a few bins, and searches find those. A GPU that the whole predictor refuses gives a few
adapters to the others; where they don't take them, the search is repeated with rates raised by what the refused GPUs
failed to serve, and at last with the whole predictor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from packer.bin import Bin
from packer.evaluation import STARVATION_THRESHOLD, Evaluations
from packer.profile import Profile
from packer.solvers.base import Problem, Solution
from packer.solvers.candidates import MAX_ADAPTERS_PER_GPU
from packer.solvers.slots import SlotSearch

HARDENING_STEP = 0.03
"""By how much rates are raised at least."""

STEPS = 4
"""How often a search is repeated with raised rates before the whole predictor takes part in it."""

_SEARCH_SHARE, _REPEATED_SHARE = 0.75, 0.5
"""Of the time that is left, for the search and each repetition: what it finds has to be confirmed, perhaps mended."""

_SHED = (0.03, 0.08, 0.2)
"""Shares of its load that a refused GPU gives away."""


def confirmed_solution(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    """What `solve` finds, with bins that the whole predictor admits as far as there is time.

    The bound is that of the first search, the weakest claim.
    """
    evaluator = problem.evaluator
    if not evaluator.confirms:
        return solve(problem)
    first = found = solve(problem.with_share(_SEARCH_SHARE))
    raised: dict[Profile, float] = {}
    for _ in range(STEPS):
        if found.unplaced or not found.bins or problem.out_of_time():
            break
        evaluations = evaluator.confirmed(problem.workload, found.bins)
        refused = np.flatnonzero(~problem.objective.admissible(evaluations)).tolist()
        if not refused:
            return found
        bins = mended(problem, found.bins, refused) if found.moves is None else None
        if bins is not None:
            return replace(found, bins=bins, details={**found.details, "mended": len(refused)})
        for profile, share in lacking(found.bins, evaluations, refused).items():
            raised[profile] = (1.0 + raised.get(profile, 0.0)) * (1.0 + share) - 1.0
        again = replace(problem, evaluator=evaluator.hardened(raised))
        found = solve(again.with_share(_REPEATED_SHARE))
        found = replace(
            found,
            lower_bound=first.lower_bound,
            bound_source=first.bound_source,
            proven=first.proven,
            details={**found.details, "search_raised": max(raised.values())},
        )
    if admits(problem, found) or problem.out_of_time():
        return found
    return solve(replace(problem, evaluator=evaluator.whole()))


def admits(problem: Problem, found: Solution) -> bool:
    """Whether every adapter has a place, in bins that the whole predictor admits."""
    if found.unplaced:
        return False
    evaluations = problem.evaluator.confirmed(problem.workload, found.bins)
    return bool(problem.objective.admissible(evaluations).all())


def lacking(bins: Sequence[Bin], evaluations: Evaluations, refused: Sequence[int]) -> dict[Profile, float]:
    """By profile, the share by which the load of its worst bin exceeds what it serves, at least `HARDENING_STEP`.

    Profiles of which no bin is refused are left out.
    """
    shares: dict[Profile, float] = {}
    for k in refused:
        row, profile = evaluations[k], bins[k].profile
        served = row.served_share if row.starved and not row.memory_error else 1.0
        share = max(HARDENING_STEP, STARVATION_THRESHOLD / max(served, 0.5) - 1.0)
        shares[profile] = max(shares.get(profile, 0.0), share)
    return shares


def mended(problem: Problem, bins: Sequence[Bin], refused: Sequence[int]) -> tuple[Bin, ...] | None:
    """The bins with some adapters of the refused ones on others, all admitted by the whole predictor; None if not.

    A refused bin gives away the fewest adapters that make up a share of its load, or takes other slots. At most half
    of the bins may be refused.
    """
    if 2 * len(refused) > len(bins) or any(item.is_split for item in bins):
        return None
    whole = replace(problem, evaluator=problem.evaluator.whole())
    slots, made, left = SlotSearch(whole), list(bins), list[int]()
    for k in refused:
        if problem.out_of_time():
            return None
        kept = _lightened(slots, made[k])
        if kept is None:
            return None
        left += sorted(set(made[k].adapters) - set(kept.adapters))
        made[k] = kept
    adapters, loads = problem.workload.adapters, problem.workload.offered_tok_s_by_adapter
    left.sort(key=lambda i: (-loads[i], i))
    hosts = [k for k in range(len(made)) if k not in set(refused)]
    hosts.sort(key=lambda k: (made[k].offered_tok_s(problem.workload), k))
    for k in hosts:
        if not left or problem.out_of_time():
            break
        model = adapters[made[k].adapters[0]].model
        mine = [i for i in left if adapters[i].model == model]
        made[k], rest = _filled(slots, made[k], mine)
        left = [i for i in left if adapters[i].model != model] + rest
    return None if left else tuple(made)


def _lightened(slots: SlotSearch, full: Bin) -> Bin | None:
    """The bin with other slots, or without a few adapters; None if it takes too many."""
    other = slots.feasible(full.adapters, full.profile, hint=full.max_loras)
    if other is not None:
        return other
    loads = slots.problem.workload.offered_tok_s_by_adapter
    total = float(loads[list(full.adapters)].sum())
    rising = sorted(full.adapters, key=lambda i: (loads[i], i))
    for share in _SHED:
        enough = [i for i in rising if loads[i] >= share * total]
        gone = set(enough[:1] or _heaviest(rising, loads.tolist(), share * total))
        kept = [i for i in full.adapters if i not in gone]
        lighter = slots.feasible(kept, full.profile, hint=min(full.max_loras, len(kept))) if kept else None
        if lighter is not None:
            return lighter
    return None


def _heaviest(rising: Sequence[int], loads: Sequence[float], wanted: float) -> list[int]:
    """The fewest adapters that carry the wanted load."""
    chosen: list[int] = []
    for i in reversed(rising):
        if wanted <= 0.0:
            break
        chosen.append(i)
        wanted -= loads[i]
    return chosen


def _filled(slots: SlotSearch, host: Bin, left: list[int]) -> tuple[Bin, list[int]]:
    """The host with as many of the adapters as it takes, halving their number, and those that are left."""
    count = min(len(left), MAX_ADAPTERS_PER_GPU - len(host.adapters))
    while count > 0:
        adapters = (*host.adapters, *left[:count])
        fuller = slots.feasible(adapters, host.profile, hint=host.max_loras)
        if fuller is not None:
            return fuller, left[count:]
        count //= 2
    return host, left
