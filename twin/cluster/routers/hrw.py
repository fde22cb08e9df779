"""Router "hrw": rendezvous hashing; an adapter's requests always go to the same server."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from packer.arrays import IntArray
from packer.twin.cluster.candidates import Candidates
from packer.twin.cluster.routers.base import AnyCluster
from packer.workload import Workload


@dataclass(frozen=True)
class Hrw(AnyCluster):
    """The server with the highest hash of adapter and server: few adapters move when servers come and go.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); production
    routers place adapters in this way.
    """

    name = "hrw"

    def assign(self, adapter: IntArray, workload: Workload, candidates: Candidates, seed: int) -> IntArray:
        """Return the server of each request, by its adapter alone."""
        used, position = np.unique(adapter, return_inverse=True)
        homes = [ranked(workload.names[i], candidates.of(i))[0] for i in used.tolist()]
        return np.array(homes, dtype=np.int64)[position]


def ranked(name: str, servers: IntArray) -> list[int]:
    """The servers by decreasing hash of adapter and server: SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    with np.errstate(over="ignore"):
        x = (servers.astype(np.uint64) + np.uint64(digest)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    order: list[int] = servers[np.argsort(~x, kind="stable")].tolist()
    return order
