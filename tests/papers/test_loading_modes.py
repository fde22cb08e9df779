"""How adapters are loaded changes what waits for them, and nothing where loads take no time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster, Node
from packer.lengths import Lengths
from packer.profile import LatencySpec, LoadingSpec, Profile
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.system import System
from packer.twin.run import Run
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{i}", 8 << i % 3, 0.1) for i in range(20)], Lengths.gamma(60, 0.7), Lengths.gamma(20, 0.7))


def _run(profile: Profile, loading: str, seed: int = 0) -> Run:
    how = System("test", "", "", "most-idle", engine="lightllm:max_wait_tokens=1", cache="drop", loading=loading)
    cluster = Cluster.of(profile, 1, max_loras=20, max_lora_rank=32)
    return simulate_cluster(FLEET, cluster, how, duration_s=100.0, seed=seed)


def test_less_waiting_in_the_mean(toy_profile: Profile) -> None:
    """none <= cpu-assist <= async <= blocking in mean latency on a light load.

    An expectation of the model over 20 seeds, not a law of nature: single runs may differ.
    """
    slow = replace(toy_profile, loading=LoadingSpec(5.0, 1.0))
    means = []
    for loading in ("none", "cpu-assist", "async", "blocking"):
        latency = []
        for seed in range(20):
            run = _run(slow, loading, seed)
            done = run.raw.finished
            latency.append((run.raw.finish_s - run.raw.requests.time_s)[done].mean())
        means.append(float(np.mean(latency)))
    assert means == sorted(means)
    assert means[0] < means[-1]


@pytest.mark.parametrize("loading", ["none", "cpu-assist:sync_ms=0", "async", "prefetch"])
def test_loads_without_time_change_nothing(toy_profile: Profile, loading: str) -> None:
    """Every mode gives the bytes of `blocking` if neither a load nor the exchange with the CPU takes time."""
    free = replace(toy_profile, loading=LoadingSpec())
    one, other = _run(free, "blocking"), _run(free, loading)
    assert one.raw.finish_s.tobytes() == other.raw.finish_s.tobytes()


@pytest.mark.parametrize(
    ("prompt", "cores", "servers", "load_ms", "expected_ms"),
    [
        (
            16,
            8,
            1,
            1000.0,
            1000.0,
        ),  # before the load is over the CPU has done its part: 16 tokens × 8 × 0.5 = 64 ms
        (16, 8, 1, 32.0, 32.0 + 0.5 * 26.0),  # half of the layers with the CPU's 64 ms, then the GPU's 26 ms
        (32, 8, 1, 32.0, 32.0 + 0.5 * 42.0),  # two cores, as many tokens each
        (32, 1, 1, 32.0, 32.0 + 0.75 * 42.0),  # one core, twice in turn: 128 ms
        (32, 2, 2, 32.0, 32.0 + 0.75 * 42.0),  # two cores for two servers of a machine
        (17, 8, 1, 9.0, 9.0 + 0.75 * 27.0),  # nine tokens on the fuller of two cores: 36 ms
        (2, 8, 1, 6.0, 6.0 + 0.5 * 12.0),  # the CPU's 8 ms are not the longer ones
    ],
)
def test_prefill_with_the_cpu(
    toy_profile: Profile, prompt: int, cores: int, servers: int, load_ms: float, expected_ms: float
) -> None:
    """CaraServe's prefill by hand: prompt length, cores, and servers of a machine decide how long it takes."""
    law = LatencySpec("linear", {"base_ms": 10.0, "per_prefill_token_ms": 1.0})
    per_rank = toy_profile.model.lora_bytes_per_rank
    profile = replace(toy_profile, latency=law, loading=LoadingSpec(load_ms, 0.0))
    trace = RequestTrace(np.array([0.0]), np.array([0]), np.array([prompt]), np.array([1]))
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
    assist = f"cpu-assist:cores={cores},core_gflop_s={per_rank / 0.5e6},sync_ms=0"
    how = System("test", "", "", "round-robin", "lightllm:max_wait_tokens=1", "drop", assist, memory="unified")
    cluster = replace(Cluster.of(profile, servers, max_loras=2), nodes=(Node(servers),))
    run = simulate_cluster(fleet, cluster, how, duration_s=5.0)
    assert run.mean_ttft_ms == pytest.approx(expected_ms)
