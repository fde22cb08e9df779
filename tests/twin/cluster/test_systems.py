"""Presets and the parts that systems are made of: every one runs, and does what its description says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster, ServerKind
from packer.engines import engine_of
from packer.errors import IncompatibleError, UnknownNameError, ValidationError
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.papers.cache.drop import Drop
from packer.papers.cache.loading import CPU_ASSIST, CpuAssist, loading_of
from packer.papers.cache.replicas import ReplicaCache, alike, partitions, replicas
from packer.papers.lightllm.engine import LightLlm
from packer.papers.routers.rock import Rock, divergence
from packer.registry import make
from packer.terms import LINEAR
from packer.twin.cluster.routers.base import Request
from packer.twin.cluster.setup import kind_setup
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.system import System, load_system, system_names
from packer.twin.law.kernels import with_kernel
from packer.twin.run import Run
from packer.workload import Workload

PROFILE = load_profile("h100-64gb/llama-3.1-8b-instruct")


@pytest.fixture(scope="module")
def fleet() -> Workload:
    """Forty adapters in falling demand, four requests a second."""
    rates = 1.0 / np.arange(1, 41)
    return Workload([Adapter(f"a{i}", 8 << i % 3, float(r)) for i, r in enumerate(rates / rates.sum() * 4)])


def _run(fleet: Workload, system: str | System, router: str | None = None, seed: int = 0) -> Run:
    cluster = Cluster.of(PROFILE, 2, max_loras=16)
    return simulate_cluster(fleet, cluster, system, router, duration_s=60.0, seed=seed)


@pytest.mark.parametrize("name", [name for name in system_names() if name != "packer"])
def test_every_preset_runs(name: str, fleet: Workload) -> None:
    """Each shipped system serves a light load, and loses no request."""
    run = _run(fleet, name)
    assert run.state is not None
    left = sum(int(run.state.servers[name].sum()) for name in ("running", "waiting", "inbox_count", "pending_count"))
    assert run.sent == run.completed + run.aborted + left > 100
    assert run.completed > 0.8 * run.sent
    assert load_system(name).summary
    assert load_system(name).source


def test_memory_without_limit_reserves_no_slots(fleet: Workload) -> None:
    """Servers of "cached" have the KV cache of those that share it with adapters, whatever the number of slots."""
    tokens = [_run(fleet, name).kv_cache_tokens for name in ("cached", "on-demand")]
    assert tokens[0] == tokens[1]
    large = Cluster.of(PROFILE, 1, max_loras=5000, max_lora_rank=64)
    assert simulate_cluster(fleet, large, "cached", duration_s=1.0).status == "ok"


def test_loading_modes_are_in_order(fleet: Workload) -> None:
    """On a light load no loads <= CPU-assisted <= blocking in mean TTFT: an expectation of the model, not a law."""
    ttft = {}
    for mode in ("none", "cpu-assist", "blocking"):
        system = System(mode, "", "", "round-robin", "lightllm:max_wait_tokens=1", "drop", mode, "bgmv", "unified")
        ttft[mode] = np.mean([_run(fleet, system, seed=seed).mean_ttft_ms for seed in range(5)])
    assert ttft["none"] < ttft["cpu-assist"] < ttft["blocking"]


def test_kept_adapters_are_hits(fleet: Workload) -> None:
    """Keeping the adapters in demand raises the hit rate of servers that otherwise drop what is idle."""
    rates = []
    for cache in ("drop", "top-k:k=20,period_s=10", "unlimited"):
        system = System("s", "", "", "most-idle", "lightllm:max_wait_tokens=1", cache, "blocking", "bgmv", "unified")
        rates.append(_run(fleet, system).hit_rate)
    assert rates[0] < rates[1] < rates[2] == 1.0


def test_requests_at_the_front_end_are_no_hits() -> None:
    """A request that has not reached the engine at the end was not admitted, so nothing is known about its adapter."""
    times, tokens = np.array([1.0, 9.99]), np.array([100, 100])
    arrivals = Arrivals("trace", trace=RequestTrace(times, np.array([0, 1]), tokens, np.array([5, 5])))
    fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(2)], arrivals=arrivals)
    run = simulate_cluster(fleet, Cluster.of(PROFILE, 1, max_loras=2), duration_s=10.0)
    assert run.sent == 2
    assert run.hit_rate == 0.0


def test_reloads_of_running_adapters_are_no_misses() -> None:
    """Where vLLM's slots thrash there are more loads than admissions, and a hit rate still counts admissions."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.25) for i in range(40)])
    run = simulate_cluster(fleet, Cluster.of(PROFILE, 2, max_loras=16), "vllm", "round-robin", duration_s=600.0)
    assert run.adapter_loads > run.sent
    assert 16 / 40 < run.hit_rate < 0.6  # 16 of 40 equal adapters in slots; some of the others wait together


