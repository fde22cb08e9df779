"""Fit the shipped H100 profiles: `uv run python benchmarks/fidelity/fit_h100.py` (about 12 minutes on 2 cores).

Reads ../shared/data/h100, writes twin/profiles/h100-64gb/*.toml and the scored runs behind the errors to
benchmarks/fidelity/held_out.json, from which report.py makes docs/fidelity.md. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from h100 import DATA, MODELS, PROFILES, base_profile, tables

from packer.fit import score
from packer.fit.pipeline import Calibration, calibrate, with_provenance
from packer.fit.score import REGIMES, ScoredRun, regime_errors
from packer.fit.tables import MeasuredRun
from packer.io.files import write_text
from packer.io.profiles import write_profile
from packer.profile import Profile
from packer.testing.records import record_text
from packer.twin.scores import macro_f1, smape

HERE = Path(__file__).parent
SEEDS = (0, 1, 2, 3)
"""Of the held-out errors; those in the profile are of the first."""
PROVENANCE = {
    "method": "packer profiles fit on micro-benchmarks and runs; errors on families of runs left out of the fit",
    "measured_by": "FerranAgulloLopez/GPULLMAdapterOptimization (Apache-2.0), public results of arXiv 2508.08343",
    "measured_on": "vLLM 0.8.5 era, V1 engine, one NVIDIA H100 with 64 GB, 3600 s a run, ShareGPT requests",
}


def _rows(scored: tuple[ScoredRun, ...]) -> list[dict[str, object]]:
    return [
        {
            "run_id": j.run.run_id, "family": j.run.family, "regime": j.run.regime if j.run.ok else j.run.status,
            "memory_error": j.memory_error, "starved": j.starved, "measured_starved": j.run.ok and j.run.starved,
            "predicted": {k: round(v, 4) for k, v in j.predicted.items()},
        }
        for j in scored
    ]  # fmt: skip


def _tables(scored: tuple[ScoredRun, ...]) -> dict[str, dict[str, float]]:
    return {regime: regime_errors(scored, regime) for regime in REGIMES}


def _again(result: Calibration, seed: int) -> tuple[ScoredRun, ...]:
    """The held-out runs simulated once more, with another seed."""
    found: list[ScoredRun] = []
    for family, profile in result.others.items():
        chosen = [j.run for j in result.held_out if j.run.family == family]
        found += score.score_runs(chosen, profile, seed=seed)
    return tuple(found)


def _held_out(result: Calibration) -> dict[str, object]:
    """Errors on families left out, means over `SEEDS`; outcomes by seed; the runs of the first seed."""
    scored = [result.held_out, *(_again(result, seed) for seed in SEEDS[1:])]
    regimes, summaries = [_tables(each) for each in scored], [score.summary(each) for each in scored]
    return {
        "summary": _means(summaries),
        "by_seed": summaries,
        "regimes": _means_of_tables(regimes),
        "runs": _rows(result.held_out),
    }


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def _floor(profile: Profile, runs: list[MeasuredRun]) -> dict[str, dict[str, float]]:
    """Errors of the twin with one seed against itself with another, means over pairs of `SEEDS`: what chance takes.

    SMAPE by regime and metric; of all runs also the macro F1 of starvation.
    """
    scored = [score.score_runs(runs, profile, seed=seed) for seed in SEEDS]
    return _means_of_tables([_between(one, other) for one, other in combinations(scored, 2)])


def _between(one: Sequence[ScoredRun], other: Sequence[ScoredRun]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for regime in REGIMES:
        pairs = [
            (a, b) for a, b in zip(one, other, strict=True)
            if a.predicted and b.predicted and (regime == "all" or a.run.regime in regime.split("+"))
        ]  # fmt: skip
        found[regime] = {
            name: smape((a.predicted[name], b.predicted[name]) for a, b in pairs) for name in score.METRICS
        }
        if regime == "all":
            found[regime]["starvation_macro_f1"] = macro_f1([(a.starved, b.starved) for a, b in pairs])
    return found


def _means_of_tables(tables: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {regime: _means([table[regime] for table in tables]) for regime in REGIMES}


def main() -> None:
    """Fit both models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    data = parser.parse_args().data
    found = {}
    for model in MODELS:
        profiling, runs = tables(model, data)
        result = calibrate(base_profile(model), profiling, runs)
        # Nobody else polls every two seconds: the costs stay in the profile, the interval doesn't.
        frontend = replace(result.profile.frontend, scrape_interval_s=None)
        write_profile(
            with_provenance(replace(result.profile, frontend=frontend), **PROVENANCE),
            PROFILES / f"{model}.toml",
            force=True,
        )
        found[model] = {
            "held_out": _held_out(result),
            "micro": {
                "summary": dict(result.micro_profile.errors),
                "regimes": _tables(result.micro),
                "coefficients": dict(result.micro_profile.latency.coefficients),
            },
            "floor": _floor(result.profile, runs),
        }
        print(result.profile.frontend, result.profile.provenance, flush=True)
        print(model, json.dumps(found[model]["held_out"]["summary"]))
    write_text(HERE / "held_out.json", record_text(found) + "\n", force=True)


if __name__ == "__main__":
    main()
