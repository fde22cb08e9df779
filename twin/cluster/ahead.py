"""Servers of a cluster that schedule ahead, cache prefixes, or count requests one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from packer.arrays import IntArray, Record
from packer.errors import IncompatibleError
from packer.twin.arrivals import Marks
from packer.twin.engine.content import Content
from packer.twin.engine.each import Each
from packer.twin.engine.pool import Pool
from packer.twin.flags import ENGINE_FLAGS, INLINED
from packer.twin.server import Server


class Ahead(NamedTuple):
    """State of such servers besides `cluster.state.Servers`. Arrays have a leading axis for the server, except those of
    requests. each (`engine.each`): None if requests are not counted one by one."""

    pool: Pool
    each: Any


@njit(inline="always", **ENGINE_FLAGS)
def pool_of(p: Pool, s: int) -> Pool:
    """Return the pool of server `s`, as views."""
    return Pool(
        p.all[s : s + 1], p.entries[s], p.blocks[s], p.table[s], p.seats[s], p.held[s], p.seat, p.run, p.first,
        p.shared, p.numbers, p.found, p.ended,
    )  # fmt: skip


@njit(**INLINED)
def each_of(e: Any, s: int) -> Each | None:
    """Return the `Each` of server `s`, as views."""
    if e is None:
        return None
    return Each(
        e.whole[s : s + 1], e.rows, e.adapter, e.chances[s], e.running[s], e.limbo[s], e.batches[s], e.steps[s],
        e.lingers[s],
    )  # fmt: skip


def one_by_one(servers: Sequence[Server]) -> bool:
    """Whether servers count requests one by one; raises `IncompatibleError` if only some of them do."""
    found = {server.one_by_one() for server in servers}
    if len(found) > 1:
        rule = "Expected priorities or speculative decoding (engine.scheduling_policy,"
        raise IncompatibleError(f"{rule} engine.speculation) on all servers of a cluster or on none, got some.")
    return found == {True}


def idle_ahead(servers: Sequence[Server], marks: Marks) -> Ahead | None:
    """Return the state before the first request; None if no server needs any of this."""
    rules, single = [server.rules() for server in servers], one_by_one(servers)
    if not single and not any(rule.async_scheduling or rule.prefix_caching for rule in rules):
        return None
    n = len(marks.adapter)
    content = marks.content() or Content.none(n)
    pools = [server.pool(n, content) for server in servers]
    # Take the shared arrays from a server with prefix caching, if there is one: only its `found` has rows.
    first = max(pools, key=lambda pool: len(pool.found))
    each = None
    if single:
        parts = [server.each(marks) for server in servers]
        whole = np.concatenate([part.whole for part in parts])
        each = parts[0]._replace(whole=whole, **_stacked(parts, OWN_EACH))
    pool = first._replace(all=np.concatenate([pool.all for pool in pools]), **_stacked(pools, OWN))
    return Ahead(pool, each)


OWN = ("entries", "blocks", "table", "seats", "held")  # Fields of `Pool` with a part for each server, besides `all`.
OWN_EACH = ("chances", "running", "limbo", "batches", "steps", "lingers")
"""Fields of `Each` of which each server has its own part, besides `whole`."""


def own_parts(c: Ahead) -> list[Record]:
    """Return all arrays with a leading axis for the server."""
    parts = [c.pool.all, *(getattr(c.pool, key) for key in OWN)]
    return parts if c.each is None else [*parts, c.each.whole, *(getattr(c.each, key) for key in OWN_EACH)]


def forget_requests(c: Ahead, lost: IntArray) -> None:
    """Reset the state of these requests, as if they had never been sent."""
    for column in (c.pool.seat, c.pool.run):
        column[lost] = 0
    if c.each is not None:
        c.each.rows[lost] = 0


def _stacked(parts: Sequence[Any], keys: Sequence[str]) -> dict[str, Any]:
    """Stack these fields of all servers along a leading axis, padded to the largest shape."""
    largest = {key: np.max([getattr(part, key).shape for part in parts], axis=0) for key in keys}
    return {key: np.stack([_padded(getattr(part, key), largest[key]) for part in parts]) for key in keys}


def _padded(array: Record, shape: Record) -> Record:
    """Return the array, padded with zeros to this shape."""
    out = np.zeros(tuple(shape), dtype=array.dtype)
    out[tuple(slice(size) for size in array.shape)] = array
    return out
