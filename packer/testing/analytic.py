"""A fleet, a server and a predictor in closed form, with which tests of strategies take milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packer.adapter import Adapter
from packer.bin import Bin
from packer.engine_spec import EngineSpec
from packer.evaluation import STARVATION_THRESHOLD, Evaluation, Evaluations
from packer.profile import GpuSpec, LatencySpec, MemorySpec, ModelSpec, Profile
from packer.workload import Workload

_NAN = float("nan")


def small_profile(name: str = "test-gpu/test-model", price_per_hour: float | None = 1.0) -> Profile:
    """A made-up GPU of 24 GB with a made-up model of 8 GB; not calibrated."""
    return Profile(
        name=name,
        model=ModelSpec("test-model", 8e9, 1e5, 1e6),
        gpu=GpuSpec("test-gpu", 24e9, price_per_hour),
        engine=EngineSpec("vllm", "0", 2048, 2048, 256),
        memory=MemorySpec(12e9, 0.0, 1e6, 2048),
        latency=LatencySpec("linear", {"base_ms": 5.0, "per_decode_ms": 0.1, "per_adapter_ms": 0.05}),
    )


def random_fleet(
    n: int, seed: int, rates: Sequence[float] = (1.6, 0.8, 0.4), ranks: Sequence[int] = (8, 16, 32)
) -> Workload:
    """`n` adapters, each with a random one of the rates and of the ranks, drawn from `seed`."""
    rng = np.random.default_rng(seed)
    adapters = [Adapter(f"a{i}", int(rng.choice(ranks)), float(rng.choice(rates))) for i in range(n)]
    return Workload(adapters, name="random")


@dataclass(frozen=True)
class AnalyticPredictor:
    """Predicts a capacity that falls with the number of adapters, their ranks and the memory of the slots.

    Capacity in tok/s = peak × (1 − adapters / 1000) × (1 − mean rank / 256) × √min(1, slots / adapters)
    × (KV cache with these slots / KV cache without slots). More adapters of equal rank, or higher ranks, never help.

    `peak_tok_s`: capacity without adapters.
    """

    peak_tok_s: float = 4000.0
    name = "analytic"

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Evaluate each bin; one row per bin, in order."""
        return Evaluations.of([self._evaluation(workload, bin_) for bin_ in bins])

    def _evaluation(self, workload: Workload, bin_: Bin) -> Evaluation:
        offered = bin_.offered_tok_s(workload)
        memory = bin_.profile.memory
        slots = bin_.max_loras * bin_.max_lora_rank * memory.slot_bytes_per_rank
        kv_tokens = (memory.kv_budget_bytes - slots) / bin_.profile.model.kv_bytes_per_token
        n = len(bin_.adapters)
        mean_rank = float(workload.ranks[list(bin_.adapters)].mean())
        capacity = self.peak_tok_s * max(0.0, 1.0 - n / 1000.0) * max(0.0, 1.0 - mean_rank / 256.0)
        capacity *= min(1.0, bin_.max_loras / n) ** 0.5
        capacity *= max(0.0, 1.0 - slots / memory.kv_budget_bytes)
        return _evaluation(offered, capacity, kv_tokens, kv_tokens < memory.min_kv_tokens)


def _evaluation(offered: float, capacity: float, kv_tokens: float, memory_error: bool) -> Evaluation:
    throughput = 0.0 if memory_error else min(offered, capacity)
    starved = throughput < STARVATION_THRESHOLD * offered
    busy = min(STARVATION_THRESHOLD * offered / capacity, 0.999) if capacity > 0 else 0.999
    itl = _NAN if memory_error else 5.0 / (1.0 - 0.9 * busy)
    ttft = _NAN if memory_error else 20.0 / (1.0 - busy)
    return closed_form(offered, throughput, ttft, itl, max(0.0, kv_tokens), starved, memory_error)


def closed_form(
    offered_tok_s: float, throughput_tok_s: float, ttft_ms: float, itl_ms: float, kv_cache_tokens: float,
    starved: bool, memory_error: bool,
) -> Evaluation:  # fmt: skip
    """Figures of a server in closed form: medians equal means, 99th percentiles are three times the means."""
    return Evaluation(
        offered_tok_s, throughput_tok_s, starved=starved, memory_error=memory_error, mean_ttft_ms=ttft_ms,
        median_ttft_ms=ttft_ms, p99_ttft_ms=3.0 * ttft_ms, mean_tpot_ms=itl_ms, mean_itl_ms=itl_ms,
        p99_itl_ms=3.0 * itl_ms, kv_cache_tokens=kv_cache_tokens, starvation_probability=float(starved),
    )  # fmt: skip
