"""Cache policy "top-k": every server keeps the adapters in highest demand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from packer import checks
from packer.twin.cluster.caching import LRU, Move

if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView


@dataclass
class TopK:
    """Keeps the `k` adapters with the highest moving average of requests per period; others leave by last use.

    This is ROCK's baseline "Proactive", which preloads frequent adapters by predicted load. The paper gives neither
    the forecast nor the number of adapters.
    """

    name = "top-k"
    rule = LRU
    takes_memory = True
    high_water = 1.0
    k: int = 8
    period_s: float = 45.0
    weight: float = 0.5

    def __post_init__(self) -> None:
        checks.integer("k", self.k, low=1)
        checks.real("weight", self.weight, low=0.0, high=1.0, open_low=True)

    def start(self, view: ClusterView, seed: int) -> None:
        """Start without demand and without kept adapters."""
        self._demand, self._kept = np.zeros(len(view.workload)), frozenset[int]()

    def tick(self, now_s: float, view: ClusterView) -> Iterable[Move]:
        """Keep the k adapters in highest demand on every server that may serve them; stop keeping others."""
        self._demand += self.weight * (view.requests_since(now_s - self.period_s, now_s) - self._demand)
        first = np.argsort(-self._demand, kind="stable")[: self.k]
        kept = frozenset(first[self._demand[first] > 0].tolist())
        for adapter in sorted(self._kept - kept):
            for server in view.candidates(adapter).tolist():
                yield Move(adapter, server, keep=False)
        for adapter in sorted(kept - self._kept, key=lambda a: -self._demand[a]):
            for server in view.candidates(adapter).tolist():
                yield Move(adapter, server, keep=True)
        self._kept = kept
