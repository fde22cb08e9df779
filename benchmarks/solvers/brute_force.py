"""Plans of small fleets against every plan there is: optimum, bound and status.

    uv run python benchmarks/solvers/brute_force.py --fleets 200 --write
    uv run python benchmarks/solvers/brute_force.py --first 200 --fleets 50 --write   # adds to these
    uv run python benchmarks/solvers/brute_force.py --judge twin --judge contrary --fleets 20 --write

Every set of adapters is evaluated by the predictor with every number of slots, and the fewest sets that make up the
fleet are found by dynamic programming. Faults are plans called optimal that are not, bounds above the optimum and plans
below it. With `--judge` fleets of 4 to 8 adapters (`--adapters` of so many) are drawn for each judge and each of four
cards; `contrary` answers the opposite for a share of 0.2 to 2 % of the sets.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import packer
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.objectives.base import load_objective
from packer.plan import Status
from packer.predictors.learned import BoostingPredictor
from packer.profile import Profile
from packer.solvers.backbone import engine_load
from packer.solvers.base import Problem
from packer.solvers.evaluator import Evaluator
from packer.solvers.slots import real_bins
from packer.strategies import Predictor
from packer.testing.analytic import AnalyticPredictor
from packer.testing.records import record_text

HERE = Path(__file__).resolve().parent
PROFILES = ("h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct")
SOLVERS = ("greedy", "bounds", "exact", "auto")
JUDGES = ("twin", "auto", "boosting", "analytic", "contrary")
CARDS = (*PROFILES, "a10", "rtx-4090")
"""The last two by the estimate of a profile of Llama 3.1 8B."""


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
    fits = [False, *(made is not None for made in real_bins(problem, sets))]
    fewest = [0]
    for left in range(1, 1 << n):
        lowest, best = left & -left, n + 1
        rest = others = left & ~lowest
        while True:  # every set of what is left that holds its lowest adapter
            if fits[rest | lowest]:
                best = min(best, 1 + fewest[others & ~rest])
            if not rest:
                break
            rest = (rest - 1) & others
        fewest.append(best)
    return fewest[-1] if fewest[-1] <= n else None


@dataclass(frozen=True)
class Contrary(AnalyticPredictor):
    """The analytic predictor, which answers the opposite for a share of the sets of adapters."""

    share: float = 0.01
    seed: int = 0
    name = "contrary"

    def evaluate(self, workload: packer.Workload, bins: Sequence[Bin]) -> Evaluations:
        """Evaluate each bin; one row per bin, in order."""
        found = super().evaluate(workload, bins)
        drawn = [zlib.crc32(repr((self.seed, sorted(each.adapters))).encode()) / 2**32 for each in bins]
        return replace(found, starved=found.starved ^ (np.array(drawn) < self.share))


@cache
def card(name: str) -> Profile:
    """A shipped profile, or an estimated one."""
    if "/" in name:
        return packer.load_profile(name)
    return packer.estimate_profile("meta-llama/Llama-3.1-8B-Instruct", name, max_model_len=4096)


def drawn(judge: str, number: int, adapters: int) -> tuple[packer.Workload, Profile, Predictor, Predictor]:
    """A fleet, its card, the predictor that plans, and the one that judges: that is the twin of `auto`."""
    seed = zlib.crc32(judge.encode()) % 1000 + 1000 * number
    rng = np.random.default_rng((seed, 5))
    profile = card(CARDS[number % len(CARDS)])
    n = adapters or int(rng.integers(4, 9))
    levels = rng.lognormal(0.0, 0.8, int(rng.integers(2, n + 1)))
    ranks = rng.choice((8, 16, 32, 64, 128), n).tolist()
    fleet = packer.Workload(
        [packer.Adapter(f"a{i}", int(rank), float(rng.choice(levels))) for i, rank in enumerate(ranks)],
        name=f"{judge}-{number}",
    )
    closed = judge in ("analytic", "contrary")
    servers = fleet.offered_tok_s / AnalyticPredictor.peak_tok_s if closed else engine_load(fleet, profile)
    share = float(fleet.offered_tok_s_by_adapter.max()) / fleet.offered_tok_s
    fleet = fleet.scaled(min(float(rng.uniform(0.5, 0.4 * n)), float(rng.uniform(0.2, 0.7)) / share) / servers)
    if closed:
        wrong = float(rng.choice((0.002, 0.02)))
        made: Predictor = AnalyticPredictor() if judge == "analytic" else Contrary(share=wrong, seed=seed)
        return fleet, profile, made, made
    guided = judge == "boosting" and "/" not in CARDS[number % len(CARDS)]
    plans = BoostingPredictor.guide(profile) if guided else packer.load_predictor(judge, profile)
    return fleet, profile, plans, packer.load_predictor("twin", profile) if judge == "auto" else plans


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fleets", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first fleet; > 0 adds to what is written")
    parser.add_argument("--predictor", default="boosting")
    parser.add_argument("--objective", default="gpus")
    parser.add_argument("--time-limit", type=float, default=10.0, help="of each plan, s")
    parser.add_argument("--write", action="store_true", help="write brute_force.json beside this file")
    parser.add_argument("--judge", choices=JUDGES, action="append", help="fresh fleets for these on four cards")
    parser.add_argument("--adapters", type=int, default=0, help="of each fleet of --judge; 0: 4 to 8")
    options = parser.parse_args(argv)
    if options.judge:
        judged(options)
        return
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
            counts[solver].update(solved(fleet, profile, options, solver, predictor, best or 0))
            seconds[solver] += time.process_time() - started
    rows: list[dict[str, Any]] = [
        {"solver": solver, **counts[solver], "cpu_s": round(seconds[solver], 1)} for solver in SOLVERS
    ]
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    if options.write:
        text = record_text({"predictor": options.predictor, "rows": rows}) + "\n"
        path.write_text(text, "utf-8")


def solved(
    fleet: packer.Workload, profile: Profile, options: argparse.Namespace, solver: str, predictor: Predictor,
    best: int,
) -> dict[str, int]:  # fmt: skip
    """What the plan of a solver counts for."""
    given: dict[str, Any] = {"margin": 0.0, "verify": False, "with_headroom": False}
    plan = packer.solve(
        fleet, profile, load_objective(options.objective), solver=solver, predictor=predictor,
        time_limit_s=options.time_limit, **given,
    )  # fmt: skip
    return outcome(plan, best)


def judged(options: argparse.Namespace) -> None:
    """Fleets for each judge and card; adds to what is written for the judge and the number of adapters."""
    path = HERE / "brute_force_judges.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else []
    size = f"{options.adapters}" if options.adapters else "4-8"
    for judge in options.judge:
        counts: dict[str, Counter[str]] = {solver: Counter() for solver in (*SOLVERS, "mixed")}
        for number in range(options.first, options.first + options.fleets):
            fleet, profile, predictor, last = drawn(judge, number, options.adapters)
            goal = load_objective(options.objective)
            best = optimum(Problem(fleet, (profile,), goal, Evaluator(last, goal)))
            for solver, count in counts.items():
                found = {"unservable": 1} if best is None else {}
                count.update(found or solved(fleet, profile, options, solver, predictor, best or 0))
        for solver, count in counts.items():
            key = {"judge": judge, "adapters": size, "solver": solver}
            known = next((row for row in rows if {name: row[name] for name in key} == key), None)
            if known is not None:
                rows.remove(known)
                count.update({name: n for name, n in known.items() if name not in key})
            rows.append({**key, **count})
            print(" ".join(f"{name}={n}" for name, n in rows[-1].items()), flush=True)
    if options.write:
        rows.sort(key=lambda row: (JUDGES.index(row["judge"]), row["adapters"], row["solver"]))
        path.write_text(record_text(rows) + "\n", "utf-8")


def outcome(plan: packer.Plan, best: int) -> dict[str, int]:
    """What a plan counts for."""
    bound = plan.lower_bound or 0.0
    if plan.status is Status.INFEASIBLE:  # an adapter that the judge refuses alone, and admits beside another
        return {"fleets": 1, "infeasible": 1, "proven_above_optimum": int(plan.bound_proven and bound > best)}
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