def test_replicas_by_the_equation() -> None:
    """ROCK's equation (5) at the mean size: 0.5, 1, 10 and 100 requests give 0, 1, 5 and 23 replicas."""
    found = replicas(np.array([0.5, 1.0, 10.0, 100.0]), np.full(4, 50.0))
    assert found.tolist() == [0, 1, 5, 23]


def test_partitions_by_the_equation() -> None:
    """ROCK's equation (4): floor(share × servers) + 1 servers of each cluster, the next round it, at most all."""
    clusters = [np.array([0, 1, 2, 3]), np.array([7, 9])]
    found = partitions([30.0, 10.0, 0.0], clusters)
    # Of 4 servers 3 + 1, 1 + 1 and 0 + 1; of 2 servers 1 + 1, 0 + 1 and 0 + 1.
    assert found == [{0, 1, 2, 3, 7, 9}, {0, 1, 7}, {2, 9}]
    assert partitions([0.0, 0.0], [np.array([5])]) == [{5}, {5}]


def test_servers_cluster_by_what_they_are() -> None:
    """ROCK's physical layer: six or more alike servers are a cluster, and those that are like no others one more."""
    features = np.array([[1.0, 5.0, 2.0]] * 6 + [[1.0, 5.0, 1.0]] * 7 + [[9.0, 5.0, 2.0]])
    assert [found.tolist() for found in alike(features)] == [[13], [*range(6)], [*range(6, 13)]]
    assert [found.tolist() for found in alike(np.ones((8, 3)))] == [[*range(8)]]


def test_replicas_go_to_servers_with_bandwidth_memory_and_a_near_copy() -> None:
    """ROCK's score is the mean of bandwidth, free memory and nearness, and a replica goes to one of the three best."""
    view: Any = SimpleNamespace(
        adapter_bytes=np.full(4, 1e6), used_share=np.zeros(8), pool_bytes=np.full(8, 1e9),
        load_bytes_s=np.ones(8), requests_since=lambda a, b: np.array([1.0, 0.0, 0.0, 0.0]),
        candidates=lambda a: np.arange(8), on_gpu=lambda a: np.arange(8) == 7, on_machine=lambda held: held,
        service_s=lambda iterations, a: np.ones(8),
    )  # fmt: skip

    def chosen(**changes: object) -> set[int]:
        vars(view).update(changes)
        found = set()
        for seed in range(40):
            policy = ReplicaCache(partitions=1)
            policy.start(view, seed)
            found |= {move.server for move in policy.tick(45.0, view) if move.keep}
        return found

    assert chosen() == {0, 1, 7}, "one replica each: of equals the first, and where a copy is near"
    assert chosen(load_bytes_s=np.array([1, 1, 1, 4, 4, 1, 1, 1.0])) == {3, 4, 7}
    assert chosen(used_share=np.array([0, 0.9, 0.9, 0, 0, 0.9, 0.9, 1])) == {3, 4, 0}
    assert chosen(used_share=np.array([0, 0, 0, 1, 1, 0, 0, 1.0]), load_bytes_s=np.ones(8)) == {0, 1, 2}


