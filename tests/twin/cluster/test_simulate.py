"""The cluster twin: one server, replays, the slow oracle, conservation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from naive_cluster import RULES, NaiveServer, run_cluster
from naive_twin import Request
from naive_twin import Server as NaiveSettings

from packer import registry
from packer.adapter import Adapter
from packer.cluster import Cluster, ServerKind
from packer.errors import IncompatibleError, ValidationError
from packer.io.profiles import load_profile
from packer.twin.cluster.candidates import candidates_of
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.engine.state import adapters_of, set_places
from packer.twin.memory.policy import memory_policy
from packer.twin.override import with_engine
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.twin.timeline import SUMMARY
from packer.workload import Workload

ROUTERS = [name for name in registry.names("router") if name != "plan"]
SEEDS = range(16)


def _same(one: Run, other: Run) -> None:
    """Every time and count is the same, bit for bit."""
    for name in ("first_s", "finish_s", "finished", "histogram", "timeline"):
        np.testing.assert_array_equal(getattr(one.raw, name), getattr(other.raw, name), err_msg=name)
    figures = [
        {k: v for k, v in sim.to_dict().items() if k not in ("workload", "seed", "offered_tok_s")}
        for sim in (one, other)
    ]
    assert figures[0] == figures[1]


FIGURES = (
    *SUMMARY, "starved", "stable", "served_share", "sent_tokens", "slo_used", "server_slo_used", "tuning_tok_s",
    "engine_mean_ttft_ms", "engine_mean_tpot_ms", "metric_series", "metric_names", "ttft_ms", "tpot_ms", "e2e_ms",
    "adapter_mean_ttft_ms", "adapter_p95_ttft_ms", "adapter_pooled_p95_ttft_ms", "adapter_mean_itl_ms",
    "adapter_slo_attainment", "adapter_slo_used", "late", "hit_rate", "host_hit_rate", "cold_start_share", "aborted",
    "gpu_hours", "server_of_requests",
)  # fmt: skip
"""Figures that a run of one server and of a cluster have in common."""


def _agree(run: Run, alone: Run) -> None:
    """All figures, frames and requests of a cluster of one are those of its server, bit for bit."""
    for name in FIGURES:
        found, expected = (np.asarray(getattr(sim, name), dtype=np.float64) for sim in (run, alone))
        np.testing.assert_array_equal(found, expected, err_msg=name)
    for name in ("requests", "per_adapter", "timeline", "server_timeline"):
        assert getattr(run, name).equals(getattr(alone, name)), name


def test_a_cluster_without_requests_has_the_columns_of_its_servers() -> None:
    """Frames and figures have the columns of one server with prefix caching, also where no request came."""
    profile = with_engine(load_profile("h100-64gb/llama-3.1-8b-instruct"), prefix_caching=True)
    idle, given = Workload([Adapter("a", 8, 1e-9)]), {"duration_s": 10.0}
    alone = simulate(idle, profile, max_loras=1, **given)
    many = simulate_cluster(idle, Cluster.of(profile, 2, max_loras=1), **given)
    assert many.per_adapter.columns == alone.per_adapter.columns
    assert many.to_dict()["prefix_hit_rate"] is None


def _single(sim: Run, of: Run) -> Run:
    """A server's requests, replayed on the single twin."""
    return simulate(
        sim.workload, sim.profile, max_loras=sim.settings.max_loras, max_lora_rank=sim.settings.max_lora_rank,
        duration_s=of.duration_s, timeline_bin_s=of.timeline_bin_s, seed=of.seed,
    )  # fmt: skip


def _refused(router: str, found: Any) -> bool:
    """Whether the router says why it can't serve this cluster."""
    return registry.make("router", router).supports(found.cluster, found.workload) is not None


