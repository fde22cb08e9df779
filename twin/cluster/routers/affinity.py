"""Router "affinity": prefers servers that hold the adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from numba import njit

from packer import checks
from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.residents import Residents, may_have, new_residents, note_residents, servers_among
from packer.twin.cluster.routers.most_idle import no_requests, note_requests
from packer.twin.cluster.state import Servers, on_gpu
from packer.twin.engine.content import Content
from packer.twin.flags import INLINED


class Known(NamedTuple):
    """As `most_idle.Counts`, with the adapters that servers hold; `numbers` begins with the slack."""

    numbers: FloatArray
    requests: FloatArray
    least: FloatArray
    holders: Residents


@njit(**INLINED)
def _note(c: Servers, p: Known, s: int) -> None:
    """Update the number of requests of server `s`, and what it holds."""
    note_requests(c, p, s)
    note_residents(c, p.holders, s)


@njit(**INLINED)
def _among(c: Servers, p: Known, word: int, r: int, lowest: float) -> int:
    """Return all eight servers if one may win with the slack added, else those that may hold the adapter."""
    least, a = p.least[word], c.adapter[r]
    if least >= lowest:
        return 0
    return 255 if c.ranks[a] == 0 or least + p.numbers[0] < lowest else int(servers_among(p.holders.bits, word, a))


@njit(**INLINED)
def _worth(c: Servers, p: Known, s: int, r: int, lowest: float) -> bool:
    """Whether the server's requests, with the slack if it certainly does not hold the adapter, are below `lowest`."""
    number, a = p.requests[s], c.adapter[r]
    if c.ranks[a] > 0 and number < lowest and not may_have(p.holders.bits, s, a):
        number += p.numbers[0]
    return bool(number < lowest)


@njit(**INLINED)
def _score(c: Servers, p: Known, s: int, r: int) -> float:
    """Return the server's requests, plus the slack if the adapter must be loaded."""
    number, a = p.requests[s], c.adapter[r]
    held = c.ranks[a] == 0 or (may_have(p.holders.bits, s, a) and on_gpu(c, s, a))
    return float(number if held else number + p.numbers[0])


@dataclass(frozen=True)
class Affinity(ScoringRouter):
    """The server with the fewest requests, where holding the adapter on the GPU is worth `slack` requests."""

    name = "affinity"
    score, note = staticmethod(_score), staticmethod(_note)
    among, worth = staticmethod(_among), staticmethod(_worth)
    slack: float = 4.0

    def __post_init__(self) -> None:
        checks.real("slack", self.slack, low=0.0)

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Known:
        """Return the parameters with room for what the servers hold."""
        return Known(numbers, *no_requests(servers), new_residents(servers))
