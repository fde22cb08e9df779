"""Fit the costs of the front end: scrapes of /metrics, requests, first uses of adapters, and output tokens.

The duration of a scrape is linear in the series and names that the twin counts at that time. The other costs are
fitted to the TTFT of light runs, in which hardly anything else is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.fit.runs import simulate_run, stratified
from packer.fit.step_law import non_negative
from packer.fit.tables import MeasuredRun
from packer.profile import FrontEndSpec, Profile
from packer.twin.run import Run
from packer.twin.scores import smape
from packer.twin.threads import in_threads

RUNS = 48
SEED = 2000
LATE = 11 / 12  # Middle of the last sixth of a run, in which `scrape_s` is measured, as a share of the run's duration.
FASTEST_CLIENT_REQ_S = 16.0  # Offered load above which the durations that a client measures include its own backlog.
TRIED = (
    ("first_use_ms", (0.0, 50.0, 100.0, 150.0, 200.0, 225.0, 250.0, 275.0, 300.0, 350.0)),
    ("output_ms", (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08)),
)
"""Values tried for each parameter in turn, then for the first one again, because their effects are not linear."""


def fit_frontend(profile: Profile, runs: Sequence[MeasuredRun]) -> FrontEndSpec:
    """Fit the front end of a profile, whose `scrape_interval_s` must be the interval of the runs. Starved runs are not
    used. Scrape costs are fitted to runs with the metric `scrape_s`, the mean duration of a scrape in the last sixth of
    the run; the other costs are fitted to light runs."""
    kept_up = [run for run in runs if run.ok and not run.starved]
    polled = [run for run in kept_up if "scrape_s" in run.metrics and run.rates.sum() < FASTEST_CLIENT_REQ_S]
    chosen = stratified(polled, RUNS, SEED)
    light = stratified([run for run in kept_up if run.regime == "light"], RUNS, SEED)

    def simulated(some: Sequence[MeasuredRun], frontend: FrontEndSpec) -> list[Run]:
        server = replace(profile, frontend=frontend)
        return list(in_threads(lambda k: simulate_run(some[k], server, seed=SEED + k), range(len(some))))

    spec = FrontEndSpec(scrape_interval_s=profile.frontend.scrape_interval_s)
    early = [replace(run, duration_s=LATE * run.duration_s) for run in chosen]
    spec = replace(spec, **_scrape_costs(simulated(early, spec), [run.metrics["scrape_s"] for run in chosen]))
    if not light:
        return spec
    median, mean = (np.array([run.metrics[f"ttft_{key}_ms"] for run in light]) for key in ("median", "mean"))

    def tried(frontend: FrontEndSpec) -> tuple[float, FrontEndSpec]:
        """Fit `request_ms` to the median TTFTs; return the error of mean and median TTFT, and the front end."""
        sims = simulated(light, frontend)
        medians = np.array([sim.median_ttft_ms for sim in sims])
        means = np.array([sim.mean_ttft_ms for sim in sims])
        request_ms = max(frontend.request_ms + float(np.median(median - medians)), 0.0)
        more_ms = request_ms - frontend.request_ms
        pairs = ((means + more_ms, mean), (medians + more_ms, median))
        error = sum(smape(zip(*pair, strict=True)) for pair in pairs)
        return error, replace(frontend, request_ms=round(request_ms, 2))

    for name, values in (*TRIED, TRIED[0]):
        spec = min((tried(replace(spec, **{name: value})) for value in values), key=lambda pair: pair[0])[1]
    return spec


def _scrape_costs(sims: Sequence[Run], measured_s: Sequence[float]) -> dict[str, float]:
    """Fit the costs of scrapes by non-negative least squares of the relative errors of their durations."""
    measured = np.array(measured_s) * 1e3
    design = np.array([[1.0, sim.metric_series, sim.metric_names] for sim in sims]) / measured[:, None]
    found = non_negative(design, np.ones(len(measured)))
    names = ("scrape_base_ms", "scrape_per_series_ms", "scrape_per_name_ms")
    return {name: float(f"{value:.4g}") for name, value in zip(names, found, strict=True)}