def test_rock_matches_queues_as_algorithm_1() -> None:
    """Weights by the measured busy shares (lines 10 to 15), then for one queue after another the best three servers and
    of these the one that makes the busy shares with the load so far most equal (lines 16 to 22)."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        servers, queues = int(rng.integers(3, 9)), int(rng.integers(1, 5))
        held = rng.random((10, servers)) < 0.4
        seconds = rng.uniform(5.0, 40.0, (10, servers))
        busy = rng.random(servers)
        view: Any = SimpleNamespace(
            cluster=(None,) * servers, on_gpu=lambda a, h=held: h[a], load_s=lambda a, n=servers: np.full(n, 4.0),
            service_s=lambda iterations, a, s=seconds: s[a],
        )  # fmt: skip
        tasks = [(30, 1e6, int(a)) for a in rng.integers(0, 10, 40)]
        queue = rng.integers(0, queues, 40)
        queue[0] = queues - 1
        router = Rock(queues=queues)
        router.start(view, 0)
        expected, use = [], busy.tolist()
        for j in range(queues):
            own = [a for (_, _, a), k in zip(tasks, queue, strict=True) if k == j]
            load = [sum(float(seconds[a][g]) + 4.0 for a in own) for g in range(servers)]
            weight = [
                0.6 * (sum(bool(held[a][g]) for a in set(own)) / len(set(own)) if own else 1.0)
                + 0.3 * (1 - abs(busy[g] - 0.7))
                + 0.1 / max(load[g], 1e-9)
                for g in range(servers)
            ]
            best = sorted(range(servers), key=lambda g: -weight[g])[:3]
            unequal = {g: float(np.std([u + (i == g) * load[g] / 90.0 for i, u in enumerate(use)])) for g in best}
            chosen = min(sorted(best), key=lambda g: unequal[g])
            use[chosen] += load[chosen] / 90.0
            expected.append([chosen])
        assert router._matched(queue, tasks, busy, view) == expected


def test_rock_clusters_anew_when_tasks_change() -> None:
    """Queues stay while tasks spread over them as before, and are made anew beyond the threshold, always with 0."""
    assert divergence(np.array([0.5, 0.5]), np.array([0.25, 0.75])) == pytest.approx(0.1438, abs=1e-4)
    rng = np.random.default_rng(0)
    few = np.column_stack([rng.normal(20, 2, 60), rng.normal(5e6, 1e5, 60)])
    many = np.column_stack([rng.normal(50, 2, 60), rng.normal(5e6, 1e5, 60)])
    first = np.concatenate([few, many])
    for theta, stays in ((0.1, True), (0.0, False)):
        router = Rock(queues=2, theta=theta)
        router._clustered(first, 2)
        known = router._mixture
        router._clustered(first[::-1].copy(), 2)
        assert (router._mixture is known) == stays
    router = Rock(queues=2)
    router._clustered(first, 2)
    known = router._mixture
    router._clustered(many, 2)
    assert router._mixture is not known


def test_kernel_laws_replace_what_adapters_cost() -> None:
    """A kernel's law has its own term of adapters and no other; its time per rank is given or from the data sheet."""
    own = {term.name for term in LINEAR if term.part == "lora"}
    for name, term in (("bgmv", "per_padded_rank_ms"), ("mbgmv", "per_request_rank_ms")):
        given = with_kernel(PROFILE, f"{name}:per_rank_ms=0.004,base_ms=3").latency.coefficients
        assert {key: given[key] for key in own & set(given)} == {term: 0.004}
        assert given["base_ms"] == 3
        weights_ms = PROFILE.model.lora_bytes_per_rank / 2.0e12 * 1e3
        assert with_kernel(PROFILE, name).latency.coefficients[term] == pytest.approx(weights_ms, rel=0.4)


def _fig5(ranks: list[int], name: str, per_rank_ms: float, base_ms: float) -> float:
    c = with_kernel(PROFILE, f"{name}:per_rank_ms={per_rank_ms},base_ms={base_ms}").latency.coefficients
    padded = c.get("per_padded_rank_ms", 0.0) * len(ranks) * max(ranks)
    return c["base_ms"] + c.get("per_request_rank_ms", 0.0) * sum(ranks) + padded


def test_fig5_of_caraserve() -> None:
    """The four latencies of CaraServe's Fig. 5 within 0.1 ms, and on which instance a request of rank 64 is faster."""
    many, large = [32] * 24, [64] * 16
    bgmv, mbgmv = ("bgmv", 0.00359, 32.08), ("mbgmv", 0.00234, 33.5)
    assert _fig5(many, *bgmv) == pytest.approx(34.8, abs=0.1)
    assert _fig5(large, *bgmv) == pytest.approx(35.8, abs=0.1)
    assert _fig5(many, *mbgmv) == pytest.approx(35.3, abs=0.1)
    assert _fig5(large, *mbgmv) == pytest.approx(35.9, abs=0.1)
    assert _fig5([*large, 64], *bgmv) < 36.05 < _fig5([*many, 64], *bgmv)
    assert _fig5([*many, 64], *mbgmv) < 36.0 < _fig5([*large, 64], *mbgmv)


