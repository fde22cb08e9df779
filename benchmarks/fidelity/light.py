"""TTFT of light runs with the front end of other families: `uv run python benchmarks/fidelity/light.py` (3 minutes).

What a streamed token, the first use of an adapter and a request cost is chosen on all families but one, as
`packer.fit.frontend_fit` does, and predicts the runs of that one; the same with tokens that cost nothing. Scrapes
and the step law are those of the shipped profile. Writes benchmarks/fidelity/light.json.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from h100 import MODELS, tables
from trials import measured_profile

from packer.fit.runs import simulate_run
from packer.io.files import write_text
from packer.testing.records import record_text
from packer.twin.scores import smape
from packer.twin.threads import in_threads

HERE = Path(__file__).parent
OUTPUT_MS = (0.0, 0.02, 0.03, 0.04, 0.05, 0.06)
FIRST_USE_MS = (200.0, 225.0, 250.0, 275.0, 300.0)


def of_model(model: str) -> dict[str, object]:
    """Errors of mean and median TTFT, and what was chosen, with and without a cost of streaming."""
    profile = measured_profile(model)
    runs = [run for run in tables(model)[1] if run.ok and run.regime == "light"]
    measured = np.array([[run.metrics[f"ttft_{name}_ms"] for name in ("mean", "median")] for run in runs])
    families = np.array([run.family for run in runs])
    predicted = {}
    for output_ms in OUTPUT_MS:
        for first_use_ms in FIRST_USE_MS:
            spec = replace(profile.frontend, output_ms=output_ms, first_use_ms=first_use_ms)
            server = replace(profile, frontend=spec)

            def simulated(k: int, server=server) -> tuple[float, float]:
                sim = simulate_run(runs[k], server, seed=k)
                return sim.mean_ttft_ms, sim.median_ttft_ms

            predicted[output_ms, first_use_ms] = np.array(list(in_threads(simulated, range(len(runs)), 2)))
    rows: dict[str, object] = {"runs": len(runs)}
    for name, allowed in (("tokens cost nothing", (0.0,)), ("tokens cost time", OUTPUT_MS)):
        left_out, chosen = np.zeros_like(measured), []
        for family in np.unique(families):
            seen, best = families != family, (np.inf, (0.0, 0.0), 0.0)
            for key, found in predicted.items():
                if key[0] in allowed:
                    request_ms = float(np.median(measured[seen, 1] - found[seen, 1]))
                    error = sum(_errors(found[seen] + request_ms, measured[seen]))
                    best = min(best, (error, key, request_ms))
            chosen.append(best[1])
            left_out[~seen] = predicted[best[1]][~seen] + best[2]
        mean, median = _errors(left_out, measured)
        rows[name] = {
            "mean": round(mean, 1), "median": round(median, 1),
            "output_ms": sorted({key[0] for key in chosen}), "first_use_ms": sorted({key[1] for key in chosen}),
        }  # fmt: skip
    return rows


def _errors(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """SMAPE of mean and median TTFT, (runs, 2) each."""
    mean, median = (smape(zip(predicted[:, k], measured[:, k], strict=True)) for k in (0, 1))
    return mean, median


def main() -> None:
    """Measure, print and write."""
    found = {model: of_model(model) for model in MODELS}
    print(record_text(found))
    write_text(HERE / "light.json", record_text(found) + "\n", force=True)


if __name__ == "__main__":
    main()
