"""What a number of servers can cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_MOST_SUMS = 20_000


def next_sum(value: float, prices: Sequence[float]) -> float:
    """The smallest sum of prices, each taken any number of times, that is at least `value`, to six digits."""
    whole = sorted({round(price * 1e6) for price in prices if price > 0.0})
    if not whole:
        return value
    unit = math.gcd(*whole)
    target = math.ceil(value * 1e6 / unit)
    if target <= 0:
        return 0.0
    if target > _MOST_SUMS:
        return value
    steps = [price // unit for price in whole]
    reached = np.zeros(target + max(steps) + 1, dtype=bool)
    reached[0] = True
    for step in steps:
        for k in range(step, len(reached)):
            reached[k] |= reached[k - step]
    return float(np.flatnonzero(reached[target:])[0] + target) * unit / 1e6
