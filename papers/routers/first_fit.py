"""Router "first-fit": the first server, in a fixed order, with room."""

from __future__ import annotations

from dataclasses import dataclass

from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.state import Servers, has_room, outstanding
from packer.twin.flags import INLINED

_LATER = 1e9  # any server without room comes after all that have room


@njit(**INLINED)
def _score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Number of the server if it has room; otherwise `_LATER` plus its unfinished requests."""
    if has_room(c, s, r, p[0], p[1]):
        return float(s)
    return _LATER + float(outstanding(c, s))


@dataclass(frozen=True)
class FirstFitRouter(ScoringRouter):
    """First server with fewer than `max_batch` requests and KV cache for one more; else the most idle.

    CaraServe's FirstFit (arXiv 2401.11240, section 7.5). The paper does not give `max_batch`; the value is Punica's.
    """

    name = "first-fit"
    score = staticmethod(_score)
    max_batch: int = 32
