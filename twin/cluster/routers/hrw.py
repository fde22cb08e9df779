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
        """By the adapter alone."""
        used, position = np.unique(adapter, return_inverse=True)
        home = np.array([_home(workload.names[i], candidates.of(i)) for i in used.tolist()], dtype=np.int64)
        return home[position] if len(used) else np.zeros(0, dtype=np.int64)


def _home(name: str, servers: IntArray) -> int:
    return int(servers[np.argmax(_scores(name, servers))])


def ranked(name: str, servers: IntArray) -> list[int]:
    """The servers by falling hash of adapter and server."""
    order: list[int] = servers[np.argsort(-_scores(name, servers).astype(np.float64), kind="stable")].tolist()
    return order


def _scores(name: str, servers: IntArray) -> np.typing.NDArray[np.uint64]:
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return mixed(servers.astype(np.uint64) + np.uint64(digest))


def mixed(x: np.typing.NDArray[np.uint64]) -> np.typing.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014), on uint64 with wrap-around."""
    with np.errstate(over="ignore"):
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
