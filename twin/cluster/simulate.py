"""Simulate a cluster with a workload: the entry point of the cluster twin."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from packer import checks, registry
from packer.public import public
from packer.arrays import FloatArray, IntArray
from packer.change import Change, Controller
from packer.cluster import Cluster
from packer.errors import IncompatibleError
from packer.goal import GoalLike
from packer.gpu import check_serves, serving
from packer.twin.arrivals import MAX_REQUESTS, Marks, draw_marks, draw_times, replaying
from packer.twin.cluster.caching import FIXED, CachePolicy
from packer.twin.cluster.candidates import Candidates, candidates_of
from packer.twin.cluster.client import LIKELY_REQ_S
from packer.twin.cluster.dispatch import Dispatch
from packer.twin.cluster.result import raw_of, sent_only, with_held_back
from packer.twin.cluster.routers.base import Router
from packer.twin.cluster.serving import Serving, ever_placed
from packer.twin.cluster.setup import Setup, idle_servers, kernels_of, kind_setup, server_setups
from packer.twin.cluster.state import Servers, refused_of
from packer.twin.cluster.system import System, judged, load_system, placed
from packer.twin.cluster.transit import transit_of
from packer.twin.run import Run
from packer.twin.server import Raw
from packer.twin.simulate import check_client, ended_s, simulated_s
from packer.workload import Workload


@public
def simulate_cluster(
    workload: Workload,
    cluster: Cluster,
    system: str | os.PathLike[str] | System = "vllm",
    router: str | Router | None = None,
    *,
    duration_s: float | None = None,
    seed: int = 0,
    slo: GoalLike | None = None,
    stats_interval_s: float | None = None,
    timeline_bin_s: float = 10.0,
    max_outstanding: int | None = None,
    concurrency: int | None = None,
    paced: bool = False,
    cache: str | CachePolicy | None = None,
    changes: Sequence[Change] = (),
    controller: Controller | None = None,
    startup_s: float | None = None,
) -> Run:
    """Simulate servers behind a router that serve this workload.

    `workload`, `cluster`: the requests, and the servers.
    `system`: a shipped system's name (`packer systems`), a `.toml` file, or a `System`. A system with its own placement
    places the adapters, and accepts a cluster with a placement only if its own is "plan".
    `router`: a registered name, with parameters as in "affinity:slack=8", or an object; None: the system's.
    `duration_s`, `timeline_bin_s`: as for `packer.simulate`.
    `seed`: seed of arrivals, lengths and routers: the same seed sends the same requests to every cluster.
    `slo`: as for `packer.simulate`; None: the cluster's, else the workload's. {"ttft_ms": 2000} limits each request.
    `stats_interval_s`: largest age of the counts of requests and KV blocks that a router with a compiled score reads;
    0: up to date; None: the system's.
    `max_outstanding`, `concurrency`, `paced`: as for `packer.simulate`: requests that the client keeps open in the
    whole cluster, at most or always.
    `cache`: a cache policy, by name or an object; None: the system's.
    `changes`: changes during the run. A server whose first change is a start is off until then; it starts with its
    adapters.
    `controller`: called every `period_s` with the state of the servers; it may make changes.
    `startup_s`: time from the start of a server until it gets requests; None: the profile's.

    Raises `UnknownNameError`, `ValidationError`: a name or value is unknown or out of range, or no server may serve an
    adapter; `IncompatibleError`: the router can't serve this cluster, an engine can't do what the system says, or base
    models don't match; `PluginError`: a plug-in raised, or a router returned a server that may not serve the adapter.
    """
    duration_s = simulated_s(workload, duration_s, timeline_bin_s, seed)
    check_client(workload, max_outstanding, concurrency, paced)
    workload = judged(workload, cluster, slo)
    how = system if isinstance(system, System) else load_system(system)
    stats_interval_s = how.stats_age_s if stats_interval_s is None else stats_interval_s
    checks.real("stats_interval_s", stats_interval_s, low=0.0)
    checks.real("startup_s", startup_s or 0.0, low=0.0)
    cluster = placed(workload, cluster, how, seed)
    workload = _with_job(workload, cluster, how)
    chosen = _router(how.router if router is None else router, cluster, workload)
    policy = _cache(how.cache or "lru" if cache is None else cache)
    kinds = {kind.name: kind_setup(workload, kind, how, policy) for kind in cluster.kinds}
    slot_ranks = [kinds[kind].server.settings.max_lora_rank for kind in cluster.servers]
    now = replace(cluster, placement=None) if getattr(chosen, "relocates", False) else cluster
    acts = controller is not None
    serving = Serving(now, workload, slot_ranks, changes, startup_s) if changes or acts else None
    loads = acts and cluster.placement is not None  # of any adapter, on any server
    held = replace(cluster, placement=None) if loads else ever_placed(now, changes)
    candidates = _candidates(held, workload, slot_ranks)
    own = server_setups(workload, cluster, kinds, candidates)
    failed = next(filter(None, (setup.error() for setup in {id(each): each for each in own}.values())), None)
    servers, way = None, None
    if failed is None:
        drawn = replaying(workload, duration_s, seed)
        times = None if concurrency and not paced else draw_times(drawn, duration_s, seed)
        way = transit_of(workload, cluster, 0 if times is None else len(times[0]))
        work = Dispatch(
            chosen, cluster, workload, candidates, duration_s, stats_interval_s, seed, max_outstanding, way, policy,
            kernels_of(own), serving, controller,
            None if drawn.arrivals.trace is None else drawn.arrivals.trace.sessions, concurrency, timeline_bin_s,
        )  # fmt: skip
        servers, duration_s = _run(work, kinds, own, drawn, times)
    first = own[0].server
    return Run(
        "ok" if failed is None else "memory_error", failed or "", workload, first.profile, first.settings,
        duration_s, seed, sum(setup.server.kv_cache_tokens for setup in own),
        Raw.nothing(len(workload)) if servers is None else raw_of(servers, way, duration_s),
        timeline_bin_s, concurrency, paced, cluster=cluster, system=how.name, router=chosen.name,
        setups=[setup.server for setup in own], state=servers, transit=way, max_outstanding=max_outstanding,
        spans=None if serving is None or servers is None else serving.finished(servers, duration_s),
    )  # fmt: skip


def _candidates(cluster: Cluster, workload: Workload, slot_ranks: Sequence[int]) -> Candidates:
    """Return the candidates; raises `IncompatibleError` if a server may serve an adapter of another base model."""
    if not workload.models:  # then all servers have the same
        serving(workload, [kind.profile for kind in cluster.kinds if kind.name in cluster.servers])
    found = candidates_of(cluster, workload, slot_ranks)
    model_of = {each.name: each.model for each in workload.adapters if each.model is not None}
    placement = cluster.placement or [model_of] * len(cluster)
    for kind in cluster.kinds if model_of else ():
        own = [each for name, each in zip(cluster.servers, placement, strict=True) if name == kind.name]
        check_serves(kind.profile, sorted({model_of[name] for each in own for name in each}))
    return found


def _with_job(workload: Workload, cluster: Cluster, system: System) -> Workload:
    """Return the workload with the job that its servers train: its own or the cluster's, by the system's policy."""
    if workload.fine_tuning is None and cluster.fine_tuning is not None:
        workload = replace(workload, fine_tuning=cluster.fine_tuning)
    return workload if system.tuning is None else workload.tuned_by(system.tuning)


def _run(
    work: Dispatch, kinds: Mapping[str, Setup], own: Sequence[Setup], drawn: Workload,
    times: tuple[FloatArray, IntArray | None] | None,
) -> tuple[Servers, float]:  # fmt: skip
    """Return the servers after requests arrived at these times, from these adapters, and how long the run took, s.
    `times` None: requests of a closed loop, which may end early. Raises `IncompatibleError`: `concurrency` is set, and
    servers change or refuse requests, the network takes time or hosts have limited memory."""
    if work.concurrency is not None and work.way is not None:
        raise IncompatibleError("concurrency is simulated without network_ms and limits of host memory.")
    if work.concurrency is not None and work.serving is not None:
        raise IncompatibleError("concurrency is simulated without changes of the servers.")
    if times is None:
        servers = _closed_loop(work, kinds, own, drawn)
        end_s = ended_s(drawn, raw_of(servers, None, work.duration_s))
        if end_s < work.duration_s:
            return _run(replace(work, duration_s=end_s), kinds, own, drawn, times)
        return servers, work.duration_s
    time_s, owner = times
    servers = _served(work, kinds, own, time_s, draw_marks(drawn, owner, len(time_s), work.seed))
    return servers if work.concurrency is None else with_held_back(servers, time_s), work.duration_s


def _served(
    work: Dispatch, kinds: Mapping[str, Setup], own: Sequence[Setup], time_s: FloatArray, marks: Marks
) -> Servers:
    """The servers after serving these requests; raises `IncompatibleError` if a closed client was refused."""
    serving = work.serving
    assigned = work.assign(marks.adapter, time_s, None if serving is None else work.current)
    servers, engines = idle_servers(work, kinds, own, time_s, marks, work.adapter_rows(marks.adapter))
    if serving is not None:
        serving.begin(servers)
    content = marks.content() if getattr(work.router, "reads_prompts", False) else None
    servers = work.run(servers, engines, assigned, content)
    if work.concurrency is not None and refused_of(servers).any():
        rule = "Expected a concurrency with which no server has its max_num_queued_reqs requests, got"
        raise IncompatibleError(f"{rule} {work.concurrency}: it would refuse requests of a client that waits for them.")
    return servers


def _closed_loop(work: Dispatch, kinds: Mapping[str, Setup], own: Sequence[Setup], drawn: Workload) -> Servers:
    """Return the servers, with the requests sent, after a client kept `concurrency` requests open all the time."""
    assert work.concurrency is not None
    trace, count = drawn.arrivals.trace, len(own)
    most = len(trace) if trace is not None else MAX_REQUESTS
    rows = work.concurrency + math.ceil(LIKELY_REQ_S * work.duration_s) * count
    while True:
        rows = min(rows, most)
        servers = _served(work, kinds, own, np.zeros(rows), draw_marks(drawn, None, rows, work.seed))
        sent = int(np.count_nonzero(np.isfinite(servers.sent_s)))
        # If all rows were sent, the client may have run out of them.
        if sent < rows or rows == most:
            return sent_only(servers, sent)
        rows *= 2


def _cache(cache: str | CachePolicy) -> CachePolicy:
    """Return the cache policy, created if `cache` is a name; raises `ValidationError` if an attribute is wrong."""
    policy: CachePolicy = registry.make("cache", cache) if isinstance(cache, str) else cache
    checks.instance("the cache policy", policy, CachePolicy, 'packer.registry.make("cache", NAME)')
    checks.choice(f"rule of the cache policy {policy.name!r}", policy.rule, range(FIXED + 1))
    checks.real(f"high_water of {policy.name!r}", policy.high_water, low=0.0, high=1.0, open_low=True)
    return policy


def _router(router: str | Router, cluster: Cluster, workload: Workload) -> Router:
    """Return the router, created if `router` is a name; raises `IncompatibleError` if it can't serve the cluster."""
    chosen: Router = registry.make("router", router) if isinstance(router, str) else router
    checks.instance("the router", chosen, Router, 'packer.registry.make("router", NAME)')
    reason = chosen.supports(cluster, workload)
    if reason is not None:
        raise IncompatibleError(f"Router {chosen.name!r}: {reason}.")
    return chosen
