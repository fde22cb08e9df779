"""Best fit: what else still fits a GPU that is closed for the next adapter in the queue."""

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
    """The bin with adapters of `rest` (by falling load) added: the heaviest that fits, again and again.

    It gets more slots only if each adapter had its own. What fits is found by bisection: if an adapter fits, a lighter
    one does.
    """
    for _ in range(_ROUNDS):
        room = slots.problem.most_adapters - len(bin_.adapters)
        first = _first_fitting(slots, bin_, rest) if room > 0 else None
        if first is None:
            return bin_
        more = _fitting(slots, bin_, rest[first:], room)
        held = [*bin_.adapters, *rest[first : first + more].tolist()]
        shares = (*bin_.shares, *(1.0,) * more) if bin_.is_split else ()
        bin_ = slots.make(held, min(most_slots(bin_), len(held)), bin_.profile, shares)
        rest = rest[first + more :]
        if not rest.size or slots.problem.out_of_time():
            return bin_
    return bin_


def _first_fitting(slots: SlotSearch, bin_: Bin, rest: IntArray) -> int | None:
    """Position of the heaviest single adapter that fits, in a list sorted by falling load.

    Adapters of one kind fit or don't fit together: the first of each is evaluated.
    """
    fleet, over = slots.problem.workload, slots.problem.out_of_time
    new = np.diff(fleet.offered_tok_s_by_adapter[rest], prepend=np.nan) != 0.0
    starts = np.flatnonzero(new | (np.diff(fleet.ranks[rest], prepend=0) != 0))[::-1]
    size = len(bin_.adapters) + 1

    def admits(lightest: Sequence[int]) -> list[bool]:
        held = np.empty((len(lightest), size), dtype=np.int64)
        held[:, :-1] = indices(bin_.adapters)
        held[:, -1] = rest[starts[np.array(lightest) - 1]]
        end = np.arange(size, held.size + 1, size)
        shares = np.tile((*bin_.shares, 1.0), len(lightest)) if bin_.is_split else ones(held.size)
        max_loras = np.full(len(end), min(most_slots(bin_), size), dtype=np.float64)
        ranks = SLOT_RANK_FOR[fleet.ranks[held].max(axis=1)]
        return slots.admits(BinTable(bin_.profile, end - size, end, held.ravel(), shares, max_loras, ranks))

    n = largest(admits, 1, len(starts), over, max(1, len(starts) // 2), batch=slots.batch)
    return int(starts[n - 1]) if n else None


def _fitting(slots: SlotSearch, bin_: Bin, rest: IntArray, room: int) -> int:
    """How many of the first adapters of the list fit, of which the first does."""
    held = indices(bin_.adapters)

    def admits(more: Sequence[int]) -> list[bool]:
        last, sizes = more[-1], [len(held) + n for n in more]
        max_loras = [min(most_slots(bin_), n) for n in sizes]
        shares = np.array((*bin_.shares, *(1.0,) * last)) if bin_.is_split else None
        adapters = np.concatenate((held, rest[:last]))
        return slots.admits(slots.first(adapters, sizes, max_loras, bin_.profile, shares))

    return largest(admits, 2, min(len(rest), room), slots.problem.out_of_time, low=1, batch=slots.batch)
