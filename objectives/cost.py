"""Lowest price per hour, with several GPU types to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.objectives.base import Objective
from packer.profile import Profile
from packer.workload import Workload


@dataclass(frozen=True)
class Cost(Objective):
    """Minimise the price of all GPUs per hour, then their number."""

    name = "cost"
    minimises = "price"

    def supports(self, profiles: Sequence[Profile]) -> str | None:
        """Every GPU type needs a price."""
        free = [profile.name for profile in profiles if profile.gpu.price_per_hour is None]
        if free:
            return f"it needs a price (--price, or gpu.price_per_hour in the profile) of {', '.join(map(repr, free))}"
        return None

    def attained(self, key: tuple[float, ...], bound: float) -> bool:
        """Whether no price is lower; the number of GPUs only breaks ties."""
        return key[0] <= bound + 1e-9

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(price per hour, GPUs)."""
        return (sum(self.weight(item.profile) for item in bins), float(sum(item.gpus for item in bins)))
