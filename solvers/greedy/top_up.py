"""Best fit: what else still fits a GPU that is closed for the next adapter in the queue."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.solvers.greedy.largest import largest
from packer.solvers.slots import SlotSearch

_ROUNDS = 4


def top_up(slots: SlotSearch, bin_: Bin, rest: IntArray) -> Bin:
    """The bin with adapters of `rest` (by falling load) added: the heaviest that fits, again and again.

    What fits is found by bisection: if an adapter fits, a lighter one does.
    """
    for _ in range(_ROUNDS):
        first = _first_fitting(slots, bin_, rest)
        if first is None:
            return bin_
        rest = rest[first:]
        grown = _grow(slots, bin_, rest)
        bin_, rest = grown, rest[len(grown.adapters) - len(bin_.adapters) :]
        if not rest.size or slots.problem.out_of_time():
            return bin_
    return bin_


def _with(slots: SlotSearch, bin_: Bin, more: Sequence[int]) -> Bin | None:
    """The bin with more adapters, and more slots only if each had its own; None if that is too much."""
    adapters = [*bin_.adapters, *more]
    if len(adapters) > slots.problem.most_adapters:
        return None
    shares = (*bin_.shares, *[1.0] * len(more)) if bin_.is_split else ()
    most = len(adapters) if bin_.max_loras == len(bin_.adapters) else bin_.max_loras
    candidate = slots.make(adapters, most, bin_.profile, shares)
    return candidate if slots.admits(candidate) else None


def _first_fitting(slots: SlotSearch, bin_: Bin, rest: IntArray) -> int | None:
    """Position of the heaviest single adapter that fits, in a list sorted by falling load.

    Adapters of one kind fit or don't fit together: the first of each is evaluated.
    """
    fleet = slots.problem.workload
    new = np.diff(fleet.offered_tok_s_by_adapter[rest], prepend=np.nan) != 0.0
    starts = np.flatnonzero(new | (np.diff(fleet.ranks[rest], prepend=0) != 0)).tolist()

    def fits(start: int) -> bool:
        return _with(slots, bin_, [int(rest[start])]) is not None

    return starts[bisect_left(starts, True, hi=len(starts) - 1, key=fits)] if fits(starts[-1]) else None


def _grow(slots: SlotSearch, bin_: Bin, rest: IntArray) -> Bin:
    """The bin with as many of the first adapters of the list as fit."""
    room = min(len(rest), slots.problem.most_adapters - len(bin_.adapters))

    def feasible(n: int, _thorough: bool) -> Bin | None:
        return _with(slots, bin_, rest[:n].tolist())

    return largest(feasible, 1, room, slots.problem.out_of_time) or bin_
