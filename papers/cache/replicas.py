"""Cache policy "replicas": adapters in higher demand get more copies, on the servers with the best scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from packer import checks
from packer.arrays import FloatArray, IntArray, distinct
from packer.twin.cluster.caching import LRU, Move

if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView

NEIGHBOURS, DISTANCE = 6, 0.25  # DBSCAN's parameters, as published.


@dataclass
class ReplicaCache:
    """ROCK's adapter orchestration, section 4.2.

    DBSCAN clusters servers that are similar in memory, bandwidth over memory and speed. Adapters are divided by size
    into `partitions` sets of equal number. Every `period_s` each set gets floor(share of the requests × servers) + 1
    servers of every cluster (equation 4), assigned round robin, so that sets share servers if there are too few. An
    adapter with f requests in the period gets floor(1.5 f^0.6 sqrt(size / mean size)) replicas on the servers of its
    set (equation 5). A replica goes to one of the `top` servers by score, with a probability proportional to the
    square of the score (equation 6). The score is the mean of bandwidth, free memory and nearness. Other adapters
    leave, least recently used first, if more than `high_water` of the memory is used.

    The paper does not define the sets of adapters, the unit of f, and the weights and units of the score. Here
    bandwidth is that of loads to the GPU, relative to the highest; nearness is 1 on the machine of a server that holds
    the adapter, 1/2 elsewhere. The twin does not model fragmentation of memory.
    """

    name = "replicas"
    rule = LRU
    takes_memory = True
    high_water: float = 0.85
    period_s: float = 45.0
    top: int = 3
    partitions: int = 4

    def __post_init__(self) -> None:
        checks.integer("top", self.top, low=1)
        checks.integer("partitions", self.partitions, low=1)

    def start(self, view: ClusterView, seed: int) -> None:
        """Start without replicas; cluster the servers and divide the adapters into sets."""
        self._rng, self._on = np.random.default_rng((seed, 0x726F636B)), dict[int, list[int]]()
        speed = 1.0 / np.maximum(view.service_s(1, 0), 1e-12)
        memory = view.pool_bytes / 1e9
        self._clusters = alike(np.column_stack([memory, view.load_bytes_s / memory, speed]))
        self._sets = np.array_split(np.argsort(view.adapter_bytes, kind="stable"), self.partitions)

    def tick(self, now_s: float, view: ClusterView) -> Iterable[Move]:
        """Remove or add replicas according to the requests of the last period."""
        requests, size = view.requests_since(now_s - self.period_s, now_s), view.adapter_bytes
        wanted, used, pool = replicas(requests, size), view.used_share.copy(), view.pool_bytes
        link = view.load_bytes_s / view.load_bytes_s.max()
        shares = [float(requests[own].sum()) for own in self._sets]
        for own, servers in zip(self._sets, partitions(shares, self._clusters), strict=True):
            for a in (a for a in sorted(own.tolist()) if wanted[a] or a in self._on):
                here = [s for s in view.candidates(a).tolist() if s in servers]
                held = self._on.setdefault(a, [])
                stay = [s for s in held if s in here][: int(wanted[a])]
                for s in (s for s in held if s not in stay):
                    yield Move(a, s, keep=False)
                self._on[a] = stay
                near = view.on_machine(view.on_gpu(a))
                while len(stay) < min(int(wanted[a]), len(here)):
                    score = (link + np.maximum(0.0, 1.0 - used) + np.where(near, 1.0, 0.5)) / 3
                    best = sorted((s for s in here if s not in stay), key=lambda s: (-score[s], s))
                    best = best[: self.top]
                    # Equation (6): the paper gives no weights of the score's parts.
                    weights = score[best] ** 2
                    s = int(self._rng.choice(best, p=weights / weights.sum()))
                    stay.append(s)
                    used[s] += size[a] / pool[s]
                    yield Move(a, s, keep=True)


def alike(features: FloatArray) -> list[IntArray]:
    """Servers of each DBSCAN cluster by features (S, k), each scaled to [0, 1]. Outliers form one more cluster."""
    from sklearn.cluster import DBSCAN

    span = np.ptp(features, axis=0)
    scaled = (features - features.min(axis=0)) / np.where(span > 0, span, 1.0)
    label = DBSCAN(eps=DISTANCE, min_samples=NEIGHBOURS).fit_predict(scaled)
    return [np.flatnonzero(label == k) for k in distinct(label)]


def partitions(requests: list[float], clusters: list[IntArray]) -> list[set[int]]:
    """Servers of each set of adapters by ROCK's equation (4), from the requests of each set in a period."""
    total = sum(requests) or 1.0
    found: list[set[int]] = [set() for _ in requests]
    for servers in clusters:
        first = 0
        for own, count in zip(found, requests, strict=True):
            places = min(int(count / total * len(servers)) + 1, len(servers))
            own.update(servers[(first + np.arange(places)) % len(servers)].tolist())
            first += places
    return found


def replicas(requests: FloatArray, size_bytes: FloatArray) -> IntArray:
    """Replicas of each adapter by ROCK's equation (5), int64 (m,), from requests in a period (m,) and bytes (m,)."""
    found: IntArray = np.floor(1.5 * requests**0.6 * np.sqrt(size_bytes / size_bytes.mean())).astype(np.int64)
    return found
