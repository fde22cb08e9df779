"""Router "most-idle": the server with the fewest requests."""

from __future__ import annotations

from dataclasses import dataclass

from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.state import Servers, outstanding
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def _score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Requests on the server."""
    return float(outstanding(c, s))


@dataclass(frozen=True)
class MostIdle(ScoringRouter):
    """Fewest running and waiting requests (CaraServe's MostIdle, whose measure the paper does not give)."""

    name = "most-idle"
    score = staticmethod(_score)
