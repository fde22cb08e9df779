"""Plans proposed for one number of GPUs, tried one after the other until one keeps the limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from packer.bin import Bin
from packer.planning.kept import FAR_BEYOND, KeptHours
from packer.planning.settle import TIGHT, is_lost, with_best_slots, with_spare_slots

AT_ONCE = 4  # Number of servers that are simulated at a time to find one that breaks its limits.


@dataclass(eq=False)
class Trial:
    """The best of the proposals so far. `alike`: whether servers may all get the slots of the worst one, as in wide
    fleets (`with_best_slots`)."""

    kept: KeptHours
    spare: int
    over: Callable[[], bool]
    alike: bool = False
    tight: float = TIGHT
    best: list[Bin] = field(default_factory=list)
    holds: bool = False
    tried: list[Sequence[Bin]] = field(default_factory=list)  # Proposals that break the limits, with their slots.
    _worst: float = 1.0  # Used share of limits on the best proposal's worst server, 1 below `FAR_BEYOND`.
    _cost: float = math.inf

    def go_on(self, proposals: Iterable[Sequence[Bin]]) -> None:
        """Try proposals until one keeps the limits, or the time is over."""
        kept, first = self.kept, self.kept.hours[:1]
        for bins in proposals:
            if self.best and not self.spare and self._uses_more(bins):
                continue
            made = with_best_slots(kept, bins, kept.hours, self.over, tight=self.tight, alike=self.alike)
            made = with_spare_slots(kept, made, self.over) if self.spare else made
            self.holds, used = kept.holds(made, self.spare), kept.used(made, first)
            # What a server leaves unused within its limits does not make up for another that breaks its own.
            cost = sum(max(1.0, each) for each in used)
            if self.holds or not self.best or cost < self._cost:
                self.best, self._cost = made, cost
                # breaking limits is better than starving
                self._worst = max(used) if max(used) >= FAR_BEYOND else 1.0
            if self.holds or self.over():
                return
            self.tried.append(made)

    def _uses_more(self, bins: Sequence[Bin]) -> bool:
        """Whether the servers with their best slots break the goal in the first hour, and one uses more than
        `_worst` of its limits."""
        kept, first = self.kept, self.kept.hours[:1]
        order = sorted(bins, key=lambda item: -item.offered_tok_s(kept.workload))
        made, used = list[Bin](), list[float]()
        for k in range(0, len(order), AT_ONCE):
            some = with_best_slots(kept, order[k : k + AT_ONCE], first, self.over)
            made, used = made + some, used + kept.used(some, first)
            if max(used) > self._worst and is_lost(kept, made, used):
                return True
        return False
