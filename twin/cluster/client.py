"""A client that keeps at most a number of requests open in the whole cluster, a closed loop where it keeps so many.

As `vllm bench serve --max-concurrency` against a router: the next request is sent when the client has seen another
one end, wherever that was served, and not before its own time (`engine.arrive.free_places` does the same for one
server).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED

LIKELY_REQ_S = 64.0
"""Requests per second that hardly any server completes: rows are made for so many, more if they run out."""


class Client(NamedTuple):
    """The client's places.

    own_s (n,): before when each request is not sent, s, 0 in a closed loop; free_s (C,): when each free place became
    free, s, in order of time, a ring; ring (2,): where the first one stands, and how many there are; ended (S,):
    requests of each server that the client has seen end.
    """

    own_s: FloatArray
    free_s: FloatArray
    ring: IntArray
    ended: IntArray


def new_client(concurrency: int, servers: int, own_s: FloatArray) -> Client:
    """A client with all places free from the start; 0: it holds no request back."""
    none = np.zeros(servers, dtype=np.int64)
    return Client(own_s, np.zeros(concurrency), np.array([0, concurrency], dtype=np.int64), none)


@njit(**INLINED)
def is_closed(client: Client) -> bool:
    """Whether there is such a client: one without places holds no request back."""
    return bool(client.free_s.size > 0)


@njit(**ENGINE_FLAGS)
def free_place(client: Client, at_s: float) -> None:
    """A place becomes free at `at_s`, behind those that are free before."""
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
    """The first free place is taken."""
    client.ring[0] = (client.ring[0] + 1) % client.free_s.size
    client.ring[1] -= 1


@njit(**ENGINE_FLAGS)
def first_free_s(client: Client) -> float:
    """When the first free place became free; infinite if none is."""
    at_s: float = client.free_s[client.ring[0]] if client.ring[1] > 0 else math.inf
    return at_s


@njit(**CALLED)
def see_ends(c: Any, now_s: float) -> None:
    """After the steps that end by `now_s`, and none before it: requests that ended make room."""
    client = c.client
    for s in range(c.wake_s.size):
        server = c.servers[s]
        ended = server.taken - server.running - server.waiting - server.pending_count
        for _ in range(ended - client.ended[s]):
            free_place(client, max(now_s, server.seen_s))
        client.ended[s] = ended
