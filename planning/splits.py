"""Even splits of a fleet over servers with mixed ranks: in load or in engine time, also after the loss of any one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace

import numpy as np

from packer.arrays import FloatArray, IntArray, distinct
from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.profile import Profile
from packer.solvers.backbone import engine_s
from packer.solvers.candidates import max_loras_candidates
from packer.solvers.order import exchanged, levelled
from packer.workload import Workload

SLOTS = 48  # Initial number of slots of each server.
EVENER = 0.005  # After a split that failed, one is tried if its fullest server has less load by this share.
STEPS = 200  # Number of moves and exchanges of adapters that are tried for servers that are even after a loss.


def even_splits(fleet: Workload, profile: Profile, n: int, slots: int = SLOTS) -> Iterator[list[Bin]]:
    """Yield even splits of the fleet over `n` servers of at most `slots` slots; none for fewer adapters than servers.
    Adapters by decreasing load in serpentine order; each to the least loaded server; by rank, then load, in serpentine
    order; finally, if more even by `EVENER`, the first split improved by exchanges."""
    if len(fleet) < n:
        return
    loads = fleet.offered_tok_s_by_adapter
    falling = np.argsort(-loads, kind="stable")
    found = [dealt(falling, n), levelled(falling, loads, n), dealt(np.lexsort((-loads, -fleet.ranks)), n)]
    least = min(_fullest(parts, loads) for parts in found)
    # Exchanges only help if the fullest server is clearly above the mean, which no split goes below.
    if least * (1.0 - EVENER) > loads.sum() / n:
        evener = exchanged(found[0], loads)
        found += [evener] if _fullest(evener, loads) < (1.0 - EVENER) * least else []
    for parts in found:
        if all(parts):
            yield [server_of(fleet, profile, part, slots) for part in parts]


def most_even(fleet: Workload, profile: Profile, n: int, slots: int) -> list[Bin] | None:
    """The even split whose fullest server has the least load; None for fewer adapters than servers."""
    loads = fleet.offered_tok_s_by_adapter
    splits = even_splits(fleet, profile, n, slots)
    return min(splits, key=lambda bins: _fullest([item.adapters for item in bins], loads), default=None)


def even_in_time(fleet: Workload, profile: Profile, n: int, spare: int, seed: int) -> Iterator[list[Bin]]:
    """Yield a split over `n` servers of one slot, none for fewer adapters or one server, that need about the same
    engine time, with `spare` after the loss of any one. Without, none for equal lengths, where time goes with load."""
    if not 1 < n <= len(fleet) or not (spare or len({(a.input_tokens, a.output_tokens) for a in fleet.adapters}) > 1):
        return
    work_s = engine_s(fleet)(profile).max(axis=0)
    parts = levelled(np.argsort(-work_s, kind="stable"), work_s, n)
    parts = _after_loss(parts, work_s, fleet.offered_tok_s_by_adapter, seed) if spare else exchanged(parts, work_s)
    if all(parts):
        yield [server_of(fleet, profile, part, 1) for part in parts]


def _after_loss(parts: list[list[int]], work_s: FloatArray, loads: FloatArray, seed: int) -> list[list[int]]:
    """Even out the times after the loss of any one part, each of whose adapters goes to the part with the least load
    (`packer.failover`): random moves and exchanges of adapters, unless the fullest part then needs more time."""
    n, rng, falling = len(parts), np.random.default_rng(seed), np.argsort(-loads, kind="stable")

    def most_s(servers: IntArray) -> float:
        totals, whole_s, worst = np.bincount(servers, loads, n).tolist(), np.bincount(servers, work_s, n), 0.0
        for lost in range(n):
            used, left = whole_s.copy(), [(totals[k], k) for k in range(n) if k != lost]
            used[lost] = 0.0
            heapify(left)
            for i in falling[servers[falling] == lost].tolist():
                tok_s, k = left[0]
                heapreplace(left, (tok_s + loads[i], k))
                used[k] += work_s[i]
            worst = max(worst, float(used.max()))
        return worst

    here = np.repeat(np.arange(n), [len(part) for part in parts])[np.argsort(np.concatenate(parts))]
    least = most_s(here)
    for _ in range(STEPS):
        then, (i, j), to = here.copy(), rng.integers(len(here), size=2), rng.integers(2 * n)
        then[i], then[j] = (to, here[j]) if to < n else (here[j], here[i])
        if len(distinct(then)) == n and (most := most_s(then)) <= least:
            here, least = then, most
    return [np.flatnonzero(here == k).tolist() for k in range(n)]


def _fullest(parts: Sequence[Sequence[int]], loads: FloatArray) -> float:
    """Load of the fullest part."""
    return max(float(loads[list(part)].sum()) for part in parts)


def server_of(fleet: Workload, profile: Profile, part: Sequence[int], slots: int) -> Bin:
    """A server of these adapters with at most `slots` slots."""
    rank = slot_rank_for(int(fleet.ranks[list(part)].max()))
    most = max_loras_candidates(len(part), profile, rank)[-1]
    return Bin(tuple(part), profile.settings(min(slots, most), rank), profile)


def dealt(order: IntArray, n: int) -> list[list[int]]:
    """Deal a list to `n` parts in serpentine order: 0 … n − 1, n − 1 … 0, …"""
    place = np.arange(len(order)) % (2 * n)
    place = np.minimum(place, 2 * n - 1 - place)
    return [order[place == k].tolist() for k in range(n)]
