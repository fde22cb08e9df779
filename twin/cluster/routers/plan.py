"""Router "plan": the cluster's placement is the routing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.cluster import Cluster
from packer.twin.cluster.candidates import Candidates
from packer.twin.flags import ENGINE_FLAGS
from packer.workload import Workload


@dataclass(frozen=True)
class PlanRouter:
    """Each adapter goes to the server that holds it; replicas take turns by smooth weighted round robin, and a session
    stays where its first request went. Exported routes draw the replica at random by the same shares, so that queues
    are those of `packer evaluate` without a router."""

    name = "plan"
    keeps_sessions = True

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Supports clusters with a placement."""
        if cluster.placement is None:
            return "the cluster has no placement: use plan.cluster(), or another router"
        return None

    def assign(self, adapter: IntArray, workload: Workload, candidates: Candidates, seed: int) -> IntArray:
        """Return the server of each request by the placement's shares."""
        out = np.empty(len(adapter), dtype=np.int64)
        most = int(np.diff(candidates.start).max())
        credit = np.zeros((len(workload), most))
        _weighted_turns(adapter, candidates.group, candidates.start, candidates.server, candidates.share, credit, out)
        return out


@njit(**ENGINE_FLAGS)
def _weighted_turns(
    adapter: IntArray, group: IntArray, start: IntArray, server: IntArray, share: FloatArray,
    credit: FloatArray, out: IntArray,
) -> None:  # fmt: skip
    """Each server gains its share as credit; the server with most credit is chosen and pays the sum of the shares."""
    for i in range(adapter.size):
        a = adapter[i]
        first, last = start[group[a]], start[group[a] + 1]
        best, total = first, 0.0
        for j in range(first, last):
            credit[a, j - first] += share[j]
            total += share[j]
            if credit[a, j - first] > credit[a, best - first]:
                best = j
        credit[a, best - first] -= total
        out[i] = server[best]
