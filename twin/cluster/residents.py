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
LEFT = 64  # Most bits of a server for adapters that have left it.


class Residents(NamedTuple):
    """bits uint8 (rows, words): eight servers in each byte. own int32 (S, …): rows in which a server has its bit set,
    length (S,): their number. loads (S,), begun (S,): the server's adapter loads and begun steps at the last update;
    UNKNOWN, or NEVER: all bits are 1."""

    bits: BitArray
    own: npt.NDArray[np.int32]
    length: IntArray
    loads: IntArray
    begun: IntArray


def is_listed(servers: Servers) -> bool:
    """Whether the servers list their batch: only vLLM's engine does, and only if adapters may be evicted."""
    return servers.members.shape[1] > 1 and not servers.others


def new_bits(servers: Servers, most: int) -> BitArray:
    """Return rows of zero bits for at most `most` adapters of a server, or a row of ones if nothing is listed."""
    listed, words, rows = is_listed(servers), servers.touched_words.size, 1
    while listed and rows < len(servers.wake_s) * most and 2 * rows * words <= MOST_BYTES:
        rows *= 2
    return np.full((rows, words), 0 if listed else 255, dtype=np.uint8)


def new_residents(servers: Servers) -> Residents:
    """Return the state before the first request."""
    count, listed = len(servers.wake_s), is_listed(servers)
    most = int(servers.servers["slots"].max()) + servers.members.shape[1] + LEFT if listed else 1
    return Residents(
        new_bits(servers, most), np.zeros((count, most), dtype=np.int32), np.zeros(count, dtype=np.int64),
        np.full(count, UNKNOWN if listed else NEVER, dtype=np.int64), np.full(count, UNKNOWN, dtype=np.int64),
    )  # fmt: skip


@njit(inline="always", **ENGINE_FLAGS)
def row_of_bits(bits: BitArray, a: int) -> int:
    """Return the row of an adapter, by a hash of its number."""
    row: int = (((a + 1) * _SPREAD) >> 32) & (bits.shape[0] - 1)
    return row


@njit(**INLINED)
def _holds(known: Residents, s: int, a: int) -> None:
    """Set the bit of a server for an adapter."""
    row = row_of_bits(known.bits, a)
    known.bits[row, s >> 3] |= 1 << (s & 7)
    known.own[s, known.length[s]] = row
    known.length[s] += 1


@njit(**INLINED)
def _note_joined(c: Servers, known: Residents, s: int, begun: int) -> bool:
    """Set the bits of adapters that joined the batch in the last step; False if others may have, or rows run out.

    Until the next step begins, these adapters are the last ones of `members`.
    """
    server, adapters = c.live[s], c.adapters[s]
    if c.ahead is not None or not 0 <= begun - known.begun[s] <= 1:
        return False
    for back in range(1, server.entries + 1):
        adapter = adapters[c.members[s, server.entries - back].entry]
        if adapter.joined < begun:
            return True
        if known.length[s] == known.own.shape[1]:
            return False
        _holds(known, s, adapter.number)
    return True


@njit(**CALLED)
def _note_loads(c: Servers, known: Residents, s: int, begun: int) -> None:
    """Set the bits of all adapters in slots or in the batch; other adapters join only by a load.

    Bits of adapters that left stay for a while, because following all adapters in slots takes longer.
    """
    if _note_joined(c, known, s, begun):
        return
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
    begun = server.step + server.in_flight
    if loads != server.adapter_loads:
        _note_loads(c, known, s, begun)
    known.loads[s], known.begun[s] = server.adapter_loads, begun


@njit(**INLINED)
def servers_among(bits: BitArray, word: int, a: int) -> int:
    """Return as bits which of the eight servers of `word` may have the adapter; the others certainly do not have it."""
    return int(bits[row_of_bits(bits, a), word])


@njit(**INLINED)
def may_have(bits: BitArray, s: int, a: int) -> bool:
    """Whether server `s` may have the adapter; False is certain."""
    return bool((servers_among(bits, s >> 3, a) >> (s & 7)) & 1)
