"""Servers of a cluster that schedule ahead or cache prefixes (`engine.advance_ahead`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import Record
from packer.twin.arrivals import Marks
from packer.twin.engine.content import Content
from packer.twin.engine.pipeline import new_pipeline
from packer.twin.engine.pool import Pool, new_pool, no_pool
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.server import Server


class Ahead(NamedTuple):
    """What such servers have besides `cluster.state.Servers`, with a leading axis for the server.

    pool: all that belongs to requests is shared; pipeline: of depth 0 for a server that does neither.
    """

    pool: Pool
    pipeline: Record


@njit(inline="always", **ENGINE_FLAGS)
def ahead_of(c: Ahead, s: int) -> tuple[Pool, Record]:
    """One server's, as views."""
    p = c.pool
    pool = Pool(
        p.all[s : s + 1], p.entries[s], p.blocks[s], p.table[s], p.seats[s], p.held[s], p.seat, p.run, p.first,
        p.shared, p.numbers, p.found, p.after,
    )  # fmt: skip
    return pool, c.pipeline[s : s + 1]


def schedules_ahead(servers: Sequence[Server]) -> bool:
    """Whether a server schedules ahead or caches prefixes."""
    rules = [server.rules() for server in servers]
    return any(each.prefix_caching or each.async_scheduling for each in rules)


def idle_ahead(servers: Sequence[Server], marks: Marks) -> Ahead | None:
    """The servers before the first request, None if none of them schedules ahead or caches prefixes."""
    if not schedules_ahead(servers):
        return None
    rules = [server.rules() for server in servers]
    n = len(marks.adapter)
    content = marks.content() or Content.none(n)
    pools = []
    for server, each in zip(servers, rules, strict=True):
        engine = server.profile.engine
        pool = no_pool(n)
        if each.prefix_caching:
            pool = new_pool(n, server.kv_blocks, engine.block_size, engine.max_num_seqs, content)
            pool.all["unhashed_first"] = each.unhashed_first
        pools.append(pool)
    largest = {key: np.max([getattr(pool, key).shape for pool in pools], axis=0) for key in _OWN}
    own = {key: np.stack([_padded(getattr(pool, key), largest[key]) for pool in pools]) for key in _OWN}
    whole = np.concatenate([pool.all for pool in pools])
    depths = [(1 + each.async_scheduling) * (each.async_scheduling or each.prefix_caching) for each in rules]
    first = max(pools, key=lambda pool: len(pool.found))
    return Ahead(first._replace(all=whole, **own), np.concatenate([new_pipeline(depth) for depth in depths]))


_OWN = ("entries", "blocks", "table", "seats", "held")
"""Fields of a pool that each server has for itself."""


def _padded(array: Record, shape: Record) -> Record:
    """An array with zeros behind it."""
    out = np.zeros(tuple(shape), dtype=array.dtype)
    out[tuple(slice(size) for size in array.shape)] = array
    return out
