"""Dynamo's placement of replicas by min-cost flow, against its graph solved by NetworkX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx
import numpy as np
import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.io.profiles import load_profile
from packer.twin.cluster.routers.dynamo_flow import place_replicas
from packer.twin.cluster.simulate import simulate_cluster
from packer.workload import Workload

OVERFLOW = 10**12


def _cost(a: int, s: int, before: Mapping[int, Sequence[int]], ranked: Sequence[Sequence[int]]) -> int:
    """build_edge_cost of mcf_allocator.rs with its defaults."""
    return ranked[a].index(s) + (-250 if s in before.get(a, ()) else 1000)


def _least_cost(
    wanted: Mapping[int, int], before: Mapping[int, Sequence[int]], stays: Mapping[int, Sequence[int]],
    ranked: Sequence[Sequence[int]], slots: Sequence[int], first: int,
) -> int:  # fmt: skip
    """The cost of the graph in build_and_solve, with `first` servers of each adapter's order."""
    graph = networkx.DiGraph()
    room = [count - sum(s in servers for servers in stays.values()) for s, count in enumerate(slots)]
    total = sum(wanted.values()) - sum(map(len, stays.values()))
    graph.add_node("source", demand=-total)
    graph.add_node("sink", demand=total)
    graph.add_edge("overflow", "sink", capacity=total, weight=0)
    for s, free in enumerate(room):
        graph.add_edge(("server", s), "sink", capacity=free, weight=0)
    for a, count in wanted.items():
        left = count - len(stays.get(a, ()))
        graph.add_edge("source", ("adapter", a), capacity=left, weight=0)
        graph.add_edge(("adapter", a), "overflow", capacity=left, weight=OVERFLOW)
        for s in {*ranked[a][: max(first, left)], *before.get(a, ())} - set(stays.get(a, ())):
            graph.add_edge(("adapter", a), ("server", s), capacity=1, weight=_cost(a, s, before, ranked))
    return int(networkx.min_cost_flow_cost(graph))


@pytest.mark.parametrize("tight", [False, True])
def test_placements_cost_as_little_as_those_of_the_source(tight: bool) -> None:
    """All replicas together, and later only those that changed, cost what the source's graph costs at the least."""
    overflowed = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        servers, m = 20, 24
        ranked = [rng.permutation(servers).tolist() for _ in range(m)]
        slots = rng.integers(1, 3, servers) + 2 * (not tight)
        wanted = {a: int(rng.integers(1, 4)) for a in range(m)}
        found = place_replicas(wanted, {}, set(wanted), ranked, slots)
        costs = [_least_cost(wanted, {}, {}, ranked, slots.tolist(), first) for first in (16, servers)]
        assert _total(wanted, found, {}, {}, ranked) == (costs[0] if costs[0] < OVERFLOW else costs[1])
        overflowed += costs[1] >= OVERFLOW
        later = {a: max(1, count + int(rng.integers(-1, 2))) for a, count in wanted.items()}
        changed = {a for a in wanted if later[a] != wanted[a] or a not in found}
        stays = {a: servers_ for a, servers_ in found.items() if a not in changed}
        again = place_replicas(later, found, changed, ranked, slots)
        used = np.bincount([s for own in again.values() for s in own], minlength=servers)
        assert (used <= slots).all()
        assert all(len(set(own)) == len(own) <= later[a] for a, own in again.items())
        expected = _least_cost(later, found, stays, ranked, slots.tolist(), 16)
        if expected < OVERFLOW:  # else adapters that did not change may have moved, too
            assert _total(later, again, found, stays, ranked) == expected
            assert all(set(stays[a]) <= set(again[a]) for a in stays)
    assert (overflowed > 0) == tight


def _total(
    wanted: Mapping[int, int], found: Mapping[int, Sequence[int]], before: Mapping[int, Sequence[int]],
    stays: Mapping[int, Sequence[int]], ranked: Sequence[Sequence[int]],
) -> int:  # fmt: skip
    """What a placement costs, without the adapters that stay."""
    missing = sum(wanted.values()) - sum(map(len, found.values()))
    moved = ((a, s) for a, own in found.items() for s in own if s not in stays.get(a, ()))
    return missing * OVERFLOW + sum(_cost(a, s, before, ranked) for a, s in moved)


def test_a_blocked_adapter_moves_others_only_if_it_must() -> None:
    """A new adapter takes a free slot; where it can reach none beside its own replica, an unchanged one makes room."""
    ranked = [[0, 1], [0, 1]]
    assert place_replicas({0: 1, 1: 1}, {0: [0]}, {1}, ranked, np.array([1, 1])) == {0: [0], 1: [1]}
    found = place_replicas({0: 1, 1: 2}, {0: [1], 1: [0]}, {1}, ranked, np.array([2, 1]))
    assert found == {0: [0], 1: [0, 1]}


def test_dynamo_with_min_cost_flow_serves_more_adapters_than_slots() -> None:
    """Each request goes to a server, a hot adapter gets more of them, and the same seed decides alike."""
    fleet = Workload([Adapter("hot", 8, 12.0), *(Adapter(f"a{i}", 8, 0.2) for i in range(9))])
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=2, max_lora_rank=8)
    runs = [simulate_cluster(fleet, cluster, system="dynamo-mcf", duration_s=120.0) for _ in range(2)]
    frame = runs[0].requests.drop_nulls()
    hot = frame.filter(frame["adapter"] == "hot")
    assert hot.filter(hot["sent_s"] > 10.0)["server"].n_unique() >= 2
    assert set(frame["adapter"]) == set(fleet.names)
    assert runs[0].requests.equals(runs[1].requests)
