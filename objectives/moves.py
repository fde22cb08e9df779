"""Replanning: fewest GPUs, then fewest adapters moved away from where they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.objectives.base import Objective
from packer.profile import Profile
from packer.workload import Workload


@dataclass(frozen=True)
class Moves(Objective):
    """Minimise the number of GPUs, then the adapters that must move.

    `old`: the running bins, in indices of the new workload.
    """

    old: tuple[Bin, ...] = field(default=(), repr=False)

    name = "moves"

    def anchored(self, old: Sequence[Bin]) -> Moves:
        """The same objective, staying close to these bins."""
        return Moves(tuple(old)).within(self.goal)

    def supports(self, _profiles: Sequence[Profile]) -> str | None:
        """It needs a running plan."""
        return None if self.old else "it needs a running plan: packer solve WORKLOAD --from PLAN"

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(GPUs, adapters moved)."""
        return (float(sum(item.gpus for item in bins)), float(len(moved(self.old, bins))))

    def attained(self, key: tuple[float, ...], bound: float) -> bool:
        """Whether there are as few GPUs as possible and nothing moves."""
        return key[0] <= bound + 1e-9 and not any(key[1:])


def match(old: Sequence[Bin], new: Sequence[Bin]) -> dict[int, int]:
    """Which running server becomes which new bin, new → old, so that most adapters stay in place.

    Maximum-weight bipartite matching over bins of equal GPU type; pairs that keep no adapter are left out.
    """
    from scipy.optimize import linear_sum_assignment

    home = {i: k for k, item in enumerate(old) for i in item.adapters}
    if not old or not new:
        return {}
    kept = np.zeros((len(new), len(old)))
    for k, item in enumerate(new):
        for i in item.adapters:
            if i in home and old[home[i]].profile == item.profile:
                kept[k, home[i]] += 1
    rows, columns = linear_sum_assignment(-kept)
    pairs = zip(rows.tolist(), columns.tolist(), strict=True)
    return {k: j for k, j in pairs if kept[k, j] > 0}


def moved(old: Sequence[Bin], new: Sequence[Bin]) -> list[int]:
    """Adapters that ran before and run elsewhere now, sorted; new adapters don't count."""
    becomes = match(old, new)
    places: dict[int, set[int]] = {}
    for j, item in enumerate(old):
        for i in item.adapters:
            places.setdefault(i, set()).add(j)
    gone = {
        i
        for k, item in enumerate(new)
        for i in item.adapters
        if i in places and becomes.get(k) not in places[i]
    }
    return sorted(gone)
