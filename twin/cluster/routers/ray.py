"""Router "ray": Ray Serve's multiplexing, which keeps an adapter on the replicas that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from packer import checks
from packer.arrays import IntArray
from packer.twin.cluster.routers.base import HOLD, AnyCluster, Request

if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView


@dataclass
class Ray(AnyCluster):
    """Of two random replicas that hold the adapter, else of two with fewest adapters, the one with the shorter queue.

    ray-project/ray at 0048e22, python/ray/serve/_private/request_router/request_router.py (apply_multiplex_routing) and
    pow_2_router.py. A replica with `max_ongoing` requests refuses. If all replicas with the adapter do, those with the
    fewest adapters are tried, then all. Ray Serve LLM sets None (no limit), so that a hot adapter stays on the replica
    that loaded it first. While a replica loads an adapter, Ray lets other requests for it wait; here they go to that
    replica at once. Time for the retries (20 ms and more) is not modelled.
    """

    name = "ray"
    max_ongoing: int | None = None

    def __post_init__(self) -> None:
        if self.max_ongoing is not None:
            checks.integer("max_ongoing", self.max_ongoing, low=1)

    def start(self, view: ClusterView, seed: int) -> None:
        """Seed the draws, which depend on the seed alone."""
        self._rng, self._loading = np.random.default_rng(seed), dict[int, int]()

    def route(self, request: Request, view: ClusterView) -> int:
        """Choose from the first group of replicas in which one accepts the request."""
        servers = view.candidates(request.adapter)
        requests = view.outstanding
        adapters, holders = view.residents[servers], view.on_gpu(request.adapter)[servers]
        if not holders.any():
            holders = servers == self._loading.get(request.adapter, HOLD)
        groups = (holders, adapters == adapters.min(), np.True_)
        for chosen in groups:
            pair = self._drawn(servers[np.broadcast_to(chosen, servers.shape)])
            if self.max_ongoing is not None:
                pair = pair[requests[pair] < self.max_ongoing]
            if len(pair):
                self._loading[request.adapter] = int(pair[np.argmin(requests[pair])])
                return self._loading[request.adapter]
        return HOLD

    def _drawn(self, servers: IntArray) -> IntArray:
        """Draw two different servers, or return all if there are fewer."""
        if len(servers) < 2:
            return servers
        one = int(self._rng.integers(len(servers)))
        two = int(self._rng.integers(len(servers) - 1))
        return servers[[one, two + (two >= one)]]
