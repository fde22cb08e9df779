"""Requests between the router and their server: on the network, and while the host fetches their adapter.

Each node has a host cache (LRU) of adapters from the remote store. A request whose adapter is not there waits at the
node for the transfer, with others of the adapter. Transfers take turns, or share the store's bandwidth equally.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray, Record, record
from packer.cluster import Cluster, Node, Store
from packer.errors import ValidationError
from packer.twin.cluster.state import Servers, give
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import LINK
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED
from packer.workload import Workload

PLACE = record(
    ("where", "i4"),  # ABSENT: only in the store; COMING: on its way; HELD: at the host
    ("by_use", LINK),  # ring of the adapters at the host, by last use
)
(ABSENT, COMING, HELD) = range(3)
# Columns of `transfers`: node, adapter, first waiting request + 1, last waiting request + 1.
(NODE, ADAPTER, FIRST, LAST) = range(4)
# Registers of `counts`: start and end of the network's queue, transfers under way, cache hits, misses, evictions.
(HEAD, TAIL, ACTIVE, HITS, MISSES, EVICTED) = range(6)
# Registers of `rates`: network, s; latency of the store, s; its bandwidth, bytes/s; last update of transfers, s.
(NETWORK_S, LATENCY_S, BANDWIDTH, UPDATED_S) = range(4)


class Transit(NamedTuple):
    """Requests and transfers under way.

    node (S,): node of each server. queue (n,), reach_s (n,): requests on the network in order, and when they reach
    their node; target (n,): server of a request. places (nodes, m + 1) of `PLACE`: host caches, row 0 is the ring's
    sentinel; room (nodes,): free bytes; size (m,): bytes of an adapter. transfers (k, 4), left (k, 2): latency, s, and
    bytes still to come. lanes: transfers at once, 0: any number, which share the bandwidth. counts, rates: registers.
    """

    node: IntArray
    queue: IntArray
    reach_s: FloatArray
    target: IntArray
    places: Record
    room: FloatArray
    size: FloatArray
    transfers: IntArray
    left: FloatArray
    lanes: int
    counts: IntArray
    rates: FloatArray


def transit_of(workload: Workload, cluster: Cluster, n: int) -> Transit | None:
    """Empty queues and host caches for n requests; None without delays. Raises `ValidationError`: host too small."""
    nodes = cluster.nodes or (Node(),) * len(cluster)
    capacity = np.array([node.host_bytes for node in nodes], dtype=np.float64)
    limited = bool(np.isfinite(capacity).any())
    if not limited and cluster.network_ms == 0.0:
        return None
    model = cluster.kind(0).profile.model
    size = workload.ranks.astype(np.float64) * model.lora_bytes_per_rank
    if limited and size.max() > capacity.min():
        rule = f"Expected the host memory of each node to hold the largest adapter ({size.max():.6g} bytes)"
        raise ValidationError(f"{rule}, got {capacity.min():.6g}.")
    store = cluster.store or Store(1.0)  # not used where hosts hold everything
    transfers = min(n, len(nodes) * len(size)) if limited else 0
    node = np.repeat(np.arange(len(nodes)), [each.servers for each in nodes])
    places = np.zeros((len(nodes), len(size) + 1 if limited else 1), dtype=PLACE)
    rates = np.array([cluster.network_ms * 1e-3, store.latency_ms * 1e-3, store.bandwidth_bytes_s, 0.0])
    return Transit(
        node=node, queue=np.zeros(n, dtype=np.int64), reach_s=np.zeros(n), target=np.zeros(n, dtype=np.int64),
        places=places, room=capacity, size=size, transfers=np.zeros((transfers, 4), dtype=np.int64),
        left=np.zeros((transfers, 2)), lanes=store.concurrent, counts=np.zeros(6, dtype=np.int64), rates=rates,
    )  # fmt: skip


@njit(**INLINED)
def _moving(way: Transit) -> int:
    """Return the number of transfers that make progress."""
    active: int = way.counts[ACTIVE]
    return active if way.lanes == 0 else min(active, way.lanes)


@njit(**INLINED)
def _speed(way: Transit) -> float:
    """Return the bytes/s of each transfer: the whole bandwidth if transfers take turns, else an equal share."""
    bandwidth: float = way.rates[BANDWIDTH]
    if way.lanes > 0:
        return bandwidth
    sharing = 0
    for k in range(way.counts[ACTIVE]):
        sharing += way.left[k, 0] <= 0.0
    return bandwidth / max(sharing, 1)


@njit(**INLINED)
def _first_end(way: Transit) -> tuple[int, float]:
    """Return the transfer whose latency or bytes end first, and in how many seconds."""
    best, soonest, speed = -1, math.inf, _speed(way)
    for k in range(_moving(way)):
        ends = way.left[k, 0] if way.left[k, 0] > 0.0 else way.left[k, 1] / speed
        if ends < soonest:
            best, soonest = k, ends
    return best, soonest


@njit(**CALLED)
def _progress(way: Transit, until_s: float) -> None:
    """Advance the transfers under way to `until_s`; none of them ends before."""
    dt = until_s - way.rates[UPDATED_S]
    way.rates[UPDATED_S] = until_s
    if dt > 0.0:
        speed = _speed(way)
        for k in range(_moving(way)):
            if way.left[k, 0] > 0.0:
                way.left[k, 0] = max(0.0, way.left[k, 0] - dt)
            else:
                way.left[k, 1] = max(0.0, way.left[k, 1] - dt * speed)


@njit(**ENGINE_FLAGS)
def next_s(way: Transit) -> float:
    """Return when the next request or transfer under way changes, s."""
    network = way.reach_s[way.counts[HEAD]] if way.counts[HEAD] < way.counts[TAIL] else math.inf
    if way.counts[ACTIVE] == 0:
        return float(network)
    return float(min(network, way.rates[UPDATED_S] + _first_end(way)[1]))


@njit(**ENGINE_FLAGS)
def send(c: Servers, way: Transit, s: int, r: int, now_s: float) -> None:
    """Send request `r` from the router to server `s`."""
    k = way.counts[TAIL]
    way.queue[k], way.reach_s[k], way.target[r] = r, now_s + way.rates[NETWORK_S], s
    way.counts[TAIL] = k + 1
    c.server[r] = s
    c.touched[s] = 1
    c.on_way[s] += 1


@njit(**INLINED)
def _deliver(c: Servers, way: Transit, r: int, at_s: float) -> bool:
    s = way.target[r]
    if not give(c, s, r, at_s):
        return False
    c.touched[s] = 1
    c.on_way[s] -= 1
    return True


@njit(**CALLED)
def _want(c: Servers, way: Transit, r: int, at_s: float) -> bool:
    """Request `r` is at its node: deliver it, or let it wait for a transfer, which is started if there is none."""
    node, a = way.node[way.target[r]], c.adapter[r] + 1
    places = way.places[node]
    if c.ranks[a - 1] == 0:  # a request to the base model
        return bool(_deliver(c, way, r, at_s))
    if way.room[node] == math.inf or places[a].where == HELD:
        if not _deliver(c, way, r, at_s):
            return False
        way.counts[HITS] += 1
        # A host without a limit keeps no list of its adapters.
        if places.size > 1 and places[a].where == HELD:
            unlink(places["by_use"], a)
            link_last(places["by_use"], 0, a)
        return True
    way.counts[MISSES] += 1
    c.requests[r].next = 0
    if places[a].where == COMING:
        for k in range(way.counts[ACTIVE]):
            if way.transfers[k, NODE] == node and way.transfers[k, ADAPTER] == a:
                c.requests[way.transfers[k, LAST] - 1].next = r + 1
                way.transfers[k, LAST] = r + 1
        return True
    places[a].where = COMING
    k = way.counts[ACTIVE]
    way.counts[ACTIVE] = k + 1
    row = way.transfers[k]
    row[NODE], row[ADAPTER], row[FIRST], row[LAST] = node, a, r + 1, r + 1
    way.left[k, 0], way.left[k, 1] = way.rates[LATENCY_S], way.size[a - 1]
    return True


@njit(**INLINED)
def _arrived(c: Servers, way: Transit, k: int, at_s: float) -> bool:
    """End transfer `k`: deliver the requests that waited for its adapter, and put the adapter into the host cache."""
    node, a = way.transfers[k, NODE], way.transfers[k, ADAPTER]
    while way.transfers[k, FIRST] > 0:
        r = way.transfers[k, FIRST] - 1
        following = c.requests[r].next
        if not _deliver(c, way, r, at_s):
            return False
        # If a later request finds no row, a repeated call goes on with that one.
        way.transfers[k, FIRST] = following
    places = way.places[node]
    while way.room[node] < way.size[a - 1] and places[0].by_use.after != 0:
        oldest = places[0].by_use.after
        unlink(places["by_use"], oldest)
        places[oldest].where = ABSENT
        way.room[node] += way.size[oldest - 1]
        way.counts[EVICTED] += 1
    places[a].where = HELD
    link_last(places["by_use"], 0, a)
    way.room[node] -= way.size[a - 1]
    way.counts[ACTIVE] -= 1
    for i in range(k, way.counts[ACTIVE]):  # the others keep their order
        for j in range(way.transfers.shape[1]):
            way.transfers[i, j] = way.transfers[i + 1, j]
        for j in range(way.left.shape[1]):
            way.left[i, j] = way.left[i + 1, j]
    return True


@njit(**CALLED)
def receive(c: Servers, way: Transit, at_s: float) -> bool:
    """Make the change of `at_s`, which is `next_s`; False, to be repeated, if an adapter found no row."""
    if way.counts[ACTIVE] > 0:
        k, soonest = _first_end(way)
        if way.rates[UPDATED_S] + soonest <= at_s:
            byte_phase = way.left[k, 0] <= 0.0
            _progress(way, at_s)
            if byte_phase:
                way.left[k, 1] = 0.0
                return bool(_arrived(c, way, k, at_s))
            way.left[k, 0] = 0.0
            return True
    _progress(way, at_s)
    r = way.queue[way.counts[HEAD]]
    if not _want(c, way, r, at_s):
        return False
    # Only now, so that a call that found no row is repeated for the same request.
    way.counts[HEAD] += 1
    return True
