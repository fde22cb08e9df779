"""CaraServe's larger models on several GPUs (arXiv 2401.11240, Figure 15)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from caraserve_server import A10, CORE_GFLOP_S, LAWS, PREFILL_TOKEN_MS, single, single_fleet, within
from rows import Row, mean, of_seeds, shown

from packer.profile import GpuSpec, LatencySpec, LoadingSpec, ModelSpec, Profile


@dataclass(frozen=True)
class Larger:
    """A model on several GPUs: bytes of weights, of a token's KV and of a rank (q, k, v); of a GPU, and per second.

    Each GPU has all of the matrices A and its part of B (section 5, "Support model parallelism"): it loads, and the CPU
    computes for it, that share of an adapter.
    """

    name: str
    gpus: int
    gpu_bytes: float
    bytes_s: float
    weights_bytes: float
    kv_bytes: float
    first_bytes: float
    second_bytes: float
    lower: float

    @property
    def rank_bytes(self) -> float:
        """Of A and B."""
        return self.first_bytes + self.second_bytes

    @property
    def part(self) -> float:
        """Share of an adapter on one GPU."""
        return (self.first_bytes + self.second_bytes / self.gpus) / self.rank_bytes

    @property
    def core_gflop_s(self) -> float:
        """As fast as a core is if the CPU computes one GPU's share alone: other cores compute those of the others."""
        return CORE_GFLOP_S / self.part

    def profile(self) -> Profile:
        """The A10's profile scaled by bytes: all GPUs read weights, and load their parts of adapters, at once."""
        read_ms = 1e3 * self.weights_bytes / (self.gpus * self.bytes_s)
        small_ms = 1e3 * A10.model.weights_bytes / A10_BYTES_S
        ranks = self.rank_bytes / A10.model.lora_bytes_per_rank * self.part
        law = {
            "base_ms": LAWS["BGMV"][2] - small_ms + read_ms,
            "per_padded_rank_ms": LAWS["BGMV"][1] * ranks * A10_BYTES_S / self.bytes_s,
            "per_prefill_token_ms": PREFILL_TOKEN_MS * read_ms / small_ms,
        }
        pool = 0.9 * self.gpus * self.gpu_bytes - self.weights_bytes
        return replace(
            A10,
            name=self.name,
            model=ModelSpec(self.name, self.weights_bytes, self.kv_bytes, self.rank_bytes),
            gpu=GpuSpec(self.name, self.gpus * self.gpu_bytes),
            memory=replace(A10.memory, kv_budget_bytes=pool),
            latency=LatencySpec("linear", law),
            loading=LoadingSpec(0.0, A10.loading.host_per_rank_ms * ranks),
        )


A10_BYTES_S = 600e9
LARGER = (
    Larger("13B on 2 A10", 2, 24 * 2.0**30, A10_BYTES_S, 26e9, 819_200.0, *[40 * 2 * 3 * 5120.0] * 2, 20.2),
    Larger("70B on 4 A100", 4, 80e9, 2.039e12, 140e9, 327_680.0, 80 * 2 * 3 * 8192.0, 80 * 2 * 10_240.0, 18.5),
)


def larger_rows(seeds: int) -> list[Row]:
    """Figure 15: larger models on several GPUs, 6 req/s of rank 64."""
    rows = []
    for model in LARGER:
        latency: dict[str, list[float]] = {}
        for system in ("cached", "on-demand", "caraserve"):
            runs = of_seeds(
                lambda k, s=system, m=model: single(s, single_fleet(64, 6.0, None, k), k, m.profile(), m.core_gflop_s),
                seeds,
            )
            latency[system] = [
                float(np.nanmean(run.raw.finish_s - run.raw.requests.time_s)) for run in runs if run.raw is not None
            ]
        cached, on_demand, caraserve = (np.array(values) for values in latency.values())
        lower = 100.0 * (1.0 - caraserve / on_demand)
        less = 100.0 * (1.0 - (caraserve - cached) / (on_demand - cached))
        load_ms = 64 * model.profile().loading.host_per_rank_ms
        cpu_ms = 64 * 10 * model.rank_bytes / (model.core_gflop_s * 1e6)
        rows += [
            Row(
                f"Fig. 15, {model.name}: latency of CaraServe below OnDmd, %",
                f"{model.lower:g}",
                shown(lower.tolist(), 1),
                "within a factor of 1.8 or 6 points",
                within(mean(lower.tolist()), model.lower),
                "the rule of Figures 10 and 13; steps and loads scaled from the A10 by bytes and bandwidth, the "
                "adapter's second matrices divided among the GPUs",
            ),
            Row(
                f"Fig. 15, {model.name}: less overhead of cold starts than OnDmd, %",
                "more than 50",
                shown(less.tolist(), 0),
                "above 50",
                mean(less.tolist()) > 50.0,
                f"a load takes {load_ms:.0f} ms here, and two cores {cpu_ms:.0f} ms for a prompt of 20 tokens",
            ),
        ]
    return rows
