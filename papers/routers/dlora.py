"""Router "dlora": the replica holder whose requests take the fewest rounds of merged and unmerged batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from packer.arrays import IntArray
from packer import checks
from packer.cluster import Cluster
from packer.twin.cluster.routers.base import Request
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView

MERGED_ROUND = 0.6
"""Time of a merged batch, which is of one adapter, relative to an unmerged one."""
LINK_BYTES_S = 32 * 2.0**30


@dataclass
class DLoraRouter:
    """dLoRA's dispatcher (Wu et al., OSDI '24), to one of the servers that the placement gives the adapter.

    With batches of `batch` requests and n_m requests of adapter m, a server has 0.6 × Σ floor(n_m / batch) merged
    rounds and floor(Σ (n_m mod batch) / batch) others; the fewest win, then the fewest requests. `mode` "migrate":
    a server that holds an idle adapter with another replica may also take the request, in exchange for that
    adapter, at the price of the transfer over a link of 32 GiB/s. The engines of packer never merge: the
    cost is dLoRA's, the batches are not.
    """

    name = "dlora"
    mode: str = "dispatch"
    batch: int = 32
    _holds: list[set[int]] = field(init=False, repr=False, default_factory=list)
    _given: list[list[tuple[int, int]]] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        checks.integer("batch", self.batch, low=1)
        checks.choice("mode", self.mode, ("dispatch", "migrate"))

    @property
    def relocates(self) -> bool:
        """Whether the placement is only where adapters lie at first."""
        return self.mode == "migrate"

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """To migrate adapters there must be a placement to start from."""
        if self.mode == "migrate" and cluster.placement is None:
            return "mode=migrate needs a placement to start from: use plan.cluster(), or the system dlora"
        return None

    def start(self, view: ClusterView, seed: int) -> None:
        """Adapters lie where the placement says, or everywhere."""
        placement, number = view.cluster.placement, {name: i for i, name in enumerate(view.workload.names)}
        everywhere = set(range(len(view.workload)))
        servers = range(len(view.cluster))
        if placement is None:
            self._holds = [everywhere for _ in servers]
        else:
            self._holds = [{number[name] for name in placement[s]} for s in servers]
        self._given = [[] for _ in servers]

    def route(self, request: Request, view: ClusterView) -> int:
        """The least cost."""
        a = request.adapter
        allowed: list[int] = view.candidates(a).tolist()
        holders = [s for s in allowed if a in self._holds[s]] if self.relocates else allowed
        rows = {s: self._requests(s, view) for s in (allowed if self.relocates else holders)}
        best = min((self._cost(rows[s], a), len(self._given[s]), s, -1) for s in holders)
        if self.relocates:
            moved_s = float(view.adapter_bytes[a]) / LINK_BYTES_S
            for s in (each for each in allowed if each not in holders):
                # One without requests that another server holds too.
                idle = (x for x in sorted(self._holds[s]) if not rows[s][x])
                spare = next((x for x in idle if sum(x in held for held in self._holds) > 1), None)
                if spare is not None:
                    best = min(best, (self._cost(rows[s], a) + moved_s, len(self._given[s]), s, spare))
        _, _, server, spare = best
        if spare >= 0:
            self._holds[server] = (self._holds[server] - {spare}) | {a}
        self._given[server].append((request.number, a))
        return server

    def _requests(self, s: int, view: ClusterView) -> Counter[int]:
        """Unfinished requests of each adapter on a server."""
        numbers: IntArray = np.array([number for number, _ in self._given[s]], dtype=np.int64)
        left = set(view.unfinished(numbers).tolist())
        self._given[s] = [pair for pair in self._given[s] if pair[0] in left]
        return Counter(a for _, a in self._given[s])

    def _cost(self, requests: Counter[int], a: int) -> float:
        counts = requests + Counter({a: 1})
        merged = sum(n // self.batch for n in counts.values())
        return MERGED_ROUND * merged + math.floor(sum(n % self.batch for n in counts.values()) / self.batch)
