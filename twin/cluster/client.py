"""A client that limits the number of requests open in the whole cluster, or in a closed loop keeps it constant.

As `vllm bench serve --max-concurrency` against a router: the client sends the next request when it has seen another
request end, on any server, and not before the request's own time (for one server: `engine.arrive.free_places`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED

LIKELY_REQ_S = 64.0  # Requests/s that hardly any server completes: rows for this rate are allocated, more if needed.


class Client(NamedTuple):
    """The client's places.

    own_s (n,): earliest time to send each request, s; 0 in a closed loop. free_s (C,): when each free place became
    free, s, a ring in order of time. ring (2,): position of the first free place, and number of free places. ended
    (S,): requests of each server that the client has seen end.
    """

    own_s: FloatArray
    free_s: FloatArray
    ring: IntArray
    ended: IntArray


def new_client(concurrency: int, servers: int, own_s: FloatArray) -> Client:
    """Return a client with all places free from the start; with `concurrency` 0 it holds no request back."""
    none = np.zeros(servers, dtype=np.int64)
    return Client(own_s, np.zeros(concurrency), np.array([0, concurrency], dtype=np.int64), none)


@njit(**INLINED)
def is_closed(client: Client) -> bool:
    """Whether the client limits its open requests; a client without places holds no request back."""
    return bool(client.free_s.size > 0)


@njit(**ENGINE_FLAGS)
def free_place(client: Client, at_s: float) -> None:
    """Add a place that becomes free at `at_s` to the ring, in order of time."""
    size = client.free_s.size
    k = (client.ring[0] + client.ring[1]) % size
    client.ring[1] += 1
    for _ in range(client.ring[1] - 1):
        before = k - 1 if k > 0 else size - 1
        if client.free_s[before] <= at_s:
            break
        client.free_s[k] = client.free_s[before]
        k = before
    client.free_s[k] = at_s


@njit(**ENGINE_FLAGS)
def take_place(client: Client) -> None:
    """Take the first free place."""
    client.ring[0] = (client.ring[0] + 1) % client.free_s.size
    client.ring[1] -= 1


@njit(**ENGINE_FLAGS)
def first_free_s(client: Client) -> float:
    """Return when the first free place became free, s; infinite if no place is free."""
    at_s: float = client.free_s[client.ring[0]] if client.ring[1] > 0 else math.inf
    return at_s


@njit(**CALLED)
def see_ends(c: Any, first: int, last: int, now_s: float) -> None:
    """Free the places of requests that ended in steps until `now_s`, on servers from `first` to before `last`; no place
    becomes free before `now_s`."""
    client = c.client
    for s in range(first, last):
        server = c.servers[s]
        ended = server.taken - server.running - server.waiting - server.pending_count
        for _ in range(ended - client.ended[s]):
            # The front end may stream the last tokens later than the step ends.
            free_place(client, max(now_s, server.seen_s))
        client.ended[s] = ended
