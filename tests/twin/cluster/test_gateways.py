"""Routers of today's gateways, against their rules written out in Python."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from naive_index import PerServer, Shared

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.errors import IncompatibleError
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.twin.cluster.routers.base import AnyCluster, Request
from packer.twin.cluster.routers.dynamo import Dynamo, replicas_of
from packer.twin.cluster.routers.ray import Ray
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.state import outstanding, row_of
from packer.twin.cluster.view import ClusterView
from packer.workload import Workload


class Written(AnyCluster):
    """A router that scores all candidates in Python: the smallest score, the next in turn among equal ones."""

    name = "written"

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def start(self, view: ClusterView, seed: int) -> None:
        """Nothing to prepare."""

    def route(self, request: Request, view: ClusterView) -> int:
        """By the rule."""
        servers: list[int] = view.candidates(request.adapter).tolist()
        scores = self.rule(view._servers, servers, request)
        n, first = len(servers), request.number % len(servers)
        turn = [(first + k) % n for k in range(n)]
        chosen = servers[min(turn, key=lambda j: (scores[j], turn.index(j)))]
        self.rule.sent(chosen)
        return chosen


class Followed(Written):
    """A router that sends requests where another sent them, and notes those that its rule gives to other servers."""

    def __init__(self, rule: Any, server: list[int]) -> None:
        super().__init__(rule)
        self.server, self.matched = server, 0
        self.wrong: list[int] = []

    def route(self, request: Request, view: ClusterView) -> int:
        """As the other one did."""
        chosen, servers = self.server[request.number], view.candidates(request.adapter).tolist()
        if self.rule(view._servers, servers, request)[chosen] != 0.0:
            self.wrong.append(request.number)
        self.matched += self.rule.index.match(self.rule.hashes)[chosen] > 0
        self.rule.sent(chosen)
        return chosen


def _adapters(c: Any, s: int, field: str) -> set[int]:
    """Rows of the adapters of a server with something in a field."""
    return {row for row in range(1, int(c.seen[s]) + 1) if c.adapters[field][s, row] > 0}


def _hashes(fleet: Workload, request: Request, number: int) -> list[object]:
    """Of the whole blocks of 16 tokens of a prompt, whose first ones are those of its adapter."""
    shared = min(fleet.adapters[request.adapter].shared_prefix_tokens, request.input_tokens - 1) // 16
    blocks = request.input_tokens // 16
    return [("of", request.adapter, k) if k < shared else (number, k) for k in range(blocks)]


class Picker:
    """lora_affinity.go, queue.go, kvcache_utilization.go and prefix/plugin.go, weighted, negative."""

    def __init__(self, fleet: Workload, servers: int, blocks: int) -> None:
        self.fleet, self.index = fleet, PerServer(servers, blocks)
        self.hashes: list[object] = []

    def __call__(self, c: Any, servers: list[int], request: Request) -> list[float]:
        """Of each server."""
        queues = [int(c.servers[s].waiting) for s in servers]
        self.hashes = _hashes(self.fleet, request, request.number)[:256]
        match, found = self.index.match(self.hashes), []
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
            prefix = match[s] / len(self.hashes) if self.hashes else 0.0
            found.append(-(lora + 2.0 * queue + 2.0 * kv + 3.0 * prefix))
        return found

    def sent(self, s: int) -> None:
        """The index takes the prompt in."""
        self.index.add(self.hashes, s)


class PrefixCache:
    """AIBrix' prefix_cache.go, where an index has room for everything."""

    def __init__(self, fleet: Workload, servers: int, imbalance: float) -> None:
        self.fleet, self.index, self.imbalance = fleet, Shared(servers, 10**9), imbalance
        self.hashes: list[object] = []

    def __call__(self, c: Any, servers: list[int], request: Request) -> list[float]:
        """0 for each server that may be chosen, else 1."""
        self.hashes = _hashes(self.fleet, request, request.number)
        match = self.index.match(self.hashes)
        percent = [100 * 16 * blocks // request.input_tokens for blocks in match]
        counts = [int(outstanding(c, s)) for s in servers]
        ready = [s for s in servers if max(counts) - min(counts) <= self.imbalance or counts[s] == min(counts)]
        limit = statistics.mean(counts) + statistics.stdev(counts)
        fit = [(-percent[s], counts[s]) for s in ready if match[s] and counts[s] <= limit]
        if not fit:
            return [float(counts[s] != min(counts)) for s in servers]
        return [float(not (s in ready and match[s] and (-percent[s], counts[s]) == min(fit))) for s in servers]

    def sent(self, s: int) -> None:
        """The index takes the prompt in."""
        self.index.add(self.hashes, s)


def _fleet(rate: float) -> Workload:
    """Adapters of which each second one has a system prompt."""
    return Workload(
        [Adapter(f"a{i}", 8, rate, shared_prefix_tokens=(0, 48, 480)[i % 3]) for i in range(12)],
        Lengths.gamma(400, 0.8),
        Lengths.gamma(100, 0.8),
    )


@pytest.mark.parametrize("rate", [0.5, 3.0])
@pytest.mark.parametrize("slots", [2, 6])
def test_the_gateway_scores_as_its_source_says(rate: float, slots: int) -> None:
    """The compiled scores choose the same servers as the four scorers written out, with queues and without."""
    fleet = _fleet(rate)
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=slots, max_lora_rank=8)
    given: dict[str, Any] = {"duration_s": 40.0, "stats_interval_s": 0.0}
    compiled = simulate_cluster(fleet, cluster, router="gateway", **given)
    assert compiled.state is not None
    blocks = int(compiled.state.servers["kv_blocks"][0])
    written = simulate_cluster(fleet, cluster, router=Written(Picker(fleet, 3, blocks)), **given)
    assert compiled.requests.equals(written.requests)
    assert len(set(compiled.requests["server"].drop_nulls().to_list())) == 3


