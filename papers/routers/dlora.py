"""Router "dlora": the replica holder whose requests take the fewest rounds of merged and unmerged batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from packer.arrays import IntArray
from packer import checks
from packer.cluster import Cluster
from packer.papers.routers.migration import Task, balance, engines_to_balance
from packer.twin.cluster.routers.base import Request, Resend
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView

MERGED_ROUND = 0.6  # Time of a merged batch, which has one adapter, relative to an unmerged batch.
LINK_BYTES_S = 32 * 2.0**30
UNKNOWN_S = 5.0  # Service time of an adapter without finished requests.


@dataclass
class DLoraRouter:
    """dLoRA's dispatcher (Wu et al., OSDI '24), to one of the servers that the placement gives the adapter.

    With batches of `batch` requests and n_m requests of adapter m, the cost of a server is 0.6 × Σ floor(n_m / batch)
    merged rounds plus floor(Σ (n_m mod batch) / batch) unmerged rounds. The lowest cost wins, then the fewest requests.
    `mode` "migrate": a server without the adapter may take the request too. It gives up an idle adapter that another
    server also holds, and its cost includes the transfer over a link of 32 GiB/s. `mode` "periodic": every `period_s`,
    requests and adapters move between the fullest and the emptiest engine (`packer.papers.routers.migration`), which
    must be `dlora`. Moved requests keep their tokens; their KV cache is computed again. Places that the program leaves
    free keep their old adapters. An adapter that no server holds goes to the server with the fewest requests.
    """

    name = "dlora"
    mode: str = "dispatch"
    batch: int = 32
    period_s: float = 10.0

    def __post_init__(self) -> None:
        checks.integer("batch", self.batch, low=1)
        checks.choice("mode", self.mode, ("dispatch", "migrate", "periodic"))

    @property
    def relocates(self) -> bool:
        """Whether the placement only gives the initial servers of the adapters."""
        return self.mode != "dispatch"

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Why the router can't run: to migrate adapters, it needs an initial placement."""
        if self.relocates and cluster.placement is None:
            return f"mode={self.mode} needs a placement to start from: use plan.cluster(), or the system dlora"
        return None

    def start(self, view: ClusterView, seed: int) -> None:
        """Put adapters on the servers of the placement, or on all servers without a placement."""
        placement, number = view.cluster.placement, {name: i for i, name in enumerate(view.workload.names)}
        everywhere = set(range(len(view.workload)))
        servers = range(len(view.cluster))
        if placement is None:
            self._holds = [everywhere for _ in servers]
        else:
            self._holds = [{number[name] for name in placement[s]} for s in servers]
        self._given = [np.zeros((0, 2), dtype=np.int64) for _ in servers]

    def route(self, request: Request, view: ClusterView) -> int:
        """Choose the server with the lowest cost."""
        a = request.adapter
        allowed: list[int] = view.candidates(a).tolist()
        holders = [s for s in allowed if a in self._holds[s]] if self.relocates else allowed
        rows = {s: self._requests(s, view) for s in (allowed if self.relocates else holders)}
        if not holders:
            holders = [min(allowed, key=lambda s: (len(self._given[s]), s))]
            self._holds[holders[0]].add(a)
        best = min((self._cost(rows[s], a), len(self._given[s]), s, -1) for s in holders)
        if self.mode == "migrate":
            moved_s = float(view.adapter_bytes[a]) / LINK_BYTES_S
            for s in (each for each in allowed if each not in holders):
                # An adapter without requests here that another server holds too.
                idle = (x for x in sorted(self._holds[s]) if not rows[s][x])
                spare = next((x for x in idle if sum(x in held for held in self._holds) > 1), None)
                if spare is not None:
                    best = min(best, (self._cost(rows[s], a) + moved_s, len(self._given[s]), s, spare))
        _, _, server, spare = best
        if spare >= 0:
            self._holds[server] = (self._holds[server] - {spare}) | {a}
        self._given[server] = np.append(self._given[server], [[request.number, a]], axis=0)
        return server

    def tick(self, now_s: float, view: ClusterView) -> list[Resend]:
        """In mode "periodic", choose the requests that move to another server."""
        if self.mode != "periodic":
            return []
        known = [self._accepted(s, view) for s in range(len(self._given))]
        room = view.kv_blocks.tolist()
        pair = engines_to_balance([sum(n for _, _, n in own) for own in known], room, list(map(len, known)))
        if not pair:
            return []
        rows = [(e, number, a, blocks) for e, s in enumerate(pair) for number, a, blocks in known[s]]
        means = {a: view.served_s(a) for a in {a for _, _, a, _ in rows}}
        task = Task(
            [(e, a, blocks) for e, _, a, blocks in rows],
            [room[s] for s in pair],
            [len(self._holds[s]) for s in pair],
            {a: UNKNOWN_S if math.isnan(mean) else mean for a, mean in means.items()},
            view.block_bytes / LINK_BYTES_S,
        )
        chosen, held = balance(task)
        for s, wanted in zip(pair, held, strict=False):
            # An engine holds as many adapters as before: unwanted ones stay in the places that are left.
            before = sorted(self._holds[s] - wanted)
            self._holds[s] = wanted | set(before[: max(0, len(self._holds[s]) - len(wanted))])
        moves = []
        for (e, number, a, _), to in zip(rows, chosen, strict=True):
            if to != e:
                self._given[pair[e]] = self._given[pair[e]][self._given[pair[e]][:, 0] != number]
                self._given[pair[to]] = np.append(self._given[pair[to]], [[number, a]], axis=0)
                moves.append(Resend(number, pair[to]))
        return moves

    def _accepted(self, s: int, view: ClusterView) -> list[tuple[int, int, int]]:
        """Number, adapter and blocks of the unfinished requests that a server's engine has accepted."""
        self._requests(s, view)
        rows = np.column_stack([self._given[s], view.blocks_of(self._given[s][:, 0])])
        return [tuple(row) for row in rows[rows[:, 2] >= 0].tolist()]

    def _requests(self, s: int, view: ClusterView) -> IntArray:
        """Unfinished requests of each adapter on a server, (m,)."""
        own = self._given[s]
        self._given[s] = own[view.is_unfinished(own[:, 0])]
        return np.bincount(self._given[s][:, 1], minlength=len(view.workload))

    def _cost(self, requests: IntArray, a: int) -> float:
        counts = requests.copy()
        counts[a] += 1
        merged = int((counts // self.batch).sum())
        return MERGED_ROUND * merged + int((counts % self.batch).sum()) // self.batch
