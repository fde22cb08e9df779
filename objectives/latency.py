"""Lowest latency on a given number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from packer import checks
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.memo import Memo
from packer.objectives.base import Objective
from packer.workload import Workload

METRICS = ("request", "ttft", "itl")
STATISTICS = ("mean", "worst")


@dataclass(frozen=True)
class Latency(Objective):
    """Minimise TTFT, ITL, or the time of a whole request over the GPUs given.

    `metric`: "request" (mean TTFT + mean ITL × (output tokens − 1)), "ttft" or "itl".
    `statistic`: "mean" over requests (servers are weighted by their request rates), or "worst" over servers.
    """

    metric: str = "request"
    statistic: str = "mean"

    name = "latency"
    minimises = "latency"
    fixed_gpus = True

    def __post_init__(self) -> None:
        checks.choice("metric", self.metric, METRICS)
        checks.choice("statistic", self.statistic, STATISTICS)

    @property
    def figures(self) -> Collection[str]:
        """TTFT, ITL or both."""
        needed = ("mean_ttft_ms", "mean_itl_ms")
        return needed if self.metric == "request" else (f"mean_{self.metric}_ms",)

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(chosen statistic, other statistic) of the chosen latency, ms; 0 without requests, inf without answers."""
        if not bins:
            return ()
        known = _TRAFFIC(workload)
        rates, tokens = np.array([known(item.adapters, item.shares) for item in bins]).T
        ttft_ms, itl_ms = evaluations.mean_ttft_ms, evaluations.mean_itl_ms
        gaps = np.maximum(tokens, 1.0) - 1.0
        latency = {"request": ttft_ms + itl_ms * gaps, "ttft": ttft_ms, "itl": itl_ms}[self.metric]
        latency = np.where(evaluations.idle, 0.0, np.where(np.isnan(latency), np.inf, latency))
        mean, worst = float((latency * rates).sum() / rates.sum()), float(latency.max())
        return (mean, worst) if self.statistic == "mean" else (worst, mean)


def _traffic_of(workload: Workload, adapters: tuple[int, ...], shares: tuple[float, ...]) -> tuple[float, float]:
    """Requests per second of a bin, and their mean output tokens."""
    index = list(adapters)
    rates = workload.rates[index] * np.array(shares)
    # np.average takes three times as long.
    return rates.sum(), (workload.mean_output_tokens[index] * rates).sum() / rates.sum()


# A search compares thousands of plans that differ in two bins.
_TRAFFIC: Memo[Workload, Callable[..., tuple[float, float]]] = Memo(
    lambda workload: lru_cache(2048)(partial(_traffic_of, workload))
)
