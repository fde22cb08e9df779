"""Fit the step law on the mean states that the twin simulates.

The mean gap between tokens is linear in the coefficients, given the mean features over the steps that the tokens saw.
Little's law gives these means only roughly (a mean hides thresholds such as the largest CUDA graph); the twin gives
them exactly. The fit alternates: simulate, then solve for the coefficients on the simulated means. Three rounds
suffice. Each needs one simulation per run, and a second one with longer steps per run that keeps up; a fit by finite
differences would need one per run and coefficient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from packer.arrays import FloatArray
from packer.fit.runs import simulate_run
from packer.fit.step_law import Equations, Prior, residuals, solve
from packer.fit.tables import MeasuredRun
from packer.profile import Profile
from packer.terms import LINEAR_TERMS
from packer.twin.law.law import coefficient_vector
from packer.twin.run import Run
from packer.twin.threads import in_threads

ROUNDS = 3
REWEIGHTINGS = 6
ROBUST_SCALE = 0.03  # Relative residual beyond which errors count linearly, not squared.
SATURATED_BY_THROUGHPUT = 0.5  # Weight of the throughput, against the TPOT, in the error of a starved run's step time.
SLOWER = 1.03  # Factor on all coefficients in the second simulation of a run, which gives its gain.
LARGEST_GAIN = 5.0
MICRO_SHARE = 0.25  # Total weight of the micro-benchmarks' equations, where the runs' equations weigh 1.
CLIENT_LAGS_REQ_S = 100.0  # Offered load beyond which a client of one process falls behind: such runs weigh half.


def gain_of(sim: Run, again: Run) -> float:
    """Return the gain of a run: percent of TPOT per percent of step time, clipped to 1 to `LARGEST_GAIN`.

    `again`: the run with steps `SLOWER` times as long. On a server that keeps up, longer steps mean more concurrent
    requests, so TPOT grows faster than step time; the effect is larger the nearer the server is to its limit.
    """
    gain = np.log(again.mean_tpot_ms / sim.mean_tpot_ms) / np.log(SLOWER)
    return float(np.clip(np.nan_to_num(gain, nan=1.0), 1.0, LARGEST_GAIN))


def wanted_step_ms(run: MeasuredRun, sim: Run, step_ms: float, gain: float) -> float:
    """Return the mean step time that would give the measured TPOT and, for a starved run, throughput. `gain`: percent
    of TPOT per percent of step time (`gain_of`); not used for a starved run."""
    factor = run.metrics["tpot_mean_ms"] / sim.mean_tpot_ms
    if run.starved and sim.total_token_throughput > 0:
        by_throughput = sim.total_token_throughput / run.metrics["total_tok_s"]
        factor = factor ** (1 - SATURATED_BY_THROUGHPUT) * by_throughput**SATURATED_BY_THROUGHPUT
    elif not run.starved:
        factor = factor ** (1 / gain)
    return step_ms * float(np.clip(factor, 0.5, 2.0))


def simulated_equations(
    profile: Profile, runs: Sequence[MeasuredRun], *, seed: int = 0, done: Callable[[], None] = lambda: None
) -> tuple[Equations, list[MeasuredRun]]:
    """Return one equation per run, of simulated mean state and wanted mean step time less loading, and the runs used.
    Runs without a measured TPOT are left out. The k-th run is simulated with `seed` + k."""
    law = coefficient_vector(profile.latency)
    slower = profile.with_coefficients(**{t: SLOWER * v for t, v in profile.latency.coefficients.items()})

    def one(k: int) -> tuple[FloatArray, float, float, MeasuredRun] | None:
        run = runs[k]
        sim = simulate_run(run, profile, seed=seed + k, mean_state=True)
        done()
        measured = run.metrics.get("tpot_mean_ms") and np.isfinite(sim.mean_tpot_ms)
        if sim.status != "ok" or sim.raw.means[-1] <= 0 or not measured:
            return None
        # The last two sums are those of the step times and of the tokens that saw the steps.
        means = sim.raw.means[:-2] / sim.raw.means[-1]
        step_ms = float(sim.raw.means[-2] / sim.raw.means[-1])
        gain = np.nan
        if not run.starved:
            gain = gain_of(sim, simulate_run(run, slower, seed=seed + k))
        wanted = wanted_step_ms(run, sim, step_ms, gain)
        loading_ms = step_ms - float(means @ law)
        return means, max(wanted - loading_ms, 0.1 * wanted), gain, run

    rows = [row for row in in_threads(one, range(len(runs))) if row is not None]
    features = np.array([row[0] for row in rows]).reshape(-1, len(LINEAR_TERMS))
    kept = [row[3] for row in rows]
    weights = family_weights(kept) * gain_weights(np.array([row[2] for row in rows]))
    return Equations(features, np.array([row[1] for row in rows]), weights), kept


def gain_weights(gains: FloatArray) -> FloatArray:
    """Return the weights √(gain / median gain); 1 for starved runs, whose gain is NaN. An error of the measured TPOT
    becomes an error 1 / gain as large in the wanted step. The square root allows for errors of the simulated queue,
    which grow with the gain."""
    known = gains[np.isfinite(gains)]
    if not len(known):
        return np.ones_like(gains)
    return np.sqrt(np.nan_to_num(gains / np.median(known), nan=1.0))


def family_weights(runs: Sequence[MeasuredRun]) -> FloatArray:
    """Return weights of mean 1; a family counts by the square root of its size, runs with a lagging client by half."""
    families = [run.family for run in runs]
    size = {family: families.count(family) for family in families}
    lagged = np.array([run.rates.sum() > CLIENT_LAGS_REQ_S for run in runs])
    # Least squares squares the weights: size × (size ** -0.25)² is the square root of the size.
    weights = np.array([size[family] ** -0.25 for family in families]) * np.where(lagged, 0.5, 1.0)
    return weights / weights.mean() if runs else weights


def solve_robustly(equations: Equations, terms: Sequence[str], prior: Prior | None = None) -> dict[str, float]:
    """`step_law.solve`, reweighted so that residuals beyond `ROBUST_SCALE` count linearly."""
    coefficients = solve(equations, terms, prior)
    for _ in range(REWEIGHTINGS):
        error = np.maximum(np.abs(residuals(equations, coefficients)), ROBUST_SCALE)
        # The weight is squared as well: error² × scale / error grows linearly.
        weights = equations.weights * np.sqrt(ROBUST_SCALE / error)
        coefficients = solve(replace(equations, weights=weights), terms, prior)
    return coefficients


def fit_mean_state(
    profile: Profile, runs: Sequence[MeasuredRun], micro: Equations, terms: Sequence[str], *, seed: int,
    prior: Prior | None = None, done: Callable[[], None] = lambda: None,
) -> Profile:  # fmt: skip
    """Return the profile with the coefficients of `terms` fitted to the runs in `ROUNDS` rounds. `prior`: for what the
    equations leave open. `done`: called after simulations."""
    for k in range(ROUNDS):
        together, kept = simulated_equations(profile, runs, seed=seed, done=done)
        if len(micro.step_ms):
            weight = np.sqrt(MICRO_SHARE * len(kept) / len(micro.step_ms))
            together += replace(micro, weights=micro.weights * weight)
        found = solve_robustly(together, terms, prior)
        share = 1.0 if k == 0 else 0.6  # later rounds are damped: a queue's length reacts to its step time
        old = profile.latency.coefficients
        mixed = {term: (1 - share) * old.get(term, 0.0) + share * found[term] for term in terms}
        above = {term: value for term, value in mixed.items() if value > 0}
        profile = replace(profile, latency=replace(profile.latency, coefficients=above))
    return profile
