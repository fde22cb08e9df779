"""The benchmark's workloads: fleets whose rates are set as shares of what one server can take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer import Adapter, Lengths, Profile, Workload, simulate

SECONDS = 30.0
INPUT = Lengths.gamma(48.0, 0.8, high=150)
OUTPUT = Lengths.gamma(32.0, 0.8, high=90)
LONG_OUTPUT = Lengths.gamma(56.0, 0.6, high=100)


@dataclass(frozen=True)
class Case:
    """One validation workload. `share`: total rate as a part of the largest that the twin calls unstarved."""

    name: str
    adapters: int
    ranks: tuple[int, ...]
    max_loras: int
    max_lora_rank: int
    share: float
    skew: float = 0.0
    output: Lengths = OUTPUT

    @property
    def server(self) -> str:
        """Cases of one server share a start."""
        return f"{self.max_loras}x{self.max_lora_rank}"


CASES = (
    Case("light", 8, (8,), 8, 16, 0.3),
    Case("slots-contended", 16, (8, 16), 8, 16, 0.6),
    Case("long-answers", 32, (16,), 8, 16, 0.7, output=LONG_OUTPUT),
    Case("starved-by-slots", 64, (8, 16), 8, 16, 1.5),
    Case("mid-16-slots", 16, (8, 16, 32), 16, 32, 0.6),
    Case("busy-skewed", 48, (8, 32), 16, 32, 0.8, skew=1.0),
    Case("starved-16-slots", 64, (8, 16, 32), 16, 32, 2.0),
    Case("few-slots", 8, (64,), 4, 64, 0.5),
    Case("few-slots-skewed", 32, (8, 64), 4, 64, 0.7, skew=1.0),
    Case("kv-pressure", 24, (8, 64), 16, 64, 0.8),
    Case("kv-pressure-starved", 64, (64,), 16, 64, 1.5),
    Case("many-slots-light", 64, (8,), 32, 8, 0.4),
    Case("many-slots-busy", 64, (8,), 32, 8, 0.8),
    Case("many-slots-starved", 64, (8,), 32, 8, 1.5),
    Case("no-memory-emulated", 64, (64,), 64, 64, 0.5),
    Case("no-memory-refused", 64, (16,), 71, 16, 0.5),
)


def fleet(case: Case, rate: float) -> Workload:
    """`case.adapters` adapters named v0, v1, … with ranks in turn; rates by a power law of `skew`."""
    weights = np.arange(1, case.adapters + 1, dtype=np.float64) ** -case.skew
    rates = rate * weights / weights.sum()
    ranks = [case.ranks[i % len(case.ranks)] for i in range(case.adapters)]
    adapters = [Adapter(f"v{i}-r{r}", r, float(x)) for i, (r, x) in enumerate(zip(ranks, rates, strict=True))]
    return Workload(adapters, INPUT, case.output, 0.0, name=case.name)


def largest_rate(case: Case, profile: Profile) -> float:
    """The largest total rate, req/s, at which the twin still gives 0.95 of the load; by bisection."""
    low, high = 0.25, 400.0
    for _ in range(14):
        middle = (low * high) ** 0.5
        sim = simulate(
            fleet(case, middle), profile, max_loras=case.max_loras, max_lora_rank=case.max_lora_rank, duration_s=300.0
        )
        if sim.total_token_throughput >= 0.95 * sim.offered_tok_s:
            low = middle
        else:
            high = middle
    return low


def workload_of(case: Case, profile: Profile) -> Workload:
    """The case's fleet at its share of the largest rate; where no server starts, 10 req/s."""
    probe = simulate(
        fleet(case, 1.0), profile, max_loras=case.max_loras, max_lora_rank=case.max_lora_rank, duration_s=10.0
    )
    if probe.status == "memory_error":
        return fleet(case, 10.0)
    return fleet(case, round(case.share * largest_rate(case, profile), 2))
