"""Cache policy "replicas": more copies of adapters in higher demand, on the servers that suit them best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.twin.cluster.caching import LRU, Move

if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView


@dataclass
class ReplicaCache:
    """ROCK's adapter orchestration, equations (5) and (6).

    Every `period_s` an adapter with f requests in the period gets floor(1.5 f^0.6 sqrt(size / mean size))
    replicas. A replica goes to one of the `top` servers by score, with a probability that grows with the square
    of the score, which is the mean of the free share of its memory and of its places. Other adapters leave by
    last use as soon as more than `high_water` of the memory is used. The text leaves open the unit of f and the
    weights of the score, which also counts network distance: all servers here are equally far.
    """

    name = "replicas"
    rule = LRU
    takes_memory = True
    high_water: float = 0.85
    period_s: float = 45.0
    top: int = 3
    _rng: np.random.Generator = field(init=False, repr=False, default_factory=np.random.default_rng)
    _on: dict[int, list[int]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        checks.real("high_water", self.high_water, low=0.0, high=1.0, open_low=True)
        checks.real("period_s", self.period_s, low=0.0, open_low=True)
        checks.integer("top", self.top, low=1)

    def start(self, view: ClusterView, seed: int) -> None:
        """No adapter has a replica."""
        self._rng, self._on = np.random.default_rng((seed, 0x726F636B)), {}

    def tick(self, now_s: float, view: ClusterView) -> Iterable[Move]:
        """Fewer or more replicas, by the requests of the last period."""
        wanted = replicas(view.requests_since(now_s - self.period_s, now_s), view.adapter_bytes)
        score = self._scores(view)
        for adapter in sorted(set(self._on) | set(np.flatnonzero(wanted).tolist())):
            own = self._on.setdefault(adapter, [])
            servers = view.candidates(adapter).tolist()
            target = min(int(wanted[adapter]), len(servers))
            while len(own) > target:
                yield Move(adapter, own.pop(0), keep=False)
            while len(own) < target:
                free = [s for s in servers if s not in own]
                best = sorted(free, key=lambda s: (-score[s], s))[: self.top]
                weights = score[best] ** 2
                total = weights.sum()
                chance = weights / total if total > 0 else None
                server = int(self._rng.choice(best, p=chance))
                own.append(server)
                score[server] *= 0.9  # the next replica finds it fuller
                yield Move(adapter, server, keep=True)

    def _scores(self, view: ClusterView) -> npt.NDArray[np.float64]:
        memory = 1.0 - view.used_share
        places = 1.0 - np.minimum(1.0, (view.running + view.waiting) / np.maximum(view.places, 1))
        return np.asarray((memory + places) / 2)


def replicas(requests: npt.NDArray[np.float64], size_bytes: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Replicas of each adapter by ROCK's equation (5), int64 (m,), from its requests in a period and its bytes."""
    found: npt.NDArray[np.int64] = np.floor(
        1.5 * requests**0.6 * np.sqrt(size_bytes / size_bytes.mean())
    ).astype(np.int64)
    return found
