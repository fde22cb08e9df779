"""How adapters are loaded changes what waits for them, and nothing where loads take no time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.lengths import Lengths
from packer.profile import LoadingSpec, Profile
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.system import System
from packer.twin.run import Run
from packer.workload import Workload

FLEET = Workload(
    [Adapter(f"a{i}", 8 << i % 3, 0.1) for i in range(20)], Lengths.gamma(60, 0.7), Lengths.gamma(20, 0.7)
)


def _run(profile: Profile, loading: str, seed: int = 0) -> Run:
    how = System(
        "test", "", "", "most-idle", engine="lightllm:max_wait_tokens=1", cache="drop", loading=loading
    )
    cluster = Cluster.of(profile, 1, max_loras=20, max_lora_rank=32)
    return simulate_cluster(FLEET, cluster, how, duration_s=100.0, seed=seed)


def test_less_waiting_in_the_mean(toy_profile: Profile) -> None:
    """none <= cpu-assist <= async <= blocking in mean latency on a light load.

    An expectation of the model over 20 seeds, not a law of nature: single runs may differ.
    """
    slow = replace(toy_profile, loading=LoadingSpec(5.0, 1.0))
    means = []
    for loading in ("none", "cpu-assist:factor=1.25", "async", "blocking"):
        latency = []
        for seed in range(20):
            run = _run(slow, loading, seed)
            done = run.raw.finished
            latency.append((run.raw.finish_s - run.raw.requests.time_s)[done].mean())
        means.append(float(np.mean(latency)))
    assert means == sorted(means)
    assert means[0] < means[-1]


@pytest.mark.parametrize("loading", ["none", "cpu-assist:factor=1", "async", "prefetch"])
def test_loads_without_time_change_nothing(toy_profile: Profile, loading: str) -> None:
    """Every mode gives the bytes of `blocking` if a load takes no time and the CPU is as fast."""
    free = replace(toy_profile, loading=LoadingSpec())
    one, other = _run(free, "blocking"), _run(free, loading)
    assert one.raw.finish_s.tobytes() == other.raw.finish_s.tobytes()
