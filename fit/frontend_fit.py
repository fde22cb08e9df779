"""Fit of the front end: what /metrics costs, what requests, their first uses of adapters and their tokens cost.

The duration of a scrape is linear in the series and names that the twin counts by then; the rest is read off the
TTFT of light runs, where hardly anything else is unknown.
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
LATE = 11 / 12
"""Part of a run after which its last scrapes lie: the middle of the last sixth."""
FASTEST_CLIENT_REQ_S = 16.0
"""Above it the durations that a client measures are partly its own backlog."""
TRIED = (
    ("first_use_ms", (0.0, 50.0, 100.0, 150.0, 200.0, 225.0, 250.0, 275.0, 300.0, 350.0)),
    ("output_ms", (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08)),
)
"""Values tried, in turn and the first again: the effects of what follows each other are far from linear."""


def fit_frontend(profile: Profile, runs: Sequence[MeasuredRun]) -> FrontEndSpec:
    """The front end of a profile; its `scrape_interval_s` is the runs'.

    Uses runs that are not starved: for scrapes those with the metric `scrape_s`, the mean duration of a scrape in the
    last sixth; for the rest light ones.
    """
    kept_up = [run for run in runs if run.ok and not run.starved]
    polled = [
        run for run in kept_up
        if "scrape_s" in run.metrics and run.rates.sum() < FASTEST_CLIENT_REQ_S
    ]  # fmt: skip
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
        """Error of mean and median TTFT with the work per request that suits the medians; and that front end."""
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
    """Non-negative least squares of relative errors of the scrapes' durations."""
    measured = np.array(measured_s) * 1e3
    design = np.array([[1.0, sim.metric_series, sim.metric_names] for sim in sims]) / measured[:, None]
    found = non_negative(design, np.ones(len(measured)))
    names = ("scrape_base_ms", "scrape_per_series_ms", "scrape_per_name_ms")
    return {name: float(f"{value:.4g}") for name, value in zip(names, found, strict=True)}
