"""The default solver: an improved version of the paper's greedy.

Differences to `greedy-paper` (arXiv 2602.24044, Algorithms 1 and 2): bisection finds the largest prefix that holds,
instead of the nearest testing point; every candidate of `max_loras` is tried before a GPU is closed; a closed GPU is
topped up with lighter adapters from further back in the queue; a last set that fails goes to a new GPU; an adapter too
hot for one GPU is split over replicas if allowed, or reported with the rate that a GPU can serve. At the end the load
is evened out over the GPUs, if they then hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.bin import Bin
from packer.solvers.base import Problem, Solution
from packer.solvers.baselines.greedy_paper import GreedyPaper
from packer.solvers.greedy.balance import balanced
from packer.solvers.greedy.first_fit import FirstFit
from packer.solvers.greedy.larger import larger
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


_LEAST = 0.01  # A replica keeps at least this share, or 0.9 of an equal share of very many.
_PARTS = (0.02, 0.05, 0.1, 0.2)  # Shares of an adapter that one move between two servers may shift.
_STEPS = 8
_FASTER = 0.95  # A move must lower the TTFT of the slower server to at most this share of it.


def even_shares(problem: Problem, bins: Sequence[Bin]) -> tuple[Bin, ...]:
    """Choose shares for equal loads, if the bins then hold; then move shares from the slowest server to the fastest."""
    if not any(item.is_split for item in bins):
        return tuple(bins)
    workload = problem.workload
    shares = [dict(zip(item.adapters, item.shares, strict=True)) for item in bins]
    loads = np.array([item.offered_tok_s(workload) for item in bins])
    parted = {i for own in shares for i, share in own.items() if share < 1.0}
    split = sorted(parted, key=lambda i: (-float(workload.offered_tok_s_by_adapter[i]), i))
    for i in split:
        load = float(workload.offered_tok_s_by_adapter[i])
        holding = [k for k, own in enumerate(shares) if i in own]
        others = loads[holding] - load * np.array([shares[k][i] for k in holding])
        parts = filled(others / load)
        loads[holding] = others + load * parts
        for k, part in zip(holding, parts.tolist(), strict=True):
            shares[k][i] = part
    even = [replace(item, shares=tuple(own.values())) for item, own in zip(bins, shares, strict=True)]
    changed = [item for item, old in zip(even, bins, strict=True) if item != old]
    if not changed or not problem.evaluator.holds(workload, changed).all():
        even = list(bins)
    for i in split:
        for _ in range(_STEPS):
            if problem.out_of_time() or not _moved(problem, even, i):
                break
    return tuple(even)


def _moved(problem: Problem, bins: list[Bin], adapter: int) -> bool:
    """Move some of an adapter's share from its slowest server to its fastest, if that makes the slower one faster."""
    holding = [k for k, item in enumerate(bins) if adapter in item.adapters]
    found = problem.evaluator.evaluate(problem.workload, [bins[k] for k in holding])
    ttft_ms = np.nan_to_num(found.mean_ttft_ms, nan=np.inf)
    slow, fast = holding[int(ttft_ms.argmax())], holding[int(ttft_ms.argmin())]
    pairs = [
        (_with_share(bins[slow], adapter, -part), _with_share(bins[fast], adapter, part)) for part in _PARTS
    ] if slow != fast else []  # fmt: skip
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not pairs:
        return False
    tried = [item for pair in pairs for item in pair if item is not None]
    after = problem.evaluator.evaluate(problem.workload, tried)
    slower_ms = np.nan_to_num(after.mean_ttft_ms, nan=np.inf).reshape(-1, 2).max(axis=1)
    slower_ms[~problem.objective.holds(after).reshape(-1, 2).all(axis=1)] = np.inf
    best = int(slower_ms.argmin())
    if slower_ms[best] > _FASTER * ttft_ms.max():
        return False
    bins[slow], bins[fast] = tried[2 * best], tried[2 * best + 1]
    return True


def _with_share(item: Bin, adapter: int, change: float) -> Bin | None:
    """The bin with a larger or smaller share of an adapter; None if the share would not be that of a replica."""
    shares = dict(zip(item.adapters, item.shares, strict=True))
    shares[adapter] += change
    if not _LEAST <= shares[adapter] < 1.0:
        return None
    return replace(item, shares=tuple(shares.values()))


def filled(others: FloatArray) -> FloatArray:
    """Shares, sum 1, each at least `_LEAST` (see there), that raise the loads of the servers to one level.

    Water-filling: the fewest least loaded servers whose missing load adds up to 1 reach the level.
    `others`: load of each server without the adapter, in units of the adapter's load, float64 (n,).
    """
    least = min(_LEAST, 0.9 / len(others))
    free = 1.0 - least * len(others)
    order = np.sort(others)
    levels = (free + np.cumsum(order)) / np.arange(1, len(order) + 1)
    # With the k least loaded servers at one level, that level must be above the load of each of them.
    level = levels[np.flatnonzero(levels > order)[-1]]
    parts: FloatArray = np.maximum(0.0, level - others) + least
    parts /= parts.sum()
    return parts
