"""Systems side by side: the same requests for each, figures with intervals over seeds, servers that each needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packer import checks
from packer.cluster import Cluster
from packer.errors import IncompatibleError, ValidationError
from packer.planning.solve import solve
from packer.predictors.build import register_ray
from packer.search import fewest
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.system import System, load_system
from packer.twin.uncertainty import MAX_SEEDS, Interval, interval
from packer.workload import Workload

FIGURES = (
    "slo_attainment", "goodput_tok_s", "total_token_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "p99_tpot_ms", "hit_rate", "cold_start_share", "adapter_loads", "preemptions", "busy_share",
)  # fmt: skip
"""What is compared."""


@dataclass(frozen=True)
class SystemResult:
    """One system: each of `FIGURES` over the seeds, with its 95 % interval."""

    system: str
    router: str
    servers: int
    figures: Mapping[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**vars(self), "figures": {name: row._asdict() for name, row in self.figures.items()}}


def compare_systems(
    workload: Workload,
    cluster: Cluster,
    systems: Sequence[str | os.PathLike[str] | System],
    *,
    seeds: int = 5,
    seed: int = 0,
    duration_s: float | None = None,
    slo: Mapping[str, float] | None = None,
    router: str | None = None,
    jobs: int = -1,
    backend: str = "threading",
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> list[SystemResult]:
    """Simulate each system with the same requests, for the seeds `seed`, `seed` + 1, ….

    A system whose router is "plan" serves a plan of least latency for as many servers, if the cluster has no
    placement of its own.

    Parameters
    ----------
    workload, cluster, duration_s, slo
        As `simulate_cluster` takes them.
    systems
        Names, files or `System` objects.
    seeds, seed
        How many runs of each, and the first seed.
    router
        A router for all of them instead of their own.
    jobs, backend
        Runs at once (-1: as many as cores), and joblib's backend; "ray" runs them on a Ray cluster.
    progress
        Called with (what, done, total) after each run.

    Raises
    ------
    InputError
        As `simulate_cluster`; `MissingDependencyError` without Ray where it is the backend.
    """
    checks.integer("seeds", seeds, low=1, high=MAX_SEEDS)
    known = [each if isinstance(each, System) else load_system(each) for each in systems]
    clusters = [_placed(workload, cluster, each, router, seed) for each in known]
    given = {"workload": workload, "router": router, "duration_s": duration_s, "slo": slo}
    runs = [
        {**given, "cluster": own, "system": each, "seed": seed + k}
        for each, own in zip(known, clusters, strict=True)
        for k in range(seeds)
    ]
    found = _run_all(runs, jobs, backend, progress)
    return [_result(each, found[i * seeds : (i + 1) * seeds], len(cluster)) for i, each in enumerate(known)]


def servers_needed(
    workload: Workload,
    cluster: Cluster,
    system: str | os.PathLike[str] | System,
    *,
    slo: Mapping[str, float] | None = None,
    share: float = 0.99,
    seeds: int = 3,
    seed: int = 0,
    duration_s: float | None = None,
    router: str | None = None,
    most: int = 1024,
    jobs: int = -1,
    backend: str = "threading",
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> SystemResult | None:
    """The result with the fewest equal servers at which the mean SLO attainment reaches `share`.

    Doubles the number of servers until it holds, then bisects; attainment is taken to grow with servers. None
    if `most` servers do not reach it. Other parameters: see `compare_systems`.

    Raises `IncompatibleError`: the cluster has several kinds of server or a placement, or there is no SLO.
    """
    checks.real("share", share, low=0.0, high=1.0, open_low=True)
    checks.integer("most", most, low=1)
    if not (cluster.slo if slo is None else slo):
        raise IncompatibleError(
            "The number of servers that a system needs is that for an SLO: give its limits."
        )

    tried: dict[int, SystemResult] = {}

    def holds(n: int) -> bool:
        (tried[n],) = compare_systems(
            workload, cluster.resized(n), [system], seeds=seeds, seed=seed, duration_s=duration_s, slo=slo,
            router=router, jobs=jobs, backend=backend,
        )  # fmt: skip
        progress(f"{tried[n].system}: {n} servers", 0, 0)
        attainment = tried[n].figures["slo_attainment"].mean
        return attainment is not None and attainment >= share

    found = fewest(holds, 1, most)
    return None if found is None else tried[found]


def _placed(workload: Workload, cluster: Cluster, system: System, router: str | None, seed: int) -> Cluster:
    """The cluster, with the placement of a plan if the system needs one and there is none."""
    needed = (router or system.router) == "plan" or (router is None and system.placement is not None)
    if not needed or cluster.placement is not None:
        return cluster
    if len(cluster.kinds) > 1:
        raise IncompatibleError(
            "A plan for several kinds of server is made by packer solve: give plan.cluster()."
        )
    plan = solve(
        workload,
        cluster.kinds[0].profile,
        "latency",
        max_gpus=len(cluster),
        seed=seed,
        verify=False,
        solver=None if system.placement == "auto" else system.placement,
    )
    if plan.unplaced:
        raise ValidationError(
            f"Expected a plan on {len(cluster)} servers, got none: {' '.join(plan.reasons)}"
        )
    return replace(plan.cluster(), slo=cluster.slo)


def _figures(**given: Any) -> dict[str, Any]:
    """One run: what a worker sends back."""
    run = simulate_cluster(**given)
    return {"router": run.router} | {name: float(getattr(run, name)) for name in FIGURES}


def _run_all(
    runs: Sequence[dict[str, Any]], jobs: int, backend: str, progress: Callable[[str, int, int], None]
) -> list[dict[str, Any]]:
    """The runs in parallel; results in their order."""
    from joblib import Parallel, delayed, parallel_config

    if backend == "ray":
        register_ray()
    with parallel_config(backend=backend, n_jobs=jobs):
        done: list[dict[str, Any]] = []
        returned = "list" if backend == "ray" else "generator"  # Ray's backend has no generator
        for figures in Parallel(return_as=returned)(delayed(_figures)(**run) for run in runs):
            done.append(figures)
            progress("simulating", len(done), len(runs))
    return done


def _result(system: System, runs: Sequence[Mapping[str, Any]], servers: int) -> SystemResult:
    figures = {name: interval(np.array([run[name] for run in runs])) for name in FIGURES}
    return SystemResult(system.name, runs[0]["router"], servers, figures)