def test_dlora_fills_merged_batches_last() -> None:
    """dLoRA's cost counts whole batches of an adapter at 0.6, and the rest of all adapters together."""
    router = make("router", "dlora:batch=4")
    assert router._cost(np.array([3, 0, 0]), 0) == pytest.approx(0.6)  # four of one adapter: one merged round
    assert router._cost(np.array([3, 0, 0]), 1) == pytest.approx(1.0)  # four of two: one other round
    assert router._cost(np.array([7, 3, 0]), 2) == pytest.approx(0.6 + 1.0)  # 4 merged, 3 + 3 + 1 left


def test_dlora_migrates_only_replicas(fleet: Workload) -> None:
    """A server takes over an adapter in exchange for an idle one that another server holds too."""
    names = list(fleet.names)
    cluster = Cluster.of(PROFILE, 2, max_loras=16)
    placed = Cluster(
        cluster.kinds,
        cluster.servers,
        (dict.fromkeys(names[:30], 1.0), dict.fromkeys(names[10:], 1.0)),
    )
    busy = fleet.scaled(8.0)
    fixed, moving = (
        simulate_cluster(busy, placed, router=f"dlora:mode={mode},batch=4", duration_s=30.0)
        for mode in ("dispatch", "migrate")
    )
    assert fixed.state is not None
    assert moving.state is not None
    only_first = np.isin(fixed.state.adapter, np.arange(10))
    assert set(fixed.state.server[only_first].tolist()) == {0}
    assert set(moving.state.server[only_first].tolist()) == {0, 1}
    with pytest.raises(IncompatibleError, match="placement to start from"):
        simulate_cluster(fleet, cluster, router="dlora:mode=migrate", duration_s=1.0)


def test_rock_keeps_alike_tasks_together() -> None:
    """After the first matching tasks of an adapter go to fewer servers than by the fewest requests."""
    fleet = Workload(
        [Adapter(f"a{i}", 8 if i < 6 else 64, 4.0) for i in range(12)],
        Lengths.constant(1),
        Lengths.gamma(800, 0.3),
    )
    cluster = Cluster.of(PROFILE, 6, max_loras=16)
    spread = []
    for router in ("most-idle", "rock:period_s=10,top=2,queues=3,dispatch=fastest"):
        run = simulate_cluster(fleet, cluster, "lrums", router, duration_s=60.0)
        assert run.state is not None
        late = run.state.sent_s > 20.0
        pairs = set(zip(run.state.adapter[late].tolist(), run.state.server[late].tolist(), strict=True))
        spread.append(len(pairs))
    assert spread[1] < 0.8 * spread[0]


def test_rock_sends_a_task_where_it_ends_first() -> None:
    """The speed of a server, its requests and the load of the adapter decide, as far as each counts in seconds."""
    view: Any = SimpleNamespace(
        cluster=("fast", "slow"), adapter_bytes=np.array([1e6]), candidates=lambda a: np.array([0, 1]),
        running=np.array([0, 0]), waiting=np.array([0, 0]), places=np.array([1, 1]), seconds=np.array([10.0, 15.0]),
        held=np.array([False, False]), service_s=lambda iterations, a: view.seconds,
        load_s=lambda a: np.array([4.0, 4.0]), on_gpu=lambda a: view.held,
    )  # fmt: skip
    task = Request(0, 0, 8, 1, 0.0, 30)

    def chosen(**changes: object) -> int:
        router = Rock(dispatch="fastest")
        vars(view).update(changes)
        router.start(view, seed=0)
        return router.route(task, view)

    assert chosen() == 0
    assert chosen(running=np.array([1, 0])) == 1
    assert chosen(running=np.array([1, 0]), places=np.array([4, 4])) == 0
    assert chosen(held=np.array([False, True])) == 0, "a load takes less than the slower server's work"
    assert chosen(seconds=np.array([10.0, 13.0])) == 1


