"""Servers whose requests are known beforehand and that do not wait for each other: each runs to its end on its own.

Servers run one after the other in the same memory: it stays in the processor's caches, and rows of adapters are kept
for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray, Record, record
from packer.twin.cluster.events import deal
from packer.twin.cluster.state import Servers, pair_places
from packer.twin.engine.state import ADAPTER, PLACED, REQUEST, clear_rings, new_links, zeros
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.threads import in_threads
from packer.twin.tuning.state import Tuning

SOME = 32  # Number of servers that run one after the other in the same memory.
OWN = (
    "servers", "whole", "live", "classes", "phase", "histogram", "timeline", "vector", "sets", "members", "series",
    "longest", "kind", "first", "last", "seen", "wake_s", "on_way",
)  # fmt: skip
"""Fields of `Servers` with a leading axis for the server that are used in place, as views."""


SENT = record(
    ("sent_s", "f8"),
    ("adapter", "i4"),
    ("prompt", "i4"),
    ("output", "i4"),
    ("number", "i4"),  # among all requests
)
"""A request, stored next to the others of its server: gathering it from columns would miss the cache in each column."""


@njit(**ENGINE_FLAGS)
def _deal(
    assigned: IntArray, place: IntArray, sent_s: FloatArray, adapter: IntArray, prompt: IntArray, output: IntArray,
    dealt: Record,
) -> None:  # fmt: skip
    """Write each request to the next row of its server; `place` (S,): first row of each server, advanced in place."""
    for r in range(assigned.size):
        s = assigned[r]
        request = dealt[place[s]]
        place[s] += 1
        request.sent_s, request.adapter, request.prompt = sent_s[r], adapter[r], prompt[r]
        request.output, request.number = output[r], r


@njit(**ENGINE_FLAGS)
def _put(requests: Record, dealt: Record, whole: Record) -> None:
    """Write the requests of a server back to their rows in the table of all requests."""
    for i in range(dealt.size):
        whole[dealt[i].number] = requests[i]


def run_apart(servers: Servers, assigned: IntArray, until_s: float, run_until: Callable[..., None], jobs: int) -> None:
    """Run each server with the requests `assigned` to it, (n,), until `until_s`; `jobs`: as for `in_threads`."""
    count = len(servers.wake_s)
    servers.server[:] = assigned
    counts = np.bincount(assigned, minlength=count)
    ends = np.cumsum(counts)
    dealt = np.empty(len(assigned), dtype=SENT)
    _deal(servers.server, ends - counts, servers.sent_s, servers.adapter, servers.prompt, servers.output, dealt)
    own = np.split(dealt, ends[:-1])

    def some(first: int) -> None:
        part = range(first, min(first + SOME, count))
        room = _room(servers, int(counts[part].max()))
        for s in part:
            _run(servers, room, s, own[s], until_s, run_until)

    for _ in in_threads(some, range(0, count, SOME), jobs):
        pass


def _room(servers: Servers, n: int) -> dict[str, Any]:
    """Allocate memory for at most n requests of one server and their adapters."""
    rows = min(n, len(servers.ranks))
    places, ring = pair_places(rows), int(servers.servers["ring"][0])
    requests = zeros((n,), REQUEST)
    return {
        "requests": requests,
        "trees": None if servers.trees is None else requests,
        "links": new_links(n, ring),
        "ends": np.zeros((1, ring), dtype=np.int8),
        "adapters": zeros((1, rows + 1), ADAPTER),
        "heaps": np.zeros((1, 2, rows), dtype=PLACED),
        "pair_key": np.zeros(places, dtype=np.int64),
        "pair_row": np.zeros(places, dtype=np.int32),
    }


def _run(servers: Servers, room: dict[str, Any], s: int, own: Record, until_s: float, run: Callable[..., None]) -> None:
    """Run server `s` with its `own` requests, all of which are given to it at the start."""
    n, record = len(own), servers.servers[s]
    record["sentinel"] = len(room["links"]) - record["ring"]
    one = servers._replace(
        **room,
        **{name: getattr(servers, name)[s : s + 1] for name in OWN},
        sent_s=np.ascontiguousarray(own["sent_s"]),
        **{name: own[name].astype(np.int64) for name in ("adapter", "prompt", "output")},
        server=np.zeros(n, dtype=np.int64),
        tuning=Tuning(servers.tuning.job[s : s + 1], servers.tuning.lengths),
    )
    deal(one, one.server, 0)
    run(one, 0, until_s, None)
    _put(one.requests, own, servers.requests)
    # The next server uses the same memory: clear what this one has used.
    one.adapters[0, : one.seen[0] + 1] = one.requests[:n] = one.pair_key[:] = one.ends[:] = 0
    clear_rings(one.links, int(record["sentinel"]), len(one.links))
