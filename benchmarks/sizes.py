"""Whether `packer compare --size` says as many servers for the system "packer" as `packer solve` plans, on 20 fleets.

uv run python benchmarks/sizes.py            # print
uv run python benchmarks/sizes.py --write    # sizes.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import packer
from packer.arrival import Arrivals, Bursts
from packer.cluster import Cluster
from packer.io.files import write_text
from packer.operate.systems import Trials, servers_needed
from packer.testing.records import record_text

PROFILE = "h100-64gb/llama-3.1-8b-instruct"
FLEETS = 20
GOALS = ("ttft_ms=2000,tpot_ms=100", "p95_ttft_ms=2000,mean_itl_ms=100")
"""Limits of requests and of adapters; fleets have them in turn."""


def fleet(seed: int) -> packer.Workload:
    """2 to 60 adapters, 5 to 70 req/s, of popularity from equal to steep; every third one comes in bursts."""
    rng = np.random.default_rng([35, seed])
    count, total = int(rng.integers(2, 60)), float(rng.uniform(5.0, 70.0))
    weights = 1.0 / np.arange(1, count + 1) ** float(rng.choice([0.0, 0.5, 1.0, 2.0]))
    rates = total * weights / weights.sum()
    found = packer.Workload(
        [packer.Adapter(f"a{i}", int(rng.choice([8, 16, 32])), float(rate)) for i, rate in enumerate(rates)]
    )
    return found.with_arrivals(Arrivals("bursty", common=Bursts(0.5, ((30.0, 1.0),)))) if seed % 3 == 1 else found


def compared(seed: int) -> dict[str, Any]:
    """Servers by both, and the share of requests that keep the goal on those of `--size`."""
    own, profile = fleet(seed).held_to(GOALS[seed % 2]), packer.load_profile(PROFILE)
    plan = packer.recommend(own, profile)
    found = servers_needed(own, Cluster.of(profile, 1, max_loras=16), "packer", Trials(5, slo=own.slo))
    return {
        "adapters": len(own),
        "req_s": round(float(own.rates.sum()), 1),
        "goal": GOALS[seed % 2],
        "bursts": own.arrivals.kind == "bursty",
        "solve": plan.n_gpus,
        "size": None if found is None else found.servers,
        "slo_attainment": None if found is None else found.figures["slo_attainment"].mean,
    }


def main() -> None:
    """Plan, simulate, print, and with --write keep."""
    parser = argparse.ArgumentParser(description="Compare the sizes of `compare --size` and of `solve`.")
    parser.add_argument("--write", action="store_true", help="keep the results")
    options = parser.parse_args()
    rows = []
    for seed in range(FLEETS):
        rows.append(compared(seed))
        print(seed, *rows[-1].values(), flush=True)
    print(sum(row["solve"] == row["size"] for row in rows), "of", FLEETS, "are equal")
    if options.write:
        write_text(Path(__file__).with_suffix(".json"), record_text(rows) + "\n", force=True)


if __name__ == "__main__":
    main()
