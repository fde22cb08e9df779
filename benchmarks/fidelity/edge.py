"""Mean TTFT of queueing runs by their distance from the edge: `uv run python benchmarks/fidelity/edge.py` (2 minutes).

A run is near the edge where steps that take 1 % longer change its mean TTFT by more than 10 % (mean of two seeds).
Errors are those of families left out of the fit (held_out.json, from fit_h100.py); the floor is the error of the twin
with one of six seeds against another. Starvation: how many of these runs, and of the starved ones that completed at
least 0.86 of their load, starve with all seeds, with some and with none, and in the measurement. Writes
benchmarks/fidelity/edge.json.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from h100 import MODELS, tables
from trials import measured_profile

from packer.fit.runs import simulate_run
from packer.fit.tables import MeasuredRun
from packer.io.files import write_text
from packer.profile import Profile
from packer.testing.records import record_text
from packer.twin.run import Run
from packer.twin.scores import smape

HERE = Path(__file__).parent
SEEDS = 6
SLOWER = 1.01
NEAR = 0.10
NEARLY_SERVED = 0.86


def of_model(model: str) -> dict[str, dict[str, float]]:
    """Runs, errors, floor and bias of both groups; starvation by the seeds that agree on it."""
    scored = json.loads((HERE / "held_out.json").read_text())[model]["held_out"]["runs"]
    predicted = {row["run_id"]: row["predicted"] for row in scored}
    profile = measured_profile(model)
    law = profile.latency.coefficients
    slower = profile.with_coefficients(**{name: value * SLOWER for name, value in law.items()})
    rows, starved = [], {name: {"runs": 0, "measured_starved": 0} for name in ("none", "some", "all")}
    for run in tables(model)[1]:
        if not run.ok or not predicted[run.run_id] or run.regime == "light":
            continue
        if run.starved and run.metrics["total_tok_s"] < NEARLY_SERVED * run.offered_tok_s:
            continue
        sims = [_simulated(run, profile, seed) for seed in range(SEEDS)]
        count = sum(sim.starved for sim in sims)
        group = starved["none" if count == 0 else "all" if count == SEEDS else "some"]
        group["runs"] += 1
        group["measured_starved"] += run.starved
        if run.starved:
            continue
        seeds = [sim.mean_ttft_ms for sim in sims]
        change = np.mean([abs(_simulated(run, slower, k).mean_ttft_ms / seeds[k] - 1.0) for k in (0, 1)])
        found, measured = predicted[run.run_id]["ttft"], run.metrics["ttft_mean_ms"]
        rows.append((change, smape([(found, measured)]), smape(combinations(seeds, 2)), found < measured))
    table = np.array(rows, dtype=np.float64)
    groups = {"near the edge": table[:, 0] > NEAR, "others": table[:, 0] <= NEAR}
    return {
        name: {
            "runs": int(chosen.sum()),
            "error": round(float(table[chosen, 1].mean()), 1),
            "floor": round(float(table[chosen, 2].mean()), 1),
            "too_low": int(table[chosen, 3].sum()),
            "change_percent_median": round(100 * float(np.median(table[chosen, 0])), 1),
        }
        for name, chosen in groups.items()
    } | {f"starved with {name} of {SEEDS} seeds": group for name, group in starved.items()}


def _simulated(run: MeasuredRun, profile: Profile, seed: int) -> Run:
    return simulate_run(run, profile, seed=seed)


def sent_against_nominal() -> dict[str, float]:
    """How many more requests than the nominal rate the workloads of runs that kept up got, in standard deviations."""
    excess: dict[tuple[str, int], list[float]] = {}
    for model in MODELS:
        for run in tables(model)[1]:
            if run.ok and not run.starved and run.rates.sum() <= 30.0:
                nominal = run.rates.sum() * run.duration_s
                got = run.metrics["request_throughput"] * run.duration_s + run.metrics["mean_num_waiting"]
                got += run.metrics["mean_num_running"]  # in flight at the end, as far as the means tell
                excess.setdefault((run.family, len(run.rates)), []).append((got - nominal) / math.sqrt(nominal))
    medians = np.array([np.median(values) for values in excess.values()])
    return {
        "workloads": len(medians),
        "above_nominal": int((medians > 0).sum()),
        "median_standard_deviations": round(float(np.median(medians)), 2),
    }


def main() -> None:
    """Measure, print and write."""
    found = {model: of_model(model) for model in MODELS} | {"sent": sent_against_nominal()}
    print(record_text(found))
    write_text(HERE / "edge.json", record_text(found) + "\n", force=True)


if __name__ == "__main__":
    main()
