"""The suite: seeded fleets from 16 to 4,096 adapters, and fleets derived from the Azure traces.

uv run python benchmarks/solvers/suite.py          # list
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import packer
from packer.arrival import Arrivals

ROOT = Path(__file__).resolve().parents[2]
LLAMA, QWEN = "h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct"
RATES = {"high": (1.6, 0.8, 0.4), "low": (0.1, 0.05, 0.025), "mixed": (1.6, 0.4, 0.05, 0.0125)}
"""Request rates, req/s; each adapter draws one."""
RANKS = {"8": (8,), "32": (32,), "mixed": (8, 16, 32)}
SIZES = {LLAMA: (16, 64, 256, 1024), QWEN: (16, 128, 512, 4096)}
AZURE = (("azure-conv-2023", 1.0), ("azure-conv-2023", 4.0), ("azure-code-2023", 1.0))


@dataclass(frozen=True)
class Instance:
    """One fleet on one profile: drawn, or `source` names a workload file and how many such services."""

    name: str
    profile: str
    rates: str = ""
    ranks: str = ""
    adapters: int = 0
    seed: int = 0
    source: tuple[str, float] | None = None

    def workload(self) -> packer.Workload:
        """The fleet; the same every time."""
        if self.source is not None:
            file, factor = self.source
            # Poisson arrivals, as in the drawn fleets: learned predictors were trained on no others.
            fleet = packer.read_workload(ROOT / "examples" / "workloads" / f"{file}.csv").with_arrivals(Arrivals())
            return fleet if factor == 1.0 else _several(fleet, factor)
        rng = np.random.default_rng(self.seed)
        rates, ranks = RATES[self.rates], RANKS[self.ranks]
        return packer.Workload(
            [
                packer.Adapter(f"a{i}", rank=int(rng.choice(ranks)), rate=float(rng.choice(rates)))
                for i in range(self.adapters)
            ],
            name=self.name,
        )


def _several(fleet: packer.Workload, times: float) -> packer.Workload:
    """So many services like that one: every adapter as often, each at its own rate."""
    adapters = [
        packer.Adapter(f"{k}-{a.name}", a.rank, a.rate, a.input_tokens, a.output_tokens)
        for k in range(int(times))
        for a in fleet.adapters
    ]
    return packer.Workload(adapters, fleet.input_tokens, fleet.output_tokens, fleet.length_correlation, name=fleet.name)


def suite() -> Iterator[Instance]:
    """Every instance, small ones first."""
    drawn = []
    for profile, sizes in SIZES.items():
        model = profile.split("/")[1].split("-")[0]
        for adapters in sizes:
            for rates in RATES:
                for ranks in RANKS:
                    name = f"{model}-{adapters}-{rates}-rank-{ranks}"
                    drawn.append(Instance(name, profile, rates, ranks, adapters, seed=adapters + len(drawn)))
    for profile in SIZES:
        model = profile.split("/")[1].split("-")[0]
        for file, times in AZURE:
            drawn.append(
                Instance(f"{model}-{file}-x{times:g}", profile, adapters=int(200 * times), source=(file, times))
            )
    yield from sorted(drawn, key=lambda each: each.adapters)


if __name__ == "__main__":
    for instance in suite():
        fleet = instance.workload()
        print(f"{instance.name:36} {len(fleet):5} adapters {fleet.offered_tok_s:12,.0f} tok/s")
