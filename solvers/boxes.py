"""Adapters of near rates and lengths in few groups: a fleet is cut in two again and again where that helps most."""

from __future__ import annotations

import heapq

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.workload import Workload

_CUTS = 8
"""Places at which a cut is tried in each dimension."""


def boxes(workload: Workload, limit: int) -> list[list[int]]:
    """At most `limit` groups of adapters of equal rank (one for each rank if there are more ranks).

    A group stands for its mean load. The group that is rounded most is cut next, in the dimension (rate, input or
    output tokens) and at the place where the rounding falls most. Each group has its highest rate first.
    """
    points = np.stack([workload.rates, workload.mean_input_tokens, workload.mean_output_tokens], axis=1)
    heap: list[tuple[float, int, IntArray]] = []
    for k, rank in enumerate(np.unique(workload.ranks).tolist()):
        group = np.flatnonzero(workload.ranks == rank)
        heap.append((-_rounding(points[group]), k, group))
    heapq.heapify(heap)
    made = len(heap)
    while len(heap) < limit and heap[0][0] < 0.0:
        _, _, group = heapq.heappop(heap)
        for part in _cut(points, group):
            heapq.heappush(heap, (-_rounding(points[part]), made, part))
            made += 1
    groups = [group.tolist() for _, _, group in sorted(heap, key=lambda item: item[1])]
    return [sorted(group, key=lambda i: (-workload.rates[i], i)) for group in groups]


def _rounding(points: FloatArray) -> float:
    """Σ |mean − own| of input and of output tok/s; 0 where all points are equal."""
    if np.all(points == points[0]):
        return 0.0
    loads = points[:, :1] * points[:, 1:]
    return max(float(np.abs(loads - loads.mean(axis=0)).sum()), 1e-12)


def _cut(points: FloatArray, group: IntArray) -> tuple[IntArray, IntArray]:
    """The two parts of a group of unequal adapters whose rounding adds up to the least."""
    best: tuple[float, IntArray, IntArray] | None = None
    for dimension in range(points.shape[1]):
        values = np.unique(points[group, dimension])
        places = np.unique(np.linspace(1, len(values) - 1, min(_CUTS, len(values) - 1)).astype(np.int64))
        for place in places.tolist() if len(values) > 1 else ():
            below = points[group, dimension] < values[place]
            parts = group[below], group[~below]
            rounding = sum(_rounding(points[part]) for part in parts)
            if best is None or rounding < best[0]:
                best = (rounding, *parts)
    assert best is not None, "a group of unequal adapters can be cut"
    return best[1], best[2]
