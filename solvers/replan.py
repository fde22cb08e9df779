"""Replanning: change a running plan as little as its new load allows."""

from __future__ import annotations

from dataclasses import replace

from packer.bin import Bin
from packer.moves import aligned, moved, moves_of
from packer.plan import Plan
from packer.search import fewest
from packer.solvers.base import MAX_ADAPTERS_PER_GPU, Problem, Solution
from packer.solvers.greedy.solver import Greedy
from packer.solvers.limit import within_limit
from packer.solvers.repair import homeward, repaired
from packer.solvers.slots import SlotSearch


def objective_of(old: Plan) -> str:
    """What a running plan is followed with by default: its latency limits, or "moves" where it has none."""
    if "slo_used" in old.limits:
        return "slo"  # its workload has the goal
    limits = ",".join(f"server.{name}={most!r}" for name, most in old.limits.items())
    return f"slo:{limits}" if limits else "moves"


class Replan:
    """The better of two plans: the old one repaired, or a fresh one matched to the running servers.

    Of few adapters (`packer.solvers.repair.MOST_ADAPTERS`) every plan is considered. Adapters that moved and that the
    server where they ran takes after all go back there.

    The repair keeps every adapter where it runs, evicts from servers that would starve (the heaviest first, as
    few as possible), puts evicted and new adapters where they fit, opens GPUs only for the rest, and closes
    the emptiest servers while their adapters fit elsewhere.
    """

    name = "replan"

    def supports(self, problem: Problem) -> str | None:
        """It needs a running plan, on GPU types that are offered."""
        if problem.objective.fixed_gpus:
            return "it chooses how many GPUs to use"
        if not problem.old_bins:
            return "it needs a running plan: packer solve WORKLOAD --from PLAN"
        if any(bin_.profile not in problem.profiles for bin_ in problem.old_bins):
            return "the running plan has GPUs of another type"
        split = any(bin_.is_split for bin_ in problem.old_bins)
        return "the running plan splits adapters over several GPUs: plan without it" if split else None

    def solve(self, problem: Problem) -> Solution:
        """Bins in the order of the running servers that they continue; new ones at the end."""
        free = replace(problem, max_gpus=None)
        fresh = Greedy().solve(replace(free, old_bins=()))
        kept = _Repair(free).run(enough=len(fresh.bins) if not fresh.unplaced else 1)
        plans = (repaired(free), kept, fresh.bins if not fresh.unplaced else None)
        options = [aligned(problem.old_bins, homeward(free, bins)) for bins in plans if bins]
        if not options:
            return _limited(problem, fresh)
        best = min(options, key=lambda bins: (len(bins), len(moved(problem.old_bins, bins))))
        return _limited(problem, Solution(tuple(best), moves=moves_of(problem.old_bins, best)))


def _limited(problem: Problem, found: Solution) -> Solution:
    """The plan on at most `max_gpus` GPUs; cut down, it continues no running servers any more."""
    limited = within_limit(problem, found)
    return limited if limited is found else replace(limited, moves=None)


class _Repair:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.slots = problem, SlotSearch(problem)
        self.loads = problem.workload.offered_tok_s_by_adapter
        self.bins: list[Bin] = []

    def run(self, enough: int) -> list[Bin] | None:
        """The repaired plan, or None if some adapter fits nowhere; closes servers down to `enough`."""
        unplaced = set(range(len(self.problem.workload)))
        for old in self.problem.old_bins:
            kept = self._mend(old)
            if kept is not None:
                self.bins.append(kept)
                unplaced -= set(kept.adapters)
        for i in sorted(unplaced, key=lambda i: (-self.loads[i], i)):
            if not self._place(i) and not self._open(i):
                return None
        while len(self.bins) > enough and not self.problem.out_of_time():
            if not self._close_one():
                break
        return self.bins

    def _mend(self, old: Bin) -> Bin | None:
        """The old bin without the fewest adapters, the heaviest first, with which it holds.

        Out of time, it stays as it is if that holds, and else loses the first number found to be enough.
        """
        if self.problem.out_of_time():
            slots = min(old.max_loras, len(old.adapters))
            as_it_is = self.slots.make(old.adapters, slots, old.profile)
            if self.slots.holds([as_it_is])[0]:
                return as_it_is
        falling = sorted(old.adapters, key=lambda i: (-self.loads[i], i))
        found: dict[int, Bin] = {}

        def enough(gone: int) -> bool:
            thorough, kept = not self.problem.out_of_time(), sorted(falling[gone:])
            made = self.slots.feasible(kept, old.profile, hint=old.max_loras, thorough=thorough)
            found.update({} if made is None else {gone: made})
            return made is not None

        fewest(enough, 0, len(falling) - 1, lambda: bool(found) and self.problem.out_of_time())
        return found[min(found)] if found else None

    def _place(self, adapter: int) -> bool:
        """Put an adapter into the least loaded bin that takes it."""
        loads = [bin_.offered_tok_s(self.problem.workload) for bin_ in self.bins]
        for k in sorted(range(len(loads)), key=lambda k: (loads[k], k)):
            bin_ = self.bins[k]
            if len(bin_.adapters) >= MAX_ADAPTERS_PER_GPU:
                continue
            grown = self.slots.feasible([*bin_.adapters, adapter], bin_.profile, hint=bin_.max_loras)
            if grown is not None:
                self.bins[k] = grown
                return True
        return False

    def _open(self, adapter: int) -> bool:
        for profile in self.problem.profiles:
            alone = self.slots.feasible([adapter], profile)
            if alone is not None:
                self.bins.append(alone)
                return True
        return False

    def _close_one(self) -> bool:
        """Empty the server with the fewest adapters into the others; False if they don't all fit."""
        before = list(self.bins)
        k = min(range(len(before)), key=lambda k: (len(before[k].adapters), k))
        unplaced = sorted(before[k].adapters, key=lambda i: (-self.loads[i], i))
        del self.bins[k]
        if all(self._place(i) for i in unplaced):
            return True
        self.bins = before
        return False
