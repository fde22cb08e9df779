"""Router "aibrix-least-latency": AIBrix' least expected latency."""

from __future__ import annotations

from dataclasses import dataclass

from packer.cluster import Cluster
from packer.twin.cluster.routers.random import Random
from packer.workload import Workload


@dataclass(frozen=True)
class AibrixLeastLatency(Random):
    """A random server for each request of an adapter.

    vllm-project/aibrix at e3e10f9, pkg/plugins/gateway/algorithms/least_latency.go: the pod with the lowest sum of
    queueing, mean prefill and mean decode time of the requested model. vLLM's histograms bear the name of the base
    model, so that no pod has one for an adapter's name (pkg/cache, GetMetricValueByPodModel), and the router falls back
    to a random pod. Requests to the base model, for which it has the means since each pod's start, are refused.
    """

    name = "aibrix-least-latency"

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Supports fleets without requests to the base model."""
        if workload.n_loras < len(workload):
            return "it has requests to the base model, whose mean latencies by server are not kept"
        return None
