"""What the mean TTFT of light runs lacks: `uv run python benchmarks/fidelity/light.py` (half a minute).

Each candidate is one feature of a run's measured polls of /metrics (polls.csv: duration T and running requests N by
sixths of the hour, two seconds between polls) or of the run; least squares of the relative residual give its
coefficient, the error with it is in-sample. Writes benchmarks/fidelity/light.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from h100 import DATA, MAX_OUTSTANDING, MODELS, SCRAPE_INTERVAL_S, tables
from trials import measured_profile

from packer.io.files import write_text
from packer.twin.fit.runs import simulate_run
from packer.twin.fit.tables import Run, read_rows
from packer.twin.scores import smape

HERE = Path(__file__).parent
SEEDS = 2


def features(run: Run, row: dict[str, str]) -> dict[str, float]:
    """Candidates, each in ms of mean TTFT for a coefficient of 1."""
    poll_s, running = (
        np.array([float(row[f"{name}_{k}"]) for k in range(1, 7)]) for name in ("poll_s", "running")
    )
    stalled = poll_s / (SCRAPE_INTERVAL_S + poll_s)
    return {
        "polls take longer: half of T for who arrives in them": float(500 * np.mean(stalled * poll_s)),
        "who arrives in a poll waits for each running request": float(np.mean(stalled * running)),
        "each running request, poll or not": run.metrics["mean_num_running"],
        "each adapter": float(len(run.rates)),
    }


def main() -> None:
    """Measure, print and write."""
    polls = {row["run_id"]: row for row in read_rows(DATA / "polls.csv", ("run_id", "poll_s_1", "running_1"))}
    found: dict[str, object] = {}
    for model in MODELS:
        profile = measured_profile(model)
        runs = [
            run
            for run in tables(model)[1]
            if run.ok and run.regime == "light" and run.metrics["mean_num_waiting"] < 0.5
        ]
        measured = np.array([run.metrics["ttft_mean_ms"] for run in runs])
        twin = np.array(
            [
                np.mean(
                    [
                        simulate_run(run, profile, seed=seed, max_outstanding=MAX_OUTSTANDING).mean_ttft_ms
                        for seed in range(SEEDS)
                    ]
                )
                for run in runs
            ]
        )
        table = [features(run, polls[run.run_id]) for run in runs]
        rows: dict[str, dict[str, float]] = {
            "the twin": {"error": round(smape(zip(twin, measured, strict=True)), 1)}
        }
        for name in table[0]:
            column = np.array([row[name] for row in table])
            relative = column / measured
            coefficient = float(relative @ ((measured - twin) / measured) / (relative @ relative))
            error = smape(zip(twin + coefficient * column, measured, strict=True))
            rows[name] = {"coefficient": round(coefficient, 3), "error": round(error, 1)}
        found[model] = {"runs": len(runs), **rows}
    print(json.dumps(found, indent=1))
    write_text(HERE / "light.json", json.dumps(found, indent=1) + "\n", force=True)


if __name__ == "__main__":
    main()
