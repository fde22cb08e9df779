"""ROCK: adapters of image models on a cluster of four kinds of GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rows import Constant, Row, Section, mean, of_seeds, shown

import packer
from packer.cluster import Cluster, ServerKind
from packer.engines import Jobs
from packer.lengths import Lengths
from packer.profile import EngineSpec, GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.workload import Workload

KINDS = {"A100": 1.0, "A40": 1.3, "RTX 3090": 1.7, "V100": 2.0}
"""Kind of GPU → time of an iteration, in that of the A100."""
EACH = 16
ITERATION_MS = 229.0
STEPS = (20, 50)
ADAPTERS, EXPONENT = 200, 1.13
RANKS = (8, 16, 32, 64)
RANK_BYTES = 3.1e6
LOAD_BASE_MS, LOAD_BYTES_S = 3500.0, 40e6
POOL_BYTES = 4.5e9
CLASSES = {"text-to-image": 1.0, "inpainting": 0.93, "image-to-image": 1.12}
"""Kind of task → factor on its time."""
SYSTEMS = {"RROD": "rrod", "LRUMS": "lrums", "Proactive": "proactive", "ROCK": "rock"}
RUN_S = 1800.0
QPS = 3.5
TABLE_3 = {"RROD": (61, 6.82, 0.0), "LRUMS": (45, 5.78, 39.2), "Proactive": (25, 5.48, 66.2), "ROCK": (14, 4.81, 84.1)}
LATENCY = {"RROD": 1.34, "LRUMS": 1.35, "Proactive": 1.20, "ROCK": 1.0}


def profile(kind: str, factor: float) -> Profile:
    """SDXL on one GPU: a job takes its iterations one after the other."""
    cell = 1e6
    return Profile(
        f"{kind}/sdxl",
        ModelSpec("sdxl", 7e9, cell, RANK_BYTES),
        GpuSpec(kind, 24 * 2**30),
        EngineSpec("job", "0", 4096, 4096, 16, block_size=1),
        MemorySpec(POOL_BYTES, 0.0, 0.0, 1, "unified"),
        LatencySpec("linear", {"per_decode_ms": ITERATION_MS * factor}),
        LoadingSpec(LOAD_BASE_MS, RANK_BYTES / LOAD_BYTES_S * 1e3),
    )


def cluster() -> Cluster:
    """16 GPUs of each kind."""
    kinds = tuple(ServerKind(name, profile(name, factor), ADAPTERS, 64, Jobs()) for name, factor in KINDS.items())
    return Cluster(kinds, tuple(name for name in KINDS for _ in range(EACH)))


def fleet(qps: float, seed: int) -> Workload:
    """Adapters by a power law; a class and its factor on the iterations for each."""
    rng = np.random.default_rng((seed, 3))
    weights = 1.0 / np.arange(1, ADAPTERS + 1) ** EXPONENT
    rates = qps * weights / weights.sum()
    factors = rng.choice(list(CLASSES.values()), ADAPTERS)
    members = []
    for i, (rate, factor) in enumerate(zip(rates, factors, strict=True)):
        steps = Lengths.empirical(np.arange(STEPS[0], STEPS[1] + 1) * factor)
        members.append(packer.Adapter(f"a{i}", int(rng.choice(RANKS)), float(rate), Lengths.constant(1), steps))
    return Workload(members, length_correlation=0.0)


@dataclass(frozen=True)
class Outcome:
    """One run."""

    hit_rate: float
    updates: int
    update_s: float
    latency_s: float
    p99_s: float
    waiting: float


def outcome(system: str, qps: float, seed: int) -> Outcome:
    """The system at this load."""
    run = packer.simulate_cluster(fleet(qps, seed), cluster(), system, duration_s=RUN_S, seed=seed)
    assert run.raw is not None
    latency = (run.raw.finish_s - run.raw.requests.time_s)[run.raw.finished]
    loads = max(run.adapter_loads, 1)
    return Outcome(
        run.hit_rate,
        run.adapter_loads,
        run.load_s / loads,
        float(latency.mean()),
        float(np.quantile(latency, 0.99)),
        run.mean_waiting,
    )
