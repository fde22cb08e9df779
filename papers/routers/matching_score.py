"""Router "matching-score": weighted points for a cached adapter and a short queue."""

from __future__ import annotations

from dataclasses import dataclass

from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.state import Servers, on_gpu, outstanding
from packer.twin.flags import INLINED


@njit(**INLINED)
def _score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Negative points. The free share is the share of the server's places for running requests that are free."""
    points: float = p[1] * (1.0 - outstanding(c, s) / c.servers[s].max_seqs)
    return -(points + p[0]) if on_gpu(c, s, c.adapter[r]) else -points


@dataclass(frozen=True)
class MatchingScore(ScoringRouter):
    """ROCK's baseline LRUMS: the highest sum of `cached`, if the adapter is on the GPU, and `queue` × free share.

    The weights are not published. The weight of the base model is left out: every server here has the base model.
    """

    name = "matching-score"
    score = staticmethod(_score)
    cached: float = 0.4
    queue: float = 0.2
