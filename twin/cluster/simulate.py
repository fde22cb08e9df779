"""Simulate a cluster with a workload: the cluster twin's front door."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from packer import checks, registry
from packer.cluster import Cluster, ServerKind, check_slo
from packer.errors import IncompatibleError
from packer.twin.arrivals import Marks, draw_marks, draw_times
from packer.twin.cluster.candidates import Candidates, candidates_of
from packer.twin.cluster.dispatch import Dispatch
from packer.twin.cluster.result import ClusterSimulation
from packer.twin.cluster.routers.base import Router
from packer.twin.cluster.state import Servers, new_servers
from packer.twin.cluster.system import System, load_system
from packer.twin.law.law import law_of
from packer.twin.memory.policy import kv_cache_tokens, memory_error
from packer.twin.server import Server
from packer.twin.simulate import HOUR_S, MAX_BINS
from packer.workload import Workload

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def simulate_cluster(
    workload: Workload,
    cluster: Cluster,
    system: str | os.PathLike[str] | System = "vllm",
    router: str | Router | None = None,
    *,
    duration_s: float | None = None,
    seed: int = 0,
    slo: Mapping[str, float] | None = None,
    stats_interval_s: float = 0.0,
    timeline_bin_s: float = 10.0,
) -> ClusterSimulation:
    """Simulate servers behind a router that serve this workload.

    Parameters
    ----------
    workload, cluster
        What comes, and what the servers are.
    system
        A shipped system's name (`packer systems`), a `.toml` file, or a `System`.
    router
        A registered name, with parameters as in "affinity:slack=8", or an object; None: the system's.
    duration_s
        As for `packer.simulate`.
    seed
        Of arrivals, lengths and routers: the same seed sends the same requests to every cluster.
    slo
        Limits of a request, ms: ttft_ms, tpot_ms, normalised_ms, latency_ms; None: the cluster's.
    stats_interval_s
        How old the counts of requests and KV blocks that a router reads may be; 0: up to date.
    timeline_bin_s
        Resolution of the timelines.

    Raises
    ------
    UnknownNameError, ValidationError
        A name or value is unknown or out of range, or no server may serve an adapter.
    IncompatibleError
        The router can't serve this cluster.
    PluginError
        A router raised, or returned a server that may not serve the adapter.
    """
    if duration_s is None:
        duration_s = workload.arrivals.whole_s(HOUR_S)
    checks.real("duration_s", duration_s, low=0.0, high=1e8, open_low=True)
    checks.real("timeline_bin_s", timeline_bin_s, low=duration_s / MAX_BINS)
    checks.real("stats_interval_s", stats_interval_s, low=0.0)
    checks.integer("seed", seed, low=0)
    limits = dict(cluster.slo) if slo is None else check_slo(slo)
    how = system if isinstance(system, System) else load_system(system)
    if router is None:
        router = how.router
    chosen: Router = registry.make("router", router) if isinstance(router, str) else router
    reason = chosen.supports(cluster, workload)
    if reason is not None:
        raise IncompatibleError(f"Router {chosen.name!r}: {reason}.")
    setups = _setups(workload, cluster)
    slot_ranks = [setups[kind].settings.max_lora_rank for kind in cluster.servers]
    candidates = candidates_of(cluster, workload, slot_ranks)
    own, served = _own_setups(workload, cluster, setups, candidates)
    failed = next(filter(None, map(_does_not_start, {id(server): server for server in own}.values())), None)
    servers = None
    if failed is None:
        time_s, owner = draw_times(workload, float(duration_s), seed)
        marks = draw_marks(workload, owner, len(time_s), seed)
        work = Dispatch(chosen, cluster, workload, candidates, float(duration_s), stats_interval_s, seed)
        assigned = work.assign(marks.adapter, time_s)
        rows = work.adapter_rows(marks.adapter, assigned)
        servers = _idle(
            cluster, setups, own, served, time_s, marks, rows, float(duration_s), timeline_bin_s, seed
        )
        servers = work.run(servers, assigned)
    return ClusterSimulation.of(
        workload, cluster, how.name, chosen.name, own, servers, failed or "",
        duration_s=float(duration_s), seed=seed, slo=limits, timeline_bin_s=timeline_bin_s,
    )  # fmt: skip


def _setups(workload: Workload, cluster: Cluster) -> dict[str, Server]:
    """Each kind of server, by its name, as if it served the whole fleet."""
    return {kind.name: _setup(workload, kind) for kind in cluster.kinds}


def _setup(workload: Workload, kind: ServerKind) -> Server:
    rank = kind.max_lora_rank or checks.slot_rank_for(int(workload.ranks.max()))
    settings = kind.profile.settings(kind.max_loras, rank)
    return Server(workload, kind.profile, settings, kv_cache_tokens(kind.profile, settings), None)


def _does_not_start(server: Server) -> str | None:
    """Why a server does not start, for people; None if it does."""
    reason = memory_error(server.profile, server.settings)
    if reason is None and server.longest_request() < 2:
        reason = (
            f"the KV cache of {server.kv_cache_tokens} tokens can't hold the largest adapter and a request"
        )
    return reason


def _idle(
    cluster: Cluster,
    setups: Mapping[str, Server],
    own: Sequence[Server],
    served: Sequence[IntArray],
    time_s: FloatArray,
    marks: Marks,
    rows: int,
    duration_s: float,
    bin_s: float,
    seed: int,
) -> Servers:
    """The servers before the first request."""
    nothing = Marks(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
    templates = {id(server): server.state(nothing, duration_s, bin_s, seed) for server in own}
    kinds = list(setups)
    return new_servers(
        [templates[id(server)] for server in own],
        served,
        [law_of(server.profile) for server in own],
        [server.longest_request() for server in own],
        [kinds.index(kind) for kind in cluster.servers],
        time_s,
        marks,
        next(iter(setups.values())).workload.ranks,
        np.stack([server.adapter_blocks() for server in setups.values()]),
        rows=rows,
    )


def _own_setups(
    workload: Workload, cluster: Cluster, setups: Mapping[str, Server], candidates: Candidates
) -> tuple[list[Server], list[IntArray]]:
    """Each server with the adapters that it may serve, and their numbers in ascending order.

    Servers of one kind with the same adapters share theirs.
    """
    groups = candidates.groups_of_servers(len(cluster))
    found: dict[tuple[str, tuple[int, ...]], tuple[Server, IntArray]] = {}
    for kind, served in zip(cluster.servers, groups, strict=True):
        if (kind, served) not in found:
            own = np.flatnonzero(np.isin(candidates.group, served))
            if len(own) == 0:
                own = np.arange(len(workload))
            subset = workload if len(own) == len(workload) else workload.subset(own.tolist())
            found[kind, served] = replace(setups[kind], workload=subset), own
    each = [found[key] for key in zip(cluster.servers, groups, strict=True)]
    return [server for server, _ in each], [own for _, own in each]
