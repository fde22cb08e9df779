"""Router "punica": fill the largest batch first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.state import Servers, has_room, outstanding
from packer.twin.flags import INLINED


@njit(**INLINED)
def _score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Negative number of the server's unfinished requests; infinite without room."""
    return -float(outstanding(c, s)) if has_room(c, s, r, p[0], p[1]) else math.inf


@dataclass(frozen=True)
class Punica(ScoringRouter):
    """The largest batch below `max_batch` with KV cache for one more; else requests wait, first come first served.

    Source: Punica (arXiv 2310.18547), section 5.1: it leaves whole GPUs idle so that they can be released.
    """

    name = "punica"
    score = staticmethod(_score)
    max_batch: int = 32
