"""Which servers may hold an adapter on the GPU, for routers that ask all of them for each request.

A filter of Bloom's kind with one hash: a bit of each server for all adapters that have the same one. Where it is not
set the server does not hold the adapter; where it is set the router looks (`state.row_of`), which mostly waits for
memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import IntArray
from packer.twin.cluster.state import Servers
from packer.twin.flags import ENGINE_FLAGS, INLINED

WORDS = 4
_SPREAD = 0x9E3779B97F4A7C1
UNKNOWN, NEVER = -1, -2


class Residents(NamedTuple):
    """bits int64 (S, WORDS); loads (S,): of adapters by the server when they were set; UNKNOWN, or NEVER: all are 1."""

    bits: IntArray
    loads: IntArray


def new_residents(servers: Servers) -> Residents:
    """Before the first request. Only vLLM's engine lists its batch, and only where adapters may be evicted."""
    count, listed = len(servers.wake_s), servers.members.shape[1] > 1 and not servers.others
    bits = np.full((count, WORDS), 0 if listed else -1, dtype=np.int64)
    return Residents(bits, np.full(count, UNKNOWN if listed else NEVER, dtype=np.int64))


@njit(inline="always", **ENGINE_FLAGS)
def _bit(a: int) -> int:
    """Of an adapter by its number."""
    return (((a + 1) * _SPREAD) >> 40) & (64 * WORDS - 1)


@njit(**INLINED)
def note_residents(c: Servers, known: Residents, s: int) -> None:
    """Set the bits of all adapters in slots or in the batch, which others join only by a load."""
    server, adapters = c.live[s], c.adapters[s]
    if known.loads[s] == NEVER or known.loads[s] == server.adapter_loads:
        return
    known.loads[s] = server.adapter_loads
    known.bits[s, :] = 0
    row = adapters[0].idle.after
    for _ in range(server.residents):
        if row == 0:
            break
        bit = _bit(adapters[row].number)
        known.bits[s, bit >> 6] |= 1 << (bit & 63)
        row = adapters[row].idle.after
    for k in range(server.entries):
        bit = _bit(adapters[c.members[s, k].entry].number)
        known.bits[s, bit >> 6] |= 1 << (bit & 63)


@njit(**INLINED)
def may_hold(known: Residents, s: int, a: int) -> bool:
    """False: the adapter is neither in a slot of the server nor in its batch."""
    bit = _bit(a)
    return bool((known.bits[s, bit >> 6] >> (bit & 63)) & 1)
