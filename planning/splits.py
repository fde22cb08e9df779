"""Splits of a fleet over servers: even ones with ranks mixed, and such that a server gets adapters of near ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.profile import Profile
from packer.solvers.backbone import engine_load
from packer.solvers.candidates import max_loras_candidates, most_slots_of
from packer.solvers.order import exchanged, levelled
from packer.workload import Workload

SLOTS = 48
"""Slots of the servers at first."""
EVENER = 0.005
"""A split whose fullest server has less load by this share may keep limits where another one does not."""
FULL = 0.6
"""Share of its time for which the engine of a server is busy within usual latency limits."""
ROUNDS = 6
"""How often ranks are split again by what the servers used of their limits."""
GOOD = 0.85
"""Servers that use no more of their limits keep them in most other hours, too."""
HOPELESS = 1.3
"""Servers so many times as full do not keep limits."""
SETTLED, FEW = 2, 0.2
"""After so many rounds no more than this part of the servers breaks its limits, or none of the rounds ends it."""
_LEAST, _MOST = 0.75, 1.4
_GOLDEN = 0.6180339887498949
"""Multiples of it are spread evenly over [0, 1), however many (H. Weyl, 1916)."""


def even_splits(fleet: Workload, profile: Profile, n: int, slots: int = SLOTS) -> Iterator[list[Bin]]:
    """The fleet on `n` servers of at most so many slots, in several ways; nothing for fewer adapters than servers.

    Adapters by falling load dealt in turns, there and back; each to the least loaded server; by rank and load in turns;
    at last, where that is more even by `EVENER`, what exchanges make of the first.
    """
    if len(fleet) < n:
        return
    loads = fleet.offered_tok_s_by_adapter
    falling = np.argsort(-loads, kind="stable")
    by_rank = np.lexsort((-loads, -fleet.ranks))
    found = [dealt(falling, n), levelled(falling, loads, n), dealt(by_rank, n)]
    least = min(_fullest(parts, loads) for parts in found)
    if least * (1.0 - EVENER) > loads.sum() / n:
        evener = exchanged(found[0], loads)
        found += [evener] if _fullest(evener, loads) < (1.0 - EVENER) * least else []
    for parts in found:
        if all(parts):
            yield [server_of(fleet, profile, part, slots) for part in parts]


def _fullest(parts: Sequence[Sequence[int]], loads: FloatArray) -> float:
    """Load of the fullest part."""
    return max(float(loads[list(part)].sum()) for part in parts)


def split_by_rank(
    fleet: Workload,
    profile: Profile,
    n: int,
    judged: Callable[[list[Bin]], tuple[list[Bin], list[float]]],
) -> list[Bin] | None:
    """The fleet on `n` servers within their limits, adapters of near ranks on each; None if none is found.

    All slots of a server are as large as its largest rank needs: where `n` servers have no slot of the largest rank for
    each adapter, small ranks take less beside their own kind. Adapters by falling rank are cut into parts that are full
    of slots or of load, whichever comes first. What a server used of its limits corrects what its adapters are taken
    to need, and they are cut again.

    `judged`: the servers as they may be part of a plan, and how much of its limits each uses.
    """
    ranks = np.array([slot_rank_for(rank) for rank in fleet.ranks.tolist()])
    loads = fleet.offered_tok_s_by_adapter / fleet.offered_tok_s * (engine_load(fleet, profile) / FULL)
    slots = np.array([1.0 / most_slots_of(profile, rank) for rank in ranks.tolist()])
    order = np.lexsort((_mixed(loads), -ranks))
    scarce = n < len(fleet) * float(slots.max()) and ranks.min() < ranks.max()
    least, best = 1.0, None
    for number in range(ROUNDS if scarce else 0):
        parts, fullest = _cut(order, loads, slots, n)
        if fullest > HOPELESS:
            break
        bins, used = judged([server_of(fleet, profile, part.tolist(), len(part)) for part in parts])
        if max(used) <= least:
            least, best = max(used), bins
        broken = sum(each > 1.0 for each in used)
        if (
            least <= GOOD
            or float(np.median(used)) > 1.0
            or (number >= SETTLED and broken > max(1.0, FEW * n))
        ):
            break
        for part, share in zip(parts, used, strict=True):
            factor = np.clip(max(share, 1e-3) ** 0.25, _LEAST, _MOST)
            loads[part] *= factor
            slots[part] *= factor
    return best


def _mixed(loads: FloatArray) -> FloatArray:
    """A key by which every part of the order has high and low loads."""
    found: FloatArray = np.empty(len(loads))
    found[np.argsort(-loads, kind="stable")] = np.arange(len(loads)) * _GOLDEN % 1.0
    return found


def _cut(order: IntArray, loads: FloatArray, slots: FloatArray, n: int) -> tuple[list[IntArray], float]:
    """At most `n` parts of the order, the fullest of them as little full as can be, and how full that is."""
    totals = np.concatenate([[0.0], np.cumsum(loads[order])])

    def parts(most: float) -> list[IntArray]:
        found: list[IntArray] = []
        start = 0
        while start < len(order) and len(found) <= n:
            by_load = int(np.searchsorted(totals, totals[start] + most, side="right")) - 1
            end = max(start + 1, min(by_load, start + int(most / slots[order[start]] + 1e-9)))
            found.append(order[start:end])
            start = end
        return found

    low, high = 0.0, float(totals[-1]) + len(order) * float(slots.max())
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (low, middle) if len(parts(middle)) <= n else (middle, high)
    return parts(high), high


def server_of(fleet: Workload, profile: Profile, part: Sequence[int], slots: int) -> Bin:
    """A server of these adapters with at most so many slots."""
    rank = slot_rank_for(int(fleet.ranks[list(part)].max()))
    most = max_loras_candidates(len(part), profile, rank)[-1]
    return Bin(tuple(part), profile.settings(min(slots, most), rank), profile)


def dealt(order: IntArray, n: int) -> list[list[int]]:
    """In turns there and back: 0 … n − 1, n − 1 … 0, …"""
    place = np.arange(len(order)) % (2 * n)
    place = np.minimum(place, 2 * n - 1 - place)
    return [order[place == k].tolist() for k in range(n)]
