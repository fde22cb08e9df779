"""Router "dynamo": NVIDIA Dynamo's LoRA allocation, replicas in proportion to load on rendezvous-hashed workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from packer import checks
from packer.arrays import BoolArray, FloatArray, IntArray
from packer.twin.cluster.routers.base import AnyCluster, Request
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
    (DYN_LORA_ALLOCATION_ALGORITHM), places all replicas together by min-cost flow (`place_replicas`), with
    the controller's `recompute_mcf`: adapters with an unchanged number of replicas stay. Without a slot an adapter
    keeps its servers, or gets one.
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


CANDIDATES, PREFERENCE, LOAD, KEEP = 16, 1, 1000, 250
"""Servers of an adapter by its hash; costs of each further position in that order and of a load; reward for staying."""


def place_replicas(
    wanted: Mapping[int, int], before: Mapping[int, Sequence[int]], changed: set[int],
    ranked: Sequence[Sequence[int]], slots: IntArray,
) -> dict[int, list[int]]:  # fmt: skip
    """Return the servers of each adapter, ascending; an adapter for which no slot is left is missing.

    wanted: replicas of each adapter, at least 1. before: its last servers. changed: adapters that may move; the others
    stay, unless slots are left that replicas of changed ones can't reach. ranked: servers of each adapter in the order
    of its hash. slots (S,). As many replicas as possible are placed, at minimum total cost: `PREFERENCE` times the
    position in `ranked`, plus `LOAD` on a server that did not have the adapter, or minus `KEEP` on one that had it.
    Each adapter has edges to its first `CANDIDATES` servers and to those that had it; to all if these do not suffice.
    (lora/routing/mcf_allocator.rs at 11d568d, `solve`; of several placements with equal cost it may choose another.)
    """
    found, missing = _attempt(wanted, before, changed, ranked, slots)
    if missing and not changed.issuperset(wanted) and slots.sum() > sum(wanted.values()) - missing:
        again, fewer = _attempt(wanted, before, set(wanted), ranked, slots)
        found = again if fewer < missing else found
    return {a: sorted(servers) for a, servers in found.items() if servers}


def _attempt(
    wanted: Mapping[int, int], before: Mapping[int, Sequence[int]], changed: set[int],
    ranked: Sequence[Sequence[int]], slots: IntArray,
) -> tuple[dict[int, list[int]], int]:  # fmt: skip
    """Return the servers of each adapter if only `changed` ones move, and the number of replicas without a server."""
    found = {a: [] if a in changed else list(before.get(a, ()))[:count] for a, count in wanted.items()}
    stay = np.fromiter(chain.from_iterable(found.values()), dtype=np.int64)
    room = slots - np.bincount(stay, minlength=len(slots))
    open_ = set(np.flatnonzero(room > 0).tolist())
    demand = {a: wanted[a] - len(servers) for a, servers in found.items() if wanted[a] > len(servers)}
    total = sum(demand.values())
    if not demand or not open_:
        return found, total
    usable = {a: open_.difference(found[a]) for a in demand}
    few: dict[int, list[int]] = {}
    for a, count in demand.items():
        likely = dict.fromkeys([*ranked[a][: max(CANDIDATES, count)], *sorted(before.get(a, ()))])
        few[a] = [s for s in likely if s in usable[a]]
    chosen = _flow(demand, few, before, ranked, room)
    missing = total - sum(map(len, chosen.values()))
    complete = all(len(few[a]) == len(usable[a].intersection(ranked[a])) for a in demand)
    # Other servers help only if some were left out, and if there are places that no replica takes.
    if missing and not complete and room[room > 0].sum() > total - missing:
        every = {a: [s for s in ranked[a] if s in usable[a]] for a in demand}
        chosen = _flow(demand, every, before, ranked, room)
        missing = total - sum(map(len, chosen.values()))
    return {a: servers + chosen.get(a, []) for a, servers in found.items()}, missing


def _flow(
    demand: Mapping[int, int], edges: Mapping[int, Sequence[int]], before: Mapping[int, Sequence[int]],
    ranked: Sequence[Sequence[int]], room: IntArray,
) -> dict[int, list[int]]:  # fmt: skip
    """Return the servers that adapters get over these edges: as many replicas as fit, at minimum cost."""
    from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

    adapters = list(demand)
    tail, head, cost = [], [], []
    for i, a in enumerate(adapters):
        place = {s: k for k, s in enumerate(ranked[a])}
        had = set(before.get(a, ()))
        for s in edges[a]:
            tail.append(i)
            head.append(s)
            cost.append(PREFERENCE * place[s] + (-KEEP if s in had else LOAD))
    if not tail:
        return {}
    m, n = len(adapters), len(room)
    source, sink = m + n, m + n + 1
    flow, one = SimpleMinCostFlow(), np.ones(len(tail), dtype=np.int64)
    pairs = flow.add_arcs_with_capacity_and_unit_cost(np.array(tail), np.array(head) + m, one, np.array(cost))
    needs = np.array([demand[a] for a in adapters])
    flow.add_arcs_with_capacity_and_unit_cost(np.full(m, source), np.arange(m), needs, np.zeros(m, dtype=np.int64))
    free = np.maximum(room, 0)
    flow.add_arcs_with_capacity_and_unit_cost(np.arange(n) + m, np.full(n, sink), free, np.zeros(n, dtype=np.int64))
    flow.set_nodes_supplies(np.array([source, sink]), np.array([needs.sum(), -needs.sum()]))
    flow.solve_max_flow_with_min_cost()
    used = flow.flows(pairs) > 0
    found: dict[int, list[int]] = {}
    for i, s in zip(np.array(tail)[used].tolist(), np.array(head)[used].tolist(), strict=True):
        found.setdefault(adapters[i], []).append(s)
    return found