def test_servers_of_the_base_model_need_no_slots() -> None:
    """A cluster without slots serves requests to the base model as one server does, and refuses adapters."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    cluster = Cluster.of(profile, 1, max_loras=0)
    base = Workload([Adapter("base", 0, 1.0)])
    sim = simulate_cluster(base, cluster, duration_s=20.0)
    assert sim.mean_ttft_ms == simulate(base, profile, max_loras=0, duration_s=20.0).mean_ttft_ms
    with pytest.raises(ValidationError, match=r"max_loras of a server with adapters.* got 0"):
        simulate_cluster(Workload([Adapter("a", 8, 1.0)]), cluster, duration_s=20.0)


@pytest.mark.parametrize(("sequences", "places"), [(64, None), (512, 96), (64, 96)])
def test_a_cluster_starts_as_warm_as_its_servers(sequences: int, places: int | None) -> None:
    """Front ends and host memory that keep some of the adapters have these before the first request, as one server."""
    profile = with_engine(load_profile("h100-64gb/llama-3.1-8b-instruct"), warm_start=True, max_num_seqs=sequences)
    profile = replace(profile, engine=replace(profile.engine, max_cpu_loras=places))
    fleet, given = Workload([Adapter(f"a{k}", 8, 0.02) for k in range(120)]), {"duration_s": 60.0}
    alone = simulate(fleet, profile, max_loras=32, max_lora_rank=8, **given)
    cluster = Cluster.of(profile, 1, max_loras=32, max_lora_rank=8)
    _agree(simulate_cluster(fleet, cluster, **given), alone)
    two = simulate_cluster(fleet, Cluster.of(profile, 2, max_loras=32, max_lora_rank=8), **given)
    cold = simulate_cluster(
        fleet, Cluster.of(with_engine(profile, warm_start=False), 2, max_loras=32, max_lora_rank=8), **given
    )
    assert two.mean_ttft_ms < cold.mean_ttft_ms


def test_servers_of_several_base_models_need_adapters_that_name_theirs() -> None:
    """An adapter belongs to one base model: a router may not send its requests to servers of another one."""
    names = ("h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct")
    kinds = tuple(ServerKind(name, load_profile(name), 4) for name in names)
    fleet = Workload([Adapter("a", 8, 1.0)])
    with pytest.raises(IncompatibleError, match="with several, every adapter names its own"):
        simulate_cluster(fleet, Cluster(kinds, names), duration_s=5.0)
    assert simulate_cluster(fleet, Cluster(kinds, names[:1]), duration_s=5.0).sent > 0


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "punica"])
def test_one_server_is_the_single_twin(router: str, case: Callable[..., Any]) -> None:
    """A cluster of one gives what `packer.simulate` gives, bit for bit, behind any router that holds nothing."""
    for seed in SEEDS:
        found = case(seed)
        if _refused(router, found):
            continue
        kind: ServerKind = found.cluster.kinds[0]
        alone = simulate(
            found.workload, kind.profile, max_loras=kind.max_loras, max_lora_rank=32,
            duration_s=found.duration_s, seed=seed,
        )  # fmt: skip
        cluster = Cluster.of(kind.profile, 1, max_loras=kind.max_loras, max_lora_rank=32)
        run = simulate_cluster(found.workload, cluster, router=router, duration_s=found.duration_s, seed=seed)
        if alone.status != "ok":
            assert run.status != "ok"
        else:
            _same(run.servers[0], alone)
            _agree(run, alone)
            np.testing.assert_array_equal(run.raw.finish_s, alone.raw.finish_s)


@pytest.mark.parametrize("router", ROUTERS)
def test_servers_replayed_alone_give_the_same_times(router: str, case: Callable[..., Any]) -> None:
    """A server's requests, replayed on the single twin, give the same times, bit for bit; none is lost."""
    for seed in SEEDS:
        found = case(seed, placed=seed % 2 == 0)
        if _refused(router, found):
            continue
        run = simulate_cluster(found.workload, found.cluster, router=router, duration_s=found.duration_s, seed=seed)
        for sim in (sim for sim in run.servers if sim.sent):
            _same(sim, _single(sim, run))
        _none_is_lost(run)


def _none_is_lost(run: Run) -> None:
    """Sent = completed + running + waiting + held at the router; the cluster is the sum of its servers."""
    if run.state is None:
        return
    held = int((run.state.server < 0).sum())
    servers = run.state.servers
    left = int(servers["running"].sum() + servers["waiting"].sum())
    assert run.sent == run.completed + left + held
    assert run.completed == sum(sim.completed for sim in run.servers)
    assert run.sent == sum(sim.sent for sim in run.servers) + held
    assert run.total_token_throughput == pytest.approx(sum(sim.total_token_throughput for sim in run.servers))
    assert run.adapter_loads == sum(sim.adapter_loads for sim in run.servers)
    assert run.busy_share == pytest.approx(run.per_server["busy_share"].mean())
    assert 0.0 <= run.busy_share <= 1.0
    assert len(run.requests) == run.sent
    assert run.per_server["completed"].sum() == run.completed


