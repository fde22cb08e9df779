"""Placement "aibrix": AIBrix' schedulers of ModelAdapters, which give each adapter one server when it is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from packer import checks
from packer.cluster import Cluster
from packer.errors import ValidationError
from packer.workload import Workload


@dataclass(frozen=True)
class AdapterScheduler:
    """Adapters in the order of the fleet, each on the server that the policy chooses; the first among equal ones.

    vllm-project/aibrix at e3e10f9, pkg/controller/modeladapter/scheduling: "least-adapters" (its default), the server
    with the fewest; "bin-pack", that with the most below `capacity`, which is 10 there; "random". "least-latency" and
    "least-throughput" read what servers did before: with nothing served yet both choose the first server.
    """

    name = "aibrix"
    policy: str = "least-adapters"
    capacity: int = 10

    def __post_init__(self) -> None:
        checks.choice("policy", self.policy, ("least-adapters", "bin-pack", "random"))
        checks.integer("capacity", self.capacity, low=1)

    def place(self, workload: Workload, cluster: Cluster, seed: int) -> Cluster:
        """The cluster with one server for each adapter.

        Raises `ValidationError`: every server has as many adapters as bin packing allows.
        """
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
                    raise ValidationError(
                        f"Expected at most {self.capacity * len(held)} adapters to bin-pack on {len(held)} servers "
                        f"(capacity {self.capacity}), got {len(workload)}."
                    )
                s = counts.index(max(room))
            held[s][name] = 1.0
        return replace(cluster, placement=tuple(held))
