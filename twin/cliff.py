"""The probability that a server fails within the run, and the load at which it reaches 5 %.

A server fails if it starves, or if its queue grows for as long as requests come. Near its limit that is a matter of
chance: slots that are nearly all in use have two states at the same load, one with short steps and one in which every
step loads adapters. A run falls from the first state into the second at some time, or not at all.

Every seed has its own threshold, the load factor from which on the server fails. Logarithms of thresholds are assumed
to be normally distributed. Student's predictive distribution, which allows for the small number of seeds, gives the
load at which a further run fails with a given probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packer import checks
from packer.arrays import FloatArray
from packer.profile import Profile
from packer.progress import Progress, silent
from packer.search import reach
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.twin.threads import in_threads
from packer.workload import Workload

STEP = 1.01  # Ratio of the load factors between which a threshold is searched.
LOWEST, HIGHEST = 0.1, 4.0  # Range of the load factors that are tried.
PROBABILITY = 0.05  # Probability of a failure at the load factor that is searched.
SEEDS = 6
_CONFIDENCE = 0.95
# A threshold lies anywhere within a step: the variance of a uniform distribution over its width.
_ROUNDING_VARIANCE = math.log(STEP) ** 2 / 12.0


@dataclass(frozen=True, slots=True)
class Chance:
    """A probability, estimated as a share of `runs`, and its 95 % interval (Clopper and Pearson)."""

    probability: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True, slots=True)
class Cliff:
    """The load factor at which a run fails with `probability`; `low` and `high`: the 95 % interval of that factor.
    `at_least`: no run failed up to `HIGHEST`, which is then the load factor. `runs`: number of simulations."""

    probability: float
    load_factor: float
    low: float
    high: float
    seeds: int
    runs: int
    at_least: bool = False


def fails(sim: Run) -> bool:
    """Whether the server starves, or its queue grows for as long as requests come; a memory error is a failure."""
    return sim.starved or not sim.stable


def chance(simulations: Sequence[Run]) -> Chance:
    """The probability that a run fails, from simulations that differ by their seeds only."""
    return share(sum(map(fails, simulations)), len(simulations))


def share(failures: int, runs: int) -> Chance:
    """The probability of failure, estimated from `failures` of `runs`."""
    from scipy.special import betaincinv

    tail = (1.0 - _CONFIDENCE) / 2.0
    low = float(betaincinv(failures, runs - failures + 1, tail)) if failures else 0.0
    high = float(betaincinv(failures + 1, runs - failures, 1.0 - tail)) if failures < runs else 1.0
    return Chance(failures / runs, low, high, runs)


def cliff(
    workload: Workload, profile: Profile, *, max_loras: int, seeds: int = SEEDS, seed: int = 0, jobs: int = 1,
    progress: Progress = silent, **settings: Any,
) -> Cliff | None:  # fmt: skip
    """The load factor at which a run of this server fails with the probability `PROBABILITY`.

    `workload`, `profile`, `max_loras`, `settings`: as `packer.twin.simulate.simulate` takes them; every rate is
    multiplied by the load factor.
    `seeds`: number of thresholds, at least 2; each takes three to five simulations, the first one ten.
    `jobs`: threads, -1 for one per core; the answer does not depend on it.
    Returns None for a replayed trace, and for a server that fails at any load (a memory error).
    """
    checks.integer("seeds", seeds, low=2, high=10_000)
    if workload.arrivals.trace is not None:
        return None

    def failed(factor: float, run_seed: int) -> bool:
        fleet = workload if factor == 1.0 else workload.scaled(factor)
        return fails(simulate(fleet, profile, max_loras=max_loras, seed=run_seed, **settings))

    return cliff_of(failed, range(seed, seed + seeds), jobs=jobs, progress=progress)


def cliff_of(
    failed: Callable[[float, int], bool], seeds: Sequence[int], *, jobs: int = 1, progress: Progress = silent
) -> Cliff | None:
    """`cliff` of any `failed(factor, seed)`, which says whether a run at a load factor with a seed fails."""
    lowest, highest = _level(LOWEST), _level(HIGHEST)

    def threshold(run_seed: int, start: int) -> tuple[int, int]:
        """Return the lowest level that fails, and the number of runs."""
        tried: list[int] = []

        def holds(level: int) -> bool:
            tried.append(level)
            return not failed(STEP**level, run_seed)

        return reach(holds, lowest, highest, start, 2)[1], len(tried)

    level, runs = threshold(seeds[0], 0)
    levels = [level]
    progress("load factors", 1, len(seeds))
    if level == lowest:
        return None
    for found, took in in_threads(lambda each: threshold(each, levels[0] - 1), seeds[1:], jobs):
        levels.append(found)
        runs += took
        progress("load factors", len(levels), len(seeds))
    if min(levels) > highest:
        return Cliff(PROBABILITY, HIGHEST, HIGHEST, HIGHEST, len(seeds), runs, at_least=True)
    # The threshold lies between the lowest level that fails and the one below it.
    factor, low, high = _quantile(math.log(STEP) * (np.array(levels) - 0.5))
    return Cliff(PROBABILITY, factor, low, min(high, HIGHEST), len(seeds), runs)


def _level(factor: float) -> int:
    return round(math.log(factor) / math.log(STEP))


def _quantile(thresholds: FloatArray) -> tuple[float, float, float]:
    """Return the factor below which a further threshold lies with `PROBABILITY`, and the quantile's 95 % interval.
    `thresholds` (n,): logarithms, n >= 2. By Student's predictive distribution; the interval by the noncentral t
    distribution (G. J. Hahn and W. Q. Meeker, Statistical Intervals, 1991, section 4.4)."""
    from scipy.special import nctdtrit, ndtri, stdtrit

    n = len(thresholds)
    mean = float(thresholds.mean())
    sd = math.sqrt(float(thresholds.var(ddof=1)) + _ROUNDING_VARIANCE)
    predicted = float(stdtrit(n - 1, PROBABILITY)) * math.sqrt(1.0 + 1.0 / n)
    tail, shift = (1.0 - _CONFIDENCE) / 2.0, -float(ndtri(PROBABILITY)) * math.sqrt(n)
    far, close = (float(nctdtrit(n - 1, shift, p)) / math.sqrt(n) for p in (1.0 - tail, tail))
    return math.exp(mean + predicted * sd), math.exp(mean - far * sd), math.exp(mean - close * sd)
