"""Placement "aibrix": AIBrix's schedulers of ModelAdapters, which assign each adapter to one server on creation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from packer import checks
from packer.cluster import Cluster
from packer.errors import ValidationError
from packer.workload import Workload


@dataclass(frozen=True)
class AdapterScheduler:
    """Assign adapters, in the order of the fleet, to the server that the policy chooses; the first one of equals.

    vllm-project/aibrix at e3e10f9, pkg/controller/modeladapter/scheduling. "least-adapters" (its default): the server
    with the fewest adapters; "bin-pack": that with most below `capacity` (10 in AIBrix); "random". "least-latency" and
    "least-throughput" read past metrics: before any request is served, both choose the first server.
    """

    name = "aibrix"
    policy: str = "least-adapters"
    capacity: int = 10

    def __post_init__(self) -> None:
        checks.choice("policy", self.policy, ("least-adapters", "bin-pack", "random"))
        checks.integer("capacity", self.capacity, low=1)

    def place(self, workload: Workload, cluster: Cluster, seed: int) -> Cluster:
        """The cluster with each adapter on one server; raises `ValidationError` if "bin-pack" has none with room."""
        rng, held = np.random.default_rng(seed), [dict[str, float]() for _ in range(len(cluster))]
        for name in workload.names:
            counts = [len(placed) for placed in held]
            if self.policy == "random":
                s = int(rng.integers(len(held)))
            elif self.policy == "least-adapters":
                s = counts.index(min(counts))
            else:
                room = [count for count in counts if count < self.capacity]
                if not room:
                    rule = f"Expected at most {self.capacity * len(held)} adapters to bin-pack on {len(held)} servers"
                    raise ValidationError(f"{rule} (capacity {self.capacity}), got {len(workload)}.")
                s = counts.index(max(room))
            held[s][name] = 1.0
        return replace(cluster, placement=tuple(held))
