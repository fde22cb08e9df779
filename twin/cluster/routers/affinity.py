"""Router "affinity": servers that hold the adapter first."""

from __future__ import annotations

from dataclasses import dataclass

from numba import njit

from packer import checks
from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.routers.most_idle import fewer_requests, note_requests, requests
from packer.twin.cluster.state import Servers, on_gpu
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def _score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Its requests, and the slack if the adapter must be loaded."""
    number = requests(c, p, s, r)
    return float(number if on_gpu(c, s, c.adapter[r]) else number + p[0])


@dataclass(frozen=True)
class Affinity(ScoringRouter):
    """The most idle server, where an adapter that lies on the GPU is worth `slack` requests."""

    name = "affinity"
    kept = 1
    note, worth = staticmethod(note_requests), staticmethod(fewer_requests)
    score = staticmethod(_score)
    slack: float = 4.0

    def __post_init__(self) -> None:
        checks.real("slack", self.slack, low=0.0)