def _hashes(served: Workload, run: Run) -> list[int]:
    """Hashes of the adapters' names on a server, in the order of the fleet; 0 for those that it does not serve."""
    adapters, _ = adapters_of(served.ranks, served.ranks, run.seed)
    own = dict(zip(served.names, adapters["hash"][1:].tolist(), strict=True))
    return [own.get(name, 0) for name in run.workload.names]


def _naive_server(sim: Run, served: Workload, run: Run) -> NaiveServer:
    profile = sim.profile
    engine, loading = profile.engine, profile.loading
    ranks = run.workload.ranks
    return NaiveServer(
        NaiveSettings(
            ranks=ranks.tolist(),
            adapter_blocks=memory_policy(profile).adapter_blocks(profile, run.workload).tolist(),
            coefficients=profile.latency.coefficients,
            form="linear",
            graph_max=profile.latency.graph_max_tokens,
            ridge=profile.latency.ridge_tokens,
            expert_share=profile.latency.expert_share,
            host_ms=(loading.host_base_ms, loading.host_per_rank_ms),
            disk_ms=(loading.disk_base_ms, loading.disk_per_rank_ms),
            cold_start=False,
            slots=sim.settings.max_loras,
            slot_rank=sim.settings.max_lora_rank,
            kv_blocks=sim.kv_cache_tokens // engine.block_size,
            block_size=engine.block_size,
            token_budget=engine.max_num_batched_tokens,
            max_seqs=engine.max_num_seqs,
            max_outstanding=math.inf,
            max_cpu_loras=math.inf,
            hashes=_hashes(served, run),
            prefills_first=False,
            series_of_lists=False,
            spares_batch=loading.spares_batch or profile.memory.policy == "unified",
            scrape_interval_s=None,
            front_end_s=(0.0,) * 6,
        ),
        run.duration_s,
        run.timeline_bin_s,
    )


@pytest.mark.parametrize("router", sorted(RULES))
def test_cluster_is_the_oracle(router: str, case: Callable[..., Any]) -> None:
    """Decisions and times are those of naive servers behind a router written in words."""
    routed = 0
    for seed in SEEDS:
        found = case(seed, placed=seed % 2 == 0)
        fleet, cluster = found.workload, found.cluster
        run = simulate_cluster(fleet, cluster, router=router, duration_s=found.duration_s)
        if run.state is None:
            continue
        given = run.state.requests
        placed_at = run.state.server.tolist()
        trace = fleet.arrivals.trace
        requests = []
        for k in range(len(placed_at)):
            # Lengths are cut to what the chosen server takes: the same for both sides.
            cut = given[k] if placed_at[k] >= 0 else None
            prompt = int(trace.input_tokens[k] if cut is None else cut.prompt)
            output = int(trace.output_tokens[k] if cut is None else cut.output)
            requests.append(Request(k, float(trace.time_s[k]), int(trace.adapter[k]), prompt, output))
        slot_ranks = [sim.settings.max_lora_rank for sim in run.servers]
        allowed = candidates_of(cluster, fleet, slot_ranks)
        servers = [_naive_server(sim, setup.workload, run) for sim, setup in zip(run.servers, run.setups, strict=True)]
        mean = float(np.average(fleet.mean_output_tokens, weights=fleet.rates))
        route = run_cluster(
            servers, requests, trace.input_tokens.tolist(), RULES[router],
            lambda a, c=allowed: c.of(a).tolist(), mean, found.duration_s,
        )  # fmt: skip
        assert [-1 if s is None else s for s in route] == placed_at
        same = {"rtol": 1e-12, "atol": 0.0, "equal_nan": True}
        np.testing.assert_allclose(run.raw.first_s, [r.first_s for r in requests], **same)
        np.testing.assert_allclose(run.raw.finish_s, [r.finish_s for r in requests], **same)
        routed += len(set(placed_at)) > 1
    assert routed > 5


