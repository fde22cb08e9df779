"""Even splits of a fleet over servers, ranks mixed: every server gets about the same load, adapters and ranks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.profile import Profile
from packer.solvers.candidates import max_loras_candidates
from packer.workload import Workload

SLOTS = 48
"""Slots of the servers at first."""


def even_splits(fleet: Workload, profile: Profile, n: int, slots: int = SLOTS) -> Iterator[list[Bin]]:
    """The fleet on `n` servers of at most so many slots, in several ways; nothing for fewer adapters than servers.

    Adapters by falling load dealt in turns, there and back; each to the least loaded server; by rank and load in turns.
    """
    if len(fleet) < n:
        return
    loads = fleet.offered_tok_s_by_adapter
    falling = np.argsort(-loads, kind="stable")
    for parts in (_dealt(falling, n), _levelled(falling, loads.tolist(), n), _dealt(_by_rank(fleet), n)):
        if all(parts):
            yield [_server(fleet, profile, part, slots) for part in parts]


def _server(fleet: Workload, profile: Profile, part: Sequence[int], slots: int) -> Bin:
    rank = slot_rank_for(int(fleet.ranks[list(part)].max()))
    most = max_loras_candidates(len(part), profile, rank)[-1]
    return Bin(tuple(part), profile.settings(min(slots, most), rank), profile)


def _by_rank(fleet: Workload) -> IntArray:
    return np.lexsort((-fleet.offered_tok_s_by_adapter, -fleet.ranks))


def _dealt(order: IntArray, n: int) -> list[list[int]]:
    """In turns there and back: 0 … n − 1, n − 1 … 0, …"""
    place = np.arange(len(order)) % (2 * n)
    place = np.minimum(place, 2 * n - 1 - place)
    return [order[place == k].tolist() for k in range(n)]


def _levelled(order: IntArray, loads: Sequence[float], n: int) -> list[list[int]]:
    """Each to the least loaded server."""
    heap = [(0.0, k) for k in range(n)]
    parts: list[list[int]] = [[] for _ in heap]
    for i in order.tolist():
        total, k = heap[0]
        parts[k].append(i)
        heapq.heapreplace(heap, (total + loads[i], k))
    return parts
