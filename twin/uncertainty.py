"""How much of a simulated figure is chance: several seeds, their mean and its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from packer import checks
from packer.arrays import FloatArray
from packer.io.frames import pl
from packer.progress import Progress, silent
from packer.twin.run import Run
from packer.twin.threads import in_threads
from packer.twin.timeline import SUMMARY

MAX_SEEDS = 10_000
SHARES = (
    "mean_kv_usage", "busy_share", "slo_attainment", "hit_rate", "host_hit_rate", "cold_start_share",
    "prefix_hit_rate", "draft_acceptance",
)  # fmt: skip
"""Metrics that are never above 1."""
T = TypeVar("T")


def repeated(
    run: Callable[[int], T], *, seeds: int, seed: int = 0, jobs: int = -1, progress: Progress = silent
) -> list[T]:
    """Return `run` of each of the seeds `seed`, `seed` + 1, …, in `jobs` threads, -1: one per core."""
    checks.integer("seeds", seeds, low=1, high=MAX_SEEDS)
    return list(in_threads(run, range(seed, seed + seeds), jobs=jobs, progress=progress))


class Interval(NamedTuple):
    """Mean over runs with its Student's t interval (None: too few runs), standard deviation, number of runs."""

    mean: float | None
    low: float | None
    high: float | None
    sd: float | None
    runs: int


def interval(values: FloatArray) -> Interval:
    """Return the interval of the mean of these values, with 95 % confidence; values that are not finite are ignored."""
    from scipy.special import stdtrit

    values = values[np.isfinite(values)]
    n = len(values)
    if n < 2:
        return Interval(float(values[0]) if n else None, None, None, None, n)
    mean, sd = float(values.mean()), float(values.std(ddof=1))
    half = float(stdtrit(n - 1, 0.975)) * sd / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, sd, n)


def interval_of(metric: str, values: FloatArray) -> Interval:
    """Return the interval of the mean of a metric, within the values that it may have."""
    found = interval(values)
    if found.low is not None and not (values < 0.0).any():  # counts and times are not negative
        found = found._replace(low=max(found.low, 0.0))
    if found.high is not None and metric in SHARES:
        found = found._replace(high=min(found.high, 1.0))
    return found


def intervals(simulations: Sequence[Run], metrics: Sequence[str] = SUMMARY) -> pl.DataFrame:
    """Return the mean of each metric over simulations that differ by their seeds, and the interval of the mean.

    Columns: metric; mean; low and high, Student's t interval of the mean; sd, the standard deviation between runs,
    which says how far a single hour may lie from the mean; runs, how many had the metric. A row whose metric no run has
    (nothing completed) holds nulls, and so do intervals of a single run.
    """
    rows = []
    for metric in metrics:
        values = np.array([float(getattr(simulation, metric)) for simulation in simulations])
        rows.append((metric, *interval_of(metric, values)))
    kinds = {"metric": pl.String, **dict.fromkeys(("mean", "low", "high", "sd"), pl.Float64), "runs": pl.Int64}
    return pl.DataFrame(rows, schema=kinds, orient="row")
