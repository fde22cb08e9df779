"""Fewest GPUs on which a fleet holds at the rates of several periods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packer.objectives.base import Scenario
from packer.objectives.headroom import with_rates
from packer.objectives.moves import FewestMoves
from packer.workload import Workload


@dataclass(frozen=True, eq=False)
class AllDay(FewestMoves):
    """Fewest GPUs on which nothing starves at any of several rates, then fewest adapters moved.

    `rates`: rates of the adapters by name, req/s, by period.
    """

    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    name = "all-day"
    limits_all = True

    @property
    def symmetric(self) -> bool:
        """Adapters of equal mean rate may differ in their rates by period."""
        return False

    def fleet(self, workload: Workload) -> Workload:
        """The fleet as it is: the goal is that of servers, and the workload has its own for adapters."""
        return workload

    def supports(self, _profiles: Sequence[Any]) -> str | None:
        """It needs no running plan."""
        return None

    def scenarios(self, workload: Workload) -> Sequence[Scenario]:
        """The fleet at the rates of each period, the busiest first."""
        found = []
        for period, rates in self.rates.items():
            fleet = with_rates(workload, np.array([rates[name] for name in workload.names]))
            found.append(Scenario(fleet, name=f"at {period!r}"))
        return sorted(found, key=lambda each: -each.workload.offered_tok_s)
