"""Router "affinity": servers that hold the adapter first."""

from __future__ import annotations

from dataclasses import dataclass

from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.state import Servers, on_gpu, outstanding
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def _score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Its requests, and the slack if the adapter must be loaded."""
    requests = float(outstanding(c, s))
    return requests if on_gpu(c, s, c.adapter[r]) else requests + p[0]


@dataclass(frozen=True)
class Affinity(ScoringRouter):
    """The most idle server, where an adapter that lies on the GPU is worth `slack` requests."""

    name = "affinity"
    score = staticmethod(_score)
    slack: float = 4.0
