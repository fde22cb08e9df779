"""Which servers may hold an adapter on the GPU, for routers that ask all of them for each request.

Adapters share rows of bits by a hash of their numbers. Where a server's bit is not set in its row the server does not
hold the adapter; where it is set the router looks (`state.row_of`), which mostly waits for memory.
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
LEFT = 64
"""Bits of a server for adapters that left it, at most."""


class Residents(NamedTuple):
    """bits uint8 (rows, words): eight servers a byte; own int32 (S, …): rows in which a server has its bit set,
    length (S,): how many; loads (S,), begun (S,): loads of adapters by the server, and the steps that it had begun,
    when the last ones were set; UNKNOWN, or NEVER: all bits are 1.
    """

    bits: BitArray
    own: npt.NDArray[np.int32]
    length: IntArray
    loads: IntArray
    begun: IntArray


def is_listed(servers: Servers) -> bool:
    """Whether the servers list their batch: only vLLM's engine does, and only where adapters may be evicted."""
    return servers.members.shape[1] > 1 and not servers.others


def new_bits(servers: Servers, most: int) -> BitArray:
    """Rows of bits for at most so many adapters of a server: 0, or a row of 1 where nothing is listed."""
    listed, words, rows = is_listed(servers), servers.touched_words.size, 1
    while listed and rows < len(servers.wake_s) * most and 2 * rows * words <= MOST_BYTES:
        rows *= 2
    return np.full((rows, words), 0 if listed else 255, dtype=np.uint8)


def new_residents(servers: Servers) -> Residents:
    """Before the first request."""
    count, listed = len(servers.wake_s), is_listed(servers)
    most = int(servers.servers["slots"].max()) + servers.members.shape[1] + LEFT if listed else 1
    return Residents(
        new_bits(servers, most),
        np.zeros((count, most), dtype=np.int32),
        np.zeros(count, dtype=np.int64),
        np.full(count, UNKNOWN if listed else NEVER, dtype=np.int64),
        np.full(count, UNKNOWN, dtype=np.int64),
    )


@njit(inline="always", **ENGINE_FLAGS)
def row_of_bits(bits: BitArray, a: int) -> int:
    """Row of an adapter by its number."""
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
    """Set the bits of adapters that joined the batch in the last step; False if others may have, or bits are too many.

    They are the last ones of the list by entry until the next step begins.
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
    """Set the bits of all adapters in slots or in the batch, which others join only by a load.

    Those of adapters that left stay for a while: to follow all that are in slots takes longer.
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
    """Keep what a server holds on its GPU, if it has changed."""
    server, loads = c.live[s], known.loads[s]
    if loads == NEVER:
        return
    begun = server.step + server.in_flight
    if loads != server.adapter_loads:
        _note_loads(c, known, s, begun)
    known.loads[s], known.begun[s] = server.adapter_loads, begun


@njit(**INLINED)
def servers_among(bits: BitArray, word: int, a: int) -> int:
    """Which of eight servers may have the adapter where these bits say it, as bits: the others have not."""
    return int(bits[row_of_bits(bits, a), word])


@njit(**INLINED)
def may_have(bits: BitArray, s: int, a: int) -> bool:
    """False: the server does not have the adapter where these bits say it."""
    return bool((servers_among(bits, s >> 3, a) >> (s & 7)) & 1)
