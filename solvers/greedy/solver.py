"""The default solver: an improved version of the paper's greedy.

Differences to `greedy-paper` (arXiv 2602.24044, Algorithms 1 and 2): bisection finds the largest prefix that holds,
instead of the nearest testing point; every candidate of `max_loras` is tried before a GPU is closed; a closed GPU is
topped up with lighter adapters from further back in the queue; a last set that fails goes to a new GPU; an adapter too
hot for one GPU is split over replicas if allowed, or reported with the rate that a GPU can serve. At the end the load
is evened out over the GPUs, if they then hold.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.solvers.base import Problem, Solution
from packer.solvers.baselines.greedy_paper import GreedyPaper
from packer.solvers.greedy.balance import balanced
from packer.solvers.greedy.first_fit import FirstFit
from packer.solvers.greedy.larger import larger
from packer.solvers.greedy.shares import even_shares
from packer.solvers.limit import within_limit
from packer.solvers.order import even_order, paper_order
from packer.solvers.slots import SlotSearch
from packer.solvers.support import chooses_gpus

_PACKING_SHARE = 0.6  # Share of the time for packing; the rest is for evening out the load.
MOST_LEFT = 384  # The paper's plan is not repaired if it leaves more adapters unplaced.
FEW_BINS = 4  # Other plans are tried if two servers (one, in plans up to this size) are as full as trees know.


class Greedy:
    """First-fit decreasing with bisection; never needs more GPUs than `greedy-paper`, which it runs too."""

    name = "greedy"
    compared = True
    supports = staticmethod(chooses_gpus)

    def solve(self, problem: Problem) -> Solution:
        """Bins in the order in which they were filled."""
        whole = problem if problem.max_gpus is None else replace(problem, max_gpus=None)
        free = whole.learned()
        packing, larger_servers = free.with_share(_PACKING_SHARE), False
        found = _packed(packing)
        least = 1 if len(found.bins) <= FEW_BINS else 2
        if _full(packing, found) >= least:  # light adapters mixed with heavier ones may need fewer GPUs
            mixed = _first_fit(packing, even_order(problem.workload))
            found = min(found, mixed, key=_size)
            if _full(packing, found) >= least:
                grown = _grown(whole.with_share(_PACKING_SHARE), mixed, len(found.bins))
                if _size(grown) < _size(found):
                    free, found, larger_servers = whole, grown, True
        cut = ["filling the GPUs"] if packing.out_of_time() else []
        if not found.unplaced:
            even = larger_servers and len(found.bins) > FEW_BINS  # and each server would be simulated
            found = replace(found, bins=even_shares(free, found.bins if even else balanced(free, found.bins)))
            cut += ["evening out the load"] if free.out_of_time() else []
        if cut:
            said = f"the time limit cut short: {', '.join(cut)} (--time-limit gives more)"
            found = replace(found, reasons=(*found.reasons, said))
        return within_limit(problem, found)


def _packed(problem: Problem) -> Solution:
    """First fit, or the paper's plan if that is better."""
    found = _first_fit(problem, paper_order(problem.workload))
    return _paper(problem, found) or found


def _first_fit(problem: Problem, order: IntArray) -> Solution:
    packing = FirstFit(problem, order)
    packing.run()
    return Solution(tuple(packing.bins), tuple(packing.left), tuple(packing.reasons))


def _grown(problem: Problem, mixed: Solution, limit: int) -> Solution:
    """A plan with more adapters on a server than trees were trained on; `mixed` if `larger` finds none."""
    kinds = {item.profile for item in mixed.bins}
    if mixed.unplaced or len(kinds) > 1 or any(item.is_split for item in mixed.bins):
        return _packed(problem)
    bins = larger(replace(problem, profiles=tuple(kinds)), mixed.bins, limit)
    return replace(mixed, bins=tuple(bins)) if bins else mixed


def _full(problem: Problem, found: Solution) -> int:
    """Number of servers that hold as many adapters as searches put on one server."""
    return sum(len(item.adapters) == problem.most_adapters for item in found.bins)


def _size(found: Solution) -> tuple[int, int]:
    return len(found.unplaced), len(found.bins)


def _paper(problem: Problem, found: Solution) -> Solution | None:
    """The paper's plan, if it places every adapter on fewer GPUs; its slots are chosen again."""
    solver = GreedyPaper()
    limit = len(problem.workload) if found.unplaced else len(found.bins) - 1
    if limit < 1 or problem.out_of_time() or solver.supports(problem) is not None:
        return None
    bins = _finished(problem, solver.solve(replace(problem, max_gpus=limit)), limit)
    if bins is None:
        return None
    slots = SlotSearch(problem)
    return Solution(tuple(slots.best(_without_spare_slots(slots, bin_)) for bin_ in bins))


def _finished(problem: Problem, plan: Solution, limit: int) -> list[Bin] | None:
    """The paper's bins, and unplaced adapters on new GPUs; None if that is not the whole fleet within `limit` GPUs."""
    if not plan.unplaced:
        return list(plan.bins)
    if not plan.bins or len(plan.bins) >= limit or len(plan.unplaced) > MOST_LEFT:
        return None
    rest = FirstFit(problem, np.array(plan.unplaced, dtype=np.int64))
    rest.run()
    bins = [*plan.bins, *rest.bins]
    return None if rest.left or len(bins) > limit else bins


def _without_spare_slots(slots: SlotSearch, bin_: Bin) -> Bin:
    """The bin with no more slots than adapters, if it then holds: further slots would only take memory."""
    if bin_.max_loras <= len(bin_.adapters):
        return bin_
    return slots.feasible(bin_.adapters, bin_.profile, hint=len(bin_.adapters), thorough=True) or bin_
