"""Router "dynamo": NVIDIA Dynamo's LoRA allocation, replicas in proportion to load on rendezvous-hashed workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from packer import checks
from packer.arrays import BoolArray, FloatArray, IntArray
from packer.twin.cluster.routers.base import AnyCluster, Request
from packer.twin.cluster.routers.dynamo_flow import place_replicas
from packer.twin.cluster.routers.hrw import ranked

if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView


@dataclass
class Dynamo(AnyCluster):
    """Round robin over an adapter's replica set, which is recomputed every `period_s`.

    ai-dynamo/dynamo, lib/llm/src/lora: config.rs at 32381ac (defaults), controller.rs at 0a8cd5a, routing/hrw.rs at
    9323dab, load_estimator.rs at 20c307d, filtered_router.rs at 19d3a85. The load of an adapter is the exponential
    moving average of its requests in the last `window_s`. An adapter with load gets its share of all slots in replicas,
    at least one and at most one on each server, on the servers that its hash ranks first. Replicas stay where they are,
    skip servers whose slots are full, and become fewer only after `cooldown` periods. An adapter without load has one
    replica. The adapters that a server holds are those in its slots. `algorithm` "mcf", not the default "hrw"
    (DYN_LORA_ALLOCATION_ALGORITHM), places all replicas together by min-cost flow (`dynamo_flow`), with the
    controller's `recompute_mcf`: adapters with an unchanged number of replicas stay. Without a slot an
    adapter keeps its servers, or gets one.
    """

    name = "dynamo"
    period_s: float = 3.0
    window_s: float = 90.0
    smoothing: float = 0.3
    cooldown: int = 3
    algorithm: str = "hrw"

    def __post_init__(self) -> None:
        checks.real("window_s", self.window_s, low=0.0, open_low=True)
        checks.real("smoothing", self.smoothing, low=0.0, high=1.0, open_low=True)
        checks.integer("cooldown", self.cooldown, low=0)
        checks.choice("algorithm", self.algorithm, ("hrw", "mcf"))

    def start(self, view: ClusterView, seed: int) -> None:
        """Pin every adapter to the server that its hash ranks first."""
        count = len(view.workload)
        self._load: FloatArray = np.full(count, -1.0)
        self._shrunk, self._ticks, self._turn = dict[int, int](), 0, 0
        self._placed, self._wanted = dict[int, list[int]](), dict[int, int]()
        self._allowed: list[frozenset[int]] = []
        self._sets: list[list[int]] = [[]] * count
        self._follow(view)

    def _follow(self, view: ClusterView) -> None:
        """Rank the servers of each adapter again if they have changed; replicas on servers that are off are gone."""
        names = view.workload.names
        allowed = [view.allowed(a) for a in range(len(names))]
        if allowed == self._allowed:
            return
        self._allowed = allowed
        self._rank = [ranked(name, view.candidates(a)) for a, name in enumerate(names)]
        self._by_name = [a for a in np.argsort(names, kind="stable").tolist() if self._rank[a]]
        left = [[s for s in servers if s in may] for servers, may in zip(self._sets, allowed, strict=True)]
        self._sets = [servers or order[:1] for servers, order in zip(left, self._rank, strict=True)]
        self._placed = {a: [s for s in servers if s in allowed[a]] for a, servers in self._placed.items()}

    def route(self, request: Request, view: ClusterView) -> int:
        """Return the next server in turn of the replica set."""
        a = request.adapter
        if not self._sets[a] or not view.allowed(a).issuperset(self._sets[a]):
            self._follow(view)
        replicas = self._sets[a]
        self._turn += 1
        return replicas[self._turn % len(replicas)]

    def tick(self, now_s: float, view: ClusterView) -> None:
        """Recompute the replica sets."""
        self._ticks += 1
        self._follow(view)
        counts = view.requests_since(now_s - self.window_s, now_s)
        new = (self._load < 0.0) & (counts > 0.0)
        known = self._load >= 0.0
        self._load[known] += self.smoothing * (counts[known] - self._load[known])
        self._load[new] = counts[new]
        # `load.round()` of load_estimator.rs: Rust rounds halves up, NumPy would round them to even numbers.
        load = np.floor(np.maximum(self._load, 0.0) + 0.5)
        slots = np.where(view.on, view.slots, 0)
        wanted = replicas_of(load, int(slots.sum()), int(view.on.sum()), view.workload.names)
        if self.algorithm == "mcf":
            self._place_together(load, wanted, slots, view)
            return
        used, dropped = view.residents.copy(), []
        for a in self._by_name:
            if wanted[a] > 0:
                self._place(a, self._after_cooldown(a, int(wanted[a])), used, slots, view.on_gpu(a))
            elif load[a] > 0:
                dropped.append(a)
            else:
                self._sets[a] = self._rank[a][:1]
                self._shrunk.pop(a, None)
        for a in dropped:  # more adapters have load than there are slots: stay where loaded, or one replica
            held = view.on_gpu(a)
            warm = [s for s in self._sets[a] if held[s]]
            if warm:
                self._sets[a] = warm
            else:
                self._place(a, 1, used, slots, held)

    def _place_together(self, load: FloatArray, counts: IntArray, slots: IntArray, view: ClusterView) -> None:
        """Place the replicas of all adapters at once; adapters without a slot stay where loaded, or get one server."""
        wanted = {}
        for a in self._by_name:
            if counts[a] > 0:
                wanted[a] = self._after_cooldown(a, int(counts[a]))
            elif load[a] == 0:
                wanted[a] = 1
                self._shrunk.pop(a, None)
        changed = {a for a, count in wanted.items() if a not in self._placed or self._wanted.get(a) != count}
        found = place_replicas(wanted, self._placed, changed, self._rank, slots)
        for a, servers in found.items():
            self._sets[a] = servers
        self._placed, self._wanted = found, wanted
        used = np.bincount([s for servers in found.values() for s in servers], minlength=len(slots))
        for a in (*(a for a in wanted if a not in found), *(a for a in self._by_name if a not in wanted)):
            held = view.on_gpu(a)
            self._sets[a] = [s for s in self._sets[a] if held[s]] or [
                next((s for s in self._rank[a] if used[s] < slots[s]), self._rank[a][0])
            ]
            used[self._sets[a]] += 1

    def _after_cooldown(self, a: int, wanted: int) -> int:
        """Return the replicas that an adapter may have now: it loses some only every `cooldown` periods."""
        current = len(self._sets[a])
        if wanted >= current:
            self._shrunk.pop(a, None)
            return wanted
        last = self._shrunk.setdefault(a, self._ticks)
        if self._ticks - last < max(self.cooldown, 1):
            return current
        self._shrunk[a] = self._ticks
        return wanted

    def _place(self, a: int, count: int, used: IntArray, slots: IntArray, held: BoolArray) -> None:
        """Choose servers for the replicas: with free slots, those of the last set first; any if none has a slot."""
        # Where the adapter is loaded it already has a slot, which `used` counts.
        free = [s for s in self._rank[a] if used[s] - held[s] < slots[s]]
        before = set(self._sets[a])
        chosen = [s for s in free if s in before][:count]
        chosen += [s for s in free if s not in before][: count - len(chosen)]
        self._sets[a] = chosen or self._rank[a][:count]
        for s in self._sets[a]:
            used[s] += not held[s]


def replicas_of(load: FloatArray, slots: int, servers: int, names: tuple[str, ...]) -> IntArray:
    """Return the replicas of each adapter, int64 (m,): its share of all slots rounded up, from 1 to `servers`.

    If their sum exceeds the slots, they are scaled down, by largest remainders. Each adapter keeps one, so that the sum
    may still exceed the slots slightly (controller.rs, compute_active_replica_counts). An adapter without load gets 0,
    as do those with the least load if more adapters have load than there are slots.
    """
    found = np.zeros(len(load), dtype=np.int64)
    order = sorted(np.flatnonzero(load > 0).tolist(), key=lambda a: (-load[a], names[a]))[:slots]
    if not order:
        return found
    share = load[order] / load[order].sum()
    counts = np.minimum(np.maximum(np.ceil(share * slots), 1.0), servers)
    if counts.sum() > slots:
        counts = np.maximum(counts * (slots / counts.sum()), 1.0)
        whole = np.floor(counts)
        left = slots - int(whole.sum())
        for j in sorted(range(len(order)), key=lambda j: (whole[j] - counts[j], names[order[j]])):
            if left > 0 and whole[j] < servers:
                whole[j] += 1
                left -= 1
        counts = whole
    found[order] = counts
    return found