@pytest.mark.parametrize("imbalance", [2.0, 8.0])
def test_aibrix_routes_by_prefixes_as_its_source_says(imbalance: float) -> None:
    """Each request goes to one of the servers that the source may choose for it, whatever it draws among equal ones."""
    fleet = _fleet(1.0)
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 4, max_loras=4, max_lora_rank=8)
    name = f"aibrix-prefix-cache:blocks=100000000,imbalance={imbalance:g}"
    compiled = simulate_cluster(fleet, cluster, router=name, duration_s=40.0)
    assert compiled.state is not None
    followed = Followed(PrefixCache(fleet, 4, imbalance), compiled.state.server.tolist())
    again = simulate_cluster(fleet, cluster, router=followed, duration_s=40.0)
    assert again.requests.equals(compiled.requests)
    assert followed.wrong == []
    assert followed.matched > 0


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
        (
            [50, 30, 20],
            5,
            3,
            [2, 2, 1],
        ),  # 3, 2, 1 scaled to 2.5, 1.67 and at least 1: the largest remainder gets one
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


def test_dynamo_forgets_load_by_its_moving_average() -> None:
    """Requests of one period, 1 by adapter, count as 0.7 and 0.49 in the next ones: rounded, 1 and none."""
    counts = iter(np.array([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    view: Any = SimpleNamespace(
        workload=Workload([Adapter("a", 8, 1.0), Adapter("b", 8, 1.0)]), on=np.ones(2, dtype=np.bool_),
        slots=np.array([2, 2]), residents=np.zeros(2, dtype=np.int64), allowed=lambda a: frozenset((0, 1)),
        candidates=lambda a: np.arange(2), on_gpu=lambda a: np.zeros(2, dtype=np.bool_),
        requests_since=lambda after_s, until_s: next(counts),
    )  # fmt: skip
    router, request = Dynamo(), Request(0, 0, 8, 100, 0.0, 1)
    router.start(view, 0)
    found = []
    for period in range(1, 4):
        router.tick(3.0 * period, view)
        found.append(len({router.route(request, view) for _ in range(2)}))
    assert found == [2, 2, 1]


def test_stale_counts_are_the_systems_or_the_callers() -> None:
    """A system says how old its counts are; the caller may say otherwise."""
    fleet = Workload([Adapter(f"a{i}", 8, 2.0) for i in range(12)])
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=4, max_lora_rank=8)
    given: dict[str, Any] = {"system": "llm-d", "duration_s": 30.0}
    own, same, fresh = (
        simulate_cluster(fleet, cluster, **given, stats_interval_s=age_s).requests for age_s in (None, 0.05, 0.0)
    )
    assert own.equals(same)
    assert not own.equals(fresh)


def test_aibrix_least_latency_draws_a_server_for_requests_of_adapters() -> None:
    """vLLM's latencies bear the base model's name, so that AIBrix knows none of an adapter and draws a server."""
    fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(12)])
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 4, max_loras=12, max_lora_rank=8)
    run = simulate_cluster(fleet, cluster, system="aibrix-least-latency", duration_s=120.0)
    other = simulate_cluster(fleet, cluster, router="random", duration_s=120.0)
    assert run.requests.equals(other.requests)
    base = Workload([*fleet.adapters, Adapter("base", 0, 1.0)])
    with pytest.raises(IncompatibleError, match="requests to the base model"):
        simulate_cluster(base, cluster, system="aibrix-least-latency", duration_s=10.0)
