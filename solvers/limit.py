"""Cut a plan that ignored the number of GPUs down to that number."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.solvers.base import Problem, Solution
from packer.solvers.reasons import out_of_gpus
from packer.workload import Workload


def within_limit(problem: Problem, found: Solution, *, servers: bool | None = None) -> Solution:
    """Keep the servers with the most load within `max_gpus` and the stock; adapters of others become unplaced.

    An adapter is served whole or not at all: an adapter that loses a share leaves every GPU, which may free GPUs for
    other servers. A solution that is cut has no `moves`: it does not continue the running plan.

    `servers`: whether `max_gpus` counts servers, of one or several GPUs each; None: with a `fixed_gpus` objective.
    """
    each = problem.objective.fixed_gpus if servers is None else servers
    bins, gone = found.bins, set[int]()
    while len(kept := _heaviest(problem, bins, each)) < len(bins):
        lost = {i for k, bin_ in enumerate(bins) if k not in kept for i in bin_.adapters}
        torn = {i for k in kept for i in bins[k].adapters} & lost
        gone |= torn or lost
        bins = without(problem.workload, bins, torn) if torn else tuple(bins[k] for k in kept)
    if not gone:
        return found
    left = sorted(gone)
    needed = None if found.unplaced else sum(bin_.gpus for bin_ in found.bins)
    reasons = (*found.reasons, *out_of_gpus(problem, left, needed))
    unplaced = tuple(sorted({*found.unplaced, *left}))
    return replace(found, bins=bins, unplaced=unplaced, reasons=reasons, moves=None)


def _heaviest(problem: Problem, bins: Sequence[Bin], servers: bool) -> list[int]:
    """Indices, ascending, of the servers with the most load that `max_gpus` GPUs hold; `servers`: it counts these."""
    total = math.inf if problem.max_gpus is None else problem.max_gpus
    at_hand = dict(problem.stock)
    loads = np.array([bin_.offered_tok_s(problem.workload) for bin_ in bins])
    kept = []
    for k in np.argsort(-loads, kind="stable").tolist():
        gpu, size = bins[k].profile.gpu.name, 1 if servers else bins[k].gpus
        if size <= total and bins[k].gpus <= at_hand.get(gpu, math.inf):
            kept.append(k)
            total -= size
            if gpu in at_hand:
                at_hand[gpu] -= bins[k].gpus
    return sorted(kept)


def without(workload: Workload, bins: Sequence[Bin], gone: Container[int]) -> tuple[Bin, ...]:
    """The bins without the adapters in `gone`; empty ones are left out. A changed bin gets the smallest slot rank that
    it needs, and no more slots than adapters; one that had more slots than adapters keeps their number."""
    kept = []
    for bin_ in bins:
        left = bin_.renumbered({i: i for i in bin_.adapters if i not in gone})
        if left is not None and left != bin_:
            slots = left.max_loras
            if slots <= len(bin_.adapters):
                slots = min(slots, len(left.adapters))
            rank = slot_rank_for(int(workload.ranks[list(left.adapters)].max()))
            left = replace(left, settings=left.profile.settings(slots, rank))
        kept += [left] if left is not None else []
    return tuple(kept)
