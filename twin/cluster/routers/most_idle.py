"""Router "most-idle": the server with the fewest requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.state import Servers, outstanding
from packer.twin.engine.content import Content
from packer.twin.flags import INLINED


class Counts(NamedTuple):
    """numbers: as in `parameters`. requests float64 (S, up to a multiple of 8): requests of each server. least
    (words,): the fewest of each eight servers."""

    numbers: FloatArray
    requests: FloatArray
    least: FloatArray


def no_requests(servers: Servers) -> tuple[FloatArray, FloatArray]:
    """Return `requests` and `least` of `Counts` before the first request."""
    words = servers.touched_words.size
    return np.full(8 * words, np.inf), np.full(words, np.inf)


@njit(**INLINED)
def note_requests(c: Servers, p: Any, s: int) -> None:
    """Update the number of requests of server `s`, and the fewest of the eight servers of its word."""
    p.requests[s] = fewest = outstanding(c, s)
    for other in range(s & ~7, (s & ~7) + 8):
        fewest = min(fewest, p.requests[other])
    p.least[s >> 3] = fewest


@njit(**INLINED)
def _among(c: Servers, p: Counts, word: int, r: int, lowest: float) -> int:
    """Return all eight servers if one of them has fewer requests than `lowest`, else none."""
    return 255 if p.least[word] < lowest else 0


@njit(**INLINED)
def _score(c: Servers, p: Counts, s: int, r: int) -> float:
    """Requests on the server."""
    number: float = p.requests[s]
    return number


@dataclass(frozen=True)
class MostIdle(ScoringRouter):
    """The server with the fewest running and waiting requests (CaraServe's MostIdle; the paper gives no measure)."""

    name = "most-idle"
    score, note, among = staticmethod(_score), staticmethod(note_requests), staticmethod(_among)

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Counts:
        """Return the parameters with room for the requests of each server."""
        return Counts(numbers, *no_requests(servers))
