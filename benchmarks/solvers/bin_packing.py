"""Classic bin packing through a plug-in predictor, against OR-Tools and HiGHS on the same machine.

    uv run python benchmarks/solvers/bin_packing.py --write

A server is a bin of a capacity in req/s, an adapter an item. Triplets (bins that are filled to the last unit by three
items each), uniform sizes (Falkenauer's classes), and instances whose optimum is above the relaxation, rounded up.
Against: CP-SAT with one variable for each item and bin, and HiGHS on arc-flow (Valério de Carvalho, 1999), with one
thread and the same limit each.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import packer
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.testing.records import record_text

HERE = Path(__file__).resolve().parent
Found = tuple[int | None, float]
"""Bins, and the lower bound."""


class Capacity:
    """A server holds adapters of at most `capacity` req/s together."""

    name = "capacity"
    monotone = True

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def evaluate(self, workload: packer.Workload, bins: Sequence[packer.Bin]) -> packer.Evaluations:
        """Figures of each bin; one row per bin, in order."""
        found = AnalyticPredictor(1e12).evaluate(workload, bins)
        full = np.array([item.rates(workload).sum() > self.capacity + 1e-6 for item in bins])
        served = np.where(full, 0.0, found.offered_tok_s)
        return replace(found, starved=full, memory_error=np.zeros(len(bins), dtype=bool), total_token_throughput=served)


def triplets(n: int, seed: int) -> tuple[list[int], int, int | None]:
    """Sizes, capacity and optimum."""
    rng = np.random.default_rng(seed)
    sizes: list[int] = []
    for _ in range(n // 3):
        first = int(rng.integers(380, 490))
        second = int(rng.integers(250, (1000 - first) // 2 + 1))
        sizes += [first, second, 1000 - first - second]
    rng.shuffle(sizes)
    return sizes, 1000, n // 3


def uniform(n: int, seed: int) -> tuple[list[int], int, int | None]:
    """Sizes from 20 to 100 in bins of 150."""
    return np.random.default_rng(seed).integers(20, 101, n).tolist(), 150, None


def thirds(n: int, seed: int) -> tuple[list[int], int, int | None]:
    """About `n` halves, thirds and fifths of a bin of 30; they take one bin more than the relaxation, rounded up.

    Their load is 1/30 below a whole number of bins, no bin of 29 can be made of them, and one of 30 holds a single size
    of which there are no multiples of 2, 3 and 5.
    """
    a, b, c = np.random.default_rng(seed).dirichlet((4.0, 4.0, 4.0)) * (n - 7)
    full = [int(a / 2), int(b / 3), int(c / 5)]
    sizes = [15] * (1 + 2 * full[0]) + [10] * (2 + 3 * full[1]) + [6] * (4 + 5 * full[2])
    return sizes, 30, sum(full) + 3


def by_packer(sizes: Sequence[int], capacity: int, limit_s: float) -> Found:
    """The solver `exact`."""
    fleet = packer.Workload([packer.Adapter(f"a{i}", 8, float(size)) for i, size in enumerate(sizes)])
    plan = packer.solve(
        fleet,
        small_profile(),
        solver="exact",
        predictor=Capacity(capacity),
        margin=0.0,
        verify=False,
        time_limit_s=limit_s,
    )
    return plan.n_gpus, plan.lower_bound if plan.bound_proven and plan.lower_bound else 0.0


def by_cp_sat(sizes: Sequence[int], capacity: int, limit_s: float) -> Found:
    """OR-Tools, items in bins, symmetry broken by the order of loads."""
    from ortools.sat.python import cp_model

    bins = _first_fit(sizes, capacity)
    model = cp_model.CpModel()
    inside = [[model.new_bool_var("") for _ in range(bins)] for _ in sizes]
    used = [model.new_bool_var("") for _ in range(bins)]
    for row in inside:
        model.add_exactly_one(row)
    for b in range(bins):
        load = cp_model.LinearExpr.weighted_sum([row[b] for row in inside], list(sizes))
        model.add(load <= capacity * used[b])
        if b:
            model.add_implication(used[b], used[b - 1])
    model.minimize(sum(used))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    found = round(solver.objective_value) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return found, math.ceil(solver.best_objective_bound - 1e-6)


def by_arc_flow(sizes: Sequence[int], capacity: int, limit_s: float) -> Found:
    """HiGHS: a flow from 0 to the capacity, an arc for each size at each place, falling sizes."""
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import coo_array

    demand = Counter(sizes)
    reached, arcs = {0}, set()
    for size in sorted(demand, reverse=True):
        for start in sorted(reached):
            at = start
            for _ in range(demand[size]):
                if at + size > capacity:
                    break
                arcs.add((at, at + size, size))
                at += size
                reached.add(at)
    nodes = {node: k for k, node in enumerate(sorted(reached | {capacity}))}
    listed = [*sorted(arcs), *((node, capacity, 0) for node in sorted(reached - {0, capacity}))]
    rank = {size: len(nodes) + k for k, size in enumerate(demand)}
    rows, columns, values = [], [], []
    for k, (start, end, size) in enumerate(listed):
        for row, value in ((nodes[start], -1.0), (nodes[end], 1.0), *(((rank[size], 1.0),) if size else ())):
            rows.append(row)
            columns.append(k)
            values.append(value)
    flow = len(listed)  # the number of bins, back from the capacity to 0
    rows += [nodes[0], nodes[capacity]]
    columns += [flow, flow]
    values += [1.0, -1.0]
    matrix = coo_array((values, (rows, columns)), shape=(len(nodes) + len(rank), flow + 1)).tocsr()
    low = np.array([0.0] * len(nodes) + [float(demand[size]) for size in demand])
    high = np.where(np.arange(len(low)) < len(nodes), 0.0, np.inf)
    price = np.zeros(flow + 1)
    price[flow] = 1.0
    found = milp(
        price,
        integrality=np.ones(flow + 1),
        constraints=LinearConstraint(matrix, low, high),
        options={"time_limit": limit_s},
    )
    bound = getattr(found, "mip_dual_bound", None)
    return None if found.x is None else round(found.fun), math.ceil((bound or 0.0) - 1e-6)


def _first_fit(sizes: Sequence[int], capacity: int) -> int:
    room: list[int] = []
    for size in sorted(sizes, reverse=True):
        k = next((k for k, left in enumerate(room) if left >= size), None)
        if k is None:
            room.append(capacity - size)
        else:
            room[k] -= size
    return len(room)


SOLVERS: dict[str, Callable[[Sequence[int], int, float], Found]] = {
    "packer exact": by_packer,
    "OR-Tools CP-SAT": by_cp_sat,
    "HiGHS arc-flow": by_arc_flow,
}
CASES = (
    ("triplets", triplets, (30, 60, 120)),
    ("uniform", uniform, (60, 120)),
    ("thirds", thirds, (70, 700)),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, and print a line for each instance and solver."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--write", action="store_true", help="write bin_packing.json beside this file")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for name, draw, items in CASES:
        for n in items:
            for seed in range(options.seeds):
                sizes, capacity, optimum = draw(n, seed)
                for solver, solve in SOLVERS.items():
                    started = time.process_time()
                    bins, bound = solve(sizes, capacity, options.time_limit)
                    rows.append(
                        {
                            "instance": f"{name}-{n}-{seed}",
                            "solver": solver,
                            "bins": bins,
                            "proven_bound": bound,
                            "optimum": optimum,
                            "cpu_s": round(time.process_time() - started, 2),
                        }
                    )
                    print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if options.write:
        text = record_text({"time_limit_s": options.time_limit, "rows": rows})
        (HERE / "bin_packing.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
