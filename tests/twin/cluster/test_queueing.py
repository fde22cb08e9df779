"""Limits that queueing and caching theory has in closed form, within four standard errors.

A server that runs one request at a time, of one output token, serves for a time proportional to the prompt.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.engine_spec import EngineSpec
from packer.lengths import Lengths
from packer.profile import (
    GpuSpec,
    LatencySpec,
    MemorySpec,
    ModelSpec,
    Profile,
)
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.run import Run
from packer.workload import Workload

FloatArray = npt.NDArray[np.float64]
MEAN_S = 0.1
TOKENS = 4000  # mean prompt: service times are fine-grained
BATCHES = 40


@pytest.fixture(scope="module")
def one_at_a_time() -> Profile:
    """One request at a time: its service takes 25 µs for each prompt token."""
    return Profile(
        "tests/sequential",
        ModelSpec("sequential", 0.0, 1.0, 0.0),
        GpuSpec("sequential", 1e9),
        EngineSpec("vllm", "0", max_model_len=10**6, max_num_batched_tokens=10**6, max_num_seqs=1),
        MemorySpec(2e6, 0.0, 0.0, 1),
        LatencySpec("linear", {"per_prefill_token_ms": MEAN_S * 1e3 / TOKENS}, 0),
        calibrated=True,
    )


def _run(profile: Profile, servers: int, load: float, router: str, prompts: Lengths) -> Run:
    """About 200,000 requests at this load of each server."""
    rate = load * servers / MEAN_S
    fleet = Workload([Adapter("a", 8, rate)], prompts, Lengths.constant(1), length_correlation=0.0)
    cluster = Cluster.of(profile, servers, max_loras=1, max_lora_rank=8)
    return simulate_cluster(fleet, cluster, router=router, duration_s=200_000 / rate, seed=1)


def _waits(run: Run) -> FloatArray:
    """Time in the queue of each completed request, s."""
    done = run.raw.finished
    service = run.raw.requests.input_tokens[done] * (MEAN_S / TOKENS)
    found: FloatArray = run.raw.finish_s[done] - run.raw.requests.time_s[done] - service
    return found


def _agrees(run: Run, expected_s: float) -> None:
    """The mean wait is the expected one within four standard errors, estimated from means of batches."""
    waits = _waits(run)
    assert waits.min() > -1e-9
    means = np.array([part.mean() for part in np.array_split(waits, BATCHES)])
    error = means.std(ddof=1) / math.sqrt(BATCHES)
    assert error < 0.1 * expected_s
    assert abs(waits.mean() - expected_s) < 4 * error


def _erlang_c(servers: int, load: float) -> float:
    """Probability that all servers are busy in M/M/c (Erlang, 1917)."""
    offered = servers * load
    busy = offered**servers / math.factorial(servers) / (1 - load)
    return busy / (sum(offered**k / math.factorial(k) for k in range(servers)) + busy)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_random_routing_gives_independent_mm1_queues(load: float, one_at_a_time: Profile) -> None:
    """Exponential service behind a random router: each server is M/M/1, wait ρ / (μ − λ)."""
    run = _run(one_at_a_time, 4, load, "random", Lengths.gamma(TOKENS, 1.0))
    _agrees(run, load * MEAN_S / (1 - load))


@pytest.mark.parametrize("servers", [2, 5])
def test_one_central_queue_is_erlang_c(servers: int, one_at_a_time: Profile) -> None:
    """Requests held at the router until a server is idle: M/M/c, wait C(c, ρ) / (c μ − λ)."""
    load = 0.8
    run = _run(one_at_a_time, servers, load, "punica:max_batch=1", Lengths.gamma(TOKENS, 1.0))
    _agrees(run, _erlang_c(servers, load) * MEAN_S / (servers * (1 - load)))


@pytest.mark.parametrize("cv", [0.0, 0.5, 2.0])
def test_general_service_is_pollaczek_khinchine(cv: float, one_at_a_time: Profile) -> None:
    """General service times: wait λ E[S²] / (2 (1 − ρ)); constant ones wait half as long as exponential ones."""
    load = 0.7
    prompts = Lengths.gamma(TOKENS, cv) if cv else Lengths.constant(TOKENS)
    run = _run(one_at_a_time, 1, load, "round-robin", prompts)
    _agrees(run, load * MEAN_S * (1 + cv**2) / (2 * (1 - load)))


def test_what_a_router_knows_shortens_the_queue(one_at_a_time: Profile) -> None:
    """Random > round robin > fewest requests > one central queue, which no router can beat."""
    exponential = Lengths.gamma(TOKENS, 1.0)
    waits = [
        _waits(_run(one_at_a_time, 4, 0.8, router, exponential)).mean()
        for router in ("random", "round-robin", "most-idle", "punica:max_batch=1")
    ]
    assert waits == sorted(waits, reverse=True)


def _lru_hits(adapters: npt.NDArray[np.int64], capacity: int) -> float:
    """Hit rate of an LRU cache, by its definition."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for a in adapters.tolist():
        hits += a in cache
        cache[a] = None
        cache.move_to_end(a)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return hits / len(adapters)


def _che(rates: FloatArray, capacity: int) -> float:
    """Che's approximation of LRU: an adapter is cached if it was used within T, Σ (1 − e^(−λ T)) = capacity."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        if (1 - np.exp(-rates * middle)).sum() < capacity:
            low = middle
        else:
            high = middle
    return float((rates * (1 - np.exp(-rates * low))).sum() / rates.sum())


@pytest.mark.parametrize("capacity", [20, 50, 100])
def test_slots_are_an_lru_cache(capacity: int, one_at_a_time: Profile) -> None:
    """Hits of the slots are those of an LRU cache, exactly, and Che's approximation within two points."""
    rates = 1.0 / np.arange(1, 201)
    rates *= 5.0 / rates.sum()
    fleet = Workload(
        [Adapter(f"a{i}", 8, float(rate)) for i, rate in enumerate(rates)],
        Lengths.constant(100),
        Lengths.constant(1),
    )
    cluster = Cluster.of(one_at_a_time, 1, max_loras=capacity, max_lora_rank=8)
    run = simulate_cluster(fleet, cluster, router="round-robin", duration_s=10_000.0, seed=2)
    assert run.hit_rate == pytest.approx(_lru_hits(run.raw.requests.adapter, capacity), abs=1e-4)
    assert run.hit_rate == pytest.approx(_che(rates, capacity), abs=0.02)
