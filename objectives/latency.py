"""Lowest latency on a given number of GPUs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from packer import checks
from packer.bin import Bin, indices
from packer.evaluation import Evaluations
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
        return self.keys(workload, [bins], evaluations)[0]

    def keys(
        self, workload: Workload, plans: Sequence[Sequence[Bin]], evaluations: Evaluations
    ) -> list[tuple[float, ...]]:
        """`key` of each plan."""
        if not (plans and all(plans)):
            return [()] * len(plans)
        once = {id(item): item for bins in plans for item in bins}  # plans of a search differ in two bins
        traffic = dict(zip(once, _traffic(workload, list(once.values())), strict=True))
        rates, tokens = np.array([[traffic[id(item)] for item in bins] for bins in plans]).transpose(2, 0, 1)
        ttft_ms, itl_ms = evaluations.mean_ttft_ms, evaluations.mean_itl_ms
        gaps = np.maximum(tokens, 1.0) - 1.0
        latency = {"request": ttft_ms + itl_ms * gaps, "ttft": ttft_ms, "itl": itl_ms}[self.metric]
        latency = np.where(evaluations.idle, 0.0, np.where(np.isnan(latency), np.inf, latency))
        latency = np.broadcast_to(latency, rates.shape)
        mean, worst = (latency * rates).sum(axis=1) / rates.sum(axis=1), latency.max(axis=1)
        first, second = (mean, worst) if self.statistic == "mean" else (worst, mean)
        return list(zip(first.tolist(), second.tolist(), strict=True))


def _traffic(workload: Workload, bins: Sequence[Bin]) -> list[tuple[float, float]]:
    """Requests per second of each bin, and their mean output tokens."""
    start = np.cumsum([0, *(len(item.adapters) for item in bins[:-1])])
    index = np.concatenate([indices(item.adapters) for item in bins])
    rates = workload.rates[index]
    if any(item.is_split for item in bins):
        rates *= np.concatenate([item.shares for item in bins])
    total = np.add.reduceat(rates, start)
    tokens = np.add.reduceat(workload.mean_output_tokens[index] * rates, start)
    return list(zip(total.tolist(), (tokens / total).tolist(), strict=True))
