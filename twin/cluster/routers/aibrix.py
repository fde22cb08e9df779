"""Router "aibrix": AIBrix' LoRA affinity."""

from __future__ import annotations

from dataclasses import dataclass

from numba import njit

from packer.arrays import FloatArray
from packer.twin.cluster.routers.base import ScoringRouter, VllmServers
from packer.twin.cluster.state import Servers, outstanding, row_of
from packer.twin.flags import INLINED

MANY = 1e12


@njit(**INLINED)
def drawn(r: int, s: int) -> int:
    """Return a pseudo-random integer below 2^32 for a request and a server."""
    x = (r * 0x9E3779B1 + s * 0x85EBCA77 + 0x165667B1) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    x = ((x ^ (x >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    return x ^ (x >> 15)


@njit(**INLINED)
def _score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Return the requests of a server if the adapter runs or waits there, else a random number above any such count."""
    row = row_of(c, s, c.adapter[r])
    if row > 0 and (c.adapters[s, row].in_batch > 0 or c.adapters[s, row].head > 0):
        return float(outstanding(c, s))
    return float(MANY + drawn(r, s))


@dataclass(frozen=True)
class Aibrix(VllmServers, ScoringRouter):
    """The server with the fewest requests of those where the adapter runs or waits, else a random server.

    vllm-project/aibrix at 3582dcc, pkg/plugins/gateway/algorithms/lora_affinity.go. There, servers with a free slot are
    to come before random ones, and get one request in a thousand that has affinity elsewhere. But the slots are read
    from the metric of waiting adapters, whose names are no number, so that no server ever has a free slot.
    """

    name = "aibrix"
    score = staticmethod(_score)
