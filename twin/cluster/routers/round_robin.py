"""Router "round-robin": the servers in turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer.arrays import IntArray
from packer.twin.cluster.candidates import Candidates
from packer.twin.cluster.routers.base import AnyCluster
from packer.workload import Workload


@dataclass(frozen=True)
class RoundRobin(AnyCluster):
    """One turn for each group of adapters with the same servers: with equal servers there is one group."""

    name = "round-robin"

    def assign(self, adapter: IntArray, workload: Workload, candidates: Candidates, seed: int) -> IntArray:
        """The k-th request of a group goes to its server k mod n."""
        size = np.diff(candidates.start)
        group = candidates.group[adapter]
        order = np.argsort(group, kind="stable")
        count = np.bincount(group, minlength=len(size))
        turn = np.empty(len(adapter), dtype=np.int64)
        turn[order] = np.arange(len(adapter)) - np.repeat(np.cumsum(count) - count, count)
        server: IntArray = candidates.server[candidates.start[group] + turn % size[group]]
        return server
