"""`cpsat` against the best of the other solvers: several kinds, latency with mixed ranks, replanning, tight fleets.

    uv run python benchmarks/solvers/refinement.py --family latency --fleets 6 --write

Every solver has the same time and the same judge. `first` is the plan that `cpsat` started from; a win is a GPU, 5 % of
the price, 5 % of the worst latency or half of the moves less than the best other plan.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gaps
import numpy as np

import packer
from packer.testing.records import record_text

HERE = Path(__file__).resolve().parent
LLAMA, QWEN = "h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct"
RANKS = (8, 16, 32, 64, 128)


def fleet_of(n: int, seed: int, load: float, spread: float = 1.2) -> packer.Workload:
    """`n` adapters of mixed ranks and log-normal rates that offer `load` req/s together."""
    rng = np.random.default_rng((seed, n))
    rates = rng.lognormal(0.0, spread, n)
    rates *= load / rates.sum()
    ranks = rng.choice(RANKS, n, p=(0.3, 0.25, 0.2, 0.15, 0.1))
    adapters = [
        packer.Adapter(f"a{i}", int(rank), round(float(min(rate, 8.0)), 4))
        for i, (rank, rate) in enumerate(zip(ranks, rates, strict=True))
    ]
    return packer.Workload(adapters, name=f"{n}-{seed}")


def kinds(seed: int, limit_s: float, predictor: str) -> dict[str, Any]:
    """The lowest price on a large and a smaller kind of GPU (the large one with a part of its speed)."""
    rng = np.random.default_rng((seed, 1))
    large = packer.load_profile(LLAMA)
    large = replace(large, gpu=replace(large.gpu, name="large", price_per_hour=3.0))
    offered = [large]
    for k in range(int(rng.integers(1, 3))):
        speed = float(rng.uniform(0.25, 0.6))
        slow = {name: value / speed for name, value in large.latency.coefficients.items()}
        small = large.with_coefficients(**slow)
        price = round(3.0 * speed * float(rng.uniform(0.8, 1.1)), 2)
        offered.append(replace(small, gpu=replace(large.gpu, name=f"small{k}", price_per_hour=price)))
    fleet = fleet_of(int(rng.choice((24, 60, 150))), seed, float(rng.uniform(20, 90)))
    return compared(fleet, offered, "cost", ("greedy", "mixed"), limit_s, predictor)


def latency(seed: int, limit_s: float, predictor: str) -> dict[str, Any]:
    """The lowest worst time of a request on a given number of GPUs, at 50 to 85 % load, mixed ranks."""
    rng = np.random.default_rng((seed, 2))
    gpus = int(rng.integers(3, 9))
    fleet = fleet_of(int(rng.integers(8, 30)) * gpus, seed, gpus * float(rng.uniform(5.0, 10.0)))
    goal = ("latency:statistic=worst", "latency:metric=ttft,statistic=worst", "latency")[seed % 3]
    return compared(fleet, packer.load_profile(LLAMA), goal, ("spread-refined", "spread"), limit_s, predictor, gpus)


def moves(seed: int, limit_s: float, predictor: str) -> dict[str, Any]:
    """A running plan whose rates changed: fewest GPUs, then fewest moves."""
    rng = np.random.default_rng((seed, 3))
    profile = packer.load_profile((LLAMA, QWEN)[seed % 2])
    fleet = fleet_of(int(rng.choice((40, 100, 250))), seed, float(rng.uniform(80, 300)))
    settings: dict[str, Any] = {"predictor": predictor, "verify": False, "with_headroom": False}
    old = packer.solve(fleet, profile, solver="greedy", **settings)
    factors = rng.lognormal(0.0, 0.4, len(fleet)) * float(rng.choice((0.85, 1.0, 1.1)))
    changed = [
        replace(adapter, rate=round(min(10.0, adapter.rate * factor), 4))
        for adapter, factor in zip(fleet.adapters, factors.tolist(), strict=True)
    ]
    now = replace(fleet, adapters=tuple(changed))
    return compared(now, profile, "moves", ("replan",), limit_s, predictor, old=old)


def tight(seed: int, limit_s: float, predictor: str) -> dict[str, Any]:
    """Fewest GPUs of 500 to 2,000 adapters, also within a limit of latency."""
    rng = np.random.default_rng((seed, 4))
    n = int(rng.choice((500, 1000, 2000)))
    fleet = fleet_of(n, seed, float(rng.uniform(60, 200)), spread=0.8)
    return compared(fleet, packer.load_profile((LLAMA, QWEN)[seed % 2]), "gpus", ("greedy", "auto"), limit_s, predictor)


FAMILIES: dict[str, Callable[[int, float, str], dict[str, Any]]] = {
    "kinds": kinds, "latency": latency, "moves": moves, "tight": tight,
}  # fmt: skip


def compared(
    fleet: packer.Workload, profile: Any, objective: str, others: Sequence[str], limit_s: float, predictor: str,
    gpus: int | None = None, old: packer.Plan | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The keys of all plans, and by how much `cpsat` is better than the best other."""
    found: dict[str, packer.Plan] = {}
    seconds = {}
    for name in (*others, "cpsat"):
        started = time.process_time()
        found[name] = packer.solve(
            fleet, profile, objective, solver=name, predictor=predictor, max_gpus=gpus, time_limit_s=limit_s,
            old_plan=old, verify=False, with_headroom=False,
        )  # fmt: skip
        seconds[name] = round(time.process_time() - started, 1)
    held = {name: plan.objective_value for name, plan in found.items() if plan.status != "infeasible"}
    best = min((held[name] for name in others if name in held), default=())
    mine = held.get("cpsat", ())
    return {
        "fleet": fleet.name,
        "objective": objective,
        **{name: list(np.round(key, 3)) for name, key in held.items()},
        "first_key": found["cpsat"].details.get("first_key"),
        "win": won(objective, mine, best),
        "better": mine < best if mine and best else bool(mine),
        "neighbourhoods": found["cpsat"].details.get("neighbourhoods"),
        "refused": found["cpsat"].details.get("servers_refused"),
        "seconds": seconds,
    }


def won(objective: str, mine: Sequence[float], best: Sequence[float]) -> bool:
    """Whether a key is better by a GPU, 5 % of price or latency, or half of the moves."""
    if not mine or not best:
        return bool(mine)
    if objective == "moves":
        return mine[0] < best[0] or (mine[0] == best[0] and mine[1] <= 0.5 * best[1] and mine[1] < best[1])
    return mine[0] <= best[0] - 1.0 if objective == "gpus" else mine[0] <= 0.95 * best[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, and print a line for each fleet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--family", choices=list(FAMILIES), action="append")
    parser.add_argument("--fleets", type=int, default=6)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--predictor", default="boosting")
    parser.add_argument("--cpu-clock", action="store_true", help="limits are CPU seconds of this process")
    parser.add_argument("--write", action="store_true", help="write refinement.json beside this file")
    options = parser.parse_args(argv)
    if options.cpu_clock:
        gaps.count_cpu_time()
    rows = []
    for family in options.family or FAMILIES:
        for seed in range(options.first, options.first + options.fleets):
            row = FAMILIES[family](seed, options.time_limit, options.predictor)
            rows.append({"family": family, "seed": seed, "predictor": options.predictor, **row})
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        path = HERE / "refinement.json"
        known = json.loads(path.read_text("utf-8")) if path.exists() else []
        kept = {(row["family"], row["seed"], row["predictor"]): row for row in (*known, *rows)}
        path.write_text(record_text([kept[key] for key in sorted(kept)]) + "\n", "utf-8")


if __name__ == "__main__":
    main()
