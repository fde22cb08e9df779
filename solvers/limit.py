"""A plan that ignored the number of GPUs, cut down to it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.solvers.base import Problem, Solution
from packer.solvers.reasons import out_of_gpus
from packer.workload import Workload


def within_limit(problem: Problem, found: Solution) -> Solution:
    """At most `max_gpus` bins, those with the most load; the rest is unplaced.

    An adapter is served whole or not at all: one that loses a share leaves every GPU, which may spare so many
    that others can stay.
    """
    limit = problem.max_gpus
    if limit is None or len(found.bins) <= limit:
        return found
    bins = found.bins
    gone: set[int] = set()
    while len(bins) > limit:
        kept, dropped = _heaviest(problem.workload, bins, limit)
        lost = {i for bin_ in dropped for i in bin_.adapters}
        torn = {i for bin_ in kept for i in bin_.adapters} & lost
        gone |= torn or lost
        bins = without(problem.workload, bins, torn) if torn else kept
    left = sorted(gone)
    needed = None if found.unplaced else len(found.bins)
    reasons = (*found.reasons, *out_of_gpus(problem, left, needed))
    return replace(found, bins=bins, unplaced=tuple(sorted({*found.unplaced, *left})), reasons=reasons)


def _heaviest(workload: Workload, bins: Sequence[Bin], limit: int) -> tuple[tuple[Bin, ...], tuple[Bin, ...]]:
    """The `limit` bins with the most load, in their order, and the others."""
    loads = np.array([bin_.offered_tok_s(workload) for bin_ in bins])
    heavy = set(np.argsort(-loads, kind="stable")[:limit].tolist())
    kept = tuple(bin_ for k, bin_ in enumerate(bins) if k in heavy)
    return kept, tuple(bin_ for k, bin_ in enumerate(bins) if k not in heavy)


def without(workload: Workload, bins: Sequence[Bin], gone: Container[int]) -> tuple[Bin, ...]:
    """The bins without these adapters; those that hold no other are left out."""
    stripped = (_stripped(workload, bin_, gone) for bin_ in bins)
    return tuple(bin_ for bin_ in stripped if bin_ is not None)


def _stripped(workload: Workload, bin_: Bin, gone: Container[int]) -> Bin | None:
    """The bin without these adapters, None if nothing is left; its slots are no more and no larger than needed.

    Slots beyond the adapters stay if there were such before: somebody wanted them.
    """
    places = [k for k, i in enumerate(bin_.adapters) if i not in gone]
    if len(places) == len(bin_.adapters):
        return bin_
    if not places:
        return None
    adapters = tuple(bin_.adapters[k] for k in places)
    spare = bin_.max_loras > len(bin_.adapters)
    settings = bin_.profile.settings(
        bin_.max_loras if spare else min(bin_.max_loras, len(adapters)),
        slot_rank_for(int(workload.ranks[list(adapters)].max())),
    )
    return Bin(adapters, settings, bin_.profile, tuple(bin_.shares[k] for k in places))
