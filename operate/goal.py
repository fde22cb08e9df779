"""The latency goal that every adapter of a plan is meant to keep."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.errors import ValidationError, shown
from packer.twin.result import Simulation

FEW_REQUESTS = 20
"""With fewer completed requests than this, an adapter's 95th percentile is that of its server."""


@dataclass(frozen=True)
class LatencyGoal:
    """Limits for each adapter, ms: the 95th percentile of its TTFT, and its mean ITL."""

    p95_ttft_ms: float = 2000.0
    mean_itl_ms: float = 100.0

    def __post_init__(self) -> None:
        for each in fields(self):
            checks.real(each.name, getattr(self, each.name), low=0.0, open_low=True)

    @classmethod
    def parse(cls, text: str) -> LatencyGoal:
        """From "p95_ttft_ms=2000,mean_itl_ms=100"; what is not named keeps its default."""
        names = [each.name for each in fields(cls)]
        given: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                given[name.strip()] = float(value)
            except ValueError:
                name = ""
            if name.strip() not in names:
                raise ValidationError(
                    f"Expected a latency goal as {names[0]}=2000,{names[1]}=100, got {shown(text)}."
                )
        return cls(**given)

    def __str__(self) -> str:
        return f"p95 TTFT <= {_seconds(self.p95_ttft_ms)} and mean ITL <= {self.mean_itl_ms:g} ms"

    def used(self, sim: Simulation) -> npt.NDArray[np.float64]:
        """How much of the goal each adapter uses, float64 (m,): 1 is all of it, more breaks it.

        Infinite where the server does not start, starves or has a queue that grows.
        """
        if sim.status != "ok" or sim.starved or not sim.stable:
            return np.full(len(sim.workload), math.inf)
        ttft = adapter_p95_ttft_ms(sim) / self.p95_ttft_ms
        itl = np.nan_to_num(sim.adapter_mean_itl_ms, nan=0.0) / self.mean_itl_ms
        worst: npt.NDArray[np.float64] = np.maximum(ttft, itl)
        return worst


def adapter_p95_ttft_ms(sim: Simulation) -> npt.NDArray[np.float64]:
    """The 95th percentile of each adapter's TTFT, ms, float64 (m,); 0 without a completed request.

    An adapter with fewer than `FEW_REQUESTS` has no 95th percentile of its own: it gets that of all requests of
    its server, or its mean where that is higher.
    """
    if sim.raw is None:
        return np.full(len(sim.workload), math.nan)
    done = sim.raw.requests.adapter[sim.raw.finished]
    number = np.bincount(done, minlength=len(sim.workload))
    everyone = float(np.quantile(sim.ttft_ms, 0.95)) if len(done) else 0.0
    mean = np.nan_to_num(sim.adapter_mean_ttft_ms, nan=0.0)
    own = np.nan_to_num(sim.adapter_p95_ttft_ms, nan=0.0)
    pooled = np.where(number > 0, np.maximum(mean, everyone), 0.0)
    found: npt.NDArray[np.float64] = np.where(number >= FEW_REQUESTS, own, pooled)
    return found


def _seconds(value_ms: float) -> str:
    return f"{value_ms / 1000:g} s" if value_ms >= 1000 else f"{value_ms:g} ms"
