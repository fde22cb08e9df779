"""Fit of the front end: what /metrics costs, what a request costs, what the first use of an adapter costs.

The duration of a scrape is linear in the series and names that the twin counts by then; the rest is read off the
TTFT of light runs, where hardly anything else is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.profile import FrontEndSpec, Profile
from packer.twin.fit.runs import simulate_run, stratified
from packer.twin.fit.tables import Run
from packer.twin.result import Simulation
from packer.twin.scores import smape
from packer.twin.threads import in_threads

RUNS = 48
SEED = 2000
LATE = 11 / 12
"""Part of a run after which its last scrapes lie: the middle of the last sixth."""
FASTEST_CLIENT_REQ_S = 16.0
"""Above it the durations that a client measures are its own backlog."""
FIRST_USE_MS = (0.0, 50.0, 100.0, 150.0, 200.0, 300.0, 400.0, 500.0)
"""Values tried for the first use of an adapter: its effect is far from linear where first uses follow each other."""


def fit_frontend(
    profile: Profile, runs: Sequence[Run], *, max_outstanding: int | None, threads: int
) -> FrontEndSpec:
    """The front end of a profile whose `scrape_interval_s` is that of the runs.

    Uses runs that are not starved and have the metric `scrape_s`, the mean duration of a scrape in the last sixth.
    """
    usable = [
        run for run in runs
        if run.ok and not run.starved and "scrape_s" in run.metrics and run.rates.sum() < FASTEST_CLIENT_REQ_S
    ]  # fmt: skip
    chosen = stratified(usable, RUNS, SEED)
    light = [run for run in chosen if run.regime == "light"]

    def simulated(some: Sequence[Run], frontend: FrontEndSpec) -> list[Simulation]:
        server = replace(profile, frontend=frontend)

        def one(k: int) -> Simulation:
            return simulate_run(some[k], server, seed=SEED + k, max_outstanding=max_outstanding)

        return list(in_threads(one, range(len(some)), threads))

    spec = FrontEndSpec(scrape_interval_s=profile.frontend.scrape_interval_s)
    early = [replace(run, duration_s=LATE * run.duration_s) for run in chosen]
    spec = replace(spec, **_scrape_costs(simulated(early, spec), [run.metrics["scrape_s"] for run in chosen]))
    if not light:
        return spec
    median, mean = ([run.metrics[name] for run in light] for name in ("ttft_median_ms", "ttft_mean_ms"))
    without = simulated(light, spec)
    request_ms = float(np.median(np.array(median) - [sim.median_ttft_ms for sim in without]))
    spec = replace(spec, request_ms=round(max(request_ms, 0.0), 2))
    tried = [replace(spec, first_use_ms=ms) for ms in FIRST_USE_MS]
    errors = [
        smape((sim.mean_ttft_ms, ms) for sim, ms in zip(simulated(light, one), mean, strict=True))
        for one in tried
    ]
    return tried[int(np.argmin(errors))]


def _scrape_costs(sims: Sequence[Simulation], measured_s: Sequence[float]) -> dict[str, float]:
    """Non-negative least squares of relative errors of the scrapes' durations."""
    from scipy.optimize import nnls

    measured = np.array(measured_s) * 1e3
    design = np.array([[1.0, sim.metric_series, sim.metric_names] for sim in sims]) / measured[:, None]
    scale = np.maximum(np.linalg.norm(design, axis=0), 1e-12)
    found, _ = nnls(design / scale, np.ones(len(measured)))
    names = ("scrape_base_ms", "scrape_per_series_ms", "scrape_per_name_ms")
    return {name: float(f"{value:.4g}") for name, value in zip(names, found / scale, strict=True)}
