"""ROCK's cluster of image models, and what its text leaves open."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from rows import of_seeds

import packer
from packer.cluster import Cluster, Node, ServerKind
from packer.engine_spec import EngineSpec
from packer.lengths import Lengths
from packer.papers.jobs.engine import Jobs
from packer.profile import GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.twin.cluster.system import load_system
from packer.workload import Workload

KINDS = {"A100": 1.0, "A40": 1.3, "RTX 3090": 1.7, "V100": 2.0}
"""Kind of GPU → time of an iteration, in that of the A100."""
EACH = 16
ITERATION_MS = 229.0
STEPS = (20, 50)
ADAPTERS, EXPONENT = 200, 1.13
UNIT_BYTES = 3.1e6
"""Bytes of a unit of rank, as which adapters' sizes are given here."""
LOAD_BASE_MS, LOAD_BYTES_S = 3500.0, 40e6
CLASSES = {"text-to-image": 1.0, "inpainting": 0.93, "image-to-image": 1.12}
"""Kind of task → factor on its time."""
SYSTEMS = {"RROD": "rrod", "LRUMS": "lrums", "Proactive": "proactive", "ROCK": "rock", "ROCK per task": "rock-per-task"}
RUN_S = 720.0
QPS = 3.0
LOADS = (2.0, QPS, 4.0, 5.0)


@dataclass(frozen=True)
class Reading:
    """What the text leaves open.

    `gpus`: of a "GPU node", which has one cache. `pool_bytes`: of a GPU, for adapters. `queues` (0: half as many as
    servers), `dispatch`: of the router `rock`. `status`: weight of a cached adapter for LRUMS, where one waiting job
    per GPU counts 0.2. `proactive`: its router. `sizes`: of adapters, in units of rank; none: log-uniform on 2 to 64.
    `classes`: kinds of task.
    """

    gpus: int = 1
    pool_bytes: float = 1e9
    queues: int = 0
    dispatch: str = "single"
    status: float = 0.0
    proactive: str = "most-idle"
    sizes: tuple[int, ...] = ()
    classes: tuple[str, ...] = tuple(CLASSES)

    def router(self, system: str) -> str | None:
        """Router of a system; None: the preset's."""
        return {
            "rock": f"rock:queues={self.queues},dispatch={self.dispatch}",
            "rock-per-task": f"rock:queues={self.queues},dispatch=free,theta=0",
            "lrums": f"matching-score:cached={self.status},queue=0.2",
            "proactive": self.proactive,
        }.get(system)

    def profile(self, kind: str) -> Profile:
        """SDXL on a GPU of this kind: a job takes its iterations one after the other."""
        return Profile(
            f"{kind}/sdxl",
            ModelSpec("sdxl", 7e9, 1e6, UNIT_BYTES),
            GpuSpec(kind, 24 * 2**30),
            EngineSpec("job", "0", 4096, 4096, 16, block_size=1),
            MemorySpec(self.gpus * self.pool_bytes, 0.0, 0.0, 1, "unified"),
            LatencySpec("linear", {"per_decode_ms": ITERATION_MS * KINDS[kind]}),
            LoadingSpec(LOAD_BASE_MS, UNIT_BYTES / LOAD_BYTES_S * 1e3),
        )

    def cluster(self) -> Cluster:
        """64 GPUs, 16 of each kind."""
        kinds = tuple(ServerKind(k, self.profile(k), ADAPTERS, 64, Jobs(self.gpus)) for k in KINDS)
        servers = tuple(kind for kind in KINDS for _ in range(EACH // self.gpus))
        return Cluster(kinds, servers, nodes=(Node(4 // self.gpus),) * 16)

    def fleet(self, qps: float, seed: int) -> Workload:
        """Adapters by a power law; a size, a class and its factor on the iterations for each."""
        rng = np.random.default_rng((seed, 3))
        weights = 1.0 / np.arange(1, ADAPTERS + 1) ** EXPONENT
        rates = qps * weights / weights.sum()
        factors = rng.choice([CLASSES[name] for name in self.classes], ADAPTERS)
        drawn = np.rint(np.exp(rng.uniform(np.log(1.6), np.log(64.0), ADAPTERS))).astype(int)
        sizes = rng.choice(self.sizes, ADAPTERS) if self.sizes else drawn
        spread = np.arange(STEPS[0], STEPS[1] + 1)
        members = [
            packer.Adapter(f"a{i}", int(sizes[i]), rates[i], Lengths.constant(1), Lengths.empirical(spread * f))
            for i, f in enumerate(factors)
        ]
        return Workload(members, length_correlation=0.0)


READINGS = {
    "as in all rows above": Reading(),
    "LRUMS: a cached adapter counts as much as half a waiting job": Reading(status=0.1),
    "LRUMS: … as two waiting jobs": Reading(status=0.4),
    "Proactive: an idle server with the adapter first": Reading(proactive="affinity:slack=0.5"),
    "0.25 GB for adapters on each GPU": Reading(pool_bytes=0.25e9),
    "0.5 GB": Reading(pool_bytes=0.5e9),
    "2.5 GB": Reading(pool_bytes=2.5e9),
    "adapters of four sizes, ranks 8 to 64": Reading(sizes=(8, 16, 32, 64)),
    "GPU node: a machine of 4 GPUs": Reading(gpus=4),
    "ROCK: 16 queues": Reading(queues=16),
    "ROCK: 64 queues": Reading(queues=64),
    "ROCK: 128 queues": Reading(queues=128),
    "ROCK: a queue's tasks go to its three servers": Reading(dispatch="fastest"),
    "ROCK: … 128 queues": Reading(dispatch="fastest", queues=128),
}
"""Name → what differs."""


@dataclass(frozen=True)
class Outcome:
    """One run; `inference_s`: time of a task on its server, its load included."""

    hit_rate: float
    updates: int
    update_s: float
    latency_s: float
    inference_s: float
    p99_s: float
    waiting: float
    memory: float
    busy: float


def outcome(system: str, qps: float, seed: int, reading: Reading) -> Outcome:
    """The system at this load."""
    how = replace(load_system(system), engine=None)  # the kind's engine, which has the GPUs of a machine
    run = packer.simulate_cluster(
        reading.fleet(qps, seed), reading.cluster(), how, reading.router(system), duration_s=RUN_S, seed=seed
    )
    assert run.raw is not None
    stay = np.where(run.raw.finished, run.raw.finish_s, RUN_S) - run.raw.requests.time_s
    latency = stay[run.raw.finished]
    awaited = run.adapter_loads - int(run.raw.server.unawaited)
    return Outcome(
        run.hit_rate,
        awaited,
        float(run.raw.server.load_s) / max(awaited, 1),
        float(latency.mean()),
        run.mean_running * RUN_S / max(run.completed, 1),
        float(np.quantile(latency, 0.99)),
        max(0.0, float(stay.sum()) / RUN_S - run.mean_running),
        run.mean_kv_usage,
        run.mean_running,
    )


Found = dict[str, list[Outcome]]


def at(qps: float, seeds: int, reading: Reading | None = None) -> Found:
    """System → an outcome of each seed."""
    own = Reading() if reading is None else reading
    return {name: of_seeds(lambda k, s=system: outcome(s, qps, k, own), seeds) for name, system in SYSTEMS.items()}
