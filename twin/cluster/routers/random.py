"""Router "random": uniform over the servers that may serve the adapter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer.arrays import IntArray
from packer.twin.cluster.candidates import Candidates
from packer.twin.cluster.routers.base import AnyCluster
from packer.workload import Workload


@dataclass(frozen=True)
class Random(AnyCluster):
    """A random server for each request."""

    name = "random"

    def assign(self, adapter: IntArray, workload: Workload, candidates: Candidates, seed: int) -> IntArray:
        """Draw the server of each request, from a stream of the router's own."""
        group = candidates.group[adapter]
        first, last = candidates.start[group], candidates.start[group + 1]
        drawn = np.random.default_rng(np.random.SeedSequence([seed, 0x726F757465])).random(len(adapter))
        return candidates.server[first + (drawn * (last - first)).astype(np.int64)]
