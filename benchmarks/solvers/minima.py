"""Bounds of merged classes that stand for their mean or their lightest member, against the bound by load.

    uv run python benchmarks/solvers/minima.py --first 1 --fleets 1

Fleets of `gaps.py` with trained trees alone. A class that stands for its lightest member gives a bound for the fleet
itself, one that stands for its mean an estimate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import suppress

import gaps
import numpy as np

import packer
from packer.objectives.gpus import Gpus
from packer.solvers.backbone import load_bound
from packer.solvers.base import Problem
from packer.solvers.classes import aggregate
from packer.solvers.columns.generation import BOUND, Columns
from packer.solvers.columns.source import Source
from packer.solvers.evaluator import Evaluator
from packer.solvers.feasibility import Feasibility, OutOfTime
from packer.solvers.greedy.solver import Greedy

CASES = ((48, False), (48, True), (12, True), (9, True), (6, True))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options and print a line for each fleet and way to merge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fleets", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first fleet")
    parser.add_argument("--time-limit", type=float, default=10.0, help="of each bound, s")
    options = parser.parse_args(argv)
    for number in range(options.first, options.first + options.fleets):
        size = gaps.SIZES[number // len(gaps.KINDS) % len(gaps.SIZES)]
        fleet = gaps.fleet_of(gaps.KINDS[number % len(gaps.KINDS)], size, number)
        profile = packer.load_profile(gaps.PROFILES[number % 2])
        goal = Gpus()
        evaluator = Evaluator(packer.load_predictor("boosting", profile), goal)
        plan = Greedy().solve(Problem(fleet, (profile,), goal, evaluator))
        by_load = load_bound(fleet, profile, 0.0, simulated=False)
        print(f"{fleet.name}: greedy {len(plan.bins)}, bound by load {by_load}", flush=True)
        for most, optimistic in CASES:
            started = time.monotonic()
            problem = Problem(fleet, (profile,), goal, evaluator, time_limit_s=options.time_limit)
            classes = aggregate(fleet, max_classes=most, optimistic=optimistic)
            feasibility = Feasibility(problem, classes)
            columns = Columns([Source(1.0, feasibility, feasibility, np.random.default_rng(0))])
            with suppress(OutOfTime):
                if columns.start([classes.rows(())]):
                    columns.warm()
                    columns.run(np.array([1]), BOUND, problem.out_of_time)
            print(
                f"  {len(classes):3} classes, {'lightest' if optimistic else 'mean':8}: value {columns.value:.2f}, "
                f"bound {columns.promised}, {time.monotonic() - started:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
