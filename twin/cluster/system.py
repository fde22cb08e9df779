"""Systems: the choices that make a cluster "vLLM with round robin" or "S-LoRA", by name or from a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from packer import registry
from packer.cluster import Cluster
from packer.errors import FileFormatError, IncompatibleError, reader
from packer.goal import GoalLike
from packer.io.documents import parse_toml
from packer.io.schema import parse
from packer.io.shipped import read_named, shipped
from packer.strategies import Placement
from packer.workload import Workload


def _folders() -> tuple[str, ...]:
    """Packages with systems: modules registered under `packer.systems`."""
    return tuple(registry.load("system", name).__name__ for name in registry.names("system"))


@dataclass(frozen=True)
class System:
    """How a cluster is run.

    `router` and all later fields: by name, with parameters as in "affinity:slack=8"; None keeps what the kinds of
    server have. `source`: where the description comes from. `engine`: `packer.engines`. `cache`: a cache policy
    (`packer.twin.cluster.caching`). `loading`: `packer.papers.cache.loading`. `kernel`: `packer.twin.law.kernels`.
    `memory`: "reserved" or "unified". `placement`: what places the adapters on the servers
    (`packer.strategies.Placement`), as in "plan" or "solver:name=dlora". `tuning`: how training shares the servers
    (`packer.twin.tuning.policies`). `stats_age_s`: largest age of the counts that the router reads, s.
    """

    name: str
    summary: str
    source: str
    router: str
    engine: str | None = None
    cache: str | None = None
    loading: str | None = None
    kernel: str | None = None
    memory: Literal["reserved", "unified"] | None = None
    placement: str | None = None
    tuning: str | None = None
    stats_age_s: float = 0.0


def system_names() -> tuple[str, ...]:
    """Names of the shipped systems, sorted."""
    return tuple(shipped(*_folders()))


@reader
def load_system(name_or_path: str | os.PathLike[str]) -> System:
    """A shipped system, or one of a `.toml` file; raises `UnknownNameError`, `FileFormatError`."""
    name, content = read_named("system", name_or_path, *_folders())
    data = parse_toml(content)
    if "name" in data:
        raise FileFormatError("unknown key: the file's own name is the system's.", key="name")
    return parse(System, {"name": name, **data})


def judged(workload: Workload, cluster: Cluster, slo: GoalLike | None) -> Workload:
    """Return the workload with the goal by which a cluster is judged and for which a plan is made."""
    return workload.held_to(slo if slo is not None else cluster.slo or None)


def placed(
    workload: Workload, cluster: Cluster, system: System, seed: int, placement: Placement | None = None
) -> Cluster:
    """Return the cluster as the system runs it, with the system's placement if it has one. If the system serves any
    plan, the cluster keeps its own placement. `placement`: the system's, if already created. Raises
    `IncompatibleError`: the system places adapters by a rule of its own, and the cluster has a placement."""
    if system.placement is None:
        return cluster
    if cluster.placement is not None:
        if system.placement != "plan":
            rule = f"System {system.name!r} places the adapters itself:"
            raise IncompatibleError(f"{rule} give a cluster without a placement.")
        return cluster
    by: Placement = registry.make("placement", system.placement) if placement is None else placement
    return by.place(workload, cluster, seed)
