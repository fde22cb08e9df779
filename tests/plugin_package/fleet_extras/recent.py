"""A cache policy: adapters that were requested lately stay on the GPU of every server that may serve them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from packer.twin.cluster.caching import LRU, Move
from packer.twin.cluster.view import ClusterView


@dataclass
class Recent:
    """Those with at least `requests` in the last `period_s`; others leave by last use, when room is needed."""

    requests: int = 2
    period_s: float = 60.0
    name = "recent"
    rule = LRU
    high_water = 1.0
    takes_memory = True
    _kept: set[int] = field(default_factory=set, init=False)

    def start(self, view: ClusterView, seed: int) -> None:
        """Forget an earlier run."""
        self._kept.clear()

    def tick(self, now_s: float, view: ClusterView) -> Iterable[Move]:
        """What to keep from now on, and what no longer."""
        requests = view.requests_since(now_s - self.period_s, now_s)
        for adapter, count in enumerate(requests):
            if (count >= self.requests) != (adapter in self._kept):
                self._kept ^= {adapter}
                for server in view.candidates(adapter).tolist():
                    yield Move(adapter, server, keep=adapter in self._kept)
