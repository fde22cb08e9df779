"""Run the solvers over the suite; what is done already is not done again.

    uv run python benchmarks/solvers/run.py --predictor boosting
    uv run python benchmarks/solvers/run.py --only llama-64 --time-limit 10 --results /tmp/results.jsonl

One JSON object a line is appended to the results: one for each instance, solver and objective. Plans are
evaluated again by the twin, at the nominal rates and with a seed that no search has seen. `summarise.py` makes
the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from suite import Instance, suite

import packer
from packer.errors import PackerError
from packer.evaluation import Evaluations
from packer.planning.solve import solve
from packer.seeds import fresh
from packer.strategies import Predictor

HERE = Path(__file__).resolve().parent
COUNTING = ("greedy-paper", "maxbase", "greedy", "auto")
SPREADING = ("random", "spread", "dlora", "spread-refined")
LATENCY_UP_TO = 300
"""Adapters up to which latency is compared."""
EVALUATED_BINS = 12
"""At most so many bins of a plan go to the twin, seeded choice."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--predictor",
        default="boosting",
        help="what evaluates bins in the searches; in the path of a trained one, {model} stands for the model",
    )
    parser.add_argument("--label", help="what the results call the predictor (default: its name)")
    parser.add_argument("--time-limit", type=float, default=5.0, help="of auto, s")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--only", default="", help="instances whose name starts like this")
    parser.add_argument("--solvers", nargs="*", help="these only")
    options = parser.parse_args(argv)
    options.label = options.label or options.predictor
    done = {key(row) for row in read(options.results)}
    for instance in suite():
        if not instance.name.startswith(options.only):
            continue
        predictor_of_search: Predictor | None = None
        for solver, objective in wanted(instance):
            if options.solvers and solver not in options.solvers:
                continue
            identity = (instance.name, solver, objective, options.label)
            if identity in done:
                continue
            if predictor_of_search is None:
                name = options.predictor.format(model=instance.profile.split("/")[1])
                predictor_of_search = packer.load_predictor(name, packer.load_profile(instance.profile))
            row = run(instance, solver, objective, predictor_of_search, options)
            append(options.results, row)
            print(f"{row['instance']:36} {solver:14} {objective:8} {outcome(row)}", flush=True)


def wanted(instance: Instance) -> Iterator[tuple[str, str]]:
    """Solver and objective of each run of an instance."""
    for solver in COUNTING:
        yield solver, "gpus"
    if instance.adapters <= LATENCY_UP_TO:
        for solver in SPREADING:
            yield solver, "latency"


def run(
    instance: Instance, solver: str, objective: str, predictor_of_search: Predictor, options: argparse.Namespace
) -> dict[str, Any]:
    """One solver on one instance, as a row of the results."""
    fleet = instance.workload()
    profile = packer.load_profile(instance.profile)
    gpus = None
    if objective == "latency":
        # Half as many GPUs again as greedy needs: room to spread, but not without limit.
        gpus = math.ceil(1.5 * greedy_gpus(options.results, instance.name, options.label))
    row: dict[str, Any] = {
        "instance": instance.name,
        "profile": instance.profile,
        "fingerprint": profile.fingerprint,
        "adapters": len(fleet),
        "solver": solver,
        "objective": objective,
        "predictor": options.label,
        "machine": machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    started, cpu = time.perf_counter(), time.process_time()
    try:
        plan = solve(
            fleet,
            profile,
            objective=objective,
            solver=solver,
            predictor=predictor_of_search,
            max_gpus=gpus,
            time_limit_s=options.time_limit if solver == "auto" else None,
            verify=False,
        )
    except PackerError as error:
        return {**row, "status": "error", "reasons": [str(error)]}
    row |= {
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "status": str(plan.status),
        "gpus": plan.n_gpus,
        "allowed_gpus": gpus,
        "unplaced": len(plan.unplaced),
        "bound": plan.lower_bound,
        "bound_source": plan.bound_source,
        "details": {k: v for k, v in plan.details.items() if isinstance(v, (int, float, str, type(None)))},
        "reasons": list(plan.reasons[:3]),
    }
    return row | evaluated(plan) if plan.bins else row


def evaluated(plan: packer.Plan) -> dict[str, Any]:
    """What the twin says of the plan's bins (or of a seeded choice of them) with a fresh seed."""
    from packer.predictors.twin import TwinPredictor

    rng = np.random.default_rng(0)
    some = np.sort(rng.permutation(len(plan.bins))[:EVALUATED_BINS]).tolist()
    bins = [plan.bins[i] for i in some]
    found: Evaluations = TwinPredictor(seed=fresh(0)).evaluate(plan.workload, bins)
    row: dict[str, Any] = {
        "evaluated": len(bins),
        "starved": int((found.starved & ~found.memory_error).sum()),
        "memory_errors": int(found.memory_error.sum()),
    }
    if found.feasible.all():
        rates = np.array([each.rates(plan.workload).sum() for each in bins])
        row["twin_ttft_ms"] = float(np.average(found.mean_ttft_ms, weights=rates))
        row["twin_itl_ms"] = float(np.average(found.mean_itl_ms, weights=rates))
    return row


def greedy_gpus(path: Path, instance: str, predictor: str) -> int:
    """GPUs of greedy's plan, which stands in the results already."""
    for row in read(path):
        if key(row) == (instance, "greedy", "gpus", predictor) and row.get("gpus"):
            return int(row["gpus"])
    return 1


def read(path: Path) -> list[dict[str, Any]]:
    """Rows written so far; a last line that was cut off is dropped."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    """One line more, whole or not at all as far as the disk allows."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def key(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """What identifies a run."""
    return row["instance"], row["solver"], row["objective"], row["predictor"]


def outcome(row: dict[str, Any]) -> str:
    """A row in a few words."""
    if row["status"] == "error":
        return f"error: {row['reasons'][0]}"
    bound = "" if row["bound"] is None else f" bound {row['bound']:g}"
    bad = row.get("starved", 0) + row.get("memory_errors", 0)
    return f"{row['status']} {row['gpus']} GPUs{bound} {row['wall_s']:.2f} s, {bad}/{row.get('evaluated', 0)} fail"


def machine() -> str:
    """What ran this: processor, cores and Python, nothing that names a host."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
