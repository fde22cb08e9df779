"""Placements of systems: which adapters each server of a cluster serves, by packer's own plan or by a solver's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from packer.cluster import Cluster
from packer.errors import IncompatibleError, ValidationError
from packer.plan import Plan
from packer.planning.explore import Frontier
from packer.planning.overload import Overload
from packer.planning.recommend import Deployment
from packer.planning.solve import solve
from packer.profile import Profile
from packer.words import counted
from packer.workload import Workload


@dataclass(eq=False)
class OwnPlan:
    """The plan of `packer solve` for the cluster's number of servers and the workload's goal, with replicas."""

    name = "plan"
    _jobs: dict[tuple[object, ...], Frontier] = field(init=False, repr=False, default_factory=dict)

    def place(self, workload: Workload, cluster: Cluster, seed: int) -> Cluster:
        """The cluster with the servers of the plan; servers that it leaves empty stay as they are."""
        job = self._job(workload, cluster, seed)
        point = Deployment(job, len(cluster) * job.size).explored()
        if point is None or point.n_gpus != len(cluster):
            point = Overload(job).at(min(len(cluster), job.parts.most_gpus(None)))
        return _with_servers(cluster, point.plan)

    def needed(self, workload: Workload, cluster: Cluster, seed: int) -> int | None:
        """Number of servers of the smallest plan that keeps the goal; None if none does."""
        point = Deployment(self._job(workload, cluster, seed)).explored()
        return None if point is None else point.n_gpus

    def _job(self, workload: Workload, cluster: Cluster, seed: int) -> Frontier:
        profile = _profile(cluster, "a plan for several is made by packer solve: give plan.cluster()")
        key = (id(workload), id(profile), seed)
        if key not in self._jobs:
            self._jobs[key] = Frontier(workload, profile, seed=seed)
        return self._jobs[key]


@dataclass(frozen=True)
class BySolver:
    """The plan of least latency of one solver, `name`, on all servers, with up to `max_replicas` of an adapter."""

    name: str
    max_replicas: int = 1

    def place(self, workload: Workload, cluster: Cluster, seed: int) -> Cluster:
        """The cluster with the servers of the plan."""
        profile = _profile(cluster, f"solver {self.name!r} has no rule for several")
        gpus = len(cluster) * profile.engine.gpus
        plan = solve(
            workload, profile, "latency", solver=self.name, max_gpus=gpus, seed=seed, verify=False,
            with_headroom=False, max_replicas=self.max_replicas,
        )  # fmt: skip
        if plan.unplaced:
            on, why = counted(len(cluster), "server"), "; ".join(each.rstrip(".") for each in plan.reasons)
            raise ValidationError(f"Expected a plan on {on}, got none: {why}.")
        return _with_servers(cluster, plan)


def _profile(cluster: Cluster, why: str) -> Profile:
    """The one profile of all servers. Raises `IncompatibleError` with the reason `why`: there are several."""
    profiles = {kind.profile for kind in cluster.kinds if kind.name in cluster.servers}
    if len(profiles) > 1:
        raise IncompatibleError(f"Expected servers of one profile to place adapters on, got {len(profiles)}: {why}.")
    return profiles.pop()


def _with_servers(cluster: Cluster, plan: Plan) -> Cluster:
    """The cluster with the plan's servers; if the plan has fewer, the others keep their settings and are empty."""
    own = plan.cluster()
    engine, left = cluster.kind(0).engine, len(cluster) - len(own)
    kinds = tuple(replace(kind, engine=engine) for kind in own.kinds)
    assert own.placement is not None
    if left:
        kinds += (replace(cluster.kind(0), name=f"{cluster.servers[0]}, empty"),)
    return replace(
        cluster, kinds=kinds, servers=own.servers + (kinds[-1].name,) * left, placement=own.placement + ({},) * left
    )
