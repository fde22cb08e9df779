"""Replanning: change a running plan as little as its new load allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.bin import Bin
from packer.errors import ValidationError
from packer.moves import aligned, as_running, most_copies, moved, moves_of
from packer.objectives.base import Objective
from packer.placement import check_placement
from packer.plan import Plan
from packer.profile import Profile
from packer.solvers.base import MAX_ADAPTERS_PER_GPU, Problem, Solution
from packer.solvers.greedy.solver import Greedy
from packer.solvers.limit import within_limit
from packer.solvers.nearest import Nearest, lightest
from packer.solvers.repair import homeward, repaired
from packer.solvers.slots import SlotSearch


def objective_of(old: Plan, *, stays: bool = True, spare: bool = True) -> str:
    """The default objective to replan a running plan: its latency limits, or "moves" if it has none; "gpus" then if no
    adapter stays. `spare`: keep its spare GPU, if it has one."""
    if spare and old.spare:
        return "gpus:spare=1"
    if "slo_used" in old.limits:
        return "slo"  # its workload has the goal
    limits = ",".join(f"server.{name}={most!r}" for name, most in old.limits.items())
    return f"slo:{limits}" if limits else "moves" if stays else "gpus"


class Replan:
    """The better of two plans: the old one repaired, or a fresh one matched to the running servers. The better one has
    fewer GPUs, or a lower price if the objective minimises it; else fewer adapters move.

    For few adapters (`packer.solvers.repair.MOST_ADAPTERS`), every plan is considered. Adapters that moved go back to
    the server where they ran if it can hold them after all.

    The repair keeps every adapter where it runs, evicts from servers that would starve (the heaviest first, as
    few as possible), puts evicted and new adapters where they fit, opens GPUs only for the rest, and closes
    the emptiest servers while their adapters fit elsewhere. A plan that splits adapters over several servers is not
    repaired: it stays as it is, or the fresh plan is matched to it.
    """

    name = "replan"

    def supports(self, problem: Problem) -> str | None:
        """It needs a running plan, on GPU types that are offered."""
        if problem.objective.fixed_gpus:
            return "it chooses how many GPUs to use"
        if not problem.old_bins:
            return "it needs a running plan of this fleet: packer solve WORKLOAD --from PLAN"
        other = any(bin_.profile not in problem.profiles for bin_ in problem.old_bins)
        return "the running plan has GPUs of another type" if other else None

    def solve(self, problem: Problem) -> Solution:
        """Bins in the order of the running servers that they continue; new ones at the end."""
        free = replace(problem, max_gpus=None)
        fresh = Greedy().solve(replace(free, old_bins=()))
        if any(item.is_split for item in problem.old_bins):
            mended = [_unchanged(free)]
        else:
            enough = len(fresh.bins) if not fresh.unplaced else 1
            mended = [repaired(free), _Repair(free).run(enough=enough)]
        plans = (*mended, fresh.bins if not fresh.unplaced else None)
        options = [aligned(problem.old_bins, homeward(free, bins)) for bins in plans if bins]
        if not options:
            return within_limit(problem, fresh)
        found = [Solution(tuple(bins), moves=moves_of(problem.old_bins, bins)) for bins in options]
        best = min(found, key=lambda plan: _rank(problem, plan))
        return within_limit(problem, replace(best, bins=tuple(settled(free, best.bins))))


def total(objective: Objective, bins: Sequence[Bin]) -> float:
    """GPUs of the bins, or their price per hour if the objective minimises it; equal in any order of the bins."""
    return round(sum(objective.weight(item.profile) for item in bins), 6)


def settled(problem: Problem, bins: Sequence[Bin]) -> list[Bin]:
    """The servers, with settings of the running ones that they continue where they hold, so that these go on."""
    made = as_running(problem.old_bins, bins)
    return [new if ok else item for item, new, ok in zip(bins, made, SlotSearch(problem).holds(made), strict=True)]


def _rank(problem: Problem, found: Solution) -> tuple[bool, float, int]:
    """Sort key, smaller is better: whether there are too few GPUs, what the objective minimises, adapters moved."""
    cut = within_limit(problem, found) is not found
    return cut, total(problem.objective, found.bins), len(moved(problem.old_bins, found.bins))


def _unchanged(problem: Problem) -> list[Bin] | None:
    """The running servers, if they hold all of the fleet within `max_replicas`; None if they don't."""
    old = problem.old_bins
    try:
        check_placement(problem.workload, old, ())
    except ValidationError:
        return None
    few = most_copies(old) <= problem.max_replicas
    return list(old) if few and all(SlotSearch(problem).holds(old)) else None


class _Repair(Nearest):
    """`made`: the server that holds each tuple of adapters, in the order of the tuple."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.slots = problem, SlotSearch(problem)
        mended = filter(None, map(self._mend, problem.old_bins))
        self.made = {item.adapters: item for item in mended}
        held = [dict.fromkeys(each, 1.0) for each in self.made]
        super().__init__(problem.workload.offered_tok_s_by_adapter, held, range(len(held)))

    def run(self, enough: int) -> list[Bin] | None:
        """The repaired plan, or None if some adapter fits nowhere; closes servers down to `enough`."""
        self.place_rest(lambda i: any(self._makes((i,), profile) for profile in self.problem.profiles))
        if sum(map(len, self.held)) < len(self.load):
            return None
        while len(self.serving) > enough and not self.problem.out_of_time():
            # With capacities of 1, its adapters go to the servers with the least load first.
            if not self.empty(min(self.serving, key=lambda s: len(self.held[s])), np.ones(len(self.held))):
                break
        return [self.made[tuple(self.held[s])] for s in self.serving]

    def _mend(self, old: Bin) -> Bin | None:
        """Remove the fewest adapters, heaviest first, so that the old bin holds; None if nothing helps. If the time is
        up: keep the bin if it holds, else remove the first number of adapters found to be enough."""
        over = self.problem.out_of_time
        if over():
            as_it_is = self.slots.make(old.adapters, min(old.max_loras, len(old.adapters)), old.profile)
            if self.slots.holds([as_it_is])[0]:
                return as_it_is

        def made(kept: list[int]) -> Bin | None:
            return self.slots.feasible(kept, old.profile, hint=old.max_loras, thorough=not over())

        return lightest(old, self.problem.workload.offered_tok_s_by_adapter, made, over)

    def _takes(self, s: int, a: int) -> bool:
        """Whether a server can hold one more adapter."""
        own = tuple(self.held[s])
        like = self.made[own]
        return len(own) < MAX_ADAPTERS_PER_GPU and self._makes((*own, a), like.profile, like.max_loras)

    def _makes(self, own: tuple[int, ...], profile: Profile, hint: int | None = None) -> bool:
        """Whether a server can hold these adapters; if so, stores it in `made`."""
        if found := self.slots.feasible(own, profile, hint=hint):
            self.made[own] = found
        return found is not None
