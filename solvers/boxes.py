"""Adapters of near rates and lengths in few groups: a fleet is cut in two again and again where that helps most."""

from __future__ import annotations

import heapq

import numpy as np

from packer.arrays import BoolArray, FloatArray, IntArray
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
    if (points == points[0]).all():
        return 0.0
    loads = points[:, :1] * points[:, 1:]
    mean = np.add.reduce(loads) / len(loads)  # as loads.mean(axis=0), in a third of the time
    return max(float(np.abs(loads - mean).sum()), 1e-12)


def _cut(points: FloatArray, group: IntArray) -> tuple[IntArray, IntArray]:
    """The two parts of a group of unequal adapters whose rounding adds up to the least."""
    own = points[group]
    halves: list[BoolArray] = []
    for column in own.T:
        values = np.unique(column)
        places = np.unique(np.linspace(1, len(values) - 1, min(_CUTS, len(values) - 1)).astype(np.int64))
        halves += [column < values[place] for place in places.tolist() if len(values) > 1]
    assert halves, "a group of unequal adapters can be cut"
    best = min(halves, key=lambda below: _rounding(own[below]) + _rounding(own[~below]))
    return group[best], group[~best]
