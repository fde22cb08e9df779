"""Router "gateway": the endpoint picker of the Gateway API inference extension and of llm-d."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from packer import checks
from packer.arrays import FloatArray, IntArray
from packer.cluster import Cluster
from packer.twin.cluster.routers.base import ScoringRouter, VllmServers
from packer.twin.cluster.state import Servers, row_of
from packer.twin.engine.state import ACTIVE, IDLE
from packer.twin.flags import ENGINE_FLAGS
from packer.workload import Workload


@njit(**ENGINE_FLAGS)
def _survey(c: Servers, p: FloatArray, server: IntArray, first: int, last: int) -> None:
    """The shortest and the longest queue of the candidates, behind the parameters."""
    shortest, longest = c.servers[server[first]].waiting, c.servers[server[first]].waiting
    for j in range(first + 1, last):
        waiting = c.servers[server[j]].waiting
        shortest, longest = min(shortest, waiting), max(longest, waiting)
    p[4], p[5] = shortest, longest


@njit(**ENGINE_FLAGS)
def _score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """The weighted sum of the three scorers, negative: the smallest is chosen."""
    server = c.servers[s]
    queue = 1.0 if p[5] == p[4] else (p[5] - server.waiting) / (p[5] - p[4])
    kv = 1.0 - server.used / max(server.kv_blocks, 1)
    row = row_of(c, s, c.adapter[r])
    if row > 0 and c.adapters[s, row].in_batch > 0:
        lora = 1.0
    elif server.active + server.heap_sizes[IDLE] + server.heap_sizes[ACTIVE] < server.slots:
        lora = 0.8
    elif row > 0 and c.adapters[s, row].head > 0:
        lora = 0.6
    else:
        lora = 0.0
    return float(-(p[0] * lora + p[1] * queue + p[2] * kv))


@dataclass(frozen=True)
class Gateway(VllmServers, ScoringRouter):
    """Scorers for LoRA affinity, queue and KV cache, and the pod with the highest weighted sum.

    kubernetes-sigs/gateway-api-inference-extension at 02308be, pkg/epp/scheduling/framework/plugins/scorer
    (lora_affinity.go, queue.go, kvcache_utilization.go), which llm-d uses. An adapter with running requests there
    scores 1, room for one more adapter 0.8, one with waiting requests alone 0.6. Weights are a deployment's own; 1 each
    is ours. Its metrics are 50 ms old at most (--refresh-metrics-interval): `stats_age_s` of the system. Which
    adapters run is up to date here.
    """

    name = "gateway"
    score = staticmethod(_score)
    survey = staticmethod(_survey)
    lora: float = 1.0
    queue: float = 1.0
    kv: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lora", "queue", "kv"):
            checks.real(name, getattr(self, name), low=0.0)

    def parameters(self, cluster: Cluster, workload: Workload) -> FloatArray:
        """The weights, the mean output tokens, and room for the survey."""
        return np.append(super().parameters(cluster, workload), [0.0, 0.0])
