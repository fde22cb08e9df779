"""Plans of small fleets against every plan there is: optimum, bound and status.

    uv run python benchmarks/solvers/brute_force.py --fleets 200 --write
    uv run python benchmarks/solvers/brute_force.py --first 200 --fleets 50 --write   # adds to these

Every set of adapters is evaluated by the predictor, and the fewest sets that make up the fleet are found by dynamic
programming. Faults are plans called optimal that are not, bounds above the optimum and plans below it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import packer
from packer.objectives.base import load_objective
from packer.plan import Status
from packer.solvers.base import Problem
from packer.solvers.evaluator import Evaluator
from packer.solvers.feasibility import real_bins

HERE = Path(__file__).resolve().parent
PROFILES = ("h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct")
SOLVERS = ("greedy", "bounds", "exact", "auto")


def fleet_of(seed: int) -> packer.Workload:
    """Seven to thirteen adapters, each with a twelfth to two thirds of what a server carries."""
    rng = np.random.default_rng((seed, 4))
    n = int(rng.integers(7, 13 + (seed % 10 == 0)))
    levels = rng.uniform(2.0, float(rng.choice((8.0, 20.0))), int(rng.integers(2, n + 1)))
    return packer.Workload(
        [packer.Adapter(f"a{i}", int(rng.choice((8, 16, 32))), float(rng.choice(levels))) for i in range(n)],
        name=f"small-{seed}",
    )


def optimum(problem: Problem) -> int | None:
    """Fewest GPUs; None if an adapter fits nowhere."""
    n = len(problem.workload)
    sets = [tuple(i for i in range(n) if mask >> i & 1) for mask in range(1, 1 << n)]
    good = {mask for mask, made in enumerate(real_bins(problem, sets), start=1) if made is not None}
    holding = {i: [mask for mask in good if mask & -mask == 1 << i] for i in range(n)}

    @cache
    def fewest(left: int) -> int:
        if left == 0:
            return 0
        lowest = (left & -left).bit_length() - 1
        return 1 + min((fewest(left & ~mask) for mask in holding[lowest] if mask & left == mask), default=n)

    found = fewest((1 << n) - 1)
    return found if found <= n else None


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fleets", type=int, default=200)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first fleet; > 0 adds to what is written"
    )
    parser.add_argument("--predictor", default="boosting")
    parser.add_argument("--objective", default="gpus")
    parser.add_argument("--time-limit", type=float, default=10.0, help="of each plan, s")
    parser.add_argument("--write", action="store_true", help="write brute_force.json beside this file")
    options = parser.parse_args(argv)
    counts: dict[str, Counter[str]] = {solver: Counter() for solver in SOLVERS}
    seconds: Counter[str] = Counter()
    path = HERE / "brute_force.json"
    if options.first and options.write:
        for row in json.loads(path.read_text("utf-8"))["rows"]:
            solver = row.pop("solver")
            seconds[solver] = row.pop("cpu_s")
            counts[solver].update(row)
    for seed in range(options.first, options.first + options.fleets):
        profile = packer.load_profile(PROFILES[seed % 2])
        predictor = packer.load_predictor(options.predictor, profile)
        fleet, goal = fleet_of(seed), load_objective(options.objective)
        best = optimum(Problem(fleet, (profile,), goal, Evaluator(predictor, goal)))
        for solver in SOLVERS if best is not None else ():
            started = time.process_time()
            plan = packer.solve(
                fleet,
                profile,
                goal,
                solver=solver,
                predictor=predictor,
                margin=0.0,
                verify=False,
                time_limit_s=options.time_limit,
            )
            seconds[solver] += time.process_time() - started
            counts[solver].update(outcome(plan, best or 0))
    rows: list[dict[str, Any]] = [
        {"solver": solver, **counts[solver], "cpu_s": round(seconds[solver], 1)} for solver in SOLVERS
    ]
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    if options.write:
        text = json.dumps({"predictor": options.predictor, "rows": rows}, indent=1) + "\n"
        path.write_text(text, "utf-8")


def outcome(plan: packer.Plan, best: int) -> dict[str, int]:
    """What a plan counts for."""
    bound = plan.lower_bound or 0.0
    return {
        "fleets": 1,
        "at_optimum": int(plan.n_gpus == best),
        "above_by": plan.n_gpus - best,
        "below_optimum": int(plan.n_gpus < best),
        "called_optimal": int(plan.status is Status.OPTIMAL),
        "false_optimal": int(plan.status is Status.OPTIMAL and plan.n_gpus > best),
        "bound_at_optimum": int(bound == best),
        "proven_above_optimum": int(plan.bound_proven and bound > best),
        "estimate_above_optimum": int(not plan.bound_proven and bound > best),
    }


if __name__ == "__main__":
    main()