def test_kv_usage_of_servers_with_other_blocks_is_a_share() -> None:
    """Blocks of 64 tokens count as four of 16: the KV usage of a cluster is the mean of equal servers' shares."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    kinds = [ServerKind(f"of {size}", with_engine(profile, block_size=size), 4) for size in (16, 64)]
    fleet = Workload([Adapter("a", 8, 4.0)])
    for order in (kinds, kinds[::-1]):
        run = simulate_cluster(fleet, Cluster(tuple(kinds), tuple(kind.name for kind in order)), duration_s=20.0)
        shares = [server.mean_kv_usage for server in run.servers]
        assert run.mean_kv_usage == pytest.approx(np.mean(shares), rel=1e-3)
        assert run.timeline["kv_usage"].mean() == pytest.approx(np.mean(shares), rel=1e-3)


def test_same_seed_same_result(case: Callable[..., Any]) -> None:
    """The same seed gives the same requests to every router, and the same result again."""
    found = case(3)
    fleet = found.workload.with_arrivals(type(found.workload.arrivals)())
    runs = [
        simulate_cluster(fleet, found.cluster, router=router, duration_s=5.0, seed=4)
        for router in ("random", "random", "most-idle")
    ]
    assert runs[0].requests.equals(runs[1].requests)
    columns = ["request", "adapter", "sent_s"]
    assert runs[0].requests.select(columns).equals(runs[2].requests.select(columns))


def test_room_for_adapters_grows(case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that see more adapters than they have rows for give the same result as with enough rows."""
    found = case(7)
    enough = simulate_cluster(found.workload, found.cluster, router="most-idle", duration_s=1.0)
    monkeypatch.setattr("packer.twin.cluster.dispatch.Dispatch.adapter_rows", lambda self, adapter: 1)
    grown = simulate_cluster(found.workload, found.cluster, router="most-idle", duration_s=1.0)
    assert grown.state is not None
    assert grown.state.heaps.shape[2] > 1
    assert grown.requests.equals(enough.requests)
    assert len(grown.state.pair_key) >= 2 * np.count_nonzero(grown.state.pair_key)


def test_servers_of_a_static_router_run_in_threads(case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers whose requests are all known beforehand run side by side with the same result as one after another.

    So they do if each has memory of its own, or uses that of the one before.
    """
    found = case(7)
    runs = []
    for many, some in ((2**40, 32), (0, 1)):
        monkeypatch.setattr("packer.twin.cluster.dispatch.MANY", many)
        monkeypatch.setattr("packer.twin.cluster.apart.SOME", some)
        runs.append(simulate_cluster(found.workload, found.cluster, router="random", duration_s=1.0))
    assert runs[0].requests.equals(runs[1].requests)
    np.testing.assert_array_equal(runs[0].raw.histogram, runs[1].raw.histogram)


def test_requests_have_the_priorities_of_their_adapters() -> None:
    """Where servers hold some of the adapters each, a request has the priority that the fleet gives its adapter."""
    profile = with_engine(load_profile("h100-64gb/llama-3.1-8b-instruct"), vllm_version="0.18.0")
    profile = replace(profile, engine=replace(profile.engine, scheduling_policy="priority"))
    fleet = Workload([Adapter(f"a{i}", 8, 1.0, priority=7 - i) for i in range(6)])
    placement = tuple({f"a{i}": 1.0 for i in held} for held in (range(2), range(2, 6)))
    cluster = Cluster((ServerKind("one", profile, 4),), ("one",) * 2, placement=placement)
    run = simulate_cluster(fleet, cluster, router="plan", duration_s=20.0)
    assert run.state is not None
    assert set(run.state.adapter.tolist()) == set(range(6))
    np.testing.assert_array_equal(run.state.requests["context"], 7 - run.state.adapter)


def test_servers_of_a_cluster_have_room_to_walk_over_their_own_batches() -> None:
    """A server that never evicts has as many slots as it says, although another of the cluster has fewer and evicts."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    fleet = Workload([Adapter(f"a{i}", 8, 0.5) for i in range(60)])
    placement = tuple({f"a{i}": 1.0 for i in held} for held in (range(20), range(20, 60)))
    kinds = (ServerKind("few", profile, 16), ServerKind("all", profile, 40))
    run = simulate_cluster(fleet, Cluster(kinds, ("few", "all"), placement=placement), router="plan", duration_s=60.0)
    assert run.state is not None
    assert run.state.sets.shape[-1] >= max(set_places(40), 2 * 40 + 1)
