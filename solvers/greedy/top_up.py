"""Best fit: what else still fits a GPU that is closed for the next adapter in the queue."""

from __future__ import annotations

from collections.abc import Sequence

from packer.bin import Bin
from packer.solvers.candidates import MAX_ADAPTERS_PER_GPU
from packer.solvers.greedy.largest import largest
from packer.solvers.slots import SlotSearch

_ROUNDS = 4


def top_up(slots: SlotSearch, bin_: Bin, queue: Sequence[int]) -> Bin:
    """The bin with adapters from the queue added: the heaviest that fits, again and again.

    What fits is found by bisection over the queue sorted by load: if an adapter fits, a lighter one does.
    """
    loads = slots.problem.workload.offered_tok_s_by_adapter
    if min(loads[i] for i in queue) >= loads[queue[0]]:
        return bin_  # the queue's head did not fit, and nothing is lighter
    rest = sorted(queue, key=lambda i: (-loads[i], i))
    for _ in range(_ROUNDS):
        first = _first_fitting(slots, bin_, rest)
        if first is None:
            return bin_
        rest = rest[first:]
        grown = _grow(slots, bin_, rest)
        bin_, rest = grown, rest[len(grown.adapters) - len(bin_.adapters) :]
        if not rest or slots.problem.out_of_time():
            return bin_
    return bin_


def _with(slots: SlotSearch, bin_: Bin, more: Sequence[int]) -> Bin | None:
    """The bin with more adapters, and more slots only if each had its own; None if that is too much."""
    adapters = [*bin_.adapters, *more]
    if len(adapters) > MAX_ADAPTERS_PER_GPU:
        return None
    shares = (*bin_.shares, *[1.0] * len(more))
    most = len(adapters) if bin_.max_loras == len(bin_.adapters) else bin_.max_loras
    candidate = slots.make(adapters, most, bin_.profile, shares)
    return candidate if slots.admissible([candidate])[0] else None


def _first_fitting(slots: SlotSearch, bin_: Bin, rest: Sequence[int]) -> int | None:
    """Position of the heaviest single adapter that fits, in a list sorted by falling load."""
    low, high = 0, len(rest) - 1
    if _with(slots, bin_, rest[high:]) is None:
        return None
    while low < high:
        middle = (low + high) // 2
        if _with(slots, bin_, rest[middle : middle + 1]) is not None:
            high = middle
        else:
            low = middle + 1
    return high


def _grow(slots: SlotSearch, bin_: Bin, rest: Sequence[int]) -> Bin:
    """The bin with as many of the first adapters of the list as fit."""

    def feasible(n: int, _thorough: bool) -> Bin | None:
        return _with(slots, bin_, rest[:n])

    return largest(feasible, 1, len(rest), slots.problem.out_of_time) or bin_
