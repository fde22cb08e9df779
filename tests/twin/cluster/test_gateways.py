"""Routers of today's gateways, against their rules written out in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.io.profiles import load_profile
from packer.twin.cluster.routers.base import AnyCluster, Request
from packer.twin.cluster.routers.dynamo import replicas_of
from packer.twin.cluster.routers.ray import Ray
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.state import row_of
from packer.twin.cluster.view import ClusterView
from packer.workload import Workload


class Written(AnyCluster):
    """A router that scores all candidates in Python: the smallest score, the next in turn among equal ones."""

    name = "written"

    def __init__(self, rule: Callable[..., list[float]]) -> None:
        self.rule = rule

    def start(self, view: ClusterView, seed: int) -> None:
        """Nothing to prepare."""

    def route(self, request: Request, view: ClusterView) -> int:
        """By the rule."""
        servers: list[int] = view.candidates(request.adapter).tolist()
        scores = self.rule(view._servers, servers, request)
        n, first = len(servers), request.number % len(servers)
        turn = [(first + k) % n for k in range(n)]
        return servers[min(turn, key=lambda j: (scores[j], turn.index(j)))]


def _adapters(c: Any, s: int, field: str) -> set[int]:
    """Rows of the adapters of a server with something in a field."""
    return {row for row in range(1, int(c.seen[s]) + 1) if c.adapters[field][s, row] > 0}


def gateway(c: Any, servers: list[int], request: Request) -> list[float]:
    """lora_affinity.go, queue.go and kvcache_utilization.go, weights of 1, negative."""
    queues = [int(c.servers[s].waiting) for s in servers]
    found = []
    for s, waiting in zip(servers, queues, strict=True):
        queue = 1.0 if max(queues) == min(queues) else (max(queues) - waiting) / (max(queues) - min(queues))
        kv = 1.0 - c.servers[s].used / c.servers[s].kv_blocks
        row = int(row_of(c, s, request.adapter))
        running, queued = _adapters(c, s, "in_batch"), _adapters(c, s, "head")
        lora = 0.0
        if row in running:
            lora = 1.0
        elif len(running) + len(queued) < c.servers[s].slots:
            lora = 0.8
        elif row in queued:
            lora = 0.6
        found.append(-(lora + queue + kv))
    return found


@pytest.mark.parametrize("rate", [0.5, 3.0])
@pytest.mark.parametrize("slots", [2, 6])
def test_the_gateway_scores_as_its_source_says(rate: float, slots: int) -> None:
    """The compiled scores choose the same servers as the three scorers written out, with queues and without."""
    fleet = Workload([Adapter(f"a{i}", 8, rate) for i in range(12)])
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=slots, max_lora_rank=8)
    given: dict[str, Any] = {"duration_s": 40.0, "stats_interval_s": 0.0}
    compiled = simulate_cluster(fleet, cluster, router="gateway", **given)
    written = simulate_cluster(fleet, cluster, router=Written(gateway), **given)
    assert compiled.requests.equals(written.requests)
    assert len(set(compiled.requests["server"].drop_nulls().to_list())) == 3


def test_aibrix_stays_where_the_adapter_is() -> None:
    """A request goes where its adapter runs or waits; without one anywhere, to each server now and then."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.6) for i in range(12)])
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=6, max_lora_rank=8)
    run = simulate_cluster(fleet, cluster, system="aibrix", duration_s=120.0)
    frame = run.requests.drop_nulls()
    firsts = set()
    for name in fleet.names:
        own = frame.filter(frame["adapter"] == name)
        before: list[tuple[float, float, int]] = []
        for sent_s, finish_s, s in zip(own["sent_s"], own["finish_s"], own["server"], strict=True):
            # A step takes tens of ms: what came or ended just now may or may not be in its metrics.
            sure = {server for came, ended, server in before if came < sent_s - 0.2 and ended > sent_s + 0.2}
            perhaps = {server for came, ended, server in before if ended > sent_s - 0.2}
            if sure:
                assert s in perhaps
            elif not perhaps:
                firsts.add(s)
            before.append((sent_s, finish_s, s))
    assert firsts == {0, 1, 2}


