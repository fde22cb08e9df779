"""Greedy against column generation on generated fleets of several models and kinds of GPU: prices, bounds, times.

    uv run python benchmarks/fleets/mixes.py --first 0 --count 30
    uv run python benchmarks/fleets/mixes.py --table

One JSON object a line is appended to mixes.jsonl for each fleet; fleets that are there already are left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from generate import GPUS, MODELS, fleet, kinds

import packer
from packer.objectives.cost import Cost
from packer.profile import Profile
from packer.solvers.base import Problem, Solution
from packer.solvers.by_model import solved
from packer.solvers.columns.mixed import Mixed
from packer.solvers.confirm import all_hold, solution_that_holds
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.solver import Greedy

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "mixes.jsonl"
MARGIN = 0.1


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--time-limit", type=float, default=4.0, help="of mixed, s")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    options = parser.parse_args(argv)
    if not options.table:
        done = {row["seed"] for row in rows()}
        for seed in range(options.first, options.first + options.count):
            if seed not in done:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(measured(seed, options.time_limit)) + "\n")
    print(table())


def instance(seed: int) -> tuple[packer.Workload, tuple[Profile, ...]]:
    """A fleet of 1 to 3 models and 60 to 600 adapters, and 2 or 3 kinds of server for each."""
    rng = np.random.default_rng([seed, 17])
    models = tuple(MODELS)[: int(rng.integers(1, 4))]
    n = round(float(np.exp(rng.uniform(np.log(60), np.log(600)))))
    found = fleet(n, seed, models)
    target = float(rng.uniform(12_000.0, 60_000.0))  # offered load of each model, tok/s
    factor = target * len(models) / found.offered_tok_s
    hottest = float(found.rates.max())
    return found.scaled(min(factor, 3.0 / hottest)), kinds(models, GPUS[: int(rng.integers(2, 4))])


def measured(seed: int, time_limit_s: float) -> dict[str, Any]:
    """Prices and times of both solvers, and the bound."""
    workload, profiles = instance(seed)
    row: dict[str, Any] = {
        "seed": seed,
        "adapters": len(workload),
        "models": len(workload.models),
        "kinds": len(profiles) // len(workload.models),
        "offered_tok_s": workload.offered_tok_s,
    }
    for name, solver, limit_s in (("greedy", Greedy(), None), ("mixed", Mixed(), time_limit_s)):
        goal = Cost()
        evaluator = Evaluator.load("auto", profiles, objective=goal, margin=MARGIN)
        problem = Problem(workload, profiles, goal, evaluator, time_limit_s=limit_s)
        started = time.perf_counter()
        found = solution_that_holds(problem, lambda part, solver=solver: solved(part, solver))  # type: ignore[misc]
        row |= {
            f"{name}_price": price(found),
            f"{name}_servers": len(found.bins),
            f"{name}_s": time.perf_counter() - started,
            f"{name}_holds": all_hold(problem, found),
        }
        if name == "mixed":
            row |= {"bound": found.lower_bound, "proven": found.proven, "details": dict(found.details)}
    return row


def price(found: Solution) -> float:
    """Price per hour of all servers."""
    return sum(item.profile.gpu.price_per_hour or 0.0 for item in found.bins)


def rows() -> list[dict[str, Any]]:
    """What was measured so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table() -> str:
    """Medians and 90th percentiles over the fleets."""
    found = [row for row in rows() if row["mixed_holds"] and row["greedy_holds"]]
    bounded = [row for row in found if row["bound"]]

    def gap(name: str) -> str:
        gaps = [row[f"{name}_price"] / row["bound"] - 1.0 for row in bounded]
        return f"{np.median(gaps):.1%} | {np.quantile(gaps, 0.9):.1%}" if gaps else "– | –"

    won = np.array([row["mixed_price"] / row["greedy_price"] - 1.0 for row in found])
    lines = [
        f"{len(found)} of {len(rows())} fleets whose plans the twin admits; a bound for {len(bounded)}.",
        "",
        "| solver | above the bound, median | in 90 % below | servers, median | time s, median | time s, longest |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("greedy", "mixed"):
        servers = np.median([row[f"{name}_servers"] for row in found])
        seconds = [row[f"{name}_s"] for row in found]
        lines.append(f"| `{name}` | {gap(name)} | {servers:.0f} | {np.median(seconds):.1f} | {max(seconds):.1f} |")
    lines += [
        "",
        f"`mixed` costs less on {int((won < -1e-9).sum())}, as much on {int((abs(won) <= 1e-9).sum())} and more on "
        f"{int((won > 1e-9).sum())} fleets; {-won.mean():.1%} less on average.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
