"""Fewest GPUs within latency limits."""

from __future__ import annotations

from dataclasses import dataclass, fields

from packer import checks
from packer.errors import ValidationError
from packer.objectives.base import Objective


@dataclass(frozen=True)
class Slo(Objective):
    """Minimise the number of GPUs such that each keeps the limits that are given, all in ms."""

    mean_ttft_ms: float | None = None
    median_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    mean_itl_ms: float | None = None
    p99_itl_ms: float | None = None

    name = "slo"

    def __post_init__(self) -> None:
        if not self.limits:
            listed = ", ".join(item.name for item in fields(self))
            raise ValidationError(
                f"The objective 'slo' needs at least one limit (slo:KEY=MS,…) of: {listed}."
            )
        for key, value in self.limits.items():
            checks.real(key, value, low=0.0, open_low=True)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are given."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {key: value for key, value in values.items() if value is not None}
