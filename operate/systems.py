"""Compare systems: the same requests for each, figures with intervals over seeds, the servers that each needs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from packer import checks, registry
from packer.cluster import Cluster
from packer.errors import IncompatibleError, ValidationError
from packer.goal import GoalLike
from packer.predictors.build import register_ray
from packer.progress import Progress, silent
from packer.public import public
from packer.strategies import Placement, SizedPlacement
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.system import System, judged, load_system, placed
from packer.twin.stability import served_of_due
from packer.twin.uncertainty import MAX_SEEDS, Interval, interval_of
from packer.workload import Workload

FIGURES = (
    "slo_attainment", "goodput_tok_s", "total_token_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "p99_tpot_ms", "hit_rate", "cold_start_share", "adapter_loads", "preemptions", "busy_share",
)  # fmt: skip
"""Figures that are compared."""


@dataclass(frozen=True)
class SystemResult:
    """One system: the mean and 95 % interval of each of `FIGURES` over the seeds.

    `seeds`: the value of each figure for each seed, and the share of the tokens due that are served, `served`.
    `failed`: why its servers do not start; there are no figures then.
    """

    system: str
    router: str
    servers: int
    figures: Mapping[str, Interval]
    seeds: Mapping[str, tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)
    failed: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        shown = {key: value for key, value in vars(self).items() if key != "seeds"}
        return shown | {"figures": {name: row._asdict() for name, row in self.figures.items()}}


@dataclass(frozen=True)
class Trials:
    """How systems are run; for the fields see `compare_systems`."""

    seeds: int = 3
    seed: int = 0
    duration_s: float | None = None
    slo: GoalLike | None = None
    router: str | None = None
    stats_age_s: float | None = None
    jobs: int = -1
    backend: str = "threading"

    def __post_init__(self) -> None:
        checks.integer("seeds", self.seeds, low=1, high=MAX_SEEDS)
        if self.jobs != -1:
            checks.integer("jobs other than -1", self.jobs, low=1, high=1024)

    def run(
        self, workload: Workload, placed_systems: Sequence[tuple[System, Cluster]], seeds: int,
        progress: Progress = silent,
    ) -> list[SystemResult]:  # fmt: skip
        """The result of each system over `seeds` seeds, on its own cluster, on which adapters are placed already."""
        given = {"workload": workload, "router": self.router, "duration_s": self.duration_s, "slo": self.slo}
        given["stats_interval_s"] = self.stats_age_s
        runs = [
            {**given, "cluster": own, "system": replace(each, placement=None), "seed": self.seed + k}
            for each, own in placed_systems
            for k in range(seeds)
        ]
        found = _run_all(runs, self.jobs, self.backend, progress)
        rows = [found[i * seeds : (i + 1) * seeds] for i in range(len(placed_systems))]
        return [_result(each, row, len(own)) for (each, own), row in zip(placed_systems, rows, strict=True)]


@public
def compare_systems(
    workload: Workload,
    cluster: Cluster,
    systems: Sequence[str | os.PathLike[str] | System],
    *,
    seeds: int = 5,
    seed: int = 0,
    duration_s: float | None = None,
    slo: GoalLike | None = None,
    router: str | None = None,
    stats_age_s: float | None = None,
    jobs: int = -1,
    backend: str = "threading",
    progress: Progress = silent,
) -> list[SystemResult]:
    """Simulate each system with the same requests, for the seeds `seed`, `seed` + 1, ….

    A system with a placement of its own places the adapters once, with the first seed. System "packer" serves the
    cluster's placement, and without one the plan that `packer solve` makes for as many servers. Every other system
    may serve each adapter on every server whose slots hold it, whatever the cluster's placement says.

    `workload`, `cluster`, `duration_s`, `slo`: as `simulate_cluster` takes them. `systems`: names, files or `System`
    objects.
    `seeds`: number of runs of each system. `router`, `stats_age_s`: replace the router of every system, and the maximum
    age of the counts that its router reads.
    `jobs`, `backend`: number of runs at once (-1: one per core), and joblib's backend; "ray" uses a Ray cluster.

    Raises `InputError`, as `simulate_cluster`; `MissingDependencyError`: the backend is Ray, which is not installed.
    """
    trials = Trials(seeds, seed, duration_s, slo, router, stats_age_s, jobs, backend)
    known = [each if isinstance(each, System) else load_system(each) for each in systems]
    held, free = judged(workload, cluster, slo), replace(cluster, placement=None)
    clusters = [placed(held, cluster if serves_plans(each, router) else free, each, seed) for each in known]
    return trials.run(workload, list(zip(known, clusters, strict=True)), seeds, progress)


@public
def servers_needed(
    workload: Workload, cluster: Cluster, system: str | os.PathLike[str] | System,
    trials: Trials | None = None, *, share: float | None = None, most: int = 1024,
    progress: Progress = silent,
) -> SystemResult | None:  # fmt: skip
    """The result with the fewest equal servers at which the mean SLO attainment reaches `share`.

    Every number of servers is tried in turn, because attainment need not grow with servers. A number is given up after
    the first seed if the other seeds cannot raise the mean to `share` (None: `Goal.share`). System "packer" begins at
    the number of `packer solve` for that goal, which has a margin on the rates. None if `most` servers do not reach
    `share`, or no plan keeps the goal. A system whose servers do not start gets its result as it is (`failed`).

    Raises `IncompatibleError`: the cluster has several kinds of server or a placement, or there is no SLO.
    """
    if share is not None:
        checks.real("share", share, low=0.0, high=1.0, open_low=True)
    checks.integer("most", most, low=1)
    trials = trials or Trials()
    seeds, slo = trials.seeds, trials.slo
    held = judged(workload, cluster, slo)
    if held.slo.is_none:
        raise IncompatibleError("The number of servers that a system needs is that for an SLO: give its limits.")
    if share is None:
        share = held.slo.share
    else:
        held = replace(held, slo=replace(held.slo, request_share=share))
    known = system if isinstance(system, System) else load_system(system)
    by: Placement | None = None
    first: int | None = 1
    if known.placement is not None:
        by = registry.make("placement", known.placement)
        if isinstance(by, SizedPlacement):
            first = by.needed(held, cluster.resized(1), trials.seed)

    def tried(n: int, runs: int) -> SystemResult | None:
        try:
            own = placed(held, cluster.resized(n), known, trials.seed, by)
        except ValidationError:  # so few servers cannot hold the fleet
            return None
        (result,) = trials.run(workload, [(known, own)], runs)
        progress(f"{known.name}: {n} servers", 0, 0)
        return result

    for n in () if first is None else range(first, most + 1):
        found = tried(n, 1)
        if found is not None and found.failed and by is None:
            return found
        if found is None or _attained(found) < 1.0 - seeds * (1.0 - share) - 1e-9:
            continue
        found = found if seeds == 1 else tried(n, seeds)
        if found is not None and _attained(found) >= share:
            return found
    return None


def serves_plans(system: System, router: str | None) -> bool:
    """Whether a system uses the placement of the cluster."""
    return "plan" in (system.placement, router or system.router)


def _attained(result: SystemResult) -> float:
    """Mean SLO attainment; 0 if it is unknown."""
    return result.figures["slo_attainment"].mean or 0.0


def _figures(**given: Any) -> dict[str, Any]:
    """The figures of one run, which a worker sends back."""
    run = simulate_cluster(**given)
    found = {"router": run.router, "failed": run.status_reason, "served": served_of_due(run)}
    return found | {name: math.nan if run.status_reason else float(getattr(run, name)) for name in FIGURES}


def _run_all(runs: Sequence[dict[str, Any]], jobs: int, backend: str, progress: Progress) -> list[dict[str, Any]]:
    """The runs in parallel; results in their order."""
    from joblib import Parallel, delayed, parallel_config
    from joblib.parallel import BACKENDS

    if backend == "ray":
        register_ray()
    checks.choice("backend", backend, BACKENDS)
    with parallel_config(backend=backend, n_jobs=jobs):
        done: list[dict[str, Any]] = []
        returned = "list" if backend == "ray" else "generator"  # Ray's backend has no generator
        for figures in Parallel(return_as=returned)(delayed(_figures)(**run) for run in runs):
            done.append(figures)
            progress("simulating", len(done), len(runs))
    return done


def _result(system: System, runs: Sequence[Mapping[str, Any]], servers: int) -> SystemResult:
    by_seed = {name: tuple(run[name] for run in runs) for name in (*FIGURES, "served")}
    figures = {name: interval_of(name, np.array(by_seed[name])) for name in FIGURES}
    return SystemResult(system.name, runs[0]["router"], servers, figures, by_seed, runs[0]["failed"])
