"""Searches with a trained predictor: what makes their bins hold in the whole predictor.

Trained trees are wrong about a few bins, and searches find those. A GPU that the whole predictor refuses is tried with
a few slots more and less, then gives a few adapters to the others, or to a further one; else the search is repeated
with bins that the trees admit with certainty, with rates raised by what the refused GPUs failed to serve, and at last
with the whole predictor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from operator import itemgetter

import numpy as np

from packer import seeds
from packer.arrays import BoolArray
from packer.bin import Bin
from packer.evaluation import STARVATION_THRESHOLD, Evaluations
from packer.objectives.base import Objective
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.solvers.base import Problem, Solution
from packer.solvers.candidates import AWAY, neighbours
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.first_fit import FirstFit
from packer.solvers.order import by_falling_load
from packer.solvers.slots import Climb, SlotSearch, scores, search
from packer.twin.margin import CONFIRMING, HARDENING_STEP, LATENCY_SLACK

STEPS = 4
"""How often a search is repeated with raised rates before the whole predictor takes part in it."""

_SEARCH_SHARE, _RELIEF_SHARE, _REPEATED_SHARE = 0.75, 0.5, 0.5
"""Of the time that is left, for the search, for repairs, and for each repetition."""

_SAMPLE = 3
"""Where so many refused GPUs do not hold with other slots either, the rest is not tried."""

_HOSTS = 12
"""How many GPUs are simulated with more adapters before a further one is opened."""

_SHED = (0.03, 0.06, 0.12, 0.25)
"""Shares of its load that a refused GPU gives away."""


def solution_that_holds(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    """What `solve` finds, with bins that the whole predictor admits as far as there is time.

    The plan keeps the bound of the first search, which claims least.
    """
    evaluator = problem.evaluator
    if not evaluator.confirms:
        return solve(problem)
    first = solve(problem.with_share(_SEARCH_SHARE))
    found = with_other_slots(problem, first)

    def repeated(posed: Problem, **details: object) -> Solution:
        again = solve(posed.with_share(_REPEATED_SHARE))
        again = replace(again, details={**again.details, **details})
        bound, source = first.lower_bound, first.bound_source
        return replace(again, lower_bound=bound, bound_source=source, proven=first.proven)

    def conservative() -> Solution:
        return repeated(replace(problem, evaluator=evaluator.cautious()), search_sure=True)

    holding: list[Solution] = []
    raised: dict[Profile, float] = {}
    for step in range(STEPS + 1):
        if found.unplaced or not found.bins or problem.out_of_time():
            break
        evaluations = evaluator.judged(problem.workload, found.bins)
        refused = np.flatnonzero(~problem.objective.holds(evaluations)).tolist()
        if not refused:
            holding.append(found)
            break
        bins = None if found.moves else repaired(problem.with_share(_RELIEF_SHARE), found.bins, refused)
        if bins is not None:
            holding.append(replace(found, bins=bins, details={**found.details, "relieved": len(refused)}))
        unsure = step == 0 and bool(evaluations.starved[refused].any())
        if unsure and (bins is None or len(bins) > len(found.bins)):
            cautious = conservative()
            holding += [cautious] if all_hold(problem, cautious) else []
        fewest = min((len(each.bins) for each in holding), default=sys.maxsize)
        less = shortfall_by_profile(found.bins, evaluations, refused)
        raised = {k: (1.0 + raised.get(k, 0.0)) * (1.0 + less.get(k, 0.0)) - 1.0 for k in {**raised, **less}}
        posed = replace(problem, evaluator=evaluator.changed(raised=raised))
        ends = step >= STEPS - bool(holding) or fewest <= len(found.bins)
        again = None if ends else repeated(posed, search_raised=max(raised.values()))
        if again is None or len(again.bins) >= fewest:
            break
        found = again
    if holding:
        return min(holding, key=lambda each: (_key(problem, each), "relieved" in each.details))
    if all_hold(problem, found):
        return found
    late = problem.out_of_time()  # bins are evaluated all the same, for the plan's figures
    last = conservative() if late else solve(replace(problem, evaluator=evaluator.whole()))
    return found if late and not all_hold(problem, last) else last


def with_other_slots(problem: Problem, found: Solution) -> Solution:
    """The solution, its refused bins with the next smaller or larger number of slots if the whole predictor admits it.

    One without a place for every adapter, or that stays close to a running plan, is left as it is.
    """
    if found.unplaced or found.moves or not found.bins or problem.out_of_time():
        return found
    made, slots = list(found.bins), SlotSearch(problem, problem.evaluator.judged)
    refused = [k for k, holds in enumerate(slots.holds(made)) if not holds]
    for some in (refused[:_SAMPLE], refused[_SAMPLE:]):
        items = [made[k] for k in some]
        near = ([neighbours(item, AWAY)[:1] + neighbours(item, -AWAY)[:1]] for item in items)
        climbs = [Climb(item, 0, each) for item, each in zip(items, near, strict=True)]
        if not some or problem.out_of_time():
            break
        search(climbs, slots.rated)
        for k, climb in zip(some, climbs, strict=True):
            made[k] = climb.best or made[k]
        if made == list(found.bins):
            break
    return replace(found, bins=tuple(made))


def _key(problem: Problem, found: Solution) -> tuple[float, ...]:
    evaluations = problem.evaluator.judged(problem.workload, found.bins)
    return problem.objective.key(problem.workload, found.bins, evaluations)


def all_hold(problem: Problem, found: Solution) -> bool:
    """Whether every adapter has a place, in bins that the whole predictor admits."""
    return not found.unplaced and all(_admitted(problem, found.bins))


def _admitted(problem: Problem, bins: Sequence[Bin]) -> list[bool]:
    """Which of the bins the whole predictor admits."""
    return SlotSearch(problem, problem.evaluator.judged).holds(bins)


def holds_in_twin(problem: Problem, bins: Sequence[Bin]) -> bool:
    """Whether the twin admits every bin, at slightly raised rates and in an hour of its own."""
    twin = TwinPredictor(seed=seeds.confirming(problem.seed))
    found = Evaluator(twin, problem.objective, CONFIRMING).evaluate(problem.workload, bins)
    return bool(holding(problem.objective, found).all())


def holding(objective: Objective, found: Evaluations) -> BoolArray:
    """Which bins the objective admits when latencies may exceed its limits by the slack, bool (n,)."""
    latencies = [item.name for item in fields(found) if item.name.endswith("_ms") or item.name == "slo_used"]
    eased = {name: getattr(found, name) / LATENCY_SLACK for name in latencies}
    return objective.holds(replace(found, **eased))


def shortfall_by_profile(
    bins: Sequence[Bin], evaluations: Evaluations, refused: Sequence[int]
) -> dict[Profile, float]:
    """By profile, the share by which the load of its worst bin exceeds what it serves, at least `HARDENING_STEP`.

    A profile without a refused bin is left out.
    """
    shares: dict[Profile, float] = {}
    for k in refused:
        row, profile = evaluations[k], bins[k].profile
        served = row.served_share if row.starved and not row.memory_error else 1.0
        share = max(HARDENING_STEP, STARVATION_THRESHOLD / max(served, 0.5) - 1.0)
        shares[profile] = max(shares.get(profile, 0.0), share)
    return shares


def repaired(problem: Problem, bins: Sequence[Bin], refused: Sequence[int]) -> tuple[Bin, ...] | None:
    """The bins with some adapters of the refused ones on others, all admitted by the whole predictor; None if not.

    A refused bin gives away the fewest adapters that make up a share of its load. Those with room take them, further
    GPUs of the same kind the rest. At most half of the bins may be refused.
    """
    if 2 * len(refused) > len(bins) or any(item.is_split for item in bins):
        return None
    lighter = _lightened(problem, {k: bins[k] for k in refused})
    hosts = {k: item for k, item in enumerate(bins) if k not in set(refused)}
    given = [{*bins[k].adapters} - {*(lighter[k].adapters if k in lighter else ())} for k in refused]
    left = [i for each in given for i in sorted(each)]
    made = hosts | _fuller(problem, hosts, left) | lighter
    placed = {i for item in made.values() for i in item.adapters}
    cautious = replace(problem, evaluator=problem.evaluator.cautious())
    more = _opened(cautious, len(made), [i for i in left if i not in placed])
    kept = [made[k] for k in sorted(made)]
    return None if more is None or not all(_admitted(problem, more)) else (*kept, *more)


def _lightened(problem: Problem, refused: Mapping[int, Bin]) -> dict[int, Bin]:
    """Of each of these bins what is left when it has given away enough; those that give away too much are left out."""
    slots, found = SlotSearch(problem), dict[int, Bin]()
    for share in _SHED:
        tried = {}
        for k, full in refused.items():
            kept = _without(problem, full, share) if k not in found else []
            lighter = (
                slots.feasible(kept, full.profile, hint=min(full.max_loras, len(kept))) if kept else None
            )
            if lighter is not None:
                tried[k] = slots.best(lighter)
        if problem.out_of_time():
            break
        for (k, item), holds in zip(tried.items(), _admitted(problem, list(tried.values())), strict=True):
            if holds:
                found[k] = item
    return found


def _without(problem: Problem, full: Bin, share: float) -> list[int]:
    """The adapters of a bin but the fewest that carry this share of its load."""
    loads = problem.workload.offered_tok_s_by_adapter
    rising = sorted(full.adapters, key=lambda i: (loads[i], i))
    wanted = share * float(loads[rising].sum())
    gone = next(([i] for i in rising if loads[i] >= wanted), list[int]())
    while not gone or float(loads[gone].sum()) < wanted:
        gone.append(rising[-1 - len(gone)])
    return [i for i in full.adapters if i not in set(gone)]


def _fuller(problem: Problem, hosts: Mapping[int, Bin], left: Sequence[int]) -> dict[int, Bin]:
    """Those of the hosts that take some of the adapters, as far as the whole predictor admits it, the fastest first.

    The room of a host is what it serves beyond the least share of its load; all, half or a quarter of it is filled.
    None take any where their room is not enough for all the adapters, so that a further GPU is needed anyway.
    """
    fleet, slots, found = problem.workload, SlotSearch(problem), dict[int, Bin]()
    loads, rows = fleet.offered_tok_s_by_adapter, problem.evaluator.judged(fleet, list(hosts.values()))
    more = rows.total_token_throughput / (STARVATION_THRESHOLD * rows.offered_tok_s) - 1.0
    room = {k: share * hosts[k].offered_tok_s(fleet) for k, share in zip(hosts, more.tolist(), strict=True)}
    waiting = list(left) if sum(room.values()) >= loads[left].sum() else []
    best = sorted(zip(scores(rows), hosts, strict=True), key=itemgetter(0), reverse=True)
    for _, k in best[:_HOSTS]:
        host, model = hosts[k], fleet.adapters[hosts[k].adapters[0]].model
        mine = [i for i in waiting if fleet.adapters[i].model == model]
        most = int(np.searchsorted(np.cumsum(loads[mine]), room[k], side="right"))
        sizes = [n for n in (most // 4, most // 2, most) if n > 0 and not problem.out_of_time()]
        tried = [slots.like((*host.adapters, *mine[:n]), host) for n in sizes]
        for item, holds in zip(tried, _admitted(problem, tried), strict=True):
            found |= {k: item} if holds else {}
        taken = set(found.get(k, host).adapters)
        waiting = [i for i in waiting if i not in taken]
    return found


def _opened(problem: Problem, gpus: int, left: Sequence[int]) -> list[Bin] | None:
    """Further GPUs for these adapters; None where no more may be opened, or of several kinds."""
    if not left:
        return []
    several = len(problem.profiles) > 1 or len(problem.workload.models) > 1 or problem.stock
    if several or problem.objective.fixed_gpus or problem.old_bins:
        return None
    packing = FirstFit(problem, by_falling_load(problem.workload, np.array(left, dtype=np.int64)))
    packing.run()
    total = (gpus + len(packing.bins)) * problem.profile.engine.gpus
    return None if packing.left or total > (problem.max_gpus or total) else packing.bins
