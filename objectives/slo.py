"""Fewest GPUs within a latency goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packer import checks
from packer.evaluation import WHOLE_GOAL
from packer.objectives.base import Objective


@dataclass(frozen=True)
class Slo(Objective):
    """Minimise the number of GPUs such that every server keeps the goal: the limits given, or the workload's.

    `stable`: if 1, no server may have a queue that grows for as long as requests arrive.
    """

    stable: bool = False

    name = "slo"

    def __post_init__(self) -> None:
        checks.choice("stable", self.stable, (0, 1))

    @property
    def limits(self) -> Mapping[str, float]:
        """The limits of the goal; without a goal, each adapter may use all of its own limits (`slo_used` <= 1)."""
        return super().limits or WHOLE_GOAL
