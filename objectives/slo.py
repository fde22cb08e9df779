"""Fewest GPUs within latency limits."""

from __future__ import annotations

from dataclasses import dataclass, fields

from packer import checks
from packer.objectives.base import Objective


@dataclass(frozen=True)
class LatencyLimits(Objective):
    """An objective with limits of the latencies of each GPU, in ms."""

    mean_ttft_ms: float | None = None
    median_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    mean_itl_ms: float | None = None
    p99_itl_ms: float | None = None

    def __post_init__(self) -> None:
        for key, value in self.limits.items():
            checks.real(key, value, low=0.0, open_low=True)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are given."""
        values = {item.name: getattr(self, item.name) for item in fields(LatencyLimits)}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class Slo(LatencyLimits):
    """Minimise the number of GPUs such that each keeps the limits that are given, all in ms.

    `stable`: 1 if no server may have a queue that grows for as long as requests come.

    Without limits, every adapter (or the share of those of each GPU that `Workload.slo` says) keeps those of its
    workload.
    """

    stable: bool = False

    name = "slo"

    def __post_init__(self) -> None:
        checks.choice("stable", self.stable, (0, 1))
        super().__post_init__()

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are given, or that of how much of its own limits an adapter uses."""
        return super().limits or {"slo_used": 1.0}
