"""Quantiles of groups of values without sorting them."""

from __future__ import annotations

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def select(values: FloatArray, sizes: IntArray, share: float, found: FloatArray) -> None:
    """Put the quantile of each group into `found`, interpolated as `numpy.quantile` does; empty groups are left out.

    `values` (n,): values of one group after the other, which are reordered in place. `sizes`: sizes of the groups. C.
    A. R. Hoare's selection: the range with the position of the quantile shrinks until its values are equal.
    """
    start = 0
    for group in range(len(sizes)):
        end = start + sizes[group]
        if end > start:
            place = share * (sizes[group] - 1)
            k = start + int(place)
            first, last = start, end - 1
            while first < last:
                pivot = values[(first + last) >> 1]
                i, j = first, last
                while i <= j:
                    while values[i] < pivot:
                        i += 1
                    while pivot < values[j]:
                        j -= 1
                    if i <= j:
                        values[i], values[j] = values[j], values[i]
                        i += 1
                        j -= 1
                # All values between positions j and i equal the pivot: if k is there, its value is found.
                if k <= j:
                    last = j
                elif k >= i:
                    first = i
                else:
                    break
            below = values[k]
            above = below
            if k + 1 < end:
                above = values[k + 1]
                for i in range(k + 2, end):
                    above = min(above, values[i])
            found[group] = below + (place - int(place)) * (above - below)
        start = end


def by_group(values: FloatArray, groups: IntArray, sizes: IntArray, share: float) -> FloatArray:
    """Return the quantile of the values of each group, float64 (m,); NaN for empty groups. `groups` (n,): group of each
    value, from 0. `sizes` (m,): number of values of each group."""
    found = np.full(len(sizes), np.nan)
    short = groups.astype(np.min_scalar_type(len(sizes)))  # NumPy sorts 16 bits by radix
    select(values[np.argsort(short, kind="stable")], sizes, share, found)
    return found
