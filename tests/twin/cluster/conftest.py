"""Random small clusters, tight enough that requests queue, are preempted and evict adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from naive_law import drawn_law

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster, ServerKind
from packer.engine_spec import EngineSpec
from packer.profile import (
    GpuSpec,
    LatencySpec,
    LoadingSpec,
    MemorySpec,
    ModelSpec,
    Profile,
)
from packer.workload import Workload


@dataclass(frozen=True)
class Case:
    """A fleet for a cluster, and how long."""

    workload: Workload
    cluster: Cluster
    duration_s: float


def _profile(rng: np.random.Generator, name: str) -> Profile:
    block_size = int(rng.choice([1, 4, 16]))
    seqs = int(rng.integers(2, 12))
    law = drawn_law(rng)
    kv_tokens = int(rng.integers(8, 60)) * block_size
    policy = rng.choice(["reserved", "unified"])
    return Profile(
        name,
        ModelSpec("tight", 0.0, 100.0, 25.0),
        GpuSpec("tight", 1e9),
        EngineSpec("vllm", "0", int(rng.integers(40, 200)), seqs + int(rng.integers(0, 40)), seqs, block_size),
        MemorySpec(kv_tokens * 100.0, 0.0, 0.0, 1, str(policy)),  # type: ignore[arg-type]
        LatencySpec("linear", law, 16),
        LoadingSpec(*(int(rng.integers(0, 64)) / 16 for _ in range(4))),
        calibrated=True,
    )


def random_case(seed: int, *, placed: bool = False) -> Case:
    """A few hundred requests of a few adapters for one to five servers of two kinds."""
    rng = np.random.default_rng(seed)
    m, n, count = int(rng.integers(2, 9)), int(rng.integers(20, 250)), int(rng.integers(1, 6))
    ranks = [8 if i == 0 else int(rng.choice([0, 8, 16, 32])) for i in range(m)]
    longest = int(rng.choice([6, 20, 40]))
    trace = RequestTrace(
        np.sort(rng.random(n)) * float(rng.choice([0.1, 0.5, 2.0])),
        rng.integers(m, size=n),
        rng.integers(1, longest, size=n),
        rng.integers(1, longest, size=n),
    )
    fleet = Workload(
        [Adapter(f"a{i}", rank, 1.0) for i, rank in enumerate(ranks)], arrivals=Arrivals("trace", trace=trace)
    )
    kinds = (
        ServerKind("large", _profile(rng, "large"), int(rng.integers(1, m + 1)), 32),
        ServerKind("small", _profile(rng, "small"), int(rng.integers(1, m + 1)), 8),
    )
    servers = ("large", *rng.choice(["large", "small"], size=count - 1).tolist())
    placement = None
    if placed:
        taken = rng.random((m, count)) < 0.5
        taken[:, 0] = True
        placement = tuple(
            {f"a{i}": 1.0 for i in range(m) if taken[i, s] and (servers[s] == "large" or ranks[i] <= 8)}
            for s in range(count)
        )
    return Case(fleet, Cluster(kinds, servers, placement), float(rng.choice([0.3, 1.0, 5.0])))


@pytest.fixture
def case() -> Callable[..., Case]:
    """Makes `random_case`."""
    return random_case
