"""Fit of the step law on the mean states that the twin itself goes through.

A token's mean gap is linear in the coefficients, given the mean of what they multiply over the steps that it saw.
Little's law gives these means only roughly (a threshold such as the largest CUDA graph is blind to a mean), the
twin exactly. So: simulate, solve for the coefficients on the simulated means, and again. Three rounds suffice; each
needs one simulation per run (and one of longer steps per run that keeps up), where a fit by differences needs one per
run and coefficient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from packer.arrays import FloatArray
from packer.fit.runs import simulate_run
from packer.fit.step_law import Equations, residuals, solve
from packer.fit.tables import MeasuredRun
from packer.profile import Profile
from packer.terms import LINEAR_TERMS
from packer.twin.law.law import coefficient_vector
from packer.twin.run import Run
from packer.twin.threads import in_threads

ROUNDS = 3
REWEIGHTINGS = 6
ROBUST_SCALE = 0.03
"""Relative residuals beyond it count linearly, not squared."""
SATURATED_BY_THROUGHPUT = 0.5
"""In a starved run, how much of the step time's error is read off the throughput instead of the TPOT."""
SLOWER = 1.03
"""Factor on all coefficients, at which a second simulation gives a run's gain."""
LARGEST_GAIN = 5.0
MICRO_SHARE = 0.25
"""Total weight of the micro-benchmarks' equations, where the runs' equations weigh 1."""
CLIENT_LAGS_REQ_S = 100.0
"""Offered load beyond which a client of one process falls behind: such runs weigh half."""


def gain_of(sim: Run, again: Run) -> float:
    """Percent of TPOT per percent of step time, from 1 to `LARGEST_GAIN`, of a run simulated again with `SLOWER` steps.

    A server that keeps up runs more requests at once where its steps take longer, so its TPOT grows faster than its
    steps: the more so, the nearer it is to its limit.
    """
    gain = np.log(again.mean_tpot_ms / sim.mean_tpot_ms) / np.log(SLOWER)
    return float(np.clip(np.nan_to_num(gain, nan=1.0), 1.0, LARGEST_GAIN))


def wanted_step_ms(run: MeasuredRun, sim: Run, step_ms: float, gain: float) -> float:
    """Mean step that would give the measured TPOT (and, of a starved run, throughput).

    `gain`: percent of TPOT per percent of step time (`gain_of`); not used for a starved run.
    """
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
    """One equation per run: simulated mean state, wanted mean step time (less loading); and the runs that give one.

    A run without a measured TPOT gives none. The k-th run is simulated with `seed` + k.
    """
    law = coefficient_vector(profile.latency)
    slower = profile.with_coefficients(**{t: SLOWER * v for t, v in profile.latency.coefficients.items()})

    def one(k: int) -> tuple[FloatArray, float, float, MeasuredRun] | None:
        run = runs[k]
        sim = simulate_run(run, profile, seed=seed + k, mean_state=True)
        done()
        measured = run.metrics.get("tpot_mean_ms") and np.isfinite(sim.mean_tpot_ms)
        if sim.status != "ok" or sim.raw.means[-1] <= 0 or not measured:
            return None
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
    """Weights by gain, 1 at the median and of starved runs (NaN): a TPOT determines steps better at a large gain.

    An error of the measured TPOT is 1 / gain of it in the wanted step; the square root leaves room for errors of the
    simulated queue, which grow with the gain.
    """
    known = gains[np.isfinite(gains)]
    if not len(known):
        return np.ones_like(gains)
    out: FloatArray = np.sqrt(np.nan_to_num(gains / np.median(known), nan=1.0))
    return out


def family_weights(runs: Sequence[MeasuredRun]) -> FloatArray:
    """Weights, mean 1, that give each family the square root of its size; half where the client lagged."""
    families = [run.family for run in runs]
    size = {family: families.count(family) for family in families}
    lagged = np.array([run.rates.sum() > CLIENT_LAGS_REQ_S for run in runs])
    weights = np.array([size[family] ** -0.25 for family in families]) * np.where(lagged, 0.5, 1.0)
    out: FloatArray = weights / weights.mean() if runs else weights
    return out


def solve_robustly(equations: Equations, terms: Sequence[str]) -> dict[str, float]:
    """`step_law.solve`, reweighted so that residuals beyond `ROBUST_SCALE` count linearly."""
    coefficients = solve(equations, terms)
    for _ in range(REWEIGHTINGS):
        error = np.maximum(np.abs(residuals(equations, coefficients)), ROBUST_SCALE)
        weights = equations.weights * np.sqrt(ROBUST_SCALE / error)
        coefficients = solve(replace(equations, weights=weights), terms)
    return coefficients


def fit_mean_state(
    profile: Profile, runs: Sequence[MeasuredRun], micro: Equations, terms: Sequence[str], *, seed: int,
    done: Callable[[], None] = lambda: None,
) -> Profile:  # fmt: skip
    """The profile with the coefficients of `terms` fitted to the runs, `ROUNDS` times over.

    `done` is called after each simulation.
    """
    for k in range(ROUNDS):
        together, kept = simulated_equations(profile, runs, seed=seed, done=done)
        if len(micro.step_ms):
            weight = np.sqrt(MICRO_SHARE * len(kept) / len(micro.step_ms))
            together += replace(micro, weights=micro.weights * weight)
        found = solve_robustly(together, terms)
        share = 1.0 if k == 0 else 0.6  # later rounds are damped: a queue's length reacts to its step time
        old = profile.latency.coefficients
        mixed = {term: (1 - share) * old.get(term, 0.0) + share * found[term] for term in terms}
        above = {term: value for term, value in mixed.items() if value > 0}
        profile = replace(profile, latency=replace(profile.latency, coefficients=above))
    return profile
