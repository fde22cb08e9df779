"""Which servers have an adapter in their batch, for routers that check all servers for each request. Rows of bits as in
`residents`, but these bits follow the batch: adapters that leave it lose their bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.arrays import IntArray
from packer.twin.cluster.residents import NEVER, UNKNOWN, BitArray, is_listed, new_bits, row_of_bits
from packer.twin.cluster.state import Servers
from packer.twin.flags import CALLED, INLINED


class Running(NamedTuple):
    """bits uint8 (rows, words): eight servers in each byte. own int32 (S, …, 2): adapters in the batch of a server,
    with the row of their bits, length (S,): their number. seen (S, 3): at the last update, the last steps in which
    adapters joined and left the batch (of `SERVER`), and the server's begun steps; UNKNOWN, or NEVER: all bits are 1.
    """

    bits: BitArray
    own: npt.NDArray[np.int32]
    length: IntArray
    seen: IntArray


def new_running(servers: Servers) -> Running:
    """Return the state before the first request."""
    count, listed = len(servers.wake_s), is_listed(servers)
    most = servers.members.shape[1]
    return Running(
        new_bits(servers, most),
        np.zeros((count, most, 2), dtype=np.int32),
        np.zeros(count, dtype=np.int64),
        np.full((count, 3), UNKNOWN if listed else NEVER, dtype=np.int64),
    )


@njit(**INLINED)
def _drop_left(c: Servers, known: Running, s: int, anew: bool) -> None:
    """Clear the bits of adapters that left the batch, unless adapters in it share them; `anew`: clear all bits."""
    own, k = known.own[s], 0
    while k < known.length[s]:
        row = own[k, 1]
        if not anew and c.adapters[s, own[k, 0]].in_batch > 0:
            k += 1
            continue
        last = known.length[s] - 1
        own[k, 0], own[k, 1] = own[last, 0], own[last, 1]
        known.length[s] = last
        shared = False
        for i in range(last):
            shared |= own[i, 1] == row
        if not shared:
            known.bits[row, s >> 3] &= ~(1 << (s & 7))


@njit(**INLINED)
def _add(c: Servers, known: Running, s: int, e: int) -> None:
    """Set the bit of an adapter of the batch, by its row on the server, unless the adapter is already listed."""
    own, n, row = known.own[s], known.length[s], row_of_bits(known.bits, c.adapters[s, e].number)
    for i in range(n):
        if own[i, 0] == e and own[i, 1] == row:
            return
    own[n, 0], own[n, 1] = e, row
    known.length[s] = n + 1
    known.bits[row, s >> 3] |= 1 << (s & 7)


@njit(**CALLED)
def _follow(c: Servers, known: Running, s: int, begun: int) -> None:
    """Update the bits of a server whose batch adapters left or joined.

    Adapters that joined in the last step are the last ones of `members`, unless steps are scheduled ahead.
    """
    server, seen = c.live[s], known.seen[s]
    _drop_left(c, known, s, begun < seen[2])
    if server.join_step != seen[0] or begun < seen[2]:
        last_step = c.ahead is None and 0 <= begun - seen[2] <= 1
        for back in range(1, server.entries + 1):
            e = c.members[s, server.entries - back].entry
            if last_step and c.adapters[s, e].joined < begun:
                break
            if c.adapters[s, e].in_batch > 0:
                _add(c, known, s, e)
    seen[0], seen[1] = server.join_step, server.leave_step


@njit(**INLINED)
def note_running(c: Servers, known: Running, s: int) -> None:
    """Update which adapters a server runs, if that has changed."""
    server, seen = c.live[s], known.seen[s]
    if seen[0] == NEVER:
        return
    begun = server.step + server.in_flight
    if server.join_step != seen[0] or server.leave_step != seen[1] or begun < seen[2]:
        _follow(c, known, s, begun)
    seen[2] = begun
