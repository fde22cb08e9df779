"""Variants of the fit on families left out of it: `uv run python benchmarks/fidelity/left_out.py` (5 minutes).

Each family is predicted by a law that is solved on all runs of the others, on the mean states of the shipped one; two
seeds. Variants: requests as many as were really sent, in the fit and in the prediction; the error of a run's step
taken from its TPOT by the median gain of the runs instead of the run's own; lengths of at most 1,024 tokens, with the
same means, spreads and KV tokens per running request. Writes benchmarks/fidelity/left_out.json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from h100 import DATA, MAX_OUTSTANDING, MODELS, tables
from trials import clipped, measured_profile

from packer.fit import score, step_law
from packer.fit.lengths_fit import fit_correlation
from packer.fit.mean_state import (
    CLIENT_LAGS_REQ_S,
    SLOWER,
    family_weights,
    gain_of,
    gain_weights,
    solve_robustly,
    wanted_step_ms,
)
from packer.fit.pipeline import SEED, TERMS
from packer.fit.runs import fleet_of
from packer.fit.tables import MeasuredRun, read_rows
from packer.io.files import write_text
from packer.profile import Profile
from packer.testing.records import record_text
from packer.twin.law.law import coefficient_vector
from packer.twin.run import Run
from packer.twin.scores import macro_f1, smape
from packer.twin.simulate import simulate

HERE = Path(__file__).parent
SEEDS = (0, 1)
MEDIAN_GAIN = 1.6  # of the runs that keep up
MANY_WAIT = 600
"""Requests: with more waiting on average, the slots and not the steps are what most of them wait for."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Variant:
    """What differs from the shipped fit."""

    name: str
    sent: bool = False
    one_gain: bool = False
    clipped: bool = False


VARIANTS = (
    Variant("as shipped"),
    Variant("requests as many as were sent", sent=True),
    Variant("the median gain for all runs", one_gain=True),
    Variant("lengths of at most 1,024 tokens", clipped=True),
)


def simulated(run: MeasuredRun, profile: Profile, variant: Variant, seed: int, *, states: bool = False) -> Run:
    """The twin of a run."""
    fleet = fleet_of(replace(run, rates=run.rates * run.metrics["sent"]) if variant.sent else run)
    return simulate(
        clipped(fleet) if variant.clipped else fleet, profile, max_loras=run.max_loras,
        max_lora_rank=run.max_lora_rank, duration_s=run.duration_s, seed=seed, max_outstanding=MAX_OUTSTANDING,
        mean_state=states,
    )  # fmt: skip


def equations(
    profile: Profile, runs: Sequence[MeasuredRun], variant: Variant
) -> tuple[step_law.Equations, list[MeasuredRun]]:
    """As `packer.fit.mean_state.simulated_equations`, of a variant."""
    law = coefficient_vector(profile.latency)
    slower = profile.with_coefficients(**{name: value * SLOWER for name, value in profile.latency.coefficients.items()})
    features, times, gains, kept = [], [], [], []
    for k, run in enumerate(runs):
        sim = simulated(run, profile, variant, SEED + k, states=True)
        if sim.status != "ok" or sim.raw.means[-1] <= 0 or not run.metrics.get("tpot_mean_ms"):
            continue
        mean, step_ms = sim.raw.means[:-2] / sim.raw.means[-1], float(sim.raw.means[-2] / sim.raw.means[-1])
        gain = MEDIAN_GAIN
        if not (run.starved or variant.one_gain):
            gain = gain_of(sim, simulated(run, slower, variant, SEED + k))
        wanted = wanted_step_ms(run, sim, step_ms, gain)
        features.append(mean)
        times.append(max(wanted - step_ms + float(mean @ law), 0.1 * wanted))
        gains.append(np.nan if run.starved else gain)
        kept.append(run)
    weights = family_weights(kept) * gain_weights(np.array(gains))
    return step_law.Equations(np.array(features), np.array(times), weights), kept


def laws(
    model: str, profile: Profile, found: step_law.Equations, kept: Sequence[MeasuredRun]
) -> tuple[dict[str, Profile], np.ndarray]:
    """The profile for each family, fitted on the others; relative errors of the steps of runs left out."""
    micro = step_law.micro_equations(tables(model)[0], profile.engine, profile.latency)
    families = np.array([run.family for run in kept])
    others, errors = {}, np.zeros(len(kept))
    for family in np.unique(families):
        seen = families != family
        weight = np.sqrt(0.25 * seen.sum() / len(micro.step_ms))
        coefficients = solve_robustly(_rows(found, seen) + replace(micro, weights=micro.weights * weight), TERMS)
        others[family] = profile.with_coefficients(**coefficients)
        errors[~seen] = step_law.residuals(_rows(found, ~seen), coefficients)
    return others, errors


