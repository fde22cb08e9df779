"""Make the bins of a search with a trained predictor hold in the whole predictor.

Trained trees are wrong about a few bins, and searches find these bins. A GPU that the whole predictor refuses is tried
with more and with fewer slots; then it gives a few adapters to other GPUs, or to a new one. If that fails, the search
is repeated: with bins that the trees admit with certainty, with rates raised by what the refused GPUs failed to serve,
and at last with the whole predictor.
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

STEPS = 4  # How often a search is repeated with raised rates before the whole predictor takes part in it.
_SEARCH_SHARE, _RELIEF_SHARE, _REPEATED_SHARE = 0.75, 0.5, 0.5
"""Shares of the remaining time for the search, for repairs, and for each repetition."""

_SAMPLE = 3  # If none of this many refused GPUs holds with other slots, the rest are not tried.
_HOSTS = 12  # Number of GPUs that are simulated with more adapters before a new one is opened.
_SHED = (0.03, 0.06, 0.12, 0.25)  # Shares of its load that a refused GPU gives away.


def solution_that_holds(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    """Run `solve` and change its solution until the whole predictor admits every bin, as far as there is time. The plan
    keeps the bound of the first search, which is the weakest claim."""
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
        return repeated(replace(problem, evaluator=evaluator.cautious()), search_cautious=True)

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
        # Higher rates hardly give fewer servers than this search did: as few that hold are good enough.
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
    """Give each refused bin about twice or half as many slots if the whole predictor then admits it. A solution with
    unplaced adapters, or one that stays close to a running plan, is returned unchanged."""
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
        for k, best in zip(some, search(climbs, slots.rated), strict=True):
            made[k] = best or made[k]
        # No bin of the sample gets better, so the rest is not tried.
        if made == list(found.bins):
            break
    return replace(found, bins=tuple(made))


def _key(problem: Problem, found: Solution) -> tuple[float, ...]:
    evaluations = problem.evaluator.judged(problem.workload, found.bins)
    return problem.objective.key(problem.workload, found.bins, evaluations)


def all_hold(problem: Problem, found: Solution) -> bool:
    """Whether every adapter is placed and the whole predictor admits every bin."""
    return not found.unplaced and all(_admitted(problem, found.bins))


def _admitted(problem: Problem, bins: Sequence[Bin]) -> list[bool]:
    """Which of the bins the whole predictor admits."""
    return SlotSearch(problem, problem.evaluator.judged).holds(bins)


def holds_in_twin(problem: Problem, bins: Sequence[Bin]) -> bool:
    """Whether the twin admits every bin, at slightly raised rates and with another seed."""
    twin = TwinPredictor(seed=seeds.confirming(problem.seed))
    found = Evaluator(twin, problem.objective, CONFIRMING).evaluate(problem.workload, bins)
    return bool(holding(problem.objective, found).all())


def holding(objective: Objective, found: Evaluations) -> BoolArray:
    """Which bins the objective admits when latencies may exceed its limits by the slack, bool (n,)."""
    latencies = [item.name for item in fields(found) if item.name.endswith("_ms") or item.name == "slo_used"]
    return objective.holds(replace(found, **{name: getattr(found, name) / LATENCY_SLACK for name in latencies}))


def shortfall_by_profile(bins: Sequence[Bin], evaluations: Evaluations, refused: Sequence[int]) -> dict[Profile, float]:
    """By profile, the share by which 0.9 of the load of the worst refused bin exceeds what the bin serves. At least
    `HARDENING_STEP`. Profiles without a refused bin are left out."""
    shares: dict[Profile, float] = {}
    for k in refused:
        row, profile = evaluations[k], bins[k].profile
        served = row.served_share if row.starved and not row.memory_error else 1.0
        share = max(HARDENING_STEP, STARVATION_THRESHOLD / max(served, 0.5) - 1.0)
        shares[profile] = max(shares.get(profile, 0.0), share)
    return shares


def repaired(problem: Problem, bins: Sequence[Bin], refused: Sequence[int]) -> tuple[Bin, ...] | None:
    """Move adapters of the refused bins to other bins so that the whole predictor admits every bin; None if it fails. A
    refused bin gives away the fewest adapters that make up a share of its load. Bins with room take these adapters; new
    GPUs of the same kind take the rest. None also if more than half of the bins are refused."""
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
    """Each refused bin with the smallest share of its load in `_SHED` given away so that it holds, if any suffices."""
    slots, found = SlotSearch(problem), dict[int, Bin]()
    for share in _SHED:
        tried = {}
        for k, full in refused.items():
            kept = _without(problem, full, share) if k not in found else []
            lighter = slots.feasible(kept, full.profile, hint=min(full.max_loras, len(kept))) if kept else None
            if lighter is not None:
                tried[k] = slots.best(lighter)
        if problem.out_of_time():
            break
        for (k, item), holds in zip(tried.items(), _admitted(problem, list(tried.values())), strict=True):
            if holds:
                found[k] = item
    return found


def _without(problem: Problem, full: Bin, share: float) -> list[int]:
    """The adapters of a bin without the fewest adapters that carry this share of its load."""
    loads = problem.workload.offered_tok_s_by_adapter
    rising = sorted(full.adapters, key=lambda i: (loads[i], i))
    wanted = share * float(loads[rising].sum())
    # The lightest adapter that suffices alone, else the heaviest ones together.
    gone = next(([i] for i in rising if loads[i] >= wanted), list[int]())
    while not gone or float(loads[gone].sum()) < wanted:
        gone.append(rising[-1 - len(gone)])
    return [i for i in full.adapters if i not in set(gone)]


def _fuller(problem: Problem, hosts: Mapping[int, Bin], left: Sequence[int]) -> dict[int, Bin]:
    """The hosts that take adapters of `left`, with these adapters, if the whole predictor admits them; best host first.
    The room of a host is the extra load at which its present throughput is 0.9 of its load; all, half or a quarter of
    it is filled. No host takes adapters if all room together is too small: a new GPU is then needed anyway."""
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
    """New GPUs for these adapters; None if no more may be opened, or there are several kinds of GPU or models."""
    if not left:
        return []
    several = len(problem.profiles) > 1 or len(problem.workload.models) > 1 or problem.stock
    if several or problem.objective.fixed_gpus or problem.old_bins:
        return None
    packing = FirstFit(problem, by_falling_load(problem.workload, np.array(left, dtype=np.int64)))
    packing.run()
    total = (gpus + len(packing.bins)) * problem.profile.engine.gpus
    return None if packing.left or total > (problem.max_gpus or total) else packing.bins
