"""Replanning: fewest GPUs, then fewest adapters moved away from where they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.moves import moved
from packer.objectives.base import Objective
from packer.profile import Profile
from packer.workload import Workload


@dataclass(frozen=True)
class FewestMoves(Objective):
    """Minimise the number of GPUs, then the adapters that must move.

    `old`: the running bins, in indices of the new workload.
    """

    old: tuple[Bin, ...] = field(default=(), repr=False)

    name = "moves"

    def anchored(self, old: Sequence[Bin]) -> Self:
        """The same objective, staying close to these bins."""
        return replace(self, old=tuple(old)).within(self.goal)

    def supports(self, _profiles: Sequence[Profile]) -> str | None:
        """It needs a running plan."""
        return None if self.old else "it needs a running plan of this fleet: packer solve WORKLOAD --from PLAN"

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(GPUs, adapters moved)."""
        return (float(sum(item.gpus for item in bins)), float(len(moved(self.old, bins))))

    def attained(self, key: tuple[float, ...], bound: float) -> bool:
        """Whether there are as few GPUs as possible and nothing moves."""
        return key[0] <= bound + 1e-9 and not any(key[1:])
