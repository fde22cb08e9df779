"""Plans against their bounds on generated fleets of 500 to 5,000 adapters.

    uv run python benchmarks/solvers/gaps.py --fleets 20 --write
    uv run python benchmarks/solvers/gaps.py --first 5 --fleets 5 --write   # these again, the others stay

Fleets differ in how load is spread, in ranks and in lengths: equal rates, continuous rates, own lengths, a few hot
adapters, high ranks. Gap: (GPUs − bound) / GPUs; a bound is proven or an estimate.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import packer
from packer.planning import solve as api
from packer.solvers import base
from packer.testing.records import record_text

HERE = Path(__file__).resolve().parent
PROFILES = ("h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct")
SIZES = (500, 1000, 2000, 5000)
KINDS = ("levels", "continuous", "lengths", "hot", "ranks")


def fleet_of(kind: str, n: int, seed: int) -> packer.Workload:
    """A fleet of `n` adapters; the same for the same seed."""
    rng = np.random.default_rng((seed, n))
    ranks = rng.choice((8, 16, 32), n)
    if kind == "levels":
        rates = rng.choice((1.6, 0.4, 0.1, 0.025), n)
    elif kind == "hot":
        rates = np.where(rng.random(n) < 0.02, rng.uniform(2.0, 4.0, n), rng.uniform(0.005, 0.05, n))
    else:
        rates = np.minimum(rng.lognormal(np.log(0.1), 1.2, n), 3.0)
    if kind == "ranks":
        ranks = rng.choice((8, 32, 64, 128), n)
    adapters = []
    for i in range(n):
        own: tuple[packer.Lengths, ...] = ()
        if kind == "lengths":
            mean_in, mean_out = [(900.0, 60.0), (220.0, 200.0), (500.0, 20.0)][int(rng.integers(3))]
            factor = float(rng.lognormal(0.0, 0.3))
            own = (packer.Lengths.gamma(mean_in * factor, 1.0), packer.Lengths.gamma(mean_out * factor, 1.0))
        adapters.append(packer.Adapter(f"a{i}", int(ranks[i]), round(float(rates[i]), 5), *own))
    return packer.Workload(adapters, name=f"{kind}-{n}-{seed}")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, and print a line for each fleet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fleets", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first fleet")
    parser.add_argument("--time-limit", type=float, default=60.0, help="of each plan, s")
    parser.add_argument("--predictor", default="auto")
    parser.add_argument("--objective", default="gpus", help="recommend: the plan that keeps the latency goal")
    parser.add_argument("--largest", type=int, default=5000, help="most adapters of a fleet")
    parser.add_argument("--cpu-clock", action="store_true", help="limits and times are CPU seconds of this process")
    parser.add_argument("--write", action="store_true", help="write gaps.json beside this file")
    options = parser.parse_args(argv)
    if options.cpu_clock and options.objective != "recommend":
        count_cpu_time()
    rows = []
    for number in range(options.first, options.first + options.fleets):
        size = min(SIZES[number // len(KINDS) % len(SIZES)], options.largest)
        fleet = fleet_of(KINDS[number % len(KINDS)], size, number)
        rows.append(row := one(fleet, PROFILES[number % 2], options))
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    gaps = [row["gap"] for row in rows]
    proven = sum(row["proven"] for row in rows)
    print(f"{len(rows)} fleets: gap median {np.median(gaps):.1%}, p90 {np.quantile(gaps, 0.9):.1%}, {proven} proven")
    if options.write:
        path = HERE / ("gaps_goal.json" if options.objective == "recommend" else "gaps.json")
        known = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
        kept = {row["fleet"]: row for row in (*known, *rows) if row["objective"] == options.objective}
        found = sorted(kept.values(), key=lambda row: int(row["fleet"].rpartition("-")[2]))
        text = record_text({"rows": found})
        path.write_text(text + "\n", "utf-8")


def count_cpu_time() -> None:
    """Solvers measure their limits in CPU time, for a machine that is shared with others."""
    base.time = SimpleNamespace(monotonic=time.process_time)  # type: ignore[assignment]
    api.Problem = lambda *args, **known: base.Problem(*args, started=time.process_time(), **known)  # type: ignore


def one(fleet: packer.Workload, profile: str, options: argparse.Namespace) -> dict[str, Any]:
    """One plan and its bound."""
    clock = time.process_time if options.cpu_clock else time.perf_counter
    started, server = clock(), packer.load_profile(profile)
    if options.objective == "recommend":
        plan = packer.recommend(fleet, server, time_limit_s=None if options.cpu_clock else options.time_limit)
    else:
        plan = packer.solve(
            fleet,
            server,
            options.objective,
            solver="auto",
            predictor=options.predictor,
            time_limit_s=options.time_limit,
            verify=False,
        )
    bound = plan.lower_bound or 1.0
    return {
        "fleet": fleet.name,
        "profile": profile.partition("/")[2],
        "objective": options.objective,
        "status": str(plan.status),
        "greedy": plan.details.get("greedy_gpus"),
        "gpus": plan.n_gpus,
        "bound": bound,
        "proven": plan.bound_proven,
        "gap": round((plan.n_gpus - bound) / plan.n_gpus, 3),
        "limit_s": options.time_limit,
        "taken_s": round(clock() - started, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "source": plan.bound_source[:60],
    }


if __name__ == "__main__":
    main()
