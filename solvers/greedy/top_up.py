"""Best fit: add further adapters to a GPU that the next adapter in the queue does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin, indices
from packer.predictors.bin_table import SLOT_RANK_FOR, BinTable, ones
from packer.solvers.greedy.largest import largest
from packer.solvers.slots import SlotSearch, most_slots

_ROUNDS = 4


def top_up(slots: SlotSearch, bin_: Bin, rest: IntArray) -> Bin:
    """Add adapters of `rest` (by falling load) to the bin: the heaviest adapter that fits, repeatedly. The bin gets
    more slots only if each adapter had its own. Bisection finds what fits: if an adapter fits, lighter ones are taken
    to fit too; equal adapters either all fit or don't."""
    fleet, tried = slots.problem.workload, 0
    for _ in range(_ROUNDS):
        loads, ranks = fleet.offered_tok_s_by_adapter[rest], fleet.ranks[rest]
        other = (loads[1:] != loads[:-1]) | (ranks[1:] != ranks[:-1])
        kinds = np.concatenate(((0,), np.flatnonzero(other) + 1))[tried:] if rest.size else rest
        first = _first_fitting(slots, bin_, rest[kinds])
        if first is None:
            return bin_
        rest = rest[kinds[first] :]
        more = _fitting(slots, bin_, rest)
        held, shares = [*bin_.adapters, *rest[:more].tolist()], (*bin_.shares, *(1.0,) * more)
        bin_ = slots.make(held, min(most_slots(bin_), len(held)), bin_.profile, shares if bin_.is_split else ())
        rest, tried = rest[more:], 1  # the first of what is left does not fit
        if slots.problem.out_of_time():
            return bin_
    return bin_


def _first_fitting(slots: SlotSearch, bin_: Bin, kinds: IntArray) -> int | None:
    """Position of the heaviest adapter that fits, in a list sorted by falling load; None if none fits."""
    size = len(bin_.adapters) + 1
    if size > slots.problem.most_adapters:
        return None

    def fits(lightest: Sequence[int]) -> list[bool]:
        held = np.empty((len(lightest), size), dtype=np.int64)
        held[:, :-1] = indices(bin_.adapters)
        held[:, -1] = kinds[-np.array(lightest)]
        end = np.arange(size, held.size + 1, size)
        shares = np.tile((*bin_.shares, 1.0), len(lightest)) if bin_.is_split else ones(held.size)
        max_loras = np.full(len(end), min(most_slots(bin_), size), dtype=np.float64)
        ranks = SLOT_RANK_FOR[slots.problem.workload.ranks[held].max(axis=1)]
        return slots.holds(BinTable(bin_.profile, end - size, end, held.ravel(), shares, max_loras, ranks))

    # Start with the heaviest, or if evaluations take long with the lightest: most often nothing fits.
    guess, step = (len(kinds), len(kinds) // 8) if slots.batch > 1 else (1, len(kinds) // 2)
    n = largest(fits, guess, len(kinds), slots.problem.out_of_time, max(1, step), batch=slots.batch)
    return len(kinds) - n if n else None


def _fitting(slots: SlotSearch, bin_: Bin, rest: IntArray) -> int:
    """How many of the first adapters of the list fit; the first one is known to fit."""
    held = indices(bin_.adapters)

    def fits(more: Sequence[int]) -> list[bool]:
        sizes = [len(held) + n for n in more]
        max_loras = [min(most_slots(bin_), n) for n in sizes]
        shares = np.array((*bin_.shares, *(1.0,) * more[-1])) if bin_.is_split else None
        adapters = np.concatenate((held, rest[: more[-1]]))
        return slots.holds(slots.first(adapters, sizes, max_loras, bin_.profile, shares))

    limit = min(len(rest), slots.problem.most_adapters - len(held))
    return largest(fits, 2, limit, slots.problem.out_of_time, low=1, batch=slots.batch)
