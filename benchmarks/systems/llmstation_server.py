"""LLMStation's servers, and the training beside the requests of one within its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from rows import Row, mean, of_seeds, shown

import packer
from packer.arrival import Arrivals, Bursts, RequestTrace
from packer.cluster import Cluster
from packer.engine_spec import EngineSpec
from packer.job import FineTuning
from packer.lengths import Lengths
from packer.profile import GpuSpec, LatencySpec, MemorySpec, ModelSpec, Profile
from packer.twin.tuning.search import most_training
from packer.workload import Workload

GIB = 2.0**30
DURATION_S = 1800.0
LOW = 0.5
"""Req/s of the claims on low rates, at most."""


@dataclass(frozen=True)
class Machine:
    """A model on its GPUs: bytes of weights and of a token's KV, and step times in ms."""

    name: str
    gpus: str
    memory_bytes: float
    weights_bytes: float
    kv_bytes: float
    layers: int
    rank: int
    base_ms: float
    per_decode_ms: float
    token_ms: float
    weights_ms: float
    tpot_ms: float
    rank_ms: float = 0.0
    """Time of a request's rank in a step."""

    def profile(self) -> Profile:
        """The server."""
        spare = 0.9 * self.memory_bytes - self.weights_bytes - 2 * GIB
        law = {
            "base_ms": self.base_ms,
            "per_decode_ms": self.per_decode_ms,
            "per_prefill_token_ms": self.token_ms,
            "per_request_rank_ms": self.rank_ms,
        }
        return Profile(
            f"{self.gpus}/{self.name}",
            ModelSpec(self.name, self.weights_bytes, self.kv_bytes, 40 * self.kv_bytes),
            GpuSpec(self.gpus, self.memory_bytes),
            EngineSpec("vllm", "0", 8192, 2048, 256),
            MemorySpec(spare, 0.0, 0.0, 1024),
            LatencySpec("linear", law),
        )

    def fleet(self, rate: float, tokens: float = 512.0, served: int = 1) -> Workload:
        """Requests of `served` adapters beside the training of another; Poisson."""
        job = FineTuning(
            sample_tokens=Lengths.constant(tokens), rank=self.rank, layers=self.layers, weights_ms=self.weights_ms
        )
        return Workload(
            [packer.Adapter(f"served-{i}", self.rank, rate / served) for i in range(served)],
            Lengths.gamma(223.0, 1.0),
            Lengths.gamma(195.0, 1.0),
            length_correlation=0.0,
            fine_tuning=job,
        )

    def steady(self, rate: float, seed: int, tokens: float = 512.0) -> Workload:
        """Requests at equal distances: the paper's synthetic workloads "send requests at a steady rate"."""
        fleet, count = self.fleet(rate, tokens), int(rate * DURATION_S)
        if not count:
            return fleet
        rng = np.random.default_rng((seed, 9))
        first_s = rng.uniform(0.0, 1.0 / rate)
        trace = RequestTrace(
            first_s + np.arange(count) / rate,
            np.zeros(count, dtype=np.int64),
            fleet.input_tokens.sample(rng, count),
            fleet.output_tokens.sample(rng, count),
        )
        return replace(fleet, arrivals=Arrivals("trace", trace=trace))


SMALL = Machine("llama-3.1-8b", "2x RTX 3090", 48 * GIB, 16.06e9, 131072.0, 32, 8, 14.0, 0.15, 0.225, 8.6, 50.0)
MIDDLE = Machine("llama-2-13b", "4x RTX 3090", 96 * GIB, 26.0e9, 819200.0, 40, 16, 14.0, 0.2, 0.183, 7.0, 80.0)
LARGE = Machine("llama-3.1-70b", "4x H100", 320 * GIB, 141.0e9, 327680.0, 80, 32, 18.0, 0.1, 0.071, 10.5, 80.0)


BURSTS = Arrivals("bursty", common=Bursts(1.0, ((20.0, 1.0),)))
"""Of the pieces of BurstGPT in sections 6.3 and 6.5."""


def best(
    machine: Machine, rate: float, policy: str, seed: int, fleet: Workload | None = None,
    duration_s: float = DURATION_S, **changes: float,
) -> float:  # fmt: skip
    """Samples/s of the policy with its best parameter within the limits; `fleet`: None for a steady rate."""
    spec = policy + (":" + ",".join(f"{k}={v:g}" for k, v in changes.items()) if changes else "")
    limits = {"server.p99_ttft_ms": 500.0, "server.p99_tpot_ms": machine.tpot_ms}
    own = machine.steady(rate, seed) if fleet is None else fleet
    return most_training(
        own, machine.profile(), spec, max_loras=len(own), slo=limits, duration_s=duration_s, seed=seed
    ).samples_s


PRESETS = {
    "llmstation": "LLMStation",
    "chunked-training": "chunked training",
    "mps-split": "MPS",
    "fineinfer": "FineInfer",
}


def shipped_row(seeds: int) -> Row:
    """The shipped systems, whose parameters are not tuned to a load."""
    cluster = Cluster.of(SMALL.profile(), 1, max_loras=1)
    cells = []
    for preset, name in PRESETS.items():
        runs = of_seeds(
            lambda k, p=preset: packer.simulate_cluster(
                SMALL.steady(LOW, k), cluster, p, duration_s=DURATION_S, seed=k
            ),
            seeds,
        )
        samples = [run.tuning.samples_s for run in runs if run.tuning is not None]
        cells.append(f"{name} {shown(samples)} ({mean([run.p99_ttft_ms for run in runs]):,.0f} ms)")
    return Row(f"8B, {LOW:g} req/s, systems as shipped: samples/s (P99 TTFT)", "–", ", ".join(cells))
