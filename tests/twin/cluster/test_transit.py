"""Between router and server: network time, host memory of a node, transfers from the store, a client's ceiling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster, Node, ServerKind, Store
from packer.engine_spec import EngineSpec
from packer.errors import ValidationError
from packer.papers.jobs.engine import Jobs
from packer.profile import GpuSpec, LatencySpec, MemorySpec, ModelSpec, Profile
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.system import System
from packer.twin.cluster.transit import transit_of
from packer.twin.engine import state as rows
from packer.workload import Workload

SYSTEM = System("jobs", "", "", "round-robin", cache="unlimited")
RANKS = (8, 16, 32, 64)


def _cluster(nodes: tuple[Node, ...], store: Store | None, network_ms: float = 0.0) -> Cluster:
    profile = Profile(
        "tests/jobs",
        ModelSpec("images", 0.0, 1.0, 1.0),
        GpuSpec("images", 1e9),
        EngineSpec("job", "0", max_model_len=10**6, max_num_batched_tokens=10**6, max_num_seqs=1),
        MemorySpec(1e4, 0.0, 0.0, 1, "unified"),
        LatencySpec("linear", {"per_decode_ms": 1.0}, 0),
        calibrated=True,
    )
    kind = ServerKind("gpu", profile, 1, 64, Jobs(4))
    count = sum(node.servers for node in nodes)
    return Cluster((kind,), ("gpu",) * count, nodes=nodes, store=store, network_ms=network_ms)


def _fleet(seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    n, m = 150, int(rng.integers(3, 12))
    trace = RequestTrace(
        np.sort(rng.random(n)) * float(rng.choice([1.0, 10.0])),
        rng.integers(m, size=n),
        rng.integers(1, 5, size=n),
        rng.integers(1, 50, size=n),
    )
    adapters = [Adapter(f"a{i}", int(rng.choice(RANKS)), 1.0) for i in range(m)]
    return Workload(adapters, arrivals=Arrivals("trace", trace=trace))


def _reached(
    sent: list[tuple[float, int, int]], capacity: list[float], size: list[float], store: Store
) -> tuple[list[float], int]:
    """When each request (time, node, adapter) goes on from its node, and hits, by small steps from event to event."""
    held: list[list[int]] = [[] for _ in capacity]  # least recently used first
    moving: list[dict[str, object]] = []
    out = [math.nan] * len(sent)
    now, k, hits = 0.0, 0, 0
    while k < len(sent) or moving:
        active = moving if store.concurrent == 0 else moving[: store.concurrent]
        streaming = [each for each in active if each["latency"] <= 0.0]  # type: ignore[operator]
        speed = store.bandwidth_bytes_s / (max(len(streaming), 1) if store.concurrent == 0 else 1)
        ends = [
            now + (each["latency"] if each["latency"] > 0.0 else each["bytes"] / speed)  # type: ignore[operator]
            for each in active
        ]
        soonest = min(ends, default=math.inf)
        arrival = sent[k][0] if k < len(sent) else math.inf
        step = min(soonest, arrival) - now
        now += step
        first = ends.index(soonest) if ends and soonest <= arrival else -1
        was_streaming = first >= 0 and active[first] in streaming
        for each in active:
            if each in streaming:
                each["bytes"] = max(0.0, each["bytes"] - step * speed)  # type: ignore[operator]
            else:
                each["latency"] = max(0.0, each["latency"] - step)  # type: ignore[operator]
        if first >= 0:
            each = active[first]
            if not was_streaming:
                each["latency"] = 0.0
                continue
            moving.remove(each)
            node, a = each["node"], each["adapter"]
            for r in each["requests"]:  # type: ignore[attr-defined]
                out[r] = now
            own = held[node]  # type: ignore[index]
            while own and sum(size[b] for b in own) + size[a] > capacity[node]:  # type: ignore[index]
                own.pop(0)
            own.append(a)  # type: ignore[arg-type]
            continue
        _, node, a = sent[k]
        if a in held[node]:
            hits += 1
            out[k] = now
            held[node].remove(a)
            held[node].append(a)
        else:
            waits = [each for each in moving if each["node"] == node and each["adapter"] == a]
            if waits:
                waits[0]["requests"].append(k)  # type: ignore[attr-defined]
            else:
                moving.append(
                    {
                        "node": node,
                        "adapter": a,
                        "latency": store.latency_ms / 1e3,
                        "bytes": size[a],
                        "requests": [k],
                    }
                )
        k += 1
    return out, hits


@pytest.mark.parametrize("concurrent", [0, 1, 3])
@pytest.mark.parametrize("network_ms", [0.0, 20.0])
def test_hosts_and_store_are_the_oracle(concurrent: int, network_ms: float) -> None:
    """Requests reach their servers when a naive host cache and store say, shared or in turn."""
    hits = 0
    for seed in range(8):
        fleet = _fleet(seed)
        nodes = (Node(2, 150.0), Node(1, 70.0), Node(1, 64.0))
        store = Store(300.0, 5.0, concurrent)
        run = simulate_cluster(fleet, _cluster(nodes, store, network_ms), SYSTEM, duration_s=60.0)
        assert run.state is not None
        node_of = np.repeat([0, 1, 2], [2, 1, 1])
        sent = [
            (float(t) + network_ms * 1e-3, int(node_of[s]), int(a))
            for t, s, a in zip(run.state.sent_s, run.state.server, run.state.adapter, strict=True)
        ]
        size = (fleet.ranks * 1.0).tolist()
        expected, found = _reached(sent, [node.host_bytes for node in nodes], size, store)
        np.testing.assert_allclose(run.state.requests["sent_s"], expected, rtol=1e-9)
        assert run.host_hit_rate == pytest.approx(found / len(sent))
        hits += found
        latency = run.raw.finish_s - run.raw.requests.time_s
        assert np.nanmin(latency) >= 2 * network_ms * 1e-3
    assert hits > 100


def test_a_request_completes_when_its_client_has_the_answer() -> None:
    """An answer that is still on the network when the run ends is none."""
    trace = RequestTrace(np.zeros(1), np.zeros(1, np.int64), np.ones(1, np.int64), np.full(1, 10))
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
    took_s = 0.01
    for network_ms, completed in ((100.0, 1), (498.0, 0)):
        cluster = _cluster((Node(1),), None, network_ms)
        run = simulate_cluster(fleet, cluster, SYSTEM, duration_s=1.0)
        assert run.raw.finish_s[0] == pytest.approx(2 * network_ms * 1e-3 + took_s, abs=took_s)
        assert run.completed == completed


def test_requests_whose_answers_need_longer_than_the_run_are_not_unserved() -> None:
    """The network's time counts in what a request needs to complete, when a short run asks which were due."""
    tokens = np.full(2, 10)
    trace = RequestTrace(np.array([0.0, 3.0]), np.zeros(2, np.int64), tokens, tokens)
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
    run = simulate_cluster(fleet, _cluster((Node(1),), None, 5000.0), SYSTEM, duration_s=12.0)
    assert (run.completed, run.served_share) == (1, 1.0)


