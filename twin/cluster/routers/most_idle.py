"""Router "most-idle": the server with the fewest requests."""

from __future__ import annotations

from dataclasses import dataclass

from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.state import Servers, outstanding
from packer.twin.flags import INLINED


@njit(**INLINED)
def note_requests(c: Servers, p: FloatArray, s: int) -> None:
    """Keep the number of its requests, at the end of the parameters."""
    p[p.size - c.wake_s.size + s] = outstanding(c, s)


@njit(**INLINED)
def requests(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Requests on the server, as they were kept."""
    number: float = p[p.size - c.wake_s.size + s]
    return number


@njit(**INLINED)
def fewer_requests(c: Servers, p: FloatArray, s: int, r: int, lowest: float) -> bool:
    """Whether the server has fewer requests: for scores that are no smaller than that."""
    return bool(p[p.size - c.wake_s.size + s] < lowest)


@dataclass(frozen=True)
class MostIdle(ScoringRouter):
    """Fewest running and waiting requests (CaraServe's MostIdle, whose measure the paper does not give)."""

    name = "most-idle"
    kept = 1
    note = staticmethod(note_requests)
    score = staticmethod(requests)
