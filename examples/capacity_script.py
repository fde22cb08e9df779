"""GPUs needed, and their price, as traffic grows: the plans of `packer solve` at half to four times the rates.

python examples/capacity_script.py examples/workloads/azure-conv-2023.csv
python examples/capacity_script.py fleet.csv --profile my-server.toml --price 2.5 --factors 1 1.1 1.21 1.33 1.46
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator

import packer

FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
HOURS_A_MONTH = 730.0


def plans(
    workload: packer.Workload, kind: packer.GpuKind, factors: Iterable[float]
) -> Iterator[tuple[float, packer.Plan]]:
    """Plan with the fewest GPUs that keep the latency goal, at each rate factor."""
    for factor in factors:
        yield factor, packer.recommend(workload.scaled(factor), kind)


def main() -> int:
    """Print a line for each rate factor; exit code 3 if some factor has no plan, 2 on bad input."""
    parser = argparse.ArgumentParser(description="GPUs needed as traffic grows.")
    parser.add_argument("workload", help="workload file: CSV, JSON, YAML or Parquet")
    parser.add_argument("--profile", default="h100-64gb/llama-3.1-8b-instruct")
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--price", type=float, help="of a server per hour (the profile's)")
    options = parser.parse_args()
    feasible = True
    try:
        workload = packer.read_workload(options.workload)
        kind = packer.GpuKind(packer.load_profile(options.profile), options.price)
        print(f"{workload.name}: {len(workload)} adapters on {kind.profile.label}")
        print(f"{'factor':>7} {'req/s':>9} {'tok/s':>10} {'GPUs':>5} {'a month':>12}  status")
        for factor, plan in plans(workload, kind, options.factors):
            price = "?" if plan.price_per_hour is None else f"{plan.price_per_hour * HOURS_A_MONTH:,.0f}"
            fleet = plan.workload
            print(
                f"{factor:>7g} {fleet.rate:>9.2f} {fleet.offered_tok_s:>10,.0f} {plan.n_gpus:>5} {price:>12}"
                f"  {plan.status}",
                flush=True,
            )
            feasible = feasible and plan.status is not packer.Status.INFEASIBLE
    except packer.PackerError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0 if feasible else 3


if __name__ == "__main__":
    sys.exit(main())