def test_rock_weighs_the_free_servers() -> None:
    """Equation (1) for the task that comes: its adapter first, then the least busy candidate; else what ends first."""
    view: Any = SimpleNamespace(
        cluster=tuple("abcde"), adapter_bytes=np.array([1e6]), candidates=lambda a: np.arange(5),
        running=np.zeros(5, int), waiting=np.zeros(5, int), places=np.ones(5, int), held=np.zeros(5, bool),
        service_s=lambda iterations, a: np.array([10.0, 11.0, 12.0, 13.0, 14.0]),
        load_s=lambda a: np.full(5, 4.0), on_gpu=lambda a: view.held,
    )  # fmt: skip
    router = Rock(dispatch="free")
    router.start(view, seed=0)

    def chosen(number: int = 0) -> int:
        return router.route(Request(number, 0, 8, 1, 0.0, 30), view)

    assert [chosen(4), chosen(4)] == [4, 0], "equal weights: the next in turn, and a busy one after it"
    view.held = np.array([False, False, True, True, True])
    assert [chosen() for _ in range(5)] == [2, 3, 2, 3, 4], "the least busy of those that hold it; 4 had a task before"
    view.running = np.array([1, 0, 1, 1, 1])
    assert chosen() == 1, "a free server without the adapter before one that is taken"
    view.running = np.ones(5, int)
    assert chosen() == 0, "24 s with the load, as soon as any other"


def test_prefills_of_lightllm_take_a_sixth_of_the_pool(fleet: Workload) -> None:
    """As S-LoRA's server: the prompts of a prefill have a sixth of the pool's tokens, at least those of one request."""
    system = load_system("s-lora")
    for budget_bytes, most in ((PROFILE.model.kv_bytes_per_token * 120_000, 20_000), (8e8, 2048)):
        small = replace(PROFILE, memory=replace(PROFILE.memory, kv_budget_bytes=budget_bytes, measured=()))
        small = replace(small, engine=replace(small.engine, max_model_len=2048))
        setup = kind_setup(fleet, ServerKind("h100", small, 16), system, Drop())
        assert isinstance(setup.engine, LightLlm)
        assert setup.engine.most_prompt_tokens(setup) == pytest.approx(most, rel=0.01)


def test_kinds_share_the_cache_policy() -> None:
    """A policy decides for the whole cluster: with two kinds of server no adapter gets twice its replicas."""
    fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(8)], Lengths.constant(1), Lengths.constant(100))
    made = []
    for names in (("one",), ("one", "two")):
        kinds = tuple(ServerKind(name, PROFILE, 16) for name in names)
        cluster = Cluster(kinds, tuple(names[s % len(names)] for s in range(8)))
        policy = ReplicaCache(period_s=10.0)
        simulate_cluster(fleet, cluster, "rock", "round-robin", duration_s=25.0, cache=policy)
        made.append({adapter: len(servers) for adapter, servers in policy._on.items()})
    assert made[0] == made[1]


def test_what_does_not_exist_is_named(fleet: Workload) -> None:
    """Unknown engines, modes, kernels, policies and parameters are refused with what exists, misfits with why."""
    assert engine_of("lightllm:max_wait_tokens=3") == LightLlm(3)
    assert loading_of("cpu-assist:cores=8") == (CPU_ASSIST, CpuAssist(8))
    with pytest.raises(UnknownNameError, match="Known: dlora, job, lightllm, vllm"):
        engine_of("slora")
    with pytest.raises(ValidationError, match="no parameter 'wait'; it has: abort_after_s"):
        engine_of("lightllm:wait=3")
    with pytest.raises(ValidationError, match="max_wait_tokens"):
        engine_of("lightllm:max_wait_tokens=-1")
    with pytest.raises(UnknownNameError, match="loading mode"):
        loading_of("lazy")
    with pytest.raises(UnknownNameError, match="Known: bgmv, mbgmv"):
        with_kernel(PROFILE, "sgmv")
    for change, error, message in (
        ({"cache": "drop"}, IncompatibleError, "vLLM has a cache policy of its own"),
        ({"loading": "async"}, IncompatibleError, "vLLM loads adapters in a step"),
        ({"engine": "job", "loading": "async"}, IncompatibleError, "A job loads its adapter first"),
        ({"engine": "job", "cache": "belady"}, UnknownNameError, "Known: drop"),
    ):
        with pytest.raises(error, match=message):
            _run(fleet, System("s", "", "", "most-idle", **change))  # type: ignore[arg-type]
