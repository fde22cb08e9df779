"""Routers of the papers with a score of a line or two: the server with the smallest gets the request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.state import Servers, has_room, on_gpu, outstanding
from packer.twin.engine.state import MAX_SEQS
from packer.twin.flags import ENGINE_FLAGS

_LATER = 1e9  # any server without room comes after all that have room


@njit(**ENGINE_FLAGS)
def _first_fit(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Number of the server; without room, its requests, after all others."""
    if has_room(c, s, r, p[0], p[1]):
        return float(s)
    return _LATER + float(outstanding(c, s))


@njit(**ENGINE_FLAGS)
def _punica(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Minus its requests; infinite without room."""
    return -float(outstanding(c, s)) if has_room(c, s, r, p[0], p[1]) else math.inf


@njit(**ENGINE_FLAGS)
def _matching(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Minus the points; the free share of a server is that of its places for running requests."""
    points: float = p[1] * (1.0 - outstanding(c, s) / c.ints[s, MAX_SEQS])
    return -(points + p[0]) if on_gpu(c, s, c.adapter[r]) else -points


@dataclass(frozen=True)
class FirstFitRouter(ScoringRouter):
    """First server with fewer than `max_batch` requests and KV cache for one more; else the most idle.

    CaraServe's FirstFit (arXiv 2401.11240, section 7.5); `max_batch` is Punica's, the paper does not give it.
    """

    name = "first-fit"
    score = staticmethod(_first_fit)
    max_batch: int = 32


@dataclass(frozen=True)
class Punica(ScoringRouter):
    """The largest batch below `max_batch` with KV cache for one more; else requests wait, first come first served.

    Source: Punica (arXiv 2310.18547), section 5.1: it leaves whole GPUs idle so that they can be released.
    """

    name = "punica"
    score = staticmethod(_punica)
    max_batch: int = 32


@dataclass(frozen=True)
class MatchingScore(ScoringRouter):
    """Baseline LRUMS of ROCK: the highest sum of `cached`, if the adapter lies on the GPU, and `queue` × free share.

    The weights are not published; every server here has the base model, whose weight therefore decides nothing.
    """

    name = "matching-score"
    score = staticmethod(_matching)
    cached: float = 0.4
    queue: float = 0.2
