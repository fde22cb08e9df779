"""Routers of a few lines: in turn, at random, by hash, the most idle server, or the one that holds the adapter."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.cluster.candidates import Candidates
from packer.twin.cluster.routers.base import AnyCluster, ScoringRouter
from packer.twin.cluster.state import Servers, on_gpu, outstanding
from packer.twin.flags import ENGINE_FLAGS
from packer.workload import Workload


@dataclass(frozen=True)
class RoundRobin(AnyCluster):
    """One turn for each set of servers that share their adapters: with equal servers there is one."""

    name = "round-robin"

    def assign(self, adapter: IntArray, workload: Workload, candidates: Candidates, seed: int) -> IntArray:
        """The k-th request of a group goes to its server k mod n."""
        group = candidates.group[adapter]
        size = np.diff(candidates.start)
        order = np.argsort(group, kind="stable")
        count = np.bincount(group, minlength=len(size))
        turn = np.empty(len(adapter), dtype=np.int64)
        turn[order] = np.arange(len(adapter)) - np.repeat(np.cumsum(count) - count, count)
        server: IntArray = candidates.server[candidates.start[group] + turn % size[group]]
        return server


@dataclass(frozen=True)
class Random(AnyCluster):
    """A server drawn for each request, uniformly over those that may serve the adapter."""

    name = "random"

    def assign(self, adapter: IntArray, workload: Workload, candidates: Candidates, seed: int) -> IntArray:
        """One draw for each request, from its own stream."""
        group = candidates.group[adapter]
        first, last = candidates.start[group], candidates.start[group + 1]
        drawn = np.random.default_rng(np.random.SeedSequence([seed, 0x726F757465])).random(len(adapter))
        return candidates.server[first + (drawn * (last - first)).astype(np.int64)]


@dataclass(frozen=True)
class Hrw(AnyCluster):
    """The server with the highest hash of adapter and server: few adapters move when servers come and go.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); production
    routers place adapters in this way.
    """

    name = "hrw"

    def assign(self, adapter: IntArray, workload: Workload, candidates: Candidates, seed: int) -> IntArray:
        """By the adapter alone."""
        used, position = np.unique(adapter, return_inverse=True)
        homes = [ranked(workload.names[i], candidates.of(i))[0] for i in used.tolist()]
        return np.array(homes, dtype=np.int64)[position]


def ranked(name: str, servers: IntArray) -> list[int]:
    """The servers by falling hash of adapter and server: SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    with np.errstate(over="ignore"):
        x = (servers.astype(np.uint64) + np.uint64(digest)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    order: list[int] = servers[np.argsort(~x, kind="stable")].tolist()
    return order


@njit(**ENGINE_FLAGS)
def _requests(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Requests on the server."""
    return float(outstanding(c, s))


@njit(**ENGINE_FLAGS)
def _with_slack(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Its requests, and the slack if the adapter must be loaded."""
    requests = float(outstanding(c, s))
    return requests if on_gpu(c, s, c.adapter[r]) else requests + p[0]


@dataclass(frozen=True)
class MostIdle(ScoringRouter):
    """Fewest running and waiting requests (CaraServe's MostIdle, whose measure the paper does not give)."""

    name = "most-idle"
    score = staticmethod(_requests)


@dataclass(frozen=True)
class Affinity(ScoringRouter):
    """The most idle server, where an adapter that lies on the GPU is worth `slack` requests."""

    name = "affinity"
    score = staticmethod(_with_slack)
    slack: float = 4.0