def _rows(found: step_law.Equations, rows: np.ndarray) -> step_law.Equations:
    return step_law.Equations(found.features[rows], found.step_ms[rows], found.weights[rows])


def of_variant(model: str, variant: Variant) -> dict[str, object]:
    """Errors of a variant, percent: of steps, by regime, and of the mean TTFT of queueing runs by how many wait."""
    profile = measured_profile(model)
    runs = [_with_sent(run) for run in tables(model)[1] if run.ok]
    correlation = fit_correlation(runs, profile) or runs[0].length_correlation
    runs = [replace(run, length_correlation=correlation) for run in runs]
    others, steps = laws(model, profile, *(pair := equations(profile, runs, variant)))
    sims = [(run, _figures(simulated(run, others[run.family], variant, seed))) for run in runs for seed in SEEDS]
    large = [
        e for e, run in zip(steps, pair[1], strict=True) if not run.starved and 400 <= run.metrics["running"] < 600
    ]
    rows: dict[str, object] = {
        "step": round(100 * float(np.abs(steps).mean()), 2),
        "step of 400 to 600 requests, signed": [round(100 * float(np.mean(large)), 1), len(large)],
        "F1": round(macro_f1([(bool(sim["starved"]), run.starved) for run, sim in sims]), 4),
    }
    for regime in ("light", "queueing", "starved"):
        chosen = [(run, sim) for run, sim in sims if run.regime == regime]
        rows[regime] = {name: round(_error(chosen, name), 2) for name in ("throughput", "tpot", "itl", "ttft")}
    queueing = [(run, sim) for run, sim in sims if run.regime == "queueing"]
    for name, some in (
        ("few wait", [(run, sim) for run, sim in queueing if run.metrics["waiting"] < MANY_WAIT]),
        ("many wait", [(run, sim) for run, sim in queueing if run.metrics["waiting"] >= MANY_WAIT]),
    ):
        logs = [math.log(sim["mean_ttft_ms"] / run.metrics["ttft_mean_ms"]) for run, sim in some]
        bias = round(100 * float(np.median(logs)), 1)
        rows[name] = {"runs": len(some) // 2, "ttft": round(_error(some, "ttft"), 1), "bias": bias}
    rows["TTFT of queueing runs, standard error"] = round(_standard_error(queueing), 1)
    return rows


Figures = dict[str, float]


def _figures(sim: Run) -> Figures:
    """What is scored of a simulation: its requests take megabytes."""
    names = [attribute for _, attribute in score.METRICS.values()]
    return {name: float(getattr(sim, name)) for name in [*names, "starved"]}


def _error(some: Sequence[tuple[MeasuredRun, Figures]], name: str) -> float:
    column, attribute = score.METRICS[name]
    return smape((sim[attribute], run.metrics[column]) for run, sim in some)


def _standard_error(some: Sequence[tuple[MeasuredRun, Figures]]) -> float:
    """Of the mean TTFT's error, by drawing the runs anew."""
    by_run: dict[str, list[float]] = {}
    for run, sim in some:
        by_run.setdefault(run.run_id, []).append(smape([(sim["mean_ttft_ms"], run.metrics["ttft_mean_ms"])]))
    errors = np.array([np.mean(values) for values in by_run.values()])
    drawn = np.random.default_rng(0).choice(errors, (RESAMPLES, len(errors)))
    return float(drawn.mean(axis=1).std())


COUNTS = {
    row.cells["run_id"]: row.cells
    for row in read_rows(DATA / "runs.csv", ("run_id", "completed", "end_num_running", "end_num_waiting"))
}


def _with_sent(run: MeasuredRun) -> MeasuredRun:
    """The run with its mean running and waiting requests, and the requests sent over those of its nominal rates."""
    row = COUNTS[run.run_id]
    got = sum(float(row[name] or 0) for name in ("completed", "end_num_running", "end_num_waiting"))
    sent = got / (run.rates.sum() * run.duration_s)
    if run.rates.sum() > CLIENT_LAGS_REQ_S or not 0.9 < sent < 1.1:
        sent = 1.0
    state = {"running": float(row["mean_num_running"] or 0), "waiting": float(row["mean_num_waiting"] or 0)}
    return replace(run, metrics={**run.metrics, **state, "sent": sent})


def main() -> None:
    """Measure, print and write; models as arguments renew these alone."""
    path = HERE / "left_out.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for model in [name for name in MODELS if not sys.argv[1:] or name in sys.argv[1:]]:
        found[model] = {variant.name: of_variant(model, variant) for variant in VARIANTS}
        print(model, record_text(found[model]), flush=True)
        write_text(path, record_text(found) + "\n", force=True)


if __name__ == "__main__":
    main()
