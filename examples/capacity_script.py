"""GPUs needed as traffic grows: plan a workload at half to four times its rates.

python examples/capacity_script.py examples/workloads/azure-conv-2023.csv
python examples/capacity_script.py fleet.csv --profile my-server.toml --factors 1 2 10 --predictor forest
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator

import packer

FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)


def plans(
    workload: packer.Workload, profile: packer.Profile, factors: Iterable[float], *, predictor: str = "twin"
) -> Iterator[tuple[float, packer.Plan]]:
    """Plan with the fewest GPUs at each rate factor."""
    for factor in factors:
        grown = workload.scaled(factor)
        yield factor, packer.solve(grown, profile, objective="gpus", predictor=predictor)


def main() -> int:
    """Print a line for each rate factor; exit code 3 if some factor has no plan, 2 on bad input."""
    parser = argparse.ArgumentParser(description="GPUs needed as traffic grows.")
    parser.add_argument("workload", help="workload file: CSV, JSON, YAML or Parquet")
    parser.add_argument("--profile", default="h100-64gb/llama-3.1-8b-instruct")
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--predictor", default="twin")
    options = parser.parse_args()
    feasible = True
    try:
        workload = packer.read_workload(options.workload)
        profile = packer.load_profile(options.profile)
        print(f"{workload.name}: {len(workload)} adapters on {profile.label}")
        print(f"{'factor':>7} {'req/s':>9} {'tok/s':>10} {'GPUs':>5} {'at least':>9}  status")
        for factor, plan in plans(workload, profile, options.factors, predictor=options.predictor):
            bound = "?" if plan.lower_bound is None else f"{plan.lower_bound:.0f}"
            fleet = plan.workload
            print(
                f"{factor:>7g} {fleet.rate:>9.2f} {fleet.offered_tok_s:>10,.0f} {plan.n_gpus:>5} {bound:>9}"
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
