"""NVIDIA Dynamo's placement of replicas by min-cost flow (lib/llm/src/lora/routing/mcf_allocator.rs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from packer.arrays import IntArray

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
    (mcf_allocator.rs at 11d568d, `solve`; of several placements with equal cost it may choose another.)
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
