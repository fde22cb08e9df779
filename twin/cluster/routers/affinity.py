"""Router "affinity": servers that hold the adapter first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from numba import njit

from packer import checks
from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.residents import Residents, may_hold, new_residents, note_residents
from packer.twin.cluster.state import Servers, on_gpu, outstanding
from packer.twin.engine.content import Content
from packer.twin.flags import INLINED


class Known(NamedTuple):
    """numbers: the slack, and behind all others the requests of each server."""

    numbers: FloatArray
    holders: Residents


@njit(**INLINED)
def _note(c: Servers, p: Known, s: int) -> None:
    """Keep the number of its requests, and what it holds."""
    p.numbers[p.numbers.size - c.wake_s.size + s] = outstanding(c, s)
    note_residents(c, p.holders, s)


@njit(**INLINED)
def _worth(c: Servers, p: Known, s: int, r: int, lowest: float) -> bool:
    """Whether its requests are fewer, with the slack where it certainly does not hold the adapter."""
    number, a = p.numbers[p.numbers.size - c.wake_s.size + s], c.adapter[r]
    if c.ranks[a] > 0 and number < lowest and not may_hold(p.holders, s, a):
        number += p.numbers[0]
    return bool(number < lowest)


@njit(**INLINED)
def _score(c: Servers, p: Known, s: int, r: int) -> float:
    """Its requests, and the slack if the adapter must be loaded."""
    number, a = p.numbers[p.numbers.size - c.wake_s.size + s], c.adapter[r]
    held = c.ranks[a] == 0 or (may_hold(p.holders, s, a) and on_gpu(c, s, a))
    return float(number if held else number + p.numbers[0])


@dataclass(frozen=True)
class Affinity(ScoringRouter):
    """The most idle server, where an adapter that lies on the GPU is worth `slack` requests."""

    name = "affinity"
    kept = 1
    score, note, worth = staticmethod(_score), staticmethod(_note), staticmethod(_worth)
    slack: float = 4.0

    def __post_init__(self) -> None:
        checks.real("slack", self.slack, low=0.0)

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Known:
        """With what the servers hold."""
        return Known(numbers, new_residents(servers))
