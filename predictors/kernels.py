"""Walk flattened trees, compiled by Numba.

A tree is a run of nodes: `feature`, `threshold`, `left`; the right child follows the left one. A leaf points
at itself and tests the column behind the last feature, which holds −∞, so that it is never left; its
`threshold` is its value. Thus every row takes the same number of steps through a tree, without a branch.
Indices are unsigned, so that the kernel need not test whether they count from the end, which takes half of its time.
`tests/oracles/naive_predictors.py` is the slow reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from packer.arrays import Float32Array, FloatArray
from packer.twin.flags import CALLED, FLAGS

if TYPE_CHECKING:
    from packer.predictors.ensemble import Ensemble

BLOCK = 128
STRIDE = np.uint32(BLOCK)


@njit(**FLAGS)
def walk_rows(x: Float32Array, trees: Ensemble, first: int, last: int, out: FloatArray) -> None:
    """Add the leaves of the trees first … last − 1 to `out` float64 (n,). x: float32 (n, F)."""
    feature, threshold, left, roots, depths, _starts, _bias = trees
    n, width = x.shape
    columns = np.empty((width + 1) * BLOCK, dtype=np.float32)
    columns[width * BLOCK :] = -np.inf
    node = np.empty(BLOCK, dtype=np.uint32)
    for start in range(0, n, BLOCK):
        rows = min(BLOCK, n - start)
        for i in range(rows):
            for f in range(width):
                columns[f * BLOCK + i] = x[start + i, f]
        for t in range(first, last):
            node[:] = roots[t]
            for _ in range(depths[t]):
                for i in range(rows):
                    at = node[i]
                    node[i] = left[at] + (columns[feature[at] * STRIDE + np.uint32(i)] > threshold[at])
            for i in range(rows):
                out[start + i] += threshold[node[i]]


@njit(**CALLED)
def walk_one(x: Float32Array, trees: Ensemble, first: int, last: int) -> float:
    """Sum of the leaves of the trees first … last − 1 for one feature row x float32 (F + 1,), its last −∞."""
    feature, threshold, left, roots, depths, _starts, _bias = trees
    total = 0.0
    t = first
    while t + 4 <= last:  # four at a time: their memory accesses overlap
        a, b, c, d = roots[t], roots[t + 1], roots[t + 2], roots[t + 3]
        deepest = max(max(depths[t], depths[t + 1]), max(depths[t + 2], depths[t + 3]))
        for _ in range(deepest):
            a = left[a] + (x[feature[a]] > threshold[a])
            b = left[b] + (x[feature[b]] > threshold[b])
            c = left[c] + (x[feature[c]] > threshold[c])
            d = left[d] + (x[feature[d]] > threshold[d])
        total = total + threshold[a] + threshold[b] + threshold[c] + threshold[d]
        t += 4
    while t < last:
        a = roots[t]
        for _ in range(depths[t]):
            a = left[a] + (x[feature[a]] > threshold[a])
        total += threshold[a]
        t += 1
    return total
