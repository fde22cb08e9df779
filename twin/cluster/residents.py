"""Which servers may hold an adapter on the GPU, for routers that check all servers for each request.

Adapters share rows of bits by a hash of their numbers. If a server's bit is not set in an adapter's row, it does not
hold the adapter. If the bit is set, the router looks up the adapter (`state.row_of`), which mostly waits for memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.arrays import IntArray
from packer.twin.cluster.state import Servers
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED

BitArray = npt.NDArray[np.uint8]
MOST_BYTES = 2**22
_SPREAD = 0x9E3779B97F4A7C1
UNKNOWN, NEVER = -10, -20


class Residents(NamedTuple):
    """bits uint8 (rows, words): eight servers in a byte. own int32 (S, …): rows in which a server has its bit set,
    length (S,): their number. loads (S,): its adapter loads at the last update; UNKNOWN, or NEVER: all bits are 1."""

    bits: BitArray
    own: npt.NDArray[np.int32]
    length: IntArray
    loads: IntArray


def new_residents(servers: Servers) -> Residents:
    """Return the state before the first request."""
    count, places, words, rows = len(servers.wake_s), servers.members.shape[1], servers.touched_words.size, 1
    # Only vLLM's engine lists its batch, and only if adapters may be evicted.
    if places == 1 or servers.others:
        bits, most, loads = np.full((1, words), 255, dtype=np.uint8), 1, NEVER
    else:
        most, loads = int(servers.servers["slots"].max()) + places, UNKNOWN
        while rows < count * most and 2 * rows * words <= MOST_BYTES:
            rows *= 2
        bits = np.zeros((rows, words), dtype=np.uint8)
    own, length = np.zeros((count, most), dtype=np.int32), np.zeros(count, dtype=np.int64)
    return Residents(bits, own, length, np.full(count, loads, dtype=np.int64))


@njit(inline="always", **ENGINE_FLAGS)
def _row(bits: BitArray, a: int) -> int:
    """Return the row of an adapter, by a hash of its number."""
    row: int = (((a + 1) * _SPREAD) >> 32) & (bits.shape[0] - 1)
    return row


@njit(**INLINED)
def _holds(known: Residents, s: int, a: int) -> None:
    """Set the bit of a server for an adapter."""
    row = _row(known.bits, a)
    known.bits[row, s >> 3] |= 1 << (s & 7)
    known.own[s, known.length[s]] = row
    known.length[s] += 1


@njit(**CALLED)
def _note_loads(c: Servers, known: Residents, s: int) -> None:
    """Set the bits of all adapters in slots or in the batch; other adapters join only by a load."""
    server, adapters = c.live[s], c.adapters[s]
    for i in range(known.length[s]):
        known.bits[known.own[s, i], s >> 3] &= ~(1 << (s & 7))
    known.length[s] = 0
    row = adapters[0].idle.after
    for _ in range(server.residents):
        if row == 0:
            break
        _holds(known, s, adapters[row].number)
        row = adapters[row].idle.after
    for k in range(server.entries):
        _holds(known, s, adapters[c.members[s, k].entry].number)


@njit(**INLINED)
def note_residents(c: Servers, known: Residents, s: int) -> None:
    """Update what a server holds on its GPU, if it has changed."""
    server, loads = c.live[s], known.loads[s]
    if loads == NEVER:
        return
    if loads != server.adapter_loads:
        _note_loads(c, known, s)
        known.loads[s] = server.adapter_loads


@njit(**INLINED)
def servers_among(bits: BitArray, word: int, a: int) -> int:
    """Return as bits which of the eight servers of `word` may have the adapter; the others certainly do not have it."""
    return int(bits[_row(bits, a), word])


@njit(**INLINED)
def may_have(bits: BitArray, s: int, a: int) -> bool:
    """Whether server `s` may have the adapter; False is certain."""
    return bool((servers_among(bits, s >> 3, a) >> (s & 7)) & 1)
