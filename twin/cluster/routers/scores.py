"""The compiled routers: score functions by number, and the choice of the smallest score."""

from __future__ import annotations

import math

from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.cluster.routers import (
    affinity, first_fit, matching_score, most_idle, predicted, punica, rank_aware,
)  # fmt: skip
from packer.twin.cluster.routers.base import HOLD
from packer.twin.cluster.state import Servers
from packer.twin.flags import ENGINE_FLAGS

_NAMES = ("most-idle", "first-fit", "punica", "affinity", "matching-score", "predicted", "rank-aware")
NUMBERS = {name: k for k, name in enumerate(_NAMES)}
"""Number of each score function, by the router's name."""

_most_idle, _first_fit, _punica = most_idle.score, first_fit.score, punica.score
_affinity, _matching_score = affinity.score, matching_score.score
_predicted, _rank_aware = predicted.score, rank_aware.score


@njit(forceinline=True, **ENGINE_FLAGS)
def score(rule: int, c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Score of server `s` for request `r`."""
    if rule == 0:
        return float(_most_idle(c, p, s, r))
    if rule == 1:
        return float(_first_fit(c, p, s, r))
    if rule == 2:
        return float(_punica(c, p, s, r))
    if rule == 3:
        return float(_affinity(c, p, s, r))
    if rule == 4:
        return float(_matching_score(c, p, s, r))
    if rule == 5:
        return float(_predicted(c, p, s, r))
    return float(_rank_aware(c, p, s, r))


@njit(**ENGINE_FLAGS)
def choose(
    rule: int, c: Servers, p: FloatArray, group: IntArray, start: IntArray, server: IntArray, r: int
) -> int:
    """The candidate with the smallest score, the next in turn among equal ones; HOLD if all are infinite."""
    g = group[c.adapter[r]]
    first, last = start[g], start[g + 1]
    j = first + r % (last - first)
    best, lowest = HOLD, math.inf
    for _ in range(last - first):
        value = score(rule, c, p, server[j], r)
        if value < lowest:
            best, lowest = server[j], value
        j = j + 1 if j + 1 < last else first
    return best
