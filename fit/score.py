"""Errors of the twin on measured runs by regime, and the capacity margins that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from packer.fit.runs import simulate_run
from packer.fit.tables import MeasuredRun
from packer.profile import Profile
from packer.twin.margin import QUANTILES, error_key
from packer.twin.memory.policy import memory_error
from packer.twin.scores import macro_f1, smape
from packer.twin.threads import in_threads

METRICS = {
    "throughput": ("total_tok_s", "total_token_throughput"),
    "tpot": ("tpot_mean_ms", "mean_tpot_ms"),
    "itl": ("itl_mean_ms", "mean_itl_ms"),
    "ttft": ("ttft_mean_ms", "mean_ttft_ms"),
    "ttft_median": ("ttft_median_ms", "median_ttft_ms"),
}
"""Metric → (column of a run, attribute of a simulation)."""
REGIMES = ("all", "light", "queueing", "starved", "queueing+starved")


@dataclass(frozen=True, eq=False)
class ScoredRun:
    """A run and the twin's prediction; `predicted` is empty if the server does not start, in the twin or in reality."""

    run: MeasuredRun
    memory_error: bool
    starved: bool
    predicted: dict[str, float]


def score_runs(
    runs: Sequence[MeasuredRun], profile: Profile, *, seed: int = 0, done: Callable[[], None] = lambda: None
) -> list[ScoredRun]:
    """Simulate each run from its rates and length statistics."""

    def one(run: MeasuredRun) -> ScoredRun:
        refused = memory_error(profile, profile.settings(run.max_loras, run.max_lora_rank)) is not None
        if refused or not run.ok:
            done()
            return ScoredRun(run, refused, False, {})
        sim = simulate_run(run, profile, seed=seed)
        done()
        predicted = {name: float(getattr(sim, attribute)) for name, (_, attribute) in METRICS.items()}
        return ScoredRun(run, False, sim.starved, predicted)

    return list(in_threads(one, runs))


def regime_errors(scored: Sequence[ScoredRun], regime: str) -> dict[str, float]:
    """SMAPE of each metric over the runs of a regime ("queueing+starved" joins two), and their number `n`."""
    started = (j for j in scored if j.predicted and j.run.ok)
    chosen = [j for j in started if regime == "all" or j.run.regime in regime.split("+")]
    errors: dict[str, float] = {"n": len(chosen)}
    for name, (column, _) in METRICS.items():
        pairs = [(j.predicted[name], j.run.metrics[column]) for j in chosen if column in j.run.metrics]
        errors[name] = smape((p, a) for p, a in pairs if math.isfinite(p))
    return errors


def summary(scored: Sequence[ScoredRun]) -> dict[str, float]:
    """Return `Profile.errors`: errors of metrics and of predicted outcomes, and capacity margins."""
    everything = regime_errors(scored, "all")
    queued, light = regime_errors(scored, "queueing+starved"), regime_errors(scored, "light")
    started = [j for j in scored if j.predicted and j.run.ok]
    found = {
        **{f"{name}_smape": everything[name] for name in ("throughput", "tpot", "itl")},
        "ttft_queued_smape": queued["ttft"],
        "ttft_median_light_smape": light["ttft_median"],
        "starvation_macro_f1": macro_f1([(j.starved, j.run.starved) for j in started]),
        "memory_verdicts_wrong": float(sum(j.memory_error != (not j.run.ok) for j in scored)),
        "runs": float(len(scored)),
    }
    both = (j for j in started if j.run.starved and j.starved)
    over = [j.predicted["throughput"] / j.run.metrics["total_tok_s"] - 1.0 for j in both]
    if len(over) >= 10:  # how much the twin overestimates the throughput of starved (saturated) runs
        found |= {error_key(q): float(np.quantile(over, q)) for q in QUANTILES}
    return {key: round(value, 4) for key, value in found.items() if math.isfinite(value)}