def test_a_server_has_the_requests_that_reached_it_in_their_order() -> None:
    """Transfers let requests overtake each other: a server's own requests are those that came, as they came."""
    nodes, overtaken, under_way = (Node(2, 150.0), Node(1, 70.0), Node(1, 64.0)), 0, 0
    for seed in range(4):
        cluster = _cluster(nodes, Store(30.0, 5.0, 1), 20.0)
        run = simulate_cluster(_fleet(seed), cluster, SYSTEM, "most-idle", duration_s=20.0)
        assert run.state is not None
        for s, server in enumerate(run.servers):
            came = np.flatnonzero((run.state.server == s) & (run.state.requests["status"] > 0))
            reached_s = run.state.requests["sent_s"][came]
            np.testing.assert_array_equal(server.raw.requests.time_s, np.sort(reached_s))
            assert server.completed == int((run.state.requests["status"][came] == rows.FINISHED).sum())
            overtaken += int((np.diff(reached_s) < 0.0).sum())
        under_way += int((run.state.requests["status"][run.state.server >= 0] == 0).sum())
        assert run.raw.requests.input_tokens.max() <= run.state.prompt.max()
    assert overtaken > 0
    assert under_way > 0


def test_the_network_only_shifts() -> None:
    """Without other transfers every request comes, and is answered, as much later as the network takes."""
    fleet = _fleet(3)
    near, far = (
        simulate_cluster(fleet, _cluster((Node(),), None, network_ms), SYSTEM, duration_s=60.0)
        for network_ms in (0.0, 50.0)
    )
    np.testing.assert_allclose(far.raw.finish_s - near.raw.finish_s, 0.1, rtol=1e-9)


@pytest.mark.parametrize("router", ["round-robin", "most-idle", "dlora"])
def test_a_client_keeps_so_many_requests_open(router: str) -> None:
    """Requests beyond the ceiling are refused, for every kind of router, and none is lost."""
    cluster = _cluster((Node(), Node()), None)
    refused = 0
    for seed in range(4):
        run = simulate_cluster(_fleet(seed), cluster, SYSTEM, router, duration_s=60.0, max_outstanding=2)
        assert run.sent == run.completed + run.refused
        assert len(run.raw.requests.time_s) == run.sent  # those that were refused are among the rows
        assert run.raw.refused.sum() == 0
        starts, ends, done = run.raw.requests.time_s, run.raw.finish_s, run.raw.finished
        most = max(int(((starts[done] <= t) & (ends[done] > t)).sum()) for t in starts[done])
        assert most <= 2
        refused += run.refused * (most == 2)
    assert refused > 20


def test_bad_hosts_are_named() -> None:
    """A host without a store, one that can't hold an adapter, nodes that do not add up."""
    with pytest.raises(ValidationError, match="store"):
        _cluster((Node(1, 100.0),), None)
    with pytest.raises(ValidationError, match="hold the largest adapter"):
        simulate_cluster(_fleet(0), _cluster((Node(1, 5.0),), Store(1.0)), SYSTEM, duration_s=1.0)
    kind = _cluster((Node(),), None).kinds[0]
    with pytest.raises(ValidationError, match="3 servers together, got 1"):
        Cluster((kind,), ("gpu",) * 3, nodes=(Node(),))


def test_whole_numbers_of_bytes_are_no_other_memory() -> None:
    """The room of a host given as an integer takes adapters of parts of a byte, and the same kernel."""
    way = transit_of(_fleet(0), _cluster((Node(2, 200),), Store(1.0)), 4)
    assert way is not None
    assert way.room.dtype == np.float64


def test_a_kind_without_servers_changes_nothing() -> None:
    """Adapters have the size that the servers' base model gives them, whichever kind the file lists first."""
    cluster = _cluster((Node(2, 200.0),), Store(1.0))
    (kind,) = cluster.kinds
    model = replace(kind.profile.model, lora_bytes_per_rank=3.0)
    other = replace(kind, name="other", profile=replace(kind.profile, model=model))
    ways = [transit_of(_fleet(0), each, 4) for each in (cluster, replace(cluster, kinds=(other, kind)))]
    sizes = [way.size.tolist() for way in ways if way is not None]
    assert sizes[0] == sizes[1]