def test_ray_keeps_an_adapter_where_it_was_loaded_until_that_replica_refuses() -> None:
    """A hot adapter stays on its first replica; with a limit of requests others take it."""
    fleet = Workload([Adapter("hot", 8, 12.0), *(Adapter(f"a{i}", 8, 0.2) for i in range(6))])
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=8, max_lora_rank=8)
    frames = [
        simulate_cluster(fleet, cluster, router=Ray(limit), duration_s=60.0).requests.drop_nulls()
        for limit in (None, 8)
    ]
    own, others = (frame.filter(frame["adapter"] == "hot") for frame in frames)
    assert own["server"].n_unique() == 1
    assert others["server"].n_unique() == 3


def test_ray_gives_a_new_adapter_to_the_replica_with_the_fewest() -> None:
    """Adapters that come one after the other spread evenly over the replicas."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.05) for i in range(12)])
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=12, max_lora_rank=8)
    frame = simulate_cluster(fleet, cluster, system="ray-serve", duration_s=600.0).requests.drop_nulls()
    homes = {name: set(rows["server"]) for (name,), rows in frame.group_by("adapter")}
    assert all(len(servers) == 1 for servers in homes.values())
    counts = np.bincount([next(iter(servers)) for servers in homes.values()], minlength=3)
    assert counts.max() - counts.min() <= 2  # two may come while a third is loaded


@pytest.mark.parametrize(
    ("load", "slots", "servers", "expected"),
    [
        ([60, 30, 10], 12, 5, [5, 4, 2]),  # ceil of 7.2, 3.6, 1.2; at most one on each server
        ([50, 50], 2, 10, [1, 1]),
        ([25, 25, 25, 25], 7, 10, [2, 2, 2, 1]),  # 2 each scaled to 1.75; three slots are left
        ([5, 4, 3, 0], 2, 4, [1, 1, 0, 0]),  # the third has no slot
        (
            [97, 1, 1, 1],
            6,
            6,
            [4, 1, 1, 1],
        ),  # 6, 1, 1, 1 scaled by 6 / 9, at least 1: one more than there are slots
    ],
)
def test_dynamo_counts_replicas_as_its_source_says(
    load: list[float], slots: int, servers: int, expected: list[int]
) -> None:
    """Shares of the slots rounded up, within the servers, and never more than there are slots."""
    names = tuple("abcdefgh"[: len(load)])
    assert replicas_of(np.array(load, dtype=float), slots, servers, names).tolist() == expected


def test_dynamo_gives_a_hot_adapter_more_servers_and_keeps_the_others_where_they_are() -> None:
    """Replicas follow the load; quiet adapters stay on the server that their hash ranks first."""
    fleet = Workload([Adapter("hot", 8, 12.0), *(Adapter(f"a{i}", 8, 0.2) for i in range(6))])
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=4, max_lora_rank=8)
    frame = simulate_cluster(fleet, cluster, system="dynamo", duration_s=120.0).requests.drop_nulls()
    hot = frame.filter(frame["adapter"] == "hot")
    assert hot.filter(hot["sent_s"] < 3.0)["server"].n_unique() == 1
    assert hot.filter(hot["sent_s"] > 10.0)["server"].n_unique() == 3


def test_stale_counts_are_the_systems_or_the_callers() -> None:
    """A system says how old its counts are; the caller may say otherwise."""
    fleet = Workload([Adapter(f"a{i}", 8, 2.0) for i in range(12)])
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=4, max_lora_rank=8)
    given: dict[str, Any] = {"system": "llm-d", "duration_s": 30.0}
    own, same, fresh = (
        simulate_cluster(fleet, cluster, **given, stats_interval_s=age_s).requests
        for age_s in (None, 0.05, 0.0)
    )
    assert own.equals(same)
    assert not own.equals(fresh)
